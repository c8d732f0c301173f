"""A run: its folder, its data and its task, the same in every process."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foci import __version__
from foci.runtime.console import format_count
from foci.tasks import find_task
from foci.tasks.task import Task
from foci.training.batches import Batches, seeded_generator
from foci.training.checkpoint import write_text_atomically
from foci.training.config import RunConfig, read_config
from foci.training.distributed import Processes

READ_CHUNK_BYTES = 2**24
# How many updates several processes do before they ask each other whether to stop.
STOP_CHECK_STEPS = 16


@dataclass(frozen=True)
class Run:
    """All that a training needs and does not change."""

    config: RunConfig
    folder: Path
    processes: Processes
    task: Task[Any, Any]
    train: Sequence[Any]
    dev: Sequence[Any]
    total: int  # updates
    messages: list[str]  # what to say before it begins
    about: dict[str, Any] | None  # what run.json is to say; None where it is there, or somebody else writes it

    def begin(self) -> None:
        """Writes what makes the folder a run's: after the first update, so that what cannot start leaves no run."""
        if self.about is not None:
            check_directory_unused(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text_atomically(self.folder / "config.toml", self.config.from_anywhere().to_toml())
            write_text_atomically(self.folder / "run.json", json.dumps(self.about, ensure_ascii=False))

    def agreed(self, step: int, wishes: tuple[bool, bool]) -> tuple[bool, bool]:
        """What the first process wishes; several ask each other only now and then, because asking takes time."""
        if self.processes.world == 1:
            return wishes
        return self.processes.from_first(wishes) if step % STOP_CHECK_STEPS == 0 else (False, False)


def prepare_run(config: RunConfig, folder: Path, processes: Processes, *, resume: bool) -> Run:
    """Begins a run in a folder that has none, or goes on with the one that it has."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"expected a folder for the run, but {folder} is a file")
    if not resume:
        check_directory_unused(folder)
    elif not (folder / "run.json").exists():
        raise ValueError(f"expected a run to resume in {folder}, but there is none")
    else:
        check_data_exists(config, folder)
    train, dev = read_train_and_dev(config)
    about = (
        (read_run_description(config, folder) if resume else describe_new_run(config, train))
        if processes.first
        else None
    )
    task = find_task(config.task).from_files(config.settings, processes.from_first(about and about["files"]))
    messages: list[str] = []
    train, dev = (drop_long_examples(task, part, name, messages) for name, part in (("train", train), ("dev", dev)))
    if not train or not dev:
        raise ValueError(f"expected examples to train on and to measure with, but got {len(train)} and {len(dev)}")
    source = Batches(task, train, config.train.batch_tokens, config.train.accumulate, 0, processes.world, config.seed)
    per_epoch = len(source.epoch(0)[1])
    total = config.train.steps or math.ceil(config.train.epochs * per_epoch)
    examples, updates = format_count(len(train), "example"), format_count(per_epoch, "update")
    messages.append(f"{examples} to train on, {len(dev):,} to measure with; {updates} an epoch")
    if config.train.warmup >= total:
        warmup = format_count(config.train.warmup, "update")
        messages.append(f"the warm-up takes {warmup}, all of this training's {total:,}: the rate only rises")
    return Run(config, folder, processes, task, train, dev, total, messages, None if resume else about)


def check_directory_unused(folder: Path) -> None:
    if (folder / "run.json").exists():
        raise ValueError(f"{folder} has a run already: --resume goes on with it, --out names another folder")
    if (folder / "checkpoints").exists():
        # A new run would begin where they end.
        raise ValueError(f"{folder} has checkpoints of a run, but no run.json: --out names another folder")


def read_train_and_dev(config: RunConfig) -> tuple[Sequence[Any], Sequence[Any]]:
    """The train and the dev part, read anew each time: their order depends on the files and the seed alone."""
    kind = find_task(config.task)
    if not config.data:
        raise ValueError("expected the data to train on (--data), but got none")
    train = kind.read([Path(each) for each in config.data], config.settings)
    if config.dev:
        return train, kind.read([Path(each) for each in config.dev], config.settings)
    return kind.split(train, config.train.dev_share, seeded_generator(config.seed, "dev"))


def check_data_exists(config: RunConfig, folder: Path) -> None:
    """Refuses a run whose data has moved."""
    for each in (*config.data, *config.dev):
        if not Path(each).exists():
            raise ValueError(f"expected the data of {folder} at {each}, but there is nothing: --data says where it is")


def read_dev_examples(folder: Path) -> Sequence[Any]:
    """The dev part of the run in a folder."""
    if not (folder / "config.toml").is_file():
        raise ValueError(f"expected data to measure with (--data), because {folder} is no run that has its own")
    config = read_config(None, folder / "config.toml")
    check_data_exists(config, folder)
    return read_train_and_dev(config)[1]


def describe_new_run(config: RunConfig, train: Sequence[Any]) -> dict[str, Any]:
    """What a run is, with what the task learns from the train part before the first update."""
    files = find_task(config.task).start(config.settings, train).files()
    versions = {"foci": __version__, "torch": torch.__version__, "python": platform.python_version()}
    data = fingerprint_data(config)
    return {"task": config.task, "seed": config.seed, "versions": versions, "data": data, "files": files}


def read_run_description(config: RunConfig, folder: Path) -> dict[str, Any]:
    """The same of a run that is resumed, as it is in its folder."""
    content: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    same = fingerprint_data(config)
    # It may have been moved, but is the same.
    if list(content["data"].values()) != list(same.values()):
        raise ValueError(f"expected the data that {folder} began with, but the files have changed: {', '.join(same)}")
    return content


def fingerprint_data(config: RunConfig) -> dict[str, str]:
    """A hash of every file of the data; of a folder one of the names and sizes of what is in it."""
    return {name: fingerprint_path(Path(name)) for name in (*config.data, *config.dev)}


def fingerprint_path(path: Path) -> str:
    total = hashlib.sha256()
    if path.is_dir():
        for each in sorted(path.rglob("*")):
            total.update(f"{each.relative_to(path)} {each.stat().st_size}\n".encode())
        return total.hexdigest()
    with path.open("rb") as file:
        while chunk := file.read(READ_CHUNK_BYTES):
            total.update(chunk)
    return total.hexdigest()


def drop_long_examples(task: Task[Any, Any], examples: Sequence[Any], part: str, messages: list[str]) -> Sequence[Any]:
    """Without those that are longer than the task takes, of which a message tells."""
    if task.longest is None:
        return examples
    kept = [example for example in examples if task.size(example) <= task.longest]
    if len(kept) < len(examples):
        left = len(examples) - len(kept)
        are = "is" if left == 1 else "are"
        messages.append(f"{left:,} of {len(examples):,} {part} examples {are} longer than {task.longest}: left out")
    return kept

"""Prepares a run: run directory, data and task, the same in every process."""

from __future__ import annotations

import hashlib
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foci import __version__
from foci.runtime.console import format_count
from foci.runtime.durable_files import (
    READ_CHUNK_BYTES,
    checksum_file,
    read_checked_json,
    write_checked_json,
    write_text_atomically,
)
from foci.tasks import find_task
from foci.tasks.task import Task
from foci.training.advice import describe_filled, find_run_warnings
from foci.training.batches import Batches, seeded_generator
from foci.training.config import RunConfig, read_config
from foci.training.defaults import MAX_BATCH_TOKENS, count_steps, fill_train_config
from foci.training.distributed import Processes

# Number of steps between two agreements of several processes on whether to stop; a broadcast at every step takes time.
STOP_CHECK_STEPS = 16


@dataclass(frozen=True)
class Run:
    """Everything that a training run needs and does not change."""

    config: RunConfig
    folder: Path
    processes: Processes
    task: Task[Any, Any]
    train: Sequence[Any]
    dev: Sequence[Any]
    total: int  # optimizer steps
    messages: list[str]  # printed before the training starts
    resumed: bool
    description: dict[str, Any] | None  # content of run.json; None if it exists or another process writes it

    def write_description(self) -> None:
        """Writes config.toml and run.json; called after the first step, so that a failed start leaves no run."""
        if self.description is not None:
            check_directory_unused(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            config = self.folder / "config.toml"
            write_text_atomically(config, self.config.with_absolute_paths().to_toml())
            write_checked_json(self.folder / "run.json", self.description | {"config": checksum_file(config)})

    def agree_on_stop(self, step: int, reasons: tuple[bool, bool]) -> tuple[bool, bool]:
        """Returns the first process's stop reasons (interrupted, out of time), so that all stop at the same step."""
        if self.processes.world == 1:
            return reasons
        return self.processes.broadcast(reasons) if step % STOP_CHECK_STEPS == 0 else (False, False)


def prepare_run(config: RunConfig, folder: Path, processes: Processes, *, resume: bool) -> Run:
    """Prepares a new run in an unused directory, or the run that the directory holds if `resume`."""
    description: dict[str, Any] | None = None
    if not resume:
        check_directory_unused(folder)
    else:
        check_data_exists(config, folder)
        description = read_run_description(folder)
        if processes.is_first:
            check_unchanged(config, folder, description)
            remove_partial_files(folder)
    train, dev = read_train_and_dev(config)
    given, kind = config, find_task(config.task)
    config = replace(config, settings=kind.fill_settings(config.settings, train))
    if not resume and processes.is_first:
        description = describe_new_run(config, train)
    files = processes.broadcast(description and description["files"])
    task = kind.from_learned_state(config.settings, files)
    messages: list[str] = []
    train, dev = (drop_long_examples(task, part, name, messages) for name, part in (("train", train), ("dev", dev)))
    if not train or not dev:
        raise ValueError(f"the data must hold training and dev examples, got {len(train)} and {len(dev)}")
    source = Batches(task, train, MAX_BATCH_TOKENS, config.train.accumulate, 0, processes.data_world, config.seed)
    filled, per_epoch = fill_train_config(config.train, source)
    config, total = replace(config, train=filled), count_steps(filled, per_epoch)
    examples, steps = format_count(len(train), "example"), format_count(per_epoch, "step")
    messages.append(f"{examples} for training, {len(dev):,} for dev; {steps} per epoch, {total:,} in all")
    messages += [
        *describe_filled(given, config),
        *find_run_warnings(filled, total, count_dev_examples(task, dev)),
        *task.find_warnings(dev),
    ]
    return Run(config, folder, processes, task, train, dev, total, messages, resume, None if resume else description)


def count_dev_examples(task: Task[Any, Any], dev: Sequence[Any]) -> int:
    """Counts what is evaluated: the examples, or the windows of a text."""
    return len(task.epoch_examples(dev, False, seeded_generator("evaluation")))


def check_directory_unused(folder: Path) -> None:
    """Raises ValueError if a run was started in the directory."""
    if (folder / "run.json").exists():
        raise ValueError(f"{folder} already holds a run: use --resume to continue it, or --out for another directory")
    if (folder / "checkpoints").exists():
        # They would mix with those of a new run.
        raise ValueError(f"{folder} holds checkpoints but no run.json: use --out for another directory")


def remove_partial_files(folder: Path) -> None:
    """Deletes what a killed training was writing; the directory is locked, so that no other process writes in it."""
    for path in (path for part in (folder, folder / "best", folder / "checkpoints") for path in part.glob(".*.part")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def read_train_and_dev(config: RunConfig) -> tuple[Sequence[Any], Sequence[Any]]:
    """Reads the training and the dev examples; their order depends only on the files and the seed."""
    kind = find_task(config.task)
    if not config.data:
        raise ValueError("--data must name the training data, got none")
    train = kind.read([Path(each) for each in config.data], config.settings)
    if config.dev:
        return train, kind.read([Path(each) for each in config.dev], config.settings)
    return kind.split(train, config.train.dev_share, seeded_generator(config.seed, "dev"))


def check_data_exists(config: RunConfig, folder: Path) -> None:
    """Raises ValueError if the data of a run has moved."""
    for each in (*config.data, *config.dev):
        if not Path(each).exists():
            raise ValueError(
                f"the data of {folder} must be at {each}, but it does not exist: use --data if it has moved"
            )


def read_dev_examples(folder: Path) -> Sequence[Any]:
    """Reads the dev examples of a run."""
    if not (folder / "config.toml").is_file():
        raise ValueError(f"--data must name the evaluation data, because {folder} is not a run directory")
    config = read_config(None, folder / "config.toml")
    if (folder / "run.json").exists():
        # The seed of a changed config would choose other dev examples, some of them from the training data.
        read_run_description(folder)
    check_data_exists(config, folder)
    return read_train_and_dev(config)[1]


def describe_new_run(config: RunConfig, train: Sequence[Any]) -> dict[str, Any]:
    """Builds the content of run.json, including what the task learns from the training data, such as its vocabulary."""
    files = find_task(config.task).from_examples(config.settings, train).learned_state()
    versions = {"foci": __version__, "torch": torch.__version__, "python": platform.python_version()}
    data = fingerprint_data(config)
    return {"task": config.task, "seed": config.seed, "versions": versions, "data": data, "files": files}


def read_run_description(folder: Path) -> dict[str, Any]:
    """Reads run.json; raises ValueError if it or config.toml is damaged or was changed."""
    if not (folder / "run.json").exists():
        raise ValueError(f"{folder} must be a run directory to resume, got no run.json in it")
    try:
        content = read_checked_json(folder / "run.json")
        if not all(isinstance(content[name], dict) for name in ("files", "data")):
            got = " and ".join(type(content[name]).__name__ for name in ("files", "data"))
            raise ValueError(f"files and data must be JSON objects, got {got}")
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{folder / 'run.json'} must be as the training wrote it, but it is damaged: {error}"
        ) from error
    if checksum_file(folder / "config.toml") != content["config"]:
        raise ValueError(
            f"{folder / 'config.toml'} must be as the training wrote it, but it was changed or damaged: use --set for"
            " [train] settings, --data for data that has moved"
        )
    return content


def check_unchanged(config: RunConfig, folder: Path, description: dict[str, Any]) -> None:
    """Raises ValueError if seed or data differ from the start of the run."""
    if config.seed != description["seed"]:
        raise ValueError(f"seed must be {description['seed']} as at the start of {folder}, got {config.seed}")
    current = fingerprint_data(config)
    # Only the hashes are compared, because the files may have moved.
    if list(description["data"].values()) != list(current.values()):
        raise ValueError(
            f"the data of {folder} must not change, but these files differ from the start: {', '.join(current)}"
        )


def fingerprint_data(config: RunConfig) -> dict[str, str]:
    """Hashes every data file; for a directory, the names and sizes of its files."""
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
    """Drops examples that are longer than the task allows, and adds a message if there are any."""
    if task.max_size is None:
        return examples
    kept = [example for example in examples if task.size(example) <= task.max_size]
    if len(kept) < len(examples):
        dropped = len(examples) - len(kept)
        messages.append(f"dropped {dropped:,} of {len(examples):,} {part} examples longer than {task.max_size}")
    return kept

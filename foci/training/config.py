"""One config per run: a TOML file, changed by `key=value`, saved in the run's folder as it was used."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from foci.nn.config import Config
from foci.tasks import find_task


@dataclass(frozen=True)
class TrainConfig(Config):
    """How a model is trained: [train] in a run's TOML."""

    section = "train"

    epochs: float = 20.0  # how often all examples are seen
    steps: int = 0  # how many updates there are; 0: as many as the epochs take
    minutes: float = 0.0  # stop when so much time has passed; 0: no limit
    batch_tokens: int = 4096  # how much a micro-batch of one process holds, padding counted
    accumulate: int = 1  # how many micro-batches each process adds up for an update
    rate: float = 1e-3  # the highest learning rate
    schedule: Literal["cosine", "inverse_sqrt", "constant"] = "cosine"  # how the rate falls after the warm-up
    warmup: int = 200  # how many updates the rate takes to rise
    floor: float = 0.05  # cosine: the share of the rate that is left at the end
    decay: float = 0.01  # weight decay of AdamW, on matrices
    momentum: float = 0.9  # the first beta of AdamW
    variance: float = 0.98  # the second beta of AdamW
    clip: float = 1.0  # gradients are scaled down to this norm; 0: never
    ema: float = 0.0  # the decay of an average over all updates, which is then what is evaluated; 0: none
    average: int = 1  # of how many of the best evaluated models the last one is the mean
    evaluate_every: int = 500  # updates between two evaluations on the dev part
    patience: int = 10  # stop after so many evaluations without a better one; 0: never
    select: Literal["metric", "loss", "last"] = "metric"  # what the best model is chosen by, on the dev part
    decoded: int = 200  # how many dev examples are answered for the metric; 0: all
    dev_share: float = 0.05  # the share of the examples that becomes the dev part, where none was given
    log_every: int = 50  # updates between two lines
    checkpoint_every: int = 500  # updates between two checkpoints
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one
    precision: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: bfloat16 autocast on cuda, float32 elsewhere
    compile: bool = False  # pass the model to torch.compile, on cuda
    graphs: bool = False  # replay updates as captured CUDA graphs: for small models, where launching takes longest
    shard: bool = False  # several processes: share out weights and optimizer (FSDP2), for large models
    ahead: int = 2  # how many batches are made in advance, on cuda, or by each worker
    workers: int = 0  # processes that make batches, for sound and images that are varied at length; 0: a thread does

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least(
            1, "batch_tokens", "accumulate", "average", "evaluate_every", "log_every", "checkpoint_every"
        )
        self.check_at_least(0, "epochs", "steps", "minutes", "rate", "warmup", "decay", "clip", "patience")
        self.check_at_least(0, "decoded", "ahead", "workers")
        self.check_fractions("floor")
        self.check_fractions("ema", "momentum", "variance", include_one=False)
        if not 0.0 < self.dev_share < 1.0:
            raise ValueError(f"train.dev_share must lie between 0 and 1, but got {self.dev_share!r}")
        if self.graphs and self.shard:
            raise ValueError(
                "a model that is shared out cannot be captured: expected train.graphs or train.shard, but got both"
            )
        if not self.steps and not self.epochs:
            raise ValueError("expected train.steps or train.epochs above 0, but got 0 for both")


@dataclass(frozen=True)
class RunConfig:
    """All of a run: the task, its data, its settings and how it is trained."""

    task: str
    settings: Any  # of the task's settings_type
    train: TrainConfig
    data: tuple[str, ...]  # the files of the train part
    dev: tuple[str, ...] = ()  # those of the dev part; none: a share of the train part
    seed: int = 1

    def from_anywhere(self) -> RunConfig:
        """The same with absolute paths: what a run saves, because it is resumed and measured from other folders too."""
        data, dev = (tuple(str(Path(each).absolute()) for each in part) for part in (self.data, self.dev))
        return replace(self, data=data, dev=dev)

    def to_toml(self) -> str:
        """The file that `read_config` reads."""
        top = format_toml({"seed": self.seed, "data": list(self.data), "dev": list(self.dev)})
        task = format_toml({"name": self.task} | fields_with_values(self.settings))
        return f"{top}\n[task]\n{task}\n[train]\n{format_toml(fields_with_values(self.train))}"


def read_config(
    task: str | None, path: Path | None = None, changes: Sequence[str] = (), **given: Sequence[str] | int | None
) -> RunConfig:
    """The config of a file with single values changed, `task.size=tiny` or `train.rate=0.001`.

    >>> config = read_config("translation", changes=["task.size=tiny", "train.steps=100"], data=["pairs.tsv"])
    >>> config.settings.size, config.train.steps
    ('tiny', 100)
    """
    table = read_toml(path) if path is not None else {}
    for change in changes:
        apply_change(table, change)
    table |= {name: value for name, value in given.items() if value not in (None, [], ())}
    return config_from_table(task, table, str(path or "the config"))


def config_from_table(task: str | None, table: dict[str, Any], place: str) -> RunConfig:
    settings, train = (read_section(table, name, place) for name in ("task", "train"))
    named = settings.pop("name", task)
    if named is None or (task is not None and named != task):
        raise ValueError(f"expected the task {task or 'as task.name'}, but {place} names {named or 'none'}")
    known = {"task", "seed", "data", "dev", "train"}
    unknown = sorted(table.keys() - known)
    if unknown:
        raise ValueError(f"expected the keys {', '.join(sorted(known))} in {place}, but got {', '.join(unknown)}")
    seed = table.get("seed", 1)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"expected a whole number as seed, but got {seed!r}")
    kind = find_task(named).settings_type
    check_keys(kind, settings, "task", named)
    check_keys(TrainConfig, train, "train", named)
    return RunConfig(
        named,
        kind.from_dict(settings),
        TrainConfig.from_dict(train),
        parse_paths(table.get("data", ()), "data"),
        parse_paths(table.get("dev", ()), "dev"),
        seed,
    )


def check_keys(kind: type[Config], given: Iterable[str], section: str, task: str) -> None:
    """Refuses what a section of a task's config does not have, and names what is spelled most like it."""
    known = [field.name for field in fields(kind)]
    for name in given:
        if name not in known:
            near = "".join(f"the nearest is {section}.{each}; " for each in get_close_matches(name, known, 1))
            raise ValueError(f"{section}.{name} is no setting of {task}: {near}foci train {task} --settings lists all")


def read_section(table: dict[str, Any], name: str, place: str) -> dict[str, Any]:
    found = table.get(name, {})
    if not isinstance(found, dict):
        raise ValueError(f"expected [{name}] in {place} to be a table, but got {found!r}")
    return dict(found)


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"expected a config at {path}, but it cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is no TOML: {error}") from error


def apply_change(table: dict[str, Any], change: str) -> None:
    """Changes one value, given as `key=value`; the value is written as in TOML, a word needs no quotes."""
    key, sign, text = change.partition("=")
    if not sign or not key.strip():
        raise ValueError(f"expected key=value, such as train.rate=0.001, but got {change!r}")
    first, dot, name = key.strip().partition(".")
    if not dot:
        table[first] = parse_value(text)
        return
    inner = table.setdefault(first, {})
    if not isinstance(inner, dict):
        raise ValueError(f"expected a key such as task.size or train.rate, but got {key.strip()!r}")
    inner[name] = parse_value(text)


def parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text.strip()


def parse_paths(value: Any, key: str) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(isinstance(each, str) for each in found):
        raise ValueError(f"expected a path or a list of paths as {key}, but got {value!r}")
    return tuple(found)


def fields_with_values(config: Config) -> dict[str, Any]:
    """The fields that have a value: TOML knows no None, and a field that is left out is None again."""
    found = {field.name: getattr(config, field.name) for field in fields(config)}
    return {name: value for name, value in found.items() if value is not None}


def format_toml(table: dict[str, Any]) -> str:
    # What JSON writes of words, numbers, truth values and lists of them is TOML too.
    return "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in table.items())

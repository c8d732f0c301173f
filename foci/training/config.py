"""The config of a run: a TOML file with values changed by `key=value`, saved in the run directory."""

from __future__ import annotations

import json
import re
import reprlib
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from foci.nn.config import SEED_LIMIT, Config
from foci.runtime.limits import MAX_CONFIG_BYTES, MAX_KEY_PARTS
from foci.runtime.spelling import suggest_name
from foci.tasks import find_task
from foci.training.parallel import parse_parallel

# Strings and comments of TOML, and dotted keys outside of them.
TOML_TEXT = re.compile(r"\"{3}(?:\\.|[^\\])*?\"{3}|'{3}.*?'{3}|\"(?:\\.|[^\"\\\n])*\"|'[^'\n]*'|#[^\n]*", re.DOTALL)
DOTTED_KEY = re.compile(r"(?<![\w-])[\w-]++(?:[ \t]*+\.[ \t]*+[\w-]++)+")
# The largest number of steps, tokens or examples that a setting may name.
COUNT_LIMIT = 10**9


@dataclass(frozen=True)
class TrainConfig(Config):
    """How a model is trained: the [train] section of a run's TOML."""

    section = "train"

    epochs: float | None = None  # passes over the training data; None: 20, more if there is little data
    steps: int = 0  # optimizer steps; 0: as many as the epochs take
    minutes: float = 0.0  # time limit; 0: no limit
    batch_tokens: int | None = None  # tokens in a micro-batch of one process; None: from the data, at most 4096
    accumulate: int = 1  # micro-batches that each process accumulates per step
    rate: float = 1e-3  # peak learning rate
    schedule: Literal["cosine", "inverse_sqrt", "constant"] = "cosine"  # decay of the learning rate after the warm-up
    warmup: int | None = None  # steps of linear learning-rate warm-up; None: a tenth of all steps
    floor: float = 0.05  # cosine: final learning rate, as a fraction of the peak
    decay: float = 0.01  # weight decay of AdamW, on matrices only
    momentum: float = 0.9  # beta1 of AdamW
    variance: float = 0.98  # beta2 of AdamW
    clip: float = 1.0  # maximum gradient norm; 0: no clipping
    ema: float = 0.0  # decay of a moving average of the weights, which is evaluated and saved; 0: none
    average: int = 1  # number of best models that are averaged into the final one
    evaluate_every: int | None = None  # steps between evaluations on the dev set; None: a tenth of all, at most 500
    patience: int = 10  # stop after this many evaluations without improvement; 0: never
    select: Literal["metric", "loss", "last"] = "metric"  # what selects the best model, on the dev set
    decoded: int = 200  # dev examples that are decoded for the metric; 0: all
    dev_share: float = 0.05  # fraction of the data held out as dev set if --dev is not given
    log_every: int = 50  # steps between log lines
    checkpoint_every: int = 500  # steps between checkpoints
    monitor: int = 0  # steps between those whose attention statistics are logged, to attention.jsonl too; 0: none
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if available
    precision: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: bfloat16 autocast on cuda, float32 elsewhere
    compile: bool = False  # use torch.compile, on cuda
    graphs: bool = False  # replay steps as CUDA graphs: faster for small models
    shard: bool = False  # several processes: shard weights and optimizer state (FSDP2), for large models
    parallel: str = ""  # several processes: fsdp=2,tp=2,cp=2 shards weights and batches, heads, and tokens
    ahead: int = 2  # batches prepared in advance, on cuda or by each worker
    workers: int = 0  # processes that prepare batches, for costly audio and image augmentation; 0: a thread

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range(
            1, COUNT_LIMIT, "batch_tokens", "accumulate", "evaluate_every", "log_every", "checkpoint_every"
        )
        self.check_range(0, COUNT_LIMIT, "epochs", "steps", "minutes", "warmup", "patience", "decoded", "monitor")
        self.check_range(0, 1000, "rate", "decay")
        self.check_range(0, 10**6, "clip")
        self.check_range(1, 1000, "average")
        self.check_range(0, 1000, "ahead", "workers")
        self.check_fractions("floor")
        self.check_fractions("ema", "momentum", "variance", include_one=False)
        if not 0.0 < self.dev_share < 1.0:
            raise ValueError(f"train.dev_share must be between 0 and 1, exclusive, got {reprlib.repr(self.dev_share)}")
        if self.graphs and self.shard:
            raise ValueError(
                "train.graphs must be false with train.shard, got both: CUDA graphs cannot capture a sharded model"
            )
        if self.parallel:
            parse_parallel(self.parallel)
            for name in ("graphs", "compile", "shard"):
                if getattr(self, name):
                    raise ValueError(f"train.{name} must be false with train.parallel, got both")
        if not self.steps and self.epochs == 0:
            raise ValueError("train.steps or train.epochs must be above 0, got 0 for both")


@dataclass(frozen=True)
class RunConfig:
    """The complete config of a run: task, settings, data and training."""

    task: str
    settings: Any  # an instance of the task's settings_type
    train: TrainConfig
    data: tuple[str, ...]  # paths of the training data
    dev: tuple[str, ...] = ()  # paths of the dev data; empty: a fraction of the training data
    seed: int = 1

    def with_absolute_paths(self) -> RunConfig:
        """Returns the config with absolute paths, so a run can be resumed and evaluated from any directory."""
        data, dev = (tuple(str(Path(each).absolute()) for each in part) for part in (self.data, self.dev))
        return replace(self, data=data, dev=dev)

    def to_toml(self) -> str:
        """Formats the config as the TOML that `read_config` reads."""
        top = format_toml({"seed": self.seed, "data": list(self.data), "dev": list(self.dev)})
        task = format_toml({"name": self.task} | fields_with_values(self.settings))
        return f"{top}\n[task]\n{task}\n[train]\n{format_toml(fields_with_values(self.train))}"


def read_config(
    task: str | None, path: Path | None = None, changes: Sequence[str] = (), **top_level: Sequence[str] | int | None
) -> RunConfig:
    """Reads a config file and applies changes such as `task.size=tiny` or `train.rate=0.001`.

    >>> config = read_config("translation", changes=["task.size=tiny", "train.steps=100"], data=["pairs.tsv"])
    >>> config.settings.size, config.train.steps
    ('tiny', 100)
    """
    table = read_toml(path) if path is not None else {}
    for change in changes:
        apply_change(table, change)
    table |= {name: value for name, value in top_level.items() if value not in (None, [], ())}
    return config_from_table(task, table, str(path or "the config"))


def config_from_table(task: str | None, table: dict[str, Any], source: str) -> RunConfig:
    """Builds the config from a TOML table; `source` names it in errors."""
    settings, train = (read_section(table, name, source) for name in ("task", "train"))
    named = settings.pop("name", task)
    if named is None or (task is not None and named != task):
        raise ValueError(f"task.name in {source} must be {task or 'the name of a task'}, got {named or 'none'}")
    known = {"task", "seed", "data", "dev", "train"}
    unknown = sorted(table.keys() - known)
    if unknown:
        hint = suggest_section(unknown[0], {"task": find_task(named).settings_type, "train": TrainConfig})
        raise ValueError(
            f"the keys of {source} must be among {', '.join(sorted(known))}, got {', '.join(unknown)}{hint}"
        )
    seed = table.get("seed", 1)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= SEED_LIMIT:
        raise ValueError(f"seed must be an integer between 0 and {SEED_LIMIT}, got {reprlib.repr(seed)}")
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


def suggest_section(key: str, sections: dict[str, type[Config]]) -> str:
    """The end of an error message for a key without its section.

    >>> suggest_section("epochs", {"train": TrainConfig})
    ': did you mean train.epochs?'
    """
    places = [f"{name}.{key}" for name, kind in sections.items() if key in {field.name for field in fields(kind)}]
    return f": did you mean {' or '.join(places)}?" if places else ""


def check_keys(kind: type[Config], keys: Iterable[str], section: str, task: str) -> None:
    """Raises ValueError for unknown keys of a section, and suggests the closest one."""
    known = [field.name for field in fields(kind)]
    for name in keys:
        if name not in known:
            hint = suggest_name(f"{section}.{name}", [f"{section}.{each}" for each in known], before=" ")
            raise ValueError(
                f"{section}.{name} is not a setting of {task}:{hint} `foci train {task} --settings` lists all"
            )


def read_section(table: dict[str, Any], name: str, source: str) -> dict[str, Any]:
    section = table.get(name, {})
    if not isinstance(section, dict):
        raise ValueError(f"[{name}] in {source} must be a table, got {section!r}")
    return dict(section)


def read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES.value + 1)
    except OSError as error:
        raise ValueError(f"{path} must be a config file, but it cannot be read: {error.strerror}") from error
    if len(content) > MAX_CONFIG_BYTES.value:
        raise MAX_CONFIG_BYTES.exceeded(path, "more")
    try:
        return parse_toml(content.decode())
    except ValueError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error


def parse_toml(text: str) -> dict[str, Any]:
    """Parses TOML; raises ValueError for what is not valid or nested too deeply.

    >>> parse_toml("train.rate = 0.001")
    {'train': {'rate': 0.001}}
    """
    for key in DOTTED_KEY.findall(TOML_TEXT.sub("text", text)):
        MAX_KEY_PARTS.check(f"the key {key[:40]!r}", key.count(".") + 1)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("values must not be nested deeper than Python can parse, got deeper ones") from None


def apply_change(table: dict[str, Any], change: str) -> None:
    """Applies one `key=value` change; the value is TOML, and a string needs no quotes."""
    key, sign, text = change.partition("=")
    if not sign or not key.strip():
        raise ValueError(f"a setting must be key=value, such as train.rate=0.001, got {change!r}")
    first, dot, name = key.strip().partition(".")
    if not dot:
        table[first] = parse_value(text)
        return
    inner = table.setdefault(first, {})
    if not isinstance(inner, dict):
        raise ValueError(f"a key must be like task.size or train.rate, got {key.strip()!r}")
    inner[name] = parse_value(text)


def parse_value(text: str) -> Any:
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text.strip()


def parse_paths(value: Any, key: str) -> tuple[str, ...]:
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, list | tuple) or not all(isinstance(path, str) for path in paths):
        raise ValueError(f"{key} must be a path or a list of paths, got {value!r}")
    return tuple(paths)


def fields_with_values(config: Config) -> dict[str, Any]:
    """Returns the fields that are not None: TOML has no None, and an absent field is read as None again."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return {name: value for name, value in values.items() if value is not None}


def format_toml(table: dict[str, Any]) -> str:
    # The JSON of strings, numbers, booleans and lists of them is valid TOML.
    return "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in table.items())

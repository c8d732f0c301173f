import math
import re
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from foci import nn
from foci.nn.config import Config
from foci.tasks import TASKS, find_task
from foci.training import RunConfig, TrainConfig, read_config
from foci.training.schedule import learning_rate_at


def test_a_config_round_trips_through_toml(tmp_path: Path) -> None:
    changes = ["task.size=tiny", "task.dropout=0.25", "train.rate=3e-4", "train.schedule=inverse_sqrt", "seed=7"]
    config = read_config("translation", None, changes, data=['a "b".tsv', "ä.tsv"])
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert read_config("translation", tmp_path / "config.toml") == config
    assert read_config(None, tmp_path / "config.toml") == config
    assert isinstance(config, RunConfig)
    assert (config.settings.dropout, config.train.rate, config.seed) == (0.25, 3e-4, 7)


def test_changes_override_the_file(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('data = "x.tsv"\n[task]\nname = "translation"\nsize = "base"\n')
    config = read_config("translation", tmp_path / "c.toml", ["task.size=tiny", "train.steps=5"])
    assert (config.settings.size, config.train.steps, config.data) == ("tiny", 5, ("x.tsv",))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("train.rate=fast", "train.rate must be a number, got 'fast'"),
        (
            "train.speed=1",
            r"train\.speed is not a setting of translation: .*`foci train translation --settings` lists all",
        ),
        ("task.size=huge", "task.size must be 'tiny' or 'small' or 'base', got 'huge'"),
        (
            "rate=1",
            "the keys of the config must be among data, dev, seed, task, train, got rate: did you mean train.rate",
        ),
        ("size=tiny", r"task, train, got size: did you mean task\.size\?"),
        ("colour=1", "task, train, got colour$"),
        ("train.rate", "a setting must be key=value, such as train.rate=0.001, got 'train.rate'"),
        ("train.batch_tokens=0", "train.batch_tokens must be between 1 and 1000000000, got 0"),
        ("seed=x", "seed must be an integer between 0 and 9223372036854775807, got 'x'"),
        ("data=3", "data must be a path or a list of paths, got 3"),
        ("task=3", r"\[task\] in the config must be a table, got 3"),
        ("train={graphs=true,shard=true}", "train.graphs must be false with train.shard, got both"),
        ("task.widht=8", r"task\.widht is not a setting of translation: did you mean task\.width\? `foci train"),
        ("train.ema=1", "train.ema must be at least 0 and below 1, got 1"),
        ("train.variance=1.0", r"train.variance must be at least 0 and below 1, got 1\.0"),
        ("task.beam=0", "task.beam must be between 1 and 1000, got 0"),
        ("train.floor=1.5", r"train.floor must be between 0 and 1, got 1\.5"),
    ],
)
def test_a_wrong_setting_gives_a_one_line_error(change: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        read_config("translation", None, [change])
    assert "\n" not in str(error.value)


CONFIGS: list[type[Config]] = [
    *(
        getattr(nn, name)
        for name in nn.__all__
        if name.endswith("Config") and name not in {"Config", "EncoderDecoderConfig"}
    ),
    *(find_task(task).settings_type for task in TASKS),
    TrainConfig,
]


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_number_has_bounds(kind: type[Config]) -> None:
    config = kind()
    hints = get_type_hints(kind)
    words = {field.name: {*re.findall(r"\w+", str(hints[field.name]))} for field in fields(kind)}
    numbers = [name for name, own in words.items() if own & {"int", "float"} and "tuple" not in own]
    assert numbers
    for name in numbers:
        is_float = "float" in str(hints[name])
        for value in (10**19, -(10**19), 10**400, *((math.inf, -math.inf, math.nan) if is_float else ())):
            with pytest.raises(ValueError, match=rf"^\w+\.{name} must be .*\d.*, got ") as error:
                config.replace(**{name: value})
            assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "task.max_length=9223372036854775807",
            "task.max_length must be between 1 and 1048576, got 9223372036854775807",
        ),
        ("task.length_penalty=1e9", "task.length_penalty must be between 0 and 10, got 1000000000.0"),
        ("task.vocabulary=1000000000000", "task.vocabulary must be between 1 and 1048576, got 1000000000000"),
        ("train.clip=99999999999999999999999", "train.clip must be between 0 and 1000000, got 99999999999999999999999"),
        ("train.rate=1e400", "train.rate must be between 0 and 1000, got inf"),
        ("seed=-1", "seed must be an integer between 0 and 9223372036854775807, got -1"),
        ("seed=18446744073709551616", "seed must be an integer between 0 and .*, got 18446744073709551616"),
    ],
)
def test_a_number_out_of_bounds_is_refused(change: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}$"):
        read_config("translation", None, [change])


@pytest.mark.parametrize(
    ("task", "name", "most"),
    [
        ("translation", "smoothing", "be at least 0 and below 1"),
        ("generation", "attention_dropout", "be at least 0 and below 1"),
        ("sentiment", "forget", "be at least 0 and below 1"),
        ("sentiment", "head_dropout", "be at least 0 and below 1"),
        ("summarization", "forget", "be at least 0 and below 1"),
        ("summarization", "left_out", "be between 0 and 1"),
    ],
)
def test_a_fraction_above_one_is_refused(task: str, name: str, most: str) -> None:
    with pytest.raises(ValueError, match=rf"^task\.{name} must {most}, got 10"):
        read_config(task, None, [f"task.{name}=10"])


def test_a_config_of_another_task_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[task]\nname = "generation"\n')
    with pytest.raises(ValueError, match=r"task\.name in .*c\.toml must be translation, got generation"):
        read_config("translation", tmp_path / "c.toml")
    (tmp_path / "c.toml").write_text("[task\n")
    with pytest.raises(ValueError, match="is not valid TOML"):
        read_config("translation", tmp_path / "c.toml")


def test_the_learning_rate_warms_up_and_decays() -> None:
    config = TrainConfig(rate=1.0, warmup=10, floor=0.1)
    rates = [learning_rate_at(step, 100, config) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[10] == 1.0
    assert rates[100] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    root = TrainConfig(rate=1.0, warmup=10, schedule="inverse_sqrt")
    assert learning_rate_at(39, 100, root) == pytest.approx(0.5)
    assert learning_rate_at(99, 100, TrainConfig(rate=1.0, schedule="constant", warmup=0)) == 1.0


def test_seed_zero_is_kept() -> None:
    assert read_config("translation", data=["pairs.tsv"], seed=0).seed == 0
    assert read_config("translation", data=["pairs.tsv"], seed=None).seed == 1

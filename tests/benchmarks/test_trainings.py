"""The trainings of benchmarks/training: their configs are whole, and what one run writes another scores."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import score, train
from foci.training.config import config_from_table, read_toml
from tests.training.reversal import written

NAMES = sorted(path.stem for path in train.CONFIGS.glob("*.toml"))


@pytest.mark.parametrize("name", NAMES)
def test_every_config_is_one_of_a_run(name: str) -> None:
    table = read_toml(train.CONFIGS / f"{name}.toml")
    benchmark = table.pop("benchmark", {})
    config = config_from_table(None, table, name)
    assert config.data
    for changes in benchmark.get("variants", {}).values():
        changed = dict(change.removeprefix("task.").split("=") for change in changes)
        assert config.settings.replace(**{key: json.loads(value) for key, value in changed.items()})


def test_what_is_trained_is_scored_with_the_variant_that_is_best_on_dev(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data" / "words"
    folder.mkdir(parents=True)
    for part, seed in (("train", 1), ("dev", 2), ("test", 3)):
        written(folder / f"{part}.tsv", count=60, seed=seed)
    configs = tmp_path / "configs"
    configs.mkdir()
    (configs / "words.toml").write_text(
        'data = ["words/train.tsv"]\ndev = ["words/dev.tsv"]\n[task]\nname = "translation"\nsize = "tiny"\n'
        'tokenizer = "words"\nwidth = 32\nheads = 2\n[train]\nsteps = 3\nselect = "last"\ndevice = "cpu"\n'
        '[benchmark.variants]\none = ["task.beam=1"]\ntwo = ["task.beam=2"]\n'
    )
    monkeypatch.setattr(train, "CONFIGS", configs)
    monkeypatch.setattr(score, "CONFIGS", configs)
    data, out = str(tmp_path / "data"), tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["train", "words", "--data", data, "--out", str(out), "--seed", "5"])
    train.main()
    assert {path.name for path in out.iterdir()} == {
        *("config.toml", "run.json", "metrics.jsonl", "summary.json", "model-1-of-1.safetensors"),
        *(f"answers-{part}-{variant}.jsonl" for part in ("dev", "test") for variant in ("one", "two")),
    }
    assert str(tmp_path) not in (out / "config.toml").read_text() + (out / "summary.json").read_text()
    targets = [line.split("\t")[1] for line in (folder / "dev.tsv").read_text().splitlines()]
    (out / "answers-dev-two.jsonl").write_text("".join(json.dumps(target) + "\n" for target in targets))
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["score", str(out), "--data", data])
    score.main()
    first, last = capsys.readouterr().out.splitlines()
    found = json.loads(first)
    assert (found["variant"], round(found["dev"]["bleu"]), found["test"]["examples"]) == ("two", 100, 60)
    assert last.startswith("median bleu on test of 1: ")

"""`train.monitor`: the attention of some steps in the run directory, without an effect on the training."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import foci
from foci.cli.main import main
from foci.record.history import History
from foci.training import train
from tests.training.reversal import config, logged, written

STEPS = ("train.steps=10", "train.checkpoint_every=5")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A training without a monitor, and one whose every third step is monitored."""
    root = tmp_path_factory.mktemp("monitored")
    data = written(root / "pairs.tsv")
    train(config(data, *STEPS), root / "plain", quiet=True)
    train(config(data, *STEPS, "train.monitor=3", "train.accumulate=2"), root / "accumulated", quiet=True)
    train(config(data, *STEPS, "train.monitor=3"), root / "monitored", quiet=True)
    return {name: root / name for name in ("plain", "monitored", "accumulated")} | {"data": data}


def test_weights_are_those_of_a_training_without_it(folders: dict[str, Path]) -> None:
    plain, monitored = (load_file(folders[name] / "model.safetensors") for name in ("plain", "monitored"))
    assert all(torch.equal(tensor, monitored[name]) for name, tensor in plain.items())
    assert not (folders["plain"] / "attention.jsonl").exists()


@pytest.mark.parametrize("case", ["monitored", "accumulated"])
def test_statistics_of_every_head_are_written(folders: dict[str, Path], case: str) -> None:
    history = foci.load(folders[case] / "attention.jsonl")
    assert isinstance(history, History)
    assert history.steps == [1, 3, 6, 9]
    assert history.heads == [f"{stack}.L0H{head}" for stack in ("encoder", "decoder", "cross") for head in (0, 1)]
    assert history.values("entropy").isfinite().all()
    # The distance between positions of two sequences has no meaning.
    assert history.values("distance")[:, -2:].isnan().all()
    curve = logged(folders[case], "attention/largest_logit/decoder.L0")
    assert curve == pytest.approx(
        dict(zip(history.steps, history.values("largest_logit")[:, 2:4].amax(1).tolist(), strict=True)), rel=1e-5
    )


def test_resumed_training_continues_the_file(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "resumed"
    train(config(folders["data"], "train.steps=7", "train.checkpoint_every=5", "train.monitor=3"), folder, quiet=True)
    before = (folder / "attention.jsonl").read_text()
    with (folder / "attention.jsonl").open("a") as file:
        file.write(before.splitlines()[-1].replace('"step": 6', '"step": 9') + "\n" + before[:20])
    train(
        config(folders["data"], "train.steps=9", "train.checkpoint_every=5", "train.monitor=3"),
        folder,
        resume=True,
        quiet=True,
    )
    lines = [json.loads(line)["step"] for line in (folder / "attention.jsonl").read_text().splitlines()]
    assert lines == [1, 3, 6, 9]


def test_alerts_are_messages(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foci.capture.monitor.DEFAULT_ALERTS", {"largest_logit": 1e-3})
    train(config(folders["data"], "train.steps=1", "train.monitor=1"), tmp_path / "run")
    assert "attention: largest logit " in capsys.readouterr().err


def test_view_writes_a_page_and_a_figure(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "attention.jsonl"
    source.write_text((folders["monitored"] / "attention.jsonl").read_text())
    assert main(["view", str(source), "--no-browser"]) == 0
    assert "decoder.L0" not in (tmp_path / "attention.html").read_text(), "texts are only in the payload"
    assert main(["view", str(source), "--out", str(tmp_path / "heads.png")]) == 0
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")
    assert "written: " in capsys.readouterr().out
    source.write_text("no statistics\n")
    assert main(["view", str(source)]) == 2
    assert "line 1 of attention.jsonl must be valid JSON" in capsys.readouterr().err

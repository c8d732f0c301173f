"""Killed at any moment and resumed, a run ends with the same weights, bit for bit."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foci.cli import main
from foci.runtime.safetensors_file import import_safetensors
from foci.training import checkpoint, train
from tests.training.reversal import SMALL, config, logged, written

ROOT = Path(__file__).parent.parent.parent
STEPS = 30
CHANGES = (f"train.steps={STEPS}", "train.ema=0.9", "train.accumulate=2", "train.average=2")


def weights(path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = import_safetensors().load_file(path)
    return found


def assert_same_end(one: Path, other: Path) -> None:
    """The finished model, and all that the last checkpoint holds."""
    last = f"checkpoints/step-{STEPS:08d}/rank-00000.safetensors"
    for name in ("model.safetensors", last):
        first, second = weights(one / name), weights(other / name)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)


def kill_when(process: "subprocess.Popen[bytes]", folder: Path, step: int) -> None:
    """SIGKILL as soon as the checkpoint of a step is there."""
    limit = time.monotonic() + 120
    while not (folder / "checkpoints" / f"step-{step:08d}").exists():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < limit
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_a_killed_run_ends_as_one_that_was_not(finished: tuple[Path, Path], tmp_path: Path) -> None:
    data, whole = finished
    options = [part for change in (*SMALL, *CHANGES) for part in ("--set", change)]
    command = [sys.executable, "-m", "foci", "train", "translation", "--data", str(data), "--quiet", *options]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": str(ROOT)}
    killed = tmp_path / "killed"
    process = subprocess.Popen([*command, "--out", str(killed)], env=environment, cwd=tmp_path)
    kill_when(process, killed, 10)
    left_at = checkpoint.load_newest(killed / "checkpoints", pytest.fail)
    assert left_at is not None
    assert 10 <= left_at.step < STEPS
    train(config(data, *CHANGES), killed, resume=True, quiet=True)
    assert_same_end(whole, killed)
    assert logged(killed, "loss") == logged(whole, "loss")
    assert logged(killed, "dev_loss") == logged(whole, "dev_loss")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The data, and a run that was never killed."""
    folder = tmp_path_factory.mktemp("finished")
    data = written(folder / "pairs.tsv")
    train(config(data, *CHANGES), folder / "whole", quiet=True)
    return data, folder / "whole"


@pytest.fixture
def run(finished: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """The same data, and a copy of that run to be damaged."""
    shutil.copytree(finished[1], tmp_path / "run")
    return finished[0], tmp_path / "run"


def test_a_damaged_checkpoint_is_refused_and_the_one_before_used(
    finished: tuple[Path, Path], run: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    data, other = run
    last, before = checkpoint.list_checkpoints(other / "checkpoints")
    content = bytearray((last / "rank-00000.safetensors").read_bytes())
    content[-5] ^= 1
    (last / "rank-00000.safetensors").write_bytes(content)
    train(config(data, *CHANGES), other, resume=True)
    said = capsys.readouterr().err
    assert re.search(r"step-00000030 is damaged: .* checksum .*; the one before it is used", said)
    assert f"resumed at step {int(before.name.removeprefix('step-'))}" in said
    assert_same_end(finished[1], other)


@pytest.mark.parametrize("harm", ["cut", "no json", "no file", "foreign"])
def test_every_kind_of_damage_is_found(run: tuple[Path, Path], harm: str) -> None:
    last = checkpoint.list_checkpoints(run[1] / "checkpoints")[0]
    file, state = last / "rank-00000.safetensors", last / "state.json"
    if harm == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif harm == "no file":
        file.unlink()
    elif harm == "no json":
        state.write_text(state.read_text()[:-10])
    else:
        state.write_text(json.dumps({"format": "other"}))
    with pytest.raises(ValueError, match="is damaged"):
        checkpoint.Checkpoint(last)


def test_without_a_whole_checkpoint_there_is_no_silent_new_beginning(run: tuple[Path, Path]) -> None:
    data, whole = run
    for folder in checkpoint.list_checkpoints(whole / "checkpoints"):
        (folder / "state.json").unlink()
    with pytest.raises(ValueError, match="all 2 are damaged"):
        train(config(data, *CHANGES), whole, resume=True, quiet=True)


def test_what_was_half_written_is_passed_over(run: tuple[Path, Path]) -> None:
    data, whole = run
    expected = logged(whole, "loss")
    shutil.rmtree(whole / "checkpoints" / f"step-{STEPS:08d}")
    (whole / "checkpoints" / f".step-{STEPS:08d}.part").mkdir()
    with (whole / "metrics.jsonl").open("a") as file:
        file.write('{"step": 29, "lo')
    train(config(data, *CHANGES), whole, resume=True, quiet=True)
    assert logged(whole, "loss") == expected


def test_a_run_is_not_begun_twice_and_not_resumed_with_other_data(run: tuple[Path, Path], tmp_path: Path) -> None:
    data, whole = run
    with pytest.raises(ValueError, match="has a run already"):
        train(config(data, *CHANGES), whole, quiet=True)
    (tmp_path / "rest" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"has checkpoints of a run, but no run\.json"):
        train(config(data, *CHANGES), tmp_path / "rest", quiet=True)
    other = written(tmp_path / "pairs.tsv", seed=2)
    changed = json.loads((whole / "run.json").read_text())
    changed["data"] = {str(other): next(iter(changed["data"].values()))}
    (whole / "run.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="the files have changed"):
        train(config(other, *CHANGES), whole, resume=True, quiet=True)


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may be larger than a few pages, which the system refuses as it does where a disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            ("train.evaluate_every=1000", "train.steps=40"),
            "the checkpoint of step 30 could not be written (File too large",
        ),
        ((), "step-00000030.safetensors: File too large"),
    ],
)
def test_a_full_disk_is_one_sentence_and_loses_nothing(
    run: tuple[Path, Path], changes: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run[1]
    last, before = checkpoint.list_checkpoints(folder / "checkpoints")
    shutil.rmtree(last)
    resume = ["train", "translation", "--out", str(folder), "--resume", "--quiet"]
    with full_disk():
        assert main.main([*resume, *(part for change in changes for part in ("--set", change))]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert checkpoint.list_checkpoints(folder / "checkpoints") == [before]
    assert not list(folder.rglob(".*"))
    assert main.main(resume) == 0


def test_models_that_a_checkpoint_names_stay_until_the_next_one(
    data_of_a_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, often = tmp_path / "r", ("train.evaluate_every=4", "train.checkpoint_every=10", "train.average=2")
    save = checkpoint.save_checkpoint

    def dying(place: Path, step: int, *rest: Any) -> None:
        assert step < 20, "the run dies before its second checkpoint"
        save(place, step, *rest)

    monkeypatch.setattr(checkpoint, "save", dying)
    with pytest.raises(AssertionError, match="dies"):
        train(config(data_of_a_run, *often, "train.steps=30"), folder, quiet=True)
    assert logged(folder, "dev_loss")[16] < logged(folder, "dev_loss")[8]
    # The best models of the checkpoint are those of steps 4 and 8, and those of 12 and 16 came after them.
    found = train(config(data_of_a_run, *often, "train.steps=9"), folder, resume=True, quiet=True)
    assert found["loss"] == logged(folder, "final_loss")[10]
    assert sorted(path.name[-14:-12] for path in (folder / "best").iterdir()) == ["08", "10"]


def test_a_run_resumed_where_it_is_to_end_is_measured(data_of_a_run: Path, tmp_path: Path) -> None:
    seldom = ("train.evaluate_every=100", "train.checkpoint_every=5")
    train(config(data_of_a_run, *seldom, "train.steps=10"), tmp_path / "r", quiet=True)
    shutil.rmtree(tmp_path / "r" / "checkpoints" / "step-00000010")
    found = train(config(data_of_a_run, *seldom, "train.steps=5"), tmp_path / "r", resume=True, quiet=True)
    assert found["loss"] == logged(tmp_path / "r", "dev_loss")[5]


@pytest.fixture
def data_of_a_run(tmp_path: Path) -> Path:
    return written(tmp_path / "pairs.tsv")

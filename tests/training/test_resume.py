"""A run that is killed at any moment and resumed ends with the same weights, bit for bit."""

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
from foci.training.state import State
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
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def kill_when(process: "subprocess.Popen[bytes]", folder: Path, step: int) -> None:
    """SIGKILL as soon as the checkpoint of a step is there."""
    limit = time.monotonic() + 120
    while not (folder / "checkpoints" / f"step-{step:08d}").exists():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < limit
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_a_killed_run_ends_with_the_same_weights(finished: tuple[Path, Path], tmp_path: Path) -> None:
    data, whole = finished
    options = [part for change in (*SMALL, *CHANGES) for part in ("--set", change)]
    command = [sys.executable, "-m", "foci", "train", "translation", "--data", str(data), "--quiet", *options]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": str(ROOT)}
    killed = tmp_path / "killed"
    process = subprocess.Popen([*command, "--out", str(killed)], env=environment, cwd=tmp_path)
    kill_when(process, killed, 10)
    left_at = checkpoint.load_newest(killed / "checkpoints", pytest.fail)
    assert left_at is not None
    assert 10 <= left_at.state.step < STEPS
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


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    finished: tuple[Path, Path], run: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    data, other = run
    last, before = checkpoint.list_checkpoints(other / "checkpoints")
    content = bytearray((last / "rank-00000.safetensors").read_bytes())
    content[-5] ^= 1
    (last / "rank-00000.safetensors").write_bytes(content)
    train(config(data, *CHANGES), other, resume=True)
    said = capsys.readouterr().err
    assert re.search(r"step-00000030 is damaged: .* checksum .*; using the one before it", said)
    assert f"resumed at step {int(before.name.removeprefix('step-'))}" in said
    assert_same_end(finished[1], other)


@pytest.mark.parametrize("harm", ["cut", "no json", "no file", "foreign"])
def test_every_kind_of_damage_is_detected(run: tuple[Path, Path], harm: str) -> None:
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


def test_resume_fails_if_all_checkpoints_are_damaged(run: tuple[Path, Path]) -> None:
    data, whole = run
    for folder in checkpoint.list_checkpoints(whole / "checkpoints"):
        (folder / "state.json").unlink()
    with pytest.raises(ValueError, match="must hold an intact checkpoint, got 2 damaged ones"):
        train(config(data, *CHANGES), whole, resume=True, quiet=True)


def test_partly_written_files_are_removed(run: tuple[Path, Path]) -> None:
    data, whole = run
    expected = logged(whole, "loss")
    shutil.rmtree(whole / "checkpoints" / f"step-{STEPS:08d}")
    (whole / "checkpoints" / f".step-{STEPS - 1:08d}.part").mkdir()
    (whole / "best" / f".step-{STEPS:08d}.safetensors.1.part").touch()
    (whole / ".model.safetensors.1.part").touch()
    with (whole / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 29, "\xff\n{"step": 29, "lo')
    train(config(data, *CHANGES), whole, resume=True, quiet=True)
    assert logged(whole, "loss") == expected
    assert not list(whole.rglob(".*"))


def test_a_used_directory_and_changed_data_are_refused(run: tuple[Path, Path], tmp_path: Path) -> None:
    data, whole = run
    with pytest.raises(ValueError, match="already holds a run"):
        train(config(data, *CHANGES), whole, quiet=True)
    (tmp_path / "rest" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"holds checkpoints but no run\.json"):
        train(config(data, *CHANGES), tmp_path / "rest", quiet=True)
    other = written(tmp_path / "pairs.tsv", seed=2)
    with pytest.raises(ValueError, match="these files differ from the start"):
        train(config(other, *CHANGES), whole, resume=True, quiet=True)


@contextmanager
def full_disk() -> Iterator[None]:
    """Limits the file size, which fails in the same way as a full disk."""
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
            "could not write the checkpoint of step 30 (File too large",
        ),
        ((), "step-00000030.safetensors: File too large"),
    ],
)
def test_a_full_disk_gives_one_line_and_loses_nothing(
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


def test_best_models_of_a_checkpoint_stay_until_the_next_one(
    data_of_a_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, often = tmp_path / "r", ("train.evaluate_every=4", "train.checkpoint_every=10", "train.average=2")
    save = checkpoint.save_checkpoint

    def dying(folder: Path, tensors: Any, state: State, *others: Any) -> None:
        assert state.step < 20, "the run dies before its second checkpoint"
        save(folder, tensors, state, *others)

    monkeypatch.setattr(checkpoint, "save_checkpoint", dying)
    with pytest.raises(AssertionError, match="dies"):
        train(config(data_of_a_run, *often, "train.steps=30"), folder, quiet=True)
    assert logged(folder, "dev_loss")[16] < logged(folder, "dev_loss")[8]
    # The best models of the checkpoint are those of steps 4 and 8, and those of 12 and 16 came after them.
    found = train(config(data_of_a_run, *often, "train.steps=9"), folder, resume=True, quiet=True)
    assert found["loss"] == logged(folder, "final_loss")[10]
    assert sorted(path.name[-14:-12] for path in (folder / "best").iterdir()) == ["08", "10"]


def test_a_run_resumed_at_its_last_step_is_evaluated(data_of_a_run: Path, tmp_path: Path) -> None:
    seldom = ("train.evaluate_every=100", "train.checkpoint_every=5")
    train(config(data_of_a_run, *seldom, "train.steps=10"), tmp_path / "r", quiet=True)
    shutil.rmtree(tmp_path / "r" / "checkpoints" / "step-00000010")
    found = train(config(data_of_a_run, *seldom, "train.steps=5"), tmp_path / "r", resume=True, quiet=True)
    assert found["loss"] == logged(tmp_path / "r", "dev_loss")[5]


@pytest.fixture
def data_of_a_run(tmp_path: Path) -> Path:
    return written(tmp_path / "pairs.tsv")

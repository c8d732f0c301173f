"""One command at a time trains in a run directory, and a killed one leaves nothing that blocks the next."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from foci.cli import main
from foci.training import lock, run, train
from foci.training.distributed import Processes
from foci.training.lock import LOCK_NAME, lock_directory, lock_run
from tests.training.reversal import SMALL, config, logged, written

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("resume", [[], ["--resume"]], ids=["fresh start", "resume"])
def test_a_second_command_is_refused_with_the_process_that_trains(
    resume: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, folder = written(tmp_path / "pairs.tsv"), tmp_path / "run"
    if resume:
        train(config(data, "train.steps=2"), folder, quiet=True)
    changes = [part for change in (*SMALL, "train.steps=3") for part in ("--set", change)]
    with lock_directory(folder):
        assert main.main(["train", "translation", "--data", str(data), "--out", str(folder), *resume, *changes]) == 2
        said = capsys.readouterr().err
        assert f"run must not be in use, but process {os.getpid()} on" in said
        assert said.count("\n") == 1
        assert (folder / "run.json").exists() is bool(resume)
    train(config(data, "train.steps=3"), folder, resume=bool(resume), quiet=True)
    assert not (folder / LOCK_NAME).exists()


def test_the_lock_of_a_killed_process_does_not_block(tmp_path: Path) -> None:
    """Not even if a process that it forked, such as a worker, is still running."""
    code = (
        "import os, pathlib, sys, time; from foci.training.lock import lock_directory\n"
        "with lock_directory(pathlib.Path(sys.argv[1])): os.fork() and print('locked', flush=True); time.sleep(60)"
    )
    command, environment = [sys.executable, "-c", code, str(tmp_path)], os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(ValueError, match=f"process {holder.pid} on"), lock_directory(tmp_path):
            pass
        holder.kill()
        holder.wait()
        with lock_directory(tmp_path):
            assert f"process {os.getpid()} on" in (tmp_path / LOCK_NAME).read_text()
        os.killpg(holder.pid, signal.SIGKILL)


def test_a_failed_start_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pairs\.tsv"):
        train(config(tmp_path / "pairs.tsv"), tmp_path / "runs" / "a" / "b", quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_that_was_deleted_meanwhile_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls = lock.fcntl.flock, []

    def late(handle: int, operation: int) -> None:
        if not calls:
            (tmp_path / LOCK_NAME).unlink()
        calls.append(handle)
        plain(handle, operation)

    monkeypatch.setattr(lock.fcntl, "flock", late)
    with lock_directory(tmp_path):
        assert len(calls) == 2
        assert (tmp_path / LOCK_NAME).exists()


def test_a_file_system_without_locks_gives_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", missing)
    with lock_directory(tmp_path) as messages:
        assert messages == [f"{tmp_path} cannot be locked (No locks available): do not start a second training in it"]


def test_only_the_first_process_locks_and_all_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = Processes(1, 2, torch.device("cpu"))
    monkeypatch.setattr(Processes, "broadcast", lambda _, value: value)
    with lock_directory(tmp_path), lock_run(tmp_path, second):
        pass
    monkeypatch.setattr(Processes, "broadcast", lambda *_: [ValueError("in use")])
    with pytest.raises(ValueError, match="in use"), lock_run(tmp_path, second):
        pass


def test_a_fresh_start_never_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, folder = written(tmp_path / "pairs.tsv"), tmp_path / "run"
    train(config(data, "train.steps=5"), folder, quiet=True)
    # The files of the other run appear after the check.
    monkeypatch.setattr(run, "check_directory_unused", lambda _: None)
    train(config(data, "train.steps=6"), folder)
    assert "resumed" not in capsys.readouterr().err
    assert min(logged(folder, "loss")) == 1

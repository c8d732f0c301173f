"""Several processes train like one with a larger batch; a sharded checkpoint loads in one process."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from foci.training import checkpoint, train
from foci.training.distributed import bucket_tensors
from tests.training.reversal import SMALL, config, logged, written

ROOT = Path(__file__).parent.parent.parent
CHANGES = ("task.dropout=0", "train.steps=6", "train.checkpoint_every=3")


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def run_two_processes(data: Path, folder: Path, *changes: str) -> None:
    """Trains in two processes over gloo, started as torchrun starts them."""
    options = [part for change in (*SMALL, *CHANGES, *changes) for part in ("--set", change)]
    command = [
        sys.executable,
        "-m",
        "foci",
        "train",
        "translation",
        "--data",
        str(data),
        "--out",
        str(folder),
        *options,
    ]
    rendezvous = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    running = [
        subprocess.Popen(
            command,
            env=os.environ | rendezvous | {"RANK": rank, "LOCAL_RANK": rank, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder.parent,
        )
        for rank in ("0", "1")
    ]
    said = [process.communicate(timeout=240) for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert said[1] == ("", ""), "only the first process prints"


def assert_same_curve(one: Path, other: Path) -> None:
    first, second = logged(one, "loss"), logged(other, "loss")
    assert first.keys() == second.keys()
    torch.testing.assert_close(torch.tensor([*first.values()]), torch.tensor([*second.values()]), rtol=1e-4, atol=1e-5)
    assert len({round(loss, 3) for loss in first.values()}) > 3, "the loss must change"


def test_two_processes_train_like_one_with_twice_the_batch(tmp_path: Path) -> None:
    data = written(tmp_path / "pairs.tsv")
    answers = ("train.select=metric", "train.decoded=3")
    run_two_processes(data, tmp_path / "two", "train.batch_tokens=128", *answers)
    train(config(data, *CHANGES, "train.batch_tokens=256", *answers), tmp_path / "one", quiet=True)
    assert_same_curve(tmp_path / "one", tmp_path / "two")
    assert logged(tmp_path / "two", "dev_chrf")[6] == pytest.approx(logged(tmp_path / "one", "dev_chrf")[6])
    assert logged(tmp_path / "two", "dev_loss")[6] == pytest.approx(logged(tmp_path / "one", "dev_loss")[6], rel=1e-4)


def test_accumulated_gradients_equal_those_of_one_batch(tmp_path: Path) -> None:
    data = written(tmp_path / "pairs.tsv")
    train(config(data, *CHANGES, "train.batch_tokens=64", "train.accumulate=4"), tmp_path / "parts", quiet=True)
    train(config(data, *CHANGES, "train.batch_tokens=256"), tmp_path / "one", quiet=True)
    assert_same_curve(tmp_path / "one", tmp_path / "parts")


def test_a_sharded_checkpoint_resumes_in_one_process(tmp_path: Path) -> None:
    data, shared = written(tmp_path / "pairs.tsv"), tmp_path / "shared"
    run_two_processes(data, shared, "train.batch_tokens=128", "train.shard=true", "train.ema=0.5")
    train(config(data, *CHANGES, "train.batch_tokens=256", "train.ema=0.5"), tmp_path / "one", quiet=True)
    assert_same_curve(tmp_path / "one", shared)
    last, before = checkpoint.list_checkpoints(shared / "checkpoints")
    files = sorted(path.name for path in before.iterdir())
    assert files == ["rank-00000.safetensors", "rank-00001.safetensors", "state.json"]
    shutil.rmtree(last)
    train(config(data, *CHANGES, "train.batch_tokens=256", "train.ema=0.5"), shared, resume=True, quiet=True)
    assert checkpoint.load_newest(shared / "checkpoints", pytest.fail).state.step == 6  # type: ignore[union-attr]
    assert_same_curve(tmp_path / "one", shared)
    assert logged(shared, "dev_loss")[6] == pytest.approx(logged(tmp_path / "one", "dev_loss")[6], rel=1e-4)


def test_gradient_buckets_have_one_dtype_and_a_size_limit() -> None:
    tensors = [torch.zeros(2**23), torch.zeros(2**23), torch.zeros(5), torch.zeros(3, dtype=torch.float64)]
    assert [[tensor.numel() for tensor in bucket] for bucket in bucket_tensors(tensors)] == [[2**23, 2**23], [5], [3]]

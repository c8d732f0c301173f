"""Training with CUDA graphs gives the same losses as without."""

from pathlib import Path

import pytest
import torch

from foci.training import train
from tests.training.reversal import config, logged, written

GPU = ("train.device=cuda", "train.steps=40", "train.select=loss", "task.width=64")


@pytest.mark.gpu
def test_graphed_steps_have_the_same_losses(tmp_path: Path) -> None:
    data = written(tmp_path / "pairs.tsv")
    plain = (*GPU, "task.dropout=0", "train.precision=float32")
    for graphs in ("false", "true"):
        train(config(data, *plain, f"train.graphs={graphs}"), tmp_path / graphs, quiet=True)
    eager, captured = (torch.tensor([*logged(tmp_path / name, "loss").values()]) for name in ("false", "true"))
    torch.testing.assert_close(captured, eager, rtol=1e-3, atol=1e-3)
    assert eager[-1] < eager[0] - 0.5


@pytest.mark.gpu
def test_graphed_dropout_changes_per_step_and_depends_only_on_the_seed(tmp_path: Path) -> None:
    data = written(tmp_path / "pairs.tsv", count=40, longest=1)
    still = (*GPU, "task.dropout=0.3", "train.rate=0", "train.graphs=true", "train.batch_tokens=4096")
    for name in ("one", "two"):
        train(config(data, *still), tmp_path / name, quiet=True)
    losses = [*logged(tmp_path / "one", "loss").values()]
    assert losses == pytest.approx([*logged(tmp_path / "two", "loss").values()], rel=1e-4)
    # All examples are in one batch of one shape, so the losses differ only by dropout.
    assert len({round(loss, 4) for loss in losses[10:]}) > 20


@pytest.mark.gpu
def test_graphed_steps_with_moving_average_and_accumulation(tmp_path: Path) -> None:
    data = written(tmp_path / "pairs.tsv")
    changes = (*GPU, "train.graphs=true", "train.ema=0.9", "train.accumulate=2", "train.batch_tokens=128")
    found = train(config(data, *changes, "train.steps=150", "train.rate=0.004"), tmp_path / "run", quiet=True)
    assert float(found["loss"]) < logged(tmp_path / "run", "loss")[1] / 2

"""Trains a task on files that a test wrote, as a user would."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from foci.tasks.model_file import TrainedModel, load_trained_model
from foci.training import read_config, train

QUICK = ("train.device=cpu", "train.warmup=10", "train.decoded=0", "train.evaluate_every=1000", "train.patience=0")


class Lesson(NamedTuple):
    """A trained model, and its metric before and after training."""

    trained: TrainedModel
    dev: list[Any]
    before: float  # metric of the untrained model
    after: float


def lesson(name: str, folder: Path, data: Path, dev: Path, *changes: str) -> Lesson:
    """Trains a task on one path and evaluates it on another."""
    config = read_config(name, None, [*QUICK, *changes], data=[str(data)], dev=[str(dev)])
    train(config, folder / "run", quiet=True)
    trained = load_trained_model(folder / "run")
    examples = type(trained.task).read([dev], config.settings)
    torch.manual_seed(1)
    fresh = trained.task.model().eval()
    with torch.no_grad():
        scores = [
            trained.task.score(trained.task.decode(model, examples), examples)[trained.task.metric]
            for model in (fresh, trained.model)
        ]
    return Lesson(trained, examples, float(scores[0]), float(scores[1]))

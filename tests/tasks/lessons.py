"""A task, trained on files that a test made, as a user would: by the loop, from a table or a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from foci.tasks.model_file import Trained, load
from foci.training import read_config, train

QUICK = ("train.device=cpu", "train.warmup=10", "train.decoded=0", "train.evaluate_every=1000", "train.patience=0")


class Lesson(NamedTuple):
    """What was learned, and what was known before."""

    trained: Trained
    dev: list[Any]
    before: float  # the metric of a model that has learned nothing
    after: float


def lesson(name: str, folder: Path, data: Path, dev: Path, *changes: str) -> Lesson:
    """Trains a task on some files and measures it on others."""
    config = read_config(name, None, [*QUICK, *changes], data=[str(data)], dev=[str(dev)])
    train(config, folder / "run", quiet=True)
    trained = load(folder / "run")
    examples = type(trained.task).read([dev], config.settings)
    torch.manual_seed(1)
    fresh = trained.task.model().eval()
    with torch.no_grad():
        scores = [
            trained.task.score(trained.task.decode(model, examples), examples)[trained.task.metric]
            for model in (fresh, trained.model)
        ]
    return Lesson(trained, examples, float(scores[0]), float(scores[1]))

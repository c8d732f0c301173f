"""The answer of a classification task, and its accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ClassPrediction:
    """The most likely class and its probability."""

    label: str
    probability: float

    def __str__(self) -> str:
        return f"{self.label} ({self.probability:.0%})"


class HasLabel(Protocol):
    """An example with a label, which may be unknown."""

    @property
    def label(self) -> str | None:
        """The name of the class, or None."""


def accuracy(predictions: Sequence[ClassPrediction], examples: Sequence[HasLabel]) -> dict[str, float | str]:
    """Computes the percentage of correct predictions.

    >>> good, bad = ClassPrediction("good", 0.9), ClassPrediction("bad", 0.6)
    >>> accuracy([good, bad], [good, good])
    {'accuracy': 50.0}
    """
    correct = [prediction.label == each.label for prediction, each in zip(predictions, examples, strict=True)]
    return {"accuracy": 100.0 * sum(correct) / max(len(correct), 1)}

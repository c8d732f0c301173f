"""The answer of a classification task, and its accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ClassPrediction:
    """The most likely class and its probability, and whether the input looks like none of the classes.

    >>> print(ClassPrediction("bag", 0.92)), print(ClassPrediction("bag", 0.92, declined=True))
    bag (92%)
    not one of my classes (the nearest is bag)
    (None, None)
    """

    label: str
    probability: float
    declined: bool = False

    def __str__(self) -> str:
        if self.declined:
            return f"not one of my classes (the nearest is {self.label})"
        return f"{self.label} ({self.probability:.0%})"


class HasLabel(Protocol):
    """An example with a label, which may be unknown."""

    @property
    def label(self) -> str | None:
        """The name of the class, or None."""


def accuracy(predictions: Sequence[ClassPrediction], examples: Sequence[HasLabel]) -> dict[str, float | str]:
    """Computes the percentage of correct predictions, and of declined inputs if there are any.

    A declined input counts with its most likely class.

    >>> good, bad = ClassPrediction("good", 0.9), ClassPrediction("bad", 0.6)
    >>> accuracy([good, bad], [good, good])
    {'accuracy': 50.0}
    """
    correct = [prediction.label == each.label for prediction, each in zip(predictions, examples, strict=True)]
    scores: dict[str, float | str] = {"accuracy": 100.0 * sum(correct) / max(len(correct), 1)}
    declined = sum(prediction.declined for prediction in predictions)
    return scores | ({"declined": 100.0 * declined / len(correct)} if declined else {})

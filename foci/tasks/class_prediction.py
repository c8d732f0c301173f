"""Guess: what a task that sorts things into classes answers, and how often such answers are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Guess:
    """The likeliest class, and how likely it is."""

    label: str
    share: float

    def __str__(self) -> str:
        return f"{self.label} ({self.share:.0%})"


class Labelled(Protocol):
    """An example whose class may be known."""

    @property
    def label(self) -> str | None:
        """The name of the class."""


def accuracy(guesses: Sequence[Guess], examples: Sequence[Labelled]) -> dict[str, float | str]:
    """The share of right guesses, in percent.

    >>> accuracy([Guess("good", 0.9), Guess("bad", 0.6)], [Guess("good", 1.0), Guess("good", 1.0)])
    {'accuracy': 50.0}
    """
    right = [guess.label == each.label for guess, each in zip(guesses, examples, strict=True)]
    return {"accuracy": 100.0 * sum(right) / max(len(right), 1)}

"""Where a training stands."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from foci.training.batches import BatchPosition

FIRST_BATCH = BatchPosition(0, 0)


class EvaluatedModel(NamedTuple):
    """A model as it was measured."""

    goodness: float  # higher for a better model
    loss: float  # on the dev part: of equally good models the one with the lower loss is the better
    step: int

    @property
    def rank(self) -> tuple[float, float]:
        """Greater for a better model."""
        return self.goodness, -self.loss


@dataclass
class State:
    """Where a training stands, beside its tensors."""

    step: int = 0  # how many updates were done
    place: BatchPosition = FIRST_BATCH  # the next batch
    seconds: float = 0.0  # how long it has run, over all resumes
    loss: float = 0.0  # summed since the last line, with its targets
    targets: float = 0.0
    judged: int = 0  # the step of the last evaluation
    waiting: int = 0  # how many evaluations in a row were not the best
    best: list[EvaluatedModel] = field(default_factory=list)  # best first

    @property
    def best_steps(self) -> set[int]:
        return {each.step for each in self.best}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> State:
        # Checkpoints of old named no loss.
        best = [EvaluatedModel(each[0], each[1] if len(each) > 2 else math.inf, each[-1]) for each in content["best"]]
        return cls(**{**content, "place": BatchPosition(*content["place"]), "best": best})

"""The counters and best models of a run, which checkpoints save beside the tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from foci.training.batches import BatchPosition

FIRST_BATCH = BatchPosition(0, 0)


class EvaluatedModel(NamedTuple):
    """The result of evaluating a model on the dev set."""

    goodness: float  # higher is better
    loss: float  # breaks ties: the lower loss is better
    step: int

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key: greater is better."""
        return self.goodness, -self.loss


@dataclass
class State:
    """The state of a run besides its tensors."""

    step: int = 0  # finished optimizer steps
    next_batch: BatchPosition = FIRST_BATCH
    seconds: float = 0.0  # training time, over all resumes
    loss: float = 0.0  # summed since the last log line
    targets: float = 0.0  # summed since the last log line
    evaluated_step: int = 0  # step of the last evaluation
    evaluations_without_improvement: int = 0  # in a row, compared with `patience`
    best: list[EvaluatedModel] = field(default_factory=list)  # best first

    @property
    def best_steps(self) -> set[int]:
        return {each.step for each in self.best}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> State:
        """Rebuilds what `dataclasses.asdict` and JSON made of a state."""
        best = [EvaluatedModel(*each) for each in content["best"]]
        return cls(**{**content, "next_batch": BatchPosition(*content["next_batch"]), "best": best})

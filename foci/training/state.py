"""Where a training stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from foci.training.batches import Place

START = Place(0, 0)


@dataclass
class State:
    """Where a training stands, beside its tensors."""

    step: int = 0  # how many updates were done
    place: Place = START  # the next batch
    seconds: float = 0.0  # how long it has run, over all resumes
    loss: float = 0.0  # summed since the last line, with its targets
    targets: float = 0.0
    judged: int = 0  # the step of the last evaluation
    waiting: int = 0  # how many evaluations in a row were not the best
    best: list[tuple[float, int]] = field(default_factory=list)  # goodness and step of the best models, best first

    @property
    def best_steps(self) -> set[int]:
        return {step for _, step in self.best}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> State:
        best = [(float(goodness), int(step)) for goodness, step in content["best"]]
        return cls(**{**content, "place": Place(*content["place"]), "best": best})

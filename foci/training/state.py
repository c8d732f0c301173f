"""The counters and best models of a run, which checkpoints save beside the tensors."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from foci.nn.config import describe_type, matches_type
from foci.runtime.durable_files import checksum_file
from foci.training.batches import BatchPosition

FIRST_BATCH = BatchPosition(0, 0)


def best_model_path(run_folder: Path, step: int) -> Path:
    """Returns where the model of a step is saved while it is among the best."""
    return run_folder / "best" / f"step-{step:08d}.safetensors"


class EvaluatedModel(NamedTuple):
    """The result of evaluating a model on the dev set, and where it is saved."""

    selection_score: float  # higher is better
    loss: float  # breaks ties: the lower loss is better
    step: int
    checksum: int = 0  # of the model's file

    def path(self, run_folder: Path) -> Path:
        return best_model_path(run_folder, self.step)

    def is_intact(self, run_folder: Path) -> bool:
        """Whether the model's file is as it was written."""
        return checksum_file(self.path(run_folder)) == self.checksum

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key: greater is better."""
        return self.selection_score, -self.loss


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
        best = [from_list(EvaluatedModel, each) for each in content["best"]]
        position = from_list(BatchPosition, content["next_batch"])
        state = cls(**{**content, "next_batch": position, "best": best})
        check_types(state, vars(state))
        return state


TupleT = TypeVar("TupleT", EvaluatedModel, BatchPosition)


def from_list(kind: type[TupleT], values: list[Any]) -> TupleT:
    result = kind(*values)
    check_types(result, result._asdict())
    return result


def check_types(owner: Any, values: dict[str, Any]) -> None:
    """Raises TypeError if a value does not have the type that its class declares, or is a negative integer."""
    kinds = get_type_hints(type(owner))
    for name, value in values.items():
        if not matches_type(value, kinds[name]) or (kinds[name] is int and value < 0):
            raise TypeError(f"{name} must be {describe_type(kinds[name])}, got {reprlib.repr(value)}")

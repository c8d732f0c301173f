"""The few methods that every task has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from foci.nn.config import Config
from foci.nn.model import Model
from foci.record.record import Record

Example = TypeVar("Example")
Answer = TypeVar("Answer")


Done = Callable[[float], None]


def unheard(_count: float) -> None:
    """Where nobody waits."""


class Problem(NamedTuple):
    """Something wrong with a dataset: an error stops a training, a warning does not."""

    place: str  # the file, and its line where it has lines: "pairs.tsv:12"
    what: str  # one sentence: what was expected and what is there
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return f"{self.place}: {self.severity}: {self.what}"


class Task(ABC, Generic[Example, Answer]):
    """One use of attention: what its data looks like, what is learned, and how good the answers are.

    A subclass names `name`, `metric`, `better` and `settings_type`, and has the methods below. An example is a small
    frozen dataclass of the task; what has no dev part of its own is split by the training.
    """

    name: ClassVar[str]
    metric: ClassVar[str]  # the first entry of `score`, on which a training is selected and stopped
    better: ClassVar[Literal["higher", "lower"]]  # which end of the metric is the good one
    settings_type: ClassVar[type[Config]]  # the task's own settings: [task] in a run's TOML
    settings: Any  # an instance of settings_type

    @classmethod
    @abstractmethod
    def read(cls, paths: Sequence[Path], settings: Any) -> list[Example]:
        """The examples in some files or a folder; the first error is raised as a ValueError with file and line."""

    @classmethod
    @abstractmethod
    def check(cls, paths: Sequence[Path], settings: Any) -> Iterator[Problem]:
        """Everything that is wrong with a dataset, line by line."""

    @classmethod
    @abstractmethod
    def start(cls, settings: Any, train: Sequence[Example]) -> Self:
        """A task ready to train: vocabulary, labels, statistics of features are learned from the train part."""

    @abstractmethod
    def files(self) -> dict[str, str]:
        """What `start` learned, as texts (JSON) by name; they are saved inside the model's file."""

    @classmethod
    @abstractmethod
    def from_files(cls, settings: Any, files: dict[str, str]) -> Self:
        """The task that `files` described."""

    @abstractmethod
    def model(self) -> Model:
        """A model that has learned nothing."""

    @property
    def longest(self) -> int | None:
        """Examples of a greater `size` are left out of a training, with a message; None: there is no limit."""
        return None

    @classmethod
    def split(
        cls, examples: Sequence[Example], share: float, generator: torch.Generator
    ) -> tuple[Sequence[Example], Sequence[Example]]:
        """Train and dev part, where no dev part was given: by chance, unless the order of the examples matters."""
        order = torch.randperm(len(examples), generator=generator).tolist()
        count = max(round(share * len(examples)), 1)
        return [examples[i] for i in sorted(order[count:])], [examples[i] for i in sorted(order[:count])]

    def epoch(self, examples: Sequence[Example], training: bool, generator: torch.Generator) -> Sequence[Example]:
        """What one pass goes through: the examples themselves, unless a task cuts, balances or repeats them."""
        return examples

    def is_cut(self, example: Example) -> bool:
        """Whether it is too long to be read whole, so that it is answered by a part of it."""
        return False

    @abstractmethod
    def size(self, example: Example) -> int:
        """How long it is: batches are sorted by it and hold `batch_tokens` of it, padding counted."""

    @abstractmethod
    def batch(self, examples: Sequence[Example], training: bool, generator: torch.Generator) -> dict[str, Tensor]:
        """The examples as tensors on the CPU; the generator (on the CPU) is the only source of chance."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The loss summed over the targets of a batch, and how many targets these are.

        Gradients are divided by the number of targets of all micro-batches and processes. Label smoothing and the like
        belong to training only: ask `model.training`. Nothing here may wait for the device (`.item()`).
        """

    @abstractmethod
    def decode(self, model: nn.Module, examples: Sequence[Example], done: Done = unheard) -> list[Answer]:
        """The model's answers, in the order of the examples; the model is in eval mode, gradients are off.

        `done` is told again and again how many more examples are answered, of a long one also parts.
        """

    @abstractmethod
    def score(self, answers: Sequence[Answer], examples: Sequence[Example]) -> dict[str, float | str]:
        """How good the answers are; `metric` comes first, "signature" says how it was computed where that matters.

        Where the package that computes it is missing: ImportError with the extra that brings it.
        """

    @abstractmethod
    def given(self, text: str) -> Example:
        """The example that somebody typed for `foci run`: a sentence, or the path of a picture or of a sound."""

    def write(self, model: nn.Module, examples: Sequence[Example]) -> list[str]:
        """What `foci run` prints for each example, a line each."""
        return [str(answer) for answer in self.decode(model, examples)]

    @abstractmethod
    def show(self, model: nn.Module, example: Example) -> Record:
        """The attention worth looking at while the example is answered, with labels (`foci.tasks.task_record`)."""

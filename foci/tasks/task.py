"""The interface of a task: how its data is read, batched, trained on, decoded, scored and shown."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from foci.decoding.beam import MAX_LENGTH_PENALTY
from foci.nn.config import HEADS_LIMIT, LAYERS_LIMIT, WIDTH_LIMIT, Config
from foci.nn.model import Model
from foci.record.record import Record

ExampleT = TypeVar("ExampleT")
AnswerT = TypeVar("AnswerT")

# Called with the number of examples that were decoded since the last call; a long example also counts in parts.
ProgressCallback = Callable[[float], None]


# The largest number of tokens that a setting may name.
LENGTH_LIMIT = 2**20
# The bounds of settings that several tasks have.
SETTING_BOUNDS: dict[str, tuple[float, float]] = {
    "width": (1, WIDTH_LIMIT),
    "hidden": (1, WIDTH_LIMIT),
    "heads": (1, HEADS_LIMIT),
    "layers": (1, LAYERS_LIMIT),
    "vocabulary": (1, 2**20),
    "max_length": (1, LENGTH_LIMIT),
    "beam": (1, 1000),
    "length_penalty": (0, MAX_LENGTH_PENALTY),
    "agreement": (0, 1000),
}


ModelSize = Literal["tiny", "small", "base"]
# With fewer examples than this a tiny model learns as much as a small one, in a fifth of the time.
MANY_EXAMPLES = 20_000
# The largest vocabulary that a task chooses.
DEFAULT_VOCABULARY = 8000


def choose_model_size(examples: int) -> ModelSize:
    """Chooses the size of a model by the number of its training examples."""
    return "small" if examples >= MANY_EXAMPLES else "tiny"


def ignore_progress(_count: float) -> None:
    """The default callback: does nothing."""


class Problem(NamedTuple):
    """A problem in a dataset: an error stops a training run, a warning does not."""

    location: str  # file, and line if it has lines: "pairs.tsv:12"
    message: str  # what is wrong, in one sentence
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return f"{self.location}: {self.severity}: {self.message}"


@dataclass(frozen=True)
class TaskSettings(Config):
    """Settings of a task: the [task] section of a run's TOML."""

    section = "task"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in fields(self):
            if field.name in SETTING_BOUNDS:
                self.check_range(*SETTING_BOUNDS[field.name], field.name)


class Task(ABC, Generic[ExampleT, AnswerT]):
    """One use of attention: its data format, its model, its loss and its metric.

    A subclass sets `name`, `metric`, `better` and `settings_type`, and implements the methods below. An example is a
    small frozen dataclass of the task.
    """

    name: ClassVar[str]
    metric: ClassVar[str]  # the first entry of `score`, which selects the best model and stops training
    better: ClassVar[Literal["higher", "lower"]]  # whether a higher or lower metric is better
    scores_whole_inputs: ClassVar[bool] = False  # whether `decode` reads all of an input that `answer` truncates
    settings_type: ClassVar[type[Config]]  # the [task] section of a run's TOML
    settings: Any  # an instance of settings_type

    @classmethod
    @abstractmethod
    def read(cls, paths: Sequence[Path], settings: Any) -> list[ExampleT]:
        """Reads the examples of files or a directory; raises ValueError with file and line for the first error."""

    @classmethod
    @abstractmethod
    def check(cls, paths: Sequence[Path], settings: Any) -> Iterator[Problem]:
        """Yields all problems of a dataset, line by line."""

    @classmethod
    @abstractmethod
    def from_examples(cls, settings: Any, train: Sequence[ExampleT]) -> Self:
        """Prepares a task for training: learns vocabulary, labels or feature statistics from the training examples."""

    @classmethod
    def fill_settings(cls, settings: Any, train: Sequence[ExampleT]) -> Any:
        """Returns the settings with values chosen from the training examples where they are None."""
        return settings

    def find_warnings(self, dev: Sequence[ExampleT]) -> list[str]:
        """Returns what looks wrong before a training run, each with a remedy."""
        return []

    @abstractmethod
    def learned_state(self) -> dict[str, str]:
        """Returns what `from_examples` learned, as JSON texts by name, which the model file stores."""

    @classmethod
    @abstractmethod
    def from_learned_state(cls, settings: Any, files: dict[str, str]) -> Self:
        """Rebuilds the task from the result of `learned_state`."""

    @abstractmethod
    def model(self) -> Model:
        """Builds an untrained model."""

    @property
    def max_size(self) -> int | None:
        """Maximum `size` of a training example; longer ones are dropped with a message. None: no limit."""
        return None

    @classmethod
    def split(
        cls, examples: Sequence[ExampleT], share: float, generator: torch.Generator
    ) -> tuple[Sequence[ExampleT], Sequence[ExampleT]]:
        """Splits off a dev set if none was given: at random, unless the order of the examples matters."""
        order = torch.randperm(len(examples), generator=generator).tolist()
        count = max(round(share * len(examples)), 1)
        return [examples[i] for i in sorted(order[count:])], [examples[i] for i in sorted(order[:count])]

    def epoch_examples(
        self, examples: Sequence[ExampleT], training: bool, generator: torch.Generator
    ) -> Sequence[ExampleT]:
        """Returns the examples of one epoch: all of them, unless the task cuts, balances or repeats them."""
        return examples

    def is_truncated(self, example: ExampleT) -> bool:
        """Whether the example is too long, so that the model reads only a part of it."""
        return False

    def describe_read_part(self, example: ExampleT) -> str:
        """Describes the part of a truncated example that the model reads: "the first 128 of 950 tokens"."""
        return "a part of it"

    @abstractmethod
    def size(self, example: ExampleT) -> int:
        """Length of the example: batches are sorted by it and hold `batch_tokens` of it, padding included."""

    @abstractmethod
    def batch(self, examples: Sequence[ExampleT], training: bool, generator: torch.Generator) -> dict[str, Tensor]:
        """Converts examples to tensors on the CPU; the generator (on the CPU) is the only source of randomness."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the loss summed over the targets of a batch, and the number of targets.

        The learner divides gradients by the number of targets of all micro-batches and processes. Label smoothing and
        similar apply only if `model.training`. The method must not wait for the device (`.item()`).
        """

    @abstractmethod
    def decode(
        self, model: nn.Module, examples: Sequence[ExampleT], done: ProgressCallback = ignore_progress
    ) -> list[AnswerT]:
        """Returns the model's answers, in the order of the examples; the model is in eval mode, gradients are off.

        `done` is called with the number of examples decoded since the last call; a long example may count in parts.
        """

    @abstractmethod
    def score(self, answers: Sequence[AnswerT], examples: Sequence[ExampleT]) -> dict[str, float | str]:
        """Scores the answers; `metric` comes first, "signature" says how it was computed if that matters.

        Raises ImportError, naming the extra to install, if a package is missing.
        """

    @abstractmethod
    def parse_input(self, text: str) -> ExampleT:
        """Converts user input of `foci run` to an example: a sentence, or the path of an image or audio file."""

    def answer(self, model: nn.Module, examples: Sequence[ExampleT]) -> list[str]:
        """Returns the text that `foci run` prints for each example."""
        return [str(answer) for answer in self.decode(model, examples)]

    def stream(self, model: nn.Module, example: ExampleT) -> Iterator[str]:
        """Yields the answer in parts, as they are generated; `foci run` prints them for a task that overrides this."""
        yield self.answer(model, [example])[0]

    @abstractmethod
    def record_attention(self, model: nn.Module, example: ExampleT) -> Record:
        """Records the attention while the example is answered, with labels (`foci.tasks.task_record`)."""

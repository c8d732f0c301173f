"""Loads the small trained models that ship in this package: `foci.pretrained(name)`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, overload

import torch

from foci import models
from foci.nn.model import Model
from foci.record.record import Record
from foci.runtime.default_device import prepare_on_cpu
from foci.runtime.spelling import suggest_name
from foci.tasks.model_file import load_trained_model
from foci.tasks.task import Task


@dataclass(frozen=True)
class Pretrained:
    """A trained model with its task: calling it returns the answer, `show` returns a Record of its attention."""

    task: Task[Any, Any]
    model: Model
    about: dict[str, Any]  # score, data and licence

    def __repr__(self) -> str:
        """Task, model class and number of parameters; `about` holds the score and the source of the data."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        return f"Pretrained({self.task.name}: {type(self.model).__name__}, {count:,} parameters)"

    @overload
    def __call__(self, inputs: str | os.PathLike[str]) -> str: ...
    @overload
    def __call__(self, inputs: list[Any] | tuple[Any, ...]) -> list[str]: ...
    @prepare_on_cpu
    def __call__(self, inputs: str | os.PathLike[str] | list[Any] | tuple[Any, ...]) -> str | list[str]:
        """Answers one input, a text or the path of an image or audio file, or a list of them as one batch."""
        several = inputs if isinstance(inputs, list | tuple) else [inputs]
        with torch.no_grad():
            answers = self.task.answer(self.model, [self._parse(each) for each in several])
        return answers if several is inputs else answers[0]

    @prepare_on_cpu
    def show(self, text: str | os.PathLike[str]) -> Record:
        """Records the attention while the model answers; `Record.answer` is the answer."""
        with torch.no_grad():
            return self.task.record_attention(self.model, self._parse(text))

    def _parse(self, text: object) -> Any:
        if not isinstance(text, str | os.PathLike):
            kind = f"{type(text).__module__}.{type(text).__name__}".removeprefix("builtins.")
            raise TypeError(
                f"the input must be a text, the path of an image or audio file, or a list of these, got a {kind}"
            )
        return self.task.parse_input(os.fspath(text))


def pretrained(name: str) -> Pretrained:
    """Loads a model that ships with foci, by the name of its task, on the CPU and in eval mode.

    >>> translate = foci.pretrained("translation")
    >>> translate("A man sleeps.")
    'Ein Mann schläft.'

    `translate.show("A man sleeps.")` returns a Record of the attention while it was translated.
    """
    if name not in models.list_pretrained() and name in models.TRAINING_DATA:
        raise ValueError(f'{models.describe_missing_model(name)}; foci.load("runs/{name}") opens yours')
    if name not in models.list_pretrained():
        names = ", ".join(models.list_pretrained()) or "none"
        hint = suggest_name(name, models.list_pretrained())
        raise ValueError(f"name must be one of the models that ship ({names}), got {name!r}{hint}")
    trained = load_trained_model(models.MODELS_DIRECTORY / name)
    return Pretrained(trained.task, trained.model, trained.about)

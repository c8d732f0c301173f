"""Small trained models that come with the package: a folder for each, with weights, config, score, data and licence."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch

from foci.nn.model import Model
from foci.record.record import Record
from foci.tasks.model_file import load
from foci.tasks.task import Task

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Pocket:
    """A model that answers: called with an input it gives the answer, `show` gives where it looked."""

    task: Task[Any, Any]
    model: Model
    about: dict[str, Any]  # score, data and licence

    def __repr__(self) -> str:
        """What it is, in one line; `about` has the score and where the data are from."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        return f"Pocket({self.task.name}: {type(self.model).__name__}, {count:,} parameters)"

    @overload
    def __call__(self, given: str | os.PathLike[str]) -> str: ...
    @overload
    def __call__(self, given: list[Any] | tuple[Any, ...]) -> list[str]: ...
    def __call__(self, given: str | os.PathLike[str] | list[Any] | tuple[Any, ...]) -> str | list[str]:
        """The answer to a text (or to the path of a picture or a sound), or to several of them at once."""
        several = given if isinstance(given, list | tuple) else [given]
        with torch.no_grad():
            answers = self.task.write(self.model, [self._given(each) for each in several])
        return answers if several is given else answers[0]

    def show(self, given: str | os.PathLike[str]) -> Record:
        """Where the model looks while it answers; `Record.answer` is what it answers."""
        with torch.no_grad():
            return self.task.show(self.model, self._given(given))

    def _given(self, each: object) -> Any:
        if not isinstance(each, str | os.PathLike):
            raise refused(each)
        return self.task.given(os.fspath(each))


def refused(given: object) -> TypeError:
    kind = f"{type(given).__module__}.{type(given).__name__}".removeprefix("builtins.")
    return TypeError(f"expected a text, the path of a picture or a sound, or a list of these, but got a {kind}")


def names() -> list[str]:
    """The models that are here."""
    return sorted(path.name for path in FOLDER.iterdir() if path.is_dir() and any(path.glob("*.safetensors")))


def pocket(name: str) -> Pocket:
    """A model that ships with foci, by the name of its task; on the CPU, ready to answer.

    `foci.pocket("translation")("A man sleeps.")` gives the sentence in German; `.show("A man sleeps.")` gives a Record
    of where it looked while it wrote.
    """
    if name not in names():
        raise ValueError(f"expected one of the models that ship ({', '.join(names()) or 'none'}), but got {name!r}")
    found = load(FOLDER / name)
    return Pocket(found.task, found.model, found.about)

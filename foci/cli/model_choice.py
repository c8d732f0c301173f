"""The model that a command names, with its settings changed for this call."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foci.models import pretrained
from foci.nn.model import Model
from foci.tasks import find
from foci.tasks.task import Task


def load_with_changes(path: Path, changes: Sequence[str], device: str = "auto") -> tuple[Task[Any, Any], Model]:
    """A task and its model, on the device that is asked for."""
    from foci.capture.look import resolve_device
    from foci.tasks.model_file import load

    task, model, _ = load(path, device=resolve_device(device))
    return apply_changes(task, changes), model


def apply_changes(task: Task[Any, Any], changes: Sequence[str]) -> Task[Any, Any]:
    """The task with other settings: task.beam=8."""
    from foci.training.config import check_keys, put, section

    table: dict[str, Any] = {}
    for change in changes:
        put(table, change)
    if table.keys() - {"task"}:
        raise ValueError(f"a trained model takes changes of [task] only, but got {', '.join(table.keys() - {'task'})}")
    if not table:
        return task
    settings = section(table, "task", "the changes")
    check_keys(type(task.settings), settings, "task", task.name)
    return type(task).from_files(task.settings.changed(**settings), task.files())


def find_task_model(name: str, path: Path | None) -> Path:
    """Where the model for a task is: what somebody names, in runs/TASK, or among those that ship."""
    find(name)
    if path is not None:
        return resolve_model_path(path)
    for place in (Path("runs") / name, pretrained.MODELS_DIRECTORY / name):
        if place.is_dir():
            return place
    raise ValueError(
        f"expected a model for {name}: train one (foci train {name} --data ...) or name one with --model; of those that"
        f" ship, {', '.join(pretrained.list_pretrained()) or 'none'}, none is for {name}"
    )


def resolve_model_path(path: Path) -> Path:
    """A path that is there, or a model that ships by its name."""
    return (
        pretrained.MODELS_DIRECTORY / path if not path.exists() and str(path) in pretrained.list_pretrained() else path
    )


def print_truncated(command: str, count: int, total: int) -> None:
    """How many inputs were too long to be read whole, beside the answers and not among them."""
    if count:
        which = f"{count} of {total} inputs {'is' if count == 1 else 'are'} longer than the model reads"
        print(f"foci {command}: {which}: answered by a part of it", file=sys.stderr, flush=True)

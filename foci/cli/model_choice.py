"""Find and load the model that a command names, with settings changed by --set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foci import models
from foci.cli.output import print_status
from foci.nn.model import Model
from foci.runtime.spelling import suggest_name
from foci.tasks import TASKS
from foci.tasks.task import Task


def load_with_changes(path: Path, changes: Sequence[str], device: str = "auto") -> tuple[Task[Any, Any], Model]:
    """Load a task and its model onto a device."""
    from foci.capture.model_loading import resolve_device
    from foci.tasks.model_file import load_trained_model

    task, model, _ = load_trained_model(path, device=resolve_device(device))
    return apply_changes(task, changes), model


def apply_changes(task: Task[Any, Any], changes: Sequence[str]) -> Task[Any, Any]:
    """The task with changed settings, such as task.beam=8."""
    from foci.training.config import apply_change, check_keys, fields_with_values, read_section

    table: dict[str, Any] = {}
    for change in changes:
        apply_change(table, change)
    others = sorted(table.keys() - {"task"})
    if others:
        hint = f": did you mean task.{others[0]}?" if hasattr(task.settings, others[0]) else ""
        raise ValueError(f"--set must change [task] settings of a trained model, got {', '.join(others)}{hint}")
    if not table:
        return task
    settings = read_section(table, "task", "the changes")
    check_keys(type(task.settings), settings, "task", task.name)
    changed = type(task.settings).from_dict(fields_with_values(task.settings) | settings)
    return type(task).from_learned_state(changed, task.learned_state())


def find_task_model(name: str, path: Path | None) -> Path:
    """The path of a task's model: --model, or runs/TASK, or the pretrained model; a path in place of a task is used."""
    if name not in TASKS and Path(name).exists():
        if path is not None:
            raise ValueError(
                f"--model must be left out where a model takes the place of the task, got {name} and {path}"
            )
        return Path(name)
    if name not in TASKS:
        hint = suggest_name(name, TASKS)
        raise ValueError(f"task must be one of {', '.join(TASKS)}, or the path of a model, got {name!r}{hint}")
    if path is not None:
        return resolve_model_path(path)
    for candidate in (Path("runs") / name, models.MODELS_DIRECTORY / name):
        if candidate.is_dir():
            return candidate
    raise ValueError(models.describe_missing_model(name))


def resolve_model_path(path: Path) -> Path:
    """An existing path, or the path of the pretrained model with that name."""
    is_name = not path.exists() and str(path) in models.list_pretrained()
    if not path.exists() and not is_name and str(path) in models.TRAINING_DATA:
        raise ValueError(models.describe_missing_model(str(path)))
    if not path.exists() and not is_name:
        names = models.list_pretrained()
        raise ValueError(
            f"model must be a run directory, a model file or a pretrained model ({', '.join(names)}), got {path}:"
            f" no such path{suggest_name(str(path), names, '; ')}"
        )
    return models.MODELS_DIRECTORY / path if is_name else path


def print_truncated(command: str, count: int, total: int, part: str = "") -> None:
    """Report on stderr how many inputs were truncated, and which part of the first one the model read."""
    if count:
        which = f"{count} of {total} inputs {'is' if count == 1 else 'are'} longer than the model can read"
        of_which = "" if count == 1 else " of the first of them"
        print_status(command, f"{which}: it read {part}{of_which}" if part else f"{which}: truncated")

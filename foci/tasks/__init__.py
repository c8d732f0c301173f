"""What attention is used for: each task is one file with the same few methods (`foci.tasks.task.Task`)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from foci.tasks.task import Problem, Task

__all__ = ["TASKS", "Problem", "Task", "find"]

# Where each task is; a task is imported when it is named, because each needs other packages.
TASKS = {
    "translation": "foci.tasks.translation:Translation",
    "generation": "foci.tasks.generation:Generation",
    "vision": "foci.tasks.vision:Vision",
    "sentiment": "foci.tasks.sentiment:Sentiment",
    "speech": "foci.tasks.speech:Speech",
    "summarization": "foci.tasks.summarization:Summarization",
}


def find_task(name: str) -> type[Task[Any, Any]]:
    """The task with this name.

    >>> import foci.tasks
    >>> foci.tasks.find_task("translation").metric
    'bleu'
    """
    if name not in TASKS:
        raise ValueError(f"expected one of the tasks {', '.join(TASKS)}, but got {name!r}")
    module, kind = TASKS[name].split(":")
    found: type[Task[Any, Any]] = getattr(import_module(module), kind)
    return found

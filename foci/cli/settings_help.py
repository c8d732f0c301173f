"""`foci train --settings`: every field of [task] and [train] with its default and its comment."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from foci.nn.config import Config
from foci.tasks import find_task
from foci.training import TrainConfig

# Each field of a config is one line: name, type, default and, after two spaces, a comment.
CONFIG_FIELD = re.compile(r"^    (\w+): .*?  # (.*)$", re.MULTILINE)


def describe_settings(task: str) -> str:
    """The settings of a task's run, one per line.

    >>> print(describe_settings("translation").splitlines()[1])
      task.model              transformer  rnn: recurrent, with additive attention [transformer, rnn]
    """
    sections = {"task": find_task(task).settings_type, "train": TrainConfig}
    return "\n\n".join("\n".join([f"[{name}]", *format_section(name, kind)]) for name, kind in sections.items())


def format_section(section: str, kind: type[Config]) -> Iterator[str]:
    comments, kinds = dict(CONFIG_FIELD.findall(inspect.getsource(kind))), get_type_hints(kind)
    keys = {field.name: f"{section}.{field.name}" for field in fields(kind)}
    defaults = {field.name: format_default(field.default) for field in fields(kind)}
    left, middle = (max(map(len, column.values())) for column in (keys, defaults))
    for name, key in keys.items():
        parts = (kinds[name], *get_args(kinds[name]))
        choices = next((get_args(part) for part in parts if get_origin(part) is Literal), ())
        one_of = f" [{', '.join(choices)}]" if choices else ""
        yield f"  {key:<{left}}  {defaults[name]:<{middle}}  {comments[name]}{one_of}"


def format_default(value: Any) -> str:
    """A default as --set accepts it; "-" for None, which another setting decides, mostly the size."""
    if value is None:
        return "-"
    return value if isinstance(value, str) and value else json.dumps(value)

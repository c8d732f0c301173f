"""What --set takes: every field of [task] and [train], with its default and the comment that stands behind it."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from foci.nn.config import Config
from foci.tasks import find
from foci.training import TrainConfig

# A field of a config is one line of its class: name, type, default, and after two spaces what it is.
CONFIG_FIELD = re.compile(r"^    (\w+): .*?  # (.*)$", re.MULTILINE)


def describe_settings(task: str) -> str:
    """The settings of a task's run, a line each.

    >>> print(listed("translation").splitlines()[1])
      task.model              transformer  rnn: recurrent, with additive attention [transformer, rnn]
    """
    sections = {"task": find(task).settings_type, "train": TrainConfig}
    return "\n\n".join("\n".join([f"[{name}]", *format_section(name, kind)]) for name, kind in sections.items())


def format_section(section: str, kind: type[Config]) -> Iterator[str]:
    said, kinds = dict(CONFIG_FIELD.findall(inspect.getsource(kind))), get_type_hints(kind)
    keys = {field.name: f"{section}.{field.name}" for field in fields(kind)}
    defaults = {field.name: format_default(field.default) for field in fields(kind)}
    left, middle = (max(map(len, column.values())) for column in (keys, defaults))
    for name, key in keys.items():
        choices = get_args(kinds[name]) if get_origin(kinds[name]) is Literal else ()
        one_of = f" [{', '.join(choices)}]" if choices else ""
        yield f"  {key:<{left}}  {defaults[name]:<{middle}}  {said[name]}{one_of}"


def format_default(value: Any) -> str:
    """As --set takes it; what has no value of its own is chosen by something else, mostly the size."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)

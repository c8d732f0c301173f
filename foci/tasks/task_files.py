"""Parses the small JSON files of a task that a model file holds: class names and feature statistics."""

from __future__ import annotations

import math
import reprlib
from typing import Any

from foci.runtime.json_text import parse_json


def parse_object(text: str, name: str, *keys: str) -> list[Any]:
    """Parses a JSON object with exactly these keys and returns their values, in this order.

    >>> parse_object('{"std": [1.0, 2.0]}', "frames.json", "std")
    [[1.0, 2.0]]
    """
    content = parse_json(text, name)
    if not isinstance(content, dict) or content.keys() != {*keys}:
        raise ValueError(f"{name} must be an object with {', '.join(keys)}, got {reprlib.repr(content)}")
    return [content[key] for key in keys]


def check_class_names(names: Any) -> list[str]:
    """Returns the names of the classes; refuses all but a list of different texts."""
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"the class names must be a list of texts, got {reprlib.repr(names)}")
    if len({*names}) != len(names):
        raise ValueError(f"the class names must be different, got {reprlib.repr(names)}")
    return names


def check_numbers(values: Any, name: str, above: float = -math.inf) -> list[float]:
    """Returns the numbers; refuses all but a list of finite numbers above a bound."""
    fits = isinstance(values, list) and all(
        isinstance(value, float | int) and above < value < math.inf for value in values
    )
    if not fits or not values:
        expected = "finite numbers" if above == -math.inf else f"finite numbers above {above}"
        raise ValueError(f"{name} must be a list of {expected}, got {reprlib.repr(values)}")
    return [float(value) for value in values]

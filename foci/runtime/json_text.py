"""JSON texts of files, bounded in length and depth before anything walks through them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from foci.runtime.limits import MAX_JSON_CHARACTERS

# Masks that combine other masks are the deepest texts that foci writes.
MAX_JSON_DEPTH = 200


def parse_json(text: str, name: str) -> Any:
    """Parses the JSON of a file; `name` says in errors what it is.

    >>> parse_json('{"width": 64}', "the config")
    {'width': 64}
    >>> parse_json("[" * 300 + "]" * 300, "the config")
    Traceback (most recent call last):
    ValueError: the config must have at most 200 levels of nested JSON, got more
    """
    MAX_JSON_CHARACTERS.check(name, len(text))
    try:
        content = json.loads(text)
        is_too_deep = exceeds_depth(content)
    except RecursionError:
        is_too_deep = True
    except ValueError as error:
        raise ValueError(f"{name} must be valid JSON, got an error in it: {error}") from error
    if is_too_deep:
        raise ValueError(f"{name} must have at most {MAX_JSON_DEPTH} levels of nested JSON, got more")
    return content


def exceeds_depth(content: Any) -> bool:
    """Whether objects and arrays are nested deeper than the limit."""
    level = [content]
    for _ in range(MAX_JSON_DEPTH):
        level = [inner for each in level for inner in list_inner_values(each) if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def list_inner_values(value: Any) -> Iterable[Any]:
    """The values inside a JSON object or array."""
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()

"""Finds the name that a misspelt one was meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def suggest_name(name: str, known: Iterable[str], before: str = ": ") -> str:
    """The end of an error message for an unknown name: the most similar known one, or an empty text.

    >>> suggest_name("maks", ["mask", "bias"]), suggest_name("size", ["mask"])
    (': did you mean mask?', '')
    """
    return "".join(f"{before}did you mean {each}?" for each in get_close_matches(name, [*known], 1))

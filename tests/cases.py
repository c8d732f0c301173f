"""Lists of test cases of which only some belong to the default run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mark_most_slow(cases: Iterable[Any], every: int) -> list[Any]:
    """Mark all cases slow but each `every`-th one, the first included; a tuple is a case of several values."""
    marked = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=[pytest.mark.slow] if number % every else []))
    return marked

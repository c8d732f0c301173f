"""Describes a path for error messages."""

from __future__ import annotations

from pathlib import Path


def describe_path(path: Path) -> str:
    """Describes what is at a path that is not a file: the end of "... must be a file, got ...".

    >>> describe_path(Path("nowhere.png"))
    'no such file'
    """
    return "a directory" if path.is_dir() else "something else" if path.exists() else "no such file"

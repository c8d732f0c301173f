"""What is found where a file should be."""

from __future__ import annotations

from pathlib import Path


def found_at(path: Path) -> str:
    """What is at a path that is no file: the end of "but there is ...".

    >>> found_at(Path("nowhere.png"))
    'no such file'
    """
    return "a folder" if path.is_dir() else "something else" if path.exists() else "no such file"

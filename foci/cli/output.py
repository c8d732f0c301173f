"""What a command cannot write, or cannot read as text, is said before a model runs for it."""

from __future__ import annotations

from pathlib import Path

# The status of a command that was given something wrong.
BAD_INPUT = 2


def check_out_path(path: Path | None, *texts: str) -> None:
    """Refuses an ending that nobody knows; `texts` are those beside the ones that a record is saved as."""
    if path is None:
        return
    from foci.record.record import SAVE_SUFFIXES

    *some, last = (*SAVE_SUFFIXES, *texts)
    if path.suffix.lower() not in (*some, last):
        raise ValueError(f"expected --out to end with {', '.join(some)} or {last}, received {path}")
    check_file_path(path, "--out")


def check_file_path(path: Path, option: str) -> None:
    """Refuses a file whose folder is not there, and a folder in its place."""
    if not path.parent.is_dir():
        raise ValueError(f"expected a folder for {option}, but {path.parent} is not there")
    if path.is_dir():
        raise ValueError(f"expected a file for {option}, but {path} is a folder")


def check_utf8(text: str) -> str:
    """The text; refuses bytes that are no UTF-8, which Python lets through from a terminal or a pipe."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"expected a text in UTF-8, but got {text[:60]!r}") from error
    return text


def describe_error(problem: Exception) -> str:
    """An error in one sentence; of one of the system's, a file that may not be read, what it says and about which."""
    if isinstance(problem, OSError) and problem.filename and problem.strerror:
        return f"{problem.filename}: {problem.strerror}"
    return str(problem)

"""Checks of output paths and input texts, exit statuses, and printing, for all commands."""

from __future__ import annotations

import sys
from pathlib import Path

from foci.runtime.console import TextPage
from foci.runtime.printable import escape_controls, make_printable

# Exit statuses: bad input or usage; any other failure.
BAD_INPUT = 2
FAILURE = 1
# Written out because importing foci.tasks imports torch.
TASK_NAMES = "translation, generation, vision, sentiment, speech or summarization"


def check_out_path(path: Path | None, *suffixes: str) -> None:
    """Refuse an --out path with an unknown suffix; `suffixes` are accepted in addition to those of records."""
    if path is None:
        return
    from foci.record.record import SAVE_SUFFIXES

    *others, last = (*SAVE_SUFFIXES, *suffixes)
    if path.suffix.lower() not in (*others, last):
        raise ValueError(f"--out must end with {', '.join(others)} or {last}, got {path}")
    check_file_path(path, "--out")


def check_file_path(path: Path, option: str) -> None:
    """Refuse a path in a directory that does not exist, and a directory."""
    if not path.parent.is_dir():
        raise ValueError(f"{option} must be in an existing directory, got {path}: {path.parent} does not exist")
    if path.is_dir():
        raise ValueError(f"{option} must be a file, got the directory {path}")


def check_utf8(text: str) -> str:
    """Return the text; refuse bytes that are not UTF-8, which Python accepts from a terminal or a pipe."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text must be valid UTF-8, got {text[:60]!r}") from error
    return text


def describe_error(error: Exception) -> str:
    """An error in one sentence; for an OSError the file and the system's message."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def print_status(command: str, message: str) -> None:
    """Print a message to stderr, so that it does not mix with the output of the command."""
    print(make_printable(f"foci {command}: {message}"), file=sys.stderr, flush=True)


def print_lines(text: str, end: str = "\n") -> None:
    """Print text of any origin, such as names in a dataset or the answer of a model; a terminal executes none of it."""
    print(escape_controls(text), end=end, flush=True)


def print_page(page: TextPage) -> None:
    """Print a page, whose texts are printable and whose colors are our own."""
    print(page)

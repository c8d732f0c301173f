"""Tables in files: TSV and JSONL line by line, and texts, plain or compressed (.gz, .xz)."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from foci.inputs.files import found_at


class Row(NamedTuple):
    """A line of a table: where it stands, and its columns by name; or what is wrong with it."""

    place: str  # "pairs.tsv:12"
    fields: dict[str, str]
    problem: str | None = None  # why it cannot be used; then `fields` is empty
    warning: str | None = None


def rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    r"""The lines of a .tsv (columns in this order) or a .jsonl (columns by name), good and bad.

    A first line of a TSV that holds just the names of the columns is a heading. Empty lines are passed over.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "pairs.tsv")
    ...     written = path.write_text("Hello.\tHallo.\nonly one\n")
    ...     for row in rows(path, ("source", "target")):
    ...         print(row.fields or row.problem)
    {'source': 'Hello.', 'target': 'Hallo.'}
    expected 2 columns (source, target) between tabs, but got 1
    """
    json_lines = kind(path) in {".jsonl", ".ndjson"}
    for number, line, problem in lines(path):
        place = f"{path}:{number}"
        if problem is not None:
            yield Row(place, {}, problem)
        elif not line.strip() or (number == 1 and not json_lines and line.split("\t") == list(columns)):
            continue
        elif json_lines:
            yield from_json(place, line, columns)
        else:
            yield from_tabs(place, line, columns)


def good_rows(
    path: Path, columns: Sequence[str], wrong: Callable[[dict[str, str]], str | None] | None = None
) -> list[Row]:
    """All lines of a table; the first bad one is raised as a ValueError. `wrong` says what else is, of good fields."""
    found = []
    for row in rows(path, columns):
        problem = row.problem or (None if wrong is None else wrong(row.fields))
        if problem is not None:
            raise ValueError(f"{row.place}: {problem}")
        found.append(row)
    if not found:
        raise ValueError(f"{path}: expected at least one line, but it has none")
    return found


def from_tabs(place: str, line: str, columns: Sequence[str]) -> Row:
    parts = line.split("\t")
    names = f"expected {len(columns)} column{'s' * (len(columns) > 1)} ({', '.join(columns)})"
    if len(parts) < len(columns):
        return Row(place, {}, f"{names} between tabs, but got {len(parts)}")
    more = f"{names}, but got {len(parts)}: the others are passed over" if len(parts) > len(columns) else None
    return Row(place, dict(zip(columns, parts, strict=False)), None, more)


def from_json(place: str, line: str, columns: Sequence[str]) -> Row:
    try:
        content = json.loads(line)
    except ValueError as error:
        return Row(place, {}, f"expected a line of JSON, but it cannot be read: {error}")
    if not isinstance(content, dict):
        return Row(place, {}, f"expected an object with {', '.join(columns)}, but got {line[:60]}")
    missing = [name for name in columns if name not in content]
    if missing:
        return Row(place, {}, f"expected the keys {', '.join(columns)}, but got {', '.join(content) or 'none'}")
    wrong = [name for name in columns if isinstance(content[name], list | dict | type(None))]
    if wrong:
        return Row(place, {}, f"expected a text for {wrong[0]!r}, but got {json.dumps(content[wrong[0]])[:60]}")
    return Row(place, {name: str(content[name]) for name in columns})


def lines(path: Path) -> Iterator[tuple[int, str, str | None]]:
    """The number of each line from 1 on, its text, and what is wrong with it where it is no UTF-8."""
    with opened(path) as file:
        try:
            for number, raw in enumerate(file, start=1):
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    found = f"byte {raw[error.start : error.start + 1]!r} at column {error.start + 1}"
                    yield number, "", f"expected UTF-8, but got {found}"
                    continue
                yield number, text.rstrip("\r\n"), None
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} cannot be unpacked: {error}") from error


def text_of(path: Path) -> str:
    """All of a text file."""
    with opened(path) as file:
        try:
            return file.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: expected UTF-8, but byte {error.start} is none") from error
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} cannot be unpacked: {error}") from error


def opened(path: Path) -> BinaryIO:
    """The bytes of a file, unpacked."""
    if not path.is_file():
        raise ValueError(f"expected a file at {path}, but there is {found_at(path)}")
    if path.suffix == ".gz":
        return cast("BinaryIO", gzip.open(path, "rb"))
    return cast("BinaryIO", lzma.open(path, "rb")) if path.suffix == ".xz" else path.open("rb")


def kind(path: Path) -> str:
    """The ending that says what is in a file: .jsonl for train.jsonl.xz."""
    return (path.with_suffix("") if path.suffix in {".gz", ".xz"} else path).suffix.lower()


def only(paths: Sequence[Path], what: str) -> Path:
    """The one path of a task that takes one."""
    if len(paths) != 1:
        raise ValueError(f"expected one path, {what}, but got {len(paths)}: {', '.join(map(str, paths))}")
    if not paths[0].exists():
        raise ValueError(f"expected {what} at {paths[0]}, but there is nothing")
    return paths[0]

"""Reads TSV and JSONL tables line by line, and text files, plain or compressed (.gz, .xz)."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from foci.inputs.files import describe_path


class TableRow(NamedTuple):
    """One line of a table: its location and its columns by name, or the reason why it cannot be used."""

    location: str  # "pairs.tsv:12"
    fields: dict[str, str]
    problem: str | None = None  # why it cannot be used; then `fields` is empty
    warning: str | None = None


def read_table_rows(path: Path, columns: Sequence[str]) -> Iterator[TableRow]:
    r"""Yields the lines of a .tsv (columns in this order) or a .jsonl (columns by name), valid or not.

    A first line of a TSV that holds exactly the column names is a header. Empty lines are skipped.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "pairs.tsv")
    ...     written = path.write_text("Hello.\tHallo.\nonly one\n")
    ...     for row in read_table_rows(path, ("source", "target")):
    ...         print(row.fields or row.problem)
    {'source': 'Hello.', 'target': 'Hallo.'}
    a line must have 2 tab-separated columns (source, target), got 1
    """
    json_lines = data_suffix(path) in {".jsonl", ".ndjson"}
    for number, line, problem in read_lines(path):
        location = f"{path}:{number}"
        if problem is not None:
            yield TableRow(location, {}, problem)
        elif not line.strip() or (number == 1 and not json_lines and line.split("\t") == list(columns)):
            continue
        elif json_lines:
            yield parse_json_row(location, line, columns)
        else:
            yield parse_tsv_row(location, line, columns)


def read_valid_rows(
    path: Path, columns: Sequence[str], check: Callable[[dict[str, str]], str | None] | None = None
) -> list[TableRow]:
    """Reads all lines; raises ValueError for the first invalid one. `check` returns a problem of the fields or None."""
    valid = []
    for row in read_table_rows(path, columns):
        problem = row.problem or (None if check is None else check(row.fields))
        if problem is not None:
            raise ValueError(f"{row.location}: {problem}")
        valid.append(row)
    if not valid:
        raise ValueError(f"{path} must have at least one line, got none")
    return valid


def parse_tsv_row(location: str, line: str, columns: Sequence[str]) -> TableRow:
    parts = line.split("\t")
    expected = f"a line must have {len(columns)} tab-separated column{'s' * (len(columns) > 1)} ({', '.join(columns)})"
    if len(parts) < len(columns):
        return TableRow(location, {}, f"{expected}, got {len(parts)}")
    extra = f"{expected}, got {len(parts)}: the others are ignored" if len(parts) > len(columns) else None
    return TableRow(location, dict(zip(columns, parts, strict=False)), None, extra)


def parse_json_row(location: str, line: str, columns: Sequence[str]) -> TableRow:
    try:
        content = json.loads(line)
    except ValueError as error:
        return TableRow(location, {}, f"a line must be valid JSON: {error}")
    if not isinstance(content, dict):
        return TableRow(
            location, {}, f"a line must be a JSON object with the keys {', '.join(columns)}, got {line[:60]}"
        )
    missing = [name for name in columns if name not in content]
    if missing:
        return TableRow(
            location, {}, f"a line must have the keys {', '.join(columns)}, got {', '.join(content) or 'none'}"
        )
    wrong = [name for name in columns if isinstance(content[name], list | dict | type(None))]
    if wrong:
        return TableRow(location, {}, f"{wrong[0]!r} must be a string, got {json.dumps(content[wrong[0]])[:60]}")
    return TableRow(location, {name: str(content[name]) for name in columns})


def read_lines(path: Path) -> Iterator[tuple[int, str, str | None]]:
    """Yields the number of each line from 1, its text, and the problem if it is not UTF-8."""
    with open_decompressed(path) as file:
        try:
            for number, raw in enumerate(file, start=1):
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    invalid = f"byte {raw[error.start : error.start + 1]!r} at column {error.start + 1}"
                    yield number, "", f"a line must be UTF-8, got {invalid}"
                    continue
                yield number, text.rstrip("\r\n"), None
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} cannot be decompressed: {error}") from error


def read_text_file(path: Path) -> str:
    """Reads a whole text file."""
    with open_decompressed(path) as file:
        try:
            return file.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} must be UTF-8, got an invalid byte at offset {error.start}") from error
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} cannot be decompressed: {error}") from error


def open_decompressed(path: Path) -> BinaryIO:
    """Opens a file for reading bytes, decompressed."""
    if not path.is_file():
        raise ValueError(f"{path} must be a file, got {describe_path(path)}")
    if path.suffix == ".gz":
        return cast("BinaryIO", gzip.open(path, "rb"))
    return cast("BinaryIO", lzma.open(path, "rb")) if path.suffix == ".xz" else path.open("rb")


def data_suffix(path: Path) -> str:
    """Returns the suffix without the compression: .jsonl for train.jsonl.xz."""
    return (path.with_suffix("") if path.suffix in {".gz", ".xz"} else path).suffix.lower()


def require_one_path(paths: Sequence[Path], what: str) -> Path:
    """Returns the only path; raises ValueError for none, several, or a missing one."""
    if len(paths) != 1:
        raise ValueError(f"the data must be one path, {what}, got {len(paths)}: {', '.join(map(str, paths))}")
    if not paths[0].exists():
        raise ValueError(f"{paths[0]} must be {what}, but it does not exist")
    return paths[0]

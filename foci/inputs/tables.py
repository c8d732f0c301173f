"""Reads TSV, CSV and JSONL tables line by line, and text files, plain or compressed (.gz, .xz)."""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from foci.inputs.files import describe_path
from foci.runtime.limits import MAX_EXPANSION, MAX_LINE_BYTES, MAX_TEXT_BYTES

JSON_SUFFIXES = (".jsonl", ".ndjson")
COMPRESSED_SUFFIXES = (".gz", ".xz")
# Compressed files that expand to no more bytes than this are read however small they are.
SMALL_TEXT_BYTES = 2**22
DECOMPRESSED_CHUNK = 2**20
# A first row of such words is a header if the rows below, at most this many, look different.
HEADER_WORD = re.compile(r"[a-z][a-z0-9_]*")
HEADER_SAMPLE = 50
# Column names that are used often, in any case; most are lower-case words.
HEADER_NAMES = ("source", "target", "input", "output", "text", "label", "english", "german", "french", "spanish")
SURROGATE = re.compile("[\ud800-\udfff]")
DECOMPRESSION_ERRORS = (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error)


class TableRow(NamedTuple):
    """One line of a table: its location and its columns by name, or the reason why it cannot be used."""

    location: str  # "pairs.tsv:12"
    fields: dict[str, str]
    problem: str | None = None  # why it cannot be used; then `fields` is empty
    warning: str | None = None


class TableWarning(UserWarning):
    """Something in a table that is read differently from what its author may have meant."""


class CellRow(NamedTuple):
    """The cells of one row, with the number of its line from 1, or the reason why it cannot be used."""

    number: int
    cells: list[str]
    problem: str | None = None


def read_table_rows(path: Path, columns: Sequence[str]) -> Iterator[TableRow]:
    r"""Yields the lines of a .tsv or .csv (columns in this order) or a .jsonl (columns by name), valid or not.

    A first line with the column names, in any order and among others, is a header. So is a line of other single words
    above rows that look different; the first row then has a warning. Empty lines are skipped.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "pairs.tsv")
    ...     written = path.write_text("Hello.\tHallo.\nonly one\n")
    ...     for row in read_table_rows(path, ("source", "target")):
    ...         print(row.fields or row.problem)
    {'source': 'Hello.', 'target': 'Hallo.'}
    a line must have 2 tab-separated columns (source, target), got 1
    """
    if data_suffix(path) in JSON_SUFFIXES:
        return (
            TableRow(f"{path}:{number}", {}, problem) if problem else parse_json_row(f"{path}:{number}", line, columns)
            for number, line, problem in read_lines(path)
            if problem or line.strip()
        )
    return read_cell_table(path, columns)


def read_cell_table(path: Path, columns: Sequence[str]) -> Iterator[TableRow]:
    is_csv = data_suffix(path) == ".csv"
    rows = read_csv_cells(path) if is_csv else read_tsv_cells(path)
    start = list(islice(rows, HEADER_SAMPLE + 1))
    header, is_named = find_header(start, columns)
    names = header if is_named else columns
    separator = "comma" if is_csv else "tab"
    parsed = (
        parse_cells(f"{path}:{row.number}", row, names, columns, separator)
        for row in chain(start[bool(header) :], rows)
    )
    if header and not is_named:
        cells, taken = ", ".join(header)[:60], " and ".join(columns)
        notice = f"line {start[0].number} ({cells}) is read as a header; the columns in order are {taken}"
        yield next(parsed)._replace(warning=notice)
    yield from parsed


def find_header(start: Sequence[CellRow], columns: Sequence[str]) -> tuple[list[str], bool]:
    """Returns the cells of a header, or none; and whether they name the columns."""
    if not start or start[0].problem:
        return [], False
    first = [cell.strip() for cell in start[0].cells]
    named = [name.lower() for name in first]
    if set(columns) <= set(named) and len(set(named)) == len(named):
        return named, True
    below = [row.cells for row in start[1:] if not row.problem and len(row.cells) == len(first)]
    words = all(HEADER_WORD.fullmatch(cell) or cell.lower() in HEADER_NAMES for cell in first)
    if len(first) < len(columns) or len(set(first)) < len(first) or not words or not below:
        return [], False
    below_columns = [{cell.strip() for cell in column} - {""} for column in zip(*below, strict=True)]
    differs = any(cells and not any(map(HEADER_WORD.fullmatch, cells)) for cells in below_columns)
    # A cell that occurs again below, such as a label, belongs to the data.
    occurs_again = any(cell in cells for cell, cells in zip(first, below_columns, strict=True))
    return (first, False) if differs and not occurs_again else ([], False)


def read_tsv_cells(path: Path) -> Iterator[CellRow]:
    for number, line, problem in read_lines(path):
        if problem or line.strip():
            yield CellRow(number, line.split("\t"), problem)


def read_csv_cells(path: Path) -> Iterator[CellRow]:
    """Yields the rows of a file of comma-separated values; a quoted cell may hold commas and line breaks."""
    problems: list[CellRow] = []

    def decode() -> Iterator[str]:
        for number, line, problem in read_lines(path):
            if problem:
                problems.append(CellRow(number, [], problem))
            yield line + "\n"

    lines = decode()
    first = next(lines, "")
    reader = csv.reader(chain([first], lines), delimiter=max(",;\t", key=first.count), strict=True)
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            cells = []
            problems.append(CellRow(number, [], f"a line must be valid CSV: {error}"))
        yield from problems
        problems.clear()
        if cells is None:
            return
        if any(cell.strip() for cell in cells):
            yield CellRow(number, cells)


def read_valid_rows(
    path: Path, columns: Sequence[str], check: Callable[[dict[str, str]], str | None] | None = None
) -> list[TableRow]:
    """Reads all lines; raises ValueError for the first invalid one. `check` returns a problem of the fields or None."""
    valid = []
    for row in show_first_warning(read_table_rows(path, columns)):
        problem = row.problem or (None if check is None else check(row.fields))
        if problem is not None:
            raise ValueError(f"{row.location}: {problem}")
        valid.append(row)
    if not valid:
        raise ValueError(f"{path} must have at least one line, got none")
    return valid


def show_first_warning(rows: Iterable[TableRow]) -> Iterator[TableRow]:
    """Yields the rows; issues a `TableWarning` for the first row that has a warning."""
    shown = False
    for row in rows:
        if row.warning is not None and not shown:
            warnings.warn(f"{row.location}: {row.warning}", TableWarning, stacklevel=2)
            shown = True
        yield row


def parse_cells(location: str, row: CellRow, names: Sequence[str], columns: Sequence[str], separator: str) -> TableRow:
    """Takes the columns from the cells of a row; `names` are those of the cells."""
    if row.problem:
        return TableRow(location, {}, row.problem)
    count = len(row.cells)
    expected = (
        f"a line must have {len(names)} {separator}-separated column{'s' * (len(names) > 1)} ({', '.join(names)})"
    )
    if count < len(names):
        by_comma = count == 1 and separator == "tab" and row.cells[0].count(",") + 1 >= len(names)
        hint = "; the name of a file with commas between columns must end with .csv" if by_comma else ""
        return TableRow(location, {}, f"{expected}, got {count}{hint}")
    extra = f"{expected}, got {count}: the others are ignored" if count > len(names) else None
    fields = dict(zip(names, row.cells, strict=False))
    return TableRow(location, {name: fields[name] for name in columns}, None, extra)


def parse_json_row(location: str, line: str, columns: Sequence[str]) -> TableRow:
    try:
        content = json.loads(line)
    except ValueError as error:
        return TableRow(location, {}, f"a line must be valid JSON: {error}")
    except RecursionError:
        return TableRow(location, {}, "a line must be valid JSON, got objects or lists nested too deeply")
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
    fields = {name: str(content[name]) for name in columns}
    broken = [name for name, text in fields.items() if SURROGATE.search(text)]
    if broken:
        return TableRow(location, {}, f"{broken[0]!r} must be valid Unicode, got half of a surrogate pair")
    return TableRow(location, fields)


def read_lines(path: Path) -> Iterator[tuple[int, str, str | None]]:
    """Yields the number of each line from 1, its text, and the problem if it is not UTF-8."""
    for number, raw in enumerate(read_raw_lines(path), start=1):
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            invalid = f"byte {raw[error.start : error.start + 1]!r} at column {error.start + 1}"
            yield number, "", f"a line must be UTF-8, got {invalid}"
            continue
        yield number, text.rstrip("\r\n"), None


def read_raw_lines(path: Path) -> Iterator[bytes]:
    """Yields the lines as bytes; raises ValueError for a line or an expansion above the limits."""
    check_expansion(path)
    longest = MAX_LINE_BYTES.value
    with open_decompressed(path) as file:
        try:
            while raw := file.readline(longest + 1):
                if len(raw) > longest:
                    raise MAX_LINE_BYTES.exceeded(path, "more")
                yield raw
        except DECOMPRESSION_ERRORS as error:
            raise ValueError(f"{path} cannot be decompressed: {error}") from error


def read_text_file(path: Path) -> str:
    """Reads a whole text file."""
    check_expansion(path)
    largest = MAX_TEXT_BYTES.value
    with open_decompressed(path) as file:
        try:
            content = file.read(largest + 1)
        except DECOMPRESSION_ERRORS as error:
            raise ValueError(f"{path} cannot be decompressed: {error}") from error
    if len(content) > largest:
        raise MAX_TEXT_BYTES.exceeded(path, "more")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8, got an invalid byte at offset {error.start}") from error


def check_expansion(path: Path) -> None:
    """Refuses a compressed file that expands too much, before anything is made of its content."""
    if path.suffix not in COMPRESSED_SUFFIXES or not path.is_file():
        return
    left = max(MAX_EXPANSION.value * path.stat().st_size, SMALL_TEXT_BYTES)
    with open_decompressed(path) as file:
        try:
            while left >= 0 and (chunk := file.read(DECOMPRESSED_CHUNK)):
                left -= len(chunk)
        except DECOMPRESSION_ERRORS as error:
            raise ValueError(f"{path} cannot be decompressed: {error}") from error
    if left < 0:
        raise MAX_EXPANSION.exceeded(path, "more")


def open_decompressed(path: Path) -> BinaryIO:
    """Opens a file for reading bytes, decompressed."""
    if not path.is_file():
        raise ValueError(f"{path} must be a file, got {describe_path(path)}")
    if path.suffix == ".gz":
        return cast("BinaryIO", gzip.open(path, "rb"))
    return cast("BinaryIO", lzma.open(path, "rb")) if path.suffix == ".xz" else path.open("rb")


def data_suffix(path: Path) -> str:
    """Returns the suffix without the compression: .jsonl for train.jsonl.xz."""
    return (path.with_suffix("") if path.suffix in COMPRESSED_SUFFIXES else path).suffix.lower()


def require_one_path(paths: Sequence[Path], what: str) -> Path:
    """Returns the only path; raises ValueError for none, several, or a missing one."""
    if len(paths) != 1:
        raise ValueError(f"the data must be one path, {what}, got {len(paths)}: {', '.join(map(str, paths))}")
    if not paths[0].exists():
        raise ValueError(f"{paths[0]} must be {what}, but it does not exist")
    return paths[0]

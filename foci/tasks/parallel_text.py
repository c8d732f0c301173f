"""Reads and checks pairs of texts for translation, from a table or from parallel files."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from foci.inputs.tables import TableRow, read_lines, read_table_rows, show_first_warning
from foci.tasks.task import Problem

COLUMNS = ("source", "target")
# If one side is this many times longer than the other, it is rarely a translation.
MAX_LENGTH_RATIO = 5


@dataclass(frozen=True)
class Pair:
    """A source text and its target text."""

    source: str
    target: str


def read_pairs(paths: Sequence[Path]) -> list[Pair]:
    """Reads the pairs of a table or of two parallel files; raises ValueError for the first invalid line."""
    pairs = []
    for row in show_first_warning(read_pair_rows(paths)):
        problem = row.problem or find_empty_side(row)
        if problem is not None:
            raise ValueError(f"{row.location}: {problem}")
        pairs.append(Pair(row.fields["source"].strip(), row.fields["target"].strip()))
    if not pairs:
        raise ValueError(f"{paths[0]} must hold at least one pair, got none")
    return pairs


def read_pair_rows(paths: Sequence[Path]) -> Iterator[TableRow]:
    """Yields the rows of a TSV, CSV or JSONL with source and target, or of two files matched line by line."""
    if len(paths) == 1:
        yield from read_table_rows(paths[0], COLUMNS)
    elif len(paths) == 2:
        yield from zip_parallel_files(paths[0], paths[1])
    else:
        raise ValueError(
            f"the data must be one table or two parallel files, got {len(paths)}: {', '.join(map(str, paths))}"
        )


def zip_parallel_files(first: Path, second: Path) -> Iterator[TableRow]:
    for left, right in zip_longest(read_lines(first), read_lines(second)):
        if left is None or right is None:
            longer, shorter = (second, first) if left is None else (first, second)
            number = (left or right)[0]
            yield TableRow(
                f"{longer}:{number}", {}, f"the file must have as many lines as {shorter} ({number - 1}), got more"
            )
            return
        location = f"{first}:{left[0]}"
        problem = left[2] or right[2]
        yield TableRow(location, {} if problem else {"source": left[1], "target": right[1]}, problem)


def find_empty_side(row: TableRow) -> str | None:
    empty = [name for name, text in row.fields.items() if not text.strip()]
    return f"{empty[0]} must not be empty" if empty else None


def check_pairs(paths: Sequence[Path]) -> Iterator[Problem]:
    """Yields all errors and warnings, line by line."""
    seen: dict[tuple[str, str], str] = {}
    count = 0
    for row in read_pair_rows(paths):
        problem = row.problem or find_empty_side(row)
        if problem is not None:
            yield Problem(row.location, problem)
            continue
        count += 1
        pair = row.fields["source"].strip(), row.fields["target"].strip()
        for warning in filter(None, [row.warning, *find_pair_warnings(*pair)]):
            yield Problem(row.location, warning, "warning")
        first = seen.setdefault(pair, row.location)
        if first != row.location:
            yield Problem(row.location, f"duplicate of {first}", "warning")
    if not count:
        yield Problem(str(paths[0]), "the file must hold at least one pair, got none")


def find_pair_warnings(source: str, target: str) -> list[str]:
    """Returns the reasons why a pair looks wrong."""
    warnings = []
    if source == target and len(source.split()) > 2:
        warnings.append("source and target are the same")
    sides = sorted([len(source), len(target)])
    if sides[1] > MAX_LENGTH_RATIO * sides[0] and sides[1] > 40:
        warnings.append(f"source and target differ much in length: {len(source)} and {len(target)} characters")
    for side, text in (("source", source), ("target", target)):
        odd = next((letter for letter in text if letter == "�" or unicodedata.category(letter) == "Cc"), None)
        if odd is not None:
            warnings.append(f"{side} contains the unreadable character {odd!r}")
    return warnings

"""Pairs of texts, as translation has them: read from a table or from parallel files, and checked."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from foci.inputs.tables import Row, lines, rows
from foci.tasks.task import Problem

COLUMNS = ("source", "target")
# One side that is so many times longer than the other is rarely its translation.
UNEQUAL = 5


@dataclass(frozen=True)
class Pair:
    """A text and what should be written to it."""

    source: str
    target: str


def read_pairs(paths: Sequence[Path]) -> list[Pair]:
    """The pairs of a table or of two parallel files; the first error is raised."""
    found = []
    for row in pair_rows(paths):
        problem = row.problem or missing(row)
        if problem is not None:
            raise ValueError(f"{row.place}: {problem}")
        found.append(Pair(row.fields["source"].strip(), row.fields["target"].strip()))
    if not found:
        raise ValueError(f"{paths[0]}: expected at least one pair, but it has none")
    return found


def pair_rows(paths: Sequence[Path]) -> Iterator[Row]:
    """The lines of one TSV or JSONL with source and target, or of two files, line i of one with line i of the other."""
    if len(paths) == 1:
        yield from rows(paths[0], COLUMNS)
    elif len(paths) == 2:
        yield from parallel(paths[0], paths[1])
    else:
        raise ValueError(
            f"expected one table or two parallel files, but got {len(paths)}: {', '.join(map(str, paths))}"
        )


def parallel(first: Path, second: Path) -> Iterator[Row]:
    for left, right in zip_longest(lines(first), lines(second)):
        if left is None or right is None:
            longer, shorter = (second, first) if left is None else (first, second)
            number = (left or right)[0]
            yield Row(f"{longer}:{number}", {}, f"expected as many lines as {shorter} has, {number - 1}, but got more")
            return
        place = f"{first}:{left[0]}"
        wrong = left[2] or right[2]
        yield Row(place, {} if wrong else {"source": left[1], "target": right[1]}, wrong)


def missing(row: Row) -> str | None:
    empty = [name for name, text in row.fields.items() if not text.strip()]
    return f"expected a text as {empty[0]}, but it is empty" if empty else None


def pair_problems(paths: Sequence[Path]) -> Iterator[Problem]:
    """Everything that is wrong with pairs, line by line."""
    seen: dict[tuple[str, str], str] = {}
    count = 0
    for row in pair_rows(paths):
        problem = row.problem or missing(row)
        if problem is not None:
            yield Problem(row.place, problem)
            continue
        count += 1
        pair = row.fields["source"].strip(), row.fields["target"].strip()
        for warning in filter(None, [row.warning, *doubts(*pair)]):
            yield Problem(row.place, warning, "warning")
        first = seen.setdefault(pair, row.place)
        if first != row.place:
            yield Problem(row.place, f"expected every pair once, but it is the same as {first}", "warning")
    if not count:
        yield Problem(str(paths[0]), "expected at least one pair, but it has none")


def doubts(source: str, target: str) -> list[str]:
    """What makes a pair look wrong."""
    found = []
    if source == target and len(source.split()) > 2:
        found.append("expected a translation, but both sides are the same")
    sides = sorted([len(source), len(target)])
    if sides[1] > UNEQUAL * sides[0] and sides[1] > 40:
        found.append(f"expected sides of similar length, but they have {len(source)} and {len(target)} characters")
    for side, text in (("source", source), ("target", target)):
        odd = next((letter for letter in text if letter == "�" or unicodedata.category(letter) == "Cc"), None)
        if odd is not None:
            found.append(f"expected readable text as {side}, but it has the character {odd!r}")
    return found

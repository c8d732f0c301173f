"""refusals.csv: what each backend refuses. It must support everything else, so that missing and superfluous lines fail.

A line names values of at most two choices, separated by spaces; an empty field means all values.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

from foci.backends import cpu_c
from foci.runtime import native
from tests.contract.cells import CHOICES, Cell, possible
from tests.contract.pairwise import Place, Row, pairwise

NAMED = ("shape", "mask", "bias", "score", "dtype")
Line = dict[str, frozenset[str]]


@cache
def refused_lines(device: str, backend: str) -> list[Line]:
    """The lines of a backend: the named values by choice. Without a C compiler, cpu_c refuses everything."""
    if backend == cpu_c.NAME and native.why_unavailable("attention") is not None:
        return [{}]
    with (Path(__file__).parent / "refusals.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if (row["device"], row["backend"]) == (device, backend)]
    return [{name: frozenset(row[name].split()) for name in NAMED if row[name]} for row in rows]


def must_refuse(device: str, backend: str, cell: Cell) -> bool:
    return any(matches(line, cell) for line in refused_lines(device, backend))


def matches(line: Line, cell: Cell) -> bool:
    return all(cell[name] in values for name, values in line.items())


@cache
def all_cells() -> tuple[Cell, ...]:
    """Cells that cover every pair of choices that can occur in one call."""
    return tuple(pairwise(CHOICES, possible))


@cache
def supported_cells(device: str, backend: str) -> tuple[Row, ...]:
    """Cells that cover every pair of choices that the backend must support."""
    lines = refused_lines(device, backend)

    def compatible(one: Place, other: Place) -> bool:
        pair = dict((one, other))
        refused = any(line.keys() <= pair.keys() and matches(line, pair) for line in lines)
        return possible(one, other) and not refused

    return tuple(pairwise(CHOICES, compatible))

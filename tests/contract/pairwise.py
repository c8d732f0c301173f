"""Pairwise testing: few rows that cover every allowed pair of values, as most bugs depend on one or two choices."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

Row = dict[str, str]
Place = tuple[str, str]
Pair = tuple[Place, Place]
Choices = dict[str, list[str]]
Compatible = Callable[[Place, Place], bool]


def pairwise(choices: Choices, compatible: Compatible) -> list[Row]:
    """Rows with one value per name that cover every compatible pair of values; deterministic."""
    missing = dict.fromkeys(pair for pair in pairs(choices) if compatible(*pair))
    rows = []
    while missing:
        pair = next(iter(missing))
        row = completed(dict(pair), choices, compatible, missing)
        if row is None:
            # No complete row is compatible with both values.
            del missing[pair]
            continue
        for covered in pairs_of(row, choices):
            missing.pop(covered, None)
        rows.append(row)
    return rows


def completed(row: Row, choices: Choices, compatible: Compatible, missing: dict[Pair, None]) -> Row | None:
    """Completes the row by the values that cover the most missing pairs; None where no value is compatible."""
    name = next((name for name in choices if name not in row), None)
    if name is None:
        return row

    def met(value: str) -> list[Pair]:
        return [ordered((name, value), place, choices) for place in row.items()]

    fitting = [value for value in choices[name] if all(compatible(*pair) for pair in met(value))]
    for value in sorted(fitting, key=lambda value: -sum(pair in missing for pair in met(value))):
        found = completed(row | {name: value}, choices, compatible, missing)
        if found is not None:
            return found
    return None


def pairs(choices: Choices) -> list[Pair]:
    return [
        ((first, a), (second, b))
        for first, second in combinations(choices, 2)
        for a in choices[first]
        for b in choices[second]
    ]


def pairs_of(row: Row, choices: Choices) -> list[Pair]:
    return [((first, row[first]), (second, row[second])) for first, second in combinations(choices, 2)]


def ordered(one: Place, other: Place, choices: Choices) -> Pair:
    names = list(choices)
    return (one, other) if names.index(one[0]) < names.index(other[0]) else (other, one)

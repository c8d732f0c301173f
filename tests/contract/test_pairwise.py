"""The pairwise generator: complete, compatible, short and deterministic."""

import pytest

from tests.contract.pairwise import Compatible, Place, pairs, pairs_of, pairwise

CHOICES = {
    "size": ["s", "m", "l", "xl"],
    "colour": ["red", "green", "blue"],
    "cut": ["a", "b"],
    "sleeve": ["no", "yes"],
}


def never(*excluded: set[str]) -> Compatible:
    def compatible(one: Place, other: Place) -> bool:
        return not any(values <= {one[1], other[1]} for values in excluded)

    return compatible


@pytest.mark.parametrize("excluded", [[], [{"s", "red"}], [{"s", "red"}, {"xl", "yes"}, {"red", "b"}]])
def test_every_allowed_pair_is_in_a_row_and_no_other(excluded: list[set[str]]) -> None:
    compatible = never(*excluded)
    rows = pairwise(CHOICES, compatible)
    met = {pair for row in rows for pair in pairs_of(row, CHOICES)}
    assert met == {pair for pair in pairs(CHOICES) if compatible(*pair)}


def test_the_rows_are_few_and_always_the_same() -> None:
    rows = pairwise(CHOICES, never())
    assert 12 <= len(rows) <= 14
    assert rows == pairwise(CHOICES, never())


def test_pairs_that_no_row_can_hold_are_left_out() -> None:
    # A red shirt goes with neither cut, so no row has one.
    rows = pairwise(CHOICES, never({"red", "a"}, {"red", "b"}))
    assert {row["colour"] for row in rows} == {"green", "blue"}

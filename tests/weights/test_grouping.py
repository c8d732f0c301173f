"""Groups of tokens, in the forms that people have them."""

from typing import Any

import numpy as np
import pytest
import torch

from foci.weights.grouping import assign_groups

CPU = torch.device("cpu")

SAME = {
    "pairs": [(0, 2), (2, 3), (4, 6)],
    "lists": [[0, 2], [2, 3], [4, 6]],
    "slices": [slice(None, 2), slice(2, 3), slice(4, None)],
    "ranges": [range(2), range(2, 3), range(4, 6)],
    "a tensor": torch.tensor([[0, 2], [2, 3], [4, 6]]),
    "an array": np.array([[0, 2], [2, 3], [4, 6]]),
    "numbers, as word_ids gives them": [0, 0, 1, None, 2, 2],
    "any numbers": [7, 7, 3, None, 5, 5],
    "numpy numbers": [np.int64(7), np.int64(7), 3, None, 5, 5],
}


@pytest.mark.parametrize("form", SAME)
def test_all_forms_give_the_same_groups(form: str) -> None:
    ids, count = assign_groups(SAME[form], 6, "groups", CPU)
    assert count == 3
    assert ids.tolist() == [0, 0, 1, 3, 2, 2]


def test_one_number_per_token() -> None:
    for numbers in ([4, 4, 0, 9], torch.tensor([4, 4, 0, 9]), np.array([4, 4, 0, 9])):
        ids, count = assign_groups(numbers, 4, "groups", CPU)
        assert (ids.tolist(), count) == ([0, 0, 1, 2], 3)


def test_groups_keep_the_order_in_which_they_are_named() -> None:
    ids, count = assign_groups([(3, 5), (0, 2)], 5, "groups", CPU)
    assert (ids.tolist(), count) == ([1, 1, 2, 0, 0], 2)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "none": ([], ValueError, "groups must have at least one group, got none"),
    "only tokens of no group": ([None] * 6, ValueError, "groups must have at least one group"),
    "an empty group": ([(0, 2), (2, 2)], ValueError, r"0 <= start < stop <= 6 tokens, got \(2, 2\) for group 1"),
    "backwards": ([(2, 0)], ValueError, r"0 <= start < stop <= 6 tokens, got \(2, 0\) for group 0"),
    "beyond the end": ([(0, 7)], ValueError, r"<= 6 tokens, got \(0, 7\) for group 0"),
    "before the start": ([(-1, 2)], ValueError, r"0 <= start .* got \(-1, 2\) for group 0"),
    "overlap": ([(0, 3), (2, 4)], ValueError, r"must not overlap, got \(2, 4\) for group 1"),
    "too few numbers": ([0, 0, 1], ValueError, "one number for each of 6 tokens, got 3 numbers"),
    "a number that comes back": ([0, 1, 0, 2, 2, 2], ValueError, "contiguous groups, got number 0 again at token 2"),
    "a word": ("abcdef", TypeError, "pairs or one number per token, got 'abcdef'"),
    "a number": (3, TypeError, "pairs or one number per token, got 3"),
    "fractions": ([(0.5, 2)], TypeError, r"pairs of integers, got \(0.5, 2\)"),
    "a float tensor": (torch.tensor([[0.0, 2.0]]), TypeError, r"pairs of integers, got \[0.0, 2.0\]"),
    "bools": (torch.ones(6, dtype=torch.bool), TypeError, "pairs of integers, got True"),
    "triples": ([(0, 1, 2)], TypeError, r"pairs of integers, got \(0, 1, 2\)"),
    "steps": ([range(0, 6, 2)], TypeError, r"pairs of integers, got range\(0, 6, 2\)"),
    "a mixture": ([(0, 2), 3], TypeError, "pairs of integers, got 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_groups_are_refused(case: str) -> None:
    groups, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        assign_groups(groups, 6, "groups", CPU)

"""The assertions of the nn tests detect wrong values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.nn.same import assert_same, assert_same_gradients


@pytest.mark.parametrize(
    ("found", "expected", "message"),
    [
        (torch.tensor([1.0]), torch.tensor([1.00001]), "output: off by 1e-05"),
        (torch.tensor([1.0]), torch.tensor([[1.0]]), r"output: expected \(1, 1\), got \(1,\)"),
        (torch.tensor([torch.nan]), torch.tensor([1.0]), "output: not finite"),
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), "output: not finite"),
        (None, torch.tensor([1.0]), "output: expected True, got False"),
        (torch.tensor([1.0]), None, "output: expected False, got True"),
    ],
)
def test_wrong_values_are_detected(found: Tensor | None, expected: Tensor | None, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same(found, expected)


def test_rounding_is_accepted() -> None:
    assert_same(torch.tensor([1000.0, 1.0]), torch.tensor([1000.0, 1.0001]))
    assert_same(None, None)
    assert_same(torch.zeros(0), torch.zeros(0))


def test_wrong_and_missing_gradients_are_detected() -> None:
    ours, theirs = nn.Linear(2, 2), nn.Linear(2, 2)
    x = torch.ones(1, 2)
    assert_same_gradients(ours(x), theirs(x), ours, theirs, dict)
    with pytest.raises(AssertionError, match="weight: off by"):
        assert_same_gradients(ours(2 * x), theirs(x), ours, theirs, dict)
    with pytest.raises(AssertionError):
        assert_same_gradients(x @ ours.weight.mT, theirs(x), ours, theirs, dict)

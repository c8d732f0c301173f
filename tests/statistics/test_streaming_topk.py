"""The k largest entries of each row, exact ties to the lower column."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from foci.statistics.streaming_topk import stable_topk

HIDDEN = -1e29


def sorted_rows(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The definition: a stable sort keeps equal entries in the order of their columns."""
    values, columns = x.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], columns[..., :k]


def check(x: Tensor, k: int) -> None:
    values, columns = stable_topk(x.clone(), k, HIDDEN)
    true_values, true_columns = sorted_rows(x, k)
    assert torch.equal(values, true_values)
    assert torch.equal(x.gather(-1, columns), values)
    seen = true_values > HIDDEN
    assert torch.equal(columns[seen], true_columns[seen])


@settings(max_examples=200, deadline=None)
@given(
    width=st.integers(1, 3000),
    k=st.integers(1, 40),
    kinds=st.sampled_from([2, 5, 100, 10**6]),
    wide=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_any_width_and_any_ties(width: int, k: int, kinds: int, wide: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-kinds, kinds, (2, 3, width), generator=generator).to(torch.float64 if wide else torch.float32)
    x[0, 0, torch.rand(width, generator=generator) < 0.7] = -1e30
    x[1, 2] = -1e30
    check(x, k)


@pytest.mark.parametrize("k", [1, 7, 64, 257])
@pytest.mark.parametrize("order", ["ascending", "descending", "equal", "peak at the end", "two signs of zero"])
def test_sorted_equal_and_signed_zero_rows(k: int, order: str) -> None:
    x = torch.arange(257.0).expand(4, 257).clone()
    if order == "descending":
        x = x.flip(-1)
    elif order == "equal":
        x.fill_(3.0)
    elif order == "peak at the end":
        x.zero_()[:, -1] = 1.0
    elif order == "two signs of zero":
        x.zero_()[:, ::2] = -0.0
    check(x, k)


def test_k_above_the_number_of_columns_returns_all() -> None:
    values, columns = stable_topk(torch.tensor([[1.0, 3.0, 2.0]]), 5, HIDDEN)
    assert values.tolist() == [[3.0, 2.0, 1.0]]
    assert columns.tolist() == [[1, 2, 0]]


def test_a_tie_between_a_chosen_group_and_one_left_out() -> None:
    """The k-th best maximum occurs in two groups: the lower column wins, wherever the groups are."""
    x = torch.full((1, 1024), -5.0)
    x[0, [1000, 900, 30, 29]] = 1.0
    x[0, 500] = 2.0
    values, columns = stable_topk(x, 2, HIDDEN)
    assert values.tolist() == [[2.0, 1.0]]
    assert columns.tolist() == [[500, 29]]

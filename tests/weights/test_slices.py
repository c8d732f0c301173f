"""Slices of the matrix are computed, not cut out of it."""

from unittest import mock

import pytest
import torch

import foci
from foci.weights import slices
from tests import matrices
from tests.allocation import LargestTensor
from tests.matrices import CASES, DTYPES, assert_close, both, lazy, small_strips, truth
from tests.tensors import qkv


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_are_exact(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    small_strips(monkeypatch, 8)
    weights, true = both(case, dtype)
    for index in [(..., 0, slice(None)), (..., -1), (..., slice(1, 9, 3), slice(None, None, 2)), (..., -1, 0)]:
        found = weights[index]
        assert isinstance(found, torch.Tensor)
        assert_close(found, true[index], dtype)


def test_a_slice_takes_the_memory_of_a_slice() -> None:
    n = 1024
    x = torch.zeros(1, 2, n, 8)
    weights = foci.attention(x, x, x, mask=foci.causal, return_weights=True)[1]
    for index in [(..., 5, slice(None)), (..., 7), (..., slice(3, 5), slice(9, 12))]:
        with LargestTensor() as seen:
            weights[index]
        assert seen.largest <= 16 * n


def test_the_dense_matrix_is_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    small_strips(monkeypatch, 2**10)
    n = 512
    x = torch.zeros(1, 2, n, 8)
    weights = foci.attention(x, x, x, mask=foci.causal, return_weights=True)[1]
    with LargestTensor() as seen:
        weights.dense()
    assert seen.largest == 2 * n * n
    assert seen.peak < 1.2 * 4 * seen.largest


@pytest.mark.parametrize("case", ["sink and bias, empty rows", "relative", "grouped heads"])
def test_entries_from_full_rows_equal_entries_from_lse(case: str) -> None:
    call, true = lazy(CASES[case]()).call, truth(CASES[case]())
    rows, columns = torch.tensor([2, 0, 7]), torch.tensor([1, 5])
    found = slices.entries_from_full_rows(call, rows, columns, averaged=False)
    assert_close(found, true[:, :, rows][..., columns], torch.float64)


def test_autocast_does_not_change_the_entries() -> None:
    """It chose the dtype of the inputs; the logits are taken in float32 at least."""
    arguments = matrices.in_dtype(CASES["sink and bias, empty rows"](), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        weights = lazy(arguments)
        assert weights.call.q.dtype == torch.bfloat16
        inside = weights.dense(), weights @ torch.ones(17, 2), weights.T @ torch.ones(11, 2), weights.entropy()
    outside = weights.dense(), weights @ torch.ones(17, 2), weights.T @ torch.ones(11, 2), weights.entropy()
    for one, other in zip(inside, outside, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, atol=0, rtol=0)


@pytest.mark.parametrize("mask", [None, foci.causal, foci.causal.at(-2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_by_its_numbers_equals_the_same_row_of_the_matrix(mask: foci.Mask | None, dtype: torch.dtype) -> None:
    q, k, v = qkv(queries=7, keys=5, dtype=dtype)
    _, weights = foci.attention(q, k, v, mask=mask, return_weights=True)
    dense = weights.dense()
    with (
        mock.patch.object(slices, "entries_from_lse", side_effect=AssertionError("the general path")),
        torch.autocast("cpu"),
    ):
        for index in [(0, 0, 0), (1, 3, 6), (-1, -2, -3)]:
            torch.testing.assert_close(weights[index], dense[index], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("index", [(2, 0, 0), (0, 4, 0), (0, 0, 7), (0, 0, -8)])
def test_a_row_outside_the_matrix_is_refused(index: tuple[int, ...]) -> None:
    q, k, v = qkv(queries=7, keys=5)
    _, weights = foci.attention(q, k, v, return_weights=True)
    with pytest.raises(IndexError, match="must be from"):
        weights[index]


def test_a_row_notices_that_the_query_was_changed() -> None:
    q, k, v = qkv()
    _, weights = foci.attention(q, k, v, return_weights=True)
    q.zero_()
    with pytest.raises(RuntimeError, match="the query was changed in place"):
        weights[0, 0, 0]

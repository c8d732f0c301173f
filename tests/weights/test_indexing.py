"""Indices of the lazy matrix: what stays lazy, what is computed, and what is refused."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import foci
from foci.weights.indexing import to_slice
from tests import matrices
from tests.matrices import assert_close, both, lazy

INDICES = st.one_of(
    st.integers(-2, 1),
    st.builds(
        slice,
        st.none() | st.integers(-20, 20),
        st.none() | st.integers(-20, 20),
        st.none() | st.integers(1, 4),
    ),
)


def built() -> dict[str, tuple[foci.Weights, torch.Tensor]]:
    return {name: both(name, torch.float64) for name in ("deep", "positions", "no heads", "one matrix")}


MATRICES = built()


@pytest.mark.parametrize("case", MATRICES)
@settings(max_examples=150, deadline=None)
@given(before=st.lists(INDICES, max_size=5), dots=st.booleans(), after=st.lists(INDICES, max_size=2))
def test_an_index_selects_the_same_as_on_a_tensor(case: str, before: list[Any], dots: bool, after: list[Any]) -> None:
    weights, true = MATRICES[case]
    index = (*before, ..., *after) if dots else tuple(before)
    if len(index) - dots > true.dim():
        with pytest.raises(IndexError, match="must be up to"):
            weights[index]
        return
    found = weights[index]
    named = len(before) > true.dim() - 2 or (dots and len(after) > 0)
    assert isinstance(found, foci.Weights) == (not named)
    dense = found.dense() if isinstance(found, foci.Weights) else found
    assert dense.shape == true[index].shape
    assert_close(dense, true[index], torch.float64)


@pytest.mark.parametrize(
    "case", ["plain", "additive", "sink and bias, empty rows", "positions", "grouped heads", "deep"]
)
def test_a_part_has_its_own_statistics(case: str) -> None:
    """Sequences and heads keep their own sinks, slopes, masks and positions when they are taken out."""
    weights, true = both(case, torch.float64)
    for index in [(-1,), (slice(None), 2), (slice(1, None), slice(1, 4)), (0, slice(None, None, 2)), (1, 1)]:
        part, dense = weights[index], true[index]
        assert isinstance(part, foci.Weights)
        assert_close(part.received(), dense.sum(-2), torch.float64, 4)
        assert_close(part.entropy(), matrices.entropy(dense), torch.float64, 4)
        x = matrices.randn(true.shape[-1], 2)
        assert_close(part @ x, dense @ x, torch.float64, 4)
        assert torch.equal(part.lse, weights.lse[index])


def test_a_part_of_a_part() -> None:
    weights, true = MATRICES["deep"]
    assert_close(weights[1][:2][1, 2:][1].dense(), true[1][:2][1, 2:][1], torch.float64)
    # 0, 1, 3 and 4 of six sequences are no slice of them: they are copied.
    assert_close(weights[:, :2].dense(), true[:, :2], torch.float64)
    assert_close(weights[:, :2].mean("heads")[1, 1].dense(), true[:, :2].mean(2)[1, 1], torch.float64)


def test_a_part_holds_views() -> None:
    weights = lazy(matrices.qkv())
    part = weights[1, 2:]
    assert part.call.q.data_ptr() == weights.call.q[1, 2:].data_ptr()
    assert part.call.k.data_ptr() == weights.call.k[1, 2:].data_ptr()
    assert part.nbytes == weights.nbytes // 4


def test_weights_are_iterable() -> None:
    weights = lazy(matrices.qkv())
    assert [part.shape for part in weights] == [(4, 11, 17)] * 2
    assert [row.shape for row in weights[0, 0]] == [(17,)] * 11


@pytest.mark.parametrize("number", [np.int64(1), torch.tensor(1), np.array(1)], ids=repr)
def test_whole_numbers_of_other_libraries(number: Any) -> None:
    weights, true = MATRICES["positions"]
    assert_close(weights[number].dense(), true[1], torch.float64)
    assert_close(weights[..., number], true[..., 1], torch.float64)


@pytest.mark.parametrize("places", [[0, 3], [-1], [5, 5, 2], [], torch.tensor([4, 0]), np.array([1, 2])], ids=repr)
def test_lists_of_queries_or_keys(places: Any) -> None:
    weights, true = MATRICES["positions"]
    same = torch.as_tensor(places, dtype=torch.int64)
    assert_close(weights[..., places, :], true[..., same, :], torch.float64)
    assert_close(weights[0, 1, ::2, places], true[0, 1, ::2][:, same], torch.float64)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "a sequence too far": (2, IndexError, "head axis must be from -2 to 1, got 2"),
    "a head too far back": ((0, -5), IndexError, "head axis must be from -4 to 3, got -5"),
    "a query too far": ((..., 11, slice(None)), IndexError, "query indices must be from -11 to 10, got 11"),
    "a key too far": ((..., [3, 17]), IndexError, r"key indices must be from -17 to 16, got \[3, 17\]"),
    "an axis too many": ((0, 0, 0, 0, 0), IndexError, r"index must be up to 4 indices .* weights \(2, 4, 11, 17\)"),
    "dots twice": ((..., 0, ...), IndexError, "and one ... for weights .*, got"),
    "a list of heads": ((slice(None), [0, 1]), TypeError, r"an integer or a slice, got \[0, 1\]"),
    "a tensor of sequences": (torch.tensor([0, 1]), TypeError, "an integer or a slice, got torch.int64"),
    "nothing": (None, TypeError, "an integer or a slice, got None"),
    "true": (True, TypeError, "an integer or a slice, got True"),
    "a new axis": ((..., None), TypeError, "a key index must be an integer, a slice or a list"),
    "a word": ((..., "three"), TypeError, "a key index must be .*, got 'three'"),
    "a fraction": ((..., 1.5, 0), TypeError, "a query index must be .*, got 1.5"),
    "a mask": ((..., [True, False]), TypeError, "a key index must be .*, got"),
    "a table": ((..., [[0, 1]]), TypeError, "a key index must be .*, got"),
    "backwards": ((..., slice(None, None, -1)), ValueError, "a step of 1 or more, got"),
    "heads backwards": ((0, slice(None, None, -1)), ValueError, "a step of 1 or more, got"),
    "two lists": (
        (..., [0, 1], [2, 3]),
        IndexError,
        r"only one of the query and key indices must be a list, got \[0, 1\] and \[2, 3\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_indices_are_refused(case: str) -> None:
    index, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        lazy(matrices.qkv())[index]


def test_slices_beyond_the_end_are_clipped_like_those_of_tensors() -> None:
    weights, true = MATRICES["positions"]
    assert weights[5:].shape == true[5:].shape
    assert weights[..., 9:40, -40:2].shape == true[..., 9:40, -40:2].shape
    assert weights[..., 40:, :].shape == true[..., 40:, :].shape


def test_evenly_spaced_indices_become_a_slice() -> None:
    assert to_slice(torch.tensor([3])) == slice(3, 4, 1)
    assert to_slice(torch.tensor([1, 3, 5])) == slice(1, 6, 2)
    assert to_slice(torch.tensor([], dtype=torch.int64)) == slice(0, 0)
    uneven = to_slice(torch.tensor([[0, 1], [3, 4]]))
    assert isinstance(uneven, torch.Tensor)
    assert uneven.tolist() == [0, 1, 3, 4]


def test_errors_name_what_is_there() -> None:
    weights, _ = MATRICES["deep"]
    with pytest.raises(TypeError, match=r"must be an integer or a slice, got torch.float32 \(3,\)"):
        weights[torch.zeros(3)]
    with pytest.raises(AttributeError, match=r"no attribute 'softmax': weights.dense\(\) is the matrix as a tensor"):
        weights.softmax(-1)
    with pytest.raises(AttributeError, match=r"no attribute 'entorpy': did you mean entropy\?"):
        weights.entorpy()

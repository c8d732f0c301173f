"""Dense matrices give the same statistics as lazy weights."""

import pytest
import torch
from torch import Tensor

import foci
from foci.record.dense import DenseWeights
from tests.tensors import qkv


def pair() -> tuple[foci.Weights, DenseWeights]:
    _, weights = foci.attention(*qkv(6, 9, torch.float64), mask=foci.causal, return_weights=True)
    return weights, DenseWeights(weights.dense())


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", ["entropy", "received", "distance"])
def test_statistics(name: str) -> None:
    lazy, dense = pair()
    close(getattr(dense, name)(), getattr(lazy, name)())


def test_top_with_ties_and_masked_keys() -> None:
    lazy, dense = pair()
    close(dense.top(5).values, lazy.top(5).values)
    assert torch.equal(dense.top(5).keys, lazy.top(5).keys)
    level = DenseWeights(torch.tensor([[0.25, 0.5, 0.25, 0.0]])).top(4)
    assert level.keys.tolist() == [[1, 0, 2, -1]]
    with pytest.raises(ValueError, match="k must be an int from 1 to the 9 keys, got 10"):
        dense.top(10)


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_picture(reduce: str) -> None:
    lazy, dense = pair()
    close(dense.picture(4, 5, reduce), lazy.picture(4, 5, reduce))
    with pytest.raises(ValueError, match="rows must be from 1 to the 6 queries and columns from 1 to the 9 keys"):
        dense.picture(7, 5)
    with pytest.raises(ValueError, match="reduce must be 'mean' or 'max', got 'sum'"):
        dense.picture(1, 1, "sum")


def test_groups_products_and_means() -> None:
    lazy, dense = pair()
    groups = [(0, 2), (2, 5)], [0, 0, 1, 1, 1, None, 2, 2, 2]
    close(dense.grouped(*groups), lazy.grouped(*groups))
    x = torch.randn(9, 3, dtype=torch.float64)
    close(dense @ x, lazy @ x)
    row = torch.randn(6, dtype=torch.float64)
    close(dense.__rmatmul__(row), row @ lazy)
    close(
        dense.__rmatmul__(torch.randn(2, 4, 3, 6, dtype=torch.float64)).new_ones(1), torch.ones(1, dtype=torch.float64)
    )
    close(dense.mean("heads").matrix, lazy.mean("heads").dense())
    close(dense.received([1, 3]), lazy.received([1, 3]))
    for wrong in (lambda: dense.mean("keys"), lambda: dense.received(per="kv_head")):
        with pytest.raises(ValueError, match=r"must be .*, got"):
            wrong()


def test_half_precision_is_summed_in_float32() -> None:
    assert DenseWeights(torch.full((1, 4096), 1 / 4096, dtype=torch.bfloat16)).entropy().dtype == torch.float32
    assert DenseWeights(torch.eye(4), torch.arange(4) + 2).distance().tolist() == [2.0] * 4

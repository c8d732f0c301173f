"""The sorting network against PyTorch's sort, row by row."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from foci.kernels.statistics.sort import has_ties, select_largest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 8


@triton.jit
def chosen(given, found, rest, ties, R: tl.constexpr, LOG_N: tl.constexpr, LOG: tl.constexpr):
    """The largest values of each row, the maximum of the rest, and whether two of the selected values are equal."""
    row = tl.arange(0, R)
    x = tl.load(given + row[:, None] * (1 << LOG_N) + tl.arange(0, 1 << LOG_N)[None, :])
    x, left = select_largest(x, LOG_N, LOG)
    tl.store(found + row[:, None] * (1 << LOG) + tl.arange(0, 1 << LOG)[None, :], x)
    tl.store(rest + row, left)
    tl.store(ties + row, has_ties(x).to(tl.int32))


@pytest.mark.parametrize(("log_n", "log"), [(0, 0), (1, 0), (1, 1), (4, 0), (4, 2), (4, 3), (4, 4), (6, 3), (6, 5)])
@pytest.mark.parametrize("levels", [3, 1000])
def test_largest_values_in_order_and_maximum_of_the_rest(log_n: int, log: int, levels: int) -> None:
    """With few levels most values occur several times."""
    make = torch.Generator().manual_seed(log_n + 10 * log)
    x = -torch.randint(levels, (ROWS, 1 << log_n), generator=make).float()
    found, rest = torch.full((ROWS, 1 << log), torch.nan, device=DEVICE), torch.full((ROWS,), torch.nan, device=DEVICE)
    ties = torch.full((ROWS,), -1, dtype=torch.int32, device=DEVICE)
    chosen[(1,)](x.to(DEVICE), found, rest, ties, R=ROWS, LOG_N=log_n, LOG=log)
    ordered = x.sort(descending=True).values
    expected, left = ordered[:, : 1 << log], ordered[:, 1 << log :]
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(rest.cpu(), left.amax(1) if left.numel() else torch.full((ROWS,), -torch.inf))
    assert ties.tolist() == (expected[:, 1:] == expected[:, :-1]).any(1).int().tolist()

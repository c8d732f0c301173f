"""Sequences of unequal length as one tensor.

B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Lengths are rounded up to a multiple of it: fewer different shapes, each of which a GPU captures or compiles once.
MULTIPLE = 8


def padded(rows: Sequence[Sequence[int] | Tensor], value: float = 0, multiple: int = MULTIPLE) -> tuple[Tensor, Tensor]:
    """The rows (each (T,), or frames (T, features)) as one tensor, padded on the right, and their lengths (B,).

    >>> padded([[5, 3, 8], [7]], multiple=4)
    (tensor([[5, 3, 8, 0],
            [7, 0, 0, 0]]), tensor([3, 1]))
    """
    counts = [len(row) for row in rows]
    width = rounded(max(counts), multiple)
    if not isinstance(rows[0], Tensor):
        # One tensor of lists is made much faster than one of many tensors.
        filled = [[*row, *[value] * (width - len(row))] for row in rows]
        return torch.tensor(filled, dtype=torch.long), torch.tensor(counts)
    found = torch.full((len(rows), width, *rows[0].shape[1:]), value, dtype=rows[0].dtype)
    for place, count, row in zip(found, counts, rows, strict=True):
        place[:count] = torch.as_tensor(row)
    return found, torch.tensor(counts)


def rounded(length: int, multiple: int = MULTIPLE) -> int:
    """The next multiple at or above a length.

    >>> rounded(13)
    16
    """
    return -(-length // multiple) * multiple


def longest_first(sizes: Sequence[int], budget: int, multiple: int = 1) -> list[list[int]]:
    """Which examples are taken together, by their places: of similar size, padded no more than a budget.

    >>> longest_first([2, 5, 1, 4], budget=10)
    [[1, 3], [0, 2]]
    """
    order = sorted(range(len(sizes)), key=lambda place: -sizes[place])
    groups = []
    while order:
        count = max(budget // rounded(sizes[order[0]], multiple), 1)
        groups.append(order[:count])
        order = order[count:]
    return groups


def real(lengths: Tensor, width: int) -> Tensor:
    """True where a token is no padding: bool (B, width)."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]

"""Pads sequences of unequal length into one tensor, and groups them by size.

B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Lengths are rounded up to a multiple of this: fewer shapes, and so fewer CUDA graph captures and compilations.
LENGTH_MULTIPLE = 8


def pad_sequences(
    rows: Sequence[Sequence[int] | Tensor], value: float = 0, multiple: int = LENGTH_MULTIPLE
) -> tuple[Tensor, Tensor]:
    """Pads rows (each (T,), or (T, features)) on the right into one tensor; also returns their lengths (B,).

    >>> pad_sequences([[5, 3, 8], [7]], multiple=4)
    (tensor([[5, 3, 8, 0],
            [7, 0, 0, 0]]), tensor([3, 1]))
    """
    counts = [len(row) for row in rows]
    width = round_up_length(max(counts), multiple)
    if not isinstance(rows[0], Tensor):
        # Building one tensor from lists is much faster than filling it row by row.
        filled = [[*row, *[value] * (width - len(row))] for row in rows]
        return torch.tensor(filled, dtype=torch.long), torch.tensor(counts)
    padded = torch.full((len(rows), width, *rows[0].shape[1:]), value, dtype=rows[0].dtype)
    for target, count, row in zip(padded, counts, rows, strict=True):
        target[:count] = torch.as_tensor(row)
    return padded, torch.tensor(counts)


def round_up_length(length: int, multiple: int = LENGTH_MULTIPLE) -> int:
    """Rounds a length up to the next multiple.

    >>> round_up_length(13)
    16
    """
    return -(-length // multiple) * multiple


def group_by_size(sizes: Sequence[int], budget: int, multiple: int = 1) -> list[list[int]]:
    """Groups indices of examples of similar size, longest first, each group within a budget of padded size.

    >>> group_by_size([2, 5, 1, 4], budget=10)
    [[1, 3], [0, 2]]
    """
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    groups = []
    while order:
        count = max(budget // round_up_length(sizes[order[0]], multiple), 1)
        groups.append(order[:count])
        order = order[count:]
    return groups


def valid_positions(lengths: Tensor, width: int) -> Tensor:
    """Marks the positions that are not padding: bool (B, width)."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]

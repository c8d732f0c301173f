"""The matrix in blocks: rows x columns of them, with edges floor(r T / rows)."""

from __future__ import annotations

import torch
from torch import Tensor


def edges(blocks: int, length: int, device: torch.device) -> Tensor:
    """Where the blocks begin and end: (blocks + 1,)."""
    return torch.arange(blocks + 1, device=device) * length // max(blocks, 1)


def block_of(index: Tensor, blocks: int, length: int) -> Tensor:
    """The block in which each index lies."""
    return torch.searchsorted(edges(blocks, length, index.device), index, right=True) - 1


def pool_columns(weights: Tensor, start: int, blocks: int, length: int, reduce: str) -> tuple[int, Tensor]:
    """Sums or maxima over blocks of columns, for a run of columns that begins at `start`.

    Returns the first block and (..., blocks touched). Weights are never negative, so a maximum may start from 0.
    """
    stop = start + weights.shape[-1]
    first = int(block_of(torch.tensor(start), blocks, length))
    last = int(block_of(torch.tensor(stop - 1), blocks, length))
    if length % blocks == 0 and start % (length // blocks) == 0 and stop % (length // blocks) == 0:
        return first, reduced(weights.unflatten(-1, (-1, length // blocks)), reduce)
    ends = edges(blocks, length, weights.device)[first : last + 2]
    widest = -(-length // blocks)
    columns = ends[:-1, None] + torch.arange(widest, device=weights.device)
    inside = (columns < ends[1:, None]) & (columns >= start) & (columns < stop)
    gathered = weights[..., (columns - start).clamp(0, stop - start - 1)]
    return first, reduced(torch.where(inside, gathered, 0.0), reduce)


def reduced(blocks: Tensor, reduce: str) -> Tensor:
    return blocks.sum(-1) if reduce == "mean" else blocks.amax(-1)


def add_rows(picture: Tensor, pooled: Tensor, rows: Tensor, first: int, reduce: str) -> None:
    """Adds pooled rows to the blocks that they lie in."""
    part = picture[..., first : first + pooled.shape[-1]]
    if reduce == "mean":
        part.index_add_(-2, rows, pooled)
    else:
        part.index_reduce_(-2, rows, pooled, "amax")


def areas(rows: int, columns: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """How many entries each block holds."""
    return edges(rows, queries, device).diff()[:, None] * edges(columns, keys, device).diff()[None, :]

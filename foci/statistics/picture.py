"""The picture of a matrix: its entries pooled into rows x columns of blocks; block r begins at floor(r T / rows)."""

from __future__ import annotations

import torch
from torch import Tensor


def block_start(block: int, blocks: int, length: int) -> int:
    """First index of a block."""
    return block * length // blocks


def block_index(index: int, blocks: int, length: int) -> int:
    """The block that holds an index."""
    return ((index + 1) * blocks - 1) // length


def block_edges(blocks: int, length: int, device: torch.device) -> Tensor:
    """Starts of all blocks and the end of the last: (blocks + 1,)."""
    return torch.arange(blocks + 1, device=device) * length // max(blocks, 1)


def pool_rows(weights: Tensor, start: int, blocks: int, length: int, reduce: str) -> tuple[int, Tensor]:
    """Pools rows (..., R, C) that begin at `start`: returns the first block they touch and (..., blocks touched, C)."""
    rows = weights.shape[-2]
    first, last = block_index(start, blocks, length), block_index(start + rows - 1, blocks, length)
    size = length // blocks
    if length % blocks == 0 and start % size == 0 and rows % size == 0:
        return first, reduce_blocks(weights.unflatten(-2, (-1, size)), reduce, -2)
    pooled = []
    for block in range(first, last + 1):
        begin = max(block_start(block, blocks, length) - start, 0)
        end = min(block_start(block + 1, blocks, length) - start, rows)
        pooled.append(reduce_blocks(weights[..., begin:end, :], reduce, -2))
    return first, torch.stack(pooled, dim=-2)


def pool_columns(weights: Tensor, start: int, blocks: int, length: int, reduce: str) -> tuple[int, Tensor]:
    """Pools columns (..., C) that begin at `start`: returns the first block they touch and (..., blocks touched).

    Weights are never negative, so 0 is neutral for sums and maxima.
    """
    stop = start + weights.shape[-1]
    first, last = block_index(start, blocks, length), block_index(stop - 1, blocks, length)
    size = length // blocks
    if length % blocks == 0 and start % size == 0 and stop % size == 0:
        return first, reduce_blocks(weights.unflatten(-1, (-1, size)), reduce, -1)
    ends = block_edges(blocks, length, weights.device)[first : last + 2]
    columns = ends[:-1, None] + torch.arange(-(-length // blocks), device=weights.device)
    inside = (columns < ends[1:, None]) & (columns >= start) & (columns < stop)
    gathered = weights[..., (columns - start).clamp(0, stop - start - 1)]
    return first, reduce_blocks(torch.where(inside, gathered, 0.0), reduce, -1)


def reduce_blocks(blocks: Tensor, reduce: str, axis: int) -> Tensor:
    return blocks.sum(axis) if reduce == "mean" else blocks.amax(axis)


def add_to_picture(picture: Tensor, pooled: Tensor, first_row: int, first_column: int, reduce: str) -> None:
    """Adds pooled blocks to the picture in place; a block that two strips share combines both."""
    place = (slice(first_row, first_row + pooled.shape[-2]), slice(first_column, first_column + pooled.shape[-1]))
    part = picture[..., place[0], place[1]]
    if reduce == "mean":
        part.add_(pooled)
    else:
        part.copy_(torch.maximum(part, pooled))


def block_areas(rows: int, columns: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """Number of entries of each block: (rows, columns)."""
    return block_edges(rows, queries, device).diff()[:, None] * block_edges(columns, keys, device).diff()[None, :]

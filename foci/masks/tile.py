"""The sizes of a call and the positions of a tile: the arguments of masks and biases.

B batch, H heads, R rows (queries) of the tile, C columns (keys) of the tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class CallSizes(NamedTuple):
    """The sizes and the device of one call, which masks and biases are checked against."""

    batch: tuple[int, ...]
    heads: int | None
    queries: int
    keys: int
    device: torch.device

    @property
    def flat_batch(self) -> int:
        size = 1
        for n in self.batch:
            size *= n
        return size

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape of the attention matrix with the caller's own leading dimensions."""
        heads = () if self.heads is None else (self.heads,)
        return (*self.batch, *heads, self.queries, self.keys)


@dataclass(frozen=True, slots=True)
class Tile:
    """Some rows and columns of the attention matrix, as index tensors that broadcast to (B, H, R, C).

    `query` and `key` are indices along the tensors, counted from 0; the positions are those of the same tokens in
    their text. `rows` and `columns` are the indices as slices, None if the tile is not contiguous. Inside
    FlexAttention every index is a scalar.
    """

    batch: Tensor
    head: Tensor
    query: Tensor
    key: Tensor
    query_position: Tensor
    key_position: Tensor
    rows: slice | None = None
    columns: slice | None = None

    def pick(self, dense: Tensor) -> Tensor:
        """The entries of a (B or 1, H or 1, Tq or 1, Tk or 1) tensor in this tile."""
        if self.rows is None or self.columns is None:
            index = (self.batch, self.head, self.query, self.key)
            return dense[tuple(torch.zeros_like(i) if n == 1 else i for i, n in zip(index, dense.shape, strict=True))]
        rows = self.rows if dense.shape[2] > 1 else slice(None)
        columns = self.columns if dense.shape[3] > 1 else slice(None)
        tile = dense[:, :, rows, columns]
        if tile.shape[0] > 1 and self.batch.numel() < tile.shape[0]:
            tile = tile[self.batch.flatten()]
        if tile.shape[1] > 1 and self.head.numel() < tile.shape[1]:
            tile = tile[:, self.head.flatten()]
        return tile


def index_by_batch(ids: Tensor, batch: Tensor, index: Tensor) -> Tensor:
    """ids[batch, index]; ids is (B, T), (1, T) for the whole batch, or (T,)."""
    if ids.dim() == 1:
        return ids[index]
    return ids[torch.zeros_like(batch) if ids.shape[0] == 1 else batch, index]

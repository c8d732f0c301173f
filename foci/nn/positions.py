"""Tokens into vectors, and where they stand: tables that are added, rotations, and relative tables for the scores.

B batch, T tokens, H heads, D width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foci.biases import Buckets, Relative
from foci.positions import rotary, sinusoidal


class LearnedPositions(nn.Module):
    """Adds a learned vector per position: (B, T, width) -> (B, T, width).

    >>> LearnedPositions(512, 64)(torch.zeros(2, 10, 64)).shape
    torch.Size([2, 10, 64])

    Args:
        length: how many positions there are; a longer sequence is refused.
        width: the width of the vectors.
    """

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(length, width))
        nn.init.normal_(self.table, std=0.02)

    def forward(self, x: Tensor, positions: Tensor | None = None, start: int = 0) -> Tensor:
        """Where the tokens stand: `positions` (T,) or (B, T), or without them from `start` on."""
        return x + select_position_rows(self.table, x.shape[-2], positions, start).to(x.dtype)


class SinusoidalPositions(nn.Module):
    """Adds the sines and cosines of Vaswani et al.: (B, T, width) -> (B, T, width); nothing is learned.

    Args:
        length: how many positions are computed in advance; `positions` must lie below it.
        width: the width of the vectors.
    """

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", sinusoidal(length, width), persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None = None, start: int = 0) -> Tensor:
        """Where the tokens stand: `positions` (T,) or (B, T), or without them from `start` on."""
        return x + select_position_rows(self.table, x.shape[-2], positions, start).to(x.dtype)


def select_position_rows(table: Tensor, count: int, positions: Tensor | None, start: int) -> Tensor:
    """The rows of a table of positions: (T, width) or (B, T, width)."""
    if positions is not None:
        return table[positions]
    if start + count > table.shape[0]:
        raise ValueError(f"the table has {table.shape[0]} positions, but the sequence takes {start + count}")
    return table[start : start + count]


@dataclass(frozen=True)
class Rotary:
    """Turns queries and keys by where they stand (RoPE): what `Attention(rotary=...)` takes; see `foci.rotary`."""

    base: float = 10000.0
    width: int | None = None
    interleaved: bool = False

    def __call__(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        return rotary(x, positions, base=self.base, width=self.width, interleaved=self.interleaved)


class BucketTable(nn.Module):
    """T5's learned bias per bucket of distances and head; called, it gives a `foci.Buckets`.

    One table given to several `Attention` modules is shared by them, as T5 does.
    """

    def __init__(self, heads: int, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(buckets, heads))
        self.max_distance, self.bidirectional = max_distance, bidirectional

    def forward(self) -> Buckets:
        return Buckets(self.table, self.bidirectional, self.max_distance)


class RelativeTable(nn.Module):
    """Shaw's learned vectors per clipped distance, shared by the heads; called, it gives a `foci.Relative`.

    Args:
        head_width: the width of a head.
        clip: distances beyond it share the last vector.
        values: whether distances also add to the output.
    """

    def __init__(self, head_width: int, clip: int = 16, values: bool = True) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.empty(2 * clip + 1, head_width))
        self.values = nn.Parameter(torch.empty(2 * clip + 1, head_width)) if values else None
        for table in self.parameters():
            nn.init.normal_(table, std=head_width**-0.5)

    def forward(self) -> Relative:
        return Relative(self.keys, self.values)

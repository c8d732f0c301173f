"""Position modules: tables added to the tokens, rotary embeddings, and learned tables of relative biases.

B batch, T tokens, H heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foci.biases import Buckets, Relative
from foci.positions import rotary, sinusoidal


class LearnedPositions(nn.Module):
    """Adds a learned vector per position: (B, T, width) -> (B, T, width).

    >>> foci.nn.LearnedPositions(512, 64)(torch.zeros(2, 10, 64)).shape
    torch.Size([2, 10, 64])

    Args:
        length: the number of positions; longer sequences are refused.
        width: the width of the vectors.
    """

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(length, width))
        nn.init.normal_(self.table, std=0.02)

    def forward(self, x: Tensor, positions: Tensor | None = None, start: int = 0) -> Tensor:
        """Add the vectors of `positions` (T,) or (B, T); None: in order from `start`."""
        return x + select_position_rows(self.table, x.shape[-2], positions, start).to(x.dtype)


class SinusoidalPositions(nn.Module):
    """Adds the fixed sines and cosines of Vaswani et al.: (B, T, width) -> (B, T, width).

    >>> foci.nn.SinusoidalPositions(512, 64)(torch.zeros(2, 10, 64)).shape
    torch.Size([2, 10, 64])

    Args:
        length: the number of positions computed in advance; `positions` must be below it.
        width: the width of the vectors.
    """

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", sinusoidal(length, width), persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None = None, start: int = 0) -> Tensor:
        """Add the vectors of `positions` (T,) or (B, T); None: in order from `start`."""
        return x + select_position_rows(self.table, x.shape[-2], positions, start).to(x.dtype)


def select_position_rows(table: Tensor, count: int, positions: Tensor | None, start: int) -> Tensor:
    """The rows of a position table for `count` tokens: (T, width) or (B, T, width)."""
    if positions is not None:
        return table[positions]
    if start + count > table.shape[0]:
        raise ValueError(f"the sequence must have at most {table.shape[0]} positions, got {start + count}")
    return table[start : start + count]


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (RoPE) of queries and keys, for `Attention(rotary=...)`; see `foci.rotary`.

    >>> foci.nn.Rotary(base=10000.0)(torch.randn(2, 4, 10, 16)).shape
    torch.Size([2, 4, 10, 16])
    """

    base: float = 10000.0
    width: int | None = None
    interleaved: bool = False

    def __call__(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        return rotary(x, positions, base=self.base, width=self.width, interleaved=self.interleaved)


class BucketTable(nn.Module):
    """T5's learned bias per head and distance bucket; `forward` returns a `foci.Buckets`.

    >>> layer = foci.nn.Attention(64, 4, bias=foci.nn.BucketTable(heads=4))
    >>> layer(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])

    Pass one table to several `Attention` modules to share it, as T5 does.

    Args:
        heads: the number of heads.
        buckets: the number of buckets.
        max_distance: larger distances share the last bucket.
        bidirectional: whether keys before and after the query have separate buckets.
    """

    def __init__(self, heads: int, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(buckets, heads))
        self.max_distance, self.bidirectional = max_distance, bidirectional

    def forward(self) -> Buckets:
        return Buckets(self.table, self.bidirectional, self.max_distance)


class RelativeTable(nn.Module):
    """Shaw's learned vectors per clipped distance, shared by the heads; `forward` returns a `foci.Relative`.

    >>> layer = foci.nn.Attention(64, 4, bias=foci.nn.RelativeTable(head_width=16))
    >>> layer(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])

    Args:
        head_width: the width of a head.
        clip: larger distances share the last vector.
        values: whether distance vectors are also added to the values.
    """

    def __init__(self, head_width: int, clip: int = 16, values: bool = True) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.empty(2 * clip + 1, head_width))
        self.values = nn.Parameter(torch.empty(2 * clip + 1, head_width)) if values else None
        for table in self.parameters():
            nn.init.normal_(table, std=head_width**-0.5)

    def forward(self) -> Relative:
        return Relative(self.keys, self.values)

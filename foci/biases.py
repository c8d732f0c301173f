"""Biases: terms that depend on the positions of query and key and are added to the logits.

    ALiBi     -slope · |distance|                      one slope per head
    Buckets   table[bucket(distance), head]            T5: one bucket per near distance, growing buckets for far ones
    Relative  q · keys[clip(distance)], and values     Shaw: vectors, added before the scale
    a float tensor that broadcasts to the matrix; -inf masks

H heads, R queries, C keys, D width; distance is the key's position minus the query's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foci.masks.tile import CallSizes, Tile
from foci.runtime.checks import to_call_device, to_four_dimensions
from foci.runtime.tensor_cache import cache_permanently
from foci.scores import check_parameter, describe_value


class Bias:
    """Adds to the logits after (`term`) or before (`raw_term`) the scale, and to the output (`value_term`).

    >>> isinstance(foci.ALiBi(), foci.Bias)
    True
    """

    def term(self, tile: Tile) -> Tensor | None:
        """Added to the scaled score; broadcasts to (B, H, R, C)."""
        return None

    def raw_term(self, q: Tensor, tile: Tile) -> Tensor | None:
        """Added to the score before its scale."""
        return None

    def value_term(self, weights: Tensor, tile: Tile) -> Tensor | None:
        """Added to the output: (B, H, R, Dv)."""
        return None

    def fit(self, sizes: CallSizes, q: Tensor, v: Tensor) -> Bias:
        """The same bias, checked against the sizes of a call and with its tensors in normal form."""
        return self

    def tensors(self) -> dict[str, Tensor]:
        """The parameters by field name; gradients reach them."""
        return {}


@dataclass(frozen=True, slots=True)
class ALiBi(Bias):
    """-slope · |distance| (Press et al.); slopes (H,), by default 2^(-8/H), 2^(-16/H), ...

    >>> q = torch.randn(1, 8, 4, 16)
    >>> foci.attention(q, q, q, mask=foci.causal, bias=foci.ALiBi()).shape
    torch.Size([1, 8, 4, 16])

    For 8 heads the first slope is 1/2, so its row for the last of four queries is

        -1.5  -1.0  -0.5  0
    """

    slopes: Tensor | None = None

    def term(self, tile: Tile) -> Tensor:
        assert self.slopes is not None, "fit() fills in the default slopes"
        distance = (tile.key_position - tile.query_position).abs()
        return -self.slopes[tile.head] * distance.to(self.slopes.dtype)

    def fit(self, sizes: CallSizes, q: Tensor, v: Tensor) -> Bias:
        heads = require_heads(self, sizes)
        if self.slopes is None:
            key = (default_slopes, heads, torch.promote_types(q.dtype, torch.float32))
            return ALiBi(cache_permanently(key, q, lambda: default_slopes(heads, q)))
        check_parameter(self.slopes, q, "slopes", [(heads,)], [])
        return ALiBi(to_logit_dtype(self.slopes, q))

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.slopes is None else {"slopes": self.slopes}


@dataclass(frozen=True, slots=True)
class Buckets(Bias):
    """T5's learned table (buckets, H): one bucket per near distance, logarithmic buckets for farther ones.

    >>> q = torch.randn(1, 2, 6, 8)
    >>> foci.attention(q, q, q, bias=foci.Buckets(torch.randn(32, 2), bidirectional=True, max_distance=128)).shape
    torch.Size([1, 2, 6, 8])

    Args:
        table: (buckets, H).
        bidirectional: half of the buckets are for keys after the query; otherwise these share the bucket of distance 0.
        max_distance: distances from here on share the last bucket.
    """

    table: Tensor
    bidirectional: bool
    max_distance: int

    def __post_init__(self) -> None:
        if not isinstance(self.table, Tensor) or self.table.dim() != 2:
            raise ValueError(f"table must be a tensor (buckets, H), got {describe_value(self.table)}")
        exact = self.table.shape[0] // (4 if self.bidirectional else 2)
        if exact < 1:
            least = 4 if self.bidirectional else 2
            raise ValueError(f"table must have at least {least} buckets, got {describe_value(self.table)}")
        if not isinstance(self.max_distance, int) or self.max_distance <= exact:
            raise ValueError(
                f"max_distance must be an int above {exact}, the number of distances with their own bucket"
                f" ({self.table.shape[0]} buckets), got {self.max_distance!r}"
            )

    def term(self, tile: Tile) -> Tensor:
        bucket = self.bucket(tile.key_position - tile.query_position)
        return self.table[bucket, tile.head]

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance, as T5 computes it."""
        buckets = self.table.shape[0]
        start = torch.zeros_like(distance)
        if self.bidirectional:
            buckets //= 2
            start = (distance > 0).to(distance.dtype) * buckets
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = buckets // 2
        ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (ratio * (buckets - exact)).to(distance.dtype)).clamp(max=buckets - 1)
        return start + torch.where(distance < exact, distance, far)

    def fit(self, sizes: CallSizes, q: Tensor, v: Tensor) -> Bias:
        heads = require_heads(self, sizes)
        check_parameter(self.table, q, "table", [(self.table.shape[0], heads)], [])
        return replace(self, table=to_logit_dtype(self.table, q))

    def tensors(self) -> dict[str, Tensor]:
        return {"table": self.table}


@dataclass(frozen=True, slots=True)
class Relative(Bias):
    """Vectors per distance (Shaw et al.): q · keys[clip(distance) + clip] is added before the scale,
    and Σ w values[clip(distance) + clip] to the output.

    >>> q = torch.randn(1, 2, 6, 8)
    >>> foci.attention(q, q, q, bias=foci.Relative(torch.randn(9, 8))).shape       # distances -4 to 4
    torch.Size([1, 2, 6, 8])

    Args:
        keys: (2 clip + 1, D) or (H, 2 clip + 1, D).
        values: (2 clip + 1, Dv) or (H, 2 clip + 1, Dv); None adds nothing to the output.
    """

    keys: Tensor
    values: Tensor | None = None

    def _index(self, tile: Tile) -> Tensor:
        clip = self.keys.shape[-2] // 2
        return (tile.key_position - tile.query_position).clamp(-clip, clip) + clip

    def raw_term(self, q: Tensor, tile: Tile) -> Tensor:
        per_row = q @ self._headed(self.keys, tile).mT  # (B, H, R, 2 clip + 1)
        index = self._index(tile)
        index = index.expand(*per_row.shape[:2], *index.shape[2:])
        return per_row.gather(-1, index)

    def value_term(self, weights: Tensor, tile: Tile) -> Tensor | None:
        if self.values is None:
            return None
        index = self._index(tile).expand_as(weights)
        mass = weights.new_zeros((*weights.shape[:-1], self.keys.shape[-2]))
        return mass.scatter_add(-1, index, weights) @ self._headed(self.values, tile)

    @staticmethod
    def _headed(table: Tensor, tile: Tile) -> Tensor:
        return table[tile.head.flatten()] if table.dim() == 3 else table

    def fit(self, sizes: CallSizes, q: Tensor, v: Tensor) -> Bias:
        rows = self.keys.shape[-2] if isinstance(self.keys, Tensor) and self.keys.dim() > 1 else 0
        if rows % 2 == 0:
            raise ValueError(f"keys must be a table of 2 clip + 1 rows, got {describe_value(self.keys)}")
        headed = [(sizes.heads, rows, q.shape[-1])] if sizes.heads else []
        check_parameter(self.keys, q, "keys", [(rows, q.shape[-1])], list(headed))
        if self.values is None:
            return Relative(to_logit_dtype(self.keys, q))
        headed = [(sizes.heads, rows, v.shape[-1])] if sizes.heads else []
        check_parameter(self.values, q, "values", [(rows, v.shape[-1])], list(headed))
        return Relative(to_logit_dtype(self.keys, q), to_logit_dtype(self.values, q))

    def tensors(self) -> dict[str, Tensor]:
        return {"keys": self.keys} | ({} if self.values is None else {"values": self.values})


@dataclass(frozen=True, slots=True)
class DenseBias(Bias):
    """A float tensor that broadcasts to the attention matrix; -inf masks."""

    entries: Tensor

    def term(self, tile: Tile) -> Tensor:
        return tile.pick(self.entries)

    def fit(self, sizes: CallSizes, q: Tensor, v: Tensor) -> Bias:
        return DenseBias(to_four_dimensions(to_call_device(self.entries, sizes, "bias"), sizes, "bias"))

    def tensors(self) -> dict[str, Tensor]:
        return {"entries": self.entries}


def as_bias(bias: Bias | Tensor) -> Bias:
    """A bias or a float tensor as a `Bias`; raises TypeError for anything else."""
    if isinstance(bias, Bias):
        return bias
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        got = f"a {bias.dtype} tensor" if isinstance(bias, Tensor) else type(bias).__name__
        hint = " (a bool tensor goes to mask=)" if isinstance(bias, Tensor) and bias.dtype == torch.bool else ""
        raise TypeError(f"bias must be a Bias such as foci.ALiBi() or a float tensor, got {got}{hint}")
    return DenseBias(bias)


def default_slopes(heads: int, q: Tensor) -> Tensor:
    """The slopes of Press et al.: 2^(-8i/n) for a power of two n; other counts add every other slope of 2n."""
    below = 1 << max(heads.bit_length() - 1, 0)
    # Made on the device: a copy from the host is not allowed while a CUDA graph is captured.
    step = torch.arange(below, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    whole, between = (step + 1) * (-8.0 / below), (2 * step[: heads - below] + 1) * (-4.0 / below)
    return torch.exp2(torch.cat((whole, between)))[:heads]


def require_heads(bias: Bias, sizes: CallSizes) -> int:
    """The number of heads; raises if the inputs have no head dimension."""
    if sizes.heads is None:
        raise ValueError(
            f"query must be (..., H, T, D) for {type(bias).__name__}, which is per head,"
            f" got {len(sizes.batch) + 2}-D inputs without heads"
        )
    return sizes.heads


def to_logit_dtype(parameter: Tensor, q: Tensor) -> Tensor:
    """The parameter in float32 at least, like the logits it is added to."""
    return parameter.to(torch.promote_types(q.dtype, torch.float32))

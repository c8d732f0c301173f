"""What is added to a score for where the query and the key stand.

    ALiBi     -slope · |distance|                      one slope per head
    Buckets   table[bucket(distance), head]            T5: near distances one by one, far ones in growing buckets
    Relative  q · keys[clip(distance)], and values     Shaw: vectors, inside the scaled part of the score
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
    """Adds to the logits, as a number per entry (`term`) or inside the scaled part (`raw_term`) and to the output."""

    def term(self, tile: Tile) -> Tensor | None:
        """Added to the finished score; broadcasts to (B, H, R, C)."""
        return None

    def raw_term(self, q: Tensor, tile: Tile) -> Tensor | None:
        """Added to the score before its scale."""
        return None

    def value_term(self, weights: Tensor, tile: Tile) -> Tensor | None:
        """Added to the output: (B, H, R, Dv)."""
        return None

    def fit(self, sizes: CallSizes, q: Tensor, v: Tensor) -> Bias:
        """The same bias, checked against a call and with its tensors in normal form."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """The parameters by field name; gradients reach them."""
        return {}


@dataclass(frozen=True, slots=True)
class ALiBi(Bias):
    """-slope · |distance| (Press et al.); slopes (H,), by default 2^(-8/H), 2^(-16/H), ...

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
        check_parameter(self.slopes, q, "ALiBi slopes", [(heads,)], [])
        return ALiBi(to_logit_dtype(self.slopes, q))

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.slopes is None else {"slopes": self.slopes}


@dataclass(frozen=True, slots=True)
class Buckets(Bias):
    """T5's learned table (buckets, H): near distances have a bucket each, farther ones share logarithmic buckets."""

    table: Tensor
    bidirectional: bool
    max_distance: int

    def __post_init__(self) -> None:
        if not isinstance(self.table, Tensor) or self.table.dim() != 2:
            raise ValueError(f"Buckets takes a table (buckets, H), but got {describe_value(self.table)}")
        exact = self.table.shape[0] // (4 if self.bidirectional else 2)
        if exact < 1:
            least = 4 if self.bidirectional else 2
            raise ValueError(f"Buckets needs a table of at least {least} buckets, but got {describe_value(self.table)}")
        if not isinstance(self.max_distance, int) or self.max_distance <= exact:
            raise ValueError(
                f"Buckets needs a whole max_distance above {exact}, the distances that have a bucket each"
                f" ({self.table.shape[0]} buckets), but got {self.max_distance!r}"
            )

    def term(self, tile: Tile) -> Tensor:
        bucket = self.bucket(tile.key_position - tile.query_position)
        return self.table[bucket, tile.head]

    def bucket(self, distance: Tensor) -> Tensor:
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
        check_parameter(self.table, q, "Buckets table", [(self.table.shape[0], heads)], [])
        return replace(self, table=to_logit_dtype(self.table, q))

    def tensors(self) -> dict[str, Tensor]:
        return {"table": self.table}


@dataclass(frozen=True, slots=True)
class Relative(Bias):
    """Shaw's vectors per distance: q · keys[clip(distance) + clip] joins the dot product before the scale,
    and Σ w values[...] joins the output. Tables (2 clip + 1, D) or (H, 2 clip + 1, D).
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
            raise ValueError(f"Relative keys must be a table of 2 clip + 1 rows, but got {describe_value(self.keys)}")
        headed = [(sizes.heads, rows, q.shape[-1])] if sizes.heads else []
        check_parameter(self.keys, q, "Relative keys", [(rows, q.shape[-1])], list(headed))
        if self.values is None:
            return Relative(to_logit_dtype(self.keys, q))
        headed = [(sizes.heads, rows, v.shape[-1])] if sizes.heads else []
        check_parameter(self.values, q, "Relative values", [(rows, v.shape[-1])], list(headed))
        return Relative(to_logit_dtype(self.keys, q), to_logit_dtype(self.values, q))

    def tensors(self) -> dict[str, Tensor]:
        return {"keys": self.keys} | ({} if self.values is None else {"values": self.values})


@dataclass(frozen=True, slots=True)
class DenseBias(Bias):
    """A float tensor that broadcasts to the attention matrix, read as it is; -inf masks."""

    entries: Tensor

    def term(self, tile: Tile) -> Tensor:
        return tile.pick(self.entries)

    def fit(self, sizes: CallSizes, q: Tensor, v: Tensor) -> Bias:
        return DenseBias(to_four_dimensions(to_call_device(self.entries, sizes, "bias"), sizes, "bias"))

    def tensors(self) -> dict[str, Tensor]:
        return {"entries": self.entries}


def as_bias(bias: Bias | Tensor) -> Bias:
    if isinstance(bias, Bias):
        return bias
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        got = f"a {bias.dtype} tensor" if isinstance(bias, Tensor) else type(bias).__name__
        hint = " (a bool tensor goes to mask=)" if isinstance(bias, Tensor) and bias.dtype == torch.bool else ""
        raise TypeError(f"bias must be a foci bias or a float tensor, but got {got}{hint}")
    return DenseBias(bias)


def default_slopes(heads: int, q: Tensor) -> Tensor:
    """The slopes of Press et al.: for a power of two 2^(-8/n)^i, and between two powers every other of the next."""
    below = 1 << max(heads.bit_length() - 1, 0)
    # Made on the device: a copy to it would be refused while a graph is captured.
    step = torch.arange(below, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    whole, between = (step + 1) * (-8.0 / below), (2 * step[: heads - below] + 1) * (-4.0 / below)
    return torch.exp2(torch.cat((whole, between)))[:heads]


def require_heads(bias: Bias, sizes: CallSizes) -> int:
    if sizes.heads is None:
        raise ValueError(
            f"{type(bias).__name__} is per head, but these inputs have no heads: expected (..., H, T, D),"
            f" got {len(sizes.batch) + 2}-D"
        )
    return sizes.heads


def to_logit_dtype(parameter: Tensor, q: Tensor) -> Tensor:
    """Float32 at least, like the logits that it joins."""
    return parameter.to(torch.promote_types(q.dtype, torch.float32))

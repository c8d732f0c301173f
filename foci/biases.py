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

from foci.masks.tile import Extent, Where
from foci.runtime.checks import four_dimensional, on_device
from foci.runtime.tensor_cache import once
from foci.scores import described, fits


class Bias:
    """Adds to the logits, as a number per entry (`term`) or inside the scaled part (`raw_term`) and to the output."""

    def term(self, where: Where) -> Tensor | None:
        """Added to the finished score; broadcasts to (B, H, R, C)."""
        return None

    def raw_term(self, q: Tensor, where: Where) -> Tensor | None:
        """Added to the score before its scale."""
        return None

    def value_term(self, weights: Tensor, where: Where) -> Tensor | None:
        """Added to the output: (B, H, R, Dv)."""
        return None

    def fit(self, extent: Extent, q: Tensor, v: Tensor) -> Bias:
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

    def term(self, where: Where) -> Tensor:
        assert self.slopes is not None, "fit() fills in the default slopes"
        distance = (where.key_position - where.query_position).abs()
        return -self.slopes[where.head] * distance.to(self.slopes.dtype)

    def fit(self, extent: Extent, q: Tensor, v: Tensor) -> Bias:
        heads = need_heads(self, extent)
        if self.slopes is None:
            key = (default_slopes, heads, torch.promote_types(q.dtype, torch.float32))
            return ALiBi(once(key, q, lambda: default_slopes(heads, q)))
        fits(self.slopes, q, "ALiBi slopes", [(heads,)], [])
        return ALiBi(wide(self.slopes, q))

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
            raise ValueError(f"Buckets takes a table (buckets, H), but got {described(self.table)}")
        exact = self.table.shape[0] // (4 if self.bidirectional else 2)
        if exact < 1:
            least = 4 if self.bidirectional else 2
            raise ValueError(f"Buckets needs a table of at least {least} buckets, but got {described(self.table)}")
        if not isinstance(self.max_distance, int) or self.max_distance <= exact:
            raise ValueError(
                f"Buckets needs a whole max_distance above {exact}, the distances that have a bucket each"
                f" ({self.table.shape[0]} buckets), but got {self.max_distance!r}"
            )

    def term(self, where: Where) -> Tensor:
        bucket = self.bucket(where.key_position - where.query_position)
        return self.table[bucket, where.head]

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

    def fit(self, extent: Extent, q: Tensor, v: Tensor) -> Bias:
        heads = need_heads(self, extent)
        fits(self.table, q, "Buckets table", [(self.table.shape[0], heads)], [])
        return replace(self, table=wide(self.table, q))

    def tensors(self) -> dict[str, Tensor]:
        return {"table": self.table}


@dataclass(frozen=True, slots=True)
class Relative(Bias):
    """Shaw's vectors per distance: q · keys[clip(distance) + clip] joins the dot product before the scale,
    and Σ w values[...] joins the output. Tables (2 clip + 1, D) or (H, 2 clip + 1, D).
    """

    keys: Tensor
    values: Tensor | None = None

    def _index(self, where: Where) -> Tensor:
        clip = self.keys.shape[-2] // 2
        return (where.key_position - where.query_position).clamp(-clip, clip) + clip

    def raw_term(self, q: Tensor, where: Where) -> Tensor:
        per_row = q @ self._headed(self.keys, where).mT  # (B, H, R, 2 clip + 1)
        index = self._index(where)
        index = index.expand(*per_row.shape[:2], *index.shape[2:])
        return per_row.gather(-1, index)

    def value_term(self, weights: Tensor, where: Where) -> Tensor | None:
        if self.values is None:
            return None
        index = self._index(where).expand_as(weights)
        mass = weights.new_zeros((*weights.shape[:-1], self.keys.shape[-2]))
        return mass.scatter_add(-1, index, weights) @ self._headed(self.values, where)

    @staticmethod
    def _headed(table: Tensor, where: Where) -> Tensor:
        return table[where.head.flatten()] if table.dim() == 3 else table

    def fit(self, extent: Extent, q: Tensor, v: Tensor) -> Bias:
        rows = self.keys.shape[-2] if isinstance(self.keys, Tensor) and self.keys.dim() > 1 else 0
        if rows % 2 == 0:
            raise ValueError(f"Relative keys must be a table of 2 clip + 1 rows, but got {described(self.keys)}")
        headed = [(extent.heads, rows, q.shape[-1])] if extent.heads else []
        fits(self.keys, q, "Relative keys", [(rows, q.shape[-1])], list(headed))
        if self.values is None:
            return Relative(wide(self.keys, q))
        headed = [(extent.heads, rows, v.shape[-1])] if extent.heads else []
        fits(self.values, q, "Relative values", [(rows, v.shape[-1])], list(headed))
        return Relative(wide(self.keys, q), wide(self.values, q))

    def tensors(self) -> dict[str, Tensor]:
        return {"keys": self.keys} | ({} if self.values is None else {"values": self.values})


@dataclass(frozen=True, slots=True)
class Added(Bias):
    """A float tensor that broadcasts to the attention matrix, read as it is; -inf masks."""

    entries: Tensor

    def term(self, where: Where) -> Tensor:
        return where.pick(self.entries)

    def fit(self, extent: Extent, q: Tensor, v: Tensor) -> Bias:
        return Added(four_dimensional(on_device(self.entries, extent, "bias"), extent, "bias"))

    def tensors(self) -> dict[str, Tensor]:
        return {"entries": self.entries}


def as_bias(bias: Bias | Tensor) -> Bias:
    if isinstance(bias, Bias):
        return bias
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        got = f"a {bias.dtype} tensor" if isinstance(bias, Tensor) else type(bias).__name__
        hint = " (a bool tensor goes to mask=)" if isinstance(bias, Tensor) and bias.dtype == torch.bool else ""
        raise TypeError(f"bias must be a foci bias or a float tensor, but got {got}{hint}")
    return Added(bias)


def default_slopes(heads: int, q: Tensor) -> Tensor:
    """The slopes of Press et al.: for a power of two 2^(-8/n)^i, and between two powers every other of the next."""
    below = 1 << max(heads.bit_length() - 1, 0)
    # Made on the device: a copy to it would be refused while a graph is captured.
    step = torch.arange(below, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    whole, between = (step + 1) * (-8.0 / below), (2 * step[: heads - below] + 1) * (-4.0 / below)
    return torch.exp2(torch.cat((whole, between)))[:heads]


def need_heads(bias: Bias, extent: Extent) -> int:
    if extent.heads is None:
        raise ValueError(
            f"{type(bias).__name__} is per head, but these inputs have no heads: expected (..., H, T, D),"
            f" got {len(extent.batch) + 2}-D"
        )
    return extent.heads


def wide(parameter: Tensor, q: Tensor) -> Tensor:
    """Float32 at least, like the logits that it joins."""
    return parameter.to(torch.promote_types(q.dtype, torch.float32))

"""Masks, biases and scores for one part of the matrix: some sequences, heads and queries, and the first keys.

They are checked against the sizes of the whole call first (`fit`), so that their tensors have a known form.

B batch, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foci.arguments import check_score, normalize_positions, normalize_sink
from foci.biases import ALiBi, Bias, Buckets, DenseBias, Relative, as_bias
from foci.masks.base import Complement, DenseMask, Intersection, Mask, Union, as_mask, split_conjunction
from foci.masks.kinds import Causal, Documents, MaskFunction, Padding, Prefix, Window
from foci.masks.tile import CallSizes, Tile
from foci.scores import Score
from foci.sharding.layout import Part
from foci.weights.parts_file import map_tensors


@dataclass(frozen=True)
class CallParts:
    """What a call has besides query, key and value, checked against its sizes."""

    sizes: CallSizes
    score: Score
    mask: Mask | None
    bias: Bias | None
    sink: Tensor | None
    positions: tuple[Tensor, Tensor] | None

    def select(self, part: Part, keys: int, is_default: bool) -> dict[str, Any]:
        """The arguments of a call for one part and its first keys; `is_default`: the positions are the default ones."""
        select = PartSelection(self.sizes, part, keys, self.positions is not None or is_default)
        positions: tuple[Tensor, Tensor | None] | None = None
        if self.positions is not None:
            positions = select.positions(self.positions)
        elif not is_default and (depends_on_position(self.mask) or self.has_distance_bias):
            positions = self.default_positions(part), None
        return {
            "score": self.score.select_heads(part.heads),
            "mask": None if self.mask is None else select.mask(self.mask),
            "bias": None if self.bias is None else select.bias(self.bias),
            "sink": None if self.sink is None else self.sink[part.heads],
            "positions": positions,
        }

    @property
    def has_distance_bias(self) -> bool:
        return self.bias is not None and not isinstance(self.bias, DenseBias)

    def default_positions(self, part: Part) -> Tensor:
        """The positions of the part's queries."""
        offset = self.sizes.keys - self.sizes.queries
        return torch.arange(part.queries.start, part.queries.stop, device=self.sizes.device) + offset

    def count_visible_keys(self, part: Part) -> int | None:
        """After how many keys no query of the part sees one; None: unknown, or none at all.

        With only these keys, the positions of the part are the default ones.
        """
        last = part.queries.stop + self.sizes.keys - self.sizes.queries
        hides_later = any(
            (isinstance(mask, Causal) and mask.offset is None) or (isinstance(mask, Window) and mask.right == 0)
            for mask in split_conjunction(self.mask)
        )
        return last if hides_later and self.positions is None and last > 0 else None


def check_parts(options: dict[str, Any], sizes: CallSizes, q: Tensor, k: Tensor, v: Tensor) -> CallParts:
    """Checks score, mask, bias, sink and positions against the sizes of the whole call."""
    score, mask, bias, sink, positions = (options[name] for name in ("score", "mask", "bias", "sink", "positions"))
    check_score(score)
    score.check(q, k, sizes.heads)
    return CallParts(
        sizes,
        score,
        None if mask is None else as_mask(mask).fit(sizes),
        None if bias is None else as_bias(bias).fit(sizes, q, v),
        None if sink is None else normalize_sink(sink, sizes),
        None if positions is None else normalize_positions(positions, sizes),
    )


def depends_on_position(mask: Mask | None) -> bool:
    """Whether the mask needs the positions of the queries; `causal` is given them as an offset."""
    if isinstance(mask, Intersection | Union):
        return depends_on_position(mask.left) or depends_on_position(mask.right)
    if isinstance(mask, Complement):
        return depends_on_position(mask.mask)
    return mask is not None and not isinstance(mask, Causal | Padding | Documents | Prefix | DenseMask)


class PartSelection:
    """Selects one part of masks, biases and positions."""

    def __init__(self, sizes: CallSizes, part: Part, keys: int, keeps_causal: bool) -> None:
        self.sizes, self.part, self.keys, self.keeps_causal = sizes, part, keys, keeps_causal
        every = torch.arange(sizes.flat_batch, device=sizes.device).view(sizes.batch)
        # The numbers of the part's sequences, with all batch dimensions as one.
        self.sequences = every[part.batch].flatten()
        self.is_whole_batch = self.sequences.numel() == sizes.flat_batch

    def mask(self, mask: Mask) -> Mask:
        if isinstance(mask, Intersection | Union):
            return type(mask)(self.mask(mask.left), self.mask(mask.right))
        if isinstance(mask, Complement):
            return Complement(self.mask(mask.mask))
        if isinstance(mask, Causal):
            return self.causal(mask)
        if isinstance(mask, Window | Prefix):
            return mask
        if isinstance(mask, Padding):
            hidden = self.sizes.keys - self.keys
            lengths = self.batch(mask.lengths)
            left = mask.side == "left"
            return Padding((lengths - hidden).clamp(min=0) if left else lengths.clamp(max=self.keys), mask.side)
        if isinstance(mask, Documents):
            return Documents(
                self.batch(mask.query_ids)[:, self.part.queries], self.batch(mask._key_ids())[:, : self.keys]
            )
        if isinstance(mask, DenseMask):
            return DenseMask(self.dense(mask.entries))
        if isinstance(mask, MaskFunction):
            return MaskFunction(self.function(mask.function))
        return PartialMask(mask, self.sequences, self.part.heads.start, self.part.queries.start)

    def causal(self, mask: Causal) -> Mask:
        if mask.offset is not None:
            return mask.at(mask.offset + self.part.queries.start)
        return mask if self.keeps_causal else mask.at(self.part.queries.start + self.sizes.keys - self.sizes.queries)

    def function(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if self.is_whole_batch and self.part.heads.start == 0:
            return function
        sequences, first = self.sequences, self.part.heads.start
        return lambda batch, head, query, key: function(sequences[batch], head + first, query, key)

    def bias(self, bias: Bias) -> Bias:
        heads = self.part.heads
        if isinstance(bias, ALiBi):
            return bias if bias.slopes is None else ALiBi(bias.slopes[heads])
        if isinstance(bias, Buckets):
            return replace(bias, table=bias.table[:, heads])
        if isinstance(bias, Relative):
            return map_tensors(bias, lambda table: table[heads] if table.dim() == 3 else table)  # type: ignore[no-any-return]
        if isinstance(bias, DenseBias):
            return DenseBias(self.dense(bias.entries))
        raise TypeError(f"bias must be one of foci's own biases or a tensor for DTensors, got {type(bias).__name__}")

    def positions(self, positions: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        queries, keys = (self.batch(each) for each in positions)
        return queries[:, self.part.queries], keys[:, : self.keys]

    def batch(self, tensor: Tensor) -> Tensor:
        """The part's sequences of (B, ...); a tensor with one row is that of all sequences."""
        return tensor if self.is_whole_batch or tensor.shape[0] == 1 else tensor[self.sequences]

    def dense(self, entries: Tensor) -> Tensor:
        """The part's entries of (B or 1, H or 1, Tq or 1, Tk or 1)."""
        entries = self.batch(entries)
        for axis, kept in ((1, self.part.heads), (2, self.part.queries), (3, slice(0, self.keys))):
            if entries.shape[axis] > 1:
                entries = entries.narrow(axis, kept.start, kept.stop - kept.start)
        return entries


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class PartialMask(Mask):
    """A mask of another kind, at the indices that its tokens have in the whole call."""

    mask: Mask
    sequences: Tensor
    first_head: int
    first_query: int

    def visible(self, tile: Tile) -> Tensor:
        rows = tile.rows and slice(tile.rows.start + self.first_query, tile.rows.stop + self.first_query)
        return self.mask.visible(
            replace(
                tile,
                batch=self.sequences[tile.batch],
                head=tile.head + self.first_head,
                query=tile.query + self.first_query,
                rows=rows,
            )
        )

    @property
    def is_static(self) -> bool:
        return False

    def __repr__(self) -> str:
        return repr(self.mask)

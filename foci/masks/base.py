"""`Mask`: which keys each query can attend to, the operators `&`, `|`, `~`, and the drawing. The kinds are in kinds.py.

B batch, H heads, R queries and C keys of a tile. True means that the query can attend to the key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from foci.masks.ranges import KeyRanges
from foci.masks.tile import CallSizes, Tile
from foci.runtime.checks import to_call_device, to_four_dimensions

CPU = torch.device("cpu")


class Mask:
    """Which keys each query can attend to.

    >>> print(foci.causal & foci.window(1))
    causal & window(1), 6 queries and 6 keys
    ■ · · · · ·
    ■ ■ · · · ·
    · ■ ■ · · ·
    · · ■ ■ · ·
    · · · ■ ■ ·
    · · · · ■ ■

    Masks combine with each other and with bool tensors (True = visible) by `&`, `|` and `~`.
    """

    def visible(self, tile: Tile) -> Tensor:
        """True where the key is visible to the query; broadcasts to (B, H, R, C)."""
        raise NotImplementedError

    def key_ranges(self, sizes: CallSizes, has_positions: bool) -> KeyRanges:
        """The visible keys of each query as ranges of key indices; `has_positions`: the caller passed positions.

        Ranges that follow from plain numbers are made on the device of `sizes`: the CPU if their values are read, the
        device of a kernel that reads them, because a copy from the host would wait for all queued work.
        """
        return KeyRanges.all_keys(sizes)

    def fit(self, sizes: CallSizes) -> Mask:
        """The same mask, checked against the sizes of a call and with its tensors in normal form."""
        return self

    @property
    def is_static(self) -> bool:
        """Whether the mask consists of plain numbers, so that its key ranges need no read from a device."""
        return True

    def __and__(self, other: Mask | Tensor) -> Mask:
        return Intersection(self, as_mask(other))

    def __or__(self, other: Mask | Tensor) -> Mask:
        return Union(self, as_mask(other))

    def __invert__(self) -> Mask:
        return Complement(self)

    __rand__ = __and__
    __ror__ = __or__

    def __bool__(self) -> bool:
        raise TypeError(
            f"a mask has no truth value: combine masks by &, | and ~ instead of and, or, not (mask: {self!r})"
        )

    def draw(self, queries: int = 6, keys: int | None = None, *, batch: int = 0, head: int = 0) -> str:
        """Draws the mask: a row per query, a column per key, ■ where the key is visible.

        >>> print(foci.causal.draw(2, 5))
        ■ ■ ■ ■ ·
        ■ ■ ■ ■ ■
        """
        keys = queries if keys is None else keys
        if queries < 1 or keys < 1:
            raise ValueError(f"queries and keys must be 1 or more, got {queries} and {keys}")
        size = self._drawing_size()
        sequences = math.prod(size.batch)
        if not 0 <= batch < max(sequences, 1) or head < 0:
            raise ValueError(
                f"batch must be below {max(sequences, 1)} and head 0 or more, got batch={batch}, head={head}"
            )
        return draw_mask(self, size._replace(queries=queries, keys=keys, heads=max(size.heads, head + 1)), batch, head)

    def __str__(self) -> str:
        size = self._drawing_size()
        return f"{self!r}, {size.queries} queries and {size.keys} keys\n{draw_mask(self, size, 0, 0)}"

    def _drawing_size(self) -> DrawingSize:
        """The sizes that a drawing of the mask needs."""
        return DrawingSize()


class DrawingSize(NamedTuple):
    """The sizes of a drawing, and their priority: 0 if any size will do, 2 if tensors fix it."""

    priority: int = 0
    queries: int = 6
    keys: int = 6
    batch: tuple[int, ...] = (1,)
    heads: int = 1
    device: torch.device = CPU


def as_mask(mask: Mask | Tensor) -> Mask:
    """A mask or a bool tensor as a `Mask`; raises TypeError for anything else."""
    if isinstance(mask, Mask):
        return mask
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = f"a {mask.dtype} tensor" if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a Mask or a bool tensor (True = visible), got {got}")
    return DenseMask(mask)


def draw_mask(mask: Mask, size: DrawingSize, batch: int, head: int) -> str:
    """The drawing of one sequence and head."""
    queries, keys, device = size.queries, size.keys, size.device
    mask = mask.fit(CallSizes(size.batch, size.heads, queries, keys, device))
    query, key = torch.arange(queries, device=device).view(-1, 1), torch.arange(keys, device=device).view(1, -1)
    batch_index, head_index = torch.tensor(batch, device=device), torch.tensor(head, device=device)
    tile = Tile(batch_index, head_index, query, key, query + keys - queries, key)
    visible = mask.visible(tile).cpu().broadcast_to(queries, keys).tolist()
    return "\n".join(" ".join("■" if entry else "·" for entry in row) for row in visible)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class DenseMask(Mask):
    """A bool tensor that broadcasts to the attention matrix."""

    entries: Tensor

    def visible(self, tile: Tile) -> Tensor:
        return tile.pick(self.entries)

    def fit(self, sizes: CallSizes) -> Mask:
        return DenseMask(to_four_dimensions(to_call_device(self.entries, sizes, "mask"), sizes, "mask"))

    def _drawing_size(self) -> DrawingSize:
        batch, heads, queries, keys = (1, 1, 1, 1, *self.entries.shape)[-4:]
        leading = tuple(self.entries.shape[:-3]) or (batch,)
        return DrawingSize(2, queries, keys, leading, heads, self.entries.device)

    def __repr__(self) -> str:
        return f"bool tensor {tuple(self.entries.shape)}"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Intersection(Mask):
    """Visible where both masks are: `left & right`."""

    left: Mask
    right: Mask

    def visible(self, tile: Tile) -> Tensor:
        return self.left.visible(tile) & self.right.visible(tile)

    def fit(self, sizes: CallSizes) -> Mask:
        return Intersection(self.left.fit(sizes), self.right.fit(sizes))

    @property
    def is_static(self) -> bool:
        return self.left.is_static and self.right.is_static

    def key_ranges(self, sizes: CallSizes, has_positions: bool) -> KeyRanges:
        return self.left.key_ranges(sizes, has_positions) & self.right.key_ranges(sizes, has_positions)

    def _drawing_size(self) -> DrawingSize:
        return join_drawing_sizes(self.left, self.right)

    def __repr__(self) -> str:
        return f"{format_operand(self.left, Union)} & {format_operand(self.right, Union)}"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Union(Mask):
    """Visible where at least one of the masks is: `left | right`."""

    left: Mask
    right: Mask

    def visible(self, tile: Tile) -> Tensor:
        return self.left.visible(tile) | self.right.visible(tile)

    def fit(self, sizes: CallSizes) -> Mask:
        return Union(self.left.fit(sizes), self.right.fit(sizes))

    @property
    def is_static(self) -> bool:
        return self.left.is_static and self.right.is_static

    def key_ranges(self, sizes: CallSizes, has_positions: bool) -> KeyRanges:
        return self.left.key_ranges(sizes, has_positions) | self.right.key_ranges(sizes, has_positions)

    def _drawing_size(self) -> DrawingSize:
        return join_drawing_sizes(self.left, self.right)

    def __repr__(self) -> str:
        return f"{format_operand(self.left, Intersection)} | {format_operand(self.right, Intersection)}"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Complement(Mask):
    """Visible where the mask is not: `~mask`."""

    mask: Mask

    def visible(self, tile: Tile) -> Tensor:
        return ~self.mask.visible(tile)

    def fit(self, sizes: CallSizes) -> Mask:
        return Complement(self.mask.fit(sizes))

    @property
    def is_static(self) -> bool:
        return self.mask.is_static

    def key_ranges(self, sizes: CallSizes, has_positions: bool) -> KeyRanges:
        return ~self.mask.key_ranges(sizes, has_positions)

    def _drawing_size(self) -> DrawingSize:
        return self.mask._drawing_size()

    def __repr__(self) -> str:
        return f"~{format_operand(self.mask, Intersection, Union)}"


def join_drawing_sizes(left: Mask, right: Mask) -> DrawingSize:
    """The sizes of a drawing that shows both masks; tensors take priority."""
    drawings = left._drawing_size(), right._drawing_size()
    return max(drawings, key=lambda size: size[:3])._replace(
        batch=max((size.batch for size in drawings), key=lambda batch: (math.prod(batch), len(batch))),
        heads=max(size.heads for size in drawings),
        device=next((size.device for size in drawings if size.device != CPU), CPU),
    )


def format_operand(mask: Mask, *kinds: type[Mask]) -> str:
    return f"({mask!r})" if isinstance(mask, kinds) else repr(mask)

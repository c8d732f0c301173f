"""`Mask`: which keys each query can attend to, the operators `&`, `|`, `~`, and its pictures. kinds.py has the kinds.

B batch, H heads, R queries and C keys of a tile. True means that the query can attend to the key.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.masks.range_algebra import KeyRanges
from foci.masks.tile import CallSizes, Tile
from foci.runtime.checks import to_call_device, to_four_dimensions, to_numpy

CPU = torch.device("cpu")
# How the masks are written, for error messages.
MASK_FACTORIES = {
    "causal": "causal",
    "window": "window(left)",
    "padding": "padding(lengths)",
    "documents": "documents(ids)",
    "prefix": "prefix(length)",
    "mask_function": "mask_function(f)",
}


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

        Numeric masks build their ranges on `sizes.device`. Pass the CPU if Python reads the values, the GPU if a kernel
        does: a host copy would synchronize.
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

    def dense(
        self, queries: int | None = None, keys: int | None = None, *, batch: int = 0, head: int = 0, limit: int = 2**30
    ) -> Tensor:
        """The mask of one sequence and head as a bool tensor (Tq, Tk), True where the key is visible.

        Args:
            queries, keys: the sizes; None: those of the mask's tensors, or 6. `keys` is `queries` by default.
            batch, head: which sequence and head.
            limit: the largest number of bytes; more raise ValueError.
        """
        size = self._drawing_size()
        if queries is not None:
            size = size._replace(queries=queries, keys=queries)
        if keys is not None:
            size = size._replace(keys=keys)
        if size.queries < 1 or size.keys < 1:
            raise ValueError(f"queries and keys must be 1 or more, got {size.queries} and {size.keys}")
        sequences = max(math.prod(size.batch), 1)
        if not 0 <= batch < sequences or head < 0:
            raise ValueError(f"batch must be below {sequences} and head 0 or more, got batch={batch}, head={head}")
        if size.queries * size.keys > limit:
            raise ValueError(f"queries x keys must be at most limit={limit:,}, got {size.queries:,} x {size.keys:,}")
        return compute_visible(self, size._replace(heads=max(size.heads, head + 1)), batch, head)

    def draw(self, queries: int | None = None, keys: int | None = None, *, batch: int = 0, head: int = 0) -> str:
        """Draws the mask: a row per query, a column per key, ■ where the key is visible. Arguments as in `dense`.

        >>> print(foci.causal.draw(2, 5))
        ■ ■ ■ ■ ·
        ■ ■ ■ ■ ■
        """
        visible = self.dense(queries, keys, batch=batch, head=head).tolist()
        return "\n".join(" ".join("■" if entry else "·" for entry in row) for row in visible)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __str__(self) -> str:
        size = self._drawing_size()
        return f"{self!r}, {size.queries} queries and {size.keys} keys\n{self.draw()}"

    def show(self, queries: int | None = None, keys: int | None = None, *, batch: int = 0, head: int = 0) -> None:
        """Prints the drawing of the mask; the arguments are those of `dense`."""
        print(f"{self!r}\n{self.draw(queries, keys, batch=batch, head=head)}")

    def save(
        self,
        path: str | os.PathLike[str],
        queries: int | None = None,
        keys: int | None = None,
        *,
        batch: int = 0,
        head: int = 0,
        dpi: int = 300,
    ) -> None:
        """Saves a picture in the format of the suffix: .png, .svg, .pdf, or .html for a page.

        Args:
            queries, keys, batch, head: those of `dense`.
            dpi: dots per inch of a .png.
        """
        from foci.view.figures.masks import save_mask

        save_mask(self.dense(queries, keys, batch=batch, head=head), repr(self), path, dpi)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """The representation in a notebook."""
        from foci.view.figures.masks import render_mask_in_notebook

        return render_mask_in_notebook(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """The drawn matrix for NumPy and matplotlib; a mask that differs between sequences or heads is refused."""
        size = self._drawing_size()
        if math.prod(size.batch) > 1 or size.heads > 1:
            raise ValueError(
                f"a mask must be of one sequence and head for an array, got {math.prod(size.batch)} sequences and"
                f" {size.heads} heads: use mask.dense(batch=0, head=0)"
            )
        return to_numpy(self.dense(), dtype, copy)

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
        raise TypeError(f"mask must be a Mask or a bool tensor (True = visible), got {describe_other(mask)}")
    return DenseMask(mask)


def describe_other(mask: object) -> str:
    """What is not a mask, and what to write instead."""
    if isinstance(mask, Tensor):
        instead = "pass it as bias=" if mask.is_floating_point() else "convert it with .bool()"
        return f"a {mask.dtype} tensor: {instead}"
    if isinstance(mask, str):
        return repr(mask) + "".join(
            f": use foci.{MASK_FACTORIES[name]}" for name in get_close_matches(mask, MASK_FACTORIES, 1)
        )
    if hasattr(mask, "__array__"):
        return f"{type(mask).__name__}: use torch.as_tensor"
    if callable(mask):
        name = getattr(mask, "__name__", type(mask).__name__)
        return f"the function {name}: use foci.{MASK_FACTORIES.get(name, 'mask_function(f)')}"
    return type(mask).__name__


def compute_visible(mask: Mask, size: DrawingSize, batch: int, head: int) -> Tensor:
    """The mask of one sequence and head: bool (Tq, Tk) on the CPU."""
    queries, keys, device = size.queries, size.keys, size.device
    mask = mask.fit(CallSizes(size.batch, size.heads, queries, keys, device))
    query, key = torch.arange(queries, device=device).view(-1, 1), torch.arange(keys, device=device).view(1, -1)
    batch_index, head_index = torch.tensor(batch, device=device), torch.tensor(head, device=device)
    tile = Tile(batch_index, head_index, query, key, query + keys - queries, key)
    return mask.visible(tile).cpu().broadcast_to(queries, keys)


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


def split_conjunction(mask: Mask | None) -> list[Mask]:
    """The masks that `mask` combines with `&`."""
    if mask is None:
        return []
    return [*split_conjunction(mask.left), *split_conjunction(mask.right)] if isinstance(mask, Intersection) else [mask]


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

"""The kinds of masks: which keys each query can attend to. They combine by `&`, `|`, `~`, also with bool tensors.

    >>> print((causal & window(1)).draw(4))
    ■ · · ·
    ■ ■ · ·
    · ■ ■ ·
    · · ■ ■

B batch, Tq queries, Tk keys. True means that the query can attend to the key.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from foci.masks.base import DrawingSize, Mask
from foci.masks.range_algebra import KeyRanges
from foci.masks.tile import CallSizes, Tile, index_by_batch
from foci.runtime.checks import check_values, is_broadcastable, is_int, to_call_device, to_int_tensor
from foci.runtime.tracing import is_traced

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Larger distances are clamped to this one, so that a position plus a distance fits in 64 bits.
MAX_DISTANCE = 2**62


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Causal(Mask):
    """Each query attends to its own position and all earlier ones; with an offset, to keys up to i + offset.

    The last query has the position of the last key, as in decoding with a cache. Two queries, five keys:

        ■ ■ ■ ■ ·
        ■ ■ ■ ■ ■

    Five queries, two keys: the first three come before every key, so their rows are fully masked.

        · ·
        · ·
        · ·
        ■ ·
        ■ ■
    """

    offset: int | None = None

    def at(self, offset: int) -> Causal:
        """Query i, counted from 0, attends to keys up to i + offset, independent of positions.

        >>> print(causal.at(0).draw(2, 5))
        ■ · · · ·
        ■ ■ · · ·
        """
        if not is_int(offset):
            raise TypeError(f"offset must be an int, got {offset!r}")
        return Causal(max(-MAX_DISTANCE, min(offset, MAX_DISTANCE)))

    def __call__(self, *arguments: object, **options: object) -> NoReturn:
        """Raise TypeError: the mask itself is the argument of `foci.attention`."""
        raise TypeError("causal must be used as mask=foci.causal, which is a mask and not a function, got a call")

    def visible(self, tile: Tile) -> Tensor:
        if self.offset is None:
            return tile.key_position <= tile.query_position
        return tile.key <= tile.query + self.offset

    def key_ranges(self, sizes: CallSizes, has_positions: bool) -> KeyRanges:
        if self.offset is None and has_positions:
            return KeyRanges.all_keys(sizes)
        offset = sizes.keys - sizes.queries if self.offset is None else self.offset
        last = torch.arange(sizes.queries, device=sizes.device) + offset
        return KeyRanges.single(torch.zeros_like(last), last + 1, sizes)

    def __repr__(self) -> str:
        return "causal" if self.offset is None else f"causal.at({self.offset})"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Window(Mask):
    """Keys from p - left to p + right around the query's position p, both inclusive; None is unlimited.

    >>> print(window(1).draw(4))
    ■ · · ·
    ■ ■ · ·
    · ■ ■ ·
    · · ■ ■
    """

    left: int | None
    right: int | None = 0

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            side = getattr(self, name)
            if side is not None and (not is_int(side) or side < 0):
                raise ValueError(f"{name} must be an int >= 0 or None, got {side!r}")
            if side is not None and side > MAX_DISTANCE:
                object.__setattr__(self, name, MAX_DISTANCE)

    def visible(self, tile: Tile) -> Tensor:
        distance = tile.key_position - tile.query_position
        visible = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            visible = distance >= -self.left
        if self.right is not None:
            visible = visible & (distance <= self.right)
        return visible

    def key_ranges(self, sizes: CallSizes, has_positions: bool) -> KeyRanges:
        if has_positions:
            return KeyRanges.all_keys(sizes)
        position = torch.arange(sizes.queries, device=sizes.device) + (sizes.keys - sizes.queries)
        low = torch.zeros_like(position) if self.left is None else position - self.left
        high = torch.full_like(position, sizes.keys) if self.right is None else position + self.right + 1
        return KeyRanges.single(low, high, sizes)

    def __repr__(self) -> str:
        return f"window({self.left})" if self.right == 0 else f"window({self.left}, {self.right})"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Padding(Mask):
    """Only the first `lengths[b]` keys of sequence b are visible (side "right"), or the last ones (side "left")."""

    lengths: Tensor
    side: str = "right"
    keys: int = 0

    def visible(self, tile: Tile) -> Tensor:
        length = self.lengths[tile.batch]
        return tile.key < length if self.side == "right" else tile.key >= self.keys - length

    def fit(self, sizes: CallSizes) -> Mask:
        lengths = to_call_device(self.lengths, sizes, "lengths")
        if lengths.shape not in {sizes.batch, (sizes.flat_batch,)} and not (not sizes.batch and lengths.numel() == 1):
            raise ValueError(
                f"lengths must have one entry per sequence, shape {tuple(sizes.batch)}, got {tuple(lengths.shape)}"
            )
        check_values(
            (lengths >= 0) & (lengths <= sizes.keys),
            lambda: f"lengths must be from 0 to the {sizes.keys} keys, got {lengths.tolist()}",
        )
        return Padding(lengths.reshape(-1), self.side, sizes.keys)

    @property
    def is_static(self) -> bool:
        return False

    def key_ranges(self, sizes: CallSizes, has_positions: bool) -> KeyRanges:
        lengths = self.lengths.view(-1, 1).expand(-1, sizes.queries)
        if self.side == "right":
            return KeyRanges.single(torch.zeros_like(lengths), lengths, sizes)
        return KeyRanges.single(sizes.keys - lengths, torch.full_like(lengths, sizes.keys), sizes)

    def _drawing_size(self) -> DrawingSize:
        keys = max(int(self.lengths.max()), 6) if self.lengths.numel() else 6
        return DrawingSize(1, min(keys, 32), keys, tuple(self.lengths.shape), 1, self.lengths.device)

    def __repr__(self) -> str:
        return f"padding({format_tensor(self.lengths)}{'' if self.side == 'right' else ', side=' + repr(self.side)})"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Documents(Mask):
    """Each query attends only to keys of its own document: several sequences packed into one."""

    query_ids: Tensor
    key_ids: Tensor | None = None

    def visible(self, tile: Tile) -> Tensor:
        return index_by_batch(self.query_ids, tile.batch, tile.query) == index_by_batch(
            self._key_ids(), tile.batch, tile.key
        )

    def _key_ids(self) -> Tensor:
        return self.query_ids if self.key_ids is None else self.key_ids

    def fit(self, sizes: CallSizes) -> Mask:
        queries = self._fit_ids(self.query_ids, sizes, sizes.queries, "query_ids")
        keys = self._fit_ids(self._key_ids(), sizes, sizes.keys, "key_ids" if self.key_ids is not None else "query_ids")
        return Documents(queries, keys)

    @staticmethod
    def _fit_ids(ids: Tensor, sizes: CallSizes, length: int, name: str) -> Tensor:
        ids = to_call_device(ids, sizes, name)
        if ids.shape not in {(length,), (1, length), (*sizes.batch, length), (sizes.flat_batch, length)}:
            raise ValueError(f"{name} must have shape {(length,)} or {(*sizes.batch, length)}, got {tuple(ids.shape)}")
        return ids.unsqueeze(0) if ids.dim() == 1 else ids.flatten(0, -2)

    @property
    def is_static(self) -> bool:
        return False

    def key_ranges(self, sizes: CallSizes, has_positions: bool) -> KeyRanges:
        """From the first to the last key of each query's document; documents need not be contiguous."""
        queries, keys = self.query_ids, self._key_ids()
        # torch.broadcast_shapes would import sympy, which takes seconds.
        rows = max(queries.shape[0], keys.shape[0])
        order = torch.sort(keys.expand(rows, -1), dim=-1, stable=True)
        queries = queries.expand(rows, -1).contiguous()
        first = torch.searchsorted(order.values, queries)
        last = torch.searchsorted(order.values, queries, right=True) - 1
        has_keys = last >= first
        low = order.indices.gather(1, first.clamp(max=sizes.keys - 1)) if sizes.keys else first
        high = order.indices.gather(1, last.clamp(min=0)) + 1 if sizes.keys else first
        return KeyRanges.single(low * has_keys, high * has_keys, sizes, exact=False)

    def _drawing_size(self) -> DrawingSize:
        queries, keys = self.query_ids, self._key_ids()
        return DrawingSize(2, queries.shape[-1], keys.shape[-1], tuple(queries.shape[:-1]) or (1,), 1, queries.device)

    def __repr__(self) -> str:
        keys = "" if self.key_ids is None else f", {format_tensor(self.key_ids)}"
        return f"documents({format_tensor(self.query_ids)}{keys})"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Prefix(Mask):
    """Keys at positions before `length`; `causal | prefix(n)` is the mask of a prefix language model.

    >>> print((causal | prefix(2)).draw(4))
    ■ ■ · ·
    ■ ■ · ·
    ■ ■ ■ ·
    ■ ■ ■ ■
    """

    length: int

    def __post_init__(self) -> None:
        if not is_int(self.length) or self.length < 0:
            raise ValueError(f"length must be an int >= 0, got {self.length!r}")
        if self.length > MAX_DISTANCE:
            object.__setattr__(self, "length", MAX_DISTANCE)

    def visible(self, tile: Tile) -> Tensor:
        return tile.key_position < self.length

    def key_ranges(self, sizes: CallSizes, has_positions: bool) -> KeyRanges:
        if has_positions:
            return KeyRanges.all_keys(sizes)
        high = torch.full((sizes.queries,), self.length, device=sizes.device)
        return KeyRanges.single(torch.zeros_like(high), high, sizes)

    def __repr__(self) -> str:
        return f"prefix({self.length})"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class MaskFunction(Mask):
    """A mask given by a function: f(batch, head, query_position, key_position) -> bool, on index tensors."""

    function: Predicate

    def visible(self, tile: Tile) -> Tensor:
        visible = self.function(tile.batch, tile.head, tile.query_position, tile.key_position)
        if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
            got = f"a {visible.dtype} tensor" if isinstance(visible, Tensor) else type(visible).__name__
            raise TypeError(f"{self!r} must return a bool tensor, got {got}")
        shape = torch.broadcast_shapes(tile.batch.shape, tile.head.shape, tile.query.shape, tile.key.shape)
        if not is_broadcastable(visible.shape, shape):
            raise ValueError(
                f"{self!r} must return a tensor that broadcasts to {tuple(shape)}, got {tuple(visible.shape)}"
            )
        return visible

    def __repr__(self) -> str:
        return f"mask_function({getattr(self.function, '__name__', 'f')})"


causal = Causal()


def window(left: int | None, right: int | None = 0) -> Mask:
    """Keys from p - left to p + right around the query's position p, both inclusive; None is unlimited.

    >>> print(foci.window(1, 1).draw(4))
    ■ ■ · ·
    ■ ■ ■ ·
    · ■ ■ ■
    · · ■ ■
    """
    return Window(left, right)


def padding(lengths: Tensor | list[int], side: str = "right") -> Mask:
    """Only the first `lengths[b]` keys of sequence b are visible, or the last ones with side="left"; lengths (B,).

    >>> print(foci.padding([2]).draw(3))
    ■ ■ ·
    ■ ■ ·
    ■ ■ ·
    """
    if side not in {"right", "left"}:
        raise ValueError(f"side must be 'right' or 'left', got {side!r}")
    return Padding(to_int_tensor(lengths, "lengths"), side)


def documents(query_ids: Tensor | list[int], key_ids: Tensor | list[int] | None = None) -> Mask:
    """Each query attends only to keys with the same document id; ids are (T,) or (B, T).

    >>> print(documents([0, 0, 1, 1, 1]).draw(5))
    ■ ■ · · ·
    ■ ■ · · ·
    · · ■ ■ ■
    · · ■ ■ ■
    · · ■ ■ ■
    """
    keys = None if key_ids is None else to_int_tensor(key_ids, "key_ids")
    return Documents(to_int_tensor(query_ids, "query_ids"), keys)


def prefix(length: int) -> Mask:
    """Keys at positions before `length`; combine it: `causal | prefix(n)`.

    >>> print((foci.causal | foci.prefix(2)).draw(4))
    ■ ■ · ·
    ■ ■ · ·
    ■ ■ ■ ·
    ■ ■ ■ ■
    """
    return Prefix(length)


def mask_function(function: Predicate) -> Mask:
    """A mask from a function f(batch, head, query_position, key_position) -> bool of index tensors that broadcast.

    >>> print(mask_function(lambda b, h, q, k: (q - k) % 2 == 0).draw(3))
    ■ · ■
    · ■ ·
    ■ · ■
    """
    if not callable(function) or isinstance(function, Mask):
        raise TypeError(f"function must be a function of four index tensors, got {type(function).__name__}")
    if not torch.compiler.is_compiling() and not takes_four_arguments(function):
        name, signature = getattr(function, "__name__", "f"), inspect.signature(function)
        raise TypeError(
            "function must take four arguments (batch, head, query_position, key_position), got"
            f" {name}{signature}: name all four, also those that it does not use"
        )
    return MaskFunction(function)


def takes_four_arguments(function: Predicate) -> bool:
    """Whether a function can be called with four arguments; True where Python does not know its parameters."""
    try:
        parameters = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        parameters.bind(*range(4))
    except TypeError:
        return False
    return True


def format_tensor(tensor: Tensor) -> str:
    # Reading values would wait for a GPU and break a compiled graph, and every refusal prints its mask.
    if tensor.numel() <= 12 and tensor.device.type == "cpu" and not is_traced(tensor):
        return repr(tensor.tolist())
    return f"{tensor.dtype} tensor {tuple(tensor.shape)}"

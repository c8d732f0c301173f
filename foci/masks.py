"""Who may look at whom.

A mask is a small object with one question, `visible(where)`, and the algebra `&`, `|`, `~`:

    >>> print(causal & window(2))
    window(2) & causal, 6 queries and 6 keys
    ...

B batch, Tq queries, Tk keys. True always means "may look".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from foci.spans import Spans
from foci.where import Extent, Where

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Mask:
    """Says which keys a query may look at; joined by `&`, `|`, `~` with masks and with bool tensors."""

    def visible(self, where: Where) -> Tensor:
        """True where the query may look at the key; broadcasts to (B, H, R, C)."""
        raise NotImplementedError

    def spans(self, extent: Extent, positioned: bool) -> Spans:
        """The keys that each query sees, as runs of key indices; `positioned`: positions were given by the caller."""
        return Spans.everything(extent)

    def fit(self, extent: Extent) -> Mask:
        """The same mask, checked against a call and with its tensors in normal form."""
        return self

    @property
    def static(self) -> bool:
        """Whether the mask is made of plain numbers only, so that its spans cost no read of a device."""
        return True

    def __and__(self, other: Mask | Tensor) -> Mask:
        return Both(self, as_mask(other))

    def __or__(self, other: Mask | Tensor) -> Mask:
        return Either(self, as_mask(other))

    def __invert__(self) -> Mask:
        return Opposite(self)

    __rand__ = __and__
    __ror__ = __or__

    def draw(self, queries: int = 6, keys: int | None = None, *, batch: int = 0, head: int = 0) -> str:
        """A small drawing: a row per query, a column per key, ■ where the query may look.

        >>> print(causal.draw(2, 5))
        ■ ■ ■ ■ ·
        ■ ■ ■ ■ ■
        """
        return draw(self, queries, queries if keys is None else keys, batch, head)

    def __str__(self) -> str:
        queries, keys, batch = self._drawn()
        fitted = self.fit(Extent((batch,), 1, queries, keys, torch.device("cpu")))
        return f"{self!r}, {queries} queries and {keys} keys\n{draw(fitted, queries, keys, 0, 0)}"

    def _drawn(self) -> tuple[int, int, int]:
        """How many queries, keys and sequences a drawing needs."""
        return 6, 6, 1


def as_mask(mask: Mask | Tensor) -> Mask:
    if isinstance(mask, Mask):
        return mask
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = f"a {mask.dtype} tensor" if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a foci mask or a bool tensor (True = may look), but got {got}")
    return Entries(mask)


def draw(mask: Mask, queries: int, keys: int, batch: int, head: int) -> str:
    query, key = torch.arange(queries).view(-1, 1), torch.arange(keys).view(1, -1)
    where = Where(
        torch.tensor(batch), torch.tensor(head), query, key, query + keys - queries, key
    )
    seen = mask.visible(where).cpu().broadcast_to(queries, keys).tolist()
    return "\n".join(" ".join("■" if entry else "·" for entry in row) for row in seen)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Causal(Mask):
    """A query sees its own position and everything before it; with an offset, keys up to i + offset.

    The last query stands at the last key, so a cache just works; two queries, five keys:

        ■ ■ ■ ■ ·
        ■ ■ ■ ■ ■

    and five queries, two keys: the first three stand before every key and see nothing.

        · ·
        · ·
        · ·
        ■ ·
        ■ ■
    """

    offset: int | None = None

    def at(self, offset: int) -> Causal:
        """Query i, counted from 0, sees the keys up to i + offset, whatever the positions are.

        >>> print(causal.at(0).draw(2, 5))
        ■ · · · ·
        ■ ■ · · ·
        """
        if not isinstance(offset, int):
            raise TypeError(f"causal.at takes a whole number, but got {offset!r}")
        return Causal(offset)

    def visible(self, where: Where) -> Tensor:
        if self.offset is None:
            return where.key_position <= where.query_position
        return where.key <= where.query + self.offset

    def spans(self, extent: Extent, positioned: bool) -> Spans:
        if self.offset is None and positioned:
            return Spans.everything(extent)
        offset = extent.keys - extent.queries if self.offset is None else self.offset
        last = torch.arange(extent.queries) + offset
        return Spans.run(torch.zeros_like(last), last + 1, extent)

    def __repr__(self) -> str:
        return "causal" if self.offset is None else f"causal.at({self.offset})"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Window(Mask):
    """Keys from p - left to p + right, both inclusive; None is unlimited.

    >>> print(window(1).draw(4))
    ■ · · ·
    ■ ■ · ·
    · ■ ■ ·
    · · ■ ■
    """

    left: int | None
    right: int | None = 0

    def __post_init__(self) -> None:
        for side in (self.left, self.right):
            if side is not None and (not isinstance(side, int) or side < 0):
                raise ValueError(f"window takes sizes >= 0 or None, but got left={self.left!r}, right={self.right!r}")

    def visible(self, where: Where) -> Tensor:
        step = where.key_position - where.query_position
        seen = torch.ones_like(step, dtype=torch.bool)
        if self.left is not None:
            seen = step >= -self.left
        if self.right is not None:
            seen = seen & (step <= self.right)
        return seen

    def spans(self, extent: Extent, positioned: bool) -> Spans:
        if positioned:
            return Spans.everything(extent)
        position = torch.arange(extent.queries) + (extent.keys - extent.queries)
        low = torch.zeros_like(position) if self.left is None else position - self.left
        high = torch.full_like(position, extent.keys) if self.right is None else position + self.right + 1
        return Spans.run(low, high, extent)

    def __repr__(self) -> str:
        return f"window({self.left})" if self.right == 0 else f"window({self.left}, {self.right})"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Padding(Mask):
    """Only the first `lengths[b]` keys are real (side "right"), or only the last ones (side "left")."""

    lengths: Tensor
    side: str = "right"
    keys: int = 0

    def visible(self, where: Where) -> Tensor:
        length = self.lengths[where.batch]
        return where.key < length if self.side == "right" else where.key >= self.keys - length

    def fit(self, extent: Extent) -> Mask:
        lengths = on_device(self.lengths, extent, "padding lengths")
        if lengths.shape not in {extent.batch, (extent.flat_batch,)} and not (not extent.batch and lengths.numel() == 1):
            raise ValueError(
                f"padding expects one length per sequence, shape {tuple(extent.batch)}, but got {tuple(lengths.shape)}"
            )
        refuse_unless(
            (lengths >= 0) & (lengths <= extent.keys),
            lambda: f"padding lengths must lie between 0 and the {extent.keys} keys, but got {lengths.tolist()}",
        )
        return Padding(lengths.reshape(-1), self.side, extent.keys)

    @property
    def static(self) -> bool:
        return False

    def spans(self, extent: Extent, positioned: bool) -> Spans:
        lengths = self.lengths.view(-1, 1).expand(-1, extent.queries)
        if self.side == "right":
            return Spans.run(torch.zeros_like(lengths), lengths, extent)
        return Spans.run(extent.keys - lengths, torch.full_like(lengths, extent.keys), extent)

    def _drawn(self) -> tuple[int, int, int]:
        keys = max(int(self.lengths.max()), 6) if self.lengths.numel() else 6
        return min(keys, 32), keys, max(self.lengths.numel(), 1)

    def __repr__(self) -> str:
        return f"padding({shown(self.lengths)}{'' if self.side == 'right' else ', side=' + repr(self.side)})"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Documents(Mask):
    """A query sees only the keys of its own document: several sequences packed into one."""

    query_ids: Tensor
    key_ids: Tensor | None = None

    def visible(self, where: Where) -> Tensor:
        return taken(self.query_ids, where.batch, where.query) == taken(self._key_ids(), where.batch, where.key)

    def _key_ids(self) -> Tensor:
        return self.query_ids if self.key_ids is None else self.key_ids

    def fit(self, extent: Extent) -> Mask:
        queries = self._fitted(self.query_ids, extent, extent.queries, "query_ids")
        keys = self._fitted(self._key_ids(), extent, extent.keys, "key_ids" if self.key_ids is not None else "ids")
        return Documents(queries, keys)

    @staticmethod
    def _fitted(ids: Tensor, extent: Extent, length: int, name: str) -> Tensor:
        ids = on_device(ids, extent, f"documents {name}")
        if ids.shape not in {(length,), (*extent.batch, length), (extent.flat_batch, length)}:
            raise ValueError(
                f"documents {name} must have shape {(length,)} or {(*extent.batch, length)}, but got {tuple(ids.shape)}"
            )
        return ids.reshape(-1, length)

    @property
    def static(self) -> bool:
        return False

    def spans(self, extent: Extent, positioned: bool) -> Spans:
        """From the first to the last key of each query's document; documents need not be contiguous."""
        order = torch.sort(self._key_ids(), dim=-1, stable=True)
        queries = self.query_ids.expand(order.values.shape[0], -1).contiguous()
        first = torch.searchsorted(order.values, queries)
        last = torch.searchsorted(order.values, queries, right=True) - 1
        found = last >= first
        low = order.indices.gather(1, first.clamp(max=extent.keys - 1)) if extent.keys else first
        high = order.indices.gather(1, last.clamp(min=0)) + 1 if extent.keys else first
        return Spans.run(low * found, high * found, extent, exact=False)

    def _drawn(self) -> tuple[int, int, int]:
        batch = self.query_ids.shape[0] if self.query_ids.dim() > 1 else 1
        return self.query_ids.shape[-1], self._key_ids().shape[-1], batch

    def __repr__(self) -> str:
        keys = "" if self.key_ids is None else f", {shown(self.key_ids)}"
        return f"documents({shown(self.query_ids)}{keys})"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Prefix(Mask):
    """The keys that stand before `length`; joined to causal it gives a prefix language model.

    >>> print((causal | prefix(2)).draw(4))
    ■ ■ · ·
    ■ ■ · ·
    ■ ■ ■ ·
    ■ ■ ■ ■
    """

    length: int

    def __post_init__(self) -> None:
        if not isinstance(self.length, int) or self.length < 0:
            raise ValueError(f"prefix takes a whole number >= 0, but got {self.length!r}")

    def visible(self, where: Where) -> Tensor:
        return where.key_position < self.length

    def spans(self, extent: Extent, positioned: bool) -> Spans:
        if positioned:
            return Spans.everything(extent)
        high = torch.full((extent.queries,), self.length)
        return Spans.run(torch.zeros_like(high), high, extent)

    def __repr__(self) -> str:
        return f"prefix({self.length})"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class FromFunction(Mask):
    """Any rule of your own: f(batch, head, query_position, key_position) -> bool, on index tensors."""

    function: Predicate

    def visible(self, where: Where) -> Tensor:
        seen = self.function(where.batch, where.head, where.query_position, where.key_position)
        if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
            got = f"a {seen.dtype} tensor" if isinstance(seen, Tensor) else type(seen).__name__
            raise TypeError(f"a from_function mask must return a bool tensor, but {self!r} returned {got}")
        return seen

    def __repr__(self) -> str:
        return f"from_function({getattr(self.function, '__name__', 'f')})"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Entries(Mask):
    """A bool tensor that broadcasts to the attention matrix."""

    entries: Tensor

    def visible(self, where: Where) -> Tensor:
        if self.entries.dim() != 4:
            return self.entries.broadcast_to(where.query.shape[-2], where.key.shape[-1])
        return where.pick(self.entries)

    def fit(self, extent: Extent) -> Mask:
        return Entries(four_dimensional(on_device(self.entries, extent, "mask"), extent, "mask"))

    def _drawn(self) -> tuple[int, int, int]:
        return (*(self.entries.shape[-2:] if self.entries.dim() > 1 else (1, self.entries.shape[-1])), 1)

    def __str__(self) -> str:
        rows, columns, _ = self._drawn()
        one = Entries(self.entries.reshape(-1, rows, columns)[0])
        return f"{self!r}, {rows} queries and {columns} keys\n{draw(one, rows, columns, 0, 0)}"

    def __repr__(self) -> str:
        return f"bool tensor {tuple(self.entries.shape)}"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Both(Mask):
    """Visible where both masks allow it."""

    left: Mask
    right: Mask

    def visible(self, where: Where) -> Tensor:
        return self.left.visible(where) & self.right.visible(where)

    def fit(self, extent: Extent) -> Mask:
        return Both(self.left.fit(extent), self.right.fit(extent))

    @property
    def static(self) -> bool:
        return self.left.static and self.right.static

    def spans(self, extent: Extent, positioned: bool) -> Spans:
        return self.left.spans(extent, positioned) & self.right.spans(extent, positioned)

    def _drawn(self) -> tuple[int, int, int]:
        return joined(self.left, self.right)

    def __repr__(self) -> str:
        return f"{bracketed(self.left, Either)} & {bracketed(self.right, Either)}"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Either(Mask):
    """Visible where at least one of the masks allows it."""

    left: Mask
    right: Mask

    def visible(self, where: Where) -> Tensor:
        return self.left.visible(where) | self.right.visible(where)

    def fit(self, extent: Extent) -> Mask:
        return Either(self.left.fit(extent), self.right.fit(extent))

    @property
    def static(self) -> bool:
        return self.left.static and self.right.static

    def spans(self, extent: Extent, positioned: bool) -> Spans:
        return self.left.spans(extent, positioned) | self.right.spans(extent, positioned)

    def _drawn(self) -> tuple[int, int, int]:
        return joined(self.left, self.right)

    def __repr__(self) -> str:
        return f"{bracketed(self.left, Both)} | {bracketed(self.right, Both)}"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Opposite(Mask):
    """Visible where the mask does not allow it."""

    mask: Mask

    def visible(self, where: Where) -> Tensor:
        return ~self.mask.visible(where)

    def fit(self, extent: Extent) -> Mask:
        return Opposite(self.mask.fit(extent))

    @property
    def static(self) -> bool:
        return self.mask.static

    def spans(self, extent: Extent, positioned: bool) -> Spans:
        return ~self.mask.spans(extent, positioned)

    def _drawn(self) -> tuple[int, int, int]:
        return self.mask._drawn()

    def __repr__(self) -> str:
        return f"~{bracketed(self.mask, Both, Either)}"


causal = Causal()


def window(left: int | None, right: int | None = 0) -> Mask:
    """Keys from p - left to p + right, both inclusive, around the query's position p; None is unlimited."""
    return Window(left, right)


def padding(lengths: Tensor | list[int], side: str = "right") -> Mask:
    """Only the first `lengths[b]` keys of sequence b are real, or the last ones with side="left"."""
    if side not in {"right", "left"}:
        raise ValueError(f"padding takes side='right' or side='left', but got {side!r}")
    return Padding(whole_numbers(lengths, "padding lengths"), side)


def documents(query_ids: Tensor | list[int], key_ids: Tensor | list[int] | None = None) -> Mask:
    """A query sees only keys with the same document id; ids are (T,) or (B, T).

    >>> print(documents([0, 0, 1, 1, 1]).draw(5))
    ■ ■ · · ·
    ■ ■ · · ·
    · · ■ ■ ■
    · · ■ ■ ■
    · · ■ ■ ■
    """
    keys = None if key_ids is None else whole_numbers(key_ids, "documents key_ids")
    return Documents(whole_numbers(query_ids, "documents query_ids"), keys)


def prefix(length: int) -> Mask:
    """The keys that stand before `length`; join it: `causal | prefix(n)`."""
    return Prefix(length)


def from_function(function: Predicate) -> Mask:
    """Any rule f(batch, head, query_position, key_position) -> bool, written on index tensors that broadcast.

    >>> print(from_function(lambda b, h, q, k: (q - k) % 2 == 0).draw(3))
    ■ · ■
    · ■ ·
    ■ · ■
    """
    if not callable(function):
        raise TypeError(f"from_function takes a function of four index tensors, but got {type(function).__name__}")
    return FromFunction(function)


def whole_numbers(values: Tensor | list[int], name: str) -> Tensor:
    tensor = torch.as_tensor(values)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} must be whole numbers, but got {tensor.dtype}")
    return tensor


def taken(ids: Tensor, batch: Tensor, index: Tensor) -> Tensor:
    """ids[batch, index], where ids may hold one row for the whole batch, or none of the batch dimension."""
    if ids.dim() == 1:
        return ids[index]
    return ids[torch.zeros_like(batch) if ids.shape[0] == 1 else batch, index]


def on_device(tensor: Tensor, extent: Extent, name: str) -> Tensor:
    if tensor.device != extent.device and tensor.device.type != "cpu":
        raise ValueError(f"{name} must be on {extent.device} like the queries, but it is on {tensor.device}")
    return tensor.to(extent.device)


def refuse_unless(condition: Tensor, message: Callable[[], str]) -> None:
    """Raises on a CPU; asserts without a sync on a GPU and while compiling."""
    if torch.compiler.is_compiling():
        torch._assert_async(condition.all(), "a value of this call is out of range")
    elif condition.device.type == "cpu":
        if not bool(condition.all()):
            raise ValueError(message())
    else:
        torch._assert_async(condition.all())


def four_dimensional(tensor: Tensor, extent: Extent, name: str) -> Tensor:
    """A tensor that broadcasts to the attention matrix, as (B or 1, H or 1, Tq or 1, Tk or 1)."""
    full = extent.full
    if tensor.dim() > len(full) or any(
        n not in {1, m} for n, m in zip(reversed(tensor.shape), reversed(full), strict=False)
    ):
        raise ValueError(f"{name} must broadcast to {full}, but got shape {tuple(tensor.shape)}")
    tensor = tensor.reshape((1,) * (len(full) - tensor.dim()) + tuple(tensor.shape))
    if extent.heads is None:
        tensor = tensor.unsqueeze(-3)
    batch, rest = tensor.shape[:-3], tensor.shape[-3:]
    if all(n == 1 for n in batch):
        return tensor.reshape(1, *rest)
    return tensor.expand(*extent.batch, *rest).reshape(-1, *rest)


def joined(left: Mask, right: Mask) -> tuple[int, int, int]:
    """The sizes of a drawing that shows both masks; one with tensors decides."""
    sizes = [mask._drawn() for mask in (left, right) if not mask.static or isinstance(mask, Entries)]
    return max(sizes, default=(6, 6, 1))


def bracketed(mask: Mask, *kinds: type[Mask]) -> str:
    return f"({mask!r})" if isinstance(mask, kinds) else repr(mask)


def shown(tensor: Tensor) -> str:
    return repr(tensor.tolist()) if tensor.numel() <= 12 else f"{tensor.dtype} tensor {tuple(tensor.shape)}"

"""`Cache`: the keys and values of earlier tokens, so that each step of a generation computes only new ones.

Shapes: B batch, G key/value heads, T new tokens, D width of a key, E width of a value; (..., T, D) in general.

The token at position p is in slot p % slots of the buffers, which is slot p until the first one is overwritten. In a
full ring buffer the slots are rotated, and `positions` returns the position of each.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Changes(NamedTuple):
    """Counters of everything but appending; while they are unchanged, no kept token was moved or removed."""

    evicted: int = 0  # tokens overwritten because they had left the window
    cropped: int = 0  # tokens dropped by crop
    reordered: int = 0  # calls of reorder
    resets: int = 0  # calls of reset


class Cache:
    """The keys and values of one attention layer, and their positions.

    >>> cache = foci.Cache()
    >>> with torch.no_grad():
    ...     for count in (5, 1, 1):                              # a prompt of five tokens, then one at a time
    ...         new = cache.next_positions(count)                      # positions of the new tokens
    ...         q, k, v = torch.randn(3, 2, 8, count, 64)
    ...         q, k = foci.rotary(q, new), foci.rotary(k, new)
    ...         keys, values = cache.append(k, v)                # all kept tokens: views, not copies
    ...         out = foci.attention(q, keys, values, mask=foci.causal, positions=cache.positions(count))
    >>> cache
    Cache(7 tokens in 64 slots, keys (2, 8, *, 64), values (2, 8, *, 64), torch.float32 on cpu, 512.0 KiB)

    A layer that attends to the `left` tokens before each query needs `left + 1` keys:

    >>> cache = foci.Cache(window=1024)
    >>> mask = foci.causal & foci.window(1023)

    Such a cache is a ring buffer: a new token takes the slot of the oldest one, so pass both mask and positions.

    Args:
        capacity: number of slots to allocate at once; appending more tokens raises. None lets the cache grow.
        window: number of newest tokens that are needed, and kept. With a window, `capacity` (by default the window)
            is the size of the ring buffer: each extra slot lets a step append one more token without a copy, and
            `crop` drop one more token.
    """

    def __init__(self, *, capacity: int | None = None, window: int | None = None) -> None:
        for name, size in (("capacity", capacity), ("window", window)):
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ValueError(f"{name} must be an int >= 1 or None, got {size!r}")
        if capacity is not None and window is not None and capacity < window:
            raise ValueError(f"capacity must be >= window = {window}, got {capacity}")
        self._capacity = capacity
        self._window = window
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._length = 0
        # The end of the positions in the slots. Cropping does not change it: until their slots are overwritten, cropped
        # tokens keep their old positions, which come after every query, so that `causal` masks them.
        self._written = 0
        # The first position of the keys that the last append returned, if they are a copy and not the slots.
        self._copy_start: int | None = None
        self._changes = Changes()

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds T tokens and returns the keys and values that their queries need, in order until a ring buffer is full.

        The result is a view of the buffers. Only if T tokens would overwrite keys that the first of their queries still
        needs (a long prompt and a short window) are old and new ones concatenated into new tensors for this call.
        In a full ring buffer later appends overwrite the oldest tokens: use the result before the next append.

        Args:
            keys: (..., T, D). Everything but T is fixed by the first append.
            values: (..., T, E).
        """
        self._check(keys, values)
        buffers = self._reserve(keys, values)
        start, count = self._length, keys.shape[-2]
        concatenated = self._concatenate(keys.detach(), values.detach()) if self._overwrites_needed(count) else None
        for buffer, new in zip(buffers, (keys, values), strict=True):
            self._write(buffer, new)
        oldest = self._oldest
        self._length = start + count
        self._written = max(self._written, self._length)
        self._changes = self._changes._replace(evicted=self._changes.evicted + self._oldest - oldest)
        self._copy_start = None if concatenated is None else self._length - concatenated[0].shape[-2]
        return self._visible() if concatenated is None else concatenated

    def positions(self, count: int) -> tuple[Tensor, Tensor] | None:
        """Positions of the newest `count` tokens and of the keys of the last append: attention's `positions=`.

        None while these are attention's defaults (key j at position j), so that the call keeps its fastest path.
        """
        if not 0 <= count <= self._length:
            raise ValueError(f"count must be from 0 to {self._length}, got {count}")
        in_order = not self._is_rotated if self._copy_start is None else self._copy_start == 0
        if self._buffers is None or in_order:
            return None
        device = self._buffers[0].device
        queries = torch.arange(self._length - count, self._length, device=device)
        if self._copy_start is not None:
            return queries, torch.arange(self._copy_start, self._length, device=device)
        slots, last = torch.arange(self._slots, device=device), self._written - 1
        return queries, last - (last - slots) % self._slots

    def next_positions(self, count: int, *, device: torch.device | str | None = None) -> Tensor:
        """Positions of the next `count` tokens, (count,): for `rotary`, before they are appended.

        Args:
            device: None means the device of the cache, and before the first append PyTorch's default.
        """
        if device is None and self._buffers is not None:
            device = self._buffers[0].device
        return torch.arange(self._length, self._length + count, device=device)

    def crop(self, length: int) -> None:
        """Drops the newest tokens until `length` are left, counted from the first ever (speculative decoding)."""
        if not 0 <= length <= self._length:
            raise ValueError(f"length must be from 0 to {self._length}, got {length}")
        if self._oldest > self._first_needed(length):
            needed = self._oldest + (self._window or 1) - 1
            raise ValueError(
                f"length must be >= {needed}, because older tokens of the window were overwritten, got {length};"
                " use reset() to start over, or a larger capacity to crop further back"
            )
        if length < self._length:
            self._changes = self._changes._replace(cropped=self._changes.cropped + self._length - length)
            self._length = length
            self._copy_start = None

    def reorder(self, index: Tensor) -> None:
        """Replaces row i of the batch by row index[i] (beam search); index may be longer or shorter than the batch.

        Args:
            index: int tensor (rows,) on the device of the cache. Views returned earlier keep the old order.
        """
        if self._buffers is None:
            return
        self._check_index(index)
        keys, values = self._visible()
        self._buffers = (_select(keys, index, self._slots), _select(values, index, self._slots))
        self._changes = self._changes._replace(reordered=self._changes.reordered + 1)
        self._copy_start = None

    def reset(self) -> None:
        """Drops all tokens and frees the buffers; the next append may have any shape (`crop(0)` keeps both)."""
        self._buffers = None
        self._length = self._written = 0
        self._copy_start = None
        self._changes = self._changes._replace(resets=self._changes.resets + 1)

    @property
    def keys(self) -> Tensor | None:
        """A view of the keys, in the order of the slots; None before the first append."""
        return None if self._buffers is None else self._visible()[0]

    @property
    def values(self) -> Tensor | None:
        """A view of the values, in the order of the slots; None before the first append."""
        return None if self._buffers is None else self._visible()[1]

    @property
    def length(self) -> int:
        """The number of tokens appended and not cropped, which is the position of the next one."""
        return self._length

    @property
    def changes(self) -> Changes:
        """Counters of the operations that moved or removed kept tokens."""
        return self._changes

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, empty slots included."""
        return sum(buffer.nbytes for buffer in self._buffers or ())

    def __len__(self) -> int:
        """The number of tokens kept; less than `length` once some have left the window."""
        return self._length - self._oldest

    def __bool__(self) -> bool:
        """Always True, so that `if cache:` tests for None and not for an empty cache."""
        return True

    def __repr__(self) -> str:
        if self._buffers is None:
            return f"Cache(empty, capacity={self._capacity}, window={self._window})"
        keys, values = self._buffers
        return (
            f"Cache({len(self)} tokens in {self._slots} slots, keys {_shape(keys)}, values {_shape(values)}, "
            f"{keys.dtype} on {keys.device}, {self.nbytes / 1024:,.1f} KiB)"
        )

    @property
    def _slots(self) -> int:
        return 0 if self._buffers is None else self._buffers[0].shape[-2]

    @property
    def _is_rotated(self) -> bool:
        """Whether the ring buffer has wrapped: every slot is in use and slot s no longer holds position s."""
        return self._written > self._slots

    @property
    def _oldest(self) -> int:
        return max(0, self._written - self._slots)

    def _first_needed(self, query: int) -> int:
        """The first position that a query at this position attends to."""
        return 0 if self._window is None else max(0, query - self._window + 1)

    def _overwrites_needed(self, count: int) -> bool:
        return count > 0 and self._length + count - self._slots > self._first_needed(self._length)

    def _visible(self) -> tuple[Tensor, Tensor]:
        assert self._buffers is not None
        used = self._slots if self._is_rotated else self._length
        return self._buffers[0].narrow(-2, 0, used), self._buffers[1].narrow(-2, 0, used)

    def _concatenate(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Concatenates the old tokens that the first new query needs, in order, with the new ones."""
        assert self._buffers is not None
        first = self._first_needed(self._length)
        if first == self._length:
            return keys, values
        ranges = _slot_ranges(first, self._length - first, self._slots)
        old = [[buffer.narrow(-2, slot, size) for slot, size in ranges] for buffer in self._buffers]
        return torch.cat([*old[0], keys], dim=-2), torch.cat([*old[1], values], dim=-2)

    def _write(self, buffer: Tensor, new: Tensor) -> None:
        """Writes new tokens to the slots of their positions; of more tokens than slots the last ones are kept."""
        kept = min(new.shape[-2], self._slots)
        skipped = new.shape[-2] - kept
        start, new = self._length + skipped, new.narrow(-2, skipped, kept)
        # Slots that are in no view yet: earlier views do not change, so their version must not change either.
        fresh = start >= self._written and start + kept <= self._slots
        target, done = (buffer.data if fresh else buffer), 0
        for slot, size in _slot_ranges(start, kept, self._slots):
            target.narrow(-2, slot, size).copy_(new.narrow(-2, done, size))
            done += size

    def _reserve(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers, grown to hold the new tokens; a ring buffer never grows."""
        needed, fixed = self._length + keys.shape[-2], self._capacity or self._window
        if self._window is None and self._capacity is not None and needed > self._capacity:
            raise ValueError(
                f"the cache must hold at most capacity = {self._capacity} tokens, "
                f"got {keys.shape[-2]} more after {self._length}"
            )
        if self._buffers is None:
            slots = fixed or _round_up(needed)
            self._buffers = (_allocate(keys, keys.shape[:-2], slots), _allocate(values, values.shape[:-2], slots))
        elif fixed is None and needed > self._slots:
            # Grow by half: each token is copied about twice in total, and at most a third of the slots is empty.
            slots = _round_up(max(needed, self._slots * 3 // 2))
            old_keys, old_values = self._visible()
            self._buffers = (_enlarge(old_keys, slots), _enlarge(old_values, slots))
            self._written = self._length
        return self._buffers

    def _check(self, keys: Tensor, values: Tensor) -> None:
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise RuntimeError(
                "keys and values must not require grad, because Cache.append writes in place: "
                "call it under torch.no_grad() or torch.inference_mode()"
            )
        if keys.dim() < 2 or values.dim() < 2:
            received = f"{tuple(keys.shape)} and {tuple(values.shape)}"
            raise ValueError(f"keys must be (..., T, D) and values (..., T, E), got {received}")
        if (keys.shape[:-1], keys.dtype, keys.device) != (values.shape[:-1], values.dtype, values.device):
            expected = f"({', '.join(str(size) for size in keys.shape[:-1])}, any width) of {keys.dtype}"
            received = f"{tuple(values.shape)} of {values.dtype} on {values.device}"
            raise ValueError(f"values must be {expected} on {keys.device} like the keys, got {received}")
        for name, new, buffer in zip(("keys", "values"), (keys, values), self._buffers or (), strict=False):
            _check_like(name, new, buffer)

    def _check_index(self, index: Tensor) -> None:
        assert self._buffers is not None
        buffer = self._buffers[0]
        if buffer.dim() < 3:
            raise ValueError(
                f"the cache must hold keys with a batch (B, ..., T, D) to be reordered, got {_shape(buffer)}"
            )
        if index.dim() != 1 or index.dtype not in (torch.int32, torch.int64) or index.device != buffer.device:
            raise ValueError(
                f"index must be an int32 or int64 tensor (rows,) on {buffer.device}, "
                f"got {tuple(index.shape)} of {index.dtype} on {index.device}"
            )
        # On other devices reading the values would cause a sync, and index_select asserts them there.
        if index.device.type == "cpu" and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < len(buffer):
            raise IndexError(f"index must be from 0 to {len(buffer) - 1}, got {index.tolist()}")


def _slot_ranges(start: int, count: int, slots: int) -> list[tuple[int, int]]:
    """The slots of `count` positions from `start` on, as (first slot, size) ranges: one, or two if the ring wraps."""
    first = start % slots
    size = min(count, slots - first)
    return [(first, size)] if size == count else [(first, size), (0, count - size)]


def _round_up(count: int) -> int:
    """The next multiple of 64, so that a prompt leaves free slots for the first new tokens."""
    return (count // 64 + 1) * 64


def _allocate(like: Tensor, leading: tuple[int, ...], slots: int) -> Tensor:
    """An empty buffer (*leading, slots, D)."""
    shape = (*leading, slots, like.shape[-1])
    # A tensor made in inference mode cannot be written outside it and has no version counter.
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=like.dtype, device=like.device)


def _enlarge(kept: Tensor, slots: int) -> Tensor:
    buffer = _allocate(kept, kept.shape[:-2], slots)
    buffer.narrow(-2, 0, kept.shape[-2]).copy_(kept)
    return buffer


def _select(kept: Tensor, index: Tensor, slots: int) -> Tensor:
    buffer = _allocate(kept, (len(index), *kept.shape[1:-2]), slots)
    torch.index_select(kept, 0, index, out=buffer.narrow(-2, 0, kept.shape[-2]))
    return buffer


def _shape(buffer: Tensor) -> str:
    return f"({', '.join([*map(str, buffer.shape[:-2]), '*', str(buffer.shape[-1])])})"


def _check_like(name: str, new: Tensor, buffer: Tensor) -> None:
    received = (new.shape[:-2], new.shape[-1], new.dtype, new.device)
    if received != (buffer.shape[:-2], buffer.shape[-1], buffer.dtype, buffer.device):
        raise ValueError(
            f"{name} must be {_shape(buffer)} of {buffer.dtype} on {buffer.device}, as in the first append, "
            f"got {tuple(new.shape)} of {new.dtype} on {new.device}"
        )

"""Keys and values that are kept while a model generates, so that each step computes only what is new.

Shapes: B batch, G key heads, T new tokens, D width of a key, E width of a value; (..., T, D) in general.

A token that stands at position p lies in slot p % slots of the buffers. While nothing was overwritten that is simply
slot p. In a full ring the slots are rotated, and `positions` says where each of them stands.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Changes(NamedTuple):
    """What happened to a cache besides appending; while two of these are equal, all that was kept is still there."""

    evicted: int = 0  # tokens overwritten because they had left the window
    cropped: int = 0  # tokens dropped by crop
    reordered: int = 0  # calls of reorder
    resets: int = 0  # calls of reset


class Cache:
    """The keys and values of one attention layer, and where they stand.

    >>> cache = foci.Cache()
    >>> with torch.no_grad():
    ...     for count in (5, 1, 1):                              # a prompt of five tokens, then one at a time
    ...         place = cache.upcoming(count)                    # where the new tokens will stand
    ...         q, k, v = torch.randn(3, 2, 8, count, 64)
    ...         q, k = foci.rotary(q, place), foci.rotary(k, place)
    ...         keys, values = cache.append(k, v)                # all that is kept: views, not copies
    ...         out = foci.attention(q, keys, values, mask=foci.causal, positions=cache.positions(count))
    >>> cache
    Cache(7 tokens in 64 slots, keys (2, 8, *, 64), values (2, 8, *, 64), torch.float32 on cpu, 512.0 KiB)

    A layer that looks back `left` tokens needs `left + 1` keys, its own among them:

    >>> cache = foci.Cache(window=1024)
    >>> mask = foci.causal & foci.window(1023)

    Such a cache is a ring: a new token takes the slot of the oldest one, so pass both the mask and the positions.

    capacity: slots to set aside at once. The cache is then refused more tokens than that; None lets it grow.
    window: how many of the newest tokens are needed, and kept. With a window, `capacity` (by default the window itself)
        is the size of the ring: each slot more lets a step append one token more without a copy, and lets `crop`
        take one token more back.
    """

    def __init__(self, *, capacity: int | None = None, window: int | None = None) -> None:
        for name, size in (("capacity", capacity), ("window", window)):
            if size is not None and size < 1:
                raise ValueError(f"Cache expected {name} >= 1 or None, but got {size}")
        if capacity is not None and window is not None and capacity < window:
            raise ValueError(f"Cache expected capacity >= window = {window}, but got {capacity}")
        self._capacity = capacity
        self._window = window
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._length = 0
        # The end of what the slots hold. It stays where it is when the newest tokens are cropped: until their slots are
        # written again they keep their old positions, which lie ahead of every query, so that `causal` hides them.
        self._written = 0
        # Where the keys of the last append begin, if they were joined for that call and are not those in the slots.
        self._joined_from: int | None = None
        self._changes = Changes()

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds T tokens and returns the keys and values that their queries need, oldest first until a ring is full.

        The result is a view of the buffers. Only where T tokens would overwrite what the first of their queries still
        needs (a long prompt and a short window) are old and new ones joined into new tensors, for this call alone.
        Later appends write elsewhere or, in a full ring, over the oldest: use the result before the next append.

        keys: (..., T, D). values: (..., T, E). Everything but T is fixed by the first append.
        """
        self._check(keys, values)
        buffers = self._reserve(keys, values)
        start, count = self._length, keys.shape[-2]
        joined = self._join(keys.detach(), values.detach()) if self._overwrites_needed(count) else None
        for buffer, new in zip(buffers, (keys, values), strict=True):
            self._write(buffer, new)
        oldest = self._oldest
        self._length = start + count
        self._written = max(self._written, self._length)
        self._changes = self._changes._replace(evicted=self._changes.evicted + self._oldest - oldest)
        self._joined_from = None if joined is None else self._length - joined[0].shape[-2]
        return self._visible() if joined is None else joined

    def positions(self, count: int) -> tuple[Tensor, Tensor] | None:
        """Where the newest `count` tokens and the keys of the last append stand: attention's `positions=`.

        None while attention's own rule says the same (key j stands at j), so that the call keeps its fastest path.
        """
        if not 0 <= count <= self._length:
            raise ValueError(f"Cache.positions expected a count from 0 to {self._length}, but got {count}")
        in_order = not self._rotated if self._joined_from is None else self._joined_from == 0
        if self._buffers is None or in_order:
            return None
        device = self._buffers[0].device
        queries = torch.arange(self._length - count, self._length, device=device)
        if self._joined_from is not None:
            return queries, torch.arange(self._joined_from, self._length, device=device)
        slots, last = torch.arange(self._slots, device=device), self._written - 1
        return queries, last - (last - slots) % self._slots

    def upcoming(self, count: int, *, device: torch.device | str | None = None) -> Tensor:
        """Where the next `count` tokens will stand, (count,): for `rotary`, before they are appended.

        device: None means the cache's, and before the first append PyTorch's default.
        """
        if device is None and self._buffers is not None:
            device = self._buffers[0].device
        return torch.arange(self._length, self._length + count, device=device)

    def crop(self, length: int) -> None:
        """Drops the newest tokens until `length` are left, counted from the first ever seen (speculative decoding)."""
        if not 0 <= length <= self._length:
            raise ValueError(f"Cache.crop expected a length from 0 to {self._length}, but got {length}")
        if self._oldest > self._first_needed(length):
            needed = self._oldest + (self._window or 1) - 1
            raise ValueError(
                f"Cache.crop expected a length >= {needed}, because older tokens were overwritten and the window would "
                f"have a hole, but got {length}; reset() starts anew, a larger capacity lets crop go back further"
            )
        if length < self._length:
            self._changes = self._changes._replace(cropped=self._changes.cropped + self._length - length)
            self._length = length
            self._joined_from = None

    def reorder(self, index: Tensor) -> None:
        """Makes row i of the batch what row index[i] was (beam search); index may be longer or shorter than the batch.

        index: int tensor (rows,) on the cache's device. Views handed out before keep the old order.
        """
        if self._buffers is None:
            return
        self._check_index(index)
        keys, values = self._visible()
        self._buffers = (_select(keys, index, self._slots), _select(values, index, self._slots))
        self._changes = self._changes._replace(reordered=self._changes.reordered + 1)
        self._joined_from = None

    def reset(self) -> None:
        """Forgets everything and frees its memory; any shape may follow (`crop(0)` keeps both)."""
        self._buffers = None
        self._length = self._written = 0
        self._joined_from = None
        self._changes = self._changes._replace(resets=self._changes.resets + 1)

    @property
    def keys(self) -> Tensor | None:
        """A view of the keys in the slots, in the order of the slots; None before the first append."""
        return None if self._buffers is None else self._visible()[0]

    @property
    def values(self) -> Tensor | None:
        """A view of the values in the slots, in the order of the slots; None before the first append."""
        return None if self._buffers is None else self._visible()[1]

    @property
    def length(self) -> int:
        """The tokens seen and not cropped, which is also where the next one will stand."""
        return self._length

    @property
    def changes(self) -> Changes:
        """Counters of everything that moved or removed kept tokens."""
        return self._changes

    @property
    def nbytes(self) -> int:
        """The memory of the buffers, empty slots included."""
        return sum(buffer.nbytes for buffer in self._buffers or ())

    def __len__(self) -> int:
        """The tokens that are kept; less than `length` once some have left the window."""
        return self._length - self._oldest

    def __bool__(self) -> bool:
        """True: an empty cache is a cache, and `if cache:` asks whether there is one."""
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
    def _rotated(self) -> bool:
        """Whether the ring has gone round: then every slot is in use and slot s no longer holds position s."""
        return self._written > self._slots

    @property
    def _oldest(self) -> int:
        return max(0, self._written - self._slots)

    def _first_needed(self, query: int) -> int:
        """The first position that a query at this position may look at."""
        return 0 if self._window is None else max(0, query - self._window + 1)

    def _overwrites_needed(self, count: int) -> bool:
        return count > 0 and self._length + count - self._slots > self._first_needed(self._length)

    def _visible(self) -> tuple[Tensor, Tensor]:
        assert self._buffers is not None
        used = self._slots if self._rotated else self._length
        return self._buffers[0].narrow(-2, 0, used), self._buffers[1].narrow(-2, 0, used)

    def _join(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Old tokens that the first new query needs, in order, then the new ones."""
        assert self._buffers is not None
        first = self._first_needed(self._length)
        if first == self._length:
            return keys, values
        runs = _runs(first, self._length - first, self._slots)
        old = [[buffer.narrow(-2, slot, size) for slot, size in runs] for buffer in self._buffers]
        return torch.cat([*old[0], keys], dim=-2), torch.cat([*old[1], values], dim=-2)

    def _write(self, buffer: Tensor, new: Tensor) -> None:
        """Puts new tokens into the slots of their positions; of more tokens than slots the last ones stay."""
        kept = min(new.shape[-2], self._slots)
        skipped = new.shape[-2] - kept
        start, new = self._length + skipped, new.narrow(-2, skipped, kept)
        # Slots that no view has shown yet: views handed out before do not change, so neither does their version.
        fresh = start >= self._written and start + kept <= self._slots
        target, done = (buffer.data if fresh else buffer), 0
        for slot, size in _runs(start, kept, self._slots):
            target.narrow(-2, slot, size).copy_(new.narrow(-2, done, size))
            done += size

    def _reserve(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers, with room for what comes; a ring always has room."""
        needed, fixed = self._length + keys.shape[-2], self._capacity or self._window
        if self._window is None and self._capacity is not None and needed > self._capacity:
            raise ValueError(
                f"Cache.append expected at most capacity = {self._capacity} tokens, "
                f"but got {keys.shape[-2]} after {self._length}"
            )
        if self._buffers is None:
            slots = fixed or _rounded(needed)
            self._buffers = (_allocate(keys, keys.shape[:-2], slots), _allocate(values, values.shape[:-2], slots))
        elif fixed is None and needed > self._slots:
            # Half as much again: each token is copied about twice in all, and at most a third of the slots is empty.
            slots = _rounded(max(needed, self._slots * 3 // 2))
            old_keys, old_values = self._visible()
            self._buffers = (_enlarge(old_keys, slots), _enlarge(old_values, slots))
            self._written = self._length
        return self._buffers

    def _check(self, keys: Tensor, values: Tensor) -> None:
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise RuntimeError(
                "Cache.append expected keys and values without gradients, because it writes in place, but got "
                "tensors that require grad: call it under torch.no_grad() or torch.inference_mode()"
            )
        if keys.dim() < 2 or values.dim() < 2:
            received = f"{tuple(keys.shape)} and {tuple(values.shape)}"
            raise ValueError(f"Cache.append expected keys (..., T, D) and values (..., T, E), but got {received}")
        if (keys.shape[:-1], keys.dtype, keys.device) != (values.shape[:-1], values.dtype, values.device):
            expected = f"({', '.join(str(size) for size in keys.shape[:-1])}, any width) of {keys.dtype}"
            received = f"{tuple(values.shape)} of {values.dtype} on {values.device}"
            raise ValueError(
                f"Cache.append expected values {expected} on {keys.device}, as the keys, but got {received}"
            )
        for name, new, buffer in zip(("keys", "values"), (keys, values), self._buffers or (), strict=False):
            _check_like(name, new, buffer)

    def _check_index(self, index: Tensor) -> None:
        assert self._buffers is not None
        buffer = self._buffers[0]
        if buffer.dim() < 3:
            raise ValueError(f"Cache.reorder expected keys with a batch (B, ..., T, D), but got {_shape(buffer)}")
        if index.dim() != 1 or index.dtype not in (torch.int32, torch.int64) or index.device != buffer.device:
            raise ValueError(
                f"Cache.reorder expected an int32 or int64 index (rows,) on {buffer.device}, "
                f"but got {tuple(index.shape)} of {index.dtype} on {index.device}"
            )
        # Elsewhere than on the CPU, reading the values would wait for the device; index_select asserts them there.
        if index.device.type == "cpu" and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < len(buffer):
            raise IndexError(f"Cache.reorder expected rows from 0 to {len(buffer) - 1}, but got {index.tolist()}")


def _runs(start: int, count: int, slots: int) -> list[tuple[int, int]]:
    """The slots of `count` positions from `start` on, as (first slot, size): one run, or two where the ring wraps."""
    first = start % slots
    size = min(count, slots - first)
    return [(first, size)] if size == count else [(first, size), (0, count - size)]


def _rounded(count: int) -> int:
    """The next multiple of 64, so that a prompt leaves some room for its first answers."""
    return (count // 64 + 1) * 64


def _allocate(like: Tensor, leading: tuple[int, ...], slots: int) -> Tensor:
    """An empty buffer (*leading, slots, D)."""
    shape = (*leading, slots, like.shape[-1])
    # A tensor made in inference mode could not be written outside of it, and has no version that tells of changes.
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
            f"Cache.append expected {name} {_shape(buffer)} of {buffer.dtype} on {buffer.device}, as in the first "
            f"append, but got {tuple(new.shape)} of {new.dtype} on {new.device}"
        )

"""Key ranges and their operators `&`, `|`, `~`; each mask computes its own ranges in kinds.py.

Under most masks (causal, window, padding, documents, a prefix, and their combinations by `&` and `|`) a query attends
to one or two contiguous ranges of keys. A kernel that reads the two ends of a range needs no mask inside it and skips
everything outside.

Bm is 1 or the batch size, Tq the number of queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from foci.masks.tile import CallSizes


class KeySegment(NamedTuple):
    """Keys from start to stop; those from full_start to full_stop are visible to every query of the strip."""

    start: int
    stop: int
    full_start: int
    full_stop: int


@dataclass(frozen=True, slots=True)
class KeyRanges:
    """Ranges of keys, each a (low, high) pair of (Bm, Tq) tensors; low >= high is an empty range.

    Two ranges are disjoint and in order. Every visible key lies in a range; if `exact`, each key in a range is visible.
    """

    ranges: tuple[tuple[Tensor, Tensor], ...]
    keys: int
    exact: bool

    @classmethod
    def all_keys(cls, sizes: CallSizes) -> KeyRanges:
        low = torch.zeros((1, sizes.queries), dtype=torch.int64, device=sizes.device)
        return cls(((low, torch.full_like(low, sizes.keys)),), sizes.keys, exact=False)

    @classmethod
    def single(cls, low: Tensor, high: Tensor, sizes: CallSizes, exact: bool = True) -> KeyRanges:
        low, high = (torch.atleast_2d(ends.clamp(0, sizes.keys)) for ends in (low, high))
        return cls(((low, high),), sizes.keys, exact)

    def __and__(self, other: KeyRanges) -> KeyRanges:
        ranges = [
            (torch.maximum(*to_same_device(a, c)), torch.minimum(*to_same_device(b, d)))
            for a, b in self.ranges
            for c, d in other.ranges
        ]
        combined = KeyRanges(tuple(ranges), self.keys, self.exact and other.exact)
        return combined if len(ranges) <= 2 else combined.hull()

    def __or__(self, other: KeyRanges) -> KeyRanges:
        if len(self.ranges) + len(other.ranges) > 2:
            return KeyRanges((*self.ranges, *other.ranges), self.keys, exact=False).hull()
        (a, b), (c, d) = self.ranges[0], other.ranges[0]
        (a, c), (b, d) = to_same_device(a, c), to_same_device(b, d)
        a, b, c, d = torch.broadcast_tensors(a, b, c, d)
        # An empty range is moved onto the other one, so that it neither separates nor widens.
        a, b = torch.where(a < b, a, c), torch.where(a < b, b, c)
        c, d = torch.where(c < d, c, a), torch.where(c < d, d, a)
        apart = (b < c) | (d < a)
        low, high = torch.minimum(a, c), torch.maximum(b, d)
        first = (low, torch.where(apart, torch.minimum(b, d), high))
        second = (torch.where(apart, torch.maximum(a, c), high), high)
        return KeyRanges((first, second), self.keys, self.exact and other.exact)

    def __invert__(self) -> KeyRanges:
        if not self.exact or len(self.ranges) > 1:
            low = torch.zeros_like(self.ranges[0][0])
            return KeyRanges(((low, torch.full_like(low, self.keys)),), self.keys, exact=False)
        low, high = self.ranges[0]
        high = torch.maximum(low, high)
        return KeyRanges(((torch.zeros_like(low), low), (high, torch.full_like(low, self.keys))), self.keys, exact=True)

    def select_batches(self, batches: Tensor) -> KeyRanges:
        """The ranges of some of the sequences."""

        def select(ends: Tensor) -> Tensor:
            return ends if ends.shape[0] == 1 else ends[batches.to(ends.device)]

        return KeyRanges(tuple((select(low), select(high)) for low, high in self.ranges), self.keys, self.exact)

    def hull(self) -> KeyRanges:
        """One range per query that encloses all of its ranges."""
        lows = [torch.where(a < b, a, self.keys) for a, b in self.ranges]
        highs = [torch.where(a < b, b, 0) for a, b in self.ranges]
        low, high = lows[0], highs[0]
        for a, b in zip(lows[1:], highs[1:], strict=True):
            low, high = torch.minimum(*to_same_device(low, a)), torch.maximum(*to_same_device(high, b))
        return KeyRanges(((low, high),), self.keys, exact=False)

    def to_tensor(self, device: torch.device) -> Tensor:
        """(Bm, ranges, 2, Tq) int32, the layout that kernels read."""
        ranges = [torch.stack(torch.broadcast_tensors(*to_same_device(low, high)), dim=1) for low, high in self.ranges]
        return torch.stack(torch.broadcast_tensors(*ranges), dim=1).to(device=device, dtype=torch.int32).contiguous()

    def segments(self, rows: int) -> list[list[KeySegment]]:
        """For each strip of `rows` queries, the key ranges to visit."""
        strips = zip(*(self._strips(low, high, rows) for low, high in self.ranges), strict=True)
        return [
            merge_segments(sorted(segment for segment in strip if segment.start < segment.stop)) for strip in strips
        ]

    def _strips(self, low: Tensor, high: Tensor, rows: int) -> list[KeySegment]:
        low, high = torch.broadcast_tensors(*to_same_device(low, high))
        visible = low < high
        start = strip_min(torch.where(visible, low, self.keys), rows, self.keys)
        stop = -strip_min(torch.where(visible, -high, 0), rows, 0)
        if not self.exact:
            return [KeySegment(a, b, b, b) for a, b in zip(start.tolist(), stop.tolist(), strict=True)]
        inner = (-strip_min(-low, rows, 0)).maximum(start).minimum(stop)
        outer = strip_min(high, rows, self.keys).maximum(inner).minimum(stop)
        return [KeySegment(*ends) for ends in torch.stack([start, stop, inner, outer], dim=1).tolist()]


def strip_min(values: Tensor, rows: int, fill: int) -> Tensor:
    """The minimum over each strip of `rows` queries and over the batch: (strips,)."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % rows), value=fill)
    return padded.view(values.shape[0], -1, rows).amin(dim=(0, 2))


def to_same_device(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Moves the ends made of plain numbers, which are on the CPU, to the device of those made from a tensor."""
    if a.device == b.device:
        return a, b
    return (a.to(b.device), b) if a.device.type == "cpu" else (a, b.to(a.device))


def merge_segments(segments: list[KeySegment]) -> list[KeySegment]:
    """Merges overlapping segments; every key of a merged segment needs the mask."""
    merged: list[KeySegment] = []
    for segment in segments:
        if merged and segment.start < merged[-1].stop:
            stop = max(merged[-1].stop, segment.stop)
            merged[-1] = KeySegment(merged[-1].start, stop, stop, stop)
        else:
            merged.append(segment)
    return merged

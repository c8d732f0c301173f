"""What each query sees, as runs of keys: how a structured mask lets kernels skip what nobody sees.

Most masks that people use (causal, window, padding, documents, a prefix, and what `&` and `|` make of them) let a
query see one or two runs of neighbouring keys. A kernel that reads the two ends of a run needs no mask at all
inside it and skips everything outside.

Bm is 1 or the batch size, Tq the number of queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from foci.masks.tile import CallSizes


class Segment(NamedTuple):
    """Keys from start to stop; every query of the strip sees all keys from full_start to full_stop."""

    start: int
    stop: int
    full_start: int
    full_stop: int


@dataclass(frozen=True, slots=True)
class KeyRanges:
    """Runs of keys, each a (low, high) pair of (Bm, Tq) tensors; low >= high is an empty run.

    Two runs are disjoint and in order. Where not `exact`, a query sees nothing outside but maybe not all inside.
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
        runs = [
            (torch.maximum(*to_same_device(a, c)), torch.minimum(*to_same_device(b, d)))
            for a, b in self.ranges
            for c, d in other.ranges
        ]
        spans = KeyRanges(tuple(runs), self.keys, self.exact and other.exact)
        return spans if len(runs) <= 2 else spans.hull()

    def __or__(self, other: KeyRanges) -> KeyRanges:
        if len(self.ranges) + len(other.ranges) > 2:
            return KeyRanges((*self.ranges, *other.ranges), self.keys, exact=False).hull()
        (a, b), (c, d) = self.ranges[0], other.ranges[0]
        (a, c), (b, d) = to_same_device(a, c), to_same_device(b, d)
        a, b, c, d = torch.broadcast_tensors(a, b, c, d)
        # An empty run is moved onto the other one, so that it neither separates nor widens.
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
        """The spans of some of the sequences."""

        def chosen(ends: Tensor) -> Tensor:
            return ends if ends.shape[0] == 1 else ends[batches.to(ends.device)]

        return KeyRanges(tuple((chosen(low), chosen(high)) for low, high in self.ranges), self.keys, self.exact)

    def hull(self) -> KeyRanges:
        """One run per query that holds all of its runs."""
        lows = [torch.where(a < b, a, self.keys) for a, b in self.ranges]
        highs = [torch.where(a < b, b, 0) for a, b in self.ranges]
        low, high = lows[0], highs[0]
        for a, b in zip(lows[1:], highs[1:], strict=True):
            low, high = torch.minimum(*to_same_device(low, a)), torch.maximum(*to_same_device(high, b))
        return KeyRanges(((low, high),), self.keys, exact=False)

    def to_tensor(self, device: torch.device) -> Tensor:
        """(Bm, runs, 2, Tq) int32: the form that kernels read."""
        runs = [torch.stack(torch.broadcast_tensors(*to_same_device(low, high)), dim=1) for low, high in self.ranges]
        return torch.stack(torch.broadcast_tensors(*runs), dim=1).to(device=device, dtype=torch.int32).contiguous()

    def segments(self, rows: int) -> list[list[Segment]]:
        """For each strip of `rows` queries, the runs of keys to visit."""
        strips = zip(*(self._strips(low, high, rows) for low, high in self.ranges), strict=True)
        return [
            merge_segments(sorted(segment for segment in strip if segment.start < segment.stop)) for strip in strips
        ]

    def _strips(self, low: Tensor, high: Tensor, rows: int) -> list[Segment]:
        low, high = torch.broadcast_tensors(*to_same_device(low, high))
        seen = low < high
        start = strip_min(torch.where(seen, low, self.keys), rows, self.keys)
        stop = -strip_min(torch.where(seen, -high, 0), rows, 0)
        if not self.exact:
            return [Segment(a, b, b, b) for a, b in zip(start.tolist(), stop.tolist(), strict=True)]
        inner = (-strip_min(-low, rows, 0)).maximum(start).minimum(stop)
        outer = strip_min(high, rows, self.keys).maximum(inner).minimum(stop)
        return [Segment(*ends) for ends in torch.stack([start, stop, inner, outer], dim=1).tolist()]


def strip_min(values: Tensor, rows: int, fill: int) -> Tensor:
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % rows), value=fill)
    return padded.view(values.shape[0], -1, rows).amin(dim=(0, 2))


def to_same_device(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Where the ends shall be read, those of plain numbers are on the CPU until they meet those of a tensor."""
    if a.device == b.device:
        return a, b
    return (a.to(b.device), b) if a.device.type == "cpu" else (a, b.to(a.device))


def merge_segments(segments: list[Segment]) -> list[Segment]:
    """Overlapping runs joined into one, all of which then needs the mask."""
    joined: list[Segment] = []
    for segment in segments:
        if joined and segment.start < joined[-1].stop:
            stop = max(joined[-1].stop, segment.stop)
            joined[-1] = Segment(joined[-1].start, stop, stop, stop)
        else:
            joined.append(segment)
    return joined

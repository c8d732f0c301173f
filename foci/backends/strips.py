"""A call cut into strips: some rows of the matrix, for a few heads at a time, over the keys that these rows can see.

A strip is small enough to stay in cache. The functions here split a call into parts of a few (sequence, head) pairs,
split a part into strips, and compute the logits of a strip.

B batch, H heads, R rows of the strip, C keys that the strip sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from foci.arguments import Call
from foci.backends import reference
from foci.backends.additive_cpu import with_fast_additive
from foci.masks.range_algebra import KeyRanges, KeySegment
from foci.runtime.tracing import is_capturing_cuda_graph, is_traced

# The sequences and heads of a part.
PartIndex = tuple[slice, slice]
CPU = torch.device("cpu")

# Entries of a strip: as many as fit a core's cache, and as many as keep a GPU busy.
MAX_CPU_STRIP_ENTRIES = 2**19
MAX_GPU_STRIP_ENTRIES = 2**26


@dataclass(frozen=True, slots=True)
class Strip:
    """Some rows, and the ranges of keys that they see."""

    rows: slice
    segments: tuple[KeySegment, ...]

    @property
    def width(self) -> int:
        return sum(segment.stop - segment.start for segment in self.segments)


def split_into_parts(call: Call, whole: bool = False) -> Iterator[tuple[PartIndex, Call]]:
    """Splits the call into parts of a few (sequence, head) pairs, in the order of the flattened (B, H).

    `whole` keeps all heads of a sequence together.
    """
    batch, heads = call.q.shape[:2]
    pairs = pairs_per_part(call)
    if pairs >= batch * heads:
        yield (slice(0, batch), slice(0, heads)), call
        return
    batches, head_step = max(pairs // max(heads, 1), 1), heads if whole else min(pairs, heads)
    for b in range(0, batch, batches):
        for h in range(0, heads, head_step):
            index = slice(b, min(b + batches, batch)), slice(h, min(h + head_step, heads))
            yield index, call.select(*index)


def pairs_per_part(call: Call) -> int:
    """Enough pairs for the cores, more where the matrices are small; always whole groups of heads that share keys."""
    entries, cores = strip_budget(call)
    pairs = max(cores, entries // max(call.q.shape[2] * call.k.shape[2], 1))
    heads = max(call.q.shape[1], 1)
    if pairs >= heads:
        return pairs // heads * heads
    pairs = max(pairs // call.group, 1) * call.group
    return next(n for n in range(pairs, heads + 1) if heads % n == 0 and n % call.group == 0)


def strip_budget(call: Call) -> tuple[int, int]:
    if call.q.device.type == "cpu":
        return MAX_CPU_STRIP_ENTRIES * thread_count(), thread_count()
    return MAX_GPU_STRIP_ENTRIES, call.q.shape[0] * call.q.shape[1]


def thread_count() -> int:
    """A constant to torch.compile, which cannot trace torch.get_num_threads."""
    return torch.get_num_threads()


# As torch.compiler.assume_constant_result does, but importing that loads the compiler, which takes two seconds.
thread_count._dynamo_marked_constant = True  # type: ignore[attr-defined]


def split_into_strips(call: Call) -> Iterator[Strip]:
    """Yields the strips of a part from the first row to the last."""
    queries, keys = call.q.shape[2], call.k.shape[2]
    entries, _ = strip_budget(call)
    rows = min(max(entries // max(call.q.shape[0] * call.q.shape[1] * keys, 1), 1), max(queries, 1))
    segments = visible_segments(call, rows)
    for index, start in enumerate(range(0, queries, rows)):
        yield Strip(slice(start, min(start + rows, queries)), tuple(segments[index]))


def visible_segments(call: Call, rows: int) -> list[list[KeySegment]]:
    """Key segments of each strip.

    Without a mask: all keys, fully visible. While tracing, and while a CUDA graph is captured and the mask has tensors:
    all keys, masked entry by entry.
    """
    queries, keys = call.q.shape[2], call.k.shape[2]
    strips = -(-queries // rows)
    if call.mask is None:
        return [[KeySegment(0, keys, 0, keys)]] * strips
    if is_traced(call.q) or (is_capturing_cuda_graph(call.q) and not call.mask.is_static):
        return [[KeySegment(0, keys, keys, keys)]] * strips
    return visible_ranges(call).segments(rows)


def visible_ranges(call: Call) -> KeyRanges:
    """The key ranges of the call's own sequences, on the CPU if the mask is numeric, because Python reads them."""
    assert call.mask is not None
    ranges = call.mask.key_ranges(call.sizes._replace(device=CPU), call.positions is not None)
    return ranges if call.batch_ids is None else ranges.select_batches(call.batch_ids)


def strip_logits(call: Call, strip: Strip, fill: float = -torch.inf) -> Tensor:
    """The strip's logits over its segments, concatenated; the mask is evaluated only at the edges of the segments."""
    q = slice_tokens(call.q, strip.rows)
    if not strip.segments:
        # No columns, but in the autograd graph: gradients are zeros.
        return (q @ q[:, :, :0].mT + slice_tokens(call.k, slice(0, 0)).sum()).to(call.softmax_dtype)
    logits = [segment_logits(call, q, strip.rows, segment, fill) for segment in strip.segments]
    return logits[0] if len(logits) == 1 else torch.cat(logits, dim=-1)


def segment_logits(call: Call, q: Tensor, rows: slice, segment: KeySegment, fill: float) -> Tensor:
    columns = slice(segment.start, segment.stop)
    unmasked = reference.compute_unmasked_logits(
        with_fast_additive(call), q, slice_tokens(call.k, columns), call.tile(rows, columns)
    )
    mask_segment_edges(call, unmasked, rows, segment, fill)
    return unmasked


def slice_tokens(x: Tensor, run: slice) -> Tensor:
    """x[:, :, run]; x itself where that is everything, which spares the backward a slice."""
    return x if run.start == 0 and run.stop == x.shape[2] else x[:, :, run]


def mask_segment_edges(call: Call, logits: Tensor, rows: slice, segment: KeySegment, fill: float) -> None:
    """Masks the edges of a segment in place; every query sees every key between them."""
    if call.mask is None:
        return
    for start, stop in ((segment.start, segment.full_start), (segment.full_stop, segment.stop)):
        if start < stop:
            unseen = ~call.mask.visible(call.tile(rows, slice(start, stop)))
            logits[..., start - segment.start : stop - segment.start].masked_fill_(unseen, fill)


def split_by_segment(strip: Strip, weights: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yields the keys of each segment and the strip's weights for them."""
    start = 0
    for segment in strip.segments:
        width = segment.stop - segment.start
        yield slice(segment.start, segment.stop), weights[..., start : start + width]
        start += width


def recompute_in_backward(call: Call, function, *arguments):  # type: ignore[no-untyped-def]
    """Calls the function; where gradients are needed, its intermediates are recomputed in the backward.

    Inside a torch.func transform, which does not support that, they are kept.
    """
    if not call.needs_grad or call.is_transformed:
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)

"""The Kullback-Leibler divergence of two attention matrices, differentiable: by GPU kernels, else strip by strip.

It is computed from logarithms of the weights, which are exact where the weights themselves are rounded to 0.

B batch, H heads (1 for the mean over heads), R rows of the strip, C keys that the strip sees, Tq queries, K given keys
per query.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from foci.arguments import Call
from foci.backends import reference, strips
from foci.backends.strips import Strip
from foci.masks.range_algebra import KeySegment
from foci.runtime.tracing import disable_autocast
from foci.statistics.cuda import divergence as cuda_divergence
from foci.statistics.streaming import finite_lse


@disable_autocast
def compute_divergence(
    teacher: Call,
    student: Call,
    averaged: tuple[bool, bool],
    keys: Tensor | None,
    lse: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """KL(teacher || student) of each query, differentiable; whether the query sees a key; and whether the teacher
    attends to a key that the student cannot see: (B, H, Tq) each.

    Both sides are normalized over the keys that are compared: all, or those in `keys`, (B or 1, Tq, K) with -1 for no
    key, that the student sees. `averaged`: whether a side is the mean over its heads. `lse`, of both sides where known,
    saves passes.
    """
    if not cuda_divergence.refuses(teacher, student, averaged, keys):

        def compute_again(q: Tensor, k: Tensor) -> Tensor:
            return compare_in_strips(teacher, replace(student, q=q, k=k), averaged, keys)[0]

        return cuda_divergence.compute_divergence(teacher, student, averaged[0], lse, compute_again)
    return compare_in_strips(teacher, student, averaged, keys)


def compare_in_strips(
    teacher: Call, student: Call, averaged: tuple[bool, bool], keys: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for every call on any device, also differentiable twice."""
    leading = teacher if teacher.needs_grad else student
    results = [
        strips.recompute_in_backward(leading, compare_strip, teacher, student, averaged, keys, strip)
        for strip in split_jointly(teacher, student)
    ]
    divergence, counted, hidden = (torch.cat(parts, dim=2) for parts in zip(*results, strict=True))
    return divergence, counted, hidden


def split_jointly(teacher: Call, student: Call) -> Iterator[Strip]:
    """Yields strips of both matrices, each over the keys that at least one of them sees."""
    queries, keys = student.q.shape[2], student.k.shape[2]
    entries, _ = strips.strip_budget(student)
    pairs = student.q.shape[0] * (teacher.q.shape[1] + student.q.shape[1])
    rows = min(max(entries // max(pairs * keys, 1), 1), queries)
    segments = zip(*(strips.visible_segments(call, rows) for call in (teacher, student)), strict=True)
    for start, visible in zip(range(0, queries, rows), segments, strict=True):
        first = min((segment.start for side in visible for segment in side), default=0)
        last = max((segment.stop for side in visible for segment in side), default=0)
        # Masked entry by entry: what one side sees of the other's keys is not known.
        yield Strip(slice(start, min(start + rows, queries)), (KeySegment(first, last, last, last),))


def compare_strip(
    teacher: Call, student: Call, averaged: tuple[bool, bool], keys: Tensor | None, strip: Strip
) -> tuple[Tensor, Tensor, Tensor]:
    chosen = None if keys is None else mark_keys(keys[:, strip.rows], strip.segments[0])
    log_student = compute_log_weights(student, strip, averaged[1], chosen)
    if chosen is not None:
        chosen = chosen & (log_student > -torch.inf)
    log_teacher = compute_log_weights(teacher, strip, averaged[0], chosen)
    seen = (log_teacher > -torch.inf).expand(torch.broadcast_shapes(log_teacher.shape, log_student.shape))
    hidden = seen & (log_student == -torch.inf)
    compared = seen & ~hidden
    ratio = torch.where(compared, log_teacher, 0.0) - torch.where(compared, log_student, 0.0)
    weights = torch.where(compared, log_teacher, -torch.inf).exp()
    return (weights * ratio).sum(-1), seen.any(-1), hidden.any(-1)


def compute_log_weights(call: Call, strip: Strip, averaged: bool, chosen: Tensor | None) -> Tensor:
    """Logarithms of the strip's weights, normalized over the chosen keys, without the sink; -inf where masked."""
    logits = strips.strip_logits(call, strip)
    if averaged:
        logits = average_heads(call, logits)
    if chosen is not None:
        logits = logits.masked_fill(~chosen, -torch.inf)
    return logits - finite_lse(log_sum_exp(logits)).unsqueeze(-1)


def average_heads(call: Call, logits: Tensor) -> Tensor:
    """Logarithms of the mean weights over the heads, up to a constant per row: (B, 1, R, C)."""
    lse = log_sum_exp(logits)
    if call.sink is not None:
        lse = torch.logaddexp(finite_lse(lse), call.sink.to(lse.dtype).view(1, -1, 1))
    return log_sum_exp((logits - finite_lse(lse).unsqueeze(-1)).movedim(1, -1)).unsqueeze(1)


def log_sum_exp(x: Tensor) -> Tensor:
    """The log-sum-exp of the last axis; -inf with gradient 0 where all entries are."""
    return reference.softmax_with_lse(x)[1]


def mark_keys(keys: Tensor, segment: KeySegment) -> Tensor:
    """Which keys of a segment are given: (B or 1, R, K) -> bool (B or 1, 1, R, C)."""
    width = segment.stop - segment.start
    places = keys - segment.start
    # Keys elsewhere, and -1, go to an extra column.
    places = torch.where((places >= 0) & (places < width), places, width)
    marks = torch.zeros(*keys.shape[:-1], width + 1, dtype=torch.bool, device=keys.device)
    return marks.scatter(-1, places, True)[..., :width].unsqueeze(1)

"""Attention strip by strip: every score, mask and bias, on any device, forward and backward, without the matrix.

A strip is some rows of the matrix, for a few heads at a time, over just the keys that these rows can see. It is small
enough to stay in cache, the reference computes it, and only its output and log-sum-exp are kept; the backward
computes it again.

B batch, H heads, R rows of the strip, C keys that the strip sees.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foci.arguments import Call
from foci.backends import reference
from foci.backends.strips import (
    LOG2_E,
    PartIndex,
    Strip,
    recompute_in_backward,
    slice_tokens,
    split_by_segment,
    split_into_parts,
    split_into_strips,
    strip_logits,
)
from foci.masks.ranges import Segment
from foci.runtime.checks import disable_autocast, is_traced
from foci.runtime.double_backward import make_distinct_views

NAME = "blocked"

# Bytes of a matrix that nobody expects to be kept.
MIN_WARNED_MATRIX_BYTES = 2**26


def refuses(call: Call) -> list[str]:
    if call.mapped:
        return ["it does not run inside torch.func.vmap: give the batch dimension to the call instead"]
    return []


def run(call: Call) -> tuple[Tensor, Tensor]:
    if 0 in call.q.shape or 0 in call.k.shape:
        # Nothing to go through strip by strip, and zeros that stay in the graph.
        return reference.run(call)
    if call.needs_grad and not call.transformed and not is_traced(call.q):
        return StripAttention.apply(call, call.q, call.k, call.v, *score_and_bias_tensors(call).values())  # type: ignore[no-any-return, no-untyped-call]
    if call.needs_grad and call.transformed:
        warn_about_kept_matrix(call)
    return attend_all_strips(call)


def warn_about_kept_matrix(call: Call) -> None:
    """What would be too much to keep in silence."""
    size = math.prod(call.q.shape[:3]) * call.k.shape[2] * call.wide.itemsize
    if size >= MIN_WARNED_MATRIX_BYTES:
        warnings.warn(
            f"inside a transform of torch.func the backward of this call keeps its matrix, {size / 2**20:,.0f} MiB or"
            " more: torch.autograd keeps none",
            stacklevel=6,
        )


def attend_all_strips(call: Call) -> tuple[Tensor, Tensor]:
    rows = [attend_part(part) for _, part in split_into_parts(call)]
    out = torch.cat([out for out, _ in rows]) if len(rows) != 1 else rows[0][0]
    lse = torch.cat([lse for _, lse in rows]) if len(rows) != 1 else rows[0][1]
    shape = call.q.shape[:3]
    return out.view(*shape, call.v.shape[-1]).to(call.q.dtype), lse.view(shape)


def attend_part(part: Call) -> tuple[Tensor, Tensor]:
    """The strips of one part, joined: (B H, Tq, Dv) and (B H, Tq)."""
    done = [recompute_in_backward(part, attend_strip, part, strip) for strip in split_into_strips(part)]
    out = torch.cat([out for out, _ in done], dim=2) if done else part.q.new_zeros(*part.q.shape[:3], part.v.shape[-1])
    lse = torch.cat([lse for _, lse in done], dim=2) if done else part.q.new_zeros(part.q.shape[:3], dtype=part.wide)
    return out.flatten(0, 1), lse.flatten(0, 1)


class StripAttention(torch.autograd.Function):
    """Every strip, and nothing kept of them: the backward computes each again, one at a time."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*tensors)
        nothing = call.q.new_zeros(0)
        ctx.call = replace(call, q=nothing, k=nothing, v=nothing)
        ctx.set_materialize_grads(False)
        return attend_all_strips(call)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        # Read once: whoever keeps less than all of it (activation checkpointing) makes it again when it is read.
        tensors = ctx.saved_tensors
        if slopes == (None, None):
            return (None,) * (1 + len(tensors))
        call = replace_tensors(ctx.call, tensors)
        return (
            None,
            *(compute_differentiable_gradients if torch.is_grad_enabled() else compute_gradients)(call, slopes),
        )


def score_and_bias_tensors(call: Call) -> dict[str, Tensor]:
    """What the score and the bias are made of."""
    of_bias = {} if call.bias is None else call.bias.tensors()
    return {f"score.{name}": x for name, x in call.score.tensors().items()} | {
        f"bias.{name}": x for name, x in of_bias.items()
    }


def replace_tensors(call: Call, tensors: Sequence[Tensor]) -> Call:
    """The call with other queries, keys, values and parameters, in that order."""
    q, k, v, *others = tensors
    found = dict(zip(score_and_bias_tensors(call), others, strict=True))
    score = {name: found[f"score.{name}"] for name in call.score.tensors()}
    call = replace(call, q=q, k=k, v=v, score=replace(call.score, **score))  # type: ignore[type-var]
    if call.bias is None:
        return call
    return replace(call, bias=replace(call.bias, **{name: found[f"bias.{name}"] for name in call.bias.tensors()}))  # type: ignore[type-var]


@disable_autocast
def compute_gradients(call: Call, slopes: Sequence[Tensor | None]) -> list[Tensor | None]:
    """What those of output and log-sum-exp give to queries, keys, values and parameters, summed in float32 at least."""
    tensors = [call.q, call.k, call.v, *score_and_bias_tensors(call).values()]
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in tensors[3:]]
    sums = GradientSums([x if x.requires_grad else None for x in tensors], call.wide)
    with torch.enable_grad():
        for (batches, heads), part in split_into_parts(
            replace_tensors(call, [x.detach() for x in tensors[:3]] + leaves)
        ):
            shared = slice(heads.start // call.group, heads.stop // call.group)
            places = [(batches, heads), (batches, shared), (batches, shared)]
            inputs = zip((part.q, part.k, part.v), tensors, strict=False)
            own = [x.to(call.wide).requires_grad_(whole.requires_grad) for x, whole in inputs]
            part = replace(part, q=own[0], k=own[1], v=own[2])
            given = [x if x is None else x[batches, heads] for x in slopes]
            for strip in split_into_strips(part):
                for found in compute_strip_gradients(part, strip, given, sums.wanted([*own, *leaves])):
                    sums.add(found, places)
    return sums.finished()


class GradientSums:
    """Gradients on their way: of queries, keys and values part by part, of parameters as a whole."""

    def __init__(self, tensors: list[Tensor | None], wide: torch.dtype) -> None:
        self.tensors, self.wide = tensors, wide
        self.found: list[Tensor | None] = [None] * len(tensors)

    def wanted(self, leaves: list[Tensor]) -> list[Tensor]:
        return [leaf for leaf, tensor in zip(leaves, self.tensors, strict=True) if tensor is not None]

    def add(self, found: Sequence[Tensor | None], places: list[PartIndex]) -> None:
        """Adds what a strip gives to those that are wanted."""
        wanted = [(index, tensor) for index, tensor in enumerate(self.tensors) if tensor is not None]
        for (index, tensor), more in zip(wanted, found, strict=True):
            if more is None:
                continue
            total = self.found[index]
            if total is None and more.shape == tensor.shape:
                self.found[index] = more.to(self.wide)
                continue
            if total is None:
                total = self.found[index] = torch.zeros_like(tensor, dtype=self.wide)
            (total[places[index]] if index < len(places) else total).add_(more)

    def finished(self) -> list[Tensor | None]:
        """In the dtypes of the tensors; 0 where nothing was given."""
        pairs = zip(self.found, self.tensors, strict=True)
        return [x if y is None else torch.zeros_like(y) if x is None else x.to(y.dtype) for x, y in pairs]


def compute_strip_gradients(
    part: Call, strip: Strip, slopes: list[Tensor | None], wanted: list[Tensor]
) -> Iterator[Sequence[Tensor | None]]:
    """What one strip gives to what is wanted: through the output, and through the softmax and the logits."""
    if not strip.segments:
        return
    found = strip_logits(part, strip)
    # Nothing that made the logits needs them again, so that the weights may take their place.
    powers, total, _ = exponentiate_in_place(found.detach())
    weights = powers.div_(total).requires_grad_()
    d_out, d_lse = (x if x is None else x[:, :, strip.rows].to(weights.dtype) for x in slopes)
    slope: Tensor | None = None if d_lse is None else d_lse.unsqueeze(-1)
    if d_out is not None:
        out = apply_strip_weights(part, strip, weights)
        d_weights, *direct = torch.autograd.grad(out, [weights, *wanted], d_out, allow_unused=True)
        yield direct
        # The sum of every weight times its gradient: what they all lose, as together they stay 1.
        lost = (out.detach() * d_out).sum(-1, keepdim=True)
        slope = d_weights.sub_(lost if slope is None else lost - slope)
    if found.requires_grad and slope is not None:
        yield torch.autograd.grad(found, wanted, slope * weights.detach(), allow_unused=True)


def compute_differentiable_gradients(call: Call, slopes: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The same with a graph of their own, for whoever takes a gradient of a gradient."""
    tensors = make_distinct_views(call.q, call.k, call.v, *score_and_bias_tensors(call).values())
    wanted = [place for place, x in enumerate(tensors) if x.requires_grad]
    results = attend_all_strips(replace_tensors(call, tensors))
    reached = [pair for pair in zip(results, slopes, strict=True) if pair[1] is not None]
    found = torch.autograd.grad(
        [result for result, _ in reached],
        [tensors[place] for place in wanted],
        [slope for _, slope in reached],
        create_graph=True,
        allow_unused=True,
    )
    by_place = dict(zip(wanted, found, strict=True))
    return [by_place.get(place) for place in range(len(tensors))]


def attend_strip(call: Call, strip: Strip) -> tuple[Tensor, Tensor]:
    if not strip.segments:
        # No keys, computed all the same: the zeros stay in the graph, and a backward through them works.
        strip = Strip(strip.rows, (Segment(0, 0, 0, 0),))
    found = strip_logits(call, strip)
    if not call.needs_grad and not call.transformed and not is_traced(call.q) and strip.width:
        powers, total, lse = exponentiate_in_place(found)
        return apply_strip_weights(call, strip, powers).div_(total), lse
    weights, lse = reference.softmax_with_lse(found)
    return apply_strip_weights(call, strip, weights), lse


def apply_strip_weights(call: Call, strip: Strip, weights: Tensor) -> Tensor:
    """The strip's weights times the values."""
    mixes = [
        reference.apply_weights(call, piece, slice_tokens(call.v, columns), call.where(strip.rows, columns))
        for columns, piece in split_by_segment(strip, weights)
    ]
    return mixes[0] if len(mixes) == 1 else torch.stack(mixes).sum(0)


def exponentiate_in_place(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `reference.softmax` does, in the memory of the logits, and the division by the total is left to the caller:
    there are fewer outputs than weights. Powers of two, because exp2 is three times as fast as exp.
    """
    peak = logits.amax(-1, keepdim=True)
    peak.masked_fill_(peak == -torch.inf, 0.0)
    powers = logits.sub_(peak).mul_(LOG2_E).exp2_()
    total = powers.sum(-1, keepdim=True)
    lse = total.log().add_(peak).squeeze(-1)
    return powers, total.masked_fill_(total == 0, 1.0), lse

"""Additive attention in our own kernels: wᵀ tanh(q + k), forward and backward, without the matrix.

Gradients reach query, key, value and weight, through the output and through the log-sum-exp. From run to run they may
differ in their last digits; under torch.use_deterministic_algorithms(True) they are the same every time, and take about
twice as long. A compiler takes the two operators as they are.

B batch, H heads, G key heads, Tq queries, Tk keys, D width, Dv value width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from foci.arguments import Call
from foci.gpu import mask_inputs
from foci.gpu.additive import launch
from foci.gpu.additive.launch import AdditiveOptions
from foci.runtime.checks import is_traced
from foci.runtime.double_backward import forbid_double_backward
from foci.scores import Additive

MAX_ADDITIVE_WIDTH = 512
LN_2 = math.log(2.0)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

OPTIONS_SCHEMA = (
    "Tensor? spans, Tensor? query_ids, Tensor? key_ids, Tensor? dense, Tensor? seed, bool causal, float dropout"
)


def refuses(call: Call) -> list[str]:
    """Why these kernels do not serve the call; the device and the transforms of torch.func are asked elsewhere."""
    if not isinstance(call.score, Additive):
        return ["the score is not additive"]
    reasons = []
    if call.bias is not None:
        reasons.append("an additive score together with a bias")
    if call.q.dtype not in DTYPES:
        reasons.append(f"{call.q.dtype}".removeprefix("torch."))
    if call.q.shape[-1] > MAX_ADDITIVE_WIDTH:
        reasons.append(f"a width of {call.q.shape[-1]}, where these kernels take up to {MAX_ADDITIVE_WIDTH}")
    if 0 in call.q.shape or 0 in call.k.shape or 0 in call.v.shape:
        reasons.append("an empty tensor")
    if call.dropout and (call.batch_ids is not None or call.head_ids is not None):
        reasons.append("dropout in a part of a call")
    return [*reasons, *mask_inputs.refuses(call)]


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    assert isinstance(call.score, Additive)
    masks = mask_inputs.build_kernel_masks(call)
    terms = AdditiveOptions(
        masks.spans,
        masks.query_ids,
        masks.key_ids,
        masks.dense,
        call.seed if call.dropout else None,
        masks.causal,
        call.dropout,
    )
    # A split of one piece would be a view, whose gradient is copied.
    out, lse = (run_kernels if call.v.shape[-1] <= MAX_ADDITIVE_WIDTH else run_wide_values)(
        call, call.score.weight, call.v, terms
    )
    return out, lse * LN_2 if call.needs_lse else None


def run_wide_values(call: Call, weight: Tensor, values: Tensor, terms: AdditiveOptions) -> tuple[Tensor, Tensor]:
    """Wider values, a piece after the other, each mixed by the same weights."""
    found = [run_kernels(call, weight, piece, terms) for piece in values.split(MAX_ADDITIVE_WIDTH, dim=-1)]
    return torch.cat([out for out, _ in found], dim=-1), found[0][1]


def run_kernels(call: Call, weight: Tensor, values: Tensor, terms: AdditiveOptions) -> tuple[Tensor, Tensor]:
    """The output (B, H, Tq, Dv) for values that fit, and the log-sum-exp in base 2."""
    tensors = (call.q, call.k, values, weight)
    if is_traced(call.q):
        return additive_attention(*tensors, *terms)  # type: ignore[no-any-return]
    if call.needs_grad:
        return AdditiveAttention.apply(*tensors, terms)  # type: ignore[no-any-return, no-untyped-call]
    return launch.forward(*tensors, terms)


class AdditiveAttention(torch.autograd.Function):
    """The operators below for all tensors that have values: calling an operator costs more than all of a small call."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, terms: AdditiveOptions
    ) -> tuple[Tensor, Tensor]:
        out, lse = launch.forward(q, k, v, weight, terms)
        ctx.save_for_backward(q, k, v, weight, out, lse, *terms[:5])
        ctx.options = terms[5:]
        # Nobody who did not ask for the log-sum-exp pays for its zeros.
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, weight, out, lse, *masks = ctx.saved_tensors
        d_out = torch.zeros_like(out) if d_out is None else d_out
        found = launch.backward(d_out, d_lse, q, k, v, weight, out, lse, AdditiveOptions(*masks, *ctx.options))
        return (*forbid_double_backward(found, d_out, d_lse, q, k, v, weight), None)


@torch.library.custom_op(
    "foci::additive",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor weight, {OPTIONS_SCHEMA}) -> (Tensor, Tensor)",
)
def additive_attention(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *terms: Any) -> tuple[Tensor, Tensor]:
    """The output (B, H, Tq, Dv) and the log-sum-exp (B, H, Tq), in base 2 as the backward wants it again."""
    return launch.forward(q, k, v, weight, AdditiveOptions(*terms))


@additive_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *terms: Any) -> tuple[Tensor, Tensor]:
    return launch.allocate_results(q, v)


@torch.library.custom_op(
    "foci::additive_backward",
    mutates_args=(),
    schema=(
        "(Tensor d_out, Tensor d_lse, Tensor q, Tensor k, Tensor v, Tensor weight, Tensor out, Tensor lse,"
        f" {OPTIONS_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def additive_attention_backward(
    d_out: Tensor,
    d_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    out: Tensor,
    lse: Tensor,
    *terms: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and weight."""
    return launch.backward(d_out, d_lse, q, k, v, weight, out, lse, AdditiveOptions(*terms))


@additive_attention_backward.register_fake
def _(
    d_out: Tensor,
    d_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    out: Tensor,
    lse: Tensor,
    *terms: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), weight.new_empty(weight.shape)


def setup_additive_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output, *inputs[4:9])
    ctx.options = inputs[9:]


def differentiate_additive(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
    found = additive_attention_backward(d_out, d_lse, *ctx.saved_tensors, *ctx.options)
    return (*found, *(None,) * len(AdditiveOptions._fields))


additive_attention.register_autograd(differentiate_additive, setup_context=setup_additive_context)

"""Additive attention, wᵀ tanh(q + k), in Triton kernels: forward and backward without storing the matrix.

arguments: options of a call, tilings, scalars and workspace sizes of the kernels
decode: very few queries
one_pass_backward: the fast backward
two_pass_backward: the deterministic backward, about twice as slow
launch: chooses among them

Gradients reach query, key, value and weight, through the output and through the log-sum-exp. Their last digits may
differ from run to run, unless torch.use_deterministic_algorithms(True) is set. Both directions are registered as
operators for torch.compile.

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width, Dv value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foci.arguments import KERNEL_DTYPES, Call
from foci.gpu.additive import launch
from foci.gpu.additive.arguments import AdditiveOptions, allocate_results
from foci.gpu.compilation import LAUNCH_COLLECTOR
from foci.masks import kernel_inputs
from foci.runtime.double_backward import forbid_double_backward
from foci.runtime.operators import operator
from foci.runtime.tracing import is_traced
from foci.scores import LN_2, Additive

MAX_ADDITIVE_WIDTH = 512

OPTIONS_SCHEMA = (
    "Tensor? key_ranges, Tensor? query_ids, Tensor? key_ids, Tensor? dense, Tensor? seed, bool causal, float dropout"
)


def refuses(call: Call) -> list[str]:
    """The reasons why these kernels cannot run the call. backends.triton checks device and torch.func transforms."""
    if not isinstance(call.score, Additive):
        return ["the score is not additive"]
    reasons = []
    if call.bias is not None:
        reasons.append("an additive score together with a bias is not supported")
    if call.q.dtype not in KERNEL_DTYPES:
        reasons.append(f"{call.q.dtype} is not supported".removeprefix("torch."))
    if call.q.shape[-1] > MAX_ADDITIVE_WIDTH:
        reasons.append(f"the kernels support widths up to {MAX_ADDITIVE_WIDTH}, got {call.q.shape[-1]}")
    if 0 in call.q.shape or 0 in call.k.shape or 0 in call.v.shape:
        reasons.append("query, key or value is empty")
    if call.dropout and (call.batch_ids is not None or call.head_ids is not None):
        reasons.append("dropout in a part of a call is not supported")
    return [*reasons, *kernel_inputs.refuses(call)]


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    assert isinstance(call.score, Additive)
    masks = kernel_inputs.build_kernel_masks(call)
    options = AdditiveOptions(
        masks.key_ranges,
        masks.query_ids,
        masks.key_ids,
        masks.dense,
        call.seed if call.dropout else None,
        masks.causal,
        call.dropout,
    )
    # Splitting values that fit would return a view, whose gradient is copied.
    out, lse = (run_kernels if call.v.shape[-1] <= MAX_ADDITIVE_WIDTH else run_wide_values)(
        call, call.score.weight, call.v, options
    )
    return out, lse * LN_2 if call.needs_lse else None


def run_wide_values(call: Call, weight: Tensor, values: Tensor, options: AdditiveOptions) -> tuple[Tensor, Tensor]:
    """Run the kernels on chunks of the values that are narrow enough."""
    results = [run_kernels(call, weight, piece, options) for piece in values.split(MAX_ADDITIVE_WIDTH, dim=-1)]
    return torch.cat([out for out, _ in results], dim=-1), results[0][1]


def run_kernels(call: Call, weight: Tensor, values: Tensor, options: AdditiveOptions) -> tuple[Tensor, Tensor]:
    """Compute the output (B, H, Tq, Dv) and the log-sum-exp in base 2, for values that are narrow enough."""
    tensors = (call.q, call.k, values, weight)
    if is_traced(call.q):
        return additive_attention(*tensors, *options)  # type: ignore[no-any-return]
    if call.needs_grad:
        return AdditiveAttention.apply(*tensors, options)  # type: ignore[no-any-return, no-untyped-call]
    return launch.forward(*tensors, options)


class AdditiveAttention(torch.autograd.Function):
    """The operators below without dispatch, for eager mode: dispatching an operator costs more than a small call."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, options: AdditiveOptions
    ) -> tuple[Tensor, Tensor]:
        LAUNCH_COLLECTOR.run_later = lambda: run_empty_backward(q, k, v, weight, options)
        try:
            out, lse = launch.forward(q, k, v, weight, options)
        finally:
            LAUNCH_COLLECTOR.run_later = None
        ctx.save_for_backward(q, k, v, weight, out, lse, *options[:5])
        ctx.scalars = options[5:]
        # Do not allocate zeros for the gradient of an unused log-sum-exp.
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, weight, out, lse, *masks = ctx.saved_tensors
        d_out = torch.zeros_like(out) if d_out is None else d_out
        gradients = launch.backward(d_out, d_lse, q, k, v, weight, out, lse, AdditiveOptions(*masks, *ctx.scalars))
        return (*forbid_double_backward(gradients, d_out, d_lse, q, k, v, weight), None)


def run_empty_backward(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, options: AdditiveOptions) -> None:
    """The backward of uninitialized results, to collect its launches."""
    out, lse = allocate_results(q, v)
    launch.backward(out, None, q, k, v, weight, out, lse, options)


@operator("additive", f"(Tensor q, Tensor k, Tensor v, Tensor weight, {OPTIONS_SCHEMA}) -> (Tensor, Tensor)")
def additive_attention(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Compute the output (B, H, Tq, Dv) and the log-sum-exp (B, H, Tq), in base 2 as the backward needs it."""
    return launch.forward(q, k, v, weight, AdditiveOptions(*options))


@additive_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return allocate_results(q, v)


@operator(
    "additive_backward",
    "(Tensor d_out, Tensor d_lse, Tensor q, Tensor k, Tensor v, Tensor weight, Tensor out, Tensor lse,"
    f" {OPTIONS_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
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
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, v and weight."""
    return launch.backward(d_out, d_lse, q, k, v, weight, out, lse, AdditiveOptions(*options))


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
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), weight.new_empty(weight.shape)


def setup_additive_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output, *inputs[4:9])
    ctx.scalars = inputs[9:]


def differentiate_additive(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
    gradients = additive_attention_backward(d_out, d_lse, *ctx.saved_tensors, *ctx.scalars)
    return (*gradients, *(None,) * len(AdditiveOptions._fields))


additive_attention.register_autograd(differentiate_additive, setup_context=setup_additive_context)

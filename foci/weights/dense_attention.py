"""Attention together with its whole matrix, for callers that need both at once.

`Weights` recomputes entries when they are requested. Here each strip of the matrix is computed once, and both its
output and its entries are written while it is in the CPU cache.

B batch, H heads, Tq queries, Tk keys, R rows of a strip, C keys that are visible to it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from foci import backends
from foci.arguments import Call, prepare_call
from foci.backends import reference, strips
from foci.biases import DenseBias
from foci.masks.base import Mask
from foci.runtime.double_backward import make_distinct_views
from foci.runtime.interception import intercept, is_intercepting
from foci.runtime.tracing import disable_autocast
from foci.scores import Dot
from foci.statistics import streaming
from foci.weights import dense_attention_c

# A smaller logarithm marks a masked entry.
MAX_MASKED_LOG2 = streaming.MASKED_LOG2 / 2


def attention_with_matrix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    average: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes attention and its dense weights, (B, H, Tq, Tk), or (B, Tq, Tk) averaged over the heads.

    >>> import torch
    >>> q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    >>> out, matrix = attention_with_matrix(q, k, v, average=True)
    >>> out.shape, matrix.shape
    (torch.Size([2, 4, 6, 8]), torch.Size([2, 6, 6]))

    The arguments are those of `attention`. The weights are those before dropout; both results are differentiable.
    """
    is_watched = is_intercepting()
    if is_watched or has_torch_function_variadic(query, key, value):
        options: dict[str, Any] = {"mask": mask, "bias": bias, "dropout": dropout, "average": average}
        if is_watched:
            return intercept(attention_with_matrix, (query, key, value), options)  # type: ignore[no-any-return]
        overridden: tuple[Tensor, Tensor] = handle_torch_function(
            attention_with_matrix, (query, key, value), query, key, value, **options
        )
        return overridden
    if query.dim() != 4:
        raise ValueError(f"query must be (B, H, T, D), got {tuple(query.shape)}")
    call = prepare_call(query, key, value, Dot(), mask, bias, None, None, dropout, False)
    if torch.compiler.is_compiling():
        return compute_traceable(call, average)
    entries = call.bias.entries if isinstance(call.bias, DenseBias) else None
    return AttentionWithMatrix.apply(call, average, call.q, call.k, call.v, entries)  # type: ignore[no-any-return, no-untyped-call]


class AttentionWithMatrix(torch.autograd.Function):
    """Computes strips in the forward; the backward recomputes, and builds the matrix only if it has a gradient."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, average: bool, q: Tensor, k: Tensor, v: Tensor, entries: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, entries)
        ctx.set_materialize_grads(False)
        empty = q.new_zeros(0)
        ctx.call, ctx.average = replace(call, q=empty, k=empty, v=empty, bias=None), average
        return compute_with_matrix(call, average)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_matrix: Tensor | None) -> tuple[Tensor | None, ...]:
        if d_out is None and d_matrix is None:
            return (None,) * 6
        q, k, v, entries = tensors = make_distinct_views(*ctx.saved_tensors)
        create_graph = torch.is_grad_enabled()
        call = replace(ctx.call, q=q, k=k, v=v, bias=None if entries is None else DenseBias(entries))
        with torch.enable_grad():
            if d_matrix is None and not create_graph:
                results = [(backends.run(call, None)[0], d_out)]
            else:
                results = list(zip(compute_traceable(call, ctx.average), (d_out, d_matrix), strict=True))
        return (None, None, *input_gradients(results, tensors, create_graph))


def input_gradients(
    results: list[tuple[Tensor, Tensor | None]], tensors: list[Tensor | None], create_graph: bool
) -> list[Tensor | None]:
    """The gradient of each tensor, from the results and their gradients; None for a tensor that needs none."""
    differentiable = {i: tensor for i, tensor in enumerate(tensors) if tensor is not None and tensor.requires_grad}
    outputs, d_outputs = zip(*(pair for pair in results if pair[1] is not None), strict=True)
    inputs = list(differentiable.values())
    gradients = torch.autograd.grad(outputs, inputs, d_outputs, create_graph=create_graph, allow_unused=True)
    by_index = dict(zip(differentiable, gradients, strict=True))
    return [by_index.get(i) for i in range(len(tensors))]


@disable_autocast
def compute_traceable(call: Call, average: bool) -> tuple[Tensor, Tensor]:
    """Computes both like the reference, with operations that a compiler can trace."""
    tile = call.full_tile()
    weights, _ = reference.softmax_with_lse(reference.compute_logits(call, call.q, call.k, tile))
    out = reference.apply_weights(call, weights, call.v, tile).to(call.q.dtype)
    return out, weights.mean(1) if average else weights


@disable_autocast
def compute_with_matrix(call: Call, average: bool) -> tuple[Tensor, Tensor]:
    """Output and matrix without a graph, in compiled C if that supports the call."""
    return (
        dense_attention_c.compute_with_matrix_c(call, average)
        if dense_attention_c.supports_call(call)
        else compute_in_strips(call, average)
    )


def compute_in_strips(call: Call, average: bool) -> tuple[Tensor, Tensor]:
    """Output and matrix, strip by strip."""
    batch, heads, queries = call.q.shape[:3]
    out = call.q.new_zeros(batch, heads, queries, call.v.shape[-1])
    matrix = call.q.new_zeros(batch, 1 if average else heads, queries, call.k.shape[2], dtype=call.softmax_dtype)
    if 0 not in matrix.shape:
        for (batches, some_heads), part in strips.split_into_parts(call):
            entries = matrix[batches] if average else matrix[batches, some_heads]
            for strip in strips.split_into_strips(part):
                rows = out[batches, some_heads, strip.rows], entries[:, :, strip.rows]
                add_strip(part, strip, *rows, heads if average else None)
    return out, matrix.squeeze(1) if average else matrix


def add_strip(call: Call, strip: strips.Strip, out: Tensor, entries: Tensor, average_heads: int | None) -> None:
    """Adds the output (B, H, R, D) of a strip and its entries (B, H, R, C), or (B, 1, R, C) averaged over the heads."""
    if not strip.segments:
        return
    powers, scale = exponentiate_strip(call, strip)
    for columns, piece in strips.split_by_segment(strip, powers):
        part = reference.apply_weights(call, piece, call.v[:, :, columns], call.tile(strip.rows, columns))
        out += part.mul_(scale)
        target = entries[..., columns]
        if average_heads is None:
            torch.mul(piece, scale, out=target)
        else:
            for head in range(piece.shape[1]):
                target.addcmul_(piece[:, head, None], scale[:, head, None], value=1 / average_heads)


def exponentiate_strip(call: Call, strip: strips.Strip) -> tuple[Tensor, Tensor]:
    """Powers of two (B, H, R, C), and the factor that makes each row sum to 1; 0 for a fully masked row."""
    no_lse = call.q.new_zeros(*call.q.shape[:2], strip.rows.stop - strip.rows.start, dtype=call.softmax_dtype)
    x = streaming.compute_log2_weights(call, no_lse, strip)
    peak = x.amax(-1, keepdim=True)
    x.sub_(peak).exp2_()
    return x, x.sum(-1, keepdim=True).reciprocal_().masked_fill_(peak < MAX_MASKED_LOG2, 0.0)

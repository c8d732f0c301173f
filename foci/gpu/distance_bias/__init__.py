"""Attention with a bias by distance (ALiBi, Buckets, Relative) in our own kernels: no matrix, forward or backward.

The two operators are registered with PyTorch, so a compiler takes them as they are. Gradients reach query, key, value,
tables and slopes, through the output and through the log-sum-exp, and are the same in every run.

B batch, H heads, G key heads, Tq queries, Tk keys, D width, Dv value width, W = 2 clip + 1 distances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foci.arguments import Call
from foci.biases import ALiBi, Buckets, Relative
from foci.gpu import mask_inputs
from foci.gpu.distance_bias import launch, row_table
from foci.gpu.distance_bias.row_table import DistanceBiasOptions
from foci.runtime.checks import is_traced
from foci.runtime.double_backward import forbid_double_backward
from foci.runtime.tensor_cache import cache_permanently
from foci.scores import Additive, Dot

LN_2 = math.log(2.0)
MAX_DISTANCE_BIAS_WIDTH = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# Rows have 2 clip + 1 numbers: beyond these they would be as large as the matrix of a usual length.
MAX_RELATIVE_CLIP = 512
MAX_BUCKET_DISTANCE = 1024

OPTIONS_SCHEMA = (
    "Tensor? table, Tensor? buckets, Tensor? keys, Tensor? values, Tensor? slopes, Tensor? spans, Tensor? query_ids,"
    " Tensor? key_ids, Tensor? dense, Tensor? seed, bool causal, float scale, float softcap, float dropout"
)

OPERATOR_INPUTS = ("q", "k", "v", *DistanceBiasOptions._fields)
INPUT_INDEX = {name: place for place, name in enumerate(OPERATOR_INPUTS)}
SCALAR_INPUTS = ("causal", "scale", "softcap", "dropout")


def refuses(call: Call) -> list[str]:
    """Why these kernels do not serve the call; the device and the transforms of torch.func are asked elsewhere."""
    if not isinstance(call.bias, ALiBi | Buckets | Relative):
        return ["there is no bias by distance"]
    return [*distance_bias_refusals(call), *tensor_refusals(call), *mask_inputs.refuses(call)]


def distance_bias_refusals(call: Call) -> list[str]:
    bias, reasons = call.bias, []
    if isinstance(bias, Relative):
        clip = bias.keys.shape[-2] // 2
        if not 0 < clip <= MAX_RELATIVE_CLIP:
            reasons.append(f"Relative with a clip of {clip}, where these kernels take 1 to {MAX_RELATIVE_CLIP}")
        if bias.values is not None and call.dropout:
            reasons.append("dropout together with Relative values")
        if not isinstance(call.score, Dot):
            reasons.append(f"Relative together with the score {type(call.score).__name__}")
    elif isinstance(bias, Buckets) and bias.max_distance > MAX_BUCKET_DISTANCE:
        reasons.append(
            f"Buckets up to a distance of {bias.max_distance}, where these kernels take {MAX_BUCKET_DISTANCE}"
        )
    if call.positions is not None:
        reasons.append("positions of your own")
    return reasons


def tensor_refusals(call: Call) -> list[str]:
    reasons = []
    if isinstance(call.score, Additive):
        reasons.append("an additive score together with a bias")
    if call.q.dtype not in DTYPES:
        reasons.append(f"{call.q.dtype}".removeprefix("torch."))
    if call.q.dtype == torch.bfloat16 and call.q.device.type == "cpu":
        reasons.append("bfloat16, which Triton's interpreter does not know")
    width = max(call.q.shape[-1], call.k.shape[-1], call.v.shape[-1])
    if width > MAX_DISTANCE_BIAS_WIDTH:
        reasons.append(f"a width of {width}, where these kernels take up to {MAX_DISTANCE_BIAS_WIDTH}")
    if 0 in call.q.shape or 0 in call.k.shape or 0 in call.v.shape:
        reasons.append("an empty tensor")
    if call.dropout and (call.batch_ids is not None or call.head_ids is not None):
        reasons.append("dropout in a part of a call")
    return reasons


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    inputs = operator_inputs(call)
    if is_traced(call.q):
        out, peaks, extras = distance_bias_attention(*inputs)
    elif call.needs_grad:
        out, peaks, extras = DistanceBiasAttention.apply(*inputs)  # type: ignore[no-untyped-call]
    else:
        q, k, v, *terms = inputs
        out, peaks, extras = launch.forward(q, k, v, DistanceBiasOptions(*terms))
    return out, (peaks.detach() + extras) * LN_2 if call.needs_lse else None


def operator_inputs(call: Call) -> tuple[Any, ...]:
    """What the operators take: q, k, v and the fields of Terms."""
    dot = call.with_dot()
    assert dot is not None and isinstance(dot.score, Dot)
    masks = mask_inputs.build_kernel_masks(call)
    seed = call.seed if call.dropout else None
    scale, softcap = dot.score.factor(dot.q.shape[-1]), dot.score.softcap or 0.0
    tensors = (*bias_tensors(call), masks.spans, masks.query_ids, masks.key_ids, masks.dense, seed)
    return dot.q, dot.k, dot.v, *tensors, masks.causal, scale, softcap, call.dropout


def bias_tensors(call: Call) -> tuple[Tensor | None, ...]:
    """The table, the bucket of each distance, Relative's keys and values, and the slopes: of the call's own heads."""
    bias, heads = call.bias, None if call.head_ids is None else call.head_index.flatten()
    if isinstance(bias, Buckets):
        table = bias.table if heads is None else bias.table[:, heads]
        numbers = table.shape[0], bias.bidirectional, bias.max_distance
        found = cache_permanently(
            (bucket_by_distance, *numbers), table, lambda: bucket_by_distance(*numbers, table.device)
        )
        return table, found, None, None, None
    if isinstance(bias, Relative):
        tables = (bias.keys, bias.values)
        chosen = (t if t is None or t.dim() == 2 or heads is None else t[heads] for t in tables)
        return None, None, *chosen, None
    assert isinstance(bias, ALiBi) and bias.slopes is not None
    return None, None, None, None, bias.slopes if heads is None else bias.slopes[heads]


def bucket_by_distance(buckets: int, bidirectional: bool, max_distance: int, device: torch.device) -> Tensor:
    """The bucket of every distance from -max_distance to max_distance, beyond which it stays the same: (W,)."""
    bias = Buckets(torch.empty(buckets, 1, device=device), bidirectional, max_distance)
    return bias.bucket(torch.arange(-max_distance, max_distance + 1, device=device))


@torch.library.custom_op(
    "foci::biased",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {OPTIONS_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
def distance_bias_attention(q: Tensor, k: Tensor, v: Tensor, *terms: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The output (B, H, Tq, Dv), and the log-sum-exp in base 2 as a sum of two (B, H, Tq).

    The first is a row's largest logit and takes no gradient: all of it goes to the second.
    """
    return launch.forward(q, k, v, DistanceBiasOptions(*terms))


@distance_bias_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *terms: Any) -> tuple[Tensor, Tensor, Tensor]:
    return launch.allocate_results(q, v)


@torch.library.custom_op(
    "foci::biased_backward",
    mutates_args=(),
    schema=(
        "(Tensor d_out, Tensor d_extras, Tensor out, Tensor peaks, Tensor extras, bool tables,"
        f" Tensor q, Tensor k, Tensor v, {OPTIONS_SCHEMA}) -> Tensor[]"
    ),
)
def distance_bias_attention_backward(
    d_out: Tensor, d_extras: Tensor, out: Tensor, peaks: Tensor, extras: Tensor, tables: bool, *inputs: Any
) -> list[Tensor]:
    """The gradients of q, k, v, and of what the bias has (table, keys, values or slopes) where `tables` is set."""
    q, k, v, *terms = inputs
    return launch.backward(d_out, d_extras, out, peaks, extras, tables, q, k, v, DistanceBiasOptions(*terms))


@distance_bias_attention_backward.register_fake
def _(
    d_out: Tensor, d_extras: Tensor, out: Tensor, peaks: Tensor, extras: Tensor, tables: bool, *inputs: Any
) -> list[Tensor]:
    q, k, v, *terms = inputs
    return launch.allocate_gradients(q, k, v, DistanceBiasOptions(*terms), tables)


def setup_distance_bias_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.options = inputs[: -len(SCALAR_INPUTS)], inputs[-len(SCALAR_INPUTS) :]
    ctx.save_for_backward(*output, *tensors)


def differentiate_distance_bias(
    ctx: Any, d_out: Tensor, d_peaks: Tensor, d_extras: Tensor
) -> tuple[Tensor | None, ...]:
    out, peaks, extras, *tensors = ctx.saved_tensors
    tables = needs_bias_gradients(ctx)
    found = distance_bias_attention_backward(d_out, d_extras, out, peaks, extras, tables, *tensors, *ctx.options)
    return place_gradients(ctx, found, DistanceBiasOptions(*tensors[3:], *ctx.options), tables)


def needs_bias_gradients(ctx: Any) -> bool:
    """Whether a gradient of what the bias has is wanted."""
    return any(ctx.needs_input_grad[INPUT_INDEX[name]] for name in row_table.LEARNED_FIELDS)


def place_gradients(
    ctx: Any, found: Sequence[Tensor | None], terms: DistanceBiasOptions, tables: bool
) -> tuple[Tensor | None, ...]:
    """The gradients in the places of their inputs, where they are wanted."""
    placed: list[Tensor | None] = [None] * len(OPERATOR_INPUTS)
    for name, gradient in zip(("q", "k", "v", *row_table.learned_fields(terms, tables)), found, strict=True):
        placed[INPUT_INDEX[name]] = gradient if ctx.needs_input_grad[INPUT_INDEX[name]] else None
    return tuple(placed)


distance_bias_attention.register_autograd(differentiate_distance_bias, setup_context=setup_distance_bias_context)


class DistanceBiasAttention(torch.autograd.Function):
    """The operator for all tensors that have values: calling an operator costs more than all of a small call."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        q, k, v, *terms = inputs
        output = launch.forward(q, k, v, DistanceBiasOptions(*terms))
        setup_distance_bias_context(ctx, inputs, output)
        # Nobody who did not ask for the log-sum-exp pays for its zeros.
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(
        ctx: Any, d_out: Tensor | None, d_peaks: Tensor | None, d_extras: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        out, peaks, extras, q, k, v, *tensors = ctx.saved_tensors
        terms, tables = DistanceBiasOptions(*tensors, *ctx.options), needs_bias_gradients(ctx)
        d_out = torch.zeros_like(out) if d_out is None else d_out
        found = launch.backward(d_out, d_extras, out, peaks, extras, tables, q, k, v, terms)
        learned = (getattr(terms, name) for name in row_table.LEARNED_FIELDS)
        return place_gradients(ctx, forbid_double_backward(found, d_out, d_extras, q, k, v, *learned), terms, tables)

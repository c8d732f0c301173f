"""Dot-product attention with masks, softcaps and biases in Triton kernels, without storing the matrix.

arguments: options of a call, parts of a call, scalars of the kernels
row_table: row tables of Buckets and Relative, and their gradients
tilings: tile sizes and launch options
visible_tiles: the launches that find visible tiles
launch: forward and backward
repeated_call: a forward again, with new addresses

Both directions are registered as operators for torch.compile. Gradients reach query, key, value, tables and slopes,
through the output and through the log-sum-exp, and are the same in every run.

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width, Dv value width, W = 2 clip + 1 distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foci.arguments import KERNEL_DTYPES, Call
from foci.biases import ALiBi, Buckets, DenseBias, Relative
from foci.gpu.attention import launch
from foci.gpu.attention.arguments import LEARNED_FIELDS, AttentionOptions, learned_fields
from foci.gpu.compilation import LAUNCH_COLLECTOR
from foci.masks import kernel_inputs
from foci.masks.kernel_inputs import UNLIMITED
from foci.runtime.double_backward import forbid_double_backward
from foci.runtime.operators import operator
from foci.runtime.tensor_cache import cache_permanently
from foci.runtime.tracing import is_traced
from foci.scores import LN_2, Additive, Dot

MAX_KERNEL_WIDTH = 256

# A row table has 2 clip + 1 columns: with more than these it would be as large as the attention matrix.
MAX_RELATIVE_CLIP = 512
MAX_BUCKET_DISTANCE = 1024

OPTIONS_SCHEMA = (
    "Tensor? table, Tensor? buckets, Tensor? keys, Tensor? values, Tensor? slopes, Tensor? bias, Tensor? sink,"
    " Tensor? lengths, Tensor? key_ranges, Tensor? query_ids, Tensor? key_ids, Tensor? dense, Tensor? seed,"
    " bool causal, int left, int right, int always, int stop, int padded, float scale, float softcap, float dropout"
)

OPERATOR_INPUTS = ("q", "k", "v", *AttentionOptions._fields)
INPUT_INDEX = {name: index for index, name in enumerate(OPERATOR_INPUTS)}
SCALAR_INPUTS = ("causal", "left", "right", "always", "stop", "padded", "scale", "softcap", "dropout")


def refuses(call: Call) -> list[str]:
    """The reasons why these kernels cannot run the call. backends.triton checks device and torch.func transforms."""
    return [*distance_bias_refusals(call), *tensor_refusals(call), *kernel_inputs.refuses(call)]


def distance_bias_refusals(call: Call) -> list[str]:
    bias, reasons = call.bias, []
    if isinstance(bias, Relative):
        clip = bias.keys.shape[-2] // 2
        if not 0 < clip <= MAX_RELATIVE_CLIP:
            reasons.append(f"the kernels support Relative with a clip of 1 to {MAX_RELATIVE_CLIP}, got {clip}")
        if bias.values is not None and call.dropout:
            reasons.append("dropout together with Relative values is not supported")
        if not isinstance(call.score, Dot):
            reasons.append(f"Relative together with the score {type(call.score).__name__} is not supported")
    elif isinstance(bias, Buckets) and bias.max_distance > MAX_BUCKET_DISTANCE:
        reasons.append(
            f"the kernels support Buckets up to a distance of {MAX_BUCKET_DISTANCE}, got {bias.max_distance}"
        )
    if bias is not None and not isinstance(bias, DenseBias) and call.positions is not None:
        reasons.append("given positions with a distance bias are not supported")
    return reasons


def tensor_refusals(call: Call) -> list[str]:
    reasons = []
    if isinstance(call.bias, DenseBias) and call.bias.entries.dtype not in KERNEL_DTYPES:
        reasons.append(f"a bias of {call.bias.entries.dtype} is not supported".replace("torch.", ""))
    if isinstance(call.score, Additive):
        reasons.append("an additive score is not supported")
    if call.q.dtype not in KERNEL_DTYPES:
        reasons.append(f"{call.q.dtype} is not supported".removeprefix("torch."))
    if call.q.dtype == torch.bfloat16 and call.q.device.type == "cpu":
        reasons.append("Triton's interpreter does not support bfloat16")
    width = max(call.q.shape[-1], call.k.shape[-1], call.v.shape[-1])
    if width > MAX_KERNEL_WIDTH:
        reasons.append(f"the kernels support widths up to {MAX_KERNEL_WIDTH}, got {width}")
    if 0 in call.q.shape or 0 in call.k.shape or 0 in call.v.shape:
        reasons.append("query, key or value is empty")
    if call.dropout and (call.batch_ids is not None or call.head_ids is not None):
        reasons.append("dropout in a part of a call is not supported")
    return reasons


def is_repeatable(call: Call) -> bool:
    """Whether later calls of the same layout differ in addresses only: four dimensions, contiguous rows, no table."""
    aligned = call.q.stride(-1) == call.k.stride(-1) == call.v.stride(-1) == 1
    return aligned and call.sizes.batch == call.q.shape[:1] and call.sizes.heads is not None and call.bias is None


def adds_sink(call: Call) -> bool:
    """Whether `run_with_sink` supports the call: the kernels of row tables have no sinks."""
    return not isinstance(call.bias, Buckets | Relative)


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    return run_inputs(call, operator_inputs(call))


def run_with_sink(call: Call) -> tuple[Tensor, Tensor | None]:
    """The same with the sink of the call, in the output and in the log-sum-exp."""
    return run_inputs(call, operator_inputs(call, call.sink))


def run_inputs(call: Call, inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
    if is_traced(call.q):
        out, peaks, log_sums = kernel_attention(*inputs)
    elif call.needs_grad:
        out, peaks, log_sums = KernelAttention.apply(*inputs)  # type: ignore[no-untyped-call]
    else:
        q, k, v, *options = inputs
        out, peaks, log_sums = launch.forward(q, k, v, AttentionOptions(*options))
    return out, (peaks.detach() + log_sums) * LN_2 if call.needs_lse else None


def operator_inputs(call: Call, sink: Tensor | None = None) -> tuple[Any, ...]:
    """What the operators take: q, k, v and the fields of AttentionOptions."""
    dot = call.with_dot()
    assert dot is not None and isinstance(dot.score, Dot)
    seed = call.seed if call.dropout else None
    scale, softcap = dot.score.factor(dot.q.shape[-1]), float(dot.score.softcap or 0.0)
    if isinstance(call.bias, Buckets | Relative):
        masks = kernel_inputs.build_kernel_masks(call)
        tensors: Sequence[Tensor | None] = (None, masks.key_ranges, masks.query_ids, masks.key_ids, masks.dense)
        limits = (masks.causal, UNLIMITED, UNLIMITED, 0, UNLIMITED, 0)
    else:
        keys = kernel_inputs.find_visible_keys(call)
        tensors = (keys.lengths, keys.key_ranges, keys.query_ids, keys.key_ids, keys.dense)
        limits = (False, keys.left, keys.right, keys.always, keys.stop, keys.padded)
    sink = None if sink is None else sink.float()
    return dot.q, dot.k, dot.v, *bias_tensors(call), sink, *tensors, seed, *limits, scale, softcap, call.dropout


def bias_tensors(call: Call) -> tuple[Tensor | None, ...]:
    """The fields table, buckets, keys, values, slopes and bias of AttentionOptions, for the heads of the call."""
    bias, heads = call.bias, None if call.head_ids is None else call.head_index.flatten()
    if isinstance(bias, Buckets):
        table = bias.table if heads is None else bias.table[:, heads]
        numbers = table.shape[0], bias.bidirectional, bias.max_distance
        buckets = cache_permanently(
            (bucket_by_distance, *numbers), table, lambda: bucket_by_distance(*numbers, table.device)
        )
        return table, buckets, None, None, None, None
    if isinstance(bias, Relative):
        tables = (bias.keys, bias.values)
        chosen = (t if t is None or t.dim() == 2 or heads is None else t[heads] for t in tables)
        return None, None, *chosen, None, None
    if bias is None:
        return None, None, None, None, None, None
    if isinstance(bias, DenseBias):
        return None, None, None, None, None, kernel_inputs.select_dense_entries(bias.entries, call)
    assert isinstance(bias, ALiBi) and bias.slopes is not None
    return None, None, None, None, bias.slopes if heads is None else bias.slopes[heads], None


def bucket_by_distance(buckets: int, bidirectional: bool, max_distance: int, device: torch.device) -> Tensor:
    """The bucket of every distance from -max_distance to max_distance: (W,). Larger distances share the last bucket."""
    bias = Buckets(torch.empty(buckets, 1, device=device), bidirectional, max_distance)
    return bias.bucket(torch.arange(-max_distance, max_distance + 1, device=device))


@operator("attention", f"(Tensor q, Tensor k, Tensor v, {OPTIONS_SCHEMA}) -> (Tensor, Tensor, Tensor)")
def kernel_attention(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the output (B, H, Tq, Dv) and the log-sum-exp in base 2 as peaks + log_sums, (B, H, Tq) each.

    `peaks` is the largest logit of a row. The gradient of the log-sum-exp goes to `log_sums` alone.
    """
    return launch.forward(q, k, v, AttentionOptions(*options))


@kernel_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return launch.allocate_results(q, v)


@operator(
    "attention_backward",
    "(Tensor d_out, Tensor d_log_sums, Tensor out, Tensor peaks, Tensor log_sums, bool bias_gradients,"
    f" Tensor q, Tensor k, Tensor v, {OPTIONS_SCHEMA}) -> Tensor[]",
)
def kernel_attention_backward(
    d_out: Tensor, d_log_sums: Tensor, out: Tensor, peaks: Tensor, log_sums: Tensor, bias_gradients: bool, *inputs: Any
) -> list[Tensor]:
    """Compute the gradients of q, k, v and, with bias_gradients, of the learned tensors of the bias."""
    q, k, v, *options = inputs
    return launch.backward(d_out, d_log_sums, out, peaks, log_sums, bias_gradients, q, k, v, AttentionOptions(*options))


@kernel_attention_backward.register_fake
def _(
    d_out: Tensor, d_log_sums: Tensor, out: Tensor, peaks: Tensor, log_sums: Tensor, bias_gradients: bool, *inputs: Any
) -> list[Tensor]:
    q, k, v, *options = inputs
    return launch.allocate_gradients(q, k, v, AttentionOptions(*options), bias_gradients)


def setup_attention_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.scalars = inputs[: -len(SCALAR_INPUTS)], inputs[-len(SCALAR_INPUTS) :]
    ctx.save_for_backward(*output, *tensors)


def differentiate_attention(ctx: Any, d_out: Tensor, d_peaks: Tensor, d_log_sums: Tensor) -> tuple[Tensor | None, ...]:
    out, peaks, log_sums, *tensors = ctx.saved_tensors
    bias_gradients = needs_bias_gradients(ctx)
    gradients = kernel_attention_backward(
        d_out, d_log_sums, out, peaks, log_sums, bias_gradients, *tensors, *ctx.scalars
    )
    return place_gradients(ctx, gradients, AttentionOptions(*tensors[3:], *ctx.scalars), bias_gradients)


def needs_bias_gradients(ctx: Any) -> bool:
    """Whether a learned tensor of the bias needs a gradient."""
    return any(ctx.needs_input_grad[INPUT_INDEX[name]] for name in LEARNED_FIELDS)


def place_gradients(
    ctx: Any, gradients: Sequence[Tensor | None], options: AttentionOptions, bias_gradients: bool
) -> tuple[Tensor | None, ...]:
    """Arrange the gradients in the order of the inputs; None where no gradient is needed."""
    placed: list[Tensor | None] = [None] * len(OPERATOR_INPUTS)
    for name, gradient in zip(("q", "k", "v", *learned_fields(options, bias_gradients)), gradients, strict=True):
        placed[INPUT_INDEX[name]] = gradient if ctx.needs_input_grad[INPUT_INDEX[name]] else None
    return tuple(placed)


def run_empty_backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> None:
    """The backward of uninitialized results, to collect its launches."""
    out, peaks, log_sums = launch.allocate_results(q, v)
    launch.backward(out, None, out, peaks, log_sums, needs_bias_gradients(ctx), q, k, v, options)


kernel_attention.register_autograd(differentiate_attention, setup_context=setup_attention_context)


class KernelAttention(torch.autograd.Function):
    """The operators above without dispatch, for eager mode: dispatching an operator costs more than a small call."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        q, k, v, *options = inputs
        LAUNCH_COLLECTOR.run_later = lambda: run_empty_backward(ctx, q, k, v, AttentionOptions(*options))
        try:
            output = launch.forward(q, k, v, AttentionOptions(*options))
        finally:
            LAUNCH_COLLECTOR.run_later = None
        setup_attention_context(ctx, inputs, output)
        # Do not allocate zeros for the gradient of an unused log-sum-exp.
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(
        ctx: Any, d_out: Tensor | None, d_peaks: Tensor | None, d_log_sums: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        out, peaks, log_sums, q, k, v, *tensors = ctx.saved_tensors
        options, bias_gradients = AttentionOptions(*tensors, *ctx.scalars), needs_bias_gradients(ctx)
        d_out = torch.zeros_like(out) if d_out is None else d_out
        gradients = launch.backward(d_out, d_log_sums, out, peaks, log_sums, bias_gradients, q, k, v, options)
        learned = (getattr(options, name) for name in LEARNED_FIELDS)
        guarded = forbid_double_backward(gradients, d_out, d_log_sums, q, k, v, *learned)
        return place_gradients(ctx, guarded, options, bias_gradients)

"""Attention in compiled C (kernels/c/attention.c): the fastest for masks on a CPU, forward and backward.

It reads and computes only the key ranges that the queries see, in float32, without the matrix.

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width, Dv value width.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from foci.arguments import KERNEL_DTYPES, Call
from foci.backends import blocked
from foci.backends.mask_struct import MaskStruct, broadcast_strides, build_mask_tensors, fill_mask_struct
from foci.masks import kernel_inputs
from foci.masks.base import DenseMask
from foci.runtime import native
from foci.runtime.checks import PLAIN_TENSOR_TYPES
from foci.runtime.tracing import is_traced
from foci.scores import LN_2, Dot

NAME = "cpu_c"

# From these sizes on it is faster than PyTorch's kernel, which has less overhead.
MIN_FASTER_QUERIES = 8
MIN_FASTER_ENTRIES = 2**17

# Minimum number of matrix entries per thread: less work does not pay for the overhead.
ATTENTION_ENTRIES_PER_THREAD = 2**14

TENSOR_FIELDS = ("queries", "keys", "values", "out", "d_out", "d_queries", "d_keys", "d_values")
SIZE_FIELDS = ("batch", "heads", "group", "query_count", "key_count", "width", "value_width", "parts")


class TensorStruct(ctypes.Structure):
    """A tensor in kernels/c/attention.c, field by field."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "head", "token", "half")),
    )


class AttentionStruct(ctypes.Structure):
    """The argument of the functions in kernels/c/attention.c, field by field."""

    _fields_ = (
        ("masks", MaskStruct),
        *((name, TensorStruct) for name in TENSOR_FIELDS),
        *((name, ctypes.c_void_p) for name in ("lse", "d_lse")),
        *((name, ctypes.c_int64) for name in SIZE_FIELDS),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("next", "failed")),
    )


def refuses(call: Call) -> list[str]:
    if call.q.device.type != "cpu":
        return ["our C kernels run on CPUs only"]
    if call.is_vmapped or call.is_transformed or is_traced(call.q):
        return ["torch.compile and torch.func transforms are not supported"]
    reasons = call_refusals(call) + kernel_inputs.refuses(call)
    # Checked last: it may compile the library, which takes seconds.
    missing = None if reasons else native.why_unavailable("attention")
    return reasons if missing is None else [missing]


def is_faster_than_sdpa(call: Call) -> bool:
    """Whether the library is available and faster than PyTorch's kernel; that one reads a dense mask faster."""
    return (
        not is_traced(call.q)
        and is_large(call.q, call.k)
        and not isinstance(call.mask, DenseMask)
        and not refuses(call)
    )


def is_large(q: Tensor, k: Tensor) -> bool:
    entries = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    return q.shape[2] >= MIN_FASTER_QUERIES and entries >= MIN_FASTER_ENTRIES and q.dtype in KERNEL_DTYPES


def call_refusals(call: Call) -> list[str]:
    reasons = []
    if not call.score.is_dot_product:
        reasons.append(f"the score {type(call.score).__name__} is not a dot product")
    elif isinstance(call.score, Dot) and call.score.softcap is not None:
        reasons.append("softcap is not supported")
    if call.bias is not None:
        reasons.append(f"the bias {type(call.bias).__name__} is not supported")
    if call.dropout:
        reasons.append("dropout is not supported")
    if call.q.dtype not in KERNEL_DTYPES:
        reasons.append(f"{call.q.dtype} is not supported")
    if 0 in call.q.shape or 0 in call.k.shape or 0 in call.v.shape:
        reasons.append("query, key or value is empty")
    if any(type(tensor) not in PLAIN_TENSOR_TYPES for tensor in (call.q, call.k, call.v)):
        reasons.append("query, key and value must be plain tensors")
    return reasons


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    dot = call.with_dot()
    assert dot is not None and isinstance(dot.score, Dot)
    step = native.load_library("attention").lanes()
    q, k, v = (prepare_tensor(x, step) for x in (dot.q, dot.k, dot.v))
    dot = replace(dot, q=q, k=k, v=v, score=Dot(dot.score.factor(dot.q.shape[-1])))
    if call.needs_grad:
        out, lse = CompiledAttention.apply(dot, q, k, v)  # type: ignore[no-untyped-call]
    else:
        out, lse = attend(dot, build_mask_tensors(dot))
        lse = lse.mul_(LN_2) if call.needs_lse else None
    out = out if out.shape[-1] == call.v.shape[-1] else out[..., : call.v.shape[-1]]
    return out.to(call.q.dtype), lse


def prepare_tensor(x: Tensor, step: int) -> Tensor:
    """The tensor as float32 or bfloat16, its width padded with zeros to a multiple of `step`, with contiguous rows."""
    x = x.float() if x.dtype == torch.float16 else x
    x = pad(x, (0, -x.shape[-1] % step)) if x.shape[-1] % step else x
    return x if x.stride(-1) == 1 else x.contiguous()


class CompiledAttention(torch.autograd.Function):
    """Attention with gradients through the output and the log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        masks = build_mask_tensors(call)
        out, lse = attend(call, masks)
        ctx.save_for_backward(q, k, v, out, lse)
        nothing = q.new_zeros(0)
        ctx.call, ctx.masks = replace(call, q=nothing, k=nothing, v=nothing), masks
        ctx.set_materialize_grads(False)
        return out, lse * LN_2

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        # Read once: under activation checkpointing each read recomputes the saved tensors.
        q, k, v, out, lse = ctx.saved_tensors
        if d_out is None and d_lse is None:
            return (None,) * 4
        call = replace(ctx.call, q=q, k=k, v=v)
        if torch.is_grad_enabled():
            return (None, *blocked.compute_differentiable_gradients(call, (d_out, d_lse)))
        d_out = torch.zeros_like(out) if d_out is None else d_out
        gradients = differentiate(call, ctx.masks, out, lse, d_out, d_lse)
        return (None, *(x if need else None for x, need in zip(gradients, ctx.needs_input_grad[1:], strict=True)))


def attend(call: Call, masks: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(B, H, Tq, Dv) and the log-sum-exp in base 2, (B, H, Tq), without gradients."""
    batch, heads, queries = call.q.shape[:3]
    # (B, Tq, H, Dv) in memory, so that concatenating the heads needs no copy.
    out = call.q.new_empty(batch, queries, heads, call.v.shape[-1]).transpose(1, 2)
    lse = call.q.new_empty(batch, heads, queries, dtype=torch.float32)
    tensors = {"queries": call.q, "keys": call.k, "values": call.v, "out": out}
    run_c_function("compute_attention", call, masks, tensors, lse=lse.data_ptr(), parts=1)
    return out, lse


def differentiate(
    call: Call, masks: dict[str, Tensor], out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    parts = choose_part_count(call)
    d_q = call.q.new_empty(parts, *call.q.shape, dtype=torch.float32)
    d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (call.k, call.v))
    tensors = {"queries": call.q, "keys": call.k, "values": call.v, "out": out}
    d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
    tensors |= {"d_out": d_out, "d_queries": d_q.flatten(0, 1), "d_keys": d_k, "d_values": d_v}
    d_lse = None if d_lse is None else d_lse.contiguous()
    pointers = {"lse": lse.data_ptr(), "d_lse": None if d_lse is None else d_lse.data_ptr()}
    run_c_function("compute_gradients", call, masks, tensors, **pointers, parts=parts)
    return (d_q[0] if parts == 1 else d_q.sum(0)).to(call.q.dtype), d_k, d_v


def run_c_function(
    name: str, call: Call, masks: dict[str, Tensor], tensors: dict[str, Tensor], **fields: int | None
) -> None:
    assert isinstance(call.score, Dot)
    struct = AttentionStruct(
        masks=fill_mask_struct(call, masks),
        **{name: fill_tensor_struct(tensor) for name, tensor in tensors.items()},
        **struct_sizes(call),
        scale=call.score.factor(call.q.shape[-1]),
        **fields,
    )
    native.run_in_threads(getattr(native.load_library("attention"), name), struct, choose_thread_count(call))
    if struct.failed:
        raise MemoryError("out of memory for the buffers of attention")


def fill_tensor_struct(tensor: Tensor) -> TensorStruct:
    return TensorStruct(tensor.data_ptr(), *broadcast_strides(tensor)[:3], int(tensor.dtype == torch.bfloat16))


def struct_sizes(call: Call) -> dict[str, int]:
    return {
        "batch": call.q.shape[0],
        "heads": call.q.shape[1],
        "group": call.group,
        "query_count": call.q.shape[2],
        "key_count": call.k.shape[2],
        "width": call.q.shape[3],
        "value_width": call.v.shape[3],
    }


def choose_thread_count(call: Call) -> int:
    return native.count_threads(call.q.shape[:3].numel() * call.k.shape[2], ATTENTION_ENTRIES_PER_THREAD)


def choose_part_count(call: Call) -> int:
    """Splits the keys into parts, a few per thread, where the heads alone do not divide evenly among the threads."""
    pieces, threads = call.k.shape[:2].numel(), choose_thread_count(call)
    if threads == 1 or pieces % threads == 0 or pieces >= 8 * threads:
        return 1
    return min(-(-4 * threads // pieces), call.k.shape[2])

"""Attention together with its whole matrix in compiled C: the fastest way on a CPU if there is a C compiler.

B batch, H heads, G key/value heads, Tq queries, Tk keys, Dv value width.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn.functional import pad

from foci.arguments import KERNEL_DTYPES, Call
from foci.backends.mask_struct import (
    MaskStruct,
    broadcast_strides,
    build_mask_tensors,
    data_pointers,
    fill_mask_struct,
)
from foci.biases import DenseBias
from foci.masks import kernel_inputs
from foci.runtime import native
from foci.runtime.checks import PLAIN_TENSOR_TYPES
from foci.runtime.tracing import is_traced
from foci.scores import LOG2_E, Dot
from foci.statistics import cpu_c

# Entries of a block of rows: half of a typical L2 cache.
BLOCK_ENTRIES = 2**17
MAX_BLOCK_ROWS = 64

# Lower finite logits cannot be distinguished from masked ones.
MIN_FINITE_LOGIT = -1e28

TENSOR_FIELDS = ("queries", "keys", "values", "added", "out", "matrix")
SIZE_FIELDS = (
    *("pairs", "heads", "group", "query_count", "key_count", "padded", "width", "value_width", "rows", "averaged"),
    *("added_batch", "added_head", "added_row", "added_column"),
)


class DenseAttentionStruct(ctypes.Structure):
    """The argument struct of kernels/c/dense_attention.c."""

    _fields_ = (
        ("masks", MaskStruct),
        *((name, ctypes.c_void_p) for name in TENSOR_FIELDS),
        *((name, ctypes.c_int64) for name in SIZE_FIELDS),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("next", "failed")),
    )


def supports_call(call: Call) -> bool:
    """Whether the C kernel supports the call."""
    plain = type(call.score) is Dot and call.score.softcap is None and call.sink is None and not call.dropout
    if not plain or call.q.device.type != "cpu" or call.q.dtype not in KERNEL_DTYPES or call.is_transformed:
        return False
    if is_traced(call.q) or any(type(tensor) not in PLAIN_TENSOR_TYPES for tensor in (call.q, call.k, call.v)):
        return False
    if call.bias is not None and not (isinstance(call.bias, DenseBias) and supports_bias(call.bias.entries)):
        return False
    empty = 0 in call.q.shape or 0 in call.k.shape or 0 in call.v.shape
    return not empty and not kernel_inputs.refuses(call) and native.why_unavailable("dense_attention") is None


def supports_bias(entries: Tensor) -> bool:
    """Whether no finite entry is so low that the kernel would mask it."""
    finite_but_low = (entries < MIN_FINITE_LOGIT) & (entries > -torch.inf)
    return type(entries) in PLAIN_TENSOR_TYPES and not bool(finite_but_low.any())


def compute_with_matrix_c(call: Call, average: bool) -> tuple[Tensor, Tensor]:
    """(B, H, Tq, Dv) and (B, H, Tq, Tk), or (B, Tq, Tk) averaged over the heads, of a supported call."""
    library = native.load_library("dense_attention")
    batch, heads, queries, keys = *call.q.shape[:3], call.k.shape[2]
    masks = build_mask_tensors(call)
    tensors = prepare_inputs(call, library.panel_keys(), library.value_step())
    lead = (batch,) if average else (batch, heads)
    tensors["out"] = tensors["queries"].new_empty(batch, queries, heads, tensors["values"].shape[-1])
    tensors["matrix"] = tensors["queries"].new_empty(*lead, queries, keys)
    library.request_huge_pages(ctypes.c_void_p(tensors["matrix"].data_ptr()), ctypes.c_int64(tensors["matrix"].nbytes))
    assert isinstance(call.score, Dot)
    arguments = DenseAttentionStruct(
        masks=fill_mask_struct(call, masks),
        **data_pointers(tensors),
        **argument_sizes(call, tensors, average, library.rows_per_product()),
        scale=call.score.factor(call.q.shape[-1]) * LOG2_E,
    )
    threads = native.count_threads(batch * heads * queries * keys, cpu_c.STATISTICS_ENTRIES_PER_THREAD)
    native.run_in_threads(library.compute_dense_attention, arguments, threads)
    if arguments.failed:
        raise MemoryError("out of memory for a block of rows of the attention matrix")
    # (B, Tq, H, Dv) in memory, so that concatenating the heads needs no copy.
    out = tensors["out"][..., : call.v.shape[-1]].transpose(1, 2)
    return out.to(call.q.dtype), tensors["matrix"]


def prepare_inputs(call: Call, panel: int, value_step: int) -> dict[str, Tensor]:
    """Queries, keys, values and bias in the layout of the kernel."""
    padding = -call.v.shape[-1] % value_step
    inputs = {
        "queries": call.q.float().contiguous(),
        "keys": cpu_c.pack_keys(call.k.float(), panel),
        "values": (pad(call.v.float(), (0, padding)) if padding else call.v.float()).contiguous(),
    }
    if isinstance(call.bias, DenseBias):
        inputs["added"] = kernel_inputs.select_dense_entries(call.bias.entries, call).float()
    return inputs


def argument_sizes(call: Call, tensors: dict[str, Tensor], average: bool, step: int) -> dict[str, int]:
    keys = tensors["keys"]
    padded = keys.shape[2] * keys.shape[4]
    steps = broadcast_strides(tensors["added"]) if "added" in tensors else [0] * 4
    rows = min(MAX_BLOCK_ROWS, BLOCK_ENTRIES // call.k.shape[2], call.q.shape[2]) // step * step
    return {
        "pairs": call.q.shape[:2].numel(),
        "heads": call.q.shape[1],
        "group": call.group,
        "query_count": call.q.shape[2],
        "key_count": call.k.shape[2],
        "padded": padded,
        "width": keys.shape[3],
        "value_width": tensors["values"].shape[-1],
        "rows": max(rows, step),
        "averaged": int(average),
        **dict(zip(SIZE_FIELDS[-4:], steps, strict=True)),
    }

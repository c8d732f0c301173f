"""Statistics in one pass of compiled C (kernels/c/statistics.c): the fastest method on a CPU with a C compiler.

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from foci.arguments import KERNEL_DTYPES, Call
from foci.backends.additive_cpu import MAX_EXPONENTIAL_INPUT, has_exact_exponentials
from foci.backends.mask_struct import (
    MaskStruct,
    build_mask_tensors,
    data_pointers,
    fill_mask_struct,
    sequence_stride,
)
from foci.biases import ALiBi, Buckets
from foci.masks import kernel_inputs
from foci.runtime import native
from foci.runtime.checks import PLAIN_TENSOR_TYPES
from foci.runtime.tracing import is_vmapped
from foci.scores import LOG2_E, Additive, Dot
from foci.statistics.request import MAX_TOP_KEYS, Request

# Smaller calls are not worth a pass that first packs the keys.
MIN_QUERIES = 16
MIN_ENTRIES = 2**13

# Number of floats of the keys that are packed at a time: 64 MiB.
MAX_PACKED_NUMBERS = 2**24

# Minimum number of matrix entries per thread, and of rows per part: less work does not pay for the overhead.
STATISTICS_ENTRIES_PER_THREAD = 2**18
ROWS_PER_PART = 128

INPUT_FIELDS = (
    "queries",
    "given_keys",
    "keys",
    "lse",
    "query_positions",
    "key_positions",
    "slopes",
    "weight",
    "constants",
    "by_distance",
)
OUTPUT_FIELDS = ("entropy", "distance", "received", "picture", "largest_logit", "top_values", "top_keys")
STATISTICS_SIZE_FIELDS = (
    *("pairs", "heads", "group", "query_count", "key_count"),
    *("padded", "width", "parts", "top", "picture_rows", "picture_columns", "distances"),
)
POSITION_STRIDE_FIELDS = ("query_position_step", "key_position_step")
STRIDE_FIELDS = ("query_batch", "query_head", "query_row", "key_batch", "key_head", "key_row")


class StatisticsStruct(ctypes.Structure):
    """The struct of kernels/c/statistics.c, field by field."""

    _fields_ = (
        ("masks", MaskStruct),
        *((name, ctypes.c_void_p) for name in (*INPUT_FIELDS, *OUTPUT_FIELDS)),
        *((name, ctypes.c_int64) for name in (*STATISTICS_SIZE_FIELDS, *POSITION_STRIDE_FIELDS, *STRIDE_FIELDS)),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("next_packed", "next", "failed")),
    )


def refuses(call: Call, request: Request | None = None, averaged: bool = False) -> list[str]:
    """Why compiled C does not compute these statistics; empty where it does."""
    if call.q.device.type != "cpu":
        return [f"the queries are on {call.q.device.type}, not on the CPU"]
    if torch.compiler.is_compiling() or is_vmapped(call.q):
        return ["torch.compile and torch.func.vmap are not supported"]
    if any(type(tensor) not in PLAIN_TENSOR_TYPES for tensor in (call.q, call.k)):
        return [f"query and key must be plain tensors, got {type(call.q).__name__} and {type(call.k).__name__}"]
    reasons = []
    if call.q.dtype not in KERNEL_DTYPES:
        reasons.append(f"{call.q.dtype} is not supported")
    if call.bias is not None and not isinstance(call.bias, ALiBi | Buckets):
        reasons.append(f"the bias {type(call.bias).__name__} is not supported")
    if isinstance(call.bias, Buckets) and call.positions is not None:
        reasons.append("Buckets with given positions is not supported")
    if averaged:
        reasons.append("the mean over heads is not supported")
    if request is not None and request.top > MAX_TOP_KEYS:
        reasons.append(f"at most {MAX_TOP_KEYS} top keys are supported")
    if request is not None and request.picture is not None and request.picture[2] != "mean":
        reasons.append("a picture of maxima is not supported")
    reasons += size_refusals(call) or kernel_inputs.refuses(call)
    if not reasons and isinstance(call.score, Additive) and not has_exact_exponentials(call.q, call.k):
        reasons.append(f"an additive score with inputs beyond ±{MAX_EXPONENTIAL_INPUT:g} is not supported")
    # Checked last: it may compile the library, which takes a second.
    missing = None if reasons else native.why_unavailable("statistics")
    return reasons if missing is None else [missing]


def size_refusals(call: Call) -> list[str]:
    if call.q.shape[2] < MIN_QUERIES or call.q.shape[:3].numel() * call.k.shape[2] < MIN_ENTRIES:
        return [f"there are fewer than {MIN_QUERIES} queries or {MIN_ENTRIES:,} weights"]
    return []


def compute_statistics(call: Call, lse: Tensor, request: Request) -> dict[str, Tensor]:
    """Computes the requested statistics, without gradients, of a call that `refuses` accepts."""
    batch, heads = call.q.shape[:2]
    step = max(MAX_PACKED_NUMBERS // max(call.k.shape[1:].numel(), 1), 1)
    with torch.no_grad():
        if step >= batch:
            return compute_part(call, lse, request)
        places = [slice(start, min(start + step, batch)) for start in range(0, batch, step)]
        parts = [compute_part(call.select(place, slice(0, heads)), lse[place], request) for place in places]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def compute_part(call: Call, lse: Tensor, request: Request) -> dict[str, Tensor]:
    """Computes the statistics of some sequences with all of their heads."""
    library = native.load_library("statistics")
    threads, parts = choose_threads_and_parts(call, request)
    dot, inputs = prepare_score(call)
    assert isinstance(dot.score, Dot)
    inputs |= build_inputs(dot, lse, library.panel_keys(), library.chunk_keys())
    outputs = allocate_outputs(call, request, parts)
    if request.picture is not None:
        # Mostly new memory: the pictures of short sequences are larger than everything else.
        library.request_huge_pages(*address_and_size(outputs["picture"]))
    scale, softcap = base2_scales(dot.score, dot.q.shape[-1])
    mask_tensors = build_mask_tensors(call)
    struct = StatisticsStruct(
        masks=fill_mask_struct(call, mask_tensors),
        **data_pointers(inputs | outputs),
        **struct_sizes(call, request, parts, inputs),
        **input_strides(inputs),
        scale=scale,
        softcap=softcap,
    )
    native.run_in_threads(library.pack_keys, struct, threads)
    native.run_in_threads(library.compute_statistics, struct, threads)
    if struct.failed:
        raise MemoryError("out of memory for the row buffers of a pass over the attention matrix")
    return finish_outputs(request, outputs)


def address_and_size(tensor: Tensor) -> tuple[ctypes.c_void_p, ctypes.c_int64]:
    return ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64(tensor.nbytes)


def prepare_score(call: Call) -> tuple[Call, dict[str, Tensor]]:
    """The call as a dot product; for an additive score, exponentials, and its weight and constants as inputs."""
    if call.q.dtype != torch.float32 or call.k.dtype != torch.float32:
        call = replace(call, q=call.q.float(), k=call.k.float())
    if not isinstance(call.score, Additive):
        dot = call.with_dot()
        assert dot is not None
        return dot, {}
    weight = call.score.weight.float().expand(call.q.shape[1], -1) * LOG2_E
    inputs = {"weight": (weight * -2.0).contiguous(), "constants": weight.sum(-1)}
    return replace(call, q=(2.0 * call.q).exp_(), k=(2.0 * call.k).exp_(), score=Dot(1.0 / LOG2_E)), inputs


def choose_threads_and_parts(call: Call, request: Request) -> tuple[int, int]:
    """Return (threads, parts per pair): several parts per thread, because causal parts differ in work."""
    pairs, queries = call.q.shape[:2].numel(), call.q.shape[2]
    threads = native.count_threads(pairs * queries * call.k.shape[2], STATISTICS_ENTRIES_PER_THREAD)
    max_parts = -(-queries // ROWS_PER_PART)
    if request.picture is not None:
        max_parts = min(max_parts, request.picture[0])
    return threads, 1 if threads == 1 else min(-(-4 * threads // pairs), max_parts)


def build_inputs(call: Call, lse: Tensor, panel: int, chunk: int) -> dict[str, Tensor]:
    """The tensors from which the kernel computes the entries of the matrix, and memory for the packed keys."""
    q, k = call.q, call.k
    inputs = {
        "queries": q if q.stride(-1) == 1 else q.contiguous(),
        "given_keys": k if k.stride(-1) == 1 else k.contiguous(),
        "keys": k.new_empty(*k.shape[:2], -(-k.shape[2] // panel), k.shape[3], panel),
        "lse": lse.float().contiguous(),
    }
    if call.positions is not None:
        inputs |= build_positions(call, chunk)
    if isinstance(call.bias, ALiBi):
        assert call.bias.slopes is not None
        inputs["slopes"] = call.bias.slopes[call.head_index.flatten()].float() * LOG2_E
    if isinstance(call.bias, Buckets):
        inputs["by_distance"] = bias_by_distance(call, call.bias, chunk)
    return inputs


def build_positions(call: Call, chunk: int) -> dict[str, Tensor]:
    """Given positions as floats, those of the keys with zeros up to a multiple of `chunk`."""
    tile = call.full_tile()
    # Relative to the first key: far from 0, float32 cannot represent neighboring positions.
    origin = tile.key_position.amin()
    return {
        "query_positions": (tile.query_position - origin).float().flatten(1).contiguous(),
        "key_positions": pad((tile.key_position - origin).float().flatten(1), (0, -call.k.shape[2] % chunk)),
    }


def bias_by_distance(call: Call, bias: Buckets, beyond: int) -> Tensor:
    """The bias of each head for each distance between query and key; 0 beyond the last key."""
    distances = torch.arange(1 - call.k.shape[2], call.q.shape[2], device=call.q.device)
    added = bias.table[bias.bucket(distances)][:, call.head_index.flatten()].mT
    return pad(added.float() * LOG2_E, (0, beyond))


def pack_keys(k: Tensor, panel: int) -> Tensor:
    """(B, G, Tk, D) -> (B, G, panels, D, keys of a panel), as a product reads them; 0 beyond the last key."""
    whole = k.shape[2] // panel
    packed = k.new_empty(*k.shape[:2], -(-k.shape[2] // panel), k.shape[3], panel)
    packed[:, :, :whole] = k[:, :, : whole * panel].unflatten(2, (whole, panel)).mT
    if k.shape[2] > whole * panel:
        packed[:, :, -1] = pad(k[:, :, whole * panel :], (0, 0, 0, -k.shape[2] % panel)).mT
    return packed


def base2_scales(score: Dot, width: int) -> tuple[float, float]:
    """The factor of a product for a base-2 logit (with a softcap times 2 / softcap) and the base-2 softcap, or 0."""
    scale = score.factor(width) * LOG2_E
    return (scale, 0.0) if score.softcap is None else (2.0 * scale / score.softcap, score.softcap * LOG2_E)


def allocate_outputs(call: Call, request: Request, parts: int) -> dict[str, Tensor]:
    """Allocates the outputs: the kernel adds to `received` and overwrites the rest."""
    batch, heads, queries = call.q.shape[:3]
    new = call.q.new_zeros(batch, heads, 0, dtype=torch.float32).new_empty
    outputs = {}
    if request.entropy:
        outputs["entropy"] = new(batch, heads, queries)
    if request.distance:
        outputs["distance"] = new(batch, heads, queries)
    if request.received:
        outputs["received"] = new(batch, heads, parts, call.k.shape[2]).zero_()
    if request.picture is not None:
        outputs["picture"] = new(batch, heads, *request.picture[:2])
    if request.largest_logit:
        outputs["largest_logit"] = new(batch, heads, parts).fill_(-torch.inf)
    if request.top:
        outputs["top_values"] = new(batch, heads, queries, request.top)
        outputs["top_keys"] = new(batch, heads, queries, request.top, dtype=torch.int32)
    return outputs


def struct_sizes(call: Call, request: Request, parts: int, inputs: dict[str, Tensor]) -> dict[str, int]:
    keys = inputs["keys"]
    rows, columns = (0, 0) if request.picture is None else request.picture[:2]
    return {
        "pairs": call.q.shape[:2].numel(),
        "heads": call.q.shape[1],
        "group": call.group,
        "query_count": call.q.shape[2],
        "key_count": call.k.shape[2],
        "padded": keys.shape[2] * keys.shape[4],
        "width": keys.shape[3],
        "parts": parts,
        "top": request.top,
        "picture_rows": rows,
        "picture_columns": columns,
        "distances": inputs["by_distance"].shape[1] if "by_distance" in inputs else 0,
    }


def input_strides(inputs: dict[str, Tensor]) -> dict[str, int]:
    """The strides of queries and keys, and those of given positions from one sequence to the next."""
    strides = (*inputs["queries"].stride()[:3], *inputs["given_keys"].stride()[:3])
    given = [name for name in ("query_position", "key_position") if f"{name}s" in inputs]
    return dict(zip(STRIDE_FIELDS, strides, strict=True)) | {
        f"{name}_step": sequence_stride(inputs[f"{name}s"]) for name in given
    }


def finish_outputs(request: Request, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Combines the parts in a fixed order, so that equal calls give equal sums."""
    if request.received:
        received = outputs["received"]
        outputs["received"] = received.sum(2) if received.shape[2] > 1 else received.squeeze(2)
    if request.largest_logit:
        outputs["largest_logit"] = outputs["largest_logit"].amax(-1) / LOG2_E
    if request.top and not request.int32_keys:
        outputs["top_keys"] = outputs["top_keys"].long()
    return outputs

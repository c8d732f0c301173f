"""Every statistic in one pass of compiled C: the fastest way on a CPU, where there is a C compiler.

B batch, H heads, G key heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from foci.arguments import Call
from foci.backends.additive_cpu import MAX_EXPONENTIAL_INPUT, has_exact_exponentials
from foci.backends.strips import LOG2_E
from foci.biases import ALiBi, Buckets
from foci.gpu import mask_inputs
from foci.masks.kinds import Causal
from foci.runtime import native
from foci.scores import Additive, Dot
from foci.statistics import picture
from foci.statistics.request import Request
from foci.statistics.streaming import finite_lse

PLAIN = (Tensor, torch.nn.Parameter)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# As in kernels/strip.c.
MOST_TOP = 64

# Fewer are not worth a pass that first lays out the keys.
MIN_QUERIES = 16
MIN_ENTRIES = 2**16

# Keys that are laid out at once, in numbers: 64 MiB.
MAX_PACKED_NUMBERS = 2**24

# Entries that are worth a thread, and rows that are worth a part.
ENTRIES_PER_THREAD = 2**18
ROWS_PER_PART = 128

INPUT_FIELDS = (
    "queries",
    "keys",
    "shift",
    "query_places",
    "key_places",
    "slopes",
    "weight",
    "constants",
    "by_distance",
)
OUTPUT_FIELDS = ("entropy", "distance", "received", "picture", "largest", "top_values", "top_keys")
SIZE_FIELDS = (
    *("pairs", "heads", "group", "query_count", "key_count"),
    *("padded", "width", "parts", "top", "picture_rows", "picture_columns", "distances"),
)
POSITION_STRIDE_FIELDS = ("query_place_step", "key_place_step")
DENSE_STRIDE_FIELDS = ("seen_batch", "seen_head", "seen_row", "seen_column")


class MaskStruct(ctypes.Structure):
    """What kernels/masks.h is given, in its order."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("runs", "query_ids", "key_ids", "seen")),
        *((name, ctypes.c_int64) for name in ("query_count", "key_count", "run_count")),
        *((name, ctypes.c_int64) for name in ("run_step", "query_id_step", "key_id_step", *DENSE_STRIDE_FIELDS)),
    )


class StatisticsStruct(ctypes.Structure):
    """What kernels/strip.c is given, in its order."""

    _fields_ = (
        ("masks", MaskStruct),
        *((name, ctypes.c_void_p) for name in (*INPUT_FIELDS, *OUTPUT_FIELDS)),
        *((name, ctypes.c_int64) for name in (*SIZE_FIELDS, *POSITION_STRIDE_FIELDS)),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        ("next", ctypes.c_int64),
        ("failed", ctypes.c_int64),
    )


def refuses(call: Call, wanted: Request | None = None, averaged: bool = False) -> list[str]:
    """Why this pass does not measure the call; empty where it does."""
    if call.q.device.type != "cpu":
        return [f"the queries are on {call.q.device.type}, not on the cpu"]
    if torch.compiler.is_compiling() or mask_inputs.is_inside_vmap(call):
        return ["it does not run inside torch.compile or torch.func.vmap"]
    if any(type(tensor) not in PLAIN for tensor in (call.q, call.k)):
        return [f"it reads memory, but got {type(call.q).__name__} and {type(call.k).__name__}"]
    reasons = []
    if call.q.dtype not in DTYPES:
        reasons.append(f"{call.q.dtype}")
    if call.bias is not None and not isinstance(call.bias, ALiBi | Buckets):
        reasons.append(f"the bias {type(call.bias).__name__}")
    if isinstance(call.bias, Buckets) and call.positions is not None:
        reasons.append("Buckets with positions of your own")
    if averaged:
        reasons.append("a mean over the heads")
    if wanted is not None and wanted.top > MOST_TOP:
        reasons.append(f"more than the {MOST_TOP} heaviest keys")
    if wanted is not None and wanted.picture is not None and wanted.picture[2] != "mean":
        reasons.append("a picture of maxima")
    reasons += size_refusals(call) or mask_inputs.refuses(call)
    if not reasons and isinstance(call.score, Additive) and not has_exact_exponentials(call.q, call.k):
        reasons.append(f"an additive score of numbers beyond {MAX_EXPONENTIAL_INPUT:g}")
    # Asked last: the answer may cost a second of compiling.
    missing = None if reasons else native.why_unavailable("strip")
    return reasons if missing is None else [missing]


def size_refusals(call: Call) -> list[str]:
    if call.q.shape[2] < MIN_QUERIES or call.q.shape[:3].numel() * call.k.shape[2] < MIN_ENTRIES:
        return [f"fewer than {MIN_QUERIES} queries or {MIN_ENTRIES:,} weights"]
    return []


def compute_statistics(call: Call, lse: Tensor, wanted: Request) -> dict[str, Tensor]:
    """The wanted statistics, without gradients, of a call that this pass does not refuse."""
    batch, heads = call.q.shape[:2]
    step = max(MAX_PACKED_NUMBERS // max(call.k.shape[1:].numel(), 1), 1)
    with torch.no_grad():
        if step >= batch:
            return compute_part(call, lse, wanted)
        places = [slice(start, min(start + step, batch)) for start in range(0, batch, step)]
        parts = [compute_part(call.select(place, slice(0, heads)), lse[place], wanted) for place in places]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def compute_part(call: Call, lse: Tensor, wanted: Request) -> dict[str, Tensor]:
    """Some sequences, all of their heads."""
    library = native.load_library("strip")
    threads, parts = choose_threads_and_parts(call, wanted)
    dot, given = prepare_score(replace(call, q=call.q.float(), k=call.k.float()))
    assert isinstance(dot.score, Dot)
    given |= build_inputs(dot, lse, library.panel_keys(), library.chunk_keys())
    found = allocate_outputs(call, wanted, parts)
    scale, softcap = base2_scales(dot.score, dot.q.shape[-1])
    seen = build_mask_tensors(call)
    work = StatisticsStruct(
        masks=fill_mask_struct(call, seen),
        **data_pointers(given | found),
        **struct_sizes(call, wanted, parts, given),
        **{f"{name}_step": sequence_stride(given[f"{name}s"]) for name in ("query_place", "key_place")},
        scale=scale,
        softcap=softcap,
    )
    native.run_in_threads(library.measure, work, threads)
    if work.failed:
        raise MemoryError("there is no memory for the few rows that a pass over the attention matrix keeps")
    return finish_outputs(call, wanted, found)


def prepare_score(call: Call) -> tuple[Call, dict[str, Tensor]]:
    """The call with the vectors that are multiplied; of an additive score exponentials, and what is done with them."""
    if not isinstance(call.score, Additive):
        dot = call.with_dot()
        assert dot is not None
        return dot, {}
    weight = call.score.weight.float().expand(call.q.shape[1], -1) * LOG2_E
    given = {"weight": (weight * -2.0).contiguous(), "constants": weight.sum(-1)}
    return replace(call, q=(2.0 * call.q).exp_(), k=(2.0 * call.k).exp_(), score=Dot(1.0 / LOG2_E)), given


def choose_threads_and_parts(call: Call, wanted: Request) -> tuple[int, int]:
    """How many threads, and the parts of each pair's rows: a few for each thread, as causal parts differ in work."""
    pairs, queries = call.q.shape[:2].numel(), call.q.shape[2]
    threads = min(torch.get_num_threads(), max(pairs * queries * call.k.shape[2] // ENTRIES_PER_THREAD, 1))
    most = (
        -(-queries // ROWS_PER_PART) if wanted.picture is None else min(-(-queries // ROWS_PER_PART), wanted.picture[0])
    )
    return threads, 1 if threads == 1 else min(-(-4 * threads // pairs), most)


def build_inputs(call: Call, lse: Tensor, panel: int, chunk: int) -> dict[str, Tensor]:
    """What the entries of the matrix are made of."""
    where = call.full_tile()
    # Counted from the first key: far from 0 floats tell no two places apart.
    origin = where.key_position.amin()
    given = {
        "queries": call.q.contiguous(),
        "keys": pack_keys(call.k, panel),
        "shift": (finite_lse(lse) * LOG2_E).float().contiguous(),
        "query_places": (where.query_position - origin).float().flatten(1).contiguous(),
        "key_places": pad((where.key_position - origin).float().flatten(1), (0, -call.k.shape[2] % chunk)),
    }
    if isinstance(call.bias, ALiBi):
        assert call.bias.slopes is not None
        given["slopes"] = call.bias.slopes[call.heads.flatten()].float() * LOG2_E
    if isinstance(call.bias, Buckets):
        given["by_distance"] = bias_by_distance(call, call.bias, chunk)
    return given


def bias_by_distance(call: Call, bias: Buckets, beyond: int) -> Tensor:
    """What the bias adds for each distance between a key and a query, head by head, and 0 beyond the last key."""
    distances = torch.arange(1 - call.k.shape[2], call.q.shape[2], device=call.q.device)
    added = bias.table[bias.bucket(distances)][:, call.heads.flatten()].mT
    return pad(added.float() * LOG2_E, (0, beyond))


def pack_keys(k: Tensor, panel: int) -> Tensor:
    """(B, G, Tk, D) -> (B, G, panels, D, keys of a panel): what a product reads lies together, 0 where keys end."""
    whole = k.shape[2] // panel
    laid = k.new_empty(*k.shape[:2], -(-k.shape[2] // panel), k.shape[3], panel)
    laid[:, :, :whole] = k[:, :, : whole * panel].unflatten(2, (whole, panel)).mT
    if k.shape[2] > whole * panel:
        laid[:, :, -1] = pad(k[:, :, whole * panel :], (0, 0, 0, -k.shape[2] % panel)).mT
    return laid


def base2_scales(score: Dot, width: int) -> tuple[float, float]:
    """What a product is multiplied by for a logit in base 2, and the softcap: tanh takes twice the logit over it."""
    scale = score.factor(width) * LOG2_E
    return (scale, 0.0) if score.softcap is None else (2.0 * scale / score.softcap, score.softcap * LOG2_E)


def build_mask_tensors(call: Call) -> dict[str, Tensor]:
    masks = mask_inputs.build_kernel_masks(call)
    runs = Causal().key_ranges(call.sizes, False).to_tensor(call.q.device) if masks.causal else masks.spans
    given = {} if runs is None else {"runs": runs.contiguous()}
    if masks.query_ids is not None and masks.key_ids is not None:
        given |= {"query_ids": masks.query_ids.long().contiguous(), "key_ids": masks.key_ids.long().contiguous()}
    if masks.dense is not None:
        along = masks.dense.shape[-1] > 1 and masks.dense.stride(-1) != 1
        given["seen"] = masks.dense.contiguous() if along else masks.dense
    return given


def allocate_outputs(call: Call, wanted: Request, parts: int) -> dict[str, Tensor]:
    """Where the pass writes: it adds to `received` and to the picture, and fills the rest."""
    batch, heads, queries = call.q.shape[:3]
    new = call.q.new_zeros(batch, heads, 0, dtype=torch.float32).new_empty
    found = {}
    if wanted.entropy:
        found["entropy"] = new(batch, heads, queries)
    if wanted.distance:
        found["distance"] = new(batch, heads, queries)
    if wanted.received:
        found["received"] = new(batch, heads, parts, call.k.shape[2]).zero_()
    if wanted.picture is not None:
        found["picture"] = new(batch, heads, *wanted.picture[:2]).zero_()
    if wanted.largest:
        found["largest"] = new(batch, heads, parts).fill_(-torch.inf)
    if wanted.top:
        found["top_values"] = new(batch, heads, queries, wanted.top)
        found["top_keys"] = new(batch, heads, queries, wanted.top, dtype=torch.int64)
    return found


def data_pointers(tensors: dict[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def struct_sizes(call: Call, wanted: Request, parts: int, given: dict[str, Tensor]) -> dict[str, int]:
    keys = given["keys"]
    rows, columns = (0, 0) if wanted.picture is None else wanted.picture[:2]
    return {
        "pairs": call.q.shape[:2].numel(),
        "heads": call.q.shape[1],
        "group": call.group,
        "query_count": call.q.shape[2],
        "key_count": call.k.shape[2],
        "padded": keys.shape[2] * keys.shape[4],
        "width": keys.shape[3],
        "parts": parts,
        "top": wanted.top,
        "picture_rows": rows,
        "picture_columns": columns,
        "distances": given["by_distance"].shape[1] if "by_distance" in given else 0,
    }


def fill_mask_struct(call: Call, given: dict[str, Tensor]) -> MaskStruct:
    found = data_pointers(given) | {"query_count": call.q.shape[2], "key_count": call.k.shape[2]}
    if "runs" in given:
        found["run_count"] = given["runs"].shape[1]
    found |= {
        f"{name}_step": sequence_stride(given[f"{name}s"])
        for name in ("run", "query_id", "key_id")
        if f"{name}s" in given
    }
    if "seen" in given:
        found |= dict(zip(DENSE_STRIDE_FIELDS, broadcast_strides(given["seen"]), strict=True))
    return MaskStruct(**found)


def sequence_stride(tensor: Tensor) -> int:
    """How far it is from one sequence to the next: 0 where all share one."""
    return 0 if tensor.shape[0] == 1 else tensor.stride(0)


def broadcast_strides(tensor: Tensor) -> list[int]:
    """How far it is to the next along each axis: 0 where there is only one."""
    return [0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]


def finish_outputs(call: Call, wanted: Request, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parts joined in their order, so that the same call gives the same sums."""
    if wanted.received:
        found["received"] = found["received"].sum(2)
    if wanted.largest:
        found["largest"] = found["largest"].amax(-1) / LOG2_E
    if wanted.picture is not None and wanted.picture[:2] != (call.q.shape[2], call.k.shape[2]):
        rows, columns, _ = wanted.picture
        found["picture"] /= picture.block_areas(rows, columns, call.q.shape[2], call.k.shape[2], call.q.device)
    return found

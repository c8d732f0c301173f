"""One pass over the tiles of the attention matrix on a GPU: statistics from (q, k, log-sum-exp).

B batch, H query heads, G key heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from foci.statistics.device_arguments import check, inputs, picture_arguments, weights_arguments
from foci.statistics.tiling import BUDGET, Cells, Config, Launch, cells, default, launches, segments_for, slots
from foci.statistics.wanted import Wanted

# As in kernels/top.py.
FLAGS_PER_WORD = 16


# What the kernel that weighs the chosen keys takes of the others' arguments.
WEIGHED = (
    *("q", "k", "lse", "slopes", "H", "group", "Tq", "Tk", "D", "q_batch", "q_head", "q_query"),
    *("k_batch", "k_head", "k_key", "scale", "softcap", "SOFTCAP", "ALIBI", "BD"),
)
# Fewer would be enough for short sequences, at the price of a build for each length.
LEAST_TAG_BITS = 7
WRITTEN = ("entropy", "distance", "largest", "columns", "best", "second", "third")
COMMON = ("keys", "first_pair", "first_query", "queries", "TOP")


def statistics(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    causal: bool = False,
    spans: Tensor | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    dense: Tensor | None = None,
    query_weights: Tensor | None = None,
    wanted: Wanted,
    config: Config | None = None,
) -> dict[str, Tensor]:
    """Statistics of W = exp(softcap(scale q kᵀ) + bias - lse) over what each query sees, in one pass.

    q (B, H, Tq, D), k (B, G, Tk, D), lse (B, H, Tq) float32, -inf where a query sees nothing.
    slopes (H,): ALiBi, -slope |i + Tk - Tq - j| is added to the logits.
    causal: query i sees keys up to i + Tk - Tq. spans (1 or B, 1 or 2, 2, Tq) int32: it sees the keys from low to
    high of each run; runs are disjoint. query_ids (1 or B, Tq), key_ids (1 or B, Tk): it sees keys of its own id.
    dense: bool, broadcast to (B, H, Tq, Tk). What all that are given allow is seen.
    query_weights (B, H, Tq) or (Tq,): how much each query counts in `received`.

    Returns what is wanted: "entropy" (B, H, Tq), "received" (B, H, Tk), "picture" (B, H, rows, columns),
    "top_values" and "top_keys" (B, H, Tq, k), "largest" (B, H), "distance" (B, H, Tq).
    """
    check(q, k, lse, slopes, causal, spans, query_ids, key_ids, dense, query_weights, wanted)
    config = config or default(q.shape[-1], q.dtype, wanted)
    arguments = inputs(q, k, lse, scale, softcap, slopes, causal, spans, query_ids, key_ids, dense)
    out = sweep(q, k, arguments, query_weights, wanted, config)
    if wanted.picture and "picture" not in out:
        out["picture"] = odd_picture(q, k, arguments, wanted.picture)
    return out


def sweep(
    q: Tensor, k: Tensor, arguments: dict[str, Any], query_weights: Tensor | None, wanted: Wanted, config: Config
) -> dict[str, Tensor]:
    """The pass over the tiles, in as many launches as the candidates for the heaviest keys need."""
    pairs, tiles = q.shape[0] * q.shape[1], -(-q.shape[2] // config.queries)
    fit = cells(wanted.picture, q.shape[2], k.shape[2], config) if wanted.picture else None
    if not any((wanted.entropy, wanted.received, fit, wanted.top, wanted.largest, wanted.distance)):
        return {}
    tiles_of_keys = -(-k.shape[2] // config.keys)
    segments = segments_for(wanted.top, tiles_of_keys, config.keys // 2)
    segment = -(-tiles_of_keys // segments)
    row_bytes = (4 + 4 + 2) * segments * (config.keys // 2)
    plan = list(launches(pairs, tiles, row_bytes * config.queries if wanted.top else 0, BUDGET))
    most = max(launch.tiles for launch in plan)
    per_pair = slots(plan[0].pairs, most, processors(q.device) * config.per_processor)
    buffers = allocate(q, k, wanted, fit, per_pair, tiles)
    if wanted.top:
        kept = max(launch.pairs * launch.tiles for launch in plan) * config.queries * segments * (config.keys // 2)
        kinds = {"best": torch.float32, "second": torch.float32, "third": torch.float16}
        buffers |= {name: q.new_empty(kept, dtype=dtype) for name, dtype in kinds.items()}
        buffers["flags"] = q.new_empty(kept // FLAGS_PER_WORD, dtype=torch.int32)
    shape = {"segment": segment, "segments": segments, "TAG_BITS": max(LEAST_TAG_BITS, (2 * segment - 1).bit_length())}
    weighted = weights_arguments(query_weights, arguments["lse"])
    unused = arguments["lse"]
    common = weighted | shape | picture_arguments(wanted, fit, k.shape[2], twice=arguments["SPANS"] == 2)
    common |= {name: buffers.get(name, unused) for name in WRITTEN} | {"picture": buffers.get("cells", unused)}
    common |= {"ENTROPY": wanted.entropy, "DISTANCE": wanted.distance, "LARGEST": wanted.largest}
    common |= {"RECEIVED": wanted.received, "TOP": wanted.top > 0, "slots": per_pair}
    for launch in plan:
        run(arguments, common, launch, config)
        if wanted.top:
            choose(q, k, arguments, buffers, wanted.top, launch, shape, config)
    return finish(wanted, buffers)


def run(arguments: dict[str, Any], common: dict[str, Any], launch: Launch, config: Config) -> None:
    """One launch of the pass over the tiles."""
    from foci.kernels.statistics import statistics as kernel

    kernel[(launch.pairs * common["slots"],)](
        **arguments, **common, first_pair=launch.first_pair, first_tile=launch.first_tile, tiles=launch.tiles,
        BQ=config.queries, BK=config.keys, EVEN=arguments["D"] == arguments["BD"], PRECISION=precision(arguments["q"]),
        num_warps=config.warps, num_stages=config.stages,
        **({} if config.registers is None else {"maxnreg": config.registers}),
    )  # fmt: skip


def choose(
    q: Tensor,
    k: Tensor,
    arguments: dict[str, Any],
    buffers: dict[str, Tensor],
    top: int,
    launch: Launch,
    shape: dict[str, int],
    config: Config,
) -> None:
    """The heaviest keys of the queries of one launch."""
    from foci.kernels.top import order, pick, refine, weigh

    queries = launch.tiles * config.queries
    classes = shape["segments"] * config.keys // 2
    common = {"keys": buffers["top_keys"], "flags": buffers["flags"], "Tq": q.shape[2], "queries": queries}
    common |= {"first_pair": launch.first_pair, "first_query": launch.first_tile * config.queries}
    common |= {"segment": shape["segment"], "TOP": top, "CLASSES": classes, "BK": config.keys}
    rows = max(1, 1024 // classes)
    pick[(-(-queries // rows), launch.pairs)](
        **{name: buffers[name] for name in ("best", "second", "third")}, **common,
        TAG_BITS=shape["TAG_BITS"], R=rows, num_warps=1,
    )  # fmt: skip
    slots = 2 ** math.ceil(math.log2(top))
    rows = max(1, 128 // slots)
    weighed = {name: arguments[name] for name in WEIGHED} | {name: common[name] for name in COMMON}
    weigh[(-(-queries // rows), launch.pairs)](
        **weighed, values=buffers["top_values"], SLOTS=slots, R=rows, EVEN=arguments["D"] == arguments["BD"],
        num_warps=4,
    )  # fmt: skip
    rows = max(1, 1024 // slots)
    ordered = {name: common[name] for name in ("Tq", *COMMON)}
    order[(-(-queries // rows), launch.pairs)](
        **ordered, values=buffers["top_values"], SLOTS=slots, R=rows, num_warps=4
    )
    rows = config.refining_rows
    refine[(-(-queries // rows), launch.pairs)](
        **arguments | common, values=buffers["top_values"], SLOTS=slots, R=rows, READ=16,
        STEP=min(arguments["BD"], max(16, 4096 // (rows * slots))), num_warps=config.refining_warps,
    )  # fmt: skip


def odd_picture(q: Tensor, k: Tensor, arguments: dict[str, Any], picture: tuple[int, int, str]) -> Tensor:
    """A picture whose cells do not fit the tiles: a pass of its own."""
    from foci.kernels.picture import picture as kernel

    rows, columns, reduce = picture
    height = 2 ** math.ceil(math.log2(-(-q.shape[2] // rows)))
    width = 2 ** math.ceil(math.log2(-(-k.shape[2] // columns)))
    block = 64 if q.device.type == "cuda" else 16
    out = q.new_zeros((*q.shape[:2], rows, columns), dtype=torch.float32)
    kernel[(-(-rows // (block // min(height, block))), q.shape[0] * q.shape[1])](
        **arguments, out=out, rows=rows, columns=columns, MAX=reduce == "max", HEIGHT=height, WIDTH=width,
        BQ=block, BK=block, PRECISION=precision(q), num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def precision(q: Tensor) -> str:
    """Three products of tf32 parts are as good as float32 to its last bits; plain tf32 is not."""
    return "tf32x3" if q.dtype == torch.float32 else "tf32"


def processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 2


def allocate(q: Tensor, k: Tensor, wanted: Wanted, fit: Cells | None, slots: int, tiles: int) -> dict[str, Tensor]:
    """What the kernel writes. It adds to columns and may skip cells, so these start from 0."""
    lead, queries, keys = q.shape[:2], q.shape[2], k.shape[2]
    out = {}
    if wanted.entropy:
        out["entropy"] = q.new_empty((*lead, queries), dtype=torch.float32)
    if wanted.distance:
        out["distance"] = q.new_empty((*lead, queries), dtype=torch.float32)
    if wanted.largest:
        out["largest"] = q.new_empty((*lead, tiles), dtype=torch.float32)
    if wanted.received:
        out["columns"] = q.new_zeros((*lead, slots, keys), dtype=torch.float32)
    if fit:
        out["cells"] = q.new_zeros((*lead, fit.rows, fit.columns), dtype=torch.float32)
    if wanted.top:
        out["top_values"] = q.new_empty((*lead, queries, wanted.top), dtype=torch.float32)
        out["top_keys"] = q.new_empty((*lead, queries, wanted.top), dtype=torch.int32)
    return out


def finish(wanted: Wanted, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Joins what the programs wrote apart."""
    names = ("entropy", "distance", "top_values", "top_keys")
    out = {name: buffers[name] for name in names if name in buffers}
    if "largest" in buffers:
        out["largest"] = buffers["largest"].amax(-1)
    if "columns" in buffers:
        columns = buffers["columns"]
        out["received"] = columns.sum(2) if columns.shape[2] > 1 else columns.squeeze(2)
    if "cells" in buffers and wanted.picture:
        out["picture"] = joined(buffers["cells"], *wanted.picture)
    return out


def joined(parts: Tensor, rows: int, columns: int, reduce: str) -> Tensor:
    """(..., rows * a, columns * b) -> (..., rows, columns)."""
    if parts.shape[-2:] == (rows, columns):
        return parts
    blocks: Tensor = parts.unflatten(-1, (columns, -1)).unflatten(-3, (rows, -1))
    return blocks.sum((-3, -1)) if reduce == "mean" else blocks.amax((-3, -1))

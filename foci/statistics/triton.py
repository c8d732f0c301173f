"""One pass over the tiles of the attention matrix on a GPU: statistics from (q, k, log-sum-exp).

B batch, H query heads, G key heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from foci.backends.launches import processors
from foci.statistics import hopper
from foci.statistics.device_arguments import (
    check,
    fetchable,
    inputs,
    key_tiles,
    picture_arguments,
    weights_arguments,
)
from foci.statistics.tiling import (
    BUDGET,
    CLASSES_PER_BOUND,
    Cells,
    Classes,
    Config,
    Launch,
    cells,
    classes_for,
    default,
    launches,
    slots,
)
from foci.statistics.wanted import Wanted

# As in kernels/top.py.
FLAGS_PER_WORD = 16


# What the kernel that chooses takes of the others' arguments.
CHOOSING = (
    *("q", "k", "lse", "slopes", "H", "group", "Tq", "Tk", "D", "q_batch", "q_head", "q_query"),
    *("k_batch", "k_head", "k_key", "scale", "softcap", "SOFTCAP", "ALIBI", "BD"),
)
# Fewer would be enough for short sequences, at the price of a build for each length.
LEAST_TAG_BITS = 7
# With more, logits lack too much to be taken as they are kept: in sequences of over 8,192 tokens for up to 4 keys, of
# over 16,384 for up to 8, and so on, as more keys have more classes, and a class then has fewer tags.
MOST_TAG_BITS = 8
# Queries that a program chooses keys for: a thread for each.
CHOSEN_TOGETHER = 32
# Where queries are in doubt: keys that are read again at a time, warps that read them, programs on a multiprocessor.
READ_TOGETHER, READING_WARPS, READING_PROGRAMS = 32, 2, 8
WRITTEN = ("entropy", "distance", "largest", "columns", "best", "second", "third")


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
    arguments = inputs(q, k, lse, scale, softcap, slopes, causal, spans, query_ids, key_ids, dense)
    config = config or chosen(arguments, query_weights is not None, wanted)
    out = sweep(q, k, arguments, query_weights, wanted, config)
    if wanted.picture and "picture" not in out:
        out["picture"] = odd_picture(q, k, arguments, wanted.picture)
    return out


def chosen(arguments: dict[str, Any], weighted: bool, wanted: Wanted) -> Config:
    """The kernel for Hopper where it serves, else the plain one, cut as measured."""
    if not hopper.refuses(arguments, weighted, wanted):
        return hopper.config(wanted)
    return default(arguments["D"], arguments["q"].dtype, wanted, fetchable(arguments["k"]))


def sweep(
    q: Tensor, k: Tensor, arguments: dict[str, Any], query_weights: Tensor | None, wanted: Wanted, config: Config
) -> dict[str, Tensor]:
    """The pass over the tiles, in as many launches as the candidates for the heaviest keys need."""
    pairs, tiles = q.shape[0] * q.shape[1], -(-q.shape[2] // config.queries)
    fit = cells(wanted.picture, q.shape[2], k.shape[2], config) if wanted.picture else None
    if not any((wanted.entropy, wanted.received, fit, wanted.top, wanted.largest, wanted.distance)):
        return {}
    classes = classes_for(wanted.top, k.shape[2], config, LEAST_TAG_BITS)
    plan = list(launches(pairs, tiles, classes.bytes_per_query * config.queries if wanted.top else 0, BUDGET))
    most = max(launch.tiles for launch in plan)
    per_pair = slots(plan[0].pairs, most, processors(q.device) * config.per_processor)
    buffers = allocate(q, k, wanted, fit, per_pair, tiles)
    kept = candidates(q, plan, config.queries, classes) if wanted.top else {}
    unused = arguments["lse"]
    common = weights_arguments(query_weights, arguments["lse"])
    described = key_tiles(arguments["k"], arguments["BD"], config)
    common |= {"k_tiles": unused if described is None else described, "FETCHED": described is not None}
    common |= picture_arguments(wanted, fit, k.shape[2], twice=arguments["SPANS"] == 2)
    common |= {name: (buffers | kept).get(name, unused) for name in WRITTEN} | {"picture": buffers.get("cells", unused)}
    common |= {"ENTROPY": wanted.entropy, "DISTANCE": wanted.distance, "LARGEST": "largest" in buffers}
    common |= {"RECEIVED": wanted.received, "TOP": wanted.top > 0, "slots": per_pair}
    common |= {"SEGMENTS": classes.segments, "TAG_BITS": classes.tag_bits}
    for launch in plan:
        run(arguments, common, launch, config)
        if wanted.top:
            choose(arguments, kept, buffers, launch, classes, config)
    if wanted.top:
        refine(arguments, kept, buffers, classes, config)
    # Before what the programs wrote apart is joined, so that the two never take memory together.
    del kept, common
    return finish(wanted, buffers)


def run(arguments: dict[str, Any], common: dict[str, Any], launch: Launch, config: Config) -> None:
    """One launch of the pass over the tiles."""
    if config.in_flight:
        hopper.run(arguments, common, launch, config)
        return
    from foci.kernels.statistics import statistics as kernel

    kernel[(launch.pairs * common["slots"],)](
        **arguments, **common, first_pair=launch.first_pair, first_tile=launch.first_tile, tiles=launch.tiles,
        BQ=config.queries, BK=config.keys, EVEN=arguments["D"] == arguments["BD"], PRECISION=precision(arguments["q"]),
        LATE=config.late and can_wait(common), num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip


def can_wait(common: dict[str, Any]) -> bool:
    """Sums over queries are carried to the next tile in four parts, where the same ones serve columns and picture."""
    means = common["PICTURE"] == 1 and not (common["RECEIVED"] and common["WEIGHTED"])
    return means and common["CELL_QUERIES"] % 8 == 0 and common["CELL_KEYS"] % 16 == 0


def candidates(q: Tensor, plan: list[Launch], queries: int, classes: Classes) -> dict[str, Tensor]:
    """What a launch keeps of the keys until the heaviest are chosen."""
    rows = max(launch.pairs * launch.tiles for launch in plan) * queries
    return {
        "best": q.new_empty(rows * classes.number, dtype=torch.float32),
        "second": q.new_empty(rows * classes.number, dtype=torch.float32),
        "third": q.new_empty(rows * classes.number // CLASSES_PER_BOUND, dtype=torch.float16),
        # Of all launches: they are read again together.
        "flags": q.new_empty((*q.shape[:3], classes.number // FLAGS_PER_WORD), dtype=torch.int32),
        "listed": q.new_empty(q.shape[:3], dtype=torch.int32),
        "counter": q.new_zeros(1, dtype=torch.int32),
    }


def choose(
    arguments: dict[str, Any],
    kept: dict[str, Tensor],
    buffers: dict[str, Tensor],
    launch: Launch,
    classes: Classes,
    config: Config,
) -> None:
    """The heaviest keys of the queries of one launch: chosen, and those that this leaves in doubt put on a list."""
    from foci.kernels.top import choose as kernel

    queries, top = launch.tiles * config.queries, buffers["top_keys"].shape[-1]
    log = (top - 1).bit_length()
    kernel[(-(-queries // CHOSEN_TOGETHER), launch.pairs)](
        **{name: arguments[name] for name in CHOOSING}, **kept, values=buffers["top_values"], keys=buffers["top_keys"],
        largest_logits=buffers.get("logits", arguments["lse"]), LARGEST="logits" in buffers,
        first_pair=launch.first_pair, first_query=launch.first_tile * config.queries, queries=queries,
        segments=classes.segments, EXACT=exact(arguments["q"].dtype, classes), TOP=top, CLASSES=classes.number,
        LOG_N=max(log, min(6, (classes.number - 1).bit_length())), LOG=log, BK=config.keys, TAG_BITS=classes.tag_bits,
        LABEL_BITS=max(classes.tag_bits, (max(2 * classes.number, 2 << log) - 1).bit_length()), R=CHOSEN_TOGETHER,
        STEP=min(arguments["BD"], 32), EVEN=arguments["D"] == arguments["BD"], num_warps=1,
    )  # fmt: skip


def exact(dtype: torch.dtype, classes: Classes) -> bool:
    """Whether the weights of the heaviest keys are computed anew, not taken as kept, without the bits of the tag."""
    return dtype == torch.float32 or classes.tag_bits > MOST_TAG_BITS


def refine(
    arguments: dict[str, Any], kept: dict[str, Tensor], buffers: dict[str, Tensor], classes: Classes, config: Config
) -> None:
    """The heaviest keys of the queries that are in doubt, of all launches: classes that may hide one are read again."""
    from foci.kernels.top import refine as kernel

    top = buffers["top_keys"].shape[-1]
    programs = READING_PROGRAMS * processors(arguments["q"].device)
    kernel[(min(programs, kept["listed"].numel()),)](
        **arguments, **{name: kept[name] for name in ("flags", "listed", "counter")}, values=buffers["top_values"],
        keys=buffers["top_keys"], largest_logits=buffers.get("logits", arguments["lse"]), LARGEST="logits" in buffers,
        segments=classes.segments, tags=classes.tags, TOP=top,
        SLOTS=1 << (top - 1).bit_length(), CLASSES=classes.number, BK=config.keys, READ=READ_TOGETHER,
        STEP=min(arguments["BD"], max(16, 2048 * READING_WARPS // READ_TOGETHER)),
        EVEN=arguments["D"] == arguments["BD"], num_warps=READING_WARPS,
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


def allocate(q: Tensor, k: Tensor, wanted: Wanted, fit: Cells | None, slots: int, tiles: int) -> dict[str, Tensor]:
    """What the kernel writes, all of it: also the zeros that it adds to."""
    lead, queries, keys = q.shape[:2], q.shape[2], k.shape[2]
    out = {}
    if wanted.entropy:
        out["entropy"] = q.new_empty((*lead, queries), dtype=torch.float32)
    if wanted.distance:
        out["distance"] = q.new_empty((*lead, queries), dtype=torch.float32)
    if wanted.largest and wanted.top:
        # The heaviest key's of each query.
        out["logits"] = q.new_empty((*lead, queries), dtype=torch.float32)
    elif wanted.largest:
        out["largest"] = q.new_empty((*lead, tiles), dtype=torch.float32)
    if wanted.received:
        out["columns"] = q.new_empty((*lead, slots, keys), dtype=torch.float32)
    if fit:
        out["cells"] = q.new_empty((*lead, fit.rows, fit.columns), dtype=torch.float32)
    if wanted.top:
        out["top_values"] = q.new_empty((*lead, queries, wanted.top), dtype=torch.float32)
        out["top_keys"] = q.new_empty((*lead, queries, wanted.top), dtype=torch.int32)
    return out


def finish(wanted: Wanted, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Joins what the programs wrote apart."""
    names = ("entropy", "distance", "top_values", "top_keys")
    out = {name: buffers[name] for name in names if name in buffers}
    if wanted.largest:
        out["largest"] = buffers["logits" if wanted.top else "largest"].amax(-1)
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
    if parts.shape[-2:] == (rows, 2 * columns) and reduce == "mean":
        # Twice as fast on a GPU as a sum over an axis of two.
        return parts[..., ::2] + parts[..., 1::2]
    blocks: Tensor = parts.unflatten(-1, (columns, -1)).unflatten(-3, (rows, -1))
    return blocks.sum((-3, -1)) if reduce == "mean" else blocks.amax((-3, -1))

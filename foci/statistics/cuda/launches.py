"""The kernel launches of a pass, one function each: tiles, top keys, merging of partial results, pictures.

`scalars` are the scalar arguments of a kernel by name, `bindings` says which tensor is passed as which argument.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.gpu.additive.arguments import (
    AdditiveOptions,
    AdditiveTiling,
    additive_scalars,
    count_blocks,
    exponentials_workspace,
    tile_arguments,
)
from foci.gpu.arguments import next_power_of_two
from foci.gpu.launcher import KeywordLaunch, count_multiprocessors
from foci.statistics.cuda import hopper
from foci.statistics.cuda.arguments import COMMON_TENSORS, KernelTensors
from foci.statistics.cuda.tiling import KeyClasses, LaunchRange, PictureCells, TileConfig
from foci.statistics.request import Request

# The common scalars that the top-k kernel takes.
TOPK_SCALARS = (
    *("H", "group", "Tq", "Tk", "D", "q_batch", "q_head", "q_query", "k_batch", "k_head", "k_key"),
    *("bias_batch", "bias_head", "bias_query", "clip", "weight_head", "scale", "softcap"),
    *("TABLE", "SOFTCAP", "ALIBI", "ADDITIVE", "PTX", "BD"),
)
# The tag of a key replaces the lowest bits of its logit. If it takes more bits than this, the logit is too inexact and
# is computed again. The number of bits grows with the keys per class: up to 4 top keys exceed it in sequences of over
# 8,192 tokens, up to 8 top keys, which have twice as many classes, in sequences of over 16,384.
MAX_TAG_BITS = 8
# Queries of a program of the top-k kernel, one per thread.
TOPK_QUERIES = 32
# Refinement of doubtful queries: keys that are read at a time, warps per program, programs per multiprocessor.
REFINE_KEYS, REFINE_WARPS, REFINE_PROGRAMS = 32, 2, 8
# Numbers that a program merges.
MERGE_BLOCK = 512

# One launch for sequences up to this: a program holds all keys, and finds the top keys one after another.
SHORT_KEYS, SHORT_QUERIES, SHORT_TOP_KEYS = 256, 1024, 16
# The widths whose keys fit into the shared memory of all GPUs.
SHORT_WIDTHS = {torch.float16: 128, torch.bfloat16: 128, torch.float32: 32}

COMMON_BINDINGS = {name: name for name in COMMON_TENSORS}


def build_tile_launch(
    scalars: dict[str, Any],
    common: dict[str, Any],
    bindings: dict[str, str],
    part: LaunchRange,
    config: TileConfig,
    q: Tensor,
) -> KeywordLaunch:
    """The pass over the tiles, or a part of it."""
    if config.use_hopper:
        return hopper.build_hopper_launch(scalars | common, COMMON_BINDINGS | bindings, part, config)
    from foci.kernels.statistics.tiles import tile_statistics as kernel

    own: dict[str, Any] = {"first_pair": part.first_pair, "first_tile": part.first_tile, "tiles": part.tiles}
    own |= {"BQ": config.queries, "BK": config.keys, "EVEN": fills_padded_width(scalars)}
    own |= {"PRECISION": statistics_dot_precision(q), "TMA": bindings["k_tiles"] == "k_tiles"}
    own |= {"EXACT": q.dtype == torch.float32}
    own |= {"MASK_ALL": config.mask_all, "DEFER": config.defer_sums and can_defer_sums(common)}
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return KeywordLaunch(
        kernel, (part.pairs * common["slots"],), COMMON_BINDINGS | bindings, scalars | common | own, options
    )


class Exponentials(NamedTuple):
    """What the tile kernel takes for an additive score: the launch that computes exponentials, and its results."""

    scalars: dict[str, Any]
    bindings: dict[str, str]
    arrays: dict[str, tuple[int, torch.dtype]]
    launches: list[KeywordLaunch]


ADDITIVE_SCALARS = ("headed", "MT", "NT", "DP", "CHUNK", "MAX_SHARED")
# In the order of the workspace of the forward.
EXPONENTIALS = ("E", "F", "table", "sizes", "constants", "q_max", "k_max", "q_magnitude", "k_magnitude")


def plan_exponentials(tensors: KernelTensors, config: TileConfig) -> Exponentials:
    """The exponentials of an additive score, as its forward computes them; nothing for other scores."""
    q, k, weight = tensors.q, tensors.k, tensors.weight
    if weight is None:
        return Exponentials(dict.fromkeys(ADDITIVE_SCALARS, 1), dict.fromkeys(EXPONENTIALS, "lse"), {}, [])
    from foci.kernels.additive.exponentials import prepare_exponentials as kernel

    tiling = AdditiveTiling(config.queries, config.keys, warps=config.warps)
    no_options = AdditiveOptions(None, None, None, None, None, False, 0.0)
    scalars = additive_scalars(q, k, k, weight, no_options) | tile_arguments(q, k, tiling)
    scalars |= {"ROW_GROUP": tiling.queries}
    sizes = exponentials_workspace(q, k, weight, tiling)
    names = {name: name for name in ("q", "k", "weight", *EXPONENTIALS)}
    own = {name: scalars[name] for name in kernel.arg_names if name not in names}
    launch = KeywordLaunch(kernel, (count_blocks(q, k, tiling),), names, own, {"num_warps": 4})
    return Exponentials(
        {name: scalars[name] for name in ADDITIVE_SCALARS},
        {name: name for name in EXPONENTIALS},
        {name: (sizes[name], torch.float32) for name in EXPONENTIALS},
        [launch],
    )


def can_defer_sums(common: dict[str, Any]) -> bool:
    """Whether the sums of a tile can be deferred: `received` and the picture must use the same sums, in four parts."""
    means = common["PICTURE"] == 1 and not (common["RECEIVED"] and common["WEIGHTED"])
    return bool(means and common["CELL_QUERIES"] % 8 == 0 and common["CELL_KEYS"] % 16 == 0)


def can_run_short(scalars: dict[str, Any], weighted: bool, request: Request, q: Tensor) -> bool:
    """Whether one launch computes everything: few keys, and at most one picture cell per weight."""
    queries, keys = scalars["Tq"], scalars["Tk"]
    return (
        keys <= SHORT_KEYS
        and queries <= SHORT_QUERIES
        and scalars["BD"] <= SHORT_WIDTHS[q.dtype]
        and request.top <= SHORT_TOP_KEYS
        and (request.picture is None or request.picture[:2] == (queries, keys))
        and not weighted
    )


def build_short_launch(scalars: dict[str, Any], request: Request, q: Tensor) -> KeywordLaunch:
    """All statistics of short sequences."""
    from foci.kernels.statistics.short import short_statistics as kernel

    own: dict[str, Any] = {
        "ENTROPY": request.entropy, "DISTANCE": request.distance, "RECEIVED": request.received,
        "PICTURE": request.picture is not None, "TOP": request.top, "LARGEST": request.largest_logit,
        "PRECISION": statistics_dot_precision(q),
    }  # fmt: skip
    own |= {"BQ": 32 if q.device.type == "cuda" else 16, "BK": SHORT_KEYS}
    wanted = {
        "entropy": request.entropy, "distance": request.distance, "received": request.received,
        "picture": request.picture, "top_values": request.top, "top_keys": request.top,
        "largest_logit": request.largest_logit,
    }  # fmt: skip
    bindings = COMMON_BINDINGS | {name: name if present else "lse" for name, present in wanted.items()}
    return KeywordLaunch(kernel, (q.shape[0] * q.shape[1],), bindings, scalars | own, {"num_warps": 4})


def fills_padded_width(scalars: dict[str, Any]) -> bool:
    return bool(scalars["D"] == scalars["BD"])


def build_topk_launch(
    scalars: dict[str, Any], request: Request, part: LaunchRange, classes: KeyClasses, config: TileConfig, q: Tensor
) -> KeywordLaunch:
    """Chooses the top keys of the queries of one launch and lists the doubtful queries."""
    from foci.kernels.statistics.topk import choose_topk as kernel

    first_query = config.first_query(part.first_tile, q.shape[2])
    queries, top = config.first_query(part.first_tile + part.tiles, q.shape[2]) - first_query, request.top
    log = (top - 1).bit_length()
    own = {
        "LARGEST": request.largest_logit, "first_pair": part.first_pair,
        "first_query": first_query, "queries": queries, "segments": classes.segments,
        "EXACT": needs_exact_weights(q.dtype, classes), "TOP": top,
        "CLASSES": classes.number, "LOG_N": max(log, min(6, (classes.number - 1).bit_length())), "LOG": log,
        "BK": config.keys, "TAG_BITS": classes.tag_bits,
        "LABEL_BITS": max(classes.tag_bits, (max(2 * classes.number, 2 << log) - 1).bit_length()),
        "R": TOPK_QUERIES, "STEP": min(scalars["BD"], 32), "EVEN": fills_padded_width(scalars),
    }  # fmt: skip
    names = ("q", "k", "lse", "slopes", "bias", "weight", "best", "second", "third", "flags", "listed", "counter")
    return KeywordLaunch(
        kernel,
        (-(-queries // TOPK_QUERIES), part.pairs),
        {name: name for name in names} | topk_outputs(request),
        {name: scalars[name] for name in TOPK_SCALARS} | own,
        {"num_warps": 1},
    )


def topk_outputs(request: Request) -> dict[str, str]:
    """Where the top keys are written: as int32, directly to the output if that is int32."""
    keys = "top_keys" if request.int32_keys else "chosen"
    return {"values": "top_values", "keys": keys, "largest_logits": "logits" if request.largest_logit else "lse"}


def needs_exact_weights(dtype: torch.dtype, classes: KeyClasses) -> bool:
    """Whether weights of top keys are computed again, because candidates lack the bits of the tag."""
    return dtype == torch.float32 or classes.tag_bits > MAX_TAG_BITS


def build_refine_launch(
    scalars: dict[str, Any], request: Request, classes: KeyClasses, config: TileConfig, q: Tensor
) -> KeywordLaunch:
    """Chooses the top keys of the doubtful queries of all launches: classes that may hide one are read again."""
    from foci.kernels.statistics.topk import refine_topk as kernel

    top = request.top
    own = {
        "LARGEST": request.largest_logit, "segments": classes.segments, "tags": classes.tags, "TOP": top,
        "SLOTS": 1 << (top - 1).bit_length(), "CLASSES": classes.number, "BK": config.keys, "READ": REFINE_KEYS,
        "STEP": min(scalars["BD"], max(16, 2048 * REFINE_WARPS // REFINE_KEYS)), "EVEN": fills_padded_width(scalars),
    }  # fmt: skip
    programs = min(REFINE_PROGRAMS * count_multiprocessors(q.device), q.shape[0] * q.shape[1] * q.shape[2])
    bindings = COMMON_BINDINGS | {name: name for name in ("flags", "listed", "counter")} | topk_outputs(request)
    return KeywordLaunch(kernel, (programs,), bindings, scalars | own, {"num_warps": REFINE_WARPS})


class PictureMerge(NamedTuple):
    """The sums of a picture of means that are merged: its size, its cells, queries, keys, and queries of a tile."""

    rows: int
    columns: int
    cells: PictureCells
    queries: int
    keys: int
    tile_queries: int


NO_PICTURE = PictureMerge(1, 1, PictureCells(1, 1), 1, 1, 1)


def build_merge_launch(
    pairs: int, columns: tuple[int, int] | None, picture: PictureMerge | None, chosen: int, logits: int
) -> KeywordLaunch:
    """Merges the partial results of the programs.

    Args:
        columns: (programs per pair, keys) of the partial sums for `received`; None if there are none to add.
        chosen: number of top keys of all queries, to be converted to int64; 0: none.
        logits: number of logits per pair, whose maximum is taken; 0: none.
    """
    from foci.kernels.statistics.merge import merge_statistics as kernel

    slots, keys = columns or (1, picture.keys if picture else 1)
    programs = pairs * -(-keys // MERGE_BLOCK) if columns else 0
    programs += pairs * picture.rows if picture else 0
    programs += -(-chosen // MERGE_BLOCK) + (pairs if logits else 0)
    written = {"columns": "received", "cells": "picture", "chosen": "top_keys", "logits": "largest_logit"}
    present = {"columns": columns, "cells": picture, "chosen": chosen, "logits": logits}
    bindings = {name: name if present[name] else "lse" for name in written}
    bindings |= {into: into if present[name] else "lse" for name, into in written.items()}
    rows, across_all, cells, queries, _, tile_queries = picture or NO_PICTURE
    scalars = {
        "pairs": pairs, "slots": slots, "queries": queries, "keys": keys, "picture_rows": rows,
        "picture_columns": across_all, "picture_lines": cells.lines, "tile_queries": tile_queries,
        "row_step": cells.row_step, "tile_step": cells.tile_step, "across": cells.across, "cut": cells.cut,
        "chosen_size": chosen, "logits_each": logits, "RECEIVED": columns is not None,
        "PICTURE": picture is not None, "CUT": cells.cut > 0, "TOP": chosen > 0, "LARGEST": logits > 0,
        "BN": MERGE_BLOCK,
    }  # fmt: skip
    return KeywordLaunch(kernel, (programs,), bindings, scalars, {"num_warps": 4})


def build_picture_launch(scalars: dict[str, Any], picture: tuple[int, int, str], q: Tensor) -> KeywordLaunch:
    """A separate pass for a picture of maxima."""
    from foci.kernels.statistics.picture import pool_picture as kernel

    rows, columns, _ = picture
    height = next_power_of_two(-(-scalars["Tq"] // rows), 1)
    width = next_power_of_two(-(-scalars["Tk"] // columns), 1)
    block = 64 if q.device.type == "cuda" else 16
    own: dict[str, Any] = {"rows": rows, "columns": columns, "HEIGHT": height, "WIDTH": width}
    own |= {"BQ": block, "BK": block, "PRECISION": statistics_dot_precision(q)}
    # Pairs come first: the second grid dimension is limited to 65,535.
    grid = (q.shape[0] * q.shape[1], -(-rows // (block // min(height, block))))
    return KeywordLaunch(
        kernel, grid, COMMON_BINDINGS | {"out": "picture"}, scalars | own, {"num_warps": 4, "num_stages": 2}
    )


def statistics_dot_precision(q: Tensor) -> str:
    """tf32x3 is as exact as float32 to its last bits; plain tf32 is not."""
    return "tf32x3" if q.dtype == torch.float32 else "tf32"

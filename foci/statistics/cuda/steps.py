"""The launches that a pass on a GPU is made of: tiles, the heaviest keys, what is joined, pictures that fit no tile.

Numbers are what kernels are told, tensors say which tensor stands for which of their arguments.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from foci.gpu.launcher import KeywordLaunch, count_multiprocessors
from foci.statistics.cuda import hopper
from foci.statistics.cuda.arguments import COMMON_TENSORS
from foci.statistics.cuda.tiling import KeyClasses, LaunchRange, TileConfig
from foci.statistics.request import Request

# What the kernel that chooses takes of the others' arguments.
TOPK_SCALARS = (
    *("H", "group", "Tq", "Tk", "D", "q_batch", "q_head", "q_query", "k_batch", "k_head", "k_key"),
    *("scale", "softcap", "SOFTCAP", "ALIBI", "BD"),
)
# With more, logits lack too much to be taken as they are kept: in sequences of over 8,192 tokens for up to 4 keys, of
# over 16,384 for up to 8, and so on, as more keys have more classes, and a class then has fewer tags.
MAX_TAG_BITS = 8
# Queries that a program chooses keys for: a thread for each.
TOPK_QUERIES = 32
# Where queries are in doubt: keys that are read again at a time, warps that read them, programs on a multiprocessor.
REFINE_KEYS, REFINE_WARPS, REFINE_PROGRAMS = 32, 2, 8
# Numbers that a program joins.
JOIN_BLOCK = 512

COMMON_BINDINGS = {name: name for name in COMMON_TENSORS}


def build_tile_launch(
    numbers: dict[str, Any],
    common: dict[str, Any],
    tensors: dict[str, str],
    launch: LaunchRange,
    config: TileConfig,
    q: Tensor,
) -> KeywordLaunch:
    """A part of the pass over the tiles."""
    if config.in_flight:
        return hopper.build_hopper_launch(numbers | common, COMMON_BINDINGS | tensors, launch, config)
    from foci.kernels.statistics.tiles import tile_statistics as kernel

    own: dict[str, Any] = {"first_pair": launch.first_pair, "first_tile": launch.first_tile, "tiles": launch.tiles}
    own |= {"BQ": config.queries, "BK": config.keys, "EVEN": fills_padded_width(numbers), "PRECISION": dot_precision(q)}
    own |= {"FETCHED": tensors["k_tiles"] == "k_tiles", "LATE": config.late and can_defer_sums(common)}
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return KeywordLaunch(
        kernel, (launch.pairs * common["slots"],), COMMON_BINDINGS | tensors, numbers | common | own, options
    )


def can_defer_sums(common: dict[str, Any]) -> bool:
    """Sums over queries are carried to the next tile in four parts, where the same ones serve columns and picture."""
    means = common["PICTURE"] == 1 and not (common["RECEIVED"] and common["WEIGHTED"])
    return bool(means and common["CELL_QUERIES"] % 8 == 0 and common["CELL_KEYS"] % 16 == 0)


def fills_padded_width(numbers: dict[str, Any]) -> bool:
    return bool(numbers["D"] == numbers["BD"])


def build_topk_launch(
    numbers: dict[str, Any], request: Request, launch: LaunchRange, classes: KeyClasses, config: TileConfig, q: Tensor
) -> KeywordLaunch:
    """The heaviest keys of the queries of one launch: chosen, and those that this leaves in doubt put on a list."""
    from foci.kernels.statistics.topk import choose_topk as kernel

    queries, top = launch.tiles * config.queries, request.top
    log = (top - 1).bit_length()
    own = {
        "LARGEST": request.largest, "first_pair": launch.first_pair, "first_query": launch.first_tile * config.queries,
        "queries": queries, "segments": classes.segments, "EXACT": needs_exact_weights(q.dtype, classes), "TOP": top,
        "CLASSES": classes.number, "LOG_N": max(log, min(6, (classes.number - 1).bit_length())), "LOG": log,
        "BK": config.keys, "TAG_BITS": classes.tag_bits,
        "LABEL_BITS": max(classes.tag_bits, (max(2 * classes.number, 2 << log) - 1).bit_length()),
        "R": TOPK_QUERIES, "STEP": min(numbers["BD"], 32), "EVEN": fills_padded_width(numbers),
    }  # fmt: skip
    names = ("q", "k", "lse", "slopes", "best", "second", "third", "flags", "listed", "counter")
    return KeywordLaunch(
        kernel,
        (-(-queries // TOPK_QUERIES), launch.pairs),
        {name: name for name in names} | topk_outputs(request),
        {name: numbers[name] for name in TOPK_SCALARS} | own,
        {"num_warps": 1},
    )


def topk_outputs(request: Request) -> dict[str, str]:
    """Where the heaviest keys are written: in int32, where they stay if nobody wants them wider."""
    keys = "top_keys" if request.narrow else "chosen"
    return {"values": "top_values", "keys": keys, "largest_logits": "logits" if request.largest else "lse"}


def needs_exact_weights(dtype: torch.dtype, classes: KeyClasses) -> bool:
    """Whether the weights of the heaviest keys are computed anew, not taken as kept, without the bits of the tag."""
    return dtype == torch.float32 or classes.tag_bits > MAX_TAG_BITS


def build_refine_launch(
    numbers: dict[str, Any], request: Request, classes: KeyClasses, config: TileConfig, q: Tensor
) -> KeywordLaunch:
    """The heaviest keys of the queries that are in doubt, of all launches: classes that may hide one are read again."""
    from foci.kernels.statistics.topk import refine_topk as kernel

    top = request.top
    own = {
        "LARGEST": request.largest, "segments": classes.segments, "tags": classes.tags, "TOP": top,
        "SLOTS": 1 << (top - 1).bit_length(), "CLASSES": classes.number, "BK": config.keys, "READ": REFINE_KEYS,
        "STEP": min(numbers["BD"], max(16, 2048 * REFINE_WARPS // REFINE_KEYS)), "EVEN": fills_padded_width(numbers),
    }  # fmt: skip
    programs = min(REFINE_PROGRAMS * count_multiprocessors(q.device), q.shape[0] * q.shape[1] * q.shape[2])
    tensors = COMMON_BINDINGS | {name: name for name in ("flags", "listed", "counter")} | topk_outputs(request)
    return KeywordLaunch(kernel, (programs,), tensors, numbers | own, {"num_warps": REFINE_WARPS})


def build_join_launch(
    pairs: int,
    columns: tuple[int, int] | None,
    cells: tuple[int, int, int, int, str] | None,
    chosen: int,
    logits: int,
) -> KeywordLaunch:
    """What programs wrote apart.

    Args:
        columns: slots and keys; None where there is nothing to add up.
        cells: rows and columns of a picture, how many cells down and across make one of its, and how.
        chosen: how many keys were chosen in all; 0: none.
        logits: how many each pair has; 0: none.
    """
    from foci.kernels.statistics.merge import merge_statistics as kernel

    slots, keys = columns or (1, 1)
    rows, across_all, down, across, reduce = cells or (1, 1, 1, 1, "")
    size = pairs * rows * across_all
    programs = pairs * -(-keys // JOIN_BLOCK) if columns else 0
    programs += -(-size // JOIN_BLOCK) if cells else 0
    programs += -(-chosen // JOIN_BLOCK) + (pairs if logits else 0)
    written = {"columns": "received", "cells": "picture", "chosen": "top_keys", "logits": "largest"}
    there = {"columns": columns, "cells": cells, "chosen": chosen, "logits": logits}
    tensors = {name: name if there[name] else "lse" for name in written}
    tensors |= {into: into if there[name] else "lse" for name, into in written.items()}
    numbers = {
        "pairs": pairs, "slots": slots, "keys": keys, "picture_size": size, "picture_columns": across_all,
        "down": down, "across": across, "chosen_size": chosen, "logits_each": logits, "RECEIVED": columns is not None,
        "PICTURE": ("", "mean", "max").index(reduce), "TOP": chosen > 0, "LARGEST": logits > 0, "BN": JOIN_BLOCK,
    }  # fmt: skip
    return KeywordLaunch(kernel, (programs,), tensors, numbers, {"num_warps": 4})


def build_picture_launch(numbers: dict[str, Any], picture: tuple[int, int, str], q: Tensor) -> KeywordLaunch:
    """A picture whose cells do not fit the tiles: a pass of its own."""
    from foci.kernels.statistics.picture import pool_picture as kernel

    rows, columns, reduce = picture
    height = 2 ** math.ceil(math.log2(-(-numbers["Tq"] // rows)))
    width = 2 ** math.ceil(math.log2(-(-numbers["Tk"] // columns)))
    block = 64 if q.device.type == "cuda" else 16
    own = {"rows": rows, "columns": columns, "MAX": reduce == "max", "HEIGHT": height, "WIDTH": width}
    own |= {"BQ": block, "BK": block, "PRECISION": dot_precision(q)}
    # Pairs first: of the second a GPU takes 65,535 at most.
    grid = (q.shape[0] * q.shape[1], -(-rows // (block // min(height, block))))
    return KeywordLaunch(
        kernel, grid, COMMON_BINDINGS | {"out": "picture"}, numbers | own, {"num_warps": 4, "num_stages": 2}
    )


def dot_precision(q: Tensor) -> str:
    """Three products of tf32 parts are as good as float32 to its last bits; plain tf32 is not."""
    return "tf32x3" if q.dtype == torch.float32 else "tf32"

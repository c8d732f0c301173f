"""Plans a pass over the tiles of the attention matrix on a GPU: statistics from (q, k, log-sum-exp).

The launches of a pass depend only on shapes, strides, dtypes and the request: they are planned for the first call of a
kind and reused by later ones.

B batch, H query heads, G key/value heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foci.gpu.arguments import layout_key
from foci.gpu.launcher import MAX_CACHED_PLANS, DescriptorArgument, KeywordLaunch, count_multiprocessors
from foci.runtime.tensor_cache import get_or_make
from foci.runtime.tracing import is_traced
from foci.statistics.cuda import hopper, launches
from foci.statistics.cuda.arguments import (
    KernelTensors,
    check_arguments,
    is_tma_compatible,
    key_descriptors,
    picture_arguments,
    query_weight_arguments,
    statistics_scalars,
)
from foci.statistics.cuda.passes import OutputSpec, PassPlan, StatisticsPass
from foci.statistics.cuda.tiling import (
    ADDITIVE_CONFIG,
    CLASSES_PER_BOUND,
    MAX_CANDIDATE_BYTES,
    SHORT_LENGTH,
    KeyClasses,
    LaunchRange,
    PictureCells,
    TileConfig,
    choose_key_classes,
    default_config,
    fit_aligned_cells,
    fits_few_slots,
    lay_out_cells,
    programs_per_pair,
    split_launches,
)
from foci.statistics.request import Request

# As in kernels/statistics/topk.py.
FLAGS_PER_WORD = 16
# Short sequences need fewer, but then the kernel would be compiled for each length.
MIN_TAG_BITS = 7

PASS_CACHE: dict[Hashable, StatisticsPass] = {}


def launch_statistics(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    causal: bool = False,
    key_ranges: Tensor | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    dense: Tensor | None = None,
    bias: Tensor | None = None,
    bias_kind: int = 0,
    weight: Tensor | None = None,
    query_weights: Tensor | None = None,
    request: Request,
    config: TileConfig | None = None,
) -> dict[str, Tensor]:
    """Computes statistics of W = exp(softcap(scale q kᵀ) + bias - lse) over the visible keys in one pass.

    q (B, H, Tq, D), k (B, G, Tk, D), lse (B, H, Tq) float32, -inf for fully masked queries.
    slopes (H,): ALiBi, -slope |i + Tk - Tq - j| is added to the logits.
    causal: query i sees keys up to i + Tk - Tq. key_ranges (1 or B, 1 or 2, 2, Tq) int32: it sees the keys from low to
    high of each range; ranges are disjoint. query_ids (1 or B, Tq), key_ids (1 or B, Tk): it sees keys of its own id.
    dense: bool, broadcast to (B, H, Tq, Tk). A key is visible where all given masks allow it.
    bias (B or 1, H, Tq or 1, 2 clip + 1) float32: row tables, the bias of each distance from -clip to clip, which
    larger ones share; of bias_kind BEFORE_SCALE or AFTER_SCALE.
    weight (D,) or (H, D): of an additive score, weightᵀ tanh(q + k) in place of q kᵀ; it has scale 1, no softcap and no
    bias.
    query_weights (B, H, Tq) or (Tq,): how much each query counts in `received`.

    Returns by name: "entropy" (B, H, Tq), "received" (B, H, Tk), "picture" (B, H, rows, columns),
    "top_values" and "top_keys" (B, H, Tq, k), "largest_logit" (B, H), "distance" (B, H, Tq).
    """
    tensors = KernelTensors(q, k, lse, key_ranges, query_ids, key_ids, dense, slopes, bias, weight, query_weights)
    options = float(scale), None if softcap is None else float(softcap), causal, bias_kind, request, config
    if is_traced(q):
        return plan_pass(tensors, *options).run_traced(tensors.to_kernel_layout())
    return find_pass(tensors, *options)(tensors.to_kernel_layout())


def find_pass(tensors: KernelTensors, *options: Any) -> StatisticsPass:
    """The cached pass for a kind of call, planned on first use."""
    key = pass_key(tensors, *options)
    return get_or_make(PASS_CACHE, MAX_CACHED_PLANS, key, lambda: plan_pass(tensors, *options))


def pass_key(tensors: KernelTensors, *options: Any) -> Hashable:
    """Key of the cached passes: everything except addresses; for q and k, their 16-byte alignment, which TMA needs."""
    q, k, lse = tensors[:3]
    others = None if tensors.is_plain else tuple(map(layout_key, tensors[3:]))
    return (
        options,
        (q.shape, q.stride(), q.dtype, q.device),
        (k.shape, k.stride(), k.dtype, k.device),
        (lse.shape, lse.stride(), lse.dtype, lse.device),
        others,
        (q.data_ptr() % 16, k.data_ptr() % 16),
        MAX_CANDIDATE_BYTES,
    )


def plan_pass(
    tensors: KernelTensors,
    scale: float,
    softcap: float | None,
    causal: bool,
    bias_kind: int,
    request: Request,
    config: TileConfig | None,
) -> StatisticsPass:
    """Checks the call and plans the pass for calls of its kind."""
    check_arguments(tensors, causal, bias_kind, request)
    weighted, tensors = tensors.query_weights is not None, tensors.to_kernel_layout()
    scalars = statistics_scalars(tensors, scale, softcap, causal, bias_kind)
    if config is None and launches.can_run_short(scalars, weighted, request, tensors.q):
        outputs = [spec._replace(late=False) for spec in plan_outputs(tensors.q, tensors.k.shape[2], request, {})]
        short = [launches.build_short_launch(scalars, request, tensors.q)] if outputs else []
        return StatisticsPass(PassPlan(outputs, {}, {}, short, {}), tensors.q.device)
    config = config or choose_config(tensors.by_name() | scalars, weighted, request)
    maxima = request.picture if request.picture and request.picture[2] == "max" else None
    request = replace(request, picture=None) if maxima else request
    plan = PassPlan([], {}, {}, [], {})
    if request != Request(int32_keys=request.int32_keys):
        plan = plan_tile_pass(tensors, scalars, request, config)
    if maxima:
        plan.outputs.append(OutputSpec("picture", (*tensors.q.shape[:2], *maxima[:2]), zeros=True))
        # Before the launch that joins partial results, which must be the last.
        plan.launches.insert(0, launches.build_picture_launch(scalars, maxima, tensors.q))
    return StatisticsPass(plan, tensors.q.device)


def choose_config(arguments: dict[str, Any], weighted: bool, request: Request) -> TileConfig:
    """The config of the kernel for Hopper where it supports the call, else that of the Triton kernel."""
    if not hopper.refuses(arguments, weighted, request):
        return hopper.hopper_config(request, arguments["Tk"])
    if arguments["ADDITIVE"]:
        return ADDITIVE_CONFIG
    queries, keys = arguments["Tq"], arguments["Tk"]
    short = max(queries, keys) < SHORT_LENGTH
    config = default_config(arguments["D"], arguments["q"].dtype, request, is_tma_compatible(arguments["k"]), short)
    if request.picture and fit_aligned_cells(request.picture, queries, keys, config) is None:
        # Small tiles have few rows of cells.
        return config if fits_few_slots(request.picture[0], queries, config.queries) else replace(config, queries=64)
    return config


def plan_tile_pass(tensors: KernelTensors, scalars: dict[str, Any], request: Request, config: TileConfig) -> PassPlan:
    """Plans the pass over the tiles, in as many launches as the candidates for the top keys need."""
    q, keys = tensors.q, tensors.k.shape[2]
    batch, heads, tiles = q.shape[0], q.shape[1], config.count_tiles(q.shape[2])
    cells = lay_out_cells(request.picture, q.shape[2], keys, config) if request.picture else None
    classes = choose_key_classes(request.top, keys, config, MIN_TAG_BITS)
    bytes_per_tile = classes.bytes_per_query * config.queries if request.top else 0
    parts = list(split_launches(batch, heads, tiles, bytes_per_tile, MAX_CANDIDATE_BYTES))
    per_pair = programs_per_pair(
        min(heads, parts[0].pairs),
        max(part.tiles for part in parts),
        count_multiprocessors(q.device) * config.programs_per_sm,
    )
    partials = plan_partial_results(q, keys, request, cells, per_pair, tiles)
    arrays = plan_candidates(q, parts, config.queries, classes) if request.top else {}
    descriptors = tensor_descriptors(tensors.k, scalars["BD"], config)
    common = query_weight_arguments(tensors.query_weights) | picture_arguments(request, cells, scalars["RANGES"] == 2)
    common |= {
        "ENTROPY": request.entropy,
        "DISTANCE": request.distance,
        "LARGEST": request.largest_logit and not request.top,
    }
    common |= {"RECEIVED": request.received, "TOP": request.top > 0, "slots": per_pair}
    common |= {"SEGMENTS": classes.segments, "TAG_BITS": classes.tag_bits}
    exponentials = launches.plan_exponentials(tensors, config)
    common |= exponentials.scalars
    bindings = bind_tile_outputs(request, cells, partials) | {
        "k_tiles": "k_tiles" if "k_tiles" in descriptors else "lse"
    }
    bindings |= exponentials.bindings
    arrays |= exponentials.arrays
    plan = PassPlan(plan_outputs(q, keys, request, partials), arrays, partials, exponentials.launches, descriptors)
    for part in parts:
        plan.launches.append(launches.build_tile_launch(scalars, common, bindings, part, config, q))
        if request.top:
            plan.launches.append(launches.build_topk_launch(scalars, request, part, classes, config, q))
    if request.top:
        plan.launches.append(launches.build_refine_launch(scalars, request, classes, config, q))
    plan.launches.extend(plan_merge(q, keys, per_pair, request, cells, config, partials))
    return plan


def tensor_descriptors(k: Tensor, width: int, config: TileConfig) -> dict[str, DescriptorArgument]:
    """Tensors that the kernel reads by TMA descriptors."""
    return hopper.hopper_descriptors(config) if config.use_hopper else key_descriptors(k, width, config)


def plan_outputs(q: Tensor, keys: int, request: Request, partials: dict[str, Any]) -> list[OutputSpec]:
    """The outputs of the pass over the tiles; merged ones are written by the last launch."""
    lead, queries, outputs = (q.shape[0], q.shape[1]), q.shape[2], []
    if request.entropy:
        outputs.append(OutputSpec("entropy", (*lead, queries)))
    if request.distance:
        outputs.append(OutputSpec("distance", (*lead, queries)))
    if request.top:
        outputs.append(OutputSpec("top_values", (*lead, queries, request.top)))
        dtype = torch.int32 if request.int32_keys else torch.int64
        outputs.append(OutputSpec("top_keys", (*lead, queries, request.top), dtype, late=not request.int32_keys))
    if request.largest_logit:
        outputs.append(OutputSpec("largest_logit", lead, late=True))
    if request.received:
        outputs.append(OutputSpec("received", (*lead, keys), late="columns" in partials))
    if request.picture:
        outputs.append(OutputSpec("picture", (*lead, *request.picture[:2]), late=True))
    return outputs


def plan_partial_results(
    q: Tensor, keys: int, request: Request, cells: PictureCells | None, programs: int, tiles: int
) -> dict[str, tuple[int, torch.dtype]]:
    """Sizes of the partial results that programs write separately and that the last launch joins."""
    pairs, sizes = q.shape[0] * q.shape[1], {}
    if request.top and not request.int32_keys:
        sizes["chosen"] = pairs * q.shape[2] * request.top
    if request.largest_logit:
        # One per query where its top key is known, else one per tile.
        sizes["logits"] = pairs * (q.shape[2] if request.top else tiles)
    if request.received and programs > 1:
        sizes["columns"] = pairs * programs * keys
    if cells and request.picture:
        sizes["cells"] = pairs * cells.lines * cells.line_width(request.picture[1])
    return {name: (size, torch.int32 if name == "chosen" else torch.float32) for name, size in sizes.items()}


def bind_tile_outputs(request: Request, cells: PictureCells | None, arrays: dict[str, Any]) -> dict[str, str]:
    """Which tensor is bound to each argument of the tile kernel; lse for arguments that it does not use."""
    bindings = {
        "query_weights": "query_weights",
        "entropy": "entropy" if request.entropy else "lse",
        "distance": "distance" if request.distance else "lse",
        "largest": "logits" if request.largest_logit and not request.top else "lse",
        "columns": ("columns" if "columns" in arrays else "received") if request.received else "lse",
        "picture": "cells" if cells else "lse",
    }
    return bindings | {name: name if request.top else "lse" for name in ("best", "second", "third", "counter")}


def plan_candidates(
    q: Tensor, parts: list[LaunchRange], queries: int, classes: KeyClasses
) -> dict[str, tuple[int, torch.dtype]]:
    """Sizes of the candidates that a launch keeps until the top keys are chosen."""
    rows, number = max(part.pairs * part.tiles for part in parts) * queries, classes.number
    every = q.shape[0] * q.shape[1] * q.shape[2]
    return {
        "best": (rows * number, torch.float32),
        "second": (rows * number, torch.float32),
        "third": (rows * number // CLASSES_PER_BOUND, torch.float16),
        # For all launches: doubtful queries are read again together.
        "flags": (every * (number // FLAGS_PER_WORD), torch.int32),
        "listed": (every, torch.int32),
        "counter": (1, torch.int32),
    }


def plan_merge(
    q: Tensor,
    keys: int,
    programs: int,
    request: Request,
    cells: PictureCells | None,
    config: TileConfig,
    arrays: dict[str, Any],
) -> list[KeywordLaunch]:
    """The launch that merges partial results, if there are any."""
    if not arrays:
        return []
    pairs, picture = q.shape[0] * q.shape[1], None
    if cells and request.picture:
        picture = launches.PictureMerge(*request.picture[:2], cells, q.shape[2], keys, config.queries)
    partial_columns = (programs, keys) if "columns" in arrays else None
    each = arrays["logits"][0] // pairs if "logits" in arrays else 0
    chosen = arrays["chosen"][0] if "chosen" in arrays else 0
    return [launches.build_merge_launch(pairs, partial_columns, picture, chosen, each)]

"""Plans a pass over the tiles of the attention matrix on a GPU: statistics from (q, k, log-sum-exp).

The launches of a pass depend only on shapes, strides, dtypes and the request: they are planned for the first call of a
kind and reused by later ones.

B batch, H query heads, G key heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from foci.gpu.launcher import MAX_CACHED_PLANS, DescriptorArgument, KeywordLaunch, count_multiprocessors, layout_key
from foci.runtime.tensor_cache import get_or_make
from foci.runtime.tracing import is_traced
from foci.statistics.cuda import hopper, steps
from foci.statistics.cuda.arguments import (
    KernelTensors,
    check_arguments,
    is_tma_compatible,
    key_descriptors,
    picture_arguments,
    query_weight_arguments,
    scalar_arguments,
)
from foci.statistics.cuda.replay import OutputSpec, PassPlan, StatisticsPass
from foci.statistics.cuda.tiling import (
    CLASSES_PER_BOUND,
    MAX_CANDIDATE_BYTES,
    KeyClasses,
    LaunchRange,
    PictureCells,
    TileConfig,
    choose_key_classes,
    default_config,
    fit_picture_cells,
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
    query_weights: Tensor | None = None,
    request: Request,
    config: TileConfig | None = None,
) -> dict[str, Tensor]:
    """Computes statistics of W = exp(softcap(scale q kᵀ) + bias - lse) over the visible keys in one pass.

    q (B, H, Tq, D), k (B, G, Tk, D), lse (B, H, Tq) float32, -inf where a query sees nothing.
    slopes (H,): ALiBi, -slope |i + Tk - Tq - j| is added to the logits.
    causal: query i sees keys up to i + Tk - Tq. key_ranges (1 or B, 1 or 2, 2, Tq) int32: it sees the keys from low to
    high of each run; runs are disjoint. query_ids (1 or B, Tq), key_ids (1 or B, Tk): it sees keys of its own id.
    dense: bool, broadcast to (B, H, Tq, Tk). What all that are tensors allow is seen.
    query_weights (B, H, Tq) or (Tq,): how much each query counts in `received`.

    Returns what is request: "entropy" (B, H, Tq), "received" (B, H, Tk), "picture" (B, H, rows, columns),
    "top_values" and "top_keys" (B, H, Tq, k), "largest" (B, H), "distance" (B, H, Tq).
    """
    tensors = KernelTensors(q, k, lse, key_ranges, query_ids, key_ids, dense, slopes, query_weights)
    options = float(scale), None if softcap is None else float(softcap), causal, request, config
    if is_traced(q):
        return plan_pass(tensors, *options).traced(tensors.to_kernel_layout())
    return get_or_make(PASS_CACHE, MAX_CACHED_PLANS, pass_key(tensors, *options), lambda: plan_pass(tensors, *options))(
        tensors.to_kernel_layout()
    )


def pass_key(tensors: KernelTensors, *options: Any) -> Hashable:
    """Key of the cached passes: everything but the addresses, and of those whether TMA can use them."""
    q, k = tensors.q, tensors.k
    tensors = [None if x is None else (layout_key(x), x.device) for x in tensors]
    return (
        *terms,
        *tensors,
        q.data_ptr() % 16 == 0,
        k.data_ptr() % 16 == 0,
        count_multiprocessors(q.device),
        MAX_CANDIDATE_BYTES,
    )


def plan_pass(
    tensors: KernelTensors,
    scale: float,
    softcap: float | None,
    causal: bool,
    request: Request,
    config: TileConfig | None,
) -> StatisticsPass:
    """Checks the call and plans the pass for calls of its kind."""
    check_arguments(tensors, causal, request)
    weighted, tensors = tensors.query_weights is not None, tensors.to_kernel_layout()
    numbers = scalar_arguments(tensors, scale, softcap, causal)
    config = config or choose_config(tensors.by_name() | numbers, weighted, request)
    fit = (
        fit_picture_cells(request.picture, tensors.q.shape[2], tensors.k.shape[2], config) if request.picture else None
    )
    plan = PassPlan([], {}, {}, [], {})
    if any((request.entropy, request.received, fit, request.top, request.largest, request.distance)):
        plan = plan_tile_pass(tensors, numbers, request, config, fit)
    if request.picture and fit is None:
        shape = (*tensors.q.shape[:2], *request.picture[:2])
        plan.results.append(OutputSpec("picture", shape, zeros=True))
        # Before the launch that joins partial results, which must be the last.
        plan.launchings.insert(0, steps.build_picture_launch(numbers, request.picture, tensors.q))
    return StatisticsPass(plan, tensors.q.device)


def choose_config(arguments: dict[str, Any], weighted: bool, request: Request) -> TileConfig:
    """The config of the kernel for Hopper where it supports the call, else that of the Triton kernel."""
    if not hopper.refuses(arguments, weighted, request):
        return hopper.hopper_config(request)
    return default_config(arguments["D"], arguments["q"].dtype, request, is_tma_compatible(arguments["k"]))


def plan_tile_pass(
    tensors: KernelTensors, numbers: dict[str, Any], request: Request, config: TileConfig, fit: PictureCells | None
) -> PassPlan:
    """Plans the pass over the tiles, in as many launches as the candidates for the top keys need."""
    q, keys = tensors.q, tensors.k.shape[2]
    pairs, tiles = q.shape[0] * q.shape[1], -(-q.shape[2] // config.queries)
    classes = choose_key_classes(request.top, keys, config, MIN_TAG_BITS)
    parts = list(
        split_launches(
            pairs, tiles, classes.bytes_per_query * config.queries if request.top else 0, MAX_CANDIDATE_BYTES
        )
    )
    per_pair = programs_per_pair(
        parts[0].pairs, max(part.tiles for part in parts), count_multiprocessors(q.device) * config.programs_per_sm
    )
    lasting = plan_partial_results(q, keys, request, fit, per_pair, tiles)
    arrays = plan_candidates(q, parts, config.queries, classes) if request.top else {}
    described = tensor_descriptors(tensors.k, numbers["BD"], config)
    common = query_weight_arguments(tensors.query_weights)
    common |= picture_arguments(request, fit, keys, twice=numbers["RANGES"] == 2)
    common |= {"ENTROPY": request.entropy, "DISTANCE": request.distance, "LARGEST": request.largest and not request.top}
    common |= {"RECEIVED": request.received, "TOP": request.top > 0, "slots": per_pair}
    common |= {"SEGMENTS": classes.segments, "TAG_BITS": classes.tag_bits}
    tensors = bind_tile_outputs(request, fit, lasting) | {"k_tiles": "k_tiles" if "k_tiles" in described else "lse"}
    found = PassPlan(plan_results(q, keys, request, fit, lasting), arrays, lasting, [], described)
    for part in parts:
        found.launchings.append(steps.build_tile_launch(numbers, common, tensors, part, config, q))
        if request.top:
            found.launchings.append(steps.build_topk_launch(numbers, request, part, classes, config, q))
    if request.top:
        found.launchings.append(steps.build_refine_launch(numbers, request, classes, config, q))
        found.results.append(OutputSpec("counter", (1,), torch.int32, zeros=True, given=False))
    found.launchings.extend(plan_join(pairs, keys, per_pair, request, fit, lasting))
    return found


def tensor_descriptors(k: Tensor, width: int, config: TileConfig) -> dict[str, DescriptorArgument]:
    """Tensors that the kernel reads by TMA descriptors."""
    return hopper.hopper_descriptors(config) if config.use_hopper else key_descriptors(k, width, config)


def plan_results(
    q: Tensor, keys: int, request: Request, fit: PictureCells | None, lasting: dict[str, Any]
) -> list[OutputSpec]:
    """The outputs of the pass over the tiles; joined ones are written by the last launch."""
    lead, queries, found = (q.shape[0], q.shape[1]), q.shape[2], []
    if request.entropy:
        found.append(OutputSpec("entropy", (*lead, queries)))
    if request.distance:
        found.append(OutputSpec("distance", (*lead, queries)))
    if request.top:
        found.append(OutputSpec("top_values", (*lead, queries, request.top)))
        dtype = torch.int32 if request.narrow else torch.int64
        found.append(OutputSpec("top_keys", (*lead, queries, request.top), dtype, late=not request.narrow))
    if request.largest:
        found.append(OutputSpec("largest", lead, late=True))
    if request.received:
        found.append(OutputSpec("received", (*lead, keys), late="columns" in lasting))
    if fit and request.picture:
        found.append(OutputSpec("picture", (*lead, *request.picture[:2]), late="cells" in lasting))
    return found


def plan_partial_results(
    q: Tensor, keys: int, request: Request, fit: PictureCells | None, slots: int, tiles: int
) -> dict[str, tuple[int, torch.dtype]]:
    """Sizes of the partial results that programs write separately and that the last launch joins."""
    pairs, found = q.shape[0] * q.shape[1], {}
    if request.top and not request.narrow:
        found["chosen"] = pairs * q.shape[2] * request.top
    if request.largest:
        # One per query where its top key is known, else one per tile.
        found["logits"] = pairs * (q.shape[2] if request.top else tiles)
    if request.received and slots > 1:
        found["columns"] = pairs * slots * keys
    if fit and request.picture and (fit.rows, fit.columns) != request.picture[:2]:
        found["cells"] = pairs * fit.rows * fit.columns
    return {name: (size, torch.int32 if name == "chosen" else torch.float32) for name, size in found.items()}


def bind_tile_outputs(request: Request, fit: PictureCells | None, arrays: dict[str, Any]) -> dict[str, str]:
    """Which tensor is bound to each argument of the tile kernel; lse for arguments that it does not use."""
    there = {
        "query_weights": "query_weights",
        "entropy": "entropy" if request.entropy else "lse",
        "distance": "distance" if request.distance else "lse",
        "largest": "logits" if request.largest and not request.top else "lse",
        "columns": ("columns" if "columns" in arrays else "received") if request.received else "lse",
        "picture": ("cells" if "cells" in arrays else "picture") if fit else "lse",
    }
    return there | {name: name if request.top else "lse" for name in ("best", "second", "third")}


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
    }


def plan_join(
    pairs: int, keys: int, slots: int, request: Request, fit: PictureCells | None, arrays: dict[str, Any]
) -> list[KeywordLaunch]:
    """The launch that joins partial results, if there are any."""
    if not arrays:
        return []
    picture = None
    if "cells" in arrays and fit and request.picture:
        rows, columns, reduce = request.picture
        picture = rows, columns, fit.rows // rows, fit.columns // columns, reduce
    columns_apart = (slots, keys) if "columns" in arrays else None
    each = arrays["logits"][0] // pairs if "logits" in arrays else 0
    chosen = arrays["chosen"][0] if "chosen" in arrays else 0
    return [steps.build_join_launch(pairs, columns_apart, picture, chosen, each)]

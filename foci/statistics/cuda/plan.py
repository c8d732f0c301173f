"""One pass over the tiles of the attention matrix on a GPU: statistics from (q, k, log-sum-exp).

What a pass does follows from shapes, strides, dtypes and what is wanted: it is planned for the first call of a kind,
and later ones hand their tensors to it.

B batch, H query heads, G key heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from foci.gpu.launcher import MAX_CACHED_PLANS, DescriptorArgument, KeywordLaunch, count_multiprocessors, layout_key
from foci.runtime.checks import is_traced
from foci.runtime.tensor_cache import get_or_make
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
# Fewer would be enough for short sequences, at the price of a build for each length.
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
    spans: Tensor | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    dense: Tensor | None = None,
    query_weights: Tensor | None = None,
    wanted: Request,
    config: TileConfig | None = None,
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
    given = KernelTensors(q, k, lse, spans, query_ids, key_ids, dense, slopes, query_weights)
    terms = float(scale), None if softcap is None else float(softcap), causal, wanted, config
    if is_traced(q):
        return plan_pass(given, *terms).traced(given.readable())
    return get_or_make(PASS_CACHE, MAX_CACHED_PLANS, pass_key(given, *terms), lambda: plan_pass(given, *terms))(
        given.readable()
    )


def pass_key(given: KernelTensors, *terms: Any) -> Hashable:
    """What a pass follows from: all but the addresses, and of these whether the copy engine takes them."""
    q, k = given.q, given.k
    tensors = [None if x is None else (layout_key(x), x.device) for x in given]
    return (
        *terms,
        *tensors,
        q.data_ptr() % 16 == 0,
        k.data_ptr() % 16 == 0,
        count_multiprocessors(q.device),
        MAX_CANDIDATE_BYTES,
    )


def plan_pass(
    given: KernelTensors, scale: float, softcap: float | None, causal: bool, wanted: Request, config: TileConfig | None
) -> StatisticsPass:
    """The pass for calls such as this one, which is checked."""
    check_arguments(given, causal, wanted)
    weighted, given = given.query_weights is not None, given.readable()
    numbers = scalar_arguments(given, scale, softcap, causal)
    config = config or choose_config(given.by_name() | numbers, weighted, wanted)
    fit = fit_picture_cells(wanted.picture, given.q.shape[2], given.k.shape[2], config) if wanted.picture else None
    plan = PassPlan([], {}, {}, [], {})
    if any((wanted.entropy, wanted.received, fit, wanted.top, wanted.largest, wanted.distance)):
        plan = plan_tile_pass(given, numbers, wanted, config, fit)
    if wanted.picture and fit is None:
        shape = (*given.q.shape[:2], *wanted.picture[:2])
        plan.results.append(OutputSpec("picture", shape, zeros=True))
        # Before what joins the rest: that must be the last.
        plan.launchings.insert(0, steps.build_picture_launch(numbers, wanted.picture, given.q))
    return StatisticsPass(plan, given.q.device)


def choose_config(arguments: dict[str, Any], weighted: bool, wanted: Request) -> TileConfig:
    """The kernel for Hopper where it serves, else the plain one, cut as measured."""
    if not hopper.refuses(arguments, weighted, wanted):
        return hopper.hopper_config(wanted)
    return default_config(arguments["D"], arguments["q"].dtype, wanted, is_tma_compatible(arguments["k"]))


def plan_tile_pass(
    given: KernelTensors, numbers: dict[str, Any], wanted: Request, config: TileConfig, fit: PictureCells | None
) -> PassPlan:
    """The pass over the tiles, in as many launches as the candidates for the heaviest keys need."""
    q, keys = given.q, given.k.shape[2]
    pairs, tiles = q.shape[0] * q.shape[1], -(-q.shape[2] // config.queries)
    classes = choose_key_classes(wanted.top, keys, config, MIN_TAG_BITS)
    parts = list(
        split_launches(pairs, tiles, classes.bytes_per_query * config.queries if wanted.top else 0, MAX_CANDIDATE_BYTES)
    )
    per_pair = programs_per_pair(
        parts[0].pairs, max(part.tiles for part in parts), count_multiprocessors(q.device) * config.per_processor
    )
    lasting = plan_partial_results(q, keys, wanted, fit, per_pair, tiles)
    arrays = plan_candidates(q, parts, config.queries, classes) if wanted.top else {}
    described = tensor_descriptors(given.k, numbers["BD"], config)
    common = query_weight_arguments(given.query_weights)
    common |= picture_arguments(wanted, fit, keys, twice=numbers["SPANS"] == 2)
    common |= {"ENTROPY": wanted.entropy, "DISTANCE": wanted.distance, "LARGEST": wanted.largest and not wanted.top}
    common |= {"RECEIVED": wanted.received, "TOP": wanted.top > 0, "slots": per_pair}
    common |= {"SEGMENTS": classes.segments, "TAG_BITS": classes.tag_bits}
    tensors = bind_tile_outputs(wanted, fit, lasting) | {"k_tiles": "k_tiles" if "k_tiles" in described else "lse"}
    found = PassPlan(plan_results(q, keys, wanted, fit, lasting), arrays, lasting, [], described)
    for part in parts:
        found.launchings.append(steps.build_tile_launch(numbers, common, tensors, part, config, q))
        if wanted.top:
            found.launchings.append(steps.build_topk_launch(numbers, wanted, part, classes, config, q))
    if wanted.top:
        found.launchings.append(steps.build_refine_launch(numbers, wanted, classes, config, q))
        found.results.append(OutputSpec("counter", (1,), torch.int32, zeros=True, given=False))
    found.launchings.extend(plan_join(pairs, keys, per_pair, wanted, fit, lasting))
    return found


def tensor_descriptors(k: Tensor, width: int, config: TileConfig) -> dict[str, DescriptorArgument]:
    """The tensors that the pass is given as the copy engine takes them."""
    return hopper.hopper_descriptors(config) if config.in_flight else key_descriptors(k, width, config)


def plan_results(
    q: Tensor, keys: int, wanted: Request, fit: PictureCells | None, lasting: dict[str, Any]
) -> list[OutputSpec]:
    """What the pass gives, all of it written: also the zeros that it adds to. What is joined is late."""
    lead, queries, found = (q.shape[0], q.shape[1]), q.shape[2], []
    if wanted.entropy:
        found.append(OutputSpec("entropy", (*lead, queries)))
    if wanted.distance:
        found.append(OutputSpec("distance", (*lead, queries)))
    if wanted.top:
        found.append(OutputSpec("top_values", (*lead, queries, wanted.top)))
        dtype = torch.int32 if wanted.narrow else torch.int64
        found.append(OutputSpec("top_keys", (*lead, queries, wanted.top), dtype, late=not wanted.narrow))
    if wanted.largest:
        found.append(OutputSpec("largest", lead, late=True))
    if wanted.received:
        found.append(OutputSpec("received", (*lead, keys), late="columns" in lasting))
    if fit and wanted.picture:
        found.append(OutputSpec("picture", (*lead, *wanted.picture[:2]), late="cells" in lasting))
    return found


def plan_partial_results(
    q: Tensor, keys: int, wanted: Request, fit: PictureCells | None, slots: int, tiles: int
) -> dict[str, tuple[int, torch.dtype]]:
    """What programs write apart and has to be joined."""
    pairs, found = q.shape[0] * q.shape[1], {}
    if wanted.top and not wanted.narrow:
        found["chosen"] = pairs * q.shape[2] * wanted.top
    if wanted.largest:
        # Of each query, where its heaviest key is known; else of each tile.
        found["logits"] = pairs * (q.shape[2] if wanted.top else tiles)
    if wanted.received and slots > 1:
        found["columns"] = pairs * slots * keys
    if fit and wanted.picture and (fit.rows, fit.columns) != wanted.picture[:2]:
        found["cells"] = pairs * fit.rows * fit.columns
    return {name: (size, torch.int32 if name == "chosen" else torch.float32) for name, size in found.items()}


def bind_tile_outputs(wanted: Request, fit: PictureCells | None, arrays: dict[str, Any]) -> dict[str, str]:
    """What stands for the arguments of the pass over the tiles; lse where nothing is read or written."""
    there = {
        "query_weights": "query_weights",
        "entropy": "entropy" if wanted.entropy else "lse",
        "distance": "distance" if wanted.distance else "lse",
        "largest": "logits" if wanted.largest and not wanted.top else "lse",
        "columns": ("columns" if "columns" in arrays else "received") if wanted.received else "lse",
        "picture": ("cells" if "cells" in arrays else "picture") if fit else "lse",
    }
    return there | {name: name if wanted.top else "lse" for name in ("best", "second", "third")}


def plan_candidates(
    q: Tensor, parts: list[LaunchRange], queries: int, classes: KeyClasses
) -> dict[str, tuple[int, torch.dtype]]:
    """What a launch keeps of the keys until the heaviest are chosen."""
    rows, number = max(part.pairs * part.tiles for part in parts) * queries, classes.number
    every = q.shape[0] * q.shape[1] * q.shape[2]
    return {
        "best": (rows * number, torch.float32),
        "second": (rows * number, torch.float32),
        "third": (rows * number // CLASSES_PER_BOUND, torch.float16),
        # Of all launches: they are read again together.
        "flags": (every * (number // FLAGS_PER_WORD), torch.int32),
        "listed": (every, torch.int32),
    }


def plan_join(
    pairs: int, keys: int, slots: int, wanted: Request, fit: PictureCells | None, arrays: dict[str, Any]
) -> list[KeywordLaunch]:
    """The launch that joins what was written apart, where anything was."""
    if not arrays:
        return []
    picture = None
    if "cells" in arrays and fit and wanted.picture:
        rows, columns, reduce = wanted.picture
        picture = rows, columns, fit.rows // rows, fit.columns // columns, reduce
    columns_apart = (slots, keys) if "columns" in arrays else None
    each = arrays["logits"][0] // pairs if "logits" in arrays else 0
    chosen = arrays["chosen"][0] if "chosen" in arrays else 0
    return [steps.build_join_launch(pairs, columns_apart, picture, chosen, each)]

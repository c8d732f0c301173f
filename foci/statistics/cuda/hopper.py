"""The kernel for Hopper, written in Gluon: which calls it supports, and its launch; the Triton kernel runs the rest."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from foci.gpu.launcher import DescriptorArgument, KeywordLaunch
from foci.gpu.self_check import find_failure, run_in_process
from foci.runtime.device import major_capability
from foci.runtime.tracing import is_traced
from foci.statistics.cuda.arguments import is_tma_compatible
from foci.statistics.cuda.tiling import (
    KEYS_PER_FETCH,
    KEYS_PER_WARP,
    LaunchRange,
    TileConfig,
    choose_segments,
    fit_aligned_cells,
)
from foci.statistics.request import Request

SUPPORTED_WIDTHS = (64, 128)
# As in kernels/statistics/tiles_hopper.py: one segment for even tiles and one for odd ones.
HOPPER_SEGMENTS = 2
MIN_CELL_QUERIES = 32
# Lengths that are not a multiple of 128, and pictures whose cells do not align with tiles: the shortest sequence and
# the longest; the longest with such a picture, whose partial sums take its square / 64 bytes per head, and the largest
# product of its columns and keys; the queries of a strip, and the least share of the slots of tiles that has a query.
MIN_RAGGED_TOKENS, MAX_RAGGED_TOKENS = 512, 2**18
MAX_RAGGED_PICTURE_TOKENS, MAX_RAGGED_PRODUCT = 16384, 2**24
RAGGED_STRIP, MIN_FILLED_SLOTS = 32, 0.7


def refuses(arguments: dict[str, Any], weighted: bool, request: Request | None = None) -> list[str]:
    """Why the kernel does not support these `common_arguments`; without a request, whether it supports any."""
    if is_traced(arguments["q"]):
        return ["a traced call is not supported"]
    reasons = hopper_device_refusals(arguments["q"].device) + mask_refusals(arguments) + shape_refusals(arguments)
    if weighted:
        reasons.append("query weights are not supported")
    if request is not None:
        reasons += request_refusals(request, arguments)
    return reasons


def hopper_device_refusals(device: torch.device) -> list[str]:
    if device.type != "cuda" or torch.version.hip is not None:
        return [f"the queries are on {device.type if torch.version.hip is None else 'ROCm'}, not on CUDA"]
    if major_capability(device.index) != 9:
        return [f"the GPU has compute capability {major_capability(device.index)}, not 9"]
    failure = gluon_failure(device.index or 0)
    return [] if failure is None else [f"the kernel failed its self-check with this version of Triton ({failure})"]


@cache
def gluon_failure(index: int) -> str | None:
    """Why the kernel does not work with this version of Triton; None where it does.

    Gluon is an experimental part of Triton whose API changes.
    """
    return find_failure(
        "gluon", index, lambda: run_in_process("foci.statistics.cuda.hopper_check", "check_kernel", index)
    )


def mask_refusals(arguments: dict[str, Any]) -> list[str]:
    kinds = {
        "RANGES": "a mask of key ranges",
        "IDS": "a documents mask",
        "DENSE": "a dense mask",
        "SOFTCAP": "softcap",
        "ALIBI": "ALiBi",
        "TABLE": "a row table",
        "ADDITIVE": "an additive score",
    }
    return [f"{kind} is not supported" for name, kind in kinds.items() if arguments[name]]


def shape_refusals(arguments: dict[str, Any]) -> list[str]:
    reasons = []
    queries, keys = arguments["Tq"], arguments["Tk"]
    if queries != keys or (keys % KEYS_PER_FETCH and not MIN_RAGGED_TOKENS <= keys <= MAX_RAGGED_TOKENS):
        reasons.append(
            f"queries and keys must be equal and a multiple of {KEYS_PER_FETCH} or from {MIN_RAGGED_TOKENS}"
            f" to {MAX_RAGGED_TOKENS}, got {queries} and {keys}"
        )
    if arguments["D"] not in SUPPORTED_WIDTHS:
        reasons.append(f"the width must be 64 or 128, got {arguments['D']}")
    if not (is_tma_compatible(arguments["q"]) and is_tma_compatible(arguments["k"])):
        reasons.append("TMA does not support the layout or dtype of queries or keys")
    return reasons


def request_refusals(request: Request, arguments: dict[str, Any]) -> list[str]:
    """Return the reasons why the kernel does not compute these statistics.

    The largest logit is that of the top keys if these are requested, else scale times the largest product.
    """
    reasons = []
    tokens = arguments["Tk"]
    if request.largest_logit and not request.top and arguments["scale"] <= 0:
        reasons.append(f"the largest logit needs a positive scale, got {arguments['scale']}")
    # Without the entropy, the Triton kernel has registers for tiles of twice the size.
    if request.top and not request.entropy:
        reasons.append("for top keys without the entropy, the Triton kernel is as fast")
    elif request.largest_logit and not request.entropy:
        reasons.append("for the largest logit without the entropy, the Triton kernel is as fast")
    if request.top and choose_segments(request.top, 32) != HOPPER_SEGMENTS:
        reasons.append(f"5 to 8 top keys are supported, got {request.top}")
    if request.picture is not None and not supports_picture(request.picture, tokens, base_config(request)):
        reasons.append(
            f"a picture of {request.picture[0]} x {request.picture[1]} by {request.picture[2]} is not supported"
        )
    return reasons


def supports_picture(picture: tuple[int, int, str], tokens: int, config: TileConfig) -> bool:
    """Whether the kernel sums the cells. A picture of maxima has a pass of its own."""
    return picture[2] == "max" or has_aligned_cells(picture, tokens, config) or has_ragged_cells(picture, tokens)


def has_aligned_cells(picture: tuple[int, int, str], tokens: int, config: TileConfig) -> bool:
    cells = fit_aligned_cells(picture, tokens, tokens, config)
    return cells is not None and cells.cell_keys == KEYS_PER_WARP and cells.cell_queries >= MIN_CELL_QUERIES


def has_ragged_cells(picture: tuple[int, int, str], tokens: int) -> bool:
    """Whether strips of queries are well filled, and at most one column starts among the keys of a warp."""
    rows, columns, _ = picture
    filled = tokens / (count_strips(picture, tokens) * RAGGED_STRIP)
    fits = MIN_RAGGED_TOKENS <= tokens <= MAX_RAGGED_PICTURE_TOKENS and tokens * columns < MAX_RAGGED_PRODUCT
    return fits and tokens >= rows and tokens // columns >= KEYS_PER_WARP and filled >= MIN_FILLED_SLOTS


def count_strips(picture: tuple[int, int, str], tokens: int) -> int:
    """As few strips per row of the picture as hold its queries."""
    return picture[0] * -(-tokens // (picture[0] * RAGGED_STRIP))


def base_config(request: Request) -> TileConfig:
    """Tiles of 64 queries if top keys or the largest product take registers, else of 128."""
    queries = 64 if request.top or request.largest_logit else 128
    return TileConfig(queries, keys=64, warps=4, stages=2, programs_per_sm=2, use_hopper=True)


def hopper_config(request: Request, tokens: int) -> TileConfig:
    """The config for a length: with strips where it or the picture does not align with tiles."""
    config = base_config(request)
    picture = request.picture if request.picture and request.picture[2] == "mean" else None
    if tokens % KEYS_PER_FETCH == 0 and (picture is None or has_aligned_cells(picture, tokens, config)):
        return config
    if picture is None:
        return replace(config, strips=-(-tokens // config.queries), strip_queries=config.queries)
    return replace(config, strips=count_strips(picture, tokens), strip_queries=RAGGED_STRIP, strip_columns=picture[1])


def build_hopper_launch(
    scalars: dict[str, Any], bindings: dict[str, str], part: LaunchRange, config: TileConfig
) -> KeywordLaunch:
    """Build the launch of the kernel for the tiles of `part`; the counterpart of `launches.build_tile_launch`."""
    from foci.kernels.statistics.tiles_hopper import tile_statistics_hopper as kernel

    names = ("lse", "entropy", "distance", "largest", "columns", "picture", "best", "second", "third", "counter")
    same = ("H", "group", "slots", "scale", "picture_lines", "picture_columns", "CAUSAL", "ENTROPY", "DISTANCE")
    own_scalars = {name: scalars[name] for name in (*same, "LARGEST", "RECEIVED", "TOP", "TAG_BITS")}
    own_scalars |= {"first_pair": part.first_pair, "first_tile": part.first_tile, "tiles": part.tiles}
    own_scalars |= {
        "key_pairs": scalars["Tq"] // KEYS_PER_FETCH,
        "BQ": config.queries,
        "PICTURE": scalars["PICTURE"] > 0,
    }
    own_scalars |= {"STRIP": scalars["CELL_QUERIES"] if scalars["PICTURE"] else config.queries}
    own_scalars |= {"WIDE": max(1, scalars["COLUMN_KEYS"] // KEYS_PER_WARP), "RAGGED": config.strips > 0}
    own_scalars |= {"tokens": scalars["Tq"], "strips": config.strips, "columns_cut": config.strip_columns}
    own_scalars |= {name: scalars[name] for name in ("q_batch", "q_head", "q_query")}
    own_bindings = {"q": "q_tiles", "k": "k_tiles", "q_memory": "q"} | {name: bindings[name] for name in names}
    grid = (part.pairs * scalars["slots"],)
    return KeywordLaunch(kernel, grid, own_bindings, own_scalars, {"num_warps": config.warps, "maxnreg": 255})


def hopper_descriptors(config: TileConfig) -> dict[str, DescriptorArgument]:
    """Descriptors by which the kernel fetches queries and keys."""
    return {
        "q_tiles": DescriptorArgument("q", partial(make_tma_descriptor, rows=config.queries)),
        "k_tiles": DescriptorArgument("k", partial(make_tma_descriptor, rows=KEYS_PER_FETCH)),
    }


def make_tma_descriptor(x: Tensor, rows: int) -> Any:
    """Descriptor by which TMA fetches `rows` rows of x (B, H, T, D) at a time."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = [1, 1, rows, x.shape[-1]]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16)
    return TensorDescriptor.from_tensor(x, block, layout)

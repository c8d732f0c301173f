"""The launcher of the kernel for Hopper, and what that kernel takes; the rest is left to the one in plain Triton."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from foci.gpu.launcher import DescriptorArgument, KeywordLaunch, triton_version
from foci.runtime.device import major_capability
from foci.runtime.tracing import is_traced
from foci.statistics.cuda.arguments import is_tma_compatible
from foci.statistics.cuda.tiling import LaunchRange, PictureCells, TileConfig, choose_segments, fit_picture_cells
from foci.statistics.request import Request

# Gluon is an experiment of Triton's, and its names change: these are the versions that the kernel was built with.
SUPPORTED_TRITON_VERSIONS = ((3, 6), (3, 7))
SUPPORTED_WIDTHS = (64, 128)
# The keys that are fetched at a time, two tiles.
KEYS_PER_FETCH = 128
# As in kernels/statistics/tiles_hopper.py: one for even tiles and one for odd ones.
HOPPER_SEGMENTS = 2
MIN_CELL_QUERIES = 32
CELL_KEYS = 16


def refuses(arguments: dict[str, Any], weighted: bool, request: Request | None = None) -> list[str]:
    """Why the kernel does not serve these arguments of `inputs`; empty where it does, or may: without request."""
    if is_traced(arguments["q"]):
        return ["a call that is traced"]
    reasons = device_refusals(arguments["q"].device) + mask_refusals(arguments) + shape_refusals(arguments)
    if weighted:
        reasons.append("queries that count by their weight")
    if request is not None:
        reasons += request_refusals(request, arguments)
    return reasons


def device_refusals(device: torch.device) -> list[str]:
    if device.type != "cuda" or torch.version.hip is not None:
        return [f"the queries are on {device.type if torch.version.hip is None else 'ROCm'}, not on CUDA"]
    if major_capability(device.index) != 9:
        return [f"a GPU of compute capability {major_capability(device.index)}, not 9"]
    return list(triton_version_refusals())


@cache
def triton_version_refusals() -> tuple[str, ...]:
    version = triton_version()
    return () if version in SUPPORTED_TRITON_VERSIONS else (f"the Gluon of Triton {'.'.join(map(str, version))}",)


def mask_refusals(arguments: dict[str, Any]) -> list[str]:
    kinds = {
        "RANGES": "runs of keys",
        "IDS": "documents",
        "DENSE": "a dense mask",
        "SOFTCAP": "a softcap",
        "ALIBI": "ALiBi",
    }
    return [what for name, what in kinds.items() if arguments[name]]


def shape_refusals(arguments: dict[str, Any]) -> list[str]:
    reasons = []
    if arguments["Tq"] != arguments["Tk"] or arguments["Tk"] % KEYS_PER_FETCH:
        reasons.append(
            f"{arguments['Tq']} queries and {arguments['Tk']} keys, not equal and a multiple of {KEYS_PER_FETCH}"
        )
    if arguments["D"] not in SUPPORTED_WIDTHS:
        reasons.append(f"width {arguments['D']}, not 64 or 128")
    if not (is_tma_compatible(arguments["q"]) and is_tma_compatible(arguments["k"])):
        reasons.append("queries or keys that the copy engine does not take")
    return reasons


def request_refusals(request: Request, arguments: dict[str, Any]) -> list[str]:
    """The largest logit is that of the heaviest keys, where these are request, else that of the largest product.

    For the heaviest keys or the largest logit without the entropy plain Triton has room for tiles of twice the size,
    and is as fast.
    """
    reasons = []
    tokens = arguments["Tk"]
    if request.largest and not request.top and arguments["scale"] <= 0:
        reasons.append(f"the largest logit of products times {arguments['scale']}")
    if request.top and not request.entropy:
        reasons.append("the heaviest keys without the entropy")
    elif request.largest and not request.entropy:
        reasons.append("the largest logit without the entropy")
    if request.top and choose_segments(request.top, tokens // 64, 32) != HOPPER_SEGMENTS:
        reasons.append(f"the {request.top} heaviest keys, not 5 to 8")
    if request.picture is not None and not supports_picture_cells(
        request.picture[2], fit_picture_cells(request.picture, tokens, tokens, hopper_config(request))
    ):
        reasons.append(f"a picture of {request.picture[0]} x {request.picture[1]} by {request.picture[2]}")
    return reasons


def supports_picture_cells(reduce: str, fit: PictureCells | None) -> bool:
    """Whether the kernel writes such cells. Those that fit no tile take a pass of their own beside either kernel."""
    if fit is None:
        return True
    return reduce == "mean" and fit.cell_keys == CELL_KEYS and fit.cell_queries >= MIN_CELL_QUERIES


def hopper_config(request: Request) -> TileConfig:
    """Candidates for the heaviest keys take half the registers; the largest product has no room beside 128 queries."""
    queries = 64 if request.top or request.largest else 128
    return TileConfig(queries, keys=64, warps=4, stages=2, per_processor=2, in_flight=True)


def build_hopper_launch(
    numbers: dict[str, Any], tensors: dict[str, str], launch: LaunchRange, config: TileConfig
) -> KeywordLaunch:
    """One launch of the pass over the tiles; numbers and tensors are those of statistics.py."""
    from foci.kernels.statistics.tiles_hopper import tile_statistics_hopper as kernel

    names = ("lse", "entropy", "distance", "largest", "columns", "picture", "best", "second", "third")
    same = ("H", "group", "slots", "scale", "picture_columns", "picture_scale", "CAUSAL", "ENTROPY", "DISTANCE")
    own = {name: numbers[name] for name in (*same, "LARGEST", "RECEIVED", "TOP", "TAG_BITS")}
    own |= {"first_pair": launch.first_pair, "first_tile": launch.first_tile, "tiles": launch.tiles}
    own |= {"T": numbers["Tq"], "BQ": config.queries, "PICTURE": numbers["PICTURE"] > 0}
    own |= {"STRIP": numbers["CELL_QUERIES"] if numbers["PICTURE"] else config.queries}
    own |= {"WIDE": max(1, numbers["COLUMN_KEYS"] // CELL_KEYS)}
    given = {"q": "q_tiles", "k": "k_tiles"} | {name: tensors[name] for name in names}
    grid = (launch.pairs * numbers["slots"],)
    return KeywordLaunch(kernel, grid, given, own, {"num_warps": config.warps, "maxnreg": 255})


def hopper_descriptors(config: TileConfig) -> dict[str, DescriptorArgument]:
    """Queries and keys as the kernel takes them."""
    return {
        "q_tiles": DescriptorArgument("q", partial(make_tma_descriptor, rows=config.queries)),
        "k_tiles": DescriptorArgument("k", partial(make_tma_descriptor, rows=KEYS_PER_FETCH)),
    }


def make_tma_descriptor(x: Tensor, rows: int) -> Any:
    """x (B, H, T, D) as the copy engine fetches it, so many rows at a time."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = [1, 1, rows, x.shape[-1]]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16)
    return TensorDescriptor.from_tensor(x, block, layout)

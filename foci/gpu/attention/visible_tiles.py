"""Launches before the attention kernels: the key ranges of documents, and the query tiles that see a key tile."""

from __future__ import annotations

from typing import Any

from foci.gpu.arguments import Tiling, batch_stride
from foci.gpu.attention import row_table
from foci.gpu.attention.arguments import CallPart, count_document_rows
from foci.gpu.attention.tilings import ceil_divide
from foci.gpu.launcher import KernelLaunch, build_kernel_launch


def document_range_launches(part: CallPart) -> tuple[list[KernelLaunch], dict[str, int]]:
    """The launch that finds the key range of each query's document, and its workspace; none without documents."""
    options, (Tq, Tk) = part.options, (part.q.shape[2], part.k.shape[2])
    rows = 0 if options.table_kind else count_document_rows(options)
    if rows == 0:
        return [], {}
    from foci.kernels.attention.tile import find_document_ranges

    (BM, BN) = (16, 16) if part.q.device.type == "cpu" else (16, 256)
    scalars = {"query_ids_batch": batch_stride(options.query_ids), "key_ids_batch": batch_stride(options.key_ids)}
    scalars |= {"Tq": Tq, "Tk": Tk, "BM": BM, "BN": BN}
    launch = build_kernel_launch(find_document_ranges, (rows, ceil_divide(Tq, BM)), scalars, num_warps=4)
    return [launch], {"document_ranges": rows * 3 * Tq}


def query_tile_launches(
    part: CallPart, scalars: dict[str, Any], tiling: Tiling
) -> tuple[list[KernelLaunch], dict[str, int]]:
    """The launches that find the query tiles which see a key tile, and their workspace: for ranges and documents."""
    options, B, Tk = part.options, part.q.shape[0], part.k.shape[2]
    if options.table_kind:
        return row_table.tile_range_launches(options.key_ranges, Tk, tiling.queries, tiling.keys)
    if options.key_ranges is None and options.query_ids is None:
        return [], {}
    from foci.kernels.attention.tile import find_key_bounds
    from foci.kernels.distance_bias.tables import find_tile_query_ranges

    rows, columns = ceil_divide(part.q.shape[2], tiling.queries), ceil_divide(Tk, tiling.keys)
    ranges = max(scalars["RANGES"], 1)
    counted = {"count": rows, "Tk": Tk, "RANGES": ranges, "BN": tiling.keys, "BT": 64}
    # The batch comes first in the grid: the second dimension is limited to 65,535 programs.
    launches = [
        build_kernel_launch(find_key_bounds, (B, rows), scalars | tiling.sizes(), num_warps=4),
        build_kernel_launch(find_tile_query_ranges, (B, columns), counted, num_warps=4),
    ]
    return launches, {
        "key_bounds": B * rows * ranges * 2, "common_keys": B * rows * 2, "query_tiles": B * columns * 5,
    }  # fmt: skip

"""The launches around attention with a bias by distance: buckets as a row table and back, and which tiles see which.

H heads, Tq queries, Tk keys, W distances, Bm 1 or the batch size.
"""

from __future__ import annotations

from torch import Tensor

from foci.gpu.distance_bias.row_table import DistanceBiasOptions
from foci.gpu.launcher import KernelLaunch, build_kernel_launch

# Rows of a table's gradient that are added at a time, and the most parts that they are added in.
ROWS_PER_STEP, MAX_PARTS = 16, 1024


def fill_row_table_launches(terms: DistanceBiasOptions, heads: int) -> list[KernelLaunch]:
    """Fills the row table `table` (H, W) of buckets; nothing where there are none."""
    if terms.table is None:
        return []
    from foci.kernels.distance_bias.tables import fill_row_table as kernel

    width, (bucket, head) = block_size(terms.width), terms.table.stride()
    numbers = {"H": heads, "W": terms.width, "bucket_stride": bucket, "head_stride": head, "BW": width}
    return [build_kernel_launch(kernel, (heads, -(-terms.width // width)), numbers, num_warps=4)]


def row_table_workspace(terms: DistanceBiasOptions, heads: int) -> dict[str, int]:
    """How many floats the row table of buckets has."""
    return {} if terms.table is None else {"table": heads * terms.width}


def bucket_gradient_launches(terms: DistanceBiasOptions, q: Tensor) -> tuple[list[KernelLaunch], dict[str, int]]:
    """From the gradient of all rows, `d_table`, to that of the buckets, and the floats that it takes on the way."""
    from foci.kernels.distance_bias.tables import sum_bucket_gradients, sum_row_gradients

    assert terms.table is not None
    (B, H, Tq, _), W, width = q.shape, terms.width, block_size(terms.width)
    blocks = -(-W // width)
    parts = max(1, min(MAX_PARTS // (H * blocks), 64, -(-B * Tq // ROWS_PER_STEP)))
    numbers = {"H": H, "W": W, "Tq": Tq, "count": B * Tq, "per_part": -(-B * Tq // parts), "parts": parts}
    numbers |= {"BR": ROWS_PER_STEP, "BW": width}
    steps = [
        build_kernel_launch(sum_row_gradients, (parts, H, blocks), numbers, num_warps=4),
        build_kernel_launch(sum_bucket_gradients, (terms.table.shape[0], H), numbers, num_warps=4),
    ]
    return steps, {"sums": parts * H * W}


def tile_range_launches(
    spans: Tensor | None, Tk: int, queries: int, keys: int
) -> tuple[list[KernelLaunch], dict[str, int]]:
    """Which tiles of queries see some of a tile of keys (`reach`), which run of keys all queries of a tile see
    (`inner`), for tiles of so many queries and keys; and the floats that it takes.
    """
    if spans is None:
        return [], {}
    from foci.kernels.distance_bias.tables import find_tile_key_ranges, find_tile_query_ranges

    Bm, runs, _, Tq = spans.shape
    rows, columns = -(-Tq // queries), -(-Tk // keys)
    numbers = {"spans_batch": spans.stride(0), "Tq": Tq, "Tk": Tk, "SPANS": runs, "BM": queries, "BN": keys}
    numbers |= {"count": rows, "BT": block_size(rows)}
    # Sequences first: of the second a GPU takes 65,535 at most.
    steps = [
        build_kernel_launch(find_tile_key_ranges, (Bm, rows), numbers, num_warps=4),
        build_kernel_launch(find_tile_query_ranges, (Bm, columns), numbers, num_warps=4),
    ]
    return steps, {"edges": Bm * rows * runs * 2, "inner": Bm * rows * 2, "reach": Bm * columns * 2}


def block_size(length: int) -> int:
    """A power of two: how many of a row a program takes at a time."""
    return min(max(16, 1 << (length - 1).bit_length()), 128)

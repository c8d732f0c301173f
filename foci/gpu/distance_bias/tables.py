"""The launches around attention with a bias by distance: buckets as a row table and back, and which tiles see which.

H heads, Tq queries, Tk keys, W distances, Bm 1 or the batch size.
"""

from __future__ import annotations

from torch import Tensor

from foci.gpu.distance_bias.row_table import Terms
from foci.gpu.launcher import Step, step

# Rows of a table's gradient that are added at a time, and the most parts that they are added in.
ROWS, PARTS = 16, 1024


def spreading(terms: Terms, heads: int) -> list[Step]:
    """Fills the row table `table` (H, W) of buckets; nothing where there are none."""
    if terms.table is None:
        return []
    from foci.kernels.distance_bias.tables import spread as kernel

    width, (bucket, head) = block(terms.width), terms.table.stride()
    numbers = {"H": heads, "W": terms.width, "bucket_stride": bucket, "head_stride": head, "BW": width}
    return [step(kernel, (heads, -(-terms.width // width)), numbers, num_warps=4)]


def row_sizes(terms: Terms, heads: int) -> dict[str, int]:
    """How many floats the row table of buckets has."""
    return {} if terms.table is None else {"table": heads * terms.width}


def collecting(terms: Terms, q: Tensor) -> tuple[list[Step], dict[str, int]]:
    """From the gradient of all rows, `d_table`, to that of the buckets, and the floats that it takes on the way."""
    from foci.kernels.distance_bias.tables import sum_buckets, sum_rows

    assert terms.table is not None
    (B, H, Tq, _), W, width = q.shape, terms.width, block(terms.width)
    blocks = -(-W // width)
    parts = max(1, min(PARTS // (H * blocks), 64, -(-B * Tq // ROWS)))
    numbers = {"H": H, "W": W, "Tq": Tq, "count": B * Tq, "per_part": -(-B * Tq // parts), "parts": parts}
    numbers |= {"BR": ROWS, "BW": width}
    steps = [
        step(sum_rows, (parts, H, blocks), numbers, num_warps=4),
        step(sum_buckets, (terms.table.shape[0], H), numbers, num_warps=4),
    ]
    return steps, {"sums": parts * H * W}


def reaching(spans: Tensor | None, Tk: int, queries: int, keys: int) -> tuple[list[Step], dict[str, int]]:
    """Which tiles of queries see some of a tile of keys (`reach`), which run of keys all queries of a tile see
    (`inner`), for tiles of so many queries and keys; and the floats that it takes.
    """
    if spans is None:
        return [], {}
    from foci.kernels.distance_bias.tables import tile_reach, tile_spans

    Bm, runs, _, Tq = spans.shape
    rows, columns = -(-Tq // queries), -(-Tk // keys)
    numbers = {"spans_batch": spans.stride(0), "Tq": Tq, "Tk": Tk, "SPANS": runs, "BM": queries, "BN": keys}
    numbers |= {"count": rows, "BT": block(rows)}
    # Sequences first: of the second a GPU takes 65,535 at most.
    steps = [
        step(tile_spans, (Bm, rows), numbers, num_warps=4),
        step(tile_reach, (Bm, columns), numbers, num_warps=4),
    ]
    return steps, {"edges": Bm * rows * runs * 2, "inner": Bm * rows * 2, "reach": Bm * columns * 2}


def block(length: int) -> int:
    """A power of two: how many of a row a program takes at a time."""
    return min(max(16, 1 << (length - 1).bit_length()), 128)

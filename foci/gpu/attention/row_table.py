"""Row tables of a distance bias: how they are filled, and how gradients flow through them.

A row table holds the bias of one query for each distance; the kernels read it at clip(distance) + clip. Buckets share
one row among all queries. Relative keys give each query its own row, q · keys[distance]; it is linear in q and keys, so
its gradient takes two matrix products. Row tables of Relative exist for some heads at a time only.

B batch, H heads, Tq queries, Tk keys, W = 2 clip + 1 distances, D width, Bm 1 or the batch size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from foci.gpu.arguments import next_power_of_two
from foci.gpu.attention.arguments import AttentionOptions, HeadSlices
from foci.gpu.launcher import KernelLaunch, build_kernel_launch

# Memory for the row tables of one part of a call. Enough for a thousand programs at 128 queries and 257 distances.
MAX_ROW_TABLE_BYTES = 2**28

# Rows of a table's gradient that a program adds per loop iteration, and the maximum number of partial sums.
ROWS_PER_STEP, MAX_PARTIAL_SUMS = 16, 1024


def split_by_memory(q: Tensor, group: int, row_bytes: int) -> Iterator[HeadSlices]:
    """Split a call into parts whose row tables fit into memory; heads that share keys stay together."""
    batch, heads, queries, _ = q.shape
    pairs = max(MAX_ROW_TABLE_BYTES // max(row_bytes * queries, 1), 1)
    if pairs >= heads:
        step = pairs // heads
        yield from ((slice(b, min(b + step, batch)), slice(0, heads)) for b in range(0, batch, step))
        return
    step = max(pairs // group, 1) * group
    for b in range(batch):
        yield from ((slice(b, b + 1), slice(h, min(h + step, heads))) for h in range(0, heads, step))


def compute_row_table(q: Tensor, options: AttentionOptions) -> Tensor | None:
    """The row table of Relative keys (B, H, Tq, W); None for other biases. A kernel fills that of Buckets."""
    return None if options.keys is None else q.float() @ options.keys.mT


def add_matmul(out: Tensor, rows: Tensor, table: Tensor) -> None:
    """Compute out += rows @ table in float32: (B, H, Tq, D), (B, H, Tq, W) and (W, D) or (H, W, D)."""
    if table.dim() == 2:
        out.view(-1, out.shape[-1]).addmm_(rows.view(-1, rows.shape[-1]), table)
        return
    tables = table.expand(out.shape[0], *table.shape).flatten(0, 1)
    out.view(-1, *out.shape[2:]).baddbmm_(rows.view(-1, *rows.shape[2:]), tables)


def table_gradient(table: Tensor, rows: Tensor, x: Tensor) -> Tensor:
    """Σ rowsᵀ x, the gradient of a table (W, D) or (H, W, D), from (B, H, Tq, W) and (B, H, Tq, D)."""
    products = rows.mT @ x.float()
    return products.sum((0, 1)) if table.dim() == 2 else products.sum(0)


def weights_by_distance(band: Tensor, peaks: Tensor, log_sums: Tensor) -> Tensor:
    """Turn the base-2 logits of a band (B, H, Tq, W) into weights, in place; its two ends are sums of weights."""
    finite = torch.where(peaks == -torch.inf, 0.0, peaks + log_sums).unsqueeze(-1)
    band[..., 1:-1].sub_(finite).exp2_()
    return band


def row_table_workspace(options: AttentionOptions, heads: int) -> dict[str, int]:
    """The size of the row table of Buckets."""
    return {} if options.table is None else {"table": heads * options.distances}


def fill_row_table_launches(options: AttentionOptions, heads: int) -> list[KernelLaunch]:
    """The launch that fills the row table (H, W) of Buckets; none for other biases."""
    if options.table is None:
        return []
    from foci.kernels.distance_bias.tables import fill_row_table as kernel

    width, (bucket, head) = block_size(options.distances), options.table.stride()
    scalars = {"H": heads, "W": options.distances, "bucket_stride": bucket, "head_stride": head, "BW": width}
    return [build_kernel_launch(kernel, (heads, -(-options.distances // width)), scalars, num_warps=4)]


def bucket_gradient_launches(options: AttentionOptions, q: Tensor) -> tuple[list[KernelLaunch], dict[str, int]]:
    """The launches that sum the gradient of all rows, `d_table`, into that of the buckets; and their workspace."""
    from foci.kernels.distance_bias.tables import sum_bucket_gradients, sum_row_gradients

    assert options.table is not None
    (B, H, Tq, _), W, width = q.shape, options.distances, block_size(options.distances)
    blocks = -(-W // width)
    parts = max(1, min(MAX_PARTIAL_SUMS // (H * blocks), 64, -(-B * Tq // ROWS_PER_STEP)))
    scalars = {"H": H, "W": W, "Tq": Tq, "count": B * Tq, "per_part": -(-B * Tq // parts), "parts": parts}
    scalars |= {"BR": ROWS_PER_STEP, "BW": width}
    launches = [
        build_kernel_launch(sum_row_gradients, (parts, H, blocks), scalars, num_warps=4),
        build_kernel_launch(sum_bucket_gradients, (options.table.shape[0], H), scalars, num_warps=4),
    ]
    return launches, {"sums": parts * H * W}


def tile_range_launches(
    key_ranges: Tensor | None, Tk: int, queries: int, keys: int
) -> tuple[list[KernelLaunch], dict[str, int]]:
    """The launches that find which tiles see each other, for tiles of `queries` x `keys` entries, and their workspace.

    `query_tiles` holds the query tiles that see some and those that see all keys of a key tile,
    `common_keys` the range of keys that all queries of a query tile see.
    """
    if key_ranges is None:
        return [], {}
    from foci.kernels.distance_bias.tables import find_tile_key_ranges, find_tile_query_ranges

    Bm, ranges, _, Tq = key_ranges.shape
    rows, columns = -(-Tq // queries), -(-Tk // keys)
    scalars = {
        "key_ranges_batch": key_ranges.stride(0),
        "Tq": Tq,
        "Tk": Tk,
        "RANGES": ranges,
        "BM": queries,
        "BN": keys,
    }
    scalars |= {"count": rows, "BT": 64}
    # The batch comes first in the grid: the second dimension is limited to 65,535 programs.
    launches = [
        build_kernel_launch(find_tile_key_ranges, (Bm, rows), scalars, num_warps=4),
        build_kernel_launch(find_tile_query_ranges, (Bm, columns), scalars, num_warps=4),
    ]
    return launches, {
        "key_bounds": Bm * rows * ranges * 2, "common_keys": Bm * rows * 2, "query_tiles": Bm * columns * 5,
    }  # fmt: skip


def block_size(length: int) -> int:
    """The number of entries that a program takes at a time: a power of two from 16 to 128."""
    return min(next_power_of_two(length), 128)

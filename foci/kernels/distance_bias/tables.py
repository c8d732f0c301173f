"""Small kernels before and after attention with a distance bias: row tables, visible tiles, and bucket sums.

B batch, H heads, Tq queries, Tk keys, W distances, Bm 1 or the batch size.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["H", "bucket_stride"])
def fill_row_table(by_bucket, buckets, table, H, W, bucket_stride, head_stride, BW: tl.constexpr):
    """Expand buckets (buckets, H) to a row table (H, W): a program per head and block of distances."""
    h, w = tl.program_id(0), tl.program_id(1) * BW + tl.arange(0, BW)
    bucket = tl.load(buckets + w, mask=w < W, other=0)
    row = tl.load(by_bucket + bucket * bucket_stride + h * head_stride, mask=w < W, other=0.0)
    tl.store(table + h * W + w, row, mask=w < W)


@triton.jit(do_not_specialize=["H", "Tq", "count", "per_part"])
def sum_row_gradients(d_table, sums, H, W, Tq, count, per_part, BR: tl.constexpr, BW: tl.constexpr):
    """Sum the gradient of the row table (B, H, Tq, W) over parts of its B * Tq = count rows: sums (parts, H, W)."""
    part, h, w = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BW + tl.arange(0, BW)
    total = tl.zeros((BR, BW), tl.float32)
    for first in range(part * per_part, tl.minimum((part + 1) * per_part, count), BR):
        row = first + tl.arange(0, BR)
        there = (row < tl.minimum((part + 1) * per_part, count))[:, None] & (w < W)[None, :]
        index = ((row // Tq).to(tl.int64) * H + h) * Tq + row % Tq
        total += tl.load(d_table + index[:, None] * W + w[None, :], mask=there, other=0.0)
    tl.store(sums + (part * H + h) * W + w, tl.sum(total, 0), mask=w < W)


@triton.jit(do_not_specialize=["H", "parts"])
def sum_bucket_gradients(sums, buckets, d_by_bucket, H, W, parts, BW: tl.constexpr):
    """Sum the partial sums (parts, H, W) by bucket, in a fixed order: d_by_bucket (buckets, H), a program each."""
    bucket, h = tl.program_id(0), tl.program_id(1)
    total = tl.zeros((BW,), tl.float64)
    for first in range(0, W, BW):
        w = first + tl.arange(0, BW)
        there = (w < W) & (tl.load(buckets + w, mask=w < W, other=-1) == bucket)
        for part in range(parts):
            total += tl.load(sums + (part * H + h) * W + w, mask=there, other=0.0).to(tl.float64)
    tl.store(d_by_bucket + bucket * H + h, tl.sum(total, 0).to(tl.float32))


@triton.jit
def as_int32_pointer(pointer):
    """Int32 in workspace that was allocated as float32."""
    return pointer.to(tl.pointer_type(tl.int32))


@triton.jit(do_not_specialize=["key_ranges_batch", "Tq", "Tk"])
def find_tile_key_ranges(
    key_ranges, key_bounds, common_keys, key_ranges_batch, Tq, Tk, RANGES: tl.constexpr, BM: tl.constexpr
):
    """For each tile of queries, find the keys that some query sees and the keys that all queries see.

    key_bounds (Bm, tiles, ranges, 2): first visible key, and last + 1. common_keys (Bm, tiles, 2): the range that all
    queries see in their first range.
    """
    b, tile = tl.program_id(0), tl.program_id(1)
    row = tile * BM + tl.arange(0, BM)
    index = b.to(tl.int64) * tl.num_programs(1) + tile
    for s in tl.static_range(RANGES):
        low = tl.load(key_ranges + b.to(tl.int64) * key_ranges_batch + 2 * s * Tq + row, mask=row < Tq, other=0)
        high = tl.load(key_ranges + b.to(tl.int64) * key_ranges_batch + (2 * s + 1) * Tq + row, mask=row < Tq, other=0)
        bounds = as_int32_pointer(key_bounds) + (index * RANGES + s) * 2
        tl.store(bounds, tl.min(tl.where(low < high, low, Tk), 0))
        tl.store(bounds + 1, tl.max(tl.where(low < high, high, 0), 0))
        if s == 0:
            tl.store(as_int32_pointer(common_keys) + 2 * index, tl.max(low, 0))
            shared = tl.min(tl.where(row < Tq, high, Tk), 0)
            tl.store(as_int32_pointer(common_keys) + 2 * index + 1, shared)


@triton.jit(do_not_specialize=["count", "Tk"])
def find_tile_query_ranges(
    key_bounds, common_keys, query_tiles, count, Tk, RANGES: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr
):
    """For each tile of keys, find which of `count` query tiles see some of its keys, and which see all of them.

    query_tiles (Bm, tiles, 5): first and last + 1 of the tiles that see some; the same of a run that sees all; and 1
    if the queries of each tile that sees some have a common range, 0 if not.
    """
    b, tile = tl.program_id(0), tl.program_id(1)
    first, last, full, end, common = count, 0, count, count, 1
    for start in range(0, count, BT):
        t = start + tl.arange(0, BT)
        inside = t < count
        index = b.to(tl.int64) * count + t
        seen = t < 0
        for s in tl.static_range(RANGES):
            bounds = as_int32_pointer(key_bounds) + (index * RANGES + s) * 2
            low = tl.load(bounds, mask=inside, other=0)
            high = tl.load(bounds + 1, mask=inside, other=0)
            seen = seen | ((low < (tile + 1) * BN) & (high > tile * BN))
        first = tl.minimum(first, tl.min(tl.where(seen, t, count), 0))
        last = tl.maximum(last, tl.max(tl.where(seen, t + 1, 0), 0))
        low = tl.load(as_int32_pointer(common_keys) + 2 * index, mask=inside, other=0)
        high = tl.load(as_int32_pointer(common_keys) + 2 * index + 1, mask=inside, other=0)
        common = tl.minimum(common, tl.min(tl.where(seen & (high == 0), 0, 1), 0))
        whole = inside & (low <= tile * BN) & (high >= tl.minimum((tile + 1) * BN, Tk))
        full = tl.minimum(full, tl.min(tl.where(whole, t, count), 0))
        end = tl.minimum(end, tl.min(tl.where((t > full) & (whole == 0), t, count), 0))
    index = 5 * (b.to(tl.int64) * tl.num_programs(1) + tile)
    query_tiles = as_int32_pointer(query_tiles) + index
    tl.store(query_tiles, first)
    tl.store(query_tiles + 1, last)
    tl.store(query_tiles + 2, full)
    tl.store(query_tiles + 3, end)
    tl.store(query_tiles + 4, common)

"""What stands around attention with a bias by distance: small tables before it, and sums after it.

B batch, H heads, Tq queries, Tk keys, W distances, Bm 1 or the batch size.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def fill_row_table(by_bucket, buckets, table, H, W, bucket_stride, head_stride, BW: tl.constexpr):
    """Buckets (buckets, H) as a row table (H, W): a program per head and some distances."""
    h, w = tl.program_id(0), tl.program_id(1) * BW + tl.arange(0, BW)
    bucket = tl.load(buckets + w, mask=w < W, other=0)
    found = tl.load(by_bucket + bucket * bucket_stride + h * head_stride, mask=w < W, other=0.0)
    tl.store(table + h * W + w, found, mask=w < W)


@triton.jit
def sum_row_gradients(d_table, sums, H, W, Tq, count, per_part, BR: tl.constexpr, BW: tl.constexpr):
    """The gradient of the row table (B, H, Tq, W), its B * Tq = count rows in parts: sums (parts, H, W)."""
    part, h, w = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BW + tl.arange(0, BW)
    total = tl.zeros((BR, BW), tl.float32)
    for first in range(part * per_part, tl.minimum((part + 1) * per_part, count), BR):
        row = first + tl.arange(0, BR)
        there = (row < tl.minimum((part + 1) * per_part, count))[:, None] & (w < W)[None, :]
        place = ((row // Tq).to(tl.int64) * H + h) * Tq + row % Tq
        total += tl.load(d_table + place[:, None] * W + w[None, :], mask=there, other=0.0)
    tl.store(sums + (part * H + h) * W + w, tl.sum(total, 0), mask=w < W)


@triton.jit
def sum_bucket_gradients(sums, buckets, d_by_bucket, H, W, parts, BW: tl.constexpr):
    """sums (parts, H, W) by bucket: d_by_bucket (buckets, H). A program each, in an order that is always the same."""
    bucket, h = tl.program_id(0), tl.program_id(1)
    total = tl.zeros((BW,), tl.float64)
    for first in range(0, W, BW):
        w = first + tl.arange(0, BW)
        there = (w < W) & (tl.load(buckets + w, mask=w < W, other=-1) == bucket)
        for part in range(parts):
            total += tl.load(sums + (part * H + h) * W + w, mask=there, other=0.0).to(tl.float64)
    tl.store(d_by_bucket + bucket * H + h, tl.sum(total, 0).to(tl.float32))


@triton.jit
def as_int32_pointer(room):
    """Room that was made for floats."""
    return room.to(tl.pointer_type(tl.int32))


@triton.jit
def find_tile_key_ranges(spans, edges, inner, spans_batch, Tq, Tk, SPANS: tl.constexpr, BM: tl.constexpr):
    """Of a tile of queries: edges (Bm, tiles, runs, 2), from the first to the last key that one of them sees, and inner
    (Bm, tiles, 2), the run of keys that all of them see; none where a query has two runs.
    """
    b, tile = tl.program_id(0), tl.program_id(1)
    row = tile * BM + tl.arange(0, BM)
    place = b.to(tl.int64) * tl.num_programs(1) + tile
    for s in tl.static_range(SPANS):
        low = tl.load(spans + b.to(tl.int64) * spans_batch + 2 * s * Tq + row, mask=row < Tq, other=0)
        high = tl.load(spans + b.to(tl.int64) * spans_batch + (2 * s + 1) * Tq + row, mask=row < Tq, other=0)
        edge = as_int32_pointer(edges) + (place * SPANS + s) * 2
        tl.store(edge, tl.min(tl.where(low < high, low, Tk), 0))
        tl.store(edge + 1, tl.max(tl.where(low < high, high, 0), 0))
        if s == 0:
            tl.store(as_int32_pointer(inner) + 2 * place, tl.max(low, 0))
            shared = tl.min(tl.where(row < Tq, high, Tk), 0)
            tl.store(as_int32_pointer(inner) + 2 * place + 1, shared if SPANS == 1 else 0)


@triton.jit
def find_tile_query_ranges(edges, reach, count, SPANS: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr):
    """reach (Bm, tiles of keys, 2): from the first to the last of `count` tiles of queries that see one of the keys."""
    b, tile = tl.program_id(0), tl.program_id(1)
    first, last = count, 0
    for start in range(0, count, BT):
        t = start + tl.arange(0, BT)
        seen = t < 0
        for s in tl.static_range(SPANS):
            edge = as_int32_pointer(edges) + ((b.to(tl.int64) * count + t) * SPANS + s) * 2
            low = tl.load(edge, mask=t < count, other=0)
            high = tl.load(edge + 1, mask=t < count, other=0)
            seen = seen | ((low < (tile + 1) * BN) & (high > tile * BN))
        first = tl.minimum(first, tl.min(tl.where(seen, t, count), 0))
        last = tl.maximum(last, tl.max(tl.where(seen, t + 1, 0), 0))
    place = 2 * (b.to(tl.int64) * tl.num_programs(1) + tile)
    tl.store(as_int32_pointer(reach) + place, first)
    tl.store(as_int32_pointer(reach) + place + 1, last)

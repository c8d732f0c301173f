"""A picture of the largest weight of each cell: edges at floor(r T / rows), any rows and columns.

Each cell is padded to a power of two in both directions, so that a tile consists of whole cells, or a cell of whole
tiles, and pooling is a reshape. Means do not need this: tiles.py sums by products.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.additive.forward import sum_tanh_directly
from foci.kernels.logits import apply_masks, key_range, load_lse
from foci.kernels.statistics.biased_logits import entry_logits, locate_bias
from foci.kernels.statistics.tiles import cell_at

# A new value of one of these does not trigger a compilation.
LENGTHS = [
    "H", "group", "Tq", "Tk", "rows", "columns", "key_ranges_batch", "query_ids_batch", "key_ids_batch",
    "dense_batch", "dense_head", "dense_query", "dense_key", "bias_batch", "bias_head", "bias_query", "clip",
    "weight_head",
]  # fmt: skip


@triton.jit
def cell_start(cell, cells, length):
    """The first index of a cell."""
    return ((cell.to(tl.int64) * length) // cells).to(tl.int32)


@triton.jit(do_not_specialize=LENGTHS)
def pool_picture(
    q, k, lse, key_ranges, query_ids, key_ids, dense, slopes, bias, weight, out,
    H, group, Tq, Tk, D, rows, columns,
    q_batch, q_head, q_query, k_batch, k_head, k_key, key_ranges_batch, query_ids_batch, key_ids_batch,
    dense_batch, dense_head, dense_query, dense_key,
    bias_batch, bias_head, bias_query, clip, weight_head, scale, softcap,
    CAUSAL: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr,
    TABLE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, ADDITIVE: tl.constexpr, PTX: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per pair and per tile of cell rows. A cell is at most HEIGHT x WIDTH; out is initialized to 0."""
    # Triton 3.5 has no min() of constants.
    TALL: tl.constexpr = HEIGHT if HEIGHT < BQ else BQ  # noqa: FURB136
    WIDE: tl.constexpr = WIDTH if WIDTH < BK else BK  # noqa: FURB136
    pair = tl.program_id(0)
    b = (pair // H).to(tl.int64)
    h = pair % H
    offset = Tk - Tq
    q += b * q_batch + h.to(tl.int64) * q_head
    k += b * k_batch + (h // group).to(tl.int64) * k_head
    key_ranges += b * key_ranges_batch
    query_ids += b * query_ids_batch
    key_ids += b * key_ids_batch
    dense += b * dense_batch + h.to(tl.int64) * dense_head
    lse += pair.to(tl.int64) * Tq
    out += pair.to(tl.int64) * rows * columns
    bias = locate_bias(bias, b, h, 0, bias_batch, bias_head, bias_query)
    weight += h.to(tl.int64) * weight_head
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + h)
    d = tl.arange(0, BD)
    across = tl.arange(0, BK)
    down = tl.arange(0, BQ)
    row = tl.program_id(1) * (BQ // TALL) + down // TALL
    top = cell_start(row, rows, Tq)
    bottom = tl.where(row < rows, cell_start(row + 1, rows, Tq), 0)

    lowest_key = tl.full((), Tk, tl.int32)
    highest_key = tl.full((), 0, tl.int32)
    for part in range(HEIGHT // TALL):
        i = top + part * BQ + down % TALL
        for run in tl.static_range(RANGES if RANGES > 0 else 1):
            low, high = key_range(key_ranges, run, i, offset, Tq, Tk, CAUSAL, RANGES)
            some = (high > low) & (i < bottom)
            lowest_key = tl.minimum(lowest_key, tl.min(tl.where(some, low, Tk), 0))
            highest_key = tl.maximum(highest_key, tl.max(tl.where(some, high, 0), 0))
    first_column = cell_at(lowest_key, columns, Tk) // (BK // WIDE) * (BK // WIDE)
    last_column = tl.where(highest_key > lowest_key, cell_at(highest_key - 1, columns, Tk) + 1, first_column)

    for start in range(first_column, last_column, BK // WIDE):
        column = start + across // WIDE
        left = cell_start(column, columns, Tk)
        right = tl.where(column < columns, cell_start(column + 1, columns, Tk), 0)
        cells = tl.zeros((BQ // TALL, BK // WIDE), tl.float32)
        for part in range((HEIGHT // TALL) * (WIDTH // WIDE)):
            i = top + (part // (WIDTH // WIDE)) * BQ + down % TALL
            j = left + (part % (WIDTH // WIDE)) * BK + across % WIDE
            if ADDITIVE:
                z = sum_tanh_directly(q, q_query, i[:, None], Tq, k, k_key, j[None, :], Tk, weight, D, PTX)
            else:
                queries = tl.load(
                    q + i.to(tl.int64)[:, None] * q_query + d[None, :],
                    mask=(i < bottom)[:, None] & (d < D)[None, :],
                    other=0.0,
                )
                keys = tl.load(
                    k + j.to(tl.int64)[:, None] * k_key + d[None, :],
                    mask=(j < right)[:, None] & (d < D)[None, :],
                    other=0.0,
                )
                dots = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)  # (BQ, BK)
                z = entry_logits(
                    dots, bias, i[:, None], j[None, :], offset, Tq, clip, bias_query, slope, scale, softcap,
                    TABLE, SOFTCAP, ALIBI,
                )  # fmt: skip
            seen = tl.zeros((BQ, BK), tl.int1)
            for run in tl.static_range(RANGES if RANGES > 0 else 1):
                low, high = key_range(key_ranges, run, i, offset, Tq, Tk, CAUSAL, RANGES)
                seen |= (j[None, :] >= low[:, None]) & (j[None, :] < high[:, None])
            seen &= (i < bottom)[:, None] & (j < right)[None, :]
            seen = apply_masks(
                seen, i[:, None], j[None, :], query_ids, key_ids, dense, dense_query, dense_key, Tq, Tk, IDS, DENSE
            )
            p = tl.where(seen, tl.exp2(z - load_lse(lse, i, Tq)[:, None]), 0.0)
            parts = tl.reshape(p, (BQ // TALL, TALL, BK // WIDE, WIDE))
            cells = tl.maximum(cells, tl.max(tl.max(parts, 3), 1))
        r = tl.program_id(1) * (BQ // TALL) + tl.arange(0, BQ // TALL)
        c = start + tl.arange(0, BK // WIDE)
        there = (r < rows)[:, None] & (c < columns)[None, :]
        tl.store(out + r.to(tl.int64)[:, None] * columns + c[None, :], cells, mask=there)

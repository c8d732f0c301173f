"""Attention with masks, softcap and ALiBi: backward, in two passes that need no atomics.

`attention_query_gradients` has one program per tile of queries and loops over the keys: gradients of q and slopes.
`attention_key_gradients` has one program per tile of keys, for all heads that share them, and loops over the queries.
Tiles that are visible completely skip all bounds and masks, as in the forward.

B batch, H heads, G key heads, Tq queries, Tk keys, D width, Dv value width.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.attention.tile import LENGTHS, find_full_tiles, load_tile, tile_logits, visible_keys
from foci.kernels.distance_bias.backward import load_split_lse
from foci.kernels.distance_bias.tables import as_int32_pointer
from foci.kernels.dropout import dropout_keeps
from foci.kernels.logits import LN_2, key_range


@triton.jit
def tile_weights(
    dots, peak, log_sum, i, j, offset, slope, scale, softcap,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, EXACT: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """The weights of a tile, and the tanh of the softcap."""
    z, tanh_softcap = tile_logits(dots, i, j, offset, slope, scale, softcap, SOFTCAP, ALIBI, EXACT, DIRECT)
    z = z - peak - log_sum if EXACT else z - (peak + log_sum)
    return tl.exp2(z), tanh_softcap


@triton.jit
def add_query_gradients(
    queries, d_rows, peak, log_sum, delta, k, v, k_row, v_row, first_j, c, d, e, i, low, high, d_queries, d_slope,
    query_ids, key_ids, dense, dense_query, dense_key, drawn, b, h, threshold, keep_scale,
    offset, Tq, Tk, D, Dv, slope, scale, softcap,
    MASKED: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    SLOPE_GRADIENT: tl.constexpr, DROPOUT: tl.constexpr,
    EXACT: tl.constexpr, EVEN: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the keys from first_j on contribute to the gradients of the queries and of the slope."""
    keys = load_tile(k, k_row, first_j, c, Tk, d, D, EVEN, MASKED)
    values = load_tile(v, v_row, first_j, c, Tk, e, Dv, EVEN, MASKED)
    dots = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    d_weights = tl.dot(d_rows, tl.trans(values), input_precision=PRECISION)
    j = first_j + c[None, :]
    p, tanh_softcap = tile_weights(
        dots, peak[:, None], log_sum[:, None], i, j, offset, slope, scale, softcap, SOFTCAP, ALIBI, EXACT, DIRECT
    )
    if MASKED:
        seen = visible_keys(
            low[:, None], high[:, None], i, j, query_ids, key_ids, dense, dense_query, dense_key, Tq, Tk, IDS, DENSE
        )
        p = tl.where(seen, p, 0.0)
    if DROPOUT:
        d_weights = tl.where(dropout_keeps(drawn, b, h, i, j, threshold), d_weights * keep_scale, 0.0)
    d_logits = p * (d_weights - delta[:, None])
    if SLOPE_GRADIENT:
        d_slope -= tl.sum(d_logits * tl.abs((i + offset).to(tl.float32) - j.to(tl.float32)), 1)
    if SOFTCAP:
        d_logits = d_logits * (1 - tanh_softcap * tanh_softcap)
    d_queries = tl.dot(d_logits.to(keys.dtype), keys, d_queries, input_precision=PRECISION)
    return d_queries, d_slope


@triton.jit(do_not_specialize=LENGTHS)
def attention_query_gradients(
    q, k, v, out, d_out, peaks, log_sums, d_log_sums, delta, d_q, d_slopes,
    key_ranges, query_ids, key_ids, dense, slopes, seed,
    H, group, Tq, Tk, D, Dv, first_b, first_h,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    out_batch, out_head, out_row, d_out_batch, d_out_head, d_out_row, peaks_batch, peaks_head,
    d_q_batch, d_q_head, d_q_row,
    key_ranges_batch, query_ids_batch, key_ids_batch, dense_batch, dense_head, dense_query, dense_key,
    scale, softcap, threshold, keep_scale,
    CAUSAL: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    SLOPE_GRADIENT: tl.constexpr, LSE_GRADIENT: tl.constexpr,
    EXACT: tl.constexpr, EVEN: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """d_q (B, H, Tq, D); delta (B, H, Tq): Σ d_out out less the gradient of the log-sum-exp; d_slopes (B, H, tiles)."""
    tiles = tl.cdiv(Tq, BM)
    pair = tl.program_id(0) // tiles
    tile = tiles - 1 - tl.program_id(0) % tiles
    first_i = tile * BM
    b, h = (pair // H).to(tl.int64), pair % H
    g = h // group
    offset = Tk - Tq
    r, c, d, e = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BV)
    rows = first_i + r
    i, inside = rows[:, None], rows < Tq
    queries = load_tile(q + b * q_batch + h * q_head, q_row, first_i, r, Tq, d, D, EVEN, True)
    d_rows = load_tile(d_out + b * d_out_batch + h * d_out_head, d_out_row, first_i, r, Tq, e, Dv, EVEN, True)
    outs = load_tile(out + b * out_batch + h * out_head, out_row, first_i, r, Tq, e, Dv, EVEN, True)
    at = b * peaks_batch + h * peaks_head + rows
    rows_delta = tl.sum(outs.to(tl.float32) * d_rows.to(tl.float32), 1)
    if LSE_GRADIENT:
        # The log-sum-exp is in base 2: divided by ln 2, its gradient is that of a natural logarithm.
        rows_delta = -tl.load(d_log_sums + at, mask=inside, other=0.0) / LN_2 + rows_delta
    tl.store(delta + at, rows_delta, mask=inside)
    peak, log_sum = load_split_lse(peaks, log_sums, at, inside)
    k += b * k_batch + g * k_head
    v += b * v_batch + g * v_head
    key_ranges += b * key_ranges_batch
    query_ids += b * query_ids_batch
    key_ids += b * key_ids_batch
    dense += b * dense_batch + h * dense_head
    slope = tl.load(slopes + h) if ALIBI else 0.0
    drawn = tl.load(seed) if DROPOUT else 0
    d_queries = tl.zeros((BM, BD), tl.float32)
    d_slope = tl.zeros((BM,), tl.float32)
    for s in tl.static_range(RANGES if RANGES > 0 else 1):
        low, high = key_range(key_ranges, s, rows, offset, Tq, Tk, CAUSAL, RANGES)
        first, last, full, end = find_full_tiles(low, high, inside, Tk, BN, IDS or DENSE)
        if not (IDS or DENSE):
            for t in range(full, end):
                d_queries, d_slope = add_query_gradients(
                    queries, d_rows, peak, log_sum, rows_delta, k, v, k_row, v_row, t * BN + Tk * 0, c, d, e, i,
                    low, high, d_queries, d_slope, query_ids, key_ids, dense, dense_query, dense_key, drawn,
                    b + first_b, h + first_h, threshold, keep_scale, offset, Tq, Tk, D, Dv, slope, scale, softcap,
                    False, IDS, DENSE, SOFTCAP, ALIBI, SLOPE_GRADIENT, DROPOUT, EXACT, EVEN, DIRECT, PRECISION,
                )  # fmt: skip
        for n in range(first, last - (end - full)):
            t = tl.where(n < full, n, n + (end - full))
            d_queries, d_slope = add_query_gradients(
                queries, d_rows, peak, log_sum, rows_delta, k, v, k_row, v_row, t * BN + Tk * 0, c, d, e, i,
                low, high, d_queries, d_slope, query_ids, key_ids, dense, dense_query, dense_key, drawn,
                b + first_b, h + first_h, threshold, keep_scale, offset, Tq, Tk, D, Dv, slope, scale, softcap,
                True, IDS, DENSE, SOFTCAP, ALIBI, SLOPE_GRADIENT, DROPOUT, EXACT, EVEN, DIRECT, PRECISION,
            )  # fmt: skip
    d_q += b * d_q_batch + h * d_q_head + first_i.to(tl.int64) * d_q_row
    stored = inside[:, None] & (d[None, :] < D)
    tl.store(d_q + (r[:, None] * d_q_row + d[None, :]), (d_queries * scale).to(d_q.dtype.element_ty), mask=stored)
    if SLOPE_GRADIENT:
        tl.store(d_slopes + pair * tiles + tile, tl.sum(d_slope, 0))


@triton.jit
def add_key_gradients(
    keys, values, q, d_out, peaks, log_sums, delta, q_row, d_out_row, key_ranges, first_i, r, d, e, j, d_keys, d_values,
    query_ids, key_ids, dense, dense_query, dense_key, drawn, b, h, threshold, keep_scale,
    offset, Tq, Tk, D, Dv, slope, scale, softcap,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    EXACT: tl.constexpr, EVEN: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the queries from first_i on contribute to the gradients of k and v. Tiles are (keys, queries)."""
    rows = first_i + r
    i, inside = rows[None, :], rows < Tq
    queries = load_tile(q, q_row, first_i, r, Tq, d, D, EVEN, MASKED)
    peak, log_sum = load_split_lse(peaks, log_sums, rows, inside)
    rows_delta = tl.load(delta + rows, mask=inside, other=0.0)
    dots = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
    d_rows = load_tile(d_out, d_out_row, first_i, r, Tq, e, Dv, EVEN, MASKED)
    p, tanh_softcap = tile_weights(
        dots, peak[None, :], log_sum[None, :], i, j, offset, slope, scale, softcap, SOFTCAP, ALIBI, EXACT, DIRECT
    )
    if MASKED:
        low, high = key_range(key_ranges, 0, rows, offset, Tq, Tk, CAUSAL, RANGES)
        seen = (j >= low[None, :]) & (j < high[None, :])
        if RANGES > 1:
            low, high = key_range(key_ranges, 1, rows, offset, Tq, Tk, CAUSAL, RANGES)
            seen = seen | ((j >= low[None, :]) & (j < high[None, :]))
        seen = seen & visible_keys(0, Tk, i, j, query_ids, key_ids, dense, dense_query, dense_key, Tq, Tk, IDS, DENSE)
        p = tl.where(seen, p, 0.0)
    d_weights = tl.dot(values, tl.trans(d_rows), input_precision=PRECISION)
    dropped = p
    if DROPOUT:
        keep = dropout_keeps(drawn, b, h, i, j, threshold)
        dropped = tl.where(keep, p * keep_scale, 0.0)
        d_weights = tl.where(keep, d_weights * keep_scale, 0.0)
    d_values = tl.dot(dropped.to(d_rows.dtype), d_rows, d_values, input_precision=PRECISION)
    d_dots = p * (d_weights - rows_delta[None, :])
    if SOFTCAP:
        d_dots *= 1 - tanh_softcap * tanh_softcap
    d_keys = tl.dot(d_dots.to(queries.dtype), queries, d_keys, input_precision=PRECISION)
    return d_keys, d_values


@triton.jit(do_not_specialize=LENGTHS)
def attention_key_gradients(
    q, k, v, d_out, peaks, log_sums, delta, d_k, d_v, query_tiles,
    key_ranges, query_ids, key_ids, dense, slopes, seed,
    H, group, Tq, Tk, D, Dv, first_b, first_h,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    d_out_batch, d_out_head, d_out_row, peaks_batch, peaks_head,
    d_k_batch, d_k_head, d_k_row, d_v_batch, d_v_head, d_v_row,
    query_tiles_batch, key_ranges_batch, query_ids_batch, key_ids_batch,
    dense_batch, dense_head, dense_query, dense_key,
    scale, softcap, threshold, keep_scale,
    CAUSAL: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr, GROUPED: tl.constexpr,
    EXACT: tl.constexpr, EVEN: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """d_k (B, G, Tk, D), d_v (B, G, Tk, Dv).

    With RANGES, query_tiles (Bm, tiles, 4) has the query tiles that see some of a tile's keys and those that see all.
    """
    tiles = tl.cdiv(Tk, BN)
    pair, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    G = H // group
    b, g = (pair // G).to(tl.int64), pair % G
    offset = Tk - Tq
    first_j = tile * BN
    r, c, d, e = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BV)
    j = (first_j + c)[:, None]
    keys = load_tile(k + b * k_batch + g * k_head, k_row, first_j, c, Tk, d, D, EVEN, True)
    values = load_tile(v + b * v_batch + g * v_head, v_row, first_j, c, Tk, e, Dv, EVEN, True)
    key_ranges += b * key_ranges_batch
    query_ids += b * query_ids_batch
    key_ids += b * key_ids_batch
    drawn = tl.load(seed) if DROPOUT else 0
    first, last = 0, tl.cdiv(Tq, BM)
    full, end = 0, Tq // BM
    if RANGES > 0:
        query_tiles = as_int32_pointer(query_tiles) + b * query_tiles_batch + 4 * tile
        first, last = tl.load(query_tiles), tl.load(query_tiles + 1)
        full, end = tl.load(query_tiles + 2), tl.load(query_tiles + 3)
    elif CAUSAL:
        first = tl.maximum(first_j - offset, 0) // BM
        full = tl.cdiv(tl.maximum(first_j + BN - 1 - offset, 0), BM)
    full = tl.minimum(tl.maximum(full, first), last)
    # The last tile may reach past the end and is never full then.
    end = tl.minimum(tl.maximum(tl.minimum(end, Tq // BM), full), last)
    if IDS or DENSE:
        end = full
    d_keys = tl.zeros((BN, BD), tl.float32)
    d_values = tl.zeros((BN, BV), tl.float32)
    for member in range(group if GROUPED else 1):
        h = g * group + member
        head_q = q + b * q_batch + h * q_head
        head_d_out = d_out + b * d_out_batch + h * d_out_head
        head_rows = b * peaks_batch + h * peaks_head
        head_dense = dense + b * dense_batch + h * dense_head
        slope = tl.load(slopes + h) if ALIBI else 0.0
        if not (IDS or DENSE):
            for t in range(full, end):
                d_keys, d_values = add_key_gradients(
                    keys, values, head_q, head_d_out, peaks + head_rows, log_sums + head_rows, delta + head_rows,
                    q_row, d_out_row, key_ranges, t * BM + Tq * 0, r, d, e, j, d_keys, d_values,
                    query_ids, key_ids, head_dense, dense_query, dense_key, drawn, b + first_b, h + first_h, threshold,
                    keep_scale, offset, Tq, Tk, D, Dv, slope, scale, softcap,
                    False, CAUSAL, RANGES, IDS, DENSE, SOFTCAP, ALIBI, DROPOUT, EXACT, EVEN, DIRECT, PRECISION,
                )  # fmt: skip
        for n in range(first, last - (end - full)):
            t = tl.where(n < full, n, n + (end - full))
            d_keys, d_values = add_key_gradients(
                keys, values, head_q, head_d_out, peaks + head_rows, log_sums + head_rows, delta + head_rows,
                q_row, d_out_row, key_ranges, t * BM + Tq * 0, r, d, e, j, d_keys, d_values,
                query_ids, key_ids, head_dense, dense_query, dense_key, drawn, b + first_b, h + first_h, threshold,
                keep_scale, offset, Tq, Tk, D, Dv, slope, scale, softcap,
                True, CAUSAL, RANGES, IDS, DENSE, SOFTCAP, ALIBI, DROPOUT, EXACT, EVEN, DIRECT, PRECISION,
            )  # fmt: skip
    stored = first_j + c[:, None] < Tk
    d_k += b * d_k_batch + g * d_k_head + first_j.to(tl.int64) * d_k_row
    d_v += b * d_v_batch + g * d_v_head + first_j.to(tl.int64) * d_v_row
    d_keys = (d_keys * scale).to(d_k.dtype.element_ty)
    tl.store(d_k + (c[:, None] * d_k_row + d[None, :]), d_keys, mask=stored & (d[None, :] < D))
    tl.store(
        d_v + (c[:, None] * d_v_row + e[None, :]), d_values.to(d_v.dtype.element_ty), mask=stored & (e[None, :] < Dv)
    )

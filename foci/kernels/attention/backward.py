"""Attention with masks, softcap, ALiBi and dense biases: backward, in passes that need no atomics.

`attention_query_gradients` has one program per tile of queries and loops over the keys: gradients of q, slopes, and of
a bias that no two heads share, and no sequences either or a few.
`attention_key_gradients` has one program per tile of keys, for all heads that share them, and loops over the queries.
`attention_bias_gradients` has one program per tile of any other bias and loops over all entries of the matrix that it
is added to.
Tiles that are visible completely skip all bounds and masks, as in the forward.

B batch, H heads, G key heads, Tq queries, Tk keys, D width, Dv value width.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.attention.tile import (
    LENGTHS,
    find_full_tiles,
    hide_other_documents,
    load_bias,
    load_tile,
    locate_bias,
    locate_tile,
    sequence_range,
    tile_logits,
    visible_keys,
    visible_range,
)
from foci.kernels.distance_bias.backward import load_split_lse
from foci.kernels.distance_bias.forward import distance_bias_logits
from foci.kernels.distance_bias.tables import as_int32_pointer
from foci.kernels.dropout import dropout_keeps
from foci.kernels.logits import LN_2, LOG2_E

# No tile has more queries.
ROW_ALIGNMENT = tl.constexpr(128)


@triton.jit
def tile_weights(
    dots, peak, log_sum, bias, bias_query, bias_key, i, j, offset, Tq, Tk, slope, scale, softcap,
    MASKED: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, EXACT: tl.constexpr,
    DIRECT: tl.constexpr,
):  # fmt: skip
    """The weights of a tile, and the tanh of the softcap. Unless EXACT, `peak` is the whole log-sum-exp."""
    z, tanh_softcap = tile_logits(
        dots, bias, bias_query, bias_key, i, j, offset, Tq, Tk, slope, scale, softcap,
        MASKED, BIAS, SOFTCAP, ALIBI, EXACT, DIRECT,
    )  # fmt: skip
    z = z - peak - log_sum if EXACT else z - peak
    return tl.exp2(z), tanh_softcap


@triton.jit
def first_stored_row(pair, Tq):
    """Where the rows of a head start in the arrays between the passes.

    Lengths are rounded up, so that loads of several rows are aligned and need no bounds.
    """
    return pair.to(tl.int64) * (tl.cdiv(Tq, ROW_ALIGNMENT) * ROW_ALIGNMENT)


@triton.jit
def add_query_gradients(
    queries, d_rows, peak, log_sum, delta, k, v, k_row, v_row, first_j, c, d, e, i, low, high, contiguous, d_queries,
    d_slope, query_ids, key_ids, dense, dense_query, dense_key, bias, bias_query, bias_key, d_bias, sequence, drawn,
    b, h, threshold, keep_scale, offset, Tq, Tk, D, Dv, slope, scale, softcap,
    MASKED: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, SLOPE_GRADIENT: tl.constexpr, BIAS_GRADIENT: tl.constexpr, SHARED_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, EXACT: tl.constexpr, EVEN: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the keys from first_j on contribute to the gradients of the queries, of the slope and of the bias."""
    j = first_j + c[None, :]
    if BIAS_GRADIENT:
        d_entries = d_bias + (i.to(tl.int64) * (Tk // 8 * 8 if BIAS == 1 else Tk) + j)
    if SHARED_BIAS:
        # Loaded early: nothing waits for them before the store.
        columns = j // 8 < Tk // 8 if BIAS == 1 else j < Tk
        earlier = tl.load(d_entries, mask=(i < Tq) & columns & (sequence > 0), other=0.0)
    keys = load_tile(k, k_row, first_j, c, Tk, d, D, EVEN, MASKED)
    dots = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    values = load_tile(v, v_row, first_j, c, Tk, e, Dv, EVEN, MASKED)
    p, tanh_softcap = tile_weights(
        dots, peak[:, None], log_sum, bias, bias_query, bias_key, i, j, offset, Tq, Tk, slope, scale, softcap,
        MASKED, BIAS, SOFTCAP, ALIBI, EXACT, DIRECT,
    )  # fmt: skip
    d_weights = tl.dot(d_rows, tl.trans(values), input_precision=PRECISION)
    if MASKED:
        seen = visible_keys(low[:, None], high[:, None], i, j, dense, dense_query, dense_key, DENSE)
        p = tl.where(seen, p, 0.0)
        if IDS:
            p = hide_other_documents(p, 0.0, contiguous, i, j, query_ids, key_ids, Tq, Tk)
    if DROPOUT:
        d_weights = tl.where(dropout_keeps(drawn, b, h, i, j, threshold), d_weights * keep_scale, 0.0)
    d_logits = p * (d_weights - delta[:, None])
    if SLOPE_GRADIENT:
        d_slope -= tl.sum(d_logits * tl.abs((i + offset).to(tl.float32) - j.to(tl.float32)), 1)
    if BIAS_GRADIENT:
        d_added = d_logits + earlier.to(tl.float32) if SHARED_BIAS else d_logits
        tl.store(d_entries, d_added.to(d_bias.dtype.element_ty), mask=seen if MASKED else i < Tq)
    if SOFTCAP:
        d_logits = d_logits * (1 - tanh_softcap * tanh_softcap)
    d_queries = tl.dot(d_logits.to(keys.dtype), keys, d_queries, input_precision=PRECISION)
    return d_queries, d_slope


@triton.jit(do_not_specialize=LENGTHS)
def attention_query_gradients(
    q, k, v, out, d_out, peaks, log_sums, d_log_sums, delta, row_peaks, row_log_sums, d_q, d_slopes, d_sinks, d_bias,
    lengths, document_ranges, key_ranges, query_ids, key_ids, dense, bias, slopes, sinks, seed,
    H, group, Tq, Tk, D, Dv, left, right, always, stop, first_b, first_h, sequence,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    out_batch, out_head, out_row, d_out_batch, d_out_head, d_out_row, peaks_batch, peaks_head,
    d_q_batch, d_q_head, d_q_row,
    lengths_batch, document_ranges_batch, key_ranges_batch, query_ids_batch, key_ids_batch,
    dense_batch, dense_head, dense_query, dense_key, bias_batch, bias_head, bias_query, bias_key,
    scale, softcap, threshold, keep_scale,
    PADDED: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr, BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    SLOPE_GRADIENT: tl.constexpr, SINK_GRADIENT: tl.constexpr, BIAS_GRADIENT: tl.constexpr, SHARED_BIAS: tl.constexpr,
    LSE_GRADIENT: tl.constexpr, EXACT: tl.constexpr, EVEN: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """d_q (B, H, Tq, D); d_slopes and d_sinks (B, H, tiles); d_bias (B, H, Tq, Tk), zeros where a mask hides entries.

    With SHARED_BIAS d_bias is (1, H, Tq, Tk): a launch adds the gradient of one sequence to those before it.

    For the other passes, at `first_stored_row`: delta, Σ d_out out less the gradient of the log-sum-exp, and row_peaks,
    the log-sum-exp or, if EXACT, its larger part, beside row_log_sums.
    """
    tiles = tl.cdiv(Tq, BM)
    b, h, tile = locate_tile(tiles, H, BIAS)
    b += sequence
    tile = tiles - 1 - tile
    pair = b * H + h
    first_i = tile * BM
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
    peak, log_sum = load_split_lse(peaks, log_sums, at, inside)
    if not EXACT:
        peak += log_sum
    # Rows past the end get +inf like fully masked ones: all of their weights are 0.
    stored_rows = first_stored_row(pair, Tq) + rows
    tl.store(delta + stored_rows, rows_delta)
    tl.store(row_peaks + stored_rows, peak)
    if EXACT:
        tl.store(row_log_sums + stored_rows, log_sum)
    if SINK_GRADIENT:
        sink = tl.load(sinks + h) * LOG2_E - peak
        share = tl.exp2(sink - log_sum) if EXACT else tl.exp2(sink)
        tl.store(d_sinks + pair * tiles + tile, -tl.sum(share * rows_delta, 0))
    k += b * k_batch + g * k_head
    v += b * v_batch + g * v_head
    key_ranges += b * key_ranges_batch
    document_ranges = as_int32_pointer(document_ranges) + b * document_ranges_batch
    key_ids += b * key_ids_batch
    dense += b * dense_batch + h * dense_head
    bias = locate_bias(bias, b, h, bias_batch, bias_head, BIAS)
    if BIAS_GRADIENT:
        # The gradient is contiguous; with BIAS 1 the compiler sees that rows have whole groups of 8 entries.
        d_bias_row = Tk // 8 * 8 if BIAS == 1 else Tk
        d_bias += (h if SHARED_BIAS else pair) * Tq * d_bias_row
    query_ids += b * query_ids_batch
    slope = tl.load(slopes + h) if ALIBI else 0.0
    drawn = tl.load(seed) if DROPOUT else 0
    start, stop = sequence_range(lengths, lengths_batch, b, stop, Tk, PADDED)
    d_queries = tl.zeros((BM, BD), tl.float32)
    d_slope = tl.zeros((BM,), tl.float32)
    for s in tl.static_range(RANGES if RANGES > 0 else 1):
        low, high = visible_range(
            key_ranges, document_ranges, s, rows, start, stop, left, right, always, offset, Tq, RANGES, IDS
        )
        first, last, full, end, contiguous = find_full_tiles(low, high, document_ranges, rows, Tq, Tk, BN, IDS, DENSE)
        skipped = end - full
        if not DENSE:
            for t in range(full, end):
                d_queries, d_slope = add_query_gradients(
                    queries, d_rows, peak, log_sum[:, None], rows_delta, k, v, k_row, v_row, t * BN + Tk * 0, c, d, e,
                    i, low, high, contiguous, d_queries, d_slope, query_ids, key_ids, dense, dense_query, dense_key,
                    bias, bias_query, bias_key, d_bias, sequence, drawn, b + first_b, h + first_h, threshold,
                    keep_scale, offset, Tq, Tk, D, Dv, slope, scale, softcap, False, IDS, DENSE, BIAS, SOFTCAP, ALIBI,
                    SLOPE_GRADIENT, BIAS_GRADIENT, SHARED_BIAS, DROPOUT, EXACT, EVEN, DIRECT, PRECISION,
                )  # fmt: skip
        for n in range(first, last - skipped):
            t = tl.where(n < full, n, n + skipped)
            d_queries, d_slope = add_query_gradients(
                queries, d_rows, peak, log_sum[:, None], rows_delta, k, v, k_row, v_row, t * BN + Tk * 0, c, d, e,
                i, low, high, contiguous, d_queries, d_slope, query_ids, key_ids, dense, dense_query, dense_key,
                bias, bias_query, bias_key, d_bias, sequence, drawn, b + first_b, h + first_h, threshold,
                keep_scale, offset, Tq, Tk, D, Dv, slope, scale, softcap, True, IDS, DENSE, BIAS, SOFTCAP, ALIBI,
                SLOPE_GRADIENT, BIAS_GRADIENT, SHARED_BIAS, DROPOUT, EXACT, EVEN, DIRECT, PRECISION,
            )  # fmt: skip
    d_q += b * d_q_batch + h * d_q_head + first_i.to(tl.int64) * d_q_row
    stored = inside[:, None] & (d[None, :] < D)
    tl.store(d_q + (r[:, None] * d_q_row + d[None, :]), (d_queries * scale).to(d_q.dtype.element_ty), mask=stored)
    if SLOPE_GRADIENT:
        tl.store(d_slopes + pair * tiles + tile, tl.sum(d_slope, 0))


@triton.jit
def add_key_gradients(
    keys, values, q, d_out, row_peaks, row_log_sums, delta, q_row, d_out_row, document_ranges, key_ranges, start, stop,
    left, right, always, contiguous, first_i, r, d, e, j, d_keys, d_values, query_ids, key_ids, dense, dense_query,
    dense_key, bias, bias_query, bias_key, drawn, b, h, threshold, keep_scale, offset, Tq, Tk, D, Dv, slope, scale,
    softcap,
    MASKED: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr, BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    EXACT: tl.constexpr, EVEN: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the queries from first_i on contribute to the gradients of k and v. Tiles are (keys, queries)."""
    rows = first_i + r
    i = rows[None, :]
    queries = load_tile(q, q_row, first_i, r, Tq, d, D, EVEN, MASKED)
    peak, rows_delta = tl.load(row_peaks + rows), tl.load(delta + rows)
    log_sum = tl.load(row_log_sums + rows)[None, :] if EXACT else 0.0
    dots = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
    d_rows = load_tile(d_out, d_out_row, first_i, r, Tq, e, Dv, EVEN, MASKED)
    p, tanh_softcap = tile_weights(
        dots, peak[None, :], log_sum, bias, bias_query, bias_key, i, j, offset, Tq, Tk, slope, scale, softcap,
        MASKED, BIAS, SOFTCAP, ALIBI, EXACT, DIRECT,
    )  # fmt: skip
    if MASKED:
        low, high = visible_range(
            key_ranges, document_ranges, 0, rows, start, stop, left, right, always, offset, Tq, RANGES, IDS
        )
        seen = (j >= low[None, :]) & (j < high[None, :])
        if RANGES > 1:
            low, high = visible_range(
                key_ranges, document_ranges, 1, rows, start, stop, left, right, always, offset, Tq, RANGES, IDS
            )
            seen = seen | ((j >= low[None, :]) & (j < high[None, :]))
        if DENSE:
            offsets = i.to(tl.int64) * dense_query + j.to(tl.int64) * dense_key
            seen &= tl.load(dense + offsets, mask=seen, other=0) != 0
        p = tl.where(seen, p, 0.0)
        if IDS:
            p = hide_other_documents(p, 0.0, contiguous, i, j, query_ids, key_ids, Tq, Tk)
    dropped = p
    if DROPOUT:
        keep = dropout_keeps(drawn, b, h, i, j, threshold)
        dropped = tl.where(keep, p * keep_scale, 0.0)
    d_values = tl.dot(dropped.to(d_rows.dtype), d_rows, d_values, input_precision=PRECISION)
    d_weights = tl.dot(values, tl.trans(d_rows), input_precision=PRECISION)
    if DROPOUT:
        d_weights = tl.where(keep, d_weights * keep_scale, 0.0)
    d_dots = p * (d_weights - rows_delta[None, :])
    if SOFTCAP:
        d_dots *= 1 - tanh_softcap * tanh_softcap
    d_keys = tl.dot(d_dots.to(queries.dtype), queries, d_keys, input_precision=PRECISION)
    return d_keys, d_values


@triton.jit
def find_query_tiles(
    query_tiles, first_j, start, stop, left, right, always, offset, Tq, Tk,
    BM: tl.constexpr, BN: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Query tiles first to last that see some key of the tile at first_j, and full to end that see all of its keys.

    Without RANGES and IDS they follow from the distances: query i sees the keys from i + offset - left to
    i + offset + right, or before `always`.
    """
    if RANGES > 0 or IDS:
        first, last = tl.load(query_tiles), tl.load(query_tiles + 1)
        full, end = tl.load(query_tiles + 2), tl.load(query_tiles + 3)
    else:
        last_j = tl.minimum(first_j + BN, Tk) - 1
        outside = (first_j >= stop) | (last_j < start)
        first = tl.where(first_j < always, 0, tl.maximum(first_j - offset - right, 0) // BM)
        last = tl.where(outside, 0, tl.cdiv(tl.maximum(tl.minimum(last_j - offset + left + 1, Tq), 0), BM))
        full = tl.where(last_j < always, 0, tl.cdiv(tl.maximum(last_j - offset - right, 0), BM))
        end = tl.maximum(tl.minimum(first_j - offset + left + 1, Tq), 0) // BM
        end = tl.where((first_j >= start) & (last_j < stop), end, 0)
    last = tl.maximum(last, first)
    full = tl.minimum(tl.maximum(full, first), last)
    # The last tile may reach past the end and is never full then.
    end = tl.minimum(tl.maximum(tl.minimum(end, Tq // BM), full), last)
    if DENSE:
        end = full
    return first, last, full, end


@triton.jit(do_not_specialize=LENGTHS)
def attention_key_gradients(
    q, k, v, d_out, row_peaks, row_log_sums, delta, d_k, d_v, query_tiles,
    lengths, document_ranges, key_ranges, query_ids, key_ids, dense, bias, slopes, seed,
    H, group, Tq, Tk, D, Dv, left, right, always, stop, first_b, first_h,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    d_out_batch, d_out_head, d_out_row,
    d_k_batch, d_k_head, d_k_row, d_v_batch, d_v_head, d_v_row,
    lengths_batch, document_ranges_batch, key_ranges_batch, query_ids_batch, key_ids_batch,
    dense_batch, dense_head, dense_query, dense_key, bias_batch, bias_head, bias_query, bias_key,
    scale, softcap, threshold, keep_scale,
    PADDED: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr, BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr, GROUPED: tl.constexpr,
    EXACT: tl.constexpr, EVEN: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """d_k (B, G, Tk, D), d_v (B, G, Tk, Dv).

    With RANGES or IDS, query_tiles (B, tiles, 5) has the query tiles that see some of a tile's keys, those that see
    all, and whether the documents of the former are contiguous.
    """
    tiles = tl.cdiv(Tk, BN)
    b, g, tile = locate_tile(tiles, H // group, BIAS)
    offset = Tk - Tq
    first_j = tile * BN
    r, c, d, e = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BV)
    j = (first_j + c)[:, None]
    keys = load_tile(k + b * k_batch + g * k_head, k_row, first_j, c, Tk, d, D, EVEN, True)
    values = load_tile(v + b * v_batch + g * v_head, v_row, first_j, c, Tk, e, Dv, EVEN, True)
    key_ranges += b * key_ranges_batch
    document_ranges = as_int32_pointer(document_ranges) + b * document_ranges_batch
    query_ids += b * query_ids_batch
    key_ids += b * key_ids_batch
    drawn = tl.load(seed) if DROPOUT else 0
    start, stop = sequence_range(lengths, lengths_batch, b, stop, Tk, PADDED)
    query_tiles = as_int32_pointer(query_tiles) + 5 * (b * tiles + tile)
    contiguous = tl.load(query_tiles + 4) if IDS else 0
    first, last, full, end = find_query_tiles(
        query_tiles, first_j, start, stop, left, right, always, offset, Tq, Tk, BM, BN, RANGES, IDS, DENSE
    )
    if BIAS > 0:
        # Tiles without masks read the bias of all keys of the tile, and the last ones may not exist.
        end = tl.where(first_j + BN > Tk, full, end)
    d_keys = tl.zeros((BN, BD), tl.float32)
    d_values = tl.zeros((BN, BV), tl.float32)
    for member in range(group if GROUPED else 1):
        h = g * group + member
        head_q = q + b * q_batch + h * q_head
        head_d_out = d_out + b * d_out_batch + h * d_out_head
        head_rows = first_stored_row(b * H + h, Tq)
        head_dense = dense + b * dense_batch + h * dense_head
        head_bias = locate_bias(bias, b, h, bias_batch, bias_head, BIAS)
        slope = tl.load(slopes + h) if ALIBI else 0.0
        skipped = end - full
        if not DENSE:
            for t in range(full, end):
                d_keys, d_values = add_key_gradients(
                    keys, values, head_q, head_d_out, row_peaks + head_rows, row_log_sums + head_rows,
                    delta + head_rows, q_row, d_out_row, document_ranges, key_ranges, start, stop, left, right, always,
                    contiguous, t * BM + Tq * 0, r, d, e, j, d_keys, d_values, query_ids, key_ids, head_dense,
                    dense_query, dense_key, head_bias, bias_query, bias_key, drawn, b + first_b, h + first_h,
                    threshold, keep_scale, offset, Tq, Tk, D, Dv, slope, scale, softcap,
                    False, RANGES, IDS, DENSE, BIAS, SOFTCAP, ALIBI, DROPOUT, EXACT, EVEN, DIRECT, PRECISION,
                )  # fmt: skip
        for n in range(first, last - skipped):
            t = tl.where(n < full, n, n + skipped)
            d_keys, d_values = add_key_gradients(
                keys, values, head_q, head_d_out, row_peaks + head_rows, row_log_sums + head_rows, delta + head_rows,
                q_row, d_out_row, document_ranges, key_ranges, start, stop, left, right, always, contiguous,
                t * BM + Tq * 0, r, d, e, j, d_keys, d_values, query_ids, key_ids, head_dense, dense_query, dense_key,
                head_bias, bias_query, bias_key, drawn, b + first_b, h + first_h, threshold, keep_scale,
                offset, Tq, Tk, D, Dv, slope, scale, softcap,
                True, RANGES, IDS, DENSE, BIAS, SOFTCAP, ALIBI, DROPOUT, EXACT, EVEN, DIRECT, PRECISION,
            )  # fmt: skip
    stored = first_j + c[:, None] < Tk
    d_k += b * d_k_batch + g * d_k_head + first_j.to(tl.int64) * d_k_row
    d_v += b * d_v_batch + g * d_v_head + first_j.to(tl.int64) * d_v_row
    d_keys = (d_keys * scale).to(d_k.dtype.element_ty)
    tl.store(d_k + (c[:, None] * d_k_row + d[None, :]), d_keys, mask=stored & (d[None, :] < D))
    tl.store(
        d_v + (c[:, None] * d_v_row + e[None, :]), d_values.to(d_v.dtype.element_ty), mask=stored & (e[None, :] < Dv)
    )


@triton.jit
def add_bias_gradients(
    gradient, seen, entries, q, k, v, d_out, row_peaks, row_log_sums, delta, q_row, k_row, v_row, d_out_row,
    first_i, first_j, r, c, d, e, i, j, dense, dense_query, dense_key, drawn, b, h, threshold, keep_scale,
    offset, Tq, Tk, D, Dv, slope, scale, softcap,
    TILED: tl.constexpr, DENSE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    EXACT: tl.constexpr, EVEN: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradients of the logits of one tile of one head, where `seen`; `entries` is its bias in base 2.

    TILED: `seen` is the same for all heads, and applied afterwards.
    """
    rows = first_i + r
    queries = load_tile(q, q_row, first_i, r, Tq, d, D, EVEN, True)
    keys = load_tile(k, k_row, first_j, c, Tk, d, D, EVEN, True)
    dots = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    d_rows = load_tile(d_out, d_out_row, first_i, r, Tq, e, Dv, EVEN, True)
    values = load_tile(v, v_row, first_j, c, Tk, e, Dv, EVEN, True)
    d_weights = tl.dot(d_rows, tl.trans(values), input_precision=PRECISION)
    peak, rows_delta = tl.load(row_peaks + rows)[:, None], tl.load(delta + rows)[:, None]
    z, _ = distance_bias_logits(dots, dots, i, j, offset, slope, scale, softcap, 0, SOFTCAP, ALIBI, EXACT, DIRECT)
    z += entries
    p = tl.exp2(z - peak - tl.load(row_log_sums + rows)[:, None] if EXACT else z - peak)
    if DROPOUT:
        keep = dropout_keeps(drawn, b, h, i, j, threshold)
        d_weights = tl.where(keep, d_weights * keep_scale, 0.0)
    d_logits = p * (d_weights - rows_delta)
    if DENSE:
        offsets = i.to(tl.int64) * dense_query + j.to(tl.int64) * dense_key
        seen &= tl.load(dense + offsets, mask=seen, other=0) != 0
    if DENSE or not TILED:
        d_logits = tl.where(seen, d_logits, 0.0)
    return gradient + d_logits


@triton.jit(do_not_specialize=[*LENGTHS, "B", "bias_batches", "bias_heads", "bias_rows", "bias_columns"])
def attention_bias_gradients(
    q, k, v, d_out, row_peaks, row_log_sums, delta, d_bias,
    lengths, document_ranges, key_ranges, query_ids, key_ids, dense, bias, slopes, seed,
    B, H, group, Tq, Tk, D, Dv, left, right, always, stop, first_b, first_h,
    bias_batches, bias_heads, bias_rows, bias_columns,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    d_out_batch, d_out_head, d_out_row,
    lengths_batch, document_ranges_batch, key_ranges_batch, query_ids_batch, key_ids_batch,
    dense_batch, dense_head, dense_query, dense_key, bias_batch, bias_head, bias_query, bias_key,
    scale, softcap, threshold, keep_scale,
    PADDED: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr, BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    TILED: tl.constexpr, EXACT: tl.constexpr, EVEN: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """d_bias (bias_batches, bias_heads, bias_rows, bias_columns), each size 1 or that of the matrix.

    TILED: neither queries nor keys share entries, and the mask is the same for all sequences: a program has one tile of
    the matrix in all of them.
    """
    row_tiles, column_tiles = tl.cdiv(bias_rows, BM), tl.cdiv(bias_columns, BN)
    pair, tile = tl.program_id(0) // (row_tiles * column_tiles), tl.program_id(0) % (row_tiles * column_tiles)
    own_b, own_h, own_row, own_column = pair // bias_heads, pair % bias_heads, tile // column_tiles, tile % column_tiles
    # A size of 1 is shared: the program loops over all sequences, heads or tiles.
    batches, heads = tl.where(bias_batches == 1, B, 1), tl.where(bias_heads == 1, H, 1)
    query_tiles = tl.where(bias_rows == 1, tl.cdiv(Tq, BM), 1)
    key_tiles = tl.where(bias_columns == 1, tl.cdiv(Tk, BN), 1)
    offset = Tk - Tq
    r, c, d, e = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BV)
    drawn = tl.load(seed) if DROPOUT else 0
    gradient = tl.zeros((BM, BN), tl.float32)
    document_ranges = as_int32_pointer(document_ranges)
    if TILED:
        first_i, first_j = (own_row + Tk * 0) * BM, (own_column + Tk * 0) * BN
        rows, j = first_i + r, first_j + c[None, :]
        i = rows[:, None]
        low, high = visible_range(
            key_ranges,
            document_ranges,
            0,
            rows,
            Tk * 0,
            tl.minimum(stop, Tk),
            left,
            right,
            always,
            offset,
            Tq,
            0,
            False,
        )
        seen = (j >= low[:, None]) & (j < high[:, None])
        # Without a condition in the loop, its loads are pipelined.
        steps = tl.where(tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0, batches * heads, 0)
        # All sequences and heads of the loop share this tile of the bias.
        own_bias = locate_bias(bias, own_b.to(tl.int64), own_h.to(tl.int64), bias_batch, bias_head, BIAS)
        entries = load_bias(own_bias, bias_query, bias_key, i, j, Tq, Tk, True, BIAS).to(tl.float32) * LOG2_E
        for n in range(steps):
            b, h = (own_b + n // heads + Tk * 0).to(tl.int64), (own_h + n % heads).to(tl.int64)
            stored = first_stored_row(b * H + h, Tq)
            slope = tl.load(slopes + h) if ALIBI else 0.0
            gradient = add_bias_gradients(
                gradient, seen, entries, q + b * q_batch + h * q_head, k + b * k_batch + h // group * k_head,
                v + b * v_batch + h // group * v_head, d_out + b * d_out_batch + h * d_out_head, row_peaks + stored,
                row_log_sums + stored, delta + stored, q_row, k_row, v_row, d_out_row, first_i, first_j, r, c, d, e,
                i, j, dense + b * dense_batch + h * dense_head, dense_query, dense_key, drawn, b + first_b,
                h + first_h, threshold, keep_scale, offset, Tq, Tk, D, Dv, slope, scale, softcap,
                TILED, DENSE, SOFTCAP, ALIBI, DROPOUT, EXACT, EVEN, DIRECT, PRECISION,
            )  # fmt: skip
        gradient = tl.where(seen, gradient, 0.0)
    else:
        for n in range(batches * heads * query_tiles * key_tiles):
            key_tile, query_tile = n % key_tiles, n // key_tiles % query_tiles
            head, batch = n // (key_tiles * query_tiles) % heads, n // (key_tiles * query_tiles * heads)
            b, h = (own_b + batch + Tk * 0).to(tl.int64), (own_h + head).to(tl.int64)
            first_i, first_j = (own_row + query_tile + Tk * 0) * BM, (own_column + key_tile + Tk * 0) * BN
            rows, j = first_i + r, first_j + c[None, :]
            i = rows[:, None]
            start, end = sequence_range(lengths, lengths_batch, b, stop, Tk, PADDED)
            ranges, documents = key_ranges + b * key_ranges_batch, document_ranges + b * document_ranges_batch
            low, high = visible_range(
                ranges, documents, 0, rows, start, end, left, right, always, offset, Tq, RANGES, IDS
            )
            seen = (j >= low[:, None]) & (j < high[:, None])
            if RANGES > 1:
                low, high = visible_range(
                    ranges, documents, 1, rows, start, end, left, right, always, offset, Tq, RANGES, IDS
                )
                seen = seen | ((j >= low[:, None]) & (j < high[:, None]))
            if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
                seen &= i < Tq
                if IDS:
                    ids = tl.load(query_ids + b * query_ids_batch + i, mask=i < Tq, other=0)
                    seen &= ids == tl.load(key_ids + b * key_ids_batch + j, mask=j < Tk, other=0)
                stored = first_stored_row(b * H + h, Tq)
                slope = tl.load(slopes + h) if ALIBI else 0.0
                own_bias = locate_bias(bias, b, h, bias_batch, bias_head, BIAS)
                entries = load_bias(own_bias, bias_query, bias_key, i, j, Tq, Tk, True, BIAS).to(tl.float32) * LOG2_E
                gradient = add_bias_gradients(
                    gradient, seen, entries, q + b * q_batch + h * q_head, k + b * k_batch + h // group * k_head,
                    v + b * v_batch + h // group * v_head, d_out + b * d_out_batch + h * d_out_head,
                    row_peaks + stored, row_log_sums + stored, delta + stored, q_row, k_row, v_row, d_out_row,
                    first_i, first_j, r, c, d, e, i, j, dense + b * dense_batch + h * dense_head, dense_query,
                    dense_key, drawn, b + first_b, h + first_h, threshold, keep_scale,
                    offset, Tq, Tk, D, Dv, slope, scale, softcap,
                    TILED, DENSE, SOFTCAP, ALIBI, DROPOUT, EXACT, EVEN, DIRECT, PRECISION,
                )  # fmt: skip
    rows, columns = own_row * BM + r, own_column * BN + c
    d_bias += pair.to(tl.int64) * bias_rows * bias_columns
    if bias_rows == 1:
        gradient = tl.where(r[:, None] == 0, tl.sum(gradient, 0)[None, :], 0.0)
    if bias_columns == 1:
        gradient = tl.where(c[None, :] == 0, tl.sum(gradient, 1)[:, None], 0.0)
    stored = (rows[:, None] < bias_rows) & (columns[None, :] < bias_columns)
    entries = d_bias + (rows[:, None].to(tl.int64) * bias_columns + columns[None, :])
    tl.store(entries, gradient.to(d_bias.dtype.element_ty), mask=stored)

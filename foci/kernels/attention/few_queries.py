"""Backward of attention with few queries: one pass over the keys for the gradients of q, k and v.

A program holds the queries of all heads that share keys, so the gradients of its keys are complete. It adds up the
gradients of the queries over the keys of its split; `sum_query_gradient_splits` adds up the splits, in a fixed order.

B batch, H heads, G key heads, Tq queries, Tk keys, D width, Dv value width.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.attention.backward import tile_weights
from foci.kernels.attention.tile import (
    LENGTHS,
    hide_other_documents,
    load_rows,
    load_tile,
    locate_bias,
    locate_packed_rows,
    sequence_range,
    visible_keys,
    visible_range,
)
from foci.kernels.distance_bias.backward import load_split_lse
from foci.kernels.distance_bias.tables import as_int32_pointer
from foci.kernels.dropout import dropout_keeps
from foci.kernels.logits import LN_2, LOG2_E


@triton.jit(do_not_specialize=LENGTHS)
def few_query_gradients(
    q, k, v, out, d_out, peaks, log_sums, d_log_sums, d_k, d_v, d_sinks, split_d_q,
    lengths, document_ranges, key_ranges, query_ids, key_ids, dense, bias, slopes, sinks, seed,
    H, group, Tq, Tk, D, Dv, left, right, always, stop, first_b, first_h,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    out_batch, out_head, out_row, d_out_batch, d_out_head, d_out_row, peaks_batch, peaks_head,
    d_k_batch, d_k_head, d_k_row, d_v_batch, d_v_head, d_v_row, split_tiles,
    lengths_batch, document_ranges_batch, key_ranges_batch, query_ids_batch, key_ids_batch,
    dense_batch, dense_head, dense_query, dense_key, bias_batch, bias_head, bias_query, bias_key,
    scale, softcap, threshold, keep_scale,
    PADDED: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr, BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr, SINK_GRADIENT: tl.constexpr,
    LSE_GRADIENT: tl.constexpr,
    EXACT: tl.constexpr, EVEN: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """d_k (B, G, Tk, D), d_v (B, G, Tk, Dv), split_d_q (splits, B, H, Tq, D): a program per key head and split.

    d_sinks (B, H, Tq): what each query adds to the gradient of the sink.
    """
    offset = Tk - Tq
    r, c, d, e = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BV)
    b, g, heads, rows, inside = locate_packed_rows(tl.program_id(0), r, H, group, Tq)
    i, h = rows[:, None], heads[:, None]
    queries = load_rows(q + b * q_batch, heads * q_head + rows * q_row, d, D, EVEN)
    d_rows = load_rows(d_out + b * d_out_batch, heads * d_out_head + rows * d_out_row, e, Dv, EVEN)
    outs = load_rows(out + b * out_batch, heads * out_head + rows * out_row, e, Dv, EVEN)
    at = b * peaks_batch + heads * peaks_head + rows
    delta = tl.sum(outs.to(tl.float32) * d_rows.to(tl.float32), 1)
    if LSE_GRADIENT:
        # The log-sum-exp is in base 2: divided by ln 2, its gradient is that of a natural logarithm.
        delta = -tl.load(d_log_sums + at) / LN_2 + delta
    peak, log_sum = load_split_lse(peaks, log_sums, at, inside)
    if not EXACT:
        peak += log_sum
    if SINK_GRADIENT:
        sink = tl.load(sinks + heads) * LOG2_E - peak
        share = tl.exp2(sink - log_sum) if EXACT else tl.exp2(sink)
        is_first = inside & (tl.program_id(1) == 0)
        tl.store(d_sinks + (b * H + heads) * Tq + rows, -share * delta, mask=is_first)
    k += b * k_batch + g * k_head
    v += b * v_batch + g * v_head
    d_k += b * d_k_batch + g * d_k_head
    d_v += b * d_v_batch + g * d_v_head
    key_ranges += b * key_ranges_batch
    document_ranges = as_int32_pointer(document_ranges) + b * document_ranges_batch
    query_ids += b * query_ids_batch
    key_ids += b * key_ids_batch
    dense += b * dense_batch + h * dense_head
    bias = locate_bias(bias, b, h, bias_batch, bias_head, BIAS)
    slope = tl.load(slopes + h) if ALIBI else 0.0
    drawn = tl.load(seed) if DROPOUT else 0
    start, stop = sequence_range(lengths, lengths_batch, b, stop, Tk, PADDED)
    low, high = visible_range(
        key_ranges, document_ranges, 0, rows, start, stop, left, right, always, offset, Tq, RANGES, IDS
    )
    d_queries = tl.zeros((BM, BD), tl.float32)
    first = tl.program_id(1) * split_tiles
    for t in range(first, tl.minimum(first + split_tiles, tl.cdiv(Tk, BN))):
        first_j = t * BN + Tk * 0
        j = first_j + c[None, :]
        keys = load_tile(k, k_row, first_j, c, Tk, d, D, EVEN, True)
        dots = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        values = load_tile(v, v_row, first_j, c, Tk, e, Dv, EVEN, True)
        p, tanh_softcap = tile_weights(
            dots, peak[:, None], log_sum[:, None], bias, bias_query, bias_key, i, j, offset, Tq, Tk, slope, scale,
            softcap, True, BIAS, SOFTCAP, ALIBI, EXACT, DIRECT,
        )  # fmt: skip
        seen = visible_keys(low[:, None], high[:, None], i, j, dense, dense_query, dense_key, DENSE)
        if RANGES > 1:
            second, end = visible_range(
                key_ranges, document_ranges, 1, rows, start, stop, left, right, always, offset, Tq, RANGES, IDS
            )
            seen |= visible_keys(second[:, None], end[:, None], i, j, dense, dense_query, dense_key, DENSE)
        p = tl.where(seen, p, 0.0)
        if IDS:
            p = hide_other_documents(p, 0.0, 0, i, j, query_ids, key_ids, Tq, Tk)
        d_weights = tl.dot(d_rows, tl.trans(values), input_precision=PRECISION)
        dropped = p
        if DROPOUT:
            keep = dropout_keeps(drawn, b + first_b, h + first_h, i, j, threshold)
            dropped = tl.where(keep, p * keep_scale, 0.0)
            d_weights = tl.where(keep, d_weights * keep_scale, 0.0)
        d_dots = p * (d_weights - delta[:, None])
        if SOFTCAP:
            d_dots = d_dots * (1 - tanh_softcap * tanh_softcap)
        rounded = d_dots.to(keys.dtype)
        d_queries = tl.dot(rounded, keys, d_queries, input_precision=PRECISION)
        d_keys = tl.dot(tl.trans(rounded), queries, input_precision=PRECISION) * scale
        d_values = tl.dot(tl.trans(dropped.to(d_rows.dtype)), d_rows, input_precision=PRECISION)
        there = first_j + c[:, None] < Tk
        own_k = d_k + first_j.to(tl.int64) * d_k_row + (c[:, None] * d_k_row + d[None, :])
        own_v = d_v + first_j.to(tl.int64) * d_v_row + (c[:, None] * d_v_row + e[None, :])
        tl.store(own_k, d_keys.to(d_k.dtype.element_ty), mask=there & (d[None, :] < D))
        tl.store(own_v, d_values.to(d_v.dtype.element_ty), mask=there & (e[None, :] < Dv))
    B = tl.num_programs(0) // (H // group)
    row = ((tl.program_id(1) * B + b) * H + heads) * Tq + rows
    stored = inside[:, None] & (d[None, :] < D)
    tl.store(split_d_q + (row * D)[:, None] + d[None, :], d_queries * scale, mask=stored)


@triton.jit(do_not_specialize=["H", "Tq", "splits"])
def sum_query_gradient_splits(
    split_d_q, d_q, H, Tq, D, splits, d_q_batch, d_q_head, d_q_row, BS: tl.constexpr, BD: tl.constexpr
):
    """Sum split_d_q (splits, B, H, Tq, D) to d_q (B, H, Tq, D); one program per row, BS at least `splits`."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    b, h, i = row // Tq // H, row // Tq % H, row % Tq
    s, d = tl.arange(0, BS), tl.arange(0, BD)
    inside = (s[:, None] < splits) & (d[None, :] < D)
    parts = tl.load(split_d_q + (s[:, None] * rows + row) * D + d[None, :], mask=inside, other=0.0)
    pointers = d_q + b * d_q_batch + h * d_q_head + i * d_q_row + d
    tl.store(pointers, tl.sum(parts, 0).to(d_q.dtype.element_ty), mask=d < D)

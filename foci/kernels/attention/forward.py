"""Attention with masks, softcap, ALiBi and dense biases: forward.

Key tiles that every query of a program sees completely skip all bounds and masks; the others come last, in a second
loop. Which tiles these are depends on lengths and masks only, so a sequence gives the same bits in any batch.
A few queries would leave most multiprocessors idle: their keys are split among programs and merged afterwards.

B batch, H heads, Tq queries, Tk keys, D width, Dv value width.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.attention.tile import (
    LENGTHS,
    check_length,
    find_full_tiles,
    hide_other_documents,
    load_rows,
    load_tile,
    locate_bias,
    locate_packed_rows,
    locate_tile,
    sequence_range,
    tile_logits,
    visible_keys,
    visible_range,
)
from foci.kernels.dropout import dropout_keeps
from foci.kernels.logits import LOG2_E


@triton.jit
def attend_to_tile(
    queries, k, v, k_row, v_row, first_j, c, d, e, i, low, high, contiguous, peak, total, weighted,
    query_ids, key_ids, dense, dense_query, dense_key, bias, bias_query, bias_key, drawn, b, h, threshold, keep_scale,
    offset, Tq, Tk, D, Dv, slope, scale, softcap,
    MASKED: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, DROPOUT: tl.constexpr, POSITIVE: tl.constexpr, EXACT: tl.constexpr, EVEN: tl.constexpr,
    DIRECT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over the keys from first_j on: the new peak, total and weighted values."""
    keys = load_tile(k, k_row, first_j, c, Tk, d, D, EVEN, MASKED)
    dots = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    j = first_j + c[None, :]
    if BIAS > 0 or SOFTCAP or ALIBI or EXACT or not POSITIVE:
        z, _ = tile_logits(
            dots, bias, bias_query, bias_key, i, j, offset, Tq, Tk, slope, scale, softcap,
            MASKED, BIAS, SOFTCAP, ALIBI, EXACT, DIRECT,
        )  # fmt: skip
        factor = 1.0
    else:
        # The scale is applied together with the peak's subtraction: one instruction less per entry. A negative scale
        # would turn the largest product into the smallest logit, and 0 times the -inf of a masked entry is NaN.
        z, factor = dots, scale * LOG2_E
    if MASKED:
        seen = visible_keys(low[:, None], high[:, None], i, j, dense, dense_query, dense_key, DENSE)
        z = tl.where(seen, z, -float("inf"))
        if IDS:
            z = hide_other_documents(z, -float("inf"), contiguous, i, j, query_ids, key_ids, Tq, Tk)
    higher = tl.maximum(peak, tl.max(z, 1) * factor)
    # A row without a visible key so far has peak -inf, and -inf - -inf would be NaN. A bias may be -inf, too.
    safe = tl.where(higher == -float("inf"), 0.0, higher) if MASKED or BIAS > 0 else higher
    p = tl.exp2(z * factor - safe[:, None])
    rescale = tl.exp2(peak - safe)
    total = total * rescale + tl.sum(p, 1)
    if DROPOUT:
        p = tl.where(dropout_keeps(drawn, b, h, i, j, threshold), p * keep_scale, 0.0)
    values = load_tile(v, v_row, first_j, c, Tk, e, Dv, EVEN, MASKED)
    weighted = tl.dot(p.to(values.dtype), values, weighted * rescale[:, None], input_precision=PRECISION)
    return higher, total, weighted


@triton.jit(do_not_specialize=LENGTHS)
def attention_forward_kernel(
    q, k, v, out, peaks, log_sums, lengths, document_ranges, key_ranges, query_ids, key_ids, dense, bias, slopes, sinks,
    seed,
    H, group, Tq, Tk, D, Dv, left, right, always, stop, first_b, first_h,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    out_split, out_batch, out_head, out_row, peaks_split, peaks_batch, peaks_head, split_tiles,
    lengths_batch, document_ranges_batch, key_ranges_batch, query_ids_batch, key_ids_batch,
    dense_batch, dense_head, dense_query, dense_key, bias_batch, bias_head, bias_query, bias_key,
    scale, softcap, threshold, keep_scale,
    PADDED: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr, BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINK: tl.constexpr, DROPOUT: tl.constexpr, SPLIT: tl.constexpr,
    PACKED: tl.constexpr, POSITIVE: tl.constexpr, EXACT: tl.constexpr, EVEN: tl.constexpr, DIRECT: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program per tile of queries of one head, or of all heads that share keys (PACKED), and per split of
    `split_tiles` tiles of keys. POSITIVE: the scale is.

    out (splits, B, H, Tq, Dv); peaks and log_sums (splits, B, H, Tq): the largest logit of a row and the rest of its
    log-sum-exp.
    """
    offset = Tk - Tq
    r, c, d, e = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BV)
    if PACKED:
        b, g, heads, rows, inside = locate_packed_rows(tl.program_id(0), r, H, group, Tq)
        h = heads[:, None]
        sink_offsets = heads
        queries = load_rows(q + b * q_batch, heads * q_head + rows * q_row, d, D, EVEN)
    else:
        tiles = tl.cdiv(Tq, BM)
        b, h, tile = locate_tile(tiles, H, BIAS)
        # The last queries first: under a causal mask they take longest, and the short programs fill the gaps at the
        # end.
        first_i = (tiles - 1 - tile) * BM
        g = h // group
        rows = first_i + r
        inside = rows < Tq
        sink_offsets = h + r * 0
        queries = load_tile(q + b * q_batch + h * q_head, q_row, first_i, r, Tq, d, D, EVEN, True)
    i = rows[:, None]
    k += b * k_batch + g * k_head
    v += b * v_batch + g * v_head
    key_ranges += b * key_ranges_batch
    document_ranges = document_ranges.to(tl.pointer_type(tl.int32)) + b * document_ranges_batch
    key_ids += b * key_ids_batch
    dense += b * dense_batch + h * dense_head
    bias = locate_bias(bias, b, h, bias_batch, bias_head, BIAS)
    query_ids += b * query_ids_batch
    slope = tl.load(slopes + h) if ALIBI else 0.0
    drawn = tl.load(seed) if DROPOUT else 0
    start, stop = sequence_range(lengths, lengths_batch, b, stop, Tk, PADDED)
    peak = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    if SINK:
        # One more column, without a value. Of several splits the first one has it.
        peak = tl.load(sinks + sink_offsets) * LOG2_E
        if SPLIT:
            peak = tl.where(tl.program_id(1) == 0, peak, -float("inf"))
        total = tl.where(peak == -float("inf"), 0.0, 1.0)
    weighted = tl.zeros((BM, BV), tl.float32)
    for s in tl.static_range(RANGES if RANGES > 0 else 1):
        low, high = visible_range(
            key_ranges, document_ranges, s, rows, start, stop, left, right, always, offset, Tq, RANGES, IDS
        )
        first, last, full, end, contiguous = find_full_tiles(low, high, document_ranges, rows, Tq, Tk, BN, IDS, DENSE)
        if SPLIT:
            split_start = tl.program_id(1) * split_tiles
            first, last = tl.maximum(first, split_start), tl.minimum(last, split_start + split_tiles)
            full, end = tl.maximum(full, split_start), tl.minimum(end, split_start + split_tiles)
            last = tl.maximum(last, first)
            full = tl.minimum(tl.maximum(full, first), last)
            end = tl.minimum(tl.maximum(end, full), last)
        skipped = end - full
        if not DENSE:
            for t in range(full, end):
                # Adding Tk * 0 makes the product a tensor for Triton's interpreter, too.
                peak, total, weighted = attend_to_tile(
                    queries, k, v, k_row, v_row, t * BN + Tk * 0, c, d, e, i, low, high, contiguous, peak, total,
                    weighted, query_ids, key_ids, dense, dense_query, dense_key, bias, bias_query, bias_key,
                    drawn, b + first_b, h + first_h, threshold, keep_scale, offset, Tq, Tk, D, Dv, slope, scale,
                    softcap, False, IDS, DENSE, BIAS, SOFTCAP, ALIBI, DROPOUT, POSITIVE, EXACT, EVEN, DIRECT, PRECISION,
                )  # fmt: skip
        for n in range(first, last - skipped):
            t = tl.where(n < full, n, n + skipped)
            peak, total, weighted = attend_to_tile(
                queries, k, v, k_row, v_row, t * BN + Tk * 0, c, d, e, i, low, high, contiguous, peak, total, weighted,
                query_ids, key_ids, dense, dense_query, dense_key, bias, bias_query, bias_key,
                drawn, b + first_b, h + first_h, threshold, keep_scale, offset, Tq, Tk, D, Dv, slope, scale, softcap,
                True, IDS, DENSE, BIAS, SOFTCAP, ALIBI, DROPOUT, POSITIVE, EXACT, EVEN, DIRECT, PRECISION,
            )  # fmt: skip
    empty = total == 0.0
    weighted = weighted * (1.0 / tl.where(empty, 1.0, total))[:, None]
    if SPLIT:
        split = tl.program_id(1).to(tl.int64)
        out += split * out_split
        peaks += split * peaks_split
        log_sums += split * peaks_split
    if PACKED:
        pointers = out + b * out_batch + (heads * out_head + rows * out_row)[:, None] + e[None, :]
        at = b * peaks_batch + heads * peaks_head + rows
    else:
        out += b * out_batch + h * out_head + first_i.to(tl.int64) * out_row
        pointers = out + (r[:, None] * out_row + e[None, :])
        at = b * peaks_batch + h * peaks_head + rows
    tl.store(pointers, weighted.to(out.dtype.element_ty), mask=inside[:, None] & (e[None, :] < Dv))
    tl.store(peaks + at, peak, mask=inside)
    tl.store(log_sums + at, tl.log2(tl.where(empty, 1.0, total)), mask=inside)


@triton.jit(do_not_specialize=["H", "Tq", "Tk", "splits", "peaks_batch", "peaks_head", "lengths_batch"])
def merge_attention_splits(
    split_out, split_peaks, split_log_sums, out, peaks, log_sums, lengths,
    H, Tq, Tk, Dv, splits, out_batch, out_head, out_row, peaks_batch, peaks_head, lengths_batch,
    PADDED: tl.constexpr, BS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one row, each with its log-sum-exp; one program per row (b, h, i).

    split_out (splits, B, H, Tq, Dv); split_peaks and split_log_sums (splits, B, H, Tq); BS at least `splits`.
    """
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    b, h, i = row // Tq // H, row // Tq % H, row % Tq
    if PADDED > 0:
        check_length(lengths, lengths_batch, b, Tk)
    s, e = tl.arange(0, BS), tl.arange(0, BV)
    part = tl.load(split_peaks + s * rows + row, mask=s < splits, other=-float("inf"))
    log_sum = tl.load(split_log_sums + s * rows + row, mask=s < splits, other=0.0)
    peak = tl.max(part, 0)
    safe = tl.where(peak == -float("inf"), 0.0, peak)
    mass = tl.exp2(part - safe + log_sum)
    total = tl.sum(mass, 0)
    share = mass / tl.where(total == 0.0, 1.0, total)
    inside = (s[:, None] < splits) & (e[None, :] < Dv)
    values = tl.load(split_out + (s[:, None] * rows + row) * Dv + e[None, :], mask=inside, other=0.0)
    merged = tl.sum(values * share[:, None], 0)
    tl.store(out + b * out_batch + h * out_head + i * out_row + e, merged.to(out.dtype.element_ty), mask=e < Dv)
    tl.store(peaks + b * peaks_batch + h * peaks_head + i, peak)
    tl.store(log_sums + b * peaks_batch + h * peaks_head + i, tl.log2(tl.where(total == 0.0, 1.0, total)))

"""Backward of attention with a distance bias, in two passes without atomics.

`distance_bias_query_gradients` has a program per tile of queries, which loops over the keys: gradients of queries, row
table and slopes. `distance_bias_key_gradients` has a program per tile of keys, which loops over the queries of all
heads that share them: gradients of keys and values.

TABLE: 0 no row table; 1 relative keys, a row per query, added before scaling; 2 buckets, a row per head, added to the
logits. VALUED: relative values, which take two more arrays: `gains` (B, H, Tq, 2 clip + 1), d_out times the value
vector of each distance, and `band`, the weights by distance.
EXACT: float32 inputs, without additional rounding. EVEN: D and Dv are BD and BV, so columns need no bounds check.
DIRECT: each thread loads and stores the floats that it needs (`gather_floats`).

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width, Dv value width.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.distance_bias.forward import (
    DISTANCE_BIAS_LENGTHS,
    apply_tile_masks,
    clip_side,
    distance_bias_logits,
    distance_index,
    gather_floats,
    load_rows,
    load_table_ends,
    locate_table_rows,
    scatter_floats,
)
from foci.kernels.distance_bias.tables import as_int32_pointer
from foci.kernels.dropout import dropout_keeps
from foci.kernels.logits import LN_2, key_range


@triton.jit
def load_split_lse(peaks, log_sums, rows, inside):
    """Load the two parts of the log-sum-exp. Fully masked rows, and rows past the end, get +inf: all weights are 0."""
    peak = tl.load(peaks + rows, mask=inside, other=-float("inf"))
    return tl.where(peak == -float("inf"), float("inf"), peak), tl.load(log_sums + rows, mask=inside, other=0.0)


@triton.jit
def recompute_weights(
    dots, table_bias, peak, log_sum, i, j, offset, slope, scale, softcap,
    TABLE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, EXACT: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """The weights of a tile, and the tanh of the softcap."""
    z, tanh_softcap = distance_bias_logits(
        dots, table_bias, i, j, offset, slope, scale, softcap, TABLE, SOFTCAP, ALIBI, EXACT, DIRECT
    )
    if EXACT:
        z = z - peak - log_sum
    else:
        z = z - (peak + log_sum)
    return tl.exp2(z), tanh_softcap


@triton.jit(do_not_specialize=DISTANCE_BIAS_LENGTHS)
def distance_bias_query_gradients(
    q, k, v, out, d_out, peaks, log_sums, d_log_sums, delta, table, gains, d_q, d_table, band, d_slopes,
    key_ranges, query_ids, key_ids, dense, slopes, seed,
    H, group, Tq, Tk, D, Dv, clip, first_b, first_h,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    out_batch, out_head, out_row, d_out_batch, d_out_head, d_out_row, peaks_batch, peaks_head,
    d_q_batch, d_q_head, d_q_row,
    key_ranges_batch, query_ids_batch, key_ids_batch, dense_batch, dense_head, dense_query, dense_key,
    scale, softcap, threshold, keep_scale,
    CAUSAL: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, TABLE: tl.constexpr, VALUED: tl.constexpr, DROPOUT: tl.constexpr,
    TABLE_GRADIENT: tl.constexpr, SLOPE_GRADIENT: tl.constexpr, LSE_GRADIENT: tl.constexpr,
    EXACT: tl.constexpr, EVEN: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Write the gradients of queries, row table and slopes for a tile of queries.

    d_q (B, H, Tq, D); delta (B, H, Tq): Σ d_out out minus the gradient of the log-sum-exp; d_table and band
    (B, H, Tq, 2 clip + 1): the gradient of the row table and, with relative values, the weights by distance; d_slopes
    (B, H, tiles).
    """
    tiles = tl.cdiv(Tq, BM)
    pair = tl.program_id(0) // tiles
    tile = tiles - 1 - tl.program_id(0) % tiles
    first_i = tile * BM
    b, h = (pair // H).to(tl.int64), (pair % H).to(tl.int64)
    g = h // group
    offset = Tk - Tq
    r, c, d, e = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BV)
    rows = first_i + r
    i, inside = rows[:, None], rows < Tq
    own = load_rows(q + b * q_batch + h * q_head, q_row, first_i, r, Tq, d, D, EVEN)
    d_rows = load_rows(d_out + b * d_out_batch + h * d_out_head, d_out_row, first_i, r, Tq, e, Dv, EVEN)
    outs = load_rows(out + b * out_batch + h * out_head, out_row, first_i, r, Tq, e, Dv, EVEN)
    at = b * peaks_batch + h * peaks_head + rows
    rows_delta = tl.sum(outs.to(tl.float32) * d_rows.to(tl.float32), 1)
    if LSE_GRADIENT:
        # Convert the gradient of a base-2 log-sum-exp to that of a natural one.
        rows_delta = -tl.load(d_log_sums + at, mask=inside, other=0.0) / LN_2 + rows_delta
    tl.store(delta + at, rows_delta, mask=inside)
    peak, log_sum = load_split_lse(peaks, log_sums, at, inside)
    k += b * k_batch + g * k_head
    v += b * v_batch + g * v_head
    width = 2 * clip + 1
    own_band = (pair.to(tl.int64) * Tq + first_i) * width
    table, row = locate_table_rows(table, h, own_band, width, TABLE)
    # Rows past the end read the same values as the last one.
    r_there = tl.minimum(r, Tq - 1 - first_i)[:, None]
    gains += own_band
    d_table += own_band
    band += own_band
    key_ranges += b * key_ranges_batch
    query_ids += b * query_ids_batch
    key_ids += b * key_ids_batch
    dense += b * dense_batch + h * dense_head
    slope = tl.load(slopes + h) if ALIBI else 0.0
    random_seed = tl.load(seed) if DROPOUT else 0
    if TABLE > 0:
        left_end, right_end = load_table_ends(table, r * row, inside, clip, TABLE)
    if VALUED:
        left_gain, right_gain = load_table_ends(gains, r * width, inside, clip, 1)
    gradient = tl.zeros((BM, BD), tl.float32)
    left = tl.zeros((BM,), tl.float32)
    right = tl.zeros((BM,), tl.float32)
    left_mass = tl.zeros((BM,), tl.float32)
    right_mass = tl.zeros((BM,), tl.float32)
    d_slope_sum = tl.zeros((BM,), tl.float32)
    for s in tl.static_range(RANGES if RANGES > 0 else 1):
        low, high = key_range(key_ranges, s, rows, offset, Tq, Tk, CAUSAL, RANGES)
        some = high > low
        first = tl.min(tl.where(some, low, Tk), 0) // BN
        last = tl.cdiv(tl.max(tl.where(some, high, 0), 0), BN)
        full = tl.cdiv(tl.max(low, 0), BN)
        end = tl.min(tl.where(inside, high, Tk), 0) // BN
        for t in range(first, last):
            first_j = t * BN
            j = first_j + c[None, :]
            keys = load_rows(k, k_row, first_j, c, Tk, d, D, EVEN)
            values = load_rows(v, v_row, first_j, c, Tk, e, Dv, EVEN)
            dots = tl.dot(own, tl.trans(keys), input_precision=PRECISION)
            d_weights = tl.dot(d_rows, tl.trans(values), input_precision=PRECISION)
            far = clip_side(first_i, first_j, offset, clip, BM, BN)
            plain = (t >= full) & (t < end)
            if TABLE > 0:
                plain = plain & (far != 0)
            if IDS or DENSE:
                # Not `False`: `plain` must stay a tensor in all branches.
                plain = plain & False
            table_bias = dots
            if TABLE > 0:
                if plain:
                    table_bias = tl.broadcast_to(tl.where(far < 0, left_end, right_end), (BM, BN))
                else:
                    table_bias = gather_floats(table, r_there * row + distance_index(i, j, offset, clip), DIRECT)
            if VALUED:
                if plain:
                    gain = tl.broadcast_to(tl.where(far < 0, left_gain, right_gain), (BM, BN))
                else:
                    gain = gather_floats(gains, r_there * width + distance_index(i, j, offset, clip), DIRECT)
                d_weights += gain
            p, tanh_softcap = recompute_weights(
                dots, table_bias, peak[:, None], log_sum[:, None], i, j, offset, slope, scale, softcap,
                TABLE, SOFTCAP, ALIBI, EXACT, DIRECT,
            )  # fmt: skip
            if not plain:
                seen = (j >= low[:, None]) & (j < high[:, None])
                seen = apply_tile_masks(
                    seen, i, j, first_i, first_j, query_ids, key_ids, dense, dense_query, dense_key, Tq, Tk,
                    IDS, DENSE, DIRECT,
                )  # fmt: skip
                p = tl.where(seen, p, 0.0)
            if DROPOUT:
                keep = dropout_keeps(random_seed, b + first_b, h + first_h, i, j, threshold)
                d_weights = tl.where(keep, d_weights * keep_scale, 0.0)
            d_logits = p * (d_weights - rows_delta[:, None])
            d_dots = d_logits * (1 - tanh_softcap * tanh_softcap) if SOFTCAP else d_logits
            gradient += tl.dot(d_dots.to(keys.dtype), keys, input_precision=PRECISION)
            if SLOPE_GRADIENT:
                distance = (i + offset).to(tl.float32) - j.to(tl.float32)
                d_slope_sum -= tl.sum(d_logits * tl.abs(distance), 1)
            if TABLE_GRADIENT:
                change = d_dots * scale if TABLE == 1 else d_logits
                if plain:
                    sums = tl.sum(change, 1)
                    left += tl.where(far < 0, sums, 0.0)
                    right += tl.where(far < 0, 0.0, sums)
                    if VALUED:
                        sums = tl.sum(p, 1)
                        left_mass += tl.where(far < 0, sums, 0.0)
                        right_mass += tl.where(far < 0, 0.0, sums)
                else:
                    column = distance_index(i, j, offset, clip)
                    near = (j >= low[:, None]) & (j < high[:, None]) & (column > 0) & (column < 2 * clip)
                    left += tl.sum(tl.where(column == 0, change, 0.0), 1)
                    right += tl.sum(tl.where(column == 2 * clip, change, 0.0), 1)
                    scatter_floats(d_table, r[:, None] * width + column, change, near, DIRECT)
                    if VALUED:
                        left_mass += tl.sum(tl.where(column == 0, p, 0.0), 1)
                        right_mass += tl.sum(tl.where(column == 2 * clip, p, 0.0), 1)
                        scatter_floats(band, r[:, None] * width + column, p, near, DIRECT)
    gradient *= scale
    d_q += b * d_q_batch + h * d_q_head + first_i.to(tl.int64) * d_q_row
    there = inside[:, None] & (d[None, :] < D)
    tl.store(d_q + (r[:, None] * d_q_row + d[None, :]), gradient.to(d_q.dtype.element_ty), mask=there)
    if TABLE_GRADIENT:
        tl.store(d_table + r * width, left, mask=inside)
        tl.store(d_table + r * width + 2 * clip, right, mask=inside)
        if VALUED:
            tl.store(band + r * width, left_mass, mask=inside)
            tl.store(band + r * width + 2 * clip, right_mass, mask=inside)
    if SLOPE_GRADIENT:
        tl.store(d_slopes + pair * tiles + tile, tl.sum(d_slope_sum, 0))


@triton.jit(do_not_specialize=DISTANCE_BIAS_LENGTHS)
def distance_bias_key_gradients(
    q, k, v, d_out, peaks, log_sums, delta, table, gains, d_k, d_v, query_tiles, common_keys,
    key_ranges, query_ids, key_ids, dense, slopes, seed,
    H, group, Tq, Tk, D, Dv, clip, first_b, first_h,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    d_out_batch, d_out_head, d_out_row, peaks_batch, peaks_head,
    d_k_batch, d_k_head, d_k_row, d_v_batch, d_v_head, d_v_row,
    query_tiles_batch, common_keys_batch, key_ranges_batch, query_ids_batch, key_ids_batch,
    dense_batch, dense_head, dense_query, dense_key,
    scale, softcap, threshold, keep_scale,
    CAUSAL: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, TABLE: tl.constexpr, VALUED: tl.constexpr, DROPOUT: tl.constexpr,
    EXACT: tl.constexpr, EVEN: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a tile of keys and values: d_k (B, G, Tk, D), d_v (B, G, Tk, Dv).

    A tile is (keys, queries) here, so that no product transposes it.

    With RANGES, query_tiles (Bm, tiles of keys, 5) begins with the query tiles that see some of these keys, and
    common_keys (Bm, tiles of queries, 2) the range of keys that all queries of a tile see: int32 in float workspace.
    """
    tiles = tl.cdiv(Tk, BN)
    pair, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    G = H // group
    b, g = (pair // G).to(tl.int64), (pair % G).to(tl.int64)
    offset = Tk - Tq
    first_j = tile * BN
    r, c, d, e = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BV)
    j = (first_j + c)[:, None]
    own = load_rows(k + b * k_batch + g * k_head, k_row, first_j, c, Tk, d, D, EVEN)
    values = load_rows(v + b * v_batch + g * v_head, v_row, first_j, c, Tk, e, Dv, EVEN)
    width = 2 * clip + 1
    key_ranges += b * key_ranges_batch
    query_ids += b * query_ids_batch
    key_ids += b * key_ids_batch
    random_seed = tl.load(seed) if DROPOUT else 0
    start, stop = 0, tl.cdiv(Tq, BM)
    if RANGES > 0:
        query_tiles, common_keys = as_int32_pointer(query_tiles), as_int32_pointer(common_keys)
        start = tl.load(query_tiles + b * query_tiles_batch + 5 * tile)
        stop = tl.load(query_tiles + b * query_tiles_batch + 5 * tile + 1)
        common_keys += b * common_keys_batch
    elif CAUSAL:
        start = tl.maximum(first_j - offset, 0) // BM
    d_keys = tl.zeros((BN, BD), tl.float32)
    d_values = tl.zeros((BN, BV), tl.float32)
    for member in range(group):
        h = g * group + member
        own_q = q + b * q_batch + h * q_head
        own_d_out = d_out + b * d_out_batch + h * d_out_head
        own_peaks = peaks + b * peaks_batch + h * peaks_head
        own_log_sums = log_sums + b * peaks_batch + h * peaks_head
        own_delta = delta + b * peaks_batch + h * peaks_head
        own_gains = (b * H + h) * Tq * width
        own_table, row = locate_table_rows(table, h, own_gains, width, TABLE)
        if TABLE == 2:
            left_end, right_end = load_table_ends(own_table, r, r < Tq, clip, TABLE)
        own_dense = dense + b * dense_batch + h * dense_head
        slope = tl.load(slopes + h) if ALIBI else 0.0
        for t in range(start, stop):
            first_i = t * BM
            rows = first_i + r
            i, inside = rows[None, :], rows < Tq
            queries = load_rows(own_q, q_row, first_i, r, Tq, d, D, EVEN)
            d_rows = load_rows(own_d_out, d_out_row, first_i, r, Tq, e, Dv, EVEN)
            peak, log_sum = load_split_lse(own_peaks, own_log_sums, rows, inside)
            rows_delta = tl.load(own_delta + rows, mask=inside, other=0.0)[None, :]
            dots = tl.dot(own, tl.trans(queries), input_precision=PRECISION)
            d_weights = tl.dot(values, tl.trans(d_rows), input_precision=PRECISION)
            far = clip_side(first_i, first_j, offset, clip, BM, BN)
            plain = first_j >= 0
            if RANGES > 0:
                # Keys past the end may count as visible: their gradients are not stored.
                plain = tl.load(common_keys + 2 * t) <= first_j
                plain = plain & (tl.load(common_keys + 2 * t + 1) >= tl.minimum(first_j + BN, Tk))
            elif CAUSAL:
                plain = first_j + (BN - 1) <= first_i + offset
            if TABLE > 0:
                plain = plain & (far != 0)
            if IDS or DENSE:
                # Not `False`: `plain` must stay a tensor in all branches.
                plain = plain & False
            r_there = tl.minimum(r, Tq - 1 - first_i)[None, :]
            tile_table = own_table + first_i.to(tl.int64) * row
            tile_gains = gains + own_gains + first_i.to(tl.int64) * width
            end_column = tl.where(far < 0, 0, 2 * clip)
            table_bias = dots
            if TABLE > 0:
                if plain:
                    if TABLE == 2:
                        edge = tl.where(far < 0, left_end, right_end)
                    else:
                        edge = tl.load(tile_table + r * row + end_column, mask=inside, other=0.0)[None, :]
                    table_bias = tl.broadcast_to(edge, (BN, BM))
                else:
                    table_bias = gather_floats(tile_table, r_there * row + distance_index(i, j, offset, clip), DIRECT)
            if VALUED:
                if plain:
                    gain = tl.load(tile_gains + r * width + end_column, mask=inside, other=0.0)[None, :]
                    gain = tl.broadcast_to(gain, (BN, BM))
                else:
                    gain = gather_floats(tile_gains, r_there * width + distance_index(i, j, offset, clip), DIRECT)
                d_weights += gain
            p, tanh_softcap = recompute_weights(
                dots, table_bias, peak[None, :], log_sum[None, :], i, j, offset, slope, scale, softcap,
                TABLE, SOFTCAP, ALIBI, EXACT, DIRECT,
            )  # fmt: skip
            if not plain:
                low, high = key_range(key_ranges, 0, rows, offset, Tq, Tk, CAUSAL, RANGES)
                seen = (j >= low[None, :]) & (j < high[None, :])
                if RANGES > 1:
                    low, high = key_range(key_ranges, 1, rows, offset, Tq, Tk, CAUSAL, RANGES)
                    seen = seen | ((j >= low[None, :]) & (j < high[None, :]))
                seen = apply_tile_masks(
                    seen, i, j, first_i, first_j, query_ids, key_ids, own_dense, dense_query, dense_key, Tq, Tk,
                    IDS, DENSE, DIRECT,
                )  # fmt: skip
                p = tl.where(seen, p, 0.0)
            dropped = p
            if DROPOUT:
                keep = dropout_keeps(random_seed, b + first_b, h + first_h, i, j, threshold)
                dropped = tl.where(keep, p * keep_scale, 0.0)
                d_weights = tl.where(keep, d_weights * keep_scale, 0.0)
            d_values += tl.dot(dropped.to(d_rows.dtype), d_rows, input_precision=PRECISION)
            d_dots = p * (d_weights - rows_delta)
            if SOFTCAP:
                d_dots *= 1 - tanh_softcap * tanh_softcap
            d_keys += tl.dot(d_dots.to(queries.dtype), queries, input_precision=PRECISION)
    d_keys *= scale
    there = first_j + c[:, None] < Tk
    d_k += b * d_k_batch + g * d_k_head + first_j.to(tl.int64) * d_k_row
    d_v += b * d_v_batch + g * d_v_head + first_j.to(tl.int64) * d_v_row
    keys_there, values_there = there & (d[None, :] < D), there & (e[None, :] < Dv)
    tl.store(d_k + (c[:, None] * d_k_row + d[None, :]), d_keys.to(d_k.dtype.element_ty), mask=keys_there)
    tl.store(d_v + (c[:, None] * d_v_row + e[None, :]), d_values.to(d_v.dtype.element_ty), mask=values_there)

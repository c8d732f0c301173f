"""Additive attention of very few queries, such as one step of a recurrent decoder; programs share the keys of a query.

The time goes into reading keys and values once and writing their gradients once, so exponentials are computed on the
fly instead of beforehand.

BN keys per iteration, D width, Dv value width. A pair is one head of one sequence.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.additive.exponentials import ADDITIVE_LENGTHS, TWO_LOG2_E
from foci.kernels.additive.forward import reciprocal, visible_in_any_range
from foci.kernels.additive.two_pass_backward import load_base2_lse
from foci.kernels.dropout import dropout_keeps
from foci.kernels.logits import LOG2_E, apply_masks, key_range


@triton.jit(do_not_specialize=ADDITIVE_LENGTHS)
def additive_decode(
    q, k, v, weight, key_ranges, query_ids, key_ids, dense, seed, out, lse,
    H, group, Tq, Tk, D, Dv, pairs, per_split,
    q_batch, q_head, q_query, k_batch, k_head, k_key, v_batch, v_head, v_key, weight_head,
    key_ranges_batch, query_ids_batch, key_ids_batch, dense_batch, dense_head, dense_query, dense_key,
    threshold, keep_scale,
    CAUSAL: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr, DROPOUT: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, GPU: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program per query and split of the keys: out (splits, B, H, Tq, Dv) and lse in base 2."""
    i = tl.program_id(0) % Tq
    pair = tl.program_id(0) // Tq
    split = tl.program_id(1)
    b = (pair // H).to(tl.int64)
    h = (pair % H).to(tl.int64)
    offset = Tk - Tq
    q += b * q_batch + h * q_head + i.to(tl.int64) * q_query
    k += b * k_batch + (h // group) * k_head
    v += b * v_batch + (h // group) * v_head
    key_ranges += b * key_ranges_batch
    query_ids += b * query_ids_batch
    key_ids += b * key_ids_batch
    dense += b * dense_batch + h * dense_head
    d = tl.arange(0, BD)
    dv = tl.arange(0, BV)
    a = tl.load(q + d, mask=d < D, other=0.0).to(tl.float32)
    w = tl.load(weight + h * weight_head + d, mask=d < D, other=0.0).to(tl.float32) * LOG2_E
    constant = tl.sum(w, 0)
    peak = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((BN,), tl.float32)
    weighted_values = tl.zeros((BN, BV), tl.float32)
    for run in tl.static_range(RANGES if RANGES > 0 else 1):
        low, high = key_range(key_ranges, run, i, offset, Tq, Tk, CAUSAL, RANGES)
        low = tl.maximum(low, split * per_split)
        high = tl.minimum(high, (split + 1) * per_split)
        for start in tl.range(low, high, BN, num_stages=STAGES):
            j = start + tl.arange(0, BN)
            there = j < high
            keys = k + j.to(tl.int64)[:, None] * k_key + d[None, :]
            sums = a[None, :] + tl.load(keys, mask=there[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
            values = tl.load(
                v + j.to(tl.int64)[:, None] * v_key + dv[None, :],
                mask=there[:, None] & (dv < Dv)[None, :], other=0.0,
            ).to(tl.float32)  # fmt: skip
            shares = reciprocal(1.0 + tl.exp2(sums * TWO_LOG2_E), GPU)
            z = constant - 2.0 * tl.sum(w[None, :] * shares, 1)
            seen = apply_masks(there, i, j, query_ids, key_ids, dense, dense_query, dense_key, Tq, Tk, IDS, DENSE)
            z = tl.where(seen, z, -float("inf"))
            higher = tl.maximum(peak, tl.max(z, 0))
            # No visible key so far: -inf minus -inf would be NaN.
            safe = tl.where(higher == -float("inf"), 0.0, higher)
            p = tl.exp2(z - safe)
            rescale = tl.exp2(peak - safe)
            total = total * rescale + p
            peak = higher
            if DROPOUT:
                p = tl.where(dropout_keeps(tl.load(seed), b, h, i, j, threshold), p, 0.0)
            weighted_values = weighted_values * rescale + p[:, None] * values
    sums = tl.sum(total, 0)
    empty = sums == 0.0
    sums = tl.where(empty, 1.0, sums)
    row = (split.to(tl.int64) * pairs + pair) * Tq + i
    tl.store(lse + row, tl.where(empty, -float("inf"), peak + tl.log2(sums)))
    result = tl.sum(weighted_values, 0) * (keep_scale / sums)
    tl.store(out + row * Dv + dv, result.to(out.dtype.element_ty), mask=dv < Dv)


@triton.jit
def load_query(
    q, weight, d_out, out, d_lse, lse, b, h, i, d, e,
    H, Tq, D, Dv, q_batch, q_head, q_query, weight_head, LSE: tl.constexpr,
):  # fmt: skip
    """Load a query, its weight, the gradient of its output, its delta (Σ d_out out - d_lse), and its log-sum-exp."""
    row = (b * H + h) * Tq + i
    a = tl.load(q + b * q_batch + h * q_head + i * q_query + d, mask=d < D, other=0.0).to(tl.float32)
    w = tl.load(weight + h * weight_head + d, mask=d < D, other=0.0).to(tl.float32)
    d_row = tl.load(d_out + row * Dv + e, mask=e < Dv, other=0.0).to(tl.float32)
    row_delta = tl.sum(d_row * tl.load(out + row * Dv + e, mask=e < Dv, other=0.0).to(tl.float32), 0)
    if LSE:
        row_delta -= tl.load(d_lse + row) * LOG2_E
    return a, w, d_row, row_delta, load_base2_lse(lse + (b * H + h) * Tq, i, Tq)


@triton.jit
def load_key_block(k, v, k_key, v_key, j, d, e, Tk, D, Dv):
    """Load a block of keys and values; also their rows and which entries exist."""
    rows = j.to(tl.int64)[:, None]
    there = (j < Tk)[:, None] & (d < D)[None, :]
    in_values = (j < Tk)[:, None] & (e < Dv)[None, :]
    keys = tl.load(k + rows * k_key + d[None, :], mask=there, other=0.0).to(tl.float32)
    values = tl.load(v + rows * v_key + e[None, :], mask=in_values, other=0.0).to(tl.float32)
    return rows, there, in_values, keys, values


@triton.jit
def logit_gradients(
    a, w, d_row, row_delta, row_lse, keys, values, seen, b, h, i, j, seed, threshold, keep_scale,
    DROPOUT: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of logits, their terms 1 / (1 + e^2(q + k)), and the weights after dropout."""
    shares = reciprocal(1.0 + tl.exp2((a[None, :] + keys) * TWO_LOG2_E), GPU)
    z = (tl.sum(w, 0) - 2.0 * tl.sum(w[None, :] * shares, 1)) * LOG2_E
    p = tl.where(seen, tl.exp2(z - row_lse), 0.0)
    dp = tl.sum(values * d_row[None, :], 1)
    dropped = p
    if DROPOUT:
        keeps = dropout_keeps(tl.load(seed), b, h, i, j, threshold)
        dp = tl.where(keeps, dp * keep_scale, 0.0)
        dropped = tl.where(keeps, p * keep_scale, 0.0)
    return p * (dp - row_delta), shares, dropped


@triton.jit(do_not_specialize=ADDITIVE_LENGTHS)
def additive_decode_backward(
    q, k, v, weight, key_ranges, query_ids, key_ids, dense, seed, out, lse, d_out, d_lse, dq, dk, dv, dw,
    H, group, Tq, Tk, D, Dv, per_split,
    q_batch, q_head, q_query, k_batch, k_head, k_key, v_batch, v_head, v_key, weight_head,
    key_ranges_batch, query_ids_batch, key_ids_batch, dense_batch, dense_head, dense_query, dense_key,
    threshold, keep_scale,
    CAUSAL: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr, DROPOUT: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, LSE: tl.constexpr, ONE: tl.constexpr,
    STAGES: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """One program per key head and split of the keys; it loops over all queries of the heads that share them.

    dk (B, G, Tk, D) and dv (B, G, Tk, Dv); dq (splits, B, H, Tq, D) and dw (splits, B, H, D) float32. The formulas are
    those of two_pass_backward.py; lse and d_lse are in base 2. ONE: there is a single query, which keeps in registers
    while blocks of keys are loaded ahead.
    """
    k_pair = tl.program_id(0).to(tl.int64)
    b = k_pair // (H // group)
    g = k_pair % (H // group)
    d = tl.arange(0, BD)
    e = tl.arange(0, BV)
    k += b * k_batch + g * k_head
    v += b * v_batch + g * v_head
    dk += k_pair * Tk * D
    dv += k_pair * Tk * Dv
    key_ranges += b * key_ranges_batch
    query_ids += b * query_ids_batch
    key_ids += b * key_ids_batch
    pairs = tl.num_programs(0).to(tl.int64) * group
    dq += tl.program_id(1) * pairs * Tq * D
    dw += tl.program_id(1) * pairs * D
    low = tl.program_id(1) * per_split
    high = tl.minimum(low + per_split, Tk)
    if ONE:
        i = tl.full((), 0, tl.int32)
        a, w, d_row, row_delta, row_lse = load_query(
            q, weight, d_out, out, d_lse, lse, b, g, i, d, e,
            H, Tq, D, Dv, q_batch, q_head, q_query, weight_head, LSE,
        )  # fmt: skip
        d_query = tl.zeros((BD,), tl.float32)
        d_weight = tl.zeros((BD,), tl.float32)
        for start in tl.range(low, high, BN, num_stages=STAGES):
            j = start + tl.arange(0, BN)
            rows, there, in_values, keys, values = load_key_block(k, v, k_key, v_key, j, d, e, Tk, D, Dv)
            seen = visible_in_any_range(
                i, j, key_ranges, Tk - Tq, query_ids, key_ids, dense + b * dense_batch + g * dense_head, dense_query,
                dense_key, Tq, Tk, CAUSAL, RANGES, IDS, DENSE,
            )  # fmt: skip
            ds, shares, dropped = logit_gradients(
                a,
                w,
                d_row,
                row_delta,
                row_lse,
                keys,
                values,
                seen,
                b,
                g,
                i,
                j,
                seed,
                threshold,
                keep_scale,
                DROPOUT,
                GPU,
            )
            slopes = ds[:, None] * (shares - shares * shares)
            d_query += tl.sum(slopes, 0)
            d_weight += tl.sum(ds, 0) - 2.0 * tl.sum(ds[:, None] * shares, 0)
            d_keys = (slopes * (4.0 * w)[None, :]).to(dk.dtype.element_ty)
            tl.store(dk + rows * D + d[None, :], d_keys, mask=there)
            d_values = (dropped[:, None] * d_row[None, :]).to(dv.dtype.element_ty)
            tl.store(dv + rows * Dv + e[None, :], d_values, mask=in_values)
        tl.store(dq + k_pair * D + d, 4.0 * w * d_query, mask=d < D)
        tl.store(dw + k_pair * D + d, d_weight, mask=d < D)
    else:
        for start in range(low, high, BN):
            j = start + tl.arange(0, BN)
            rows, there, in_values, keys, values = load_key_block(k, v, k_key, v_key, j, d, e, Tk, D, Dv)
            d_keys = tl.zeros((BN, BD), tl.float32)
            d_values = tl.zeros((BN, BV), tl.float32)
            for iteration in range(group * Tq):
                h = g * group + iteration // Tq
                i = iteration % Tq
                a, w, d_row, row_delta, row_lse = load_query(
                    q, weight, d_out, out, d_lse, lse, b, h, i, d, e,
                    H, Tq, D, Dv, q_batch, q_head, q_query, weight_head, LSE,
                )  # fmt: skip
                seen = visible_in_any_range(
                    i, j, key_ranges, Tk - Tq, query_ids, key_ids, dense + b * dense_batch + h * dense_head,
                    dense_query, dense_key, Tq, Tk, CAUSAL, RANGES, IDS, DENSE,
                )  # fmt: skip
                ds, shares, dropped = logit_gradients(
                    a, w, d_row, row_delta, row_lse, keys, values, seen, b, h, i, j, seed, threshold, keep_scale,
                    DROPOUT, GPU,
                )  # fmt: skip
                slopes = ds[:, None] * (shares - shares * shares)
                d_keys += slopes * (4.0 * w)[None, :]
                d_values += dropped[:, None] * d_row[None, :]
                into = dq + ((b * H + h) * Tq + i) * D + d
                before = tl.load(into, mask=(d < D) & (start > low), other=0.0)
                tl.store(into, before + 4.0 * w * tl.sum(slopes, 0), mask=d < D)
                into = dw + (b * H + h) * D + d
                before = tl.load(into, mask=(d < D) & ((start > low) | (i > 0)), other=0.0)
                tl.store(into, before + tl.sum(ds, 0) - 2.0 * tl.sum(ds[:, None] * shares, 0), mask=d < D)
                # The next iteration adds to what other threads wrote.
                tl.debug_barrier()
            tl.store(dk + rows * D + d[None, :], d_keys.to(dk.dtype.element_ty), mask=there)
            tl.store(dv + rows * Dv + e[None, :], d_values.to(dv.dtype.element_ty), mask=in_values)

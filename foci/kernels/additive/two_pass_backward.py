"""The deterministic backward of additive attention: a pass for queries and weight, then one for keys and values.

With u = 1 / (1 + E F) the derivative of tanh is 4 u (1 - u), and ds the gradient of a logit, so

    dq_id = 4 w_d Σ_j ds_ij u (1 - u)        dk_jd = 4 w_d Σ_i ds_ij u (1 - u)        dw_d = Σ_ij ds_ij (1 - 2 u).

A pass recomputes the logits of a tile, then ds, and stores it in scratch memory that keeps in the cache. Then it loops
over one side of the tile; the other side and the features are the threads, so that the sums are elementwise. Two
neighbours of the looped side share a reciprocal: u0 = D1 / (D0 D1), u1 = D0 / (D0 D1).

Shapes and names are those of forward.py. A loop iteration takes DC features. The side that a program owns has BR rows.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.additive.exponentials import ADDITIVE_LENGTHS, TWO_LOG2_E, exp2_split, split_exponent
from foci.kernels.additive.forward import (
    MAX_EXPONENT,
    additive_logits,
    as_int64_pointer,
    dot_add,
    load_per_feature,
    matrix_to_tile,
    reciprocal,
    tile_columns,
    tile_rows,
    tile_to_matrix,
    unpack_two_floats,
    visible_in_any_range,
    visible_in_range,
)
from foci.kernels.dropout import dropout_keeps
from foci.kernels.logits import LOG2_E, MASKED_LOGIT, key_range, tile_bounds

# The largest exponent (base 2) of one denominator, of which two are multiplied.
MAX_PAIR_EXPONENT = tl.constexpr(60.0)


@triton.jit
def sum_over_other_side(
    own, others, ds, BR: tl.constexpr, BO: tl.constexpr, DC: tl.constexpr, RT: tl.constexpr, DT: tl.constexpr,
    fast, WEIGHT: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Σ ds u (1 - u) and Σ ds u over the other side: (RR, DR, RT, DT).

    own holds exponentials if fast, else the vectors themselves. others (BO / 2, DC, 2) holds the same for the other
    side, ds (BO / 2, BR, 2) the gradients of the logits.
    """
    total = tl.zeros((BR // RT, DC // DT, RT, DT), tl.float32)
    first = tl.zeros((BR // RT, DC // DT, RT, DT), tl.float32)
    pointers = others + tile_columns(DC, DT)
    ds_pointers = ds + tile_rows(BR, RT)
    if fast:
        for _ in range(0, BO, 2):
            s0, s1 = unpack_two_floats(tl.load(ds_pointers))
            f0, f1 = unpack_two_floats(tl.load(pointers))
            d0 = 1.0 + own * f0
            d1 = 1.0 + own * f1
            r = reciprocal(d0 * d1, GPU)
            u0 = d1 * r
            u1 = d0 * r
            total += s0 * (u0 - u0 * u0)
            total += s1 * (u1 - u1 * u1)
            if WEIGHT:
                first += s0 * u0
                first += s1 * u1
            pointers += DC
            ds_pointers += BR
    else:
        for _ in range(0, BO, 2):
            s0, s1 = unpack_two_floats(tl.load(ds_pointers))
            b0, b1 = unpack_two_floats(tl.load(pointers))
            u0 = reciprocal(1.0 + tl.exp2((own + b0) * TWO_LOG2_E), GPU)
            u1 = reciprocal(1.0 + tl.exp2((own + b1) * TWO_LOG2_E), GPU)
            total += s0 * (u0 - u0 * u0)
            total += s1 * (u1 - u1 * u1)
            if WEIGHT:
                first += s0 * u0
                first += s1 * u1
            pointers += DC
            ds_pointers += BR
    return total, first


@triton.jit
def store_other_side(x, stride, first, T, D, start, into, fast, BO: tl.constexpr, DC: tl.constexpr, GPU: tl.constexpr):
    """Store the features of the other side from `start` on, or their exponentials: (BO / 2, DC, 2)."""
    r = tl.arange(0, BO)
    d = tl.arange(0, DC)
    there = (first + r < T)[:, None] & (start + d < D)[None, :]
    pointers = x + (first + r).to(tl.int64)[:, None] * stride + start + d[None, :]
    a = tl.load(pointers, mask=there, other=0.0).to(tl.float32)
    high, low = split_exponent(a, GPU)
    into += (r // 2)[:, None] * (2 * DC) + d[None, :] * 2 + (r % 2)[:, None]
    tl.store(into, tl.where(fast, exp2_split(high, low), a))


@triton.jit
def load_own_side(
    x, stride, i, T, D, start, fast, DC: tl.constexpr, DT: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Load the features of the own side, or their exponentials, as (RR, DR, RT, DT)."""
    d = start + tile_columns(DC, DT)
    a = tl.load(x + i.to(tl.int64) * stride + d, mask=(i < T) & (d < D), other=0.0).to(tl.float32)
    high, low = split_exponent(a, GPU)
    return tl.where(fast, exp2_split(high, low), a)


@triton.jit
def add_side_gradients(
    x, stride, i, T, D, others, other_stride, other_first, other_T, weight, gradient, d_weight, sum_ds,
    others_scratch, ds_scratch, fast,
    BR: tl.constexpr, BO: tl.constexpr, DC: tl.constexpr, RT: tl.constexpr, DT: tl.constexpr,
    WEIGHT: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Add the contribution of one tile to the gradient of the own side, and with WEIGHT to that of the weight.

    Scratch memory is read as 64-bit words, two neighbours of the other side at once.
    """
    for start in range(0, D, DC):
        store_other_side(others, other_stride, other_first, other_T, D, start, others_scratch, fast, BO, DC, GPU)
        # Wait for what other threads wrote, including ds.
        tl.debug_barrier()
        own = load_own_side(x, stride, i, T, D, start, fast, DC, DT, GPU)
        total, first = sum_over_other_side(
            own, as_int64_pointer(others_scratch), as_int64_pointer(ds_scratch), BR, BO, DC, RT, DT, fast, WEIGHT, GPU,
        )  # fmt: skip
        d = start + tile_columns(DC, DT)
        w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
        into = gradient + i.to(tl.int64) * D + d
        there = (i < T) & (d < D)
        tl.store(into, tl.load(into, mask=there, other=0.0) + 4.0 * w * total, mask=there)
        if WEIGHT:
            # (RR, DR, RT, DT) -> (DR, DT)
            found = sum_ds - 2.0 * tl.sum(tl.sum(first, 0), 1)
            d = start + tl.arange(0, DC // DT)[:, None] * DT + tl.arange(0, DT)[None, :]
            into = d_weight + d
            tl.store(into, tl.load(into, mask=d < D, other=0.0) + found, mask=d < D)
        # The next iteration overwrites the scratch memory.
        tl.debug_barrier()


@triton.jit
def tile_dot_products(
    x, x_stride, first, T, y, y_stride, other_first, other_T, width,
    BM: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, VC: tl.constexpr, PRECISION: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """x yᵀ of a tile, VC features per iteration: (BM, BN)."""
    r = tl.arange(0, BM)
    s = tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    x += (first + r).to(tl.int64)[:, None] * x_stride
    y += (other_first + s).to(tl.int64)[None, :] * y_stride
    for start in tl.static_range(0, BV, VC):
        d = start + tl.arange(0, VC)
        left = tl.load(x + d[None, :], mask=(first + r < T)[:, None] & (d < width)[None, :], other=0.0)
        right = tl.load(y + d[:, None], mask=(other_first + s < other_T)[None, :] & (d < width)[:, None], other=0.0)
        total = dot_add(left, right, total, PRECISION, GPU)
    return total


@triton.jit
def sum_tile(tile):
    """The sum of a tile, (1, 1): on Blackwell, Triton 3.7 fails on the sum of a vector that follows from a product."""
    return tl.sum(tl.sum(tl.sum(tl.sum(tile, 0), 0), 0, keep_dims=True), 1, keep_dims=True)


@triton.jit
def load_base2_lse(lse, i, Tq):
    """Load log-sum-exps. Fully masked rows, and rows past the end, get a value that makes all weights 0."""
    rows = tl.load(lse + i, mask=i < Tq, other=-float("inf"))
    return tl.where(rows == -float("inf"), -MASKED_LOGIT, rows)


@triton.jit(do_not_specialize=ADDITIVE_LENGTHS)
def additive_query_gradients(
    E, F, table, sizes, constants, q_max, k_max, q_magnitude, k_magnitude,
    q, k, v, weight, key_ranges, query_ids, key_ids, dense, seed,
    out, lse, d_out, d_lse, delta, dq, dw, scratch,
    H, group, Tq, Tk, D, Dv, pairs, items, programs,
    q_batch, q_head, q_query, k_batch, k_head, k_key, v_batch, v_head, v_key, weight_head, headed,
    key_ranges_batch, query_ids_batch, key_ids_batch, dense_batch, dense_head, dense_query, dense_key,
    threshold, keep_scale,
    CAUSAL: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr, DROPOUT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, MT: tl.constexpr, NT: tl.constexpr, BV: tl.constexpr, VC: tl.constexpr,
    DP: tl.constexpr, BD: tl.constexpr, DC: tl.constexpr, RT: tl.constexpr, DT: tl.constexpr, CHUNK: tl.constexpr,
    MAX_SHARED: tl.constexpr, GPU: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Each program takes blocks of queries: dq (B, H, Tq, D) float32, initialized to 0.

    delta (B, H, Tq) is written for `additive_key_gradients`. lse and d_lse are in base 2. dw (programs, weights, D)
    float32, initialized to 0: each program adds to its own. scratch is (programs, BM BN + BN DC).
    """
    E, F, table = as_int64_pointer(E), as_int64_pointer(F), as_int64_pointer(table)
    blocks = tl.cdiv(Tq, BM)
    k_blocks = tl.cdiv(Tk, BN)
    offset = Tk - Tq
    ALWAYS: tl.constexpr = IDS or DENSE
    ds_scratch = scratch + tl.program_id(0).to(tl.int64) * (BM * BN + BN * DC)
    others_scratch = ds_scratch + BM * BN
    for item in range(tl.program_id(0), items, programs):
        pair = item % pairs
        block = blocks - 1 - item // pairs
        b = (pair // H).to(tl.int64)
        h = (pair % H).to(tl.int64)
        k_pair = b * (H // group) + h // group
        q_block = pair.to(tl.int64) * blocks + block
        first_row = pair.to(tl.int64) * Tq
        own_max = load_per_feature(q_max, q_block, DP, BD)
        own_sizes = load_per_feature(sizes, h * headed, DP, BD)
        own_far = tl.load(q_magnitude + q_block) > MAX_EXPONENT
        constant = tl.load(constants + h * headed * 2)
        factor = tl.load(constants + h * headed * 2 + 1)
        i = block * BM + tile_rows(BM, MT)
        flat = block * BM + tl.arange(0, BM)
        row_delta = tl.zeros((BM,), tl.float32)
        for start in tl.static_range(0, BV, VC):
            dv = start + tl.arange(0, VC)
            pointers = (first_row + flat)[:, None] * Dv + dv[None, :]
            there = (flat < Tq)[:, None] & (dv < Dv)[None, :]
            d_rows = tl.load(d_out + pointers, mask=there, other=0.0).to(tl.float32)
            row_delta += tl.sum(d_rows * tl.load(out + pointers, mask=there, other=0.0).to(tl.float32), 1)
        row_delta -= tl.load(d_lse + first_row + flat, mask=flat < Tq, other=0.0) * LOG2_E
        tl.store(delta + first_row + flat, row_delta, mask=flat < Tq)
        row_delta = tl.reshape(row_delta, (BM // MT, MT))[:, None, :, None]
        row_lse = load_base2_lse(lse + first_row, i, Tq)
        for run in tl.static_range(RANGES if RANGES > 0 else 1):
            low, high = key_range(key_ranges + b * key_ranges_batch, run, flat, offset, Tq, Tk, CAUSAL, RANGES)
            first, last, full, end = tile_bounds(low, high, flat < Tq, Tk, BN, ALWAYS)
            for t in range(first, last):
                j = t * BN + tile_columns(BN, NT)
                k_block = k_pair * k_blocks + t
                k_block_max = load_per_feature(k_max, k_block, DP, BD)
                far = own_far | (tl.load(k_magnitude + k_block) > MAX_EXPONENT)
                z = additive_logits(
                    E + q_block * (BM * DP // 2), F + k_block * (BN * DP // 2), table + h * headed * (DP // 2),
                    constant, factor, own_max, k_block_max, own_sizes, far,
                    q + b * q_batch + h * q_head, q_query, i, Tq, k + b * k_batch + (h // group) * k_head, k_key, j, Tk,
                    weight + h * weight_head, D, BM, BN, MT, NT, DP, BD, CHUNK, MAX_SHARED, BM, GPU,
                )  # fmt: skip
                p = tl.exp2(z - row_lse)
                if (t < full) | (t >= end):
                    seen = visible_in_range(
                        i, j, run, key_ranges + b * key_ranges_batch, offset, query_ids + b * query_ids_batch,
                        key_ids + b * key_ids_batch, dense + b * dense_batch + h * dense_head, dense_query, dense_key,
                        Tq, Tk, CAUSAL, RANGES, IDS, DENSE,
                    )  # fmt: skip
                    p = tl.where(seen, p, 0.0)
                dp = tile_dot_products(
                    d_out + first_row * Dv, Dv, block * BM, Tq, v + b * v_batch + (h // group) * v_head, v_key, t * BN,
                    Tk, Dv, BM, BN, BV, VC, PRECISION, GPU,
                )  # fmt: skip
                dp = matrix_to_tile(dp, BM, BN, MT, NT)
                if DROPOUT:
                    dp = tl.where(dropout_keeps(tl.load(seed), b, h, i, j, threshold), dp * keep_scale, 0.0)
                ds = p * (dp - row_delta)
                jj = tile_columns(BN, NT)
                tl.store(ds_scratch + (jj // 2) * (2 * BM) + tile_rows(BM, MT) * 2 + jj % 2, ds)
                fast = (far == 0) & (tl.max(own_max + k_block_max, 0) < MAX_PAIR_EXPONENT)
                add_side_gradients(
                    q + b * q_batch + h * q_head, q_query, block * BM + tile_rows(BM, RT), Tq, D,
                    k + b * k_batch + (h // group) * k_head, k_key, t * BN, Tk, weight + h * weight_head,
                    dq + first_row * D, dw + (tl.program_id(0) * (headed * (H - 1) + 1) + h * headed) * D,
                    sum_tile(ds), others_scratch, ds_scratch, fast,
                    BM, BN, DC, RT, DT, True, GPU,
                )  # fmt: skip


@triton.jit(do_not_specialize=ADDITIVE_LENGTHS)
def additive_key_gradients(
    E, F, table, sizes, constants, q_max, k_max, q_magnitude, k_magnitude,
    q, k, v, weight, key_ranges, query_ids, key_ids, dense, seed,
    lse, d_out, delta, dk, dv, scratch,
    H, group, Tq, Tk, D, Dv, pairs, items, programs,
    q_batch, q_head, q_query, k_batch, k_head, k_key, v_batch, v_head, v_key, weight_head, headed,
    key_ranges_batch, query_ids_batch, key_ids_batch, dense_batch, dense_head, dense_query, dense_key,
    threshold, keep_scale,
    CAUSAL: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr, DROPOUT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, MT: tl.constexpr, NT: tl.constexpr, BV: tl.constexpr, VC: tl.constexpr,
    DP: tl.constexpr, BD: tl.constexpr, DC: tl.constexpr, RT: tl.constexpr, DT: tl.constexpr, CHUNK: tl.constexpr,
    MAX_SHARED: tl.constexpr, GPU: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Each program takes blocks of keys, and loops over all queries of the heads that share them, in order.

    dk (B, G, Tk, D) float32, initialized to 0; dv (B, G, Tk, Dv). scratch is (programs, BM BN + BM DC).
    """
    E, F, table = as_int64_pointer(E), as_int64_pointer(F), as_int64_pointer(table)
    blocks = tl.cdiv(Tq, BM)
    k_blocks = tl.cdiv(Tk, BN)
    k_heads = H // group
    offset = Tk - Tq
    ds_scratch = scratch + tl.program_id(0).to(tl.int64) * (BM * BN + BM * DC)
    others_scratch = ds_scratch + BM * BN
    for item in range(tl.program_id(0), items, programs):
        k_pair = (item % (pairs // group)).to(tl.int64)
        t = item // (pairs // group)
        b = k_pair // k_heads
        g = k_pair % k_heads
        k_block = k_pair * k_blocks + t
        own_max = load_per_feature(k_max, k_block, DP, BD)
        own_far = tl.load(k_magnitude + k_block) > MAX_EXPONENT
        j = t * BN + tile_columns(BN, NT)
        flat_j = t * BN + tl.arange(0, BN)
        d = tl.arange(0, BV)
        d_values = tl.zeros((BN, BV), tl.float32)
        start = 0
        if CAUSAL:
            start = tl.minimum(tl.maximum(t * BN - offset, 0) // BM, blocks)
        for iteration in range(group * (blocks - start)):
            h = g * group + iteration // (blocks - start)
            block = start + iteration % (blocks - start)
            pair = b * H + h
            flat = block * BM + tl.arange(0, BM)
            some, every = tile_visibility(
                key_ranges + b * key_ranges_batch, flat, t * BN, offset, Tq, Tk, CAUSAL, RANGES, IDS or DENSE, BN
            )
            if some:
                q_block = pair * blocks + block
                i = block * BM + tile_rows(BM, MT)
                q_block_max = load_per_feature(q_max, q_block, DP, BD)
                far = own_far | (tl.load(q_magnitude + q_block) > MAX_EXPONENT)
                z = additive_logits(
                    E + q_block * (BM * DP // 2), F + k_block * (BN * DP // 2), table + h * headed * (DP // 2),
                    tl.load(constants + h * headed * 2), tl.load(constants + h * headed * 2 + 1),
                    q_block_max, own_max, load_per_feature(sizes, h * headed, DP, BD), far,
                    q + b * q_batch + h * q_head, q_query, i, Tq, k + b * k_batch + g * k_head, k_key, j, Tk,
                    weight + h * weight_head, D, BM, BN, MT, NT, DP, BD, CHUNK, MAX_SHARED, BM, GPU,
                )  # fmt: skip
                p = tl.exp2(z - load_base2_lse(lse + pair * Tq, i, Tq))
                if every == 0:
                    seen = visible_in_any_range(
                        i, j, key_ranges + b * key_ranges_batch, offset, query_ids + b * query_ids_batch,
                        key_ids + b * key_ids_batch, dense + b * dense_batch + h * dense_head, dense_query, dense_key,
                        Tq, Tk, CAUSAL, RANGES, IDS, DENSE,
                    )  # fmt: skip
                    p = tl.where(seen, p, 0.0)
                dp = tile_dot_products(
                    d_out + pair * Tq * Dv, Dv, block * BM, Tq, v + b * v_batch + g * v_head, v_key, t * BN, Tk, Dv,
                    BM, BN, BV, VC, PRECISION, GPU,
                )  # fmt: skip
                dp = matrix_to_tile(dp, BM, BN, MT, NT)
                dropped = p
                if DROPOUT:
                    keeps = dropout_keeps(tl.load(seed), b, h, i, j, threshold)
                    dp = tl.where(keeps, dp * keep_scale, 0.0)
                    dropped = tl.where(keeps, p * keep_scale, 0.0)
                row_delta = tl.load(delta + pair * Tq + i, mask=i < Tq, other=0.0)
                ds = p * (dp - row_delta)
                ii = tile_rows(BM, MT)
                tl.store(ds_scratch + (ii // 2) * (2 * BN) + tile_columns(BN, NT) * 2 + ii % 2, ds)
                d_rows = tl.load(
                    d_out + (pair * Tq + flat)[:, None] * Dv + d[None, :],
                    mask=(flat < Tq)[:, None] & (d < Dv)[None, :], other=0.0,
                )  # fmt: skip
                d_values = dot_add(
                    tl.trans(tile_to_matrix(dropped.to(d_rows.dtype), BM, BN)), d_rows, d_values, PRECISION, GPU
                )
                fast = (far == 0) & (tl.max(own_max + q_block_max, 0) < MAX_PAIR_EXPONENT)
                add_side_gradients(
                    k + b * k_batch + g * k_head, k_key, t * BN + tile_rows(BN, RT), Tk, D,
                    q + b * q_batch + h * q_head, q_query, block * BM, Tq, weight + h * weight_head,
                    dk + k_pair * Tk * D, dk, 0.0, others_scratch, ds_scratch, fast,
                    BN, BM, DC, RT, DT, False, GPU,
                )  # fmt: skip
        tl.store(
            dv + (k_pair * Tk + flat_j)[:, None] * Dv + d[None, :], d_values.to(dv.dtype.element_ty),
            mask=(flat_j < Tk)[:, None] & (d < Dv)[None, :],
        )  # fmt: skip


@triton.jit
def tile_visibility(
    key_ranges, i, first, offset, Tq, Tk, CAUSAL: tl.constexpr, RANGES: tl.constexpr, ALWAYS: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Whether some of these queries see some of the BN keys from `first` on, and whether all see all of them."""
    low, high = key_range(key_ranges, 0, i, offset, Tq, Tk, CAUSAL, RANGES)
    some = (low < high) & (low < first + BN) & (high > first)
    every = (low <= first) & (high >= first + BN)
    if RANGES == 2:
        low, high = key_range(key_ranges, 1, i, offset, Tq, Tk, CAUSAL, RANGES)
        some |= (low < high) & (low < first + BN) & (high > first)
        every |= (low <= first) & (high >= first + BN)
    all_see = tl.min(every.to(tl.int32), 0)
    if ALWAYS:
        all_see = 0
    return tl.max(some.to(tl.int32), 0) > 0, all_see

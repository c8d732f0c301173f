"""Forward of additive attention, wᵀ tanh(q + k), from exponentials that are computed once per query and key.

tanh(a + b) = 1 - 2 / (1 + e^2a e^2b), so a logit is Σ w - 2 Σ_d w_d / (1 + E_d F_d) with E = e^2q and F = e^2k. The
weight moves into the denominator: w / (1 + E F) = 1 / (c + (c E) F) with c = 1 / w. Four terms share a reciprocal,

    1/D0 + 1/D1 + 1/D2 + 1/D3 = n / (D0 D1 D2 D3),

where each denominator extends n by one fused operation: three instructions per term, and a quarter of a reciprocal.
Whether the products stay finite is known before a tile starts, from the largest query and key of each feature. If the
product of four denominators overflows, two share a reciprocal; if e^2a itself overflows, a + b is computed first.

A tile is (MR, NR, MT, NT): the last two axes are threads, the first two the registers of a thread. A pair is one head
of one sequence. BM queries, BN keys, D width, DP padded width, Dv value width.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.additive.exponentials import ADDITIVE_LENGTHS, NO_EXPONENT, TWO_LOG2_E
from foci.kernels.dropout import dropout_keeps
from foci.kernels.logits import LOG2_E, apply_masks, key_range, tile_bounds

# The largest exponent (base 2) of a product of denominators, and of a single exponential.
MAX_PRODUCT_EXPONENT = tl.constexpr(124.0)
MAX_EXPONENT = tl.constexpr(120.0)


@triton.jit
def reciprocal(x, GPU: tl.constexpr):
    """1 / x to one unit in the last block_index, in one instruction; the interpreter divides."""
    if GPU:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:  # noqa: RET505 - the branch that is not taken must not be compiled
        return 1.0 / x


@triton.jit
def dot_add(a, b, total, PRECISION: tl.constexpr, GPU: tl.constexpr):
    """total + a b; the interpreter has no product of bfloat16."""
    if GPU:
        return tl.dot(a, b, total, input_precision=PRECISION)
    else:  # noqa: RET505
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)


@triton.jit
def as_int64_pointer(pointer):
    """The same memory as 64-bit words, each of which holds two floats."""
    return pointer.to(tl.pointer_type(tl.int64), bitcast=True)


@triton.jit
def unpack_two_floats(x):
    """The two floats of a 64-bit word: one load instead of two."""
    first = (x & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    return first, (x >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def load_four_floats(words, GPU: tl.constexpr):
    """Load the four floats of two words, from memory that no kernel writes meanwhile: one load instead of four."""
    if GPU:
        return tl.inline_asm_elementwise(
            "ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,l", [words.to(tl.int64)],
            (tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:  # noqa: RET505
        first, second = unpack_two_floats(tl.load(words))
        third, fourth = unpack_two_floats(tl.load(words + 1))
        return first, second, third, fourth


@triton.jit
def query_offset(i, DP: tl.constexpr, ROW_GROUP: tl.constexpr):
    """The offset of a query's exponentials in E, (BM / ROW_GROUP, DP / 4, ROW_GROUP, 4), in 64-bit words."""
    return (i // ROW_GROUP) * (ROW_GROUP * DP // 2) + (i % ROW_GROUP) * 2


@triton.jit
def sum_reciprocals_by_four(
    E, F, table,
    BM: tl.constexpr, BN: tl.constexpr, MT: tl.constexpr, NT: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
    ROW_GROUP: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Σ_d 1 / (c + E F); four terms share a reciprocal."""
    total = tl.zeros((BM // MT, BN // NT, MT, NT), tl.float32)
    e = E + query_offset(tile_rows(BM, MT), DP, ROW_GROUP)
    f = F + 2 * tile_columns(BN, NT)
    for _ in range(0, DP, CHUNK):
        for step in tl.static_range(CHUNK // 4):
            e0, e1, e2, e3 = load_four_floats(e + 2 * step * ROW_GROUP, GPU)
            f0, f1, f2, f3 = load_four_floats(f + 2 * step * BN, GPU)
            c1, c0 = unpack_two_floats(tl.load(table + 2 * step))
            c3, c2 = unpack_two_floats(tl.load(table + 2 * step + 1))
            d0 = c0 + e0 * f0
            d1 = c1 + e1 * f1
            n = d0 + d1
            m = d0 * d1
            d2 = c2 + e2 * f2
            n = n * d2 + m
            m = m * d2
            d3 = c3 + e3 * f3
            n = n * d3 + m
            m = m * d3
            total += n * reciprocal(m, GPU)
        e += CHUNK // 2 * ROW_GROUP
        f += CHUNK // 2 * BN
        table += CHUNK // 2
    return total


@triton.jit
def sum_reciprocals_by_two(
    E, F, table,
    BM: tl.constexpr, BN: tl.constexpr, MT: tl.constexpr, NT: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
    ROW_GROUP: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Σ_d 1 / (c + E F); two terms share a reciprocal, for values whose product of four would overflow."""
    total = tl.zeros((BM // MT, BN // NT, MT, NT), tl.float32)
    e = E + query_offset(tile_rows(BM, MT), DP, ROW_GROUP)
    f = F + 2 * tile_columns(BN, NT)
    for _ in range(0, DP, CHUNK):
        for step in tl.static_range(CHUNK // 4):
            e0, e1, e2, e3 = load_four_floats(e + 2 * step * ROW_GROUP, GPU)
            f0, f1, f2, f3 = load_four_floats(f + 2 * step * BN, GPU)
            c1, c0 = unpack_two_floats(tl.load(table + 2 * step))
            c3, c2 = unpack_two_floats(tl.load(table + 2 * step + 1))
            d0 = c0 + e0 * f0
            d1 = c1 + e1 * f1
            total += (d0 + d1) * reciprocal(d0 * d1, GPU)
            d2 = c2 + e2 * f2
            d3 = c3 + e3 * f3
            total += (d2 + d3) * reciprocal(d2 * d3, GPU)
        e += CHUNK // 2 * ROW_GROUP
        f += CHUNK // 2 * BN
        table += CHUNK // 2
    return total


@triton.jit
def sum_tanh_directly(
    q, q_query, i, Tq, k, k_key, j, Tk, weight, D, GPU: tl.constexpr,
):  # fmt: skip
    """Σ_d w_d tanh(a + b) in base 2, for values of any size: slow, and rarely needed."""
    q += i.to(tl.int64) * q_query
    k += j.to(tl.int64) * k_key
    total = tl.zeros_like(i + j).to(tl.float32)
    for d in range(D):
        a = tl.load(q + d, mask=i < Tq, other=0.0).to(tl.float32)
        b = tl.load(k + d, mask=j < Tk, other=0.0).to(tl.float32)
        w = tl.load(weight + d).to(tl.float32) * LOG2_E
        total += w - (2.0 * w) * reciprocal(1.0 + tl.exp2((a + b) * TWO_LOG2_E), GPU)
    return total


@triton.jit
def tile_rows(BM: tl.constexpr, MT: tl.constexpr):
    """The query index of each entry of a tile: (MR, 1, MT, 1)."""
    return tl.arange(0, BM // MT)[:, None, None, None] * MT + tl.arange(0, MT)[None, None, :, None]


@triton.jit
def tile_columns(BN: tl.constexpr, NT: tl.constexpr):
    """The key index of each entry of a tile: (1, NR, 1, NT)."""
    return tl.arange(0, BN // NT)[None, :, None, None] * NT + tl.arange(0, NT)[None, None, None, :]


@triton.jit
def tile_to_matrix(tile, BM: tl.constexpr, BN: tl.constexpr):
    """(MR, NR, MT, NT) -> (BM, BN)."""
    return tl.reshape(tl.permute(tile, (0, 2, 1, 3)), (BM, BN))


@triton.jit
def matrix_to_tile(matrix, BM: tl.constexpr, BN: tl.constexpr, MT: tl.constexpr, NT: tl.constexpr):
    """(BM, BN) -> (MR, NR, MT, NT)."""
    return tl.permute(tl.reshape(matrix, (BM // MT, MT, BN // NT, NT)), (0, 2, 1, 3))


@triton.jit
def load_per_feature(x, row, DP: tl.constexpr, BD: tl.constexpr):
    """Load one row of a table with a value per feature."""
    d = tl.arange(0, BD)
    return tl.load(x + row * DP + d, mask=d < DP, other=NO_EXPONENT)


@triton.jit
def additive_logits(
    E, F, table, constant, factor, q_max, k_max, sizes, far,
    q, q_query, i, Tq, k, k_key, j, Tk, weight, D,
    BM: tl.constexpr, BN: tl.constexpr, MT: tl.constexpr, NT: tl.constexpr, DP: tl.constexpr, BD: tl.constexpr,
    CHUNK: tl.constexpr, MAX_SHARED: tl.constexpr, ROW_GROUP: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """A tile of logits in base 2; E and F point to its blocks, sizes is 1 + log2 |c|."""
    exponents = tl.maximum(q_max + k_max, 0.0) + sizes
    by_four = tl.max(tl.sum(tl.reshape(exponents, (BD // 4, 4)), 1), 0)
    by_two = tl.max(tl.sum(tl.reshape(exponents, (BD // 2, 2)), 1), 0)
    if far | (by_two > MAX_PRODUCT_EXPONENT):
        z = sum_tanh_directly(q, q_query, i, Tq, k, k_key, j, Tk, weight, D, GPU)
    elif (by_four > MAX_PRODUCT_EXPONENT) | (MAX_SHARED == 2):
        z = constant - factor * sum_reciprocals_by_two(E, F, table, BM, BN, MT, NT, DP, CHUNK, ROW_GROUP, GPU)
    else:
        z = constant - factor * sum_reciprocals_by_four(E, F, table, BM, BN, MT, NT, DP, CHUNK, ROW_GROUP, GPU)
    return z


@triton.jit
def visible_in_range(
    i, j, run, key_ranges, offset, query_ids, key_ids, dense, dense_query, dense_key, Tq, Tk,
    CAUSAL: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Which entries of a tile are visible, for one of the key ranges."""
    low, high = key_range(key_ranges, run, i, offset, Tq, Tk, CAUSAL, RANGES)
    seen = (j >= low) & (j < high)
    return apply_masks(seen, i, j, query_ids, key_ids, dense, dense_query, dense_key, Tq, Tk, IDS, DENSE)


@triton.jit
def visible_in_any_range(
    i, j, key_ranges, offset, query_ids, key_ids, dense, dense_query, dense_key, Tq, Tk,
    CAUSAL: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Which entries of a tile are visible, for any of the key ranges."""
    seen = visible_in_range(
        i,
        j,
        0,
        key_ranges,
        offset,
        query_ids,
        key_ids,
        dense,
        dense_query,
        dense_key,
        Tq,
        Tk,
        CAUSAL,
        RANGES,
        IDS,
        DENSE,
    )
    if RANGES == 2:
        seen |= visible_in_range(
            i,
            j,
            1,
            key_ranges,
            offset,
            query_ids,
            key_ids,
            dense,
            dense_query,
            dense_key,
            Tq,
            Tk,
            CAUSAL,
            RANGES,
            IDS,
            DENSE,
        )
    return seen


@triton.jit(do_not_specialize=ADDITIVE_LENGTHS)
def additive_forward(
    E, F, table, sizes, constants, q_max, k_max, q_magnitude, k_magnitude,
    q, k, v, weight, key_ranges, query_ids, key_ids, dense, seed, out, lse,
    H, group, Tq, Tk, D, Dv, pairs, per_split,
    q_batch, q_head, q_query, k_batch, k_head, k_key, v_batch, v_head, v_key, weight_head, headed,
    key_ranges_batch, query_ids_batch, key_ids_batch, dense_batch, dense_head, dense_query, dense_key,
    threshold, keep_scale,
    CAUSAL: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr, DROPOUT: tl.constexpr,
    SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MT: tl.constexpr, NT: tl.constexpr, BV: tl.constexpr,
    DP: tl.constexpr, BD: tl.constexpr, CHUNK: tl.constexpr, MAX_SHARED: tl.constexpr, GPU: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per block of queries, and per split of the keys; the longest causal rows start first.

    out (B, H, Tq, Dv) and lse (B, H, Tq) in base 2; with SPLIT both have one more leading axis, one entry per split.
    """
    E, F, table = as_int64_pointer(E), as_int64_pointer(F), as_int64_pointer(table)
    blocks = tl.cdiv(Tq, BM)
    pair = tl.program_id(0) % pairs
    block = blocks - 1 - tl.program_id(0) // pairs
    split = tl.program_id(1)
    b = (pair // H).to(tl.int64)
    h = (pair % H).to(tl.int64)
    k_blocks = tl.cdiv(Tk, BN)
    k_pair = b * (H // group) + h // group
    offset = Tk - Tq
    q += b * q_batch + h * q_head
    k += b * k_batch + (h // group) * k_head
    v += b * v_batch + (h // group) * v_head
    key_ranges += b * key_ranges_batch
    query_ids += b * query_ids_batch
    key_ids += b * key_ids_batch
    dense += b * dense_batch + h * dense_head
    weight += h * weight_head
    # One table for all heads, or one per head.
    table += h * headed * (DP // 2)
    constant = tl.load(constants + h * headed * 2)
    factor = tl.load(constants + h * headed * 2 + 1)
    block_index = pair.to(tl.int64) * blocks + block
    E += block_index * (BM * DP // 2)
    F += k_pair * k_blocks * (BN * DP // 2)
    own_max = load_per_feature(q_max, block_index, DP, BD)
    own_far = tl.load(q_magnitude + block_index) > MAX_EXPONENT
    own_sizes = load_per_feature(sizes, h * headed, DP, BD)
    i = block * BM + tile_rows(BM, MT)
    flat = block * BM + tl.arange(0, BM)
    dv = tl.arange(0, BV)
    ALWAYS: tl.constexpr = IDS or DENSE
    peak = tl.full((BM // MT, MT), -float("inf"), tl.float32)
    total = tl.zeros((BM // MT, MT, NT), tl.float32)
    weighted_values = tl.zeros((BM, BV), tl.float32)
    for run in tl.static_range(RANGES if RANGES > 0 else 1):
        low, high = key_range(key_ranges, run, flat, offset, Tq, Tk, CAUSAL, RANGES)
        first, last, full, end = tile_bounds(low, high, flat < Tq, Tk, BN, ALWAYS)
        if SPLIT:
            first = tl.maximum(first, split * per_split)
            last = tl.minimum(last, (split + 1) * per_split)
        for t in range(first, last):
            j = t * BN + tile_columns(BN, NT)
            far = own_far | (tl.load(k_magnitude + k_pair * k_blocks + t) > MAX_EXPONENT)
            z = additive_logits(
                E, F + tl.cast(t, tl.int64) * (BN * DP // 2), table, constant, factor,
                own_max, load_per_feature(k_max, k_pair * k_blocks + t, DP, BD), own_sizes, far,
                q, q_query, i, Tq, k, k_key, j, Tk, weight, D, BM, BN, MT, NT, DP, BD, CHUNK, MAX_SHARED, BM, GPU,
            )  # fmt: skip
            if (t < full) | (t >= end):
                seen = visible_in_range(
                    i, j, run, key_ranges, offset, query_ids, key_ids, dense, dense_query, dense_key, Tq, Tk,
                    CAUSAL, RANGES, IDS, DENSE,
                )  # fmt: skip
                z = tl.where(seen, z, -float("inf"))
            higher = tl.maximum(peak, tl.max(tl.max(z, 1), 2))
            # A row without a visible key so far: -inf minus -inf would be NaN.
            safe = tl.where(higher == -float("inf"), 0.0, higher)
            p = tl.exp2(z - safe[:, None, :, None])
            rescale = tl.exp2(peak - safe)
            total = total * rescale[:, :, None] + tl.sum(p, 1)
            peak = higher
            if DROPOUT:
                p = tl.where(dropout_keeps(tl.load(seed), b, h, i, j, threshold), p, 0.0)
            flat_j = t * BN + tl.arange(0, BN)
            values = tl.load(
                v + flat_j.to(tl.int64)[:, None] * v_key + dv[None, :],
                mask=(flat_j < Tk)[:, None] & (dv < Dv)[None, :], other=0.0,
            )  # fmt: skip
            weighted_values = weighted_values * tl.reshape(rescale, (BM,))[:, None]
            weighted_values = dot_add(
                tile_to_matrix(p.to(values.dtype), BM, BN), values, weighted_values, PRECISION, GPU
            )
    sums = tl.sum(total, 2)
    empty = sums == 0.0
    sums = tl.where(empty, 1.0, sums)
    row_lse = tl.where(empty, -float("inf"), peak + tl.log2(sums))
    weighted_values = weighted_values * tl.reshape(keep_scale / sums, (BM,))[:, None]
    row = (split.to(tl.int64) * pairs + pair) * Tq + flat
    tl.store(lse + row, tl.reshape(row_lse, (BM,)), mask=flat < Tq)
    tl.store(
        out + row[:, None] * Dv + dv[None, :], weighted_values.to(out.dtype.element_ty),
        mask=(flat < Tq)[:, None] & (dv < Dv)[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=ADDITIVE_LENGTHS)
def merge_splits(parts, part_lse, out, lse, splits, rows, Dv, BS: tl.constexpr, BV: tl.constexpr):
    """Merge the results of all splits of the keys, BS at a time: parts (splits, rows, Dv), part_lse (splits, rows)."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BS)
    dv = tl.program_id(1) * BV + tl.arange(0, BV)
    peak = tl.full((BS,), -float("inf"), tl.float32)
    for first in range(0, splits, BS):
        peak = tl.maximum(
            peak, tl.load(part_lse + (first + s) * rows + row, mask=first + s < splits, other=-float("inf"))
        )
    highest = tl.max(peak, 0)
    safe = tl.where(highest == -float("inf"), 0.0, highest)
    totals = tl.zeros((BS,), tl.float32)
    weighted_values = tl.zeros((BS, BV), tl.float32)
    for first in range(0, splits, BS):
        inside = first + s < splits
        shares = tl.exp2(tl.load(part_lse + (first + s) * rows + row, mask=inside, other=-float("inf")) - safe)
        offsets = ((first + s) * rows + row)[:, None] * Dv + dv[None, :]
        values = tl.load(parts + offsets, mask=inside[:, None] & (dv < Dv)[None, :], other=0.0)
        totals += shares
        weighted_values += values * shares[:, None]
    total = tl.sum(totals, 0)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    result = tl.sum(weighted_values, 0) / total
    tl.store(out + row * Dv + dv, result.to(out.dtype.element_ty), mask=dv < Dv)
    tl.store(lse + row, tl.where(empty, -float("inf"), tl.log2(total) + safe))

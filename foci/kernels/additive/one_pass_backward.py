"""The backward of additive attention in one pass: a term adds to the gradients of query, key and weight at once.

The formulas and names are those of two_pass_backward.py. A program owns a block of keys and loops over the queries. For
each tile it computes the logits once, and the reciprocals once more with the features as the lanes of a warp. A thread
has some keys and some features, so sums over queries and over keys both stay in the thread. Query gradients are added
in memory in any order, so two runs differ in the last digits. two_pass_backward.py is deterministic and takes twice as
long.

Rows are padded to whole blocks, features to DW, a multiple of DC. one_pass_prologue_epilogue.py has the kernels before
and after the pass.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.additive.exponentials import ADDITIVE_LENGTHS, TWO_LOG2_E
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
    visible_in_any_range,
)
from foci.kernels.additive.two_pass_backward import (
    MAX_PAIR_EXPONENT,
    load_base2_lse,
    sum_tile,
    tile_dot_products,
    tile_visibility,
)
from foci.kernels.dropout import dropout_keeps


@triton.jit
def allocate_scratch(scratch, SIZE: tl.constexpr, SHARED: tl.constexpr):
    """The scratch memory of a program, SIZE floats: the address of shared memory, or a part of `scratch`.

    Triton offers no shared memory that is written in one layout and read in another, so an instruction declares it. Its
    size and alignment keep the compiler's own shared memory aligned. A launch has 48 KiB unless it requests more, and
    the compiler requests only what it knows of: its own part must not exceed 32 KiB.
    """
    if SHARED:
        tl.static_assert(SIZE <= 4096, "scratch memory holds 64 x 64 floats")
        return tl.inline_asm_elementwise(
            "{ .shared .align 1024 .b8 foci_scratch[16384]; mov.u32 $0, foci_scratch; }", "=r,r", [tl.program_id(0)],
            tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:  # noqa: RET505 - the branch that is not taken must not be compiled
        return scratch + tl.program_id(0).to(tl.int64) * SIZE


@triton.jit
def store_to_scratch(scratch, offset, x, SHARED: tl.constexpr):
    if SHARED:
        tl.inline_asm_elementwise(
            "st.shared.f32 [$1], $2; mov.b32 $0, 0;", "=r,r,f", [scratch + 4 * offset, x], tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(scratch + offset, x)


@triton.jit
def load_four_from_scratch(scratch, offset, SHARED: tl.constexpr, GPU: tl.constexpr):
    """Load four adjacent floats of scratch memory at once.

    An instruction, because the compiler chooses a thread layout for each load that it sees. The layout must not change,
    or the sums would move between lanes.
    """
    if SHARED:
        return tl.inline_asm_elementwise(
            "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,r", [scratch + 4 * offset],
            (tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
        )  # fmt: skip
    elif GPU:  # noqa: RET505
        return tl.inline_asm_elementwise(
            "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,l", [(scratch + offset).to(tl.int64)],
            (tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        at = scratch + offset
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def load_from_scratch(scratch, offset, SHARED: tl.constexpr, GPU: tl.constexpr):
    if SHARED:
        return tl.inline_asm_elementwise(
            "ld.shared.f32 $0, [$1];", "=f,r", [scratch + 4 * offset], tl.float32, is_pure=False, pack=1
        )
    else:  # noqa: RET505
        return load_float(scratch + offset, GPU)


@triton.jit
def load_float(pointer, GPU: tl.constexpr):
    if GPU:
        return tl.inline_asm_elementwise(
            "ld.global.f32 $0, [$1];", "=f,l", [pointer.to(tl.int64)], tl.float32, is_pure=False, pack=1
        )
    else:  # noqa: RET505
        return tl.load(pointer)


@triton.jit
def atomic_add_floats(pointer, x, GPU: tl.constexpr):
    """Add to memory without waiting. The instruction requires that each entry of x belongs to exactly one thread."""
    if GPU:
        tl.inline_asm_elementwise(
            "red.relaxed.gpu.global.add.f32 [$1], $2; mov.b32 $0, 0;", "=r,l,f", [pointer.to(tl.int64), x], tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.atomic_add(pointer, x)


@triton.jit
def sum_from_exponentials(
    E, F, table, scratch, into, d, thread,
    BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, DW: tl.constexpr, DC: tl.constexpr,
    JT: tl.constexpr, DT: tl.constexpr, SHARED: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Σ_i ds u (1 - u) for each key of a thread, and Σ_ij ds u; adds Σ_j ds u (1 - u) to the queries.

    The sums are one tensor (DR, JT, DT) for each key of a thread. E (BM / 4, DP / 4, 4, 4) and F (DP / 4, BN, 4) are
    those of the logits; scratch holds ds, (BM / 4, BN, 4); into is (BM, DW). Two queries share a reciprocal.
    """
    # Padding features repeat the last one; their results are discarded.
    there = tl.minimum(d, DP - 1) if DP < DW else d
    E += there // 4 * 16 + there % 4 + thread * 0
    F += there // 4 * (4 * BN) + there % 4 + thread * 4
    # E has the factor c, so keys are divided by c: u = 1 / (1 + (c e^2q) (e^2k / c)).
    unfold = reciprocal(load_float(table + (there ^ 1) + thread * 0, GPU), GPU)
    zeros = tl.zeros((DC // DT, JT, DT), tl.float32)
    own = ()
    totals = ()
    for r in tl.static_range(BN // JT):
        own += (load_float(F + r * (4 * JT), GPU) * unfold,)
        totals += (zeros,)
    shares = zeros
    e0, e1, e2, e3 = load_float(E, GPU), load_float(E + 4, GPU), load_float(E + 8, GPU), load_float(E + 12, GPU)
    for i in range(0, BM, 4):
        # Load ahead for the next iteration; the last iteration reads past the block and discards that.
        E += 4 * DP
        next0, next1, next2, next3 = (
            load_float(E, GPU),
            load_float(E + 4, GPU),
            load_float(E + 8, GPU),
            load_float(E + 12, GPU),
        )
        g0, g1, g2, g3 = zeros, zeros, zeros, zeros
        found = ()
        for r in tl.static_range(BN // JT):
            s0, s1, s2, s3 = load_four_from_scratch(scratch, i * BN + thread * 4 + r * (4 * JT), SHARED, GPU)
            total, g0, g1, g2, g3, shares = accumulate_four_terms(
                own[r], e0, e1, e2, e3, s0, s1, s2, s3, totals[r], g0, g1, g2, g3, shares, GPU
            )
            found += (total,)
        totals = found
        atomic_add_floats(into, g0, GPU)
        atomic_add_floats(into + DW, g1, GPU)
        atomic_add_floats(into + 2 * DW, g2, GPU)
        atomic_add_floats(into + 3 * DW, g3, GPU)
        into += 4 * DW
        e0, e1, e2, e3 = next0, next1, next2, next3
    return totals, shares


@triton.jit
def accumulate_four_terms(own, e0, e1, e2, e3, s0, s1, s2, s3, total, g0, g1, g2, g3, shares, GPU: tl.constexpr):
    """Add the terms of four queries to the sums of a key, of the queries and of the weight.

    One operation for the compiler, which takes a multiple of the time for the instructions one by one.
    """
    if GPU:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 a, b, r, u, v;
            fma.rn.f32 a, $6, $7, 0f3F800000;
            fma.rn.f32 b, $6, $8, 0f3F800000;
            mul.f32 r, a, b;
            rcp.approx.ftz.f32 r, r;
            mul.f32 u, b, r;
            mul.f32 v, a, r;
            fma.rn.f32 $5, $11, u, $20;
            fma.rn.f32 $5, $12, v, $5;
            neg.f32 r, u;
            fma.rn.f32 u, r, u, u;
            neg.f32 r, v;
            fma.rn.f32 v, r, v, v;
            fma.rn.f32 $0, $11, u, $15;
            fma.rn.f32 $1, $11, u, $16;
            fma.rn.f32 $0, $12, v, $0;
            fma.rn.f32 $2, $12, v, $17;
            fma.rn.f32 a, $6, $9, 0f3F800000;
            fma.rn.f32 b, $6, $10, 0f3F800000;
            mul.f32 r, a, b;
            rcp.approx.ftz.f32 r, r;
            mul.f32 u, b, r;
            mul.f32 v, a, r;
            fma.rn.f32 $5, $13, u, $5;
            fma.rn.f32 $5, $14, v, $5;
            neg.f32 r, u;
            fma.rn.f32 u, r, u, u;
            neg.f32 r, v;
            fma.rn.f32 v, r, v, v;
            fma.rn.f32 $0, $13, u, $0;
            fma.rn.f32 $3, $13, u, $18;
            fma.rn.f32 $0, $14, v, $0;
            fma.rn.f32 $4, $14, v, $19;
            }""",
            "=&f,=&f,=&f,=&f,=&f,=&f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f",
            [own, e0, e1, e2, e3, s0, s1, s2, s3, total, g0, g1, g2, g3, shares],
            (tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:  # noqa: RET505
        d0 = 1.0 + own * e0
        d1 = 1.0 + own * e1
        inverse = 1.0 / (d0 * d1)
        total, g0, shares = accumulate_term(s0, d1 * inverse, total, g0, shares)
        total, g1, shares = accumulate_term(s1, d0 * inverse, total, g1, shares)
        d2 = 1.0 + own * e2
        d3 = 1.0 + own * e3
        inverse = 1.0 / (d2 * d3)
        total, g2, shares = accumulate_term(s2, d3 * inverse, total, g2, shares)
        total, g3, shares = accumulate_term(s3, d2 * inverse, total, g3, shares)
        return total, g0, g1, g2, g3, shares


@triton.jit
def accumulate_term(s, u, total, gradient, shares):
    """Add one term to the sums of its key, its query and the weight: three fused operations."""
    slope = u - u * u
    return total + s * slope, gradient + s * slope, shares + s * u


@triton.jit
def add_from_vectors(
    k, k_key, j, Tk, q, q_query, first, Tq, there, scratch, thread, into, weight, dk,
    BM: tl.constexpr, BN: tl.constexpr, DW: tl.constexpr, DC: tl.constexpr, JT: tl.constexpr, DT: tl.constexpr,
    SHARED: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """As `sum_from_exponentials`, for values of any size: adds q and k first. Returns Σ_ij ds u.

    It is rarely needed, so it loops over the keys of a thread: unrolled, it took most of the compile time.
    """
    zeros = tl.zeros((DC // DT, JT, DT), tl.float32)
    w = tl.load(weight, mask=there, other=0.0).to(tl.float32)
    shares = zeros
    for r in range(BN // JT):
        keys = j + r * JT
        own = tl.load(k + keys.to(tl.int64) * k_key, mask=(keys < Tk) & there, other=0.0).to(tl.float32)
        total = zeros
        for i in range(BM):
            row = first + i
            a = tl.load(q + tl.cast(row, tl.int64) * q_query, mask=(row < Tq) & there, other=0.0).to(tl.float32)
            s = load_from_scratch(scratch, (i // 4) * (4 * BN) + i % 4 + thread * 4 + r * (4 * JT), SHARED, GPU)
            u = reciprocal(1.0 + tl.exp2((own + a) * TWO_LOG2_E), GPU)
            total, gradient, shares = accumulate_term(s, u, total, zeros, shares)
            tl.atomic_add(into + i * DW, gradient, sem="relaxed")
        tl.atomic_add(dk + r * JT * DW, w * total, sem="relaxed")
    return shares


@triton.jit
def add_tile_gradients(
    k, k_key, first_key, Tk, q, q_query, first, Tq, D, E, F, table, scratch, near, weight, sum_ds, dq, dk, dw,
    BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, DW: tl.constexpr, DC: tl.constexpr,
    JT: tl.constexpr, DT: tl.constexpr, SHARED: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Add the contribution of one tile; dq without its factor 4 w, dk without its factor 4.

    The threads are JT keys by DT features; a thread has BN / JT keys and DC / DT features.
    """
    thread = tl.arange(0, JT)[None, :, None]
    for start in range(0, DW, DC):
        d = start + tl.arange(0, DC // DT)[:, None, None] * DT + tl.arange(0, DT)[None, None, :]
        into = dq + d + thread * 0
        # Each branch writes its own results: values that a condition returns would change their thread layout.
        key_gradients = dk + thread * DW + d
        if near:
            totals, shares = sum_from_exponentials(
                E, F, table, scratch, into, d, thread, BM, BN, DP, DW, DC, JT, DT, SHARED, GPU
            )
            w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
            for r in tl.static_range(BN // JT):
                atomic_add_floats(key_gradients + r * JT * DW, w * totals[r], GPU)
            add_weight_gradients(shares, sum_ds, dw, d, D)
        else:
            shares = add_from_vectors(
                k + d, k_key, first_key + thread, Tk, q + d, q_query, first, Tq, d < D, scratch, thread, into,
                weight + d, key_gradients, BM, BN, DW, DC, JT, DT, SHARED, GPU,
            )  # fmt: skip
            add_weight_gradients(shares, sum_ds, dw, d, D)


@triton.jit
def add_weight_gradients(shares, sum_ds, dw, d, D):
    """Add Σ ds (1 - 2 u) to the gradient of the weight; shares is Σ ds u of each thread."""
    # (DR, JT, DT) -> (DR, 1, DT)
    found = sum_ds - 2.0 * tl.sum(shares, 1, keep_dims=True)
    tl.store(dw + d, tl.load(dw + d, mask=d < D, other=0.0) + found, mask=d < D)


@triton.jit
def add_value_gradients(
    p, d_out, first, Tq, dv, first_key, Tk, Dv,
    BM: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, VC: tl.constexpr, PRECISION: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Add pᵀ d_out of a tile, VC features per iteration. Keeping the sum over all tiles takes too many registers."""
    i = first + tl.arange(0, BM)
    j = first_key + tl.arange(0, BN)
    for start in tl.static_range(0, BV, VC):
        d = start + tl.arange(0, VC)
        here = (i < Tq)[:, None] & (d < Dv)[None, :]
        d_rows = tl.load(d_out + i.to(tl.int64)[:, None] * Dv + d[None, :], mask=here, other=0.0)
        found = dot_add(tl.trans(p), d_rows, tl.zeros((BN, VC), tl.float32), PRECISION, GPU)
        there = (j < Tk)[:, None] & (d < Dv)[None, :]
        tl.atomic_add(dv + j.to(tl.int64)[:, None] * Dv + d[None, :], found, mask=there, sem="relaxed")


@triton.jit(do_not_specialize=ADDITIVE_LENGTHS)
def additive_one_pass_backward(
    E, F, table, sizes, constants, q_max, k_max, q_magnitude, k_magnitude,
    q, k, v, weight, key_ranges, query_ids, key_ids, dense, seed,
    lse, d_out, delta, dq, dk, dv, dw, scratch,
    H, group, Tq, Tk, D, Dv, pairs, items, programs, splits,
    q_batch, q_head, q_query, k_batch, k_head, k_key, v_batch, v_head, v_key, weight_head, headed,
    key_ranges_batch, query_ids_batch, key_ids_batch, dense_batch, dense_head, dense_query, dense_key,
    threshold, keep_scale,
    CAUSAL: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr, DROPOUT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, MT: tl.constexpr, NT: tl.constexpr, BV: tl.constexpr, VC: tl.constexpr,
    DP: tl.constexpr, BD: tl.constexpr, DW: tl.constexpr, DC: tl.constexpr, JT: tl.constexpr, DT: tl.constexpr,
    CHUNK: tl.constexpr, MAX_SHARED: tl.constexpr, SHARED: tl.constexpr, GPU: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Each program takes blocks of keys, and loops over the queries of the heads that share them, or a split of those.

    dq (B H, blocks BM, DW), dk (B G, blocks BN, DW), dv (B, G, Tk, Dv) float32, initialized to 0; dq lacks its factor
    4 w, dk its factor 4. dw (programs, weights, D) float32: each program adds to its own. scratch is (programs, BM BN)
    unless SHARED memory is used.
    """
    blocks = tl.cdiv(Tq, BM)
    k_blocks = tl.cdiv(Tk, BN)
    k_heads = H // group
    offset = Tk - Tq
    ds_scratch = allocate_scratch(scratch, BM * BN, SHARED)
    own_weights = (headed * (H - 1) + 1) * D
    dw += tl.program_id(0).to(tl.int64) * own_weights
    for first_weight in range(0, own_weights, 128):
        c = first_weight + tl.arange(0, 128)
        tl.store(dw + c, tl.zeros((128,), tl.float32), mask=c < own_weights)
    tl.debug_barrier()
    for item in range(tl.program_id(0), items, programs):
        k_pair = (item % (pairs // group)).to(tl.int64)
        t = item // (pairs // group) // splits
        split = item // (pairs // group) % splits
        b = k_pair // k_heads
        g = k_pair % k_heads
        k_block = k_pair * k_blocks + t
        own_max = load_per_feature(k_max, k_block, DP, BD)
        own_far = tl.load(k_magnitude + k_block) > MAX_EXPONENT
        j = t * BN + tile_columns(BN, NT)
        start = 0
        if CAUSAL:
            start = tl.minimum(tl.maximum(t * BN - offset, 0) // BM, blocks)
        iterations = group * (blocks - start)
        for iteration in range(iterations * split // splits, iterations * (split + 1) // splits):
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
                    as_int64_pointer(E + q_block * (BM * DP)), as_int64_pointer(F + k_block * (BN * DP)),
                    as_int64_pointer(table + h * headed * DP),
                    tl.load(constants + h * headed * 2), tl.load(constants + h * headed * 2 + 1),
                    q_block_max, own_max, load_per_feature(sizes, h * headed, DP, BD), far,
                    q + b * q_batch + h * q_head, q_query, i, Tq, k + b * k_batch + g * k_head, k_key, j, Tk,
                    weight + h * weight_head, D, BM, BN, MT, NT, DP, BD, CHUNK, MAX_SHARED, 4, GPU,
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
                ds = p * (dp - tl.load(delta + pair * Tq + i, mask=i < Tq, other=0.0))
                ii = tile_rows(BM, MT)
                store_to_scratch(ds_scratch, (ii // 4) * (4 * BN) + tile_columns(BN, NT) * 4 + ii % 4, ds, SHARED)
                add_value_gradients(
                    tile_to_matrix(dropped.to(d_out.dtype.element_ty), BM, BN), d_out + pair * Tq * Dv, block * BM, Tq,
                    dv + k_pair * Tk * Dv, t * BN, Tk, Dv, BM, BN, BV, VC, PRECISION, GPU,
                )  # fmt: skip
                sum_ds = sum_tile(ds)[None]
                # Wait for what other threads wrote.
                tl.debug_barrier()
                add_tile_gradients(
                    k + b * k_batch + g * k_head, k_key, t * BN, Tk, q + b * q_batch + h * q_head, q_query, block * BM,
                    Tq, D, E + q_block * (BM * DP), F + k_block * (BN * DP), table + h * headed * DP, ds_scratch,
                    (far == 0) & (tl.max(own_max + q_block_max, 0) < MAX_PAIR_EXPONENT), weight + h * weight_head,
                    sum_ds, dq + q_block * (BM * DW), dk + k_block * (BN * DW), dw + h * headed * D,
                    BM, BN, DP, DW, DC, JT, DT, SHARED, GPU,
                )  # fmt: skip
                # The next iteration overwrites the scratch memory.
                tl.debug_barrier()

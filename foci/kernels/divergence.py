"""The divergence of two attention matrices, and its gradient for the student, without building either.

KL(teacher || student) of a query is Σ p (log p - s + lse), with p the teacher's weights, s the student's logits and lse
their log-sum-exp. Its gradient for the logits is softmax(s) - p. The teacher's weights may be the mean of all heads.
`row_lse` prepares both sides, and both passes compute each tile again: `row_divergence`, a program per block of
queries, which also gives the gradient of the queries for a slope of 1; and `key_gradients`, a program per block of
keys. All are sums over tiles, so that several programs may share a block and write a part each.

B batch, H teacher heads, P student heads, Tq queries, Tk keys, D width of the teacher, E width of the student.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.logits import LN_2, MASKED_LOGIT, apply_masks, dot_logits, key_range, load_lse

# Numbers that no kernel is compiled for.
LENGTHS = ["H", "P", "group", "student_group", "Tq", "Tk", "tiles"]


@triton.jit
def load_block(x, first, row_stride, width, rows, BR: tl.constexpr, BW: tl.constexpr):
    """Rows first to first + BR of x; 0 past the last row and past the width."""
    r, w = first + tl.arange(0, BR)[:, None], tl.arange(0, BW)[None, :]
    return tl.load(x + r.to(tl.int64) * row_stride + w, mask=(r < rows) & (w < width), other=0.0)


@triton.jit
def locate_block(blocks):
    """The pair and the block of a program, both in the grid's first dimension: others have 65,535 programs at most."""
    return (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks


@triton.jit
def seen_keys(
    key_ranges, query_ids, key_ids, i, j, Tq, Tk,
    CAUSAL: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """Which keys j, a row, each query i, a column, can see."""
    low, high = key_range(key_ranges, 0, i, Tk - Tq, Tq, Tk, CAUSAL, RANGES)
    seen = (j >= low) & (j < high)
    if RANGES > 1:
        low, high = key_range(key_ranges, 1, i, Tk - Tq, Tq, Tk, CAUSAL, RANGES)
        seen |= (j >= low) & (j < high)
    return apply_masks(seen, i, j, query_ids, key_ids, query_ids, 0, 0, Tq, Tk, IDS, False)


@triton.jit
def key_tiles(key_ranges, i, Tq, Tk, CAUSAL: tl.constexpr, RANGES: tl.constexpr, BN: tl.constexpr):
    """The key tiles that some of the queries i see: first, and last + 1."""
    low, high = key_range(key_ranges, 0, i, Tk - Tq, Tq, Tk, CAUSAL, RANGES)
    least, most = tl.min(tl.where(high > low, low, Tk), 0), tl.max(tl.where(high > low, high, 0), 0)
    if RANGES > 1:
        low, high = key_range(key_ranges, 1, i, Tk - Tq, Tq, Tk, CAUSAL, RANGES)
        least = tl.minimum(least, tl.min(tl.where(high > low, low, Tk), 0))
        most = tl.maximum(most, tl.max(tl.where(high > low, high, 0), 0))
    return least // BN, tl.maximum(tl.cdiv(most, BN), least // BN)


@triton.jit
def mean_weights(
    q, k, lse, first_i, first_j, h, heads, group, Tq, Tk, D, q_head, q_query, k_head, k_key, scale, softcap,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The mean weights of a tile over `heads` heads from h on; masks are not applied. (BM, BN)"""
    i = first_i + tl.arange(0, BM)
    total = tl.zeros((BM, BN), tl.float32)
    for index in range(h, h + heads):
        head = tl.cast(index, tl.int64)
        queries = load_block(q + head * q_head, first_i, q_query, D, Tq, BM, BD)
        keys = load_block(k + head // group * k_head, first_j, k_key, D, Tk, BN, BD)
        dots = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        logits = dot_logits(dots, scale, softcap, SOFTCAP)
        rows = load_lse(lse + head * Tq, i, Tq)
        total += tl.exp2(logits - rows[:, None])
    return total / heads


@triton.jit(do_not_specialize=LENGTHS)
def row_lse(
    q, k, lse, key_ranges, query_ids, key_ids, H, group, Tq, Tk, D,
    q_batch, q_head, q_query, k_batch, k_head, k_key,
    key_ranges_batch, query_ids_batch, key_ids_batch, scale, softcap,
    SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """lse (B, H, Tq), the natural log-sum-exp of the teacher's logits; -inf for fully masked rows."""
    pair, block = locate_block(tl.cdiv(Tq, BM))
    b, h = pair // H, pair % H
    first_i = (tl.cdiv(Tq, BM) - 1 - block) * BM
    i = first_i + tl.arange(0, BM)
    q += b * q_batch + h * q_head
    k += b * k_batch + h // group * k_head
    key_ranges += b * key_ranges_batch
    query_ids += b * query_ids_batch
    key_ids += b * key_ids_batch
    queries = load_block(q, first_i, q_query, D, Tq, BM, BD)
    peak, total = tl.zeros((BM,), tl.float32) + MASKED_LOGIT, tl.zeros((BM,), tl.float32)
    first, last = key_tiles(key_ranges, i, Tq, Tk, CAUSAL, RANGES, BN)
    for t in range(first, last):
        j = t * BN + tl.arange(0, BN)
        seen = seen_keys(
            key_ranges, query_ids, key_ids, i[:, None], j[None, :], Tq, Tk,
            CAUSAL, RANGES, IDS,
        )  # fmt: skip
        keys = load_block(k, t * BN, k_key, D, Tk, BN, BD)
        dots = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        logits = dot_logits(dots, scale, softcap, SOFTCAP)
        logits = tl.where(seen, logits, MASKED_LOGIT)
        highest = tl.maximum(peak, tl.max(logits, 1))
        weights = tl.where(seen, tl.exp2(logits - highest[:, None]), 0.0)
        total = total * tl.exp2(peak - highest) + tl.sum(weights, 1)
        peak = highest
    found = tl.where(total == 0, -float("inf"), (peak + tl.log2(tl.where(total == 0, 1.0, total))) * LN_2)
    tl.store(lse + pair * Tq + i, found, mask=i < Tq)


@triton.jit(do_not_specialize=LENGTHS)
def row_divergence(
    q, k, lse, student_q, student_k, student_lse, divergence, d_q, key_ranges, query_ids, key_ids,
    H, P, group, student_group, Tq, Tk, D, E, tiles,
    q_batch, q_head, q_query, k_batch, k_head, k_key,
    student_q_batch, student_q_head, student_q_query, student_k_batch, student_k_head, student_k_key,
    key_ranges_batch, query_ids_batch, key_ids_batch,
    scale, softcap, student_scale, student_softcap,
    MEAN: tl.constexpr, GRADIENT: tl.constexpr, SOFTCAP: tl.constexpr, STUDENT_SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """divergence (parts, B, P, Tq), and d_q (parts, B, P, Tq, E) for a slope of 1 of each query.

    A part is a number of tiles of keys.
    """
    blocks, part = tl.cdiv(Tq, BM), tl.program_id(1)
    pair, block = locate_block(blocks)
    b, p = pair // P, pair % P
    # The last queries see the most keys: they start first.
    first_i = (blocks - 1 - block) * BM
    i, d = first_i + tl.arange(0, BM), tl.arange(0, BE)
    q += b * q_batch
    k += b * k_batch
    lse += b * H * Tq
    student_q += b * student_q_batch + p * student_q_head
    student_k += b * student_k_batch + p // student_group * student_k_head
    key_ranges += b * key_ranges_batch
    query_ids += b * query_ids_batch
    key_ids += b * key_ids_batch
    h = 0 * P if MEAN else p.to(tl.int32)
    heads = H if MEAN else 1
    queries = load_block(student_q, first_i, student_q_query, E, Tq, BM, BE)
    rows = load_lse(student_lse + pair * Tq, i, Tq)
    total, gradient = tl.zeros((BM,), tl.float32), tl.zeros((BM, BE), tl.float32)
    first, last = key_tiles(key_ranges, i, Tq, Tk, CAUSAL, RANGES, BN)
    for t in range(tl.maximum(first, part * tiles), tl.minimum(last, (part + 1) * tiles)):
        first_j = t * BN
        j = first_j + tl.arange(0, BN)
        seen = seen_keys(
            key_ranges, query_ids, key_ids, i[:, None], j[None, :], Tq, Tk,
            CAUSAL, RANGES, IDS,
        )  # fmt: skip
        weights = mean_weights(
            q, k, lse, first_i, first_j, h, heads, group, Tq, Tk, D, q_head, q_query, k_head, k_key, scale, softcap,
            SOFTCAP, PRECISION, BM, BN, BD,
        )  # fmt: skip
        weights = tl.where(seen, weights, 0.0)
        keys = load_block(student_k, first_j, student_k_key, E, Tk, BN, BE)
        dots = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        logits = dot_logits(dots, student_scale, student_softcap, STUDENT_SOFTCAP)
        distance = logits - rows[:, None]
        # Not where(weights > 0, ...): a NaN must stay one.
        unattended = weights == 0
        total += tl.sum(
            tl.where(unattended, 0.0, weights * (tl.log2(tl.where(unattended, 1.0, weights)) - distance)), 1
        )
        if GRADIENT:
            change = tl.where(seen, tl.exp2(distance) - weights, 0.0)
            if STUDENT_SOFTCAP:
                change = tl.where(seen, change * capped_slope(logits, student_softcap), 0.0)
            gradient = tl.dot(change.to(keys.dtype), keys, gradient, input_precision=PRECISION)
    into = (part * (tl.num_programs(0) // blocks) + pair) * Tq + i
    tl.store(divergence + into, total * LN_2, mask=i < Tq)
    if GRADIENT:
        mask = (i < Tq)[:, None] & (d < E)[None, :]
        tl.store(d_q + into[:, None] * E + d[None, :], gradient * student_scale, mask=mask)


@triton.jit
def capped_slope(logits, softcap):
    """The slope of the soft cap at capped logits in base 2; 0 for masked ones."""
    tanh = tl.maximum(logits * LN_2 / softcap, -1.0)
    return 1 - tanh * tanh


@triton.jit(do_not_specialize=LENGTHS)
def key_gradients(
    q, k, lse, student_q, student_k, student_lse, slopes, d_k, key_ranges, query_ids, key_ids,
    H, P, group, student_group, Tq, Tk, D, E, tiles,
    q_batch, q_head, q_query, k_batch, k_head, k_key,
    student_q_batch, student_q_head, student_q_query, student_k_batch, student_k_head, student_k_key,
    key_ranges_batch, query_ids_batch, key_ids_batch,
    scale, softcap, student_scale, student_softcap,
    MEAN: tl.constexpr, SOFTCAP: tl.constexpr, STUDENT_SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """d_k (parts, B, P, Tk, E), float32, for the slopes (B, P, Tq) of the queries' divergence.

    A part is a number of tiles of queries.
    """
    blocks, part = tl.cdiv(Tk, BN), tl.program_id(1)
    pair, block = locate_block(blocks)
    b, p = pair // P, pair % P
    first_j = block * BN
    j, d = first_j + tl.arange(0, BN), tl.arange(0, BE)
    q += b * q_batch
    k += b * k_batch
    lse += b * H * Tq
    student_q += b * student_q_batch + p * student_q_head
    student_k += b * student_k_batch + p // student_group * student_k_head
    key_ranges += b * key_ranges_batch
    query_ids += b * query_ids_batch
    key_ids += b * key_ids_batch
    h = 0 * P if MEAN else p.to(tl.int32)
    heads = H if MEAN else 1
    keys = load_block(student_k, first_j, student_k_key, E, Tk, BN, BE)
    gradient = tl.zeros((BN, BE), tl.float32)
    start = 0 * Tq
    if CAUSAL:
        start = tl.minimum(tl.maximum(first_j - (Tk - Tq), 0), Tq) // BM
    for t in range(tl.maximum(start, part * tiles), tl.minimum(tl.cdiv(Tq, BM), (part + 1) * tiles)):
        first_i = t * BM
        i = first_i + tl.arange(0, BM)
        visible = True
        if RANGES > 0:
            first, last = key_tiles(key_ranges, i, Tq, Tk, CAUSAL, RANGES, BN)
            visible = (first_j // BN >= first) & (first_j // BN < last)
        if visible:
            seen = seen_keys(
                key_ranges, query_ids, key_ids, i[:, None], j[None, :], Tq, Tk,
                CAUSAL, RANGES, IDS,
            )  # fmt: skip
            weights = mean_weights(
                q, k, lse, first_i, first_j, h, heads, group, Tq, Tk, D, q_head, q_query, k_head, k_key, scale,
                softcap, SOFTCAP, PRECISION, BM, BN, BD,
            )  # fmt: skip
            queries = load_block(student_q, first_i, student_q_query, E, Tq, BM, BE)
            dots = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            logits = dot_logits(dots, student_scale, student_softcap, STUDENT_SOFTCAP)
            rows = load_lse(student_lse + pair * Tq, i, Tq)
            slope = tl.load(slopes + pair * Tq + i, mask=i < Tq, other=0.0)
            change = tl.where(seen, (tl.exp2(logits - rows[:, None]) - weights) * slope[:, None], 0.0)
            if STUDENT_SOFTCAP:
                change = tl.where(seen, change * capped_slope(logits, student_softcap), 0.0)
            gradient = tl.dot(tl.trans(change.to(queries.dtype)), queries, gradient, input_precision=PRECISION)
    into = d_k + ((part * (tl.num_programs(0) // blocks) + pair) * Tk + j)[:, None] * E + d[None, :]
    tl.store(into, gradient * student_scale, mask=(j < Tk)[:, None] & (d < E)[None, :])

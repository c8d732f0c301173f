"""All statistics of a short sequence in one launch: a program holds whole rows of the weights W = exp2(logit - lse).

For such sequences the time is that of the launches from Python. Nothing is cut into parts that have to be merged.

B batch, H heads, Tq queries, Tk keys, D width. A pair is one head of one batch element.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.additive.forward import sum_tanh_directly
from foci.kernels.logits import LN_2, MASKED_LOGIT, apply_masks, key_range, load_lse
from foci.kernels.statistics.biased_logits import entry_logits, locate_bias

# Larger than any key, for minima over keys.
NO_KEY = tl.constexpr(2147483647)
# A new value of one of these does not trigger a compilation.
LENGTHS = [
    "H", "group", "Tq", "Tk", "key_ranges_batch", "query_ids_batch", "key_ids_batch", "dense_batch", "dense_head",
    "dense_query", "dense_key", "bias_batch", "bias_head", "bias_query", "clip",
    "weight_head",
]  # fmt: skip


@triton.jit
def store_top_keys(x, j, rows, values, keys, inside, TOP: tl.constexpr):
    """Store the TOP largest of x (R, BK) in order, ties by key; keys j (1, BK), one pointer per row.

    Queries with a NaN log-sum-exp get NaN weights and the key -1.
    """
    is_nan = rows != rows
    for n in range(TOP):
        best = tl.max(x, 1)
        real = best > MASKED_LOGIT / 2
        key = tl.min(tl.where(x == best[:, None], j, NO_KEY), 1)
        weight = tl.where(is_nan, rows, tl.where(real, tl.exp2(best), 0.0))
        tl.store(values + n, weight, mask=inside)
        tl.store(keys + n, tl.where(real & ~is_nan, key, -1), mask=inside)
        x = tl.where(j == key[:, None], MASKED_LOGIT, x)


@triton.jit(do_not_specialize=LENGTHS)
def short_statistics(
    q, k, lse, key_ranges, query_ids, key_ids, dense, slopes, bias, weight,
    entropy, distance, received, picture, top_values, top_keys, largest_logit,
    H, group, Tq, Tk, D,
    q_batch, q_head, q_query, k_batch, k_head, k_key, key_ranges_batch, query_ids_batch, key_ids_batch,
    dense_batch, dense_head, dense_query, dense_key,
    bias_batch, bias_head, bias_query, clip, weight_head, scale, softcap,
    CAUSAL: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr,
    TABLE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, ADDITIVE: tl.constexpr, PTX: tl.constexpr,
    ENTROPY: tl.constexpr, DISTANCE: tl.constexpr, RECEIVED: tl.constexpr, PICTURE: tl.constexpr,
    TOP: tl.constexpr, LARGEST: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per pair, which sees all of its keys at once. picture is (pairs, Tq, Tk): one cell per weight."""
    pair = tl.program_id(0)
    b = (pair // H).to(tl.int64)
    h = pair % H
    offset = Tk - Tq
    q += b * q_batch + h.to(tl.int64) * q_head
    k += b * k_batch + (h // group).to(tl.int64) * k_head
    first_row = pair.to(tl.int64) * Tq
    bias = locate_bias(bias, b, h, 0, bias_batch, bias_head, bias_query)
    weight += h.to(tl.int64) * weight_head
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + h)
    d = tl.arange(0, BD)
    columns = tl.arange(0, BK)
    j = columns[None, :]
    if not ADDITIVE:
        keys = tl.load(
            k + columns.to(tl.int64)[:, None] * k_key + d[None, :],
            mask=(columns < Tk)[:, None] & (d < D)[None, :],
            other=0.0,
        )
    total = tl.zeros((BK,), tl.float32)
    highest = tl.full((BQ,), -float("inf"), tl.float32)
    for start in range(0, Tq, BQ):
        one = start + tl.arange(0, BQ)
        i = one[:, None]
        inside = one < Tq
        if ADDITIVE:
            z = sum_tanh_directly(q, q_query, i, Tq, k, k_key, j, Tk, weight, D, PTX)
        else:
            queries = tl.load(
                q + one.to(tl.int64)[:, None] * q_query + d[None, :],
                mask=inside[:, None] & (d < D)[None, :],
                other=0.0,
            )
            dots = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)  # (BQ, BK)
            z = entry_logits(
                dots, bias, i, j, offset, Tq, clip, bias_query, slope, scale, softcap, TABLE, SOFTCAP, ALIBI
            )
        seen = j < 0
        for run in tl.static_range(RANGES if RANGES > 0 else 1):
            low, high = key_range(key_ranges + b * key_ranges_batch, run, one, offset, Tq, Tk, CAUSAL, RANGES)
            seen |= (j >= low[:, None]) & (j < high[:, None])
        seen = apply_masks(
            seen, i, j, query_ids + b * query_ids_batch, key_ids + b * key_ids_batch,
            dense + b * dense_batch + h.to(tl.int64) * dense_head, dense_query, dense_key, Tq, Tk, IDS, DENSE,
        )  # fmt: skip
        rows = load_lse(lse + first_row, one, Tq)
        x = tl.where(seen, z - rows[:, None], MASKED_LOGIT)
        at = first_row + one
        if LARGEST:
            highest = tl.maximum(highest, tl.max(tl.where(seen, z, -float("inf")), 1))
        if ENTROPY or DISTANCE or RECEIVED or PICTURE:
            p = tl.exp2(x)
            if ENTROPY:
                tl.store(entropy + at, 0.0 - tl.sum(p * x, 1) * LN_2, mask=inside)
            if DISTANCE:
                far = tl.abs((one + offset).to(tl.float32)[:, None] - j.to(tl.float32))
                tl.store(distance + at, tl.sum(p * far, 1), mask=inside)
            if RECEIVED:
                total += tl.sum(p, 0)
            if PICTURE:
                tl.store(picture + at[:, None] * Tk + j, p, mask=inside[:, None] & (j < Tk))
        if TOP > 0:
            store_top_keys(x, j, rows, top_values + at * TOP, top_keys + at * TOP, inside, TOP)
    if RECEIVED:
        tl.store(received + pair.to(tl.int64) * Tk + columns, total, mask=columns < Tk)
    if LARGEST:
        tl.store(largest_logit + pair, tl.max(highest, 0) * LN_2)

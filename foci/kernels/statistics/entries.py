"""Exact entries of the weights W = exp2(logit - lse) for a few queries: every step-th key from a first one on.

B batch, H heads, Tq queries, Tk keys, D width, R rows and C columns of the result.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.logits import apply_masks, key_range, load_lse
from foci.kernels.statistics.biased_logits import entry_logits

# Nothing but the kind of call is compiled in: one kernel for all lengths, layouts and indices.
NUMBERS = [
    "group", "Tq", "Tk", "D", "q_batch", "q_head", "q_query", "k_batch", "k_head", "k_key", "lse_batch", "lse_head",
    "key_ranges_batch", "query_ids_batch", "key_ids_batch", "dense_batch", "dense_head", "dense_query", "dense_key",
    "first_batch", "first_head", "heads", "first_query", "query_step", "first_key", "key_step", "R", "C",
]  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS)
def compute_entries(
    q, k, lse, key_ranges, query_ids, key_ids, dense, slopes, out,
    group, Tq, Tk, D,
    q_batch, q_head, q_query, k_batch, k_head, k_key, lse_batch, lse_head,
    key_ranges_batch, query_ids_batch, key_ids_batch, dense_batch, dense_head, dense_query, dense_key,
    scale, softcap,
    first_batch, first_head, heads, first_query, query_step, first_key, key_step, R, C,
    CAUSAL: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One program per row and block of BC columns; out is (sequences, heads, R, C)."""
    row = tl.program_id(0)
    pair = row // R
    b = (first_batch + pair // heads).to(tl.int64)
    h = first_head + pair % heads
    one = first_query + (row % R) * query_step + tl.zeros((1,), tl.int32)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    j = first_key + c * key_step
    offset = Tk - Tq
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + h)
    query = q + b * q_batch + h.to(tl.int64) * q_head + one.to(tl.int64)[:, None] * q_query
    keys = k + b * k_batch + (h // group).to(tl.int64) * k_head + j.to(tl.int64)[:, None] * k_key
    dots = tl.zeros((BC,), tl.float32)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)[None, :]
        x = tl.load(query + d, mask=d < D, other=0.0).to(tl.float32)
        y = tl.load(keys + d, mask=(c < C)[:, None] & (d < D), other=0.0).to(tl.float32)
        dots += tl.sum(x * y, 1)
    i = one[:, None]
    j = j[None, :]
    z = entry_logits(dots[None, :], lse, i, j, offset, Tq, 0, 0, slope, scale, softcap, 0, SOFTCAP, ALIBI)
    seen = j < 0
    for run in tl.static_range(RANGES if RANGES > 0 else 1):
        low, high = key_range(key_ranges + b * key_ranges_batch, run, one, offset, Tq, Tk, CAUSAL, RANGES)
        seen |= (j >= low[:, None]) & (j < high[:, None])
    seen = apply_masks(
        seen, i, j, query_ids + b * query_ids_batch, key_ids + b * key_ids_batch,
        dense + b * dense_batch + h.to(tl.int64) * dense_head, dense_query, dense_key, Tq, Tk, IDS, DENSE,
    )  # fmt: skip
    rows = load_lse(lse + b * lse_batch + h.to(tl.int64) * lse_head, one, Tq)[:, None]
    weights = tl.where(seen, tl.exp2(z - rows), 0.0)
    # A NaN in the query makes its whole row NaN.
    weights = tl.where(rows == rows, weights, rows)
    tl.store(out + row.to(tl.int64) * C + c[None, :], weights, mask=(c < C)[None, :])

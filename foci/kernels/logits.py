"""Device functions that all dot-product kernels share: logits, log-sum-exps, and visible keys.

Logits and log-sum-exps are in base 2, as is the exponential of the hardware: a weight is exp2(logit - lse).
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

# The logit of a masked entry. Finite, so that weight * log2(weight) is -0 and not NaN; far below any real logit.
MASKED_LOGIT = tl.constexpr(-1e30)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(y):
    """Exact to a few units in the last place; a polynomial near 0, where 1 - 2 / (1 + e^2y) cancels."""
    square = y * y
    near = y * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    far = 1 - 2 / (1 + tl.exp2(y * (2 * LOG2_E)))
    return tl.where(square < 0.0225, near, far)


@triton.jit
def dot_logits(dots, scale, softcap, SOFTCAP: tl.constexpr):
    """Logits in base 2: softcap(scale * dots)."""
    if SOFTCAP:
        z = tanh(dots * (scale / softcap)) * (softcap * LOG2_E)
    else:
        z = dots * (scale * LOG2_E)
    return z


@triton.jit
def load_lse(lse, i, Tq):
    """Load log-sum-exps in base 2. Fully masked rows, and rows past the end, get a value that makes all weights 0."""
    rows = tl.load(lse + i, mask=i < Tq, other=-float("inf"))
    return tl.where(rows == -float("inf"), -MASKED_LOGIT, rows * LOG2_E)


@triton.jit
def key_range(key_ranges, s: tl.constexpr, i, offset, Tq, Tk, CAUSAL: tl.constexpr, RANGES: tl.constexpr):
    """The visible keys of queries i in range s, from low to high; none for queries past the end."""
    inside = i < Tq
    if RANGES > 0:
        low = tl.maximum(tl.load(key_ranges + 2 * s * Tq + i, mask=inside, other=0), 0)
        high = tl.minimum(tl.load(key_ranges + (2 * s + 1) * Tq + i, mask=inside, other=0), Tk)
    elif CAUSAL:
        low = tl.zeros_like(i)
        high = tl.where(inside, tl.minimum(tl.maximum(i + offset + 1, 0), Tk), 0)
    else:
        low = tl.zeros_like(i)
        high = tl.where(inside, Tk, 0)
    return low, high


@triton.jit
def tile_bounds(low, high, inside, Tk, BK: tl.constexpr, ALWAYS: tl.constexpr):
    """The key tiles that some query sees, first to last, and those that all queries see completely, full to end."""
    some = high > low
    least = tl.min(tl.where(some, low, Tk), 0)
    most = tl.max(tl.where(some, high, 0), 0)
    first = least // BK
    last = tl.maximum(tl.cdiv(most, BK), first)
    if ALWAYS:
        return first, last, last, last
    full = tl.cdiv(tl.max(tl.where(inside, low, 0), 0), BK)
    end = tl.min(tl.where(inside, high, Tk), 0) // BK
    full = tl.minimum(tl.maximum(full, first), last)
    return first, last, full, tl.minimum(tl.maximum(end, full), last)


@triton.jit
def apply_masks(
    seen, i, j, query_ids, key_ids, dense, dense_query, dense_key, Tq, Tk, IDS: tl.constexpr, DENSE: tl.constexpr
):
    """Apply document ids and the dense mask to the visibility of the entries (i, j)."""
    if IDS:
        seen &= tl.load(query_ids + i, mask=i < Tq, other=0) == tl.load(key_ids + j, mask=j < Tk, other=0)
    if DENSE:
        offsets = i.to(tl.int64) * dense_query + j.to(tl.int64) * dense_key
        seen &= tl.load(dense + offsets, mask=seen, other=0) != 0
    return seen

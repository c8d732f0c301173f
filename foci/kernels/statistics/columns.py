"""Some columns of the weights, of calls without masks: each program computes the softmax of its rows over all keys.

B batch, H heads, Tq queries, Tk keys, D width, C columns of the result.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.logits import LOG2_E

# A new value of one of these does not trigger a compilation. One of a stride may: aligned rows are loaded faster.
LENGTHS = ["heads", "Tq", "Tk", "D", "first_batch", "first_key", "C"]


@triton.jit
def load_rows(base, stride, r, count, d, D):
    """Rows r of a matrix (count, D); zeros outside."""
    pointers = base + r.to(tl.int64)[:, None] * stride + d[None, :]
    return tl.load(pointers, mask=(r < count)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit(do_not_specialize=LENGTHS)
def compute_columns(
    q, k, out,
    heads, Tq, Tk, D, first_batch, first_key, C, scale, q_batch, q_head, q_query, k_batch, k_head, k_key,
    BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per sequence, head and block of BM queries; out is (sequences, heads, Tq, C), from first_key on."""
    tiles = tl.cdiv(Tq, BM)
    pair = tl.program_id(0) // tiles
    b, h = (first_batch + pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    i = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    queries = load_rows(q + b * q_batch + h * q_head, q_query, i, Tq, d, D)
    keys = k + b * k_batch + h * k_head
    peaks, sums = tl.full((BM,), -float("inf"), tl.float32), tl.zeros((BM,), tl.float32)
    for start in range(0, Tk, BN):
        j = start + tl.arange(0, BN)
        dots = tl.dot(queries, tl.trans(load_rows(keys, k_key, j, Tk, d, D)), input_precision=PRECISION)
        z = tl.where((j < Tk)[None, :], dots * (scale * LOG2_E), -float("inf"))
        higher = tl.maximum(peaks, tl.max(z, 1))
        sums = sums * tl.exp2(peaks - higher) + tl.sum(tl.exp2(z - higher[:, None]), 1)
        peaks = higher
    rows = out + (pair.to(tl.int64) * Tq + i)[:, None] * C
    for start in range(0, C, BC):
        c = start + tl.arange(0, BC)
        dots = tl.dot(queries, tl.trans(load_rows(keys, k_key, first_key + c, Tk, d, D)), input_precision=PRECISION)
        weights = tl.exp2(dots * (scale * LOG2_E) - peaks[:, None]) / sums[:, None]
        tl.store(rows + c[None, :], weights, mask=(i < Tq)[:, None] & (c < C)[None, :])

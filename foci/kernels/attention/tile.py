"""What forward and backward do with one tile: load rows, compute logits, apply masks.

Logits and log-sum-exps are in base 2. B batch, H heads, Tq queries, Tk keys, D width, Dv value width.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.distance_bias.forward import distance_bias_logits
from foci.kernels.logits import apply_masks

# A new value of one of these does not trigger a compilation: lengths, counts, and strides that follow from lengths.
LENGTHS = [
    "H", "group", "Tq", "Tk", "first_b", "first_h", "out_split", "peaks_split", "peaks_batch", "peaks_head",
    "split_tiles", "key_ranges_batch", "query_ids_batch", "key_ids_batch", "dense_batch", "dense_head", "dense_query",
    "dense_key", "threshold", "query_tiles_batch",
]  # fmt: skip


@triton.jit
def load_tile(base, row_stride, first, r, count, c, width, EVEN: tl.constexpr, BOUNDED: tl.constexpr):
    """Rows first + r of a matrix (count, width); zeros outside. Without BOUNDED all rows must lie inside."""
    pointers = base + first.to(tl.int64) * row_stride + (r[:, None] * row_stride + c[None, :])
    if BOUNDED and EVEN:
        tile = tl.load(pointers, mask=first + r[:, None] < count, other=0.0)
    elif BOUNDED:
        tile = tl.load(pointers, mask=(first + r[:, None] < count) & (c[None, :] < width), other=0.0)
    elif EVEN:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=c[None, :] < width, other=0.0)
    return tile


@triton.jit
def find_full_tiles(low, high, inside, Tk, BN: tl.constexpr, MASKED: tl.constexpr):
    """Key tiles first to last that some query sees, and full to end of these that every query sees completely.

    low and high are the key ranges of the queries; `inside` marks queries before the end. MASKED: none is full.
    """
    some = high > low
    first = tl.min(tl.where(some, low, Tk), 0) // BN
    last = tl.maximum(tl.cdiv(tl.max(tl.where(some, high, 0), 0), BN), first)
    full = tl.minimum(tl.maximum(tl.cdiv(tl.max(low, 0), BN), first), last)
    end = tl.minimum(tl.maximum(tl.min(tl.where(inside, high, Tk), 0) // BN, full), last)
    if MASKED:
        end = full
    return first, last, full, end


@triton.jit
def tile_logits(
    dots, i, j, offset, slope, scale, softcap,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, EXACT: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """softcap(scale * dots) + ALiBi, and the tanh of the softcap."""
    return distance_bias_logits(dots, dots, i, j, offset, slope, scale, softcap, 0, SOFTCAP, ALIBI, EXACT, DIRECT)


@triton.jit
def visible_keys(
    low, high, i, j, query_ids, key_ids, dense, dense_query, dense_key, Tq, Tk, IDS: tl.constexpr, DENSE: tl.constexpr
):
    """Entries (i, j) in the key ranges low to high, of the same document, and set in the dense mask."""
    return apply_masks(
        (j >= low) & (j < high), i, j, query_ids, key_ids, dense, dense_query, dense_key, Tq, Tk, IDS, DENSE
    )

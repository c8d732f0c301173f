"""Logits of the statistics kernels, by the device functions of the forward kernels: softcap, ALiBi and row tables.

Names and shapes are those of distance_bias/forward.py.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.distance_bias.forward import clip_side, distance_bias_logits, distance_index, gather_floats


@triton.jit
def entry_logits(
    dots, bias, i, j, offset, Tq, clip, bias_query, slope, scale, softcap,
    TABLE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """Logits in base 2 of any entries (i, j); indices past the end read values of the last ones."""
    entries = dots
    if TABLE > 0:
        rows = tl.minimum(i, Tq - 1).to(tl.int64) * bias_query
        entries = tl.load(bias + (rows + distance_index(i, j, offset, clip)))
    z, _ = distance_bias_logits(dots, entries, i, j, offset, slope, scale, softcap, TABLE, SOFTCAP, ALIBI, False, False)
    return z


@triton.jit
def locate_bias(bias, b, h, first_i, bias_batch, bias_head, bias_query):
    """The row table of a head, from query first_i on."""
    return bias + b * bias_batch + h.to(tl.int64) * bias_head + tl.cast(first_i, tl.int64) * bias_query


@triton.jit
def load_bias_ends(bias, first_i, Tq, clip, bias_query, BQ: tl.constexpr, TABLE: tl.constexpr):
    """Offsets of the rows of a row table (BQ,), and their bias for all distances beyond the clip, on both sides."""
    # Rows past the end read those of the last query.
    rows = tl.minimum(tl.arange(0, BQ), Tq - 1 - first_i) * bias_query
    left, right = rows, rows
    if TABLE > 0:
        left, right = tl.load(bias + rows), tl.load(bias + rows + 2 * clip)
    return rows, left, right


@triton.jit
def transposed_tile_logits(
    dots, bias, rows, left, right, first_i, first_j, offset, clip, slope, scale, softcap,
    TABLE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DIRECT: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Logits in base 2 of a tile, keys x queries: (BK, BQ). Far from the diagonal all keys of a query share a bias."""
    i, j = (first_i + tl.arange(0, BQ))[None, :], (first_j + tl.arange(0, BK))[:, None]
    entries = dots
    if TABLE > 0:
        far = clip_side(first_i, first_j, offset, clip, BQ, BK)
        if far != 0:
            entries = tl.broadcast_to(tl.where(far < 0, left, right)[None, :], (BK, BQ))
        else:
            entries = gather_floats(bias, rows[None, :] + distance_index(i, j, offset, clip), DIRECT)
    z, _ = distance_bias_logits(dots, entries, i, j, offset, slope, scale, softcap, TABLE, SOFTCAP, ALIBI, False, False)
    return z

"""Additive logits of the statistics kernels, by the device functions of the additive forward; names are those of it."""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.additive.exponentials import TWO_LOG2_E
from foci.kernels.additive.forward import (
    MAX_EXPONENT,
    additive_logits,
    as_int64_pointer,
    load_per_feature,
    reciprocal,
    tile_columns,
    tile_rows,
)


@triton.jit
def load_additive_block(
    E, F, table, sizes, constants, q_max, k_max, q_magnitude, k_magnitude, weight,
    pair, tile, b, h, H, group, Tq, Tk, headed, weight_head,
    DP: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """What the logits of a block of queries have in common: pointers to its exponentials, constants and bounds."""
    row = h.to(tl.int64) * headed
    block = pair.to(tl.int64) * tl.cdiv(Tq, BQ) + tile
    k_block = (b * (H // group) + h // group) * tl.cdiv(Tk, BK)
    return (
        as_int64_pointer(E) + block * (BQ * DP // 2),
        as_int64_pointer(F) + k_block * (BK * DP // 2),
        as_int64_pointer(table) + row * (DP // 2),
        tl.load(constants + row * 2),
        tl.load(constants + row * 2 + 1),
        load_per_feature(q_max, block, DP, BD),
        k_max + k_block * DP,
        load_per_feature(sizes, row, DP, BD),
        tl.load(q_magnitude + block) > MAX_EXPONENT,
        k_magnitude + k_block,
        weight + h.to(tl.int64) * weight_head,
    )


@triton.jit
def transposed_additive_logits(
    block, t, first_i, q, q_query, Tq, k, k_key, Tk, D,
    BQ: tl.constexpr, BK: tl.constexpr, MT: tl.constexpr, NT: tl.constexpr, DP: tl.constexpr, BD: tl.constexpr,
    CHUNK: tl.constexpr, MAX_SHARED: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Logits in base 2 of key tile t, keys x queries: (BK, BQ)."""
    E, F, table, constant, factor, q_max, k_max, sizes, q_far, k_magnitude, weight = block
    far = q_far | (tl.load(k_magnitude + t) > MAX_EXPONENT)
    z = additive_logits(
        E, F + tl.cast(t, tl.int64) * (BK * DP // 2), table, constant, factor,
        q_max, load_per_feature(k_max, tl.cast(t, tl.int64), DP, BD), sizes, far,
        q, q_query, first_i + tile_rows(BQ, MT), Tq, k, k_key, t * BK + tile_columns(BK, NT), Tk, weight, D,
        BQ, BK, MT, NT, DP, BD, CHUNK, MAX_SHARED, BQ, GPU,
    )  # fmt: skip
    return tl.reshape(tl.permute(z, (1, 3, 0, 2)), (BK, BQ))


@triton.jit
def additive_terms(a, b, w, GPU: tl.constexpr):
    """w tanh(a + b), for values of any size."""
    return w - (2.0 * w) * reciprocal(1.0 + tl.exp2((a + b) * TWO_LOG2_E), GPU)

"""Exponentials e^2q and e^2k of additive attention, computed once per query and key, in the layout of the tiles.

The weight is folded into those of the queries. Bounds on the exponents are stored as well. Names and shapes are those
of forward.py.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.logits import LN_2, LOG2_E

# A new value of one of these does not trigger a compilation: lengths, counts, and strides that follow from lengths.
ADDITIVE_LENGTHS = [
    "B", "H", "G", "group", "Tq", "Tk", "pairs", "per_split", "splits", "rows", "items", "programs", "weights",
    "headed",
    "key_ranges_batch", "query_ids_batch", "key_ids_batch", "dense_batch", "dense_head", "dense_query", "dense_key",
    "threshold", "q_rows", "k_rows", "q_padded", "k_padded",
]  # fmt: skip
# 2 log2(e) rounded to a float, and the remainder.
TWO_LOG2_E = tl.constexpr(2.885390043258667)
TWO_LOG2_E_REST = tl.constexpr(3.851925978e-08)
# A weight below this share of the largest weight does not survive rounding; it is replaced by this share.
MIN_WEIGHT_SHARE = tl.constexpr(2.0**-33)
# The denominator and the exponent of padding features.
PADDING_DENOMINATOR = tl.constexpr(1024.0)
NO_EXPONENT = tl.constexpr(-1000.0)


@triton.jit
def split_exponent(a, GPU: tl.constexpr):
    """2 a log2(e) as a float and its rounding error, so that e^2a keeps its digits for large a."""
    if GPU:
        a = a.to(tl.float32)
        high = a * TWO_LOG2_E
        return high, tl.fma(a, TWO_LOG2_E, -high) + a * TWO_LOG2_E_REST
    else:  # noqa: RET505
        # The interpreter's fma rounds twice.
        exact = a.to(tl.float64) * 2.8853900817779268147
        high = exact.to(tl.float32)
        return high, (exact - high.to(tl.float64)).to(tl.float32)


@triton.jit
def exp2_split(high, low):
    return tl.exp2(high) * (1.0 + low * LN_2)


@triton.jit
def denominator_constants(weight, d, peak, D):
    """c = peak / w. Padding features have E = 0, so each adds 1 / PADDING_DENOMINATOR."""
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    is_significant = tl.abs(w) > peak * MIN_WEIGHT_SHARE
    return tl.where(
        is_significant,
        peak / tl.where(is_significant, w, 1.0),
        tl.where(d < D, 1.0 / MIN_WEIGHT_SHARE, PADDING_DENOMINATOR),
    )


@triton.jit
def store_exponentials(
    x, stride, first, T, D, weight, peak, into, largest, magnitude_out,
    ROWS: tl.constexpr, DP: tl.constexpr, STEP: tl.constexpr, FOLD: tl.constexpr, ROW_GROUP: tl.constexpr,
    GPU: tl.constexpr,
):  # fmt: skip
    """Store the exponentials of ROWS vectors, (ROWS / ROW_GROUP, DP / 4, ROW_GROUP, 4), and bounds on their exponents.

    largest (DP,): the largest exponent of each feature. magnitude_out: the largest absolute exponent of all.
    """
    rows = tl.arange(0, ROWS)
    inside = first + rows < T
    magnitude = 0.0
    for start in range(0, DP, STEP):
        d = start + tl.arange(0, STEP)
        there = inside[:, None] & (d < D)[None, :]
        pointers = x + (first + rows).to(tl.int64)[:, None] * stride + d[None, :]
        high, low = split_exponent(tl.load(pointers, mask=there, other=0.0), GPU)
        e = exp2_split(high, low)
        size = tl.where(there, tl.abs(high), 0.0)
        if FOLD:
            c = denominator_constants(weight, d, peak, D)
            e = tl.where((d < D)[None, :], e * c[None, :], 0.0)
            size += tl.log2(tl.abs(c))[None, :]
        magnitude = tl.maximum(magnitude, tl.max(tl.max(size, 1), 0))
        tl.store(largest + d, tl.max(tl.where(there, high, NO_EXPONENT), 0), mask=d < DP)
        index = (rows // ROW_GROUP * (ROW_GROUP * DP) + rows % ROW_GROUP * 4)[:, None]
        index += (d // 4 * (4 * ROW_GROUP) + d % 4)[None, :]
        tl.store(into + index, e, mask=(d < DP)[None, :])
    tl.store(magnitude_out, magnitude)


@triton.jit(do_not_specialize=ADDITIVE_LENGTHS)
def prepare_exponentials(
    q, k, weight, E, F, table, sizes, constants, q_max, k_max, q_magnitude, k_magnitude,
    B, H, G, Tq, Tk, D, q_batch, q_head, q_query, k_batch, k_head, k_key, weight_head, weights,
    BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr,
    ROW_GROUP: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """One program per block of queries or keys. Those of the first blocks also write the tables of the weight.

    E (B H, blocks, BM / ROW_GROUP, DP / 4, ROW_GROUP, 4), F (B G, blocks, DP / 4, BN, 4); table (weights, DP): c,
    neighbours swapped; sizes: 1 + log2 |c|. q_max and k_max (blocks, DP), q_magnitude and k_magnitude (blocks,).
    constants (weights, 2): the logit in base 2 is the first minus the second times the sum of 1 / (c + E F).
    """
    pid = tl.program_id(0)
    q_blocks = tl.cdiv(Tq, BM)
    k_blocks = tl.cdiv(Tk, BN)
    if pid < B * H * q_blocks:
        pair = pid // q_blocks
        block = pid % q_blocks
        h = pair % H
        weight += h.to(tl.int64) * weight_head
        d = tl.arange(0, BD)
        w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
        peak = tl.max(tl.abs(w), 0)
        peak = tl.where(peak > 0, peak, 1.0)
        index = pid.to(tl.int64)
        store_exponentials(
            q + (pair // H).to(tl.int64) * q_batch + h.to(tl.int64) * q_head, q_query, block * BM, Tq, D, weight, peak,
            E + index * (BM * DP), q_max + index * DP, q_magnitude + index, BM, DP, STEP, True, ROW_GROUP, GPU,
        )  # fmt: skip
        if (block == 0) & (pair < weights):
            c = denominator_constants(weight, d, peak, D)
            # Neighbours are swapped so that registers of c and of E F come from different banks.
            tl.store(table + pair * DP + (d ^ 1), c, mask=d < DP)
            tl.store(sizes + pair * DP + d, 1.0 + tl.log2(tl.abs(c)), mask=d < DP)
            factor = 2.0 * LOG2_E * peak
            tl.store(constants + 2 * pair, tl.sum(w, 0) * LOG2_E + factor * ((DP - D) / PADDING_DENOMINATOR))
            tl.store(constants + 2 * pair + 1, factor)
    else:
        key_pid = pid - B * H * q_blocks
        key_pair = (key_pid // k_blocks).to(tl.int64)
        key_index = key_pid.to(tl.int64)
        store_exponentials(
            k + (key_pair // G) * k_batch + (key_pair % G) * k_head, k_key, (key_pid % k_blocks) * BN, Tk, D, weight,
            1.0, F + key_index * (BN * DP), k_max + key_index * DP, k_magnitude + key_index,
            BN, DP, STEP, False, BN, GPU,
        )  # fmt: skip

"""The kernels before and after the one-pass backward of additive attention (one_pass_backward.py).

Shapes and names are those of one_pass_backward.py. Its sums are float32; rows are padded to whole blocks and features
to DW. The factor that all terms of a sum share is applied in the epilogue.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.additive.exponentials import ADDITIVE_LENGTHS, prepare_exponentials
from foci.kernels.logits import LOG2_E


@triton.jit
def zero_block(sums, ROWS: tl.constexpr, DW: tl.constexpr, DC: tl.constexpr):
    """Set the sums of a block to zero: (ROWS, DW)."""
    offsets = tl.arange(0, ROWS)[:, None] * DW + tl.arange(0, DC)[None, :]
    for start in range(0, DW, DC):
        tl.store(sums + start + offsets, tl.zeros((ROWS, DC), tl.float32))


@triton.jit(do_not_specialize=ADDITIVE_LENGTHS)
def one_pass_prologue(
    q, k, weight, E, F, table, sizes, constants, q_max, k_max, q_magnitude, k_magnitude,
    out, d_out, d_lse, delta, dq, dk, dv,
    B, H, G, Tq, Tk, D, Dv, q_batch, q_head, q_query, k_batch, k_head, k_key, weight_head, weights,
    BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr,
    DW: tl.constexpr, DC: tl.constexpr, VC: tl.constexpr, LSE: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """One program per block of queries or keys: `prepare_exponentials`, delta, and zeros for the sums.

    delta (B, H, Tq) is Σ d_out out - d_lse; d_lse is read only with LSE.
    """
    prepare_exponentials(
        q, k, weight, E, F, table, sizes, constants, q_max, k_max, q_magnitude, k_magnitude,
        B, H, G, Tq, Tk, D, q_batch, q_head, q_query, k_batch, k_head, k_key, weight_head, weights,
        BM, BN, DP, BD, STEP, 4, GPU,
    )  # fmt: skip
    pid = tl.program_id(0)
    blocks = tl.cdiv(Tq, BM)
    if pid < B * H * blocks:
        pair = (pid // blocks).to(tl.int64)
        first = (pid % blocks) * BM
        zero_block(dq + pid.to(tl.int64) * (BM * DW), BM, DW, DC)
        i = first + tl.arange(0, BM)
        row_delta = tl.zeros((BM,), tl.float32)
        if LSE:
            row_delta -= tl.load(d_lse + pair * Tq + i, mask=i < Tq, other=0.0) * LOG2_E
        for start in range(0, Dv, VC):
            e = start + tl.arange(0, VC)
            offsets = (pair * Tq + i)[:, None] * Dv + e[None, :]
            there = (i < Tq)[:, None] & (e < Dv)[None, :]
            d_rows = tl.load(d_out + offsets, mask=there, other=0.0).to(tl.float32)
            row_delta += tl.sum(d_rows * tl.load(out + offsets, mask=there, other=0.0).to(tl.float32), 1)
        tl.store(delta + pair * Tq + i, row_delta, mask=i < Tq)
    else:
        k_block = pid - B * H * blocks
        k_blocks = tl.cdiv(Tk, BN)
        k_pair = (k_block // k_blocks).to(tl.int64)
        first_key = (k_block % k_blocks) * BN
        zero_block(dk + k_block.to(tl.int64) * (BN * DW), BN, DW, DC)
        j = first_key + tl.arange(0, BN)
        for start in range(0, Dv, VC):
            e = start + tl.arange(0, VC)
            offsets = (k_pair * Tk + j)[:, None] * Dv + e[None, :]
            tl.store(dv + offsets, tl.zeros((BN, VC), tl.float32), mask=(j < Tk)[:, None] & (e < Dv)[None, :])


@triton.jit(do_not_specialize=ADDITIVE_LENGTHS)
def one_pass_epilogue(
    dq, dk, dv, dw, weight, d_query, d_key, d_value, d_weight,
    q_rows, k_rows, H, Tq, Tk, D, Dv, weight_head, q_padded, k_padded, programs,
    ROWS: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, DW: tl.constexpr, PROGRAM_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients in the dtypes of the inputs: the sums times 4 w for a query, 4 for a key.

    The first programs take rows of queries, the next ones rows of keys and values, the last ones 64 weights each.
    """
    pid = tl.program_id(0)
    q_programs = tl.cdiv(q_rows, ROWS)
    k_programs = tl.cdiv(k_rows, ROWS)
    d = tl.arange(0, BD)[None, :]
    if pid < q_programs:
        row = (pid.to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
        there = (row < q_rows) & (d < D)
        sums = tl.load(dq + (row // Tq * q_padded + row % Tq) * DW + d, mask=there, other=0.0)
        w = tl.load(weight + (row // Tq % H) * weight_head + d, mask=there, other=0.0).to(tl.float32)
        tl.store(d_query + row * D + d, (sums * (4.0 * w)).to(d_query.dtype.element_ty), mask=there)
    elif pid < q_programs + k_programs:
        key = ((pid - q_programs).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
        inside = (key < k_rows) & (d < D)
        sums = tl.load(dk + (key // Tk * k_padded + key % Tk) * DW + d, mask=inside, other=0.0)
        tl.store(d_key + key * D + d, (sums * 4.0).to(d_key.dtype.element_ty), mask=inside)
        e = tl.arange(0, BV)[None, :]
        in_values = (key < k_rows) & (e < Dv)
        values = tl.load(dv + key * Dv + e, mask=in_values, other=0.0)
        tl.store(d_value + key * Dv + e, values.to(d_value.dtype.element_ty), mask=in_values)
    else:
        weight_blocks = tl.cdiv(D, 64)
        head = (pid - q_programs - k_programs) // weight_blocks
        heads = (tl.num_programs(0) - q_programs - k_programs) // weight_blocks
        c = (pid - q_programs - k_programs) % weight_blocks * 64 + tl.arange(0, 64)
        total = tl.zeros((64,), tl.float32)
        for start in range(0, programs, PROGRAM_BLOCK):
            p = start + tl.arange(0, PROGRAM_BLOCK)
            offsets = dw + (p * heads + head)[:, None] * D + c[None, :]
            total += tl.sum(tl.load(offsets, mask=(p < programs)[:, None] & (c < D)[None, :], other=0.0), 0)
        tl.store(d_weight + head * D + c, total.to(d_weight.dtype.element_ty), mask=c < D)

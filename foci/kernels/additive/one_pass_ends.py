"""What comes before and after the one pass of additive attention's backward (additive_joint.py): one launch each.

Shapes and names are those of additive_joint.py. Its sums are float32, in rows padded to whole blocks and features
padded to DW; a factor of theirs is common to all terms and waits for the end.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.additive.exponentials import prepare_exponentials
from foci.kernels.logits import LOG2_E


@triton.jit
def zero_block(sums, ROWS: tl.constexpr, DW: tl.constexpr, DC: tl.constexpr):
    """Zeros for the sums of a block: (ROWS, DW)."""
    places = tl.arange(0, ROWS)[:, None] * DW + tl.arange(0, DC)[None, :]
    for start in range(0, DW, DC):
        tl.store(sums + start + places, tl.zeros((ROWS, DC), tl.float32))


@triton.jit
def one_pass_prologue(
    q, k, weight, E, F, table, sizes, constants, q_most, k_most, q_reach, k_reach,
    out, d_out, d_lse, delta, dq, dk, dv,
    B, H, G, Tq, Tk, D, Dv, q_batch, q_head, q_query, k_batch, k_head, k_key, weight_head, weights,
    BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr,
    DW: tl.constexpr, DC: tl.constexpr, VC: tl.constexpr, LSE: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """A program per block of queries or of keys: what `prepare` does, and zeros for the sums.

    delta (B, H, Tq): what a row's gradients lose; d_lse is read where LSE says that there is one.
    """
    prepare_exponentials(
        q, k, weight, E, F, table, sizes, constants, q_most, k_most, q_reach, k_reach,
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
        change = tl.zeros((BM,), tl.float32)
        if LSE:
            change -= tl.load(d_lse + pair * Tq + i, mask=i < Tq, other=0.0) * LOG2_E
        for start in range(0, Dv, VC):
            e = start + tl.arange(0, VC)
            places = (pair * Tq + i)[:, None] * Dv + e[None, :]
            there = (i < Tq)[:, None] & (e < Dv)[None, :]
            given = tl.load(d_out + places, mask=there, other=0.0).to(tl.float32)
            change += tl.sum(given * tl.load(out + places, mask=there, other=0.0).to(tl.float32), 1)
        tl.store(delta + pair * Tq + i, change, mask=i < Tq)
    else:
        place = pid - B * H * blocks
        k_blocks = tl.cdiv(Tk, BN)
        k_pair = (place // k_blocks).to(tl.int64)
        first_key = (place % k_blocks) * BN
        zero_block(dk + place.to(tl.int64) * (BN * DW), BN, DW, DC)
        j = first_key + tl.arange(0, BN)
        for start in range(0, Dv, VC):
            e = start + tl.arange(0, VC)
            places = (k_pair * Tk + j)[:, None] * Dv + e[None, :]
            tl.store(dv + places, tl.zeros((BN, VC), tl.float32), mask=(j < Tk)[:, None] & (e < Dv)[None, :])


@triton.jit
def one_pass_epilogue(
    dq, dk, dv, dw, weight, d_query, d_key, d_value, d_weight,
    q_rows, k_rows, H, Tq, Tk, D, Dv, weight_head, q_padded, k_padded, programs,
    ROWS: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, DW: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """The sums in the dtypes of the inputs, with the factors that they lack: 4 w for a query, 4 for a key.

    Programs for the rows of queries come first, then those of keys and values, then one for each 64 weights.
    """
    pid = tl.program_id(0)
    q_programs = tl.cdiv(q_rows, ROWS)
    k_programs = tl.cdiv(k_rows, ROWS)
    d = tl.arange(0, BD)[None, :]
    if pid < q_programs:
        row = (pid.to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
        there = (row < q_rows) & (d < D)
        found = tl.load(dq + (row // Tq * q_padded + row % Tq) * DW + d, mask=there, other=0.0)
        w = tl.load(weight + (row // Tq % H) * weight_head + d, mask=there, other=0.0).to(tl.float32)
        tl.store(d_query + row * D + d, (found * (4.0 * w)).to(d_query.dtype.element_ty), mask=there)
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
        turns = tl.cdiv(D, 64)
        head = (pid - q_programs - k_programs) // turns
        heads = (tl.num_programs(0) - q_programs - k_programs) // turns
        c = (pid - q_programs - k_programs) % turns * 64 + tl.arange(0, 64)
        total = tl.zeros((64,), tl.float32)
        for start in range(0, programs, MANY):
            p = start + tl.arange(0, MANY)
            places = dw + (p * heads + head)[:, None] * D + c[None, :]
            total += tl.sum(tl.load(places, mask=(p < programs)[:, None] & (c < D)[None, :], other=0.0), 0)
        tl.store(d_weight + head * D + c, total.to(d_weight.dtype.element_ty), mask=c < D)

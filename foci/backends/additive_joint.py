"""The launch of additive attention's backward in one pass (kernels/additive_joint.py).

B batch, H heads, G key heads, Tq queries, Tk keys, D width, Dv value width.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from foci.backends.additive_launch import (
    INTERPRETED,
    Terms,
    Tiling,
    inputs,
    options,
    power_of_two,
    prepared,
    processors,
    shape,
)


@cache
def tiling_for(queries: int, device: torch.device) -> Tiling:
    """128 registers: two programs of eight warps on a processor, whose waits for the cache overlap."""
    if device.type != "cuda":
        return INTERPRETED
    rows = 16 if queries <= 16 else 32 if queries <= 32 else 64
    return Tiling(queries=rows, across=16, warps=8, registers=128, lanes=64)


def backward(
    d_out: Tensor,
    d_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    out: Tensor,
    lse: Tensor,
    terms: Terms,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and weight; from run to run they may differ in their last digits."""
    from foci.kernels.additive_joint import joint as kernel

    q, k, v, weight = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, weight))
    d_out = d_out.contiguous()
    tiling = tiling or tiling_for(q.shape[2], q.device)
    sizes = turns(q.shape[3], v.shape[3], tiling)
    powers = laid_out(q, k, out, d_out, d_lse, tiling, sizes)
    blocks, wanted = -(-k.shape[2] // tiling.keys) * k.shape[0] * k.shape[1], processors(q.device) * tiling.programs
    splits = max(1, min(wanted // blocks, -(-q.shape[2] // tiling.queries)))
    programs = min(blocks * splits, wanted)
    weights = weight.reshape(-1, weight.shape[-1])
    dq, dk = padded(q, tiling.queries, sizes["DW"]), padded(k, tiling.keys, sizes["DW"])
    dv = padded(v, 1, v.shape[3])
    dw = torch.zeros((programs, *weights.shape), dtype=torch.float32, device=q.device)
    room = torch.empty((programs, tiling.queries * tiling.keys), dtype=torch.float32, device=q.device)
    kernel[(programs,)](
        **inputs(q, k, v, weight, terms), **prepared(q, k, weight, tiling), **shape(q, v, tiling), **powers, **sizes,
        room=room, d_out=d_out, lse=lse, dq=dq, dk=dk, dv=dv, dw=dw,
        pairs=q.shape[0] * q.shape[1], items=blocks * splits, programs=programs, splits=splits,
        BV=power_of_two(v.shape[3]), **options(tiling),
    )  # fmt: skip
    dq = dq[:, :, : q.shape[2], : q.shape[3]] * (4.0 * weights.float()).unsqueeze(1)
    dk = dk[:, :, : k.shape[2], : k.shape[3]] * 4.0
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dw.sum(0).view(weight.shape).to(weight.dtype)


def turns(width: int, value_width: int, tiling: Tiling) -> dict[str, int]:
    """DC features at a time, DW in all; the threads are JT keys by DT features. VC features of the values at a time."""
    rest = width % 64
    at_once = min(power_of_two(width), 32 if 0 < rest <= 32 else 64)
    lanes = min(at_once, tiling.lanes)
    return {
        "DC": at_once, "DW": -(-width // at_once) * at_once, "DT": lanes, "JT": tiling.warps * 32 // lanes,
        "VC": min(power_of_two(value_width), 64),
    }  # fmt: skip


def laid_out(
    q: Tensor, k: Tensor, out: Tensor, d_out: Tensor, d_lse: Tensor, tiling: Tiling, sizes: dict[str, int]
) -> dict[str, Tensor]:
    """Exponentials for the second look at a tile, and what the logits of a row lose."""
    from foci.kernels.additive_joint import prepare as kernel

    (B, H, Tq, D), (G, Tk) = q.shape, k.shape[1:3]
    q_blocks, k_blocks = B * H * -(-Tq // tiling.queries), B * G * -(-Tk // tiling.keys)
    q_powers = torch.empty((q_blocks, tiling.queries * sizes["DW"]), dtype=torch.float32, device=q.device)
    k_powers = torch.empty((k_blocks, tiling.keys * sizes["DW"]), dtype=torch.float32, device=q.device)
    delta = torch.empty((B, H, Tq), dtype=torch.float32, device=q.device)
    kernel[(q_blocks + k_blocks,)](
        q=q, k=k, out=out, d_out=d_out, d_lse=d_lse.contiguous(), delta=delta, q_powers=q_powers, k_powers=k_powers,
        H=H, G=G, Tq=Tq, Tk=Tk, D=D, Dv=out.shape[3], q_programs=q_blocks,
        q_batch=q.stride(0), q_head=q.stride(1), q_query=q.stride(2),
        k_batch=k.stride(0), k_head=k.stride(1), k_key=k.stride(2),
        BM=tiling.queries, BN=tiling.keys, DW=sizes["DW"], DC=sizes["DC"], VC=sizes["VC"], GPU=q.is_cuda, num_warps=4,
    )  # fmt: skip
    return {"q_powers": q_powers, "k_powers": k_powers, "delta": delta}


def padded(x: Tensor, rows: int, width: int) -> Tensor:
    """Zeros for the gradient of x, in whole blocks of rows."""
    length = -(-x.shape[2] // rows) * rows
    return torch.zeros((*x.shape[:2], length, width), dtype=torch.float32, device=x.device)

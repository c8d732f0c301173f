"""The launch of additive attention's backward in one pass (kernels/additive_joint.py).

B batch, H heads, G key heads, Tq queries, Tk keys, D width, Dv value width.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from foci.backends.additive_launch import (
    INTERPRETED,
    Terms,
    Tiling,
    blocks_of,
    inputs,
    options,
    parts,
    power_of_two,
    preparation,
    preparing,
    processors,
    readable,
    shape,
)


@cache
def tiling_for(queries: int, device: torch.device) -> Tiling:
    """All the registers there are: eight warps on a processor, each with enough terms to wait for nothing."""
    if device.type != "cuda":
        return INTERPRETED
    return Tiling(queries=16 if queries <= 16 else 32 if queries <= 32 else 64)


def backward(
    d_out: Tensor,
    d_lse: Tensor | None,
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

    q, k, v, weight = readable(q, k, v, weight)
    d_out = d_out.contiguous()
    tiling = tiling or tiling_for(q.shape[2], q.device)
    sizes = turns(q.shape[3], v.shape[3], tiling)
    blocks, wanted = -(-k.shape[2] // tiling.keys) * k.shape[0] * k.shape[1], processors(q.device) * tiling.programs
    splits = max(1, min(wanted // blocks, -(-q.shape[2] // tiling.queries)))
    programs = min(blocks * splits, wanted)
    found = parts(
        preparation(q, k, weight, tiling)
        | sums(q, k, v, tiling, sizes["DW"])
        | {"delta": lse.numel(), "dw": programs * weight.numel(), "room": programs * tiling.queries * tiling.keys},
        q.device,
    )
    begin(q, k, weight, out, d_out, d_lse, found, tiling, sizes)
    kernel[(programs,)](
        **inputs(q, k, v, weight, terms), **shape(q, v, tiling), **found, **sizes, d_out=d_out, lse=lse,
        headed=int(weight.dim() == 2), pairs=q.shape[0] * q.shape[1], items=blocks * splits, programs=programs,
        splits=splits, BV=power_of_two(v.shape[3]), AHEAD=tiling.ahead, **options(tiling),
    )  # fmt: skip
    return finished(q, k, v, weight, found, programs, tiling, sizes)


def sums(q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, width: int) -> dict[str, int]:
    """How many floats the sums and the exponentials have, in whole blocks of rows."""
    q_rows = q.shape[0] * q.shape[1] * -(-q.shape[2] // tiling.queries) * tiling.queries
    k_rows = k.shape[0] * k.shape[1] * -(-k.shape[2] // tiling.keys) * tiling.keys
    return {
        "q_powers": q_rows * width, "k_powers": k_rows * width,
        "dq": q_rows * width, "dk": k_rows * width, "dv": v.numel(),
    }  # fmt: skip


def begin(
    q: Tensor,
    k: Tensor,
    weight: Tensor,
    out: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    found: dict[str, Tensor],
    tiling: Tiling,
    sizes: dict[str, int],
) -> None:
    """Exponentials for both looks at a tile, what the logits of a row lose, and zeros for the sums."""
    from foci.kernels.additive_ends import begin as kernel

    given: dict[str, Any] = {name: x for name, x in found.items() if name not in ("dw", "room")}
    kernel[(blocks_of(q, k, tiling),)](
        q=q, k=k, weight=weight, out=out, d_out=d_out, d_lse=out if d_lse is None else d_lse.contiguous(), **given,
        **preparing(q, k, weight, tiling), Dv=out.shape[3], DW=sizes["DW"], DC=sizes["DC"], VC=sizes["VC"],
        LSE=d_lse is not None,
    )  # fmt: skip


def finished(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    found: dict[str, Tensor],
    programs: int,
    tiling: Tiling,
    sizes: dict[str, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sums as gradients of q, k, v and weight."""
    from foci.kernels.additive_ends import finish as kernel

    gradients = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, weight))
    (B, H, Tq, D), (G, Tk), Dv = q.shape, k.shape[1:3], v.shape[3]
    rows = max(1, 4096 // power_of_two(max(D, Dv)))
    weights = weight.numel() // D
    kernel[(-(-B * H * Tq // rows) + -(-B * G * Tk // rows) + weights * -(-D // 64),)](
        found["dq"], found["dk"], found["dv"], found["dw"], weight, *gradients,
        B * H * Tq, B * G * Tk, H, Tq, Tk, D, Dv, D if weights > 1 else 0,
        -(-Tq // tiling.queries) * tiling.queries, -(-Tk // tiling.keys) * tiling.keys, programs,
        ROWS=rows, BD=power_of_two(D), BV=power_of_two(Dv), DW=sizes["DW"], MANY=32, num_warps=4,
    )  # fmt: skip
    return gradients  # type: ignore[return-value]


def turns(width: int, value_width: int, tiling: Tiling) -> dict[str, int]:
    """DC features at a time, DW in all; the threads are JT keys by DT features. VC features of the values at a time."""
    rest = width % 64
    at_once = min(power_of_two(width), 32 if 0 < rest <= 32 else 64)
    lanes = min(at_once, tiling.lanes)
    return {
        "DC": at_once, "DW": -(-width // at_once) * at_once, "DT": lanes, "JT": tiling.warps * 32 // lanes,
        "VC": min(power_of_two(value_width), 64),
    }  # fmt: skip

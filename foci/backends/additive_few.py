"""The launches of additive attention for very few queries (kernels/additive_decode.py).

B batch, H heads, G key heads, Tq queries, Tk keys, D width, Dv value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foci.backends.additive_launch import (
    Terms,
    inputs,
    join,
    partial_results,
    power_of_two,
    processors,
    readable,
    splits_for,
)


def forward(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, terms: Terms, out: Tensor, lse: Tensor) -> None:
    """One query against many keys, as a decoder does at each step."""
    from foci.kernels.additive_decode import few as kernel

    rows = lse.numel()
    sizes = blocks(q, v, 4096)
    count = -(-k.shape[2] // sizes["BN"])
    splits = splits_for(rows, count, 4, q.device)
    parts = partial_results(splits, out, lse)
    kernel[(rows, splits)](
        **inputs(q, k, v, weight, terms), **sizes, out=parts[0], lse=parts[1],
        pairs=q.shape[0] * q.shape[1], per_split=-(-count // splits) * sizes["BN"], num_warps=4, num_stages=1,
    )  # fmt: skip
    join(splits, parts, out, lse)


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
    block: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and weight, the same in every run.

    Each split of the keys has its own sums for queries and weight. block: the numbers of a block of keys, and its
    warps; a single one has nobody to wait for.
    """
    from foci.kernels.additive_decode import few_backward as kernel

    q, k, v, weight = readable(q, k, v, weight)
    numbers, warps = block or ((1024, 1) if max(q.shape[3], v.shape[3]) <= 256 else (2048, 4))
    pairs, sizes = k.shape[0] * k.shape[1], blocks(q, v, numbers)
    count = -(-k.shape[2] // sizes["BN"])
    per_split = -(-count // max(1, min(processors(q.device) * 32 // warps // pairs, count)))
    splits = -(-count // per_split)
    dq = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
    dw = torch.empty((splits, *q.shape[:2], q.shape[3]), dtype=torch.float32, device=q.device)
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    kernel[(pairs, splits)](
        **inputs(q, k, v, weight, terms), **sizes, out=out, lse=lse, d_out=d_out.contiguous(),
        d_lse=lse if d_lse is None else d_lse.contiguous(), dq=dq, dk=dk, dv=dv, dw=dw,
        per_split=per_split * sizes["BN"], LSE=d_lse is not None, num_warps=warps, num_stages=1,
    )  # fmt: skip
    d_weight = dw.sum((0, 1)) if weight.dim() == 2 else dw.sum((0, 1, 2))
    return dq.sum(0).to(q.dtype), dk, dv, d_weight.to(weight.dtype)


def blocks(q: Tensor, v: Tensor, numbers: int) -> dict[str, Any]:
    """As many keys at a time as have so many numbers."""
    width, value_width = power_of_two(q.shape[3]), power_of_two(v.shape[3])
    return {
        "D": q.shape[3], "Dv": v.shape[3], "BN": max(numbers // max(width, value_width), 4), "BD": width,
        "BV": value_width, "GPU": q.is_cuda,
    }  # fmt: skip

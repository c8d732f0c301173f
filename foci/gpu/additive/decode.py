"""The launches of additive attention for very few queries (kernels/additive/decode.py).

B batch, H heads, G key heads, Tq queries, Tk keys, D width, Dv value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foci.gpu.additive.launch import (
    AdditiveOptions,
    choose_split_count,
    next_power_of_two,
    plan_key,
    scalar_arguments,
    split_merge_launches,
    split_workspace,
    tensor_arguments,
    to_kernel_layout,
)
from foci.gpu.launcher import LaunchPlan, build_kernel_launch, count_multiprocessors, get_or_build_plan


def plan_decode_forward(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, terms: AdditiveOptions, out: Tensor
) -> LaunchPlan:
    """One query against many keys, as a decoder does at each step: two blocks of keys are on their way meanwhile."""
    from foci.kernels.additive.decode import additive_decode as kernel

    rows = out.numel() // out.shape[3]
    numbers, warps = (1024, 1) if max(q.shape[3], v.shape[3]) <= 256 else (4096, 4)
    keys = keys_per_block(q, v, numbers)
    count = -(-k.shape[2] // keys)
    splits = choose_split_count(rows, count, 16 // warps, q.device, most=256 // warps)
    given = scalar_arguments(q, k, v, weight, terms)
    given |= {"BN": keys, "per_split": -(-count // splits) * keys, "STAGES": 3}
    sizes, renamed = split_workspace(splits, out)
    attend = build_kernel_launch(kernel, (rows, splits), given, renamed, num_warps=warps)
    return LaunchPlan(sizes, q.device, [attend, *split_merge_launches(splits, out)])


def decode_backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    out: Tensor,
    lse: Tensor,
    terms: AdditiveOptions,
    block: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and weight, the same in every run.

    Each split of the keys has its own sums for queries and weight. block: the numbers of a block of keys, and its
    warps; a single one has nobody to wait for.
    """
    q, k, v, weight, terms = to_kernel_layout(q, k, v, weight, terms)
    numbers, warps = block or ((1024, 1) if max(q.shape[3], v.shape[3]) <= 256 else (2048, 4))
    keys = keys_per_block(q, v, numbers)
    splits, per_split = split_keys(k, keys, warps)
    chosen = splits, per_split, keys, warps, d_lse is not None
    launches = get_or_build_plan(
        plan_key(plan_decode_backward, q, k, v, weight, terms, chosen, d_out.dtype),
        lambda: plan_decode_backward(q, k, v, weight, terms, *chosen),
    )
    dq = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
    dw = torch.empty((splits, *q.shape[:2], q.shape[3]), dtype=torch.float32, device=q.device)
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    given = {"out": out, "lse": lse, "d_out": d_out.contiguous(), "dq": dq, "dk": dk, "dv": dv, "dw": dw}
    given["d_lse"] = lse if d_lse is None else d_lse.contiguous()
    launches(tensor_arguments(q, k, v, weight, terms) | given)
    d_weight = dw.sum((0, 1)) if weight.dim() == 2 else dw.sum((0, 1, 2))
    return dq.sum(0).to(q.dtype), dk, dv, d_weight.to(weight.dtype)


def split_keys(k: Tensor, keys: int, warps: int) -> tuple[int, int]:
    """Into how many splits the blocks of keys go, and how many blocks a split has."""
    count = -(-k.shape[2] // keys)
    wanted = count_multiprocessors(k.device) * 32 // warps // (k.shape[0] * k.shape[1])
    per_split = -(-count // max(1, min(wanted, count)))
    return -(-count // per_split), per_split


def plan_decode_backward(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, terms: AdditiveOptions,
    splits: int, per_split: int, keys: int, warps: int, has_d_lse: bool,
) -> LaunchPlan:  # fmt: skip
    from foci.kernels.additive.decode import additive_decode_backward as kernel

    numbers: dict[str, Any] = scalar_arguments(q, k, v, weight, terms)
    numbers |= {"BN": keys, "per_split": per_split * keys, "LSE": has_d_lse}
    numbers |= {"ONE": q.shape[1] * q.shape[2] == k.shape[1], "STAGES": 2}
    attend = build_kernel_launch(kernel, (k.shape[0] * k.shape[1], splits), numbers, num_warps=warps, num_stages=1)
    return LaunchPlan({}, q.device, [attend])


def keys_per_block(q: Tensor, v: Tensor, numbers: int) -> int:
    """As many keys at a time as have so many numbers."""
    return max(numbers // next_power_of_two(max(q.shape[3], v.shape[3])), 4)

"""Additive attention of very few queries, such as one decoding step (kernels/additive/decode.py).

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width, Dv value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foci.gpu.additive.arguments import (
    AdditiveOptions,
    AdditiveTiling,
    additive_scalars,
    choose_split_count,
    plan_key,
    split_merge_launches,
    split_workspace,
    tensor_arguments,
    to_kernel_layout,
)
from foci.gpu.arguments import next_power_of_two
from foci.gpu.launcher import LaunchPlan, build_kernel_launch, count_multiprocessors, get_or_build_plan


def plan_decode_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    options: AdditiveOptions,
    out: Tensor,
    _: AdditiveTiling | None = None,
) -> LaunchPlan:
    """Plan the forward of one query per program; two blocks of keys are loaded ahead."""
    from foci.kernels.additive.decode import additive_decode as kernel

    rows = out.numel() // out.shape[3]
    block_floats, warps = (1024, 1) if max(q.shape[3], v.shape[3]) <= 256 else (4096, 4)
    keys = keys_per_block(q, v, block_floats)
    blocks = -(-k.shape[2] // keys)
    splits = choose_split_count(rows, blocks, 16 // warps, q.device, maximum=256 // warps)
    scalars = additive_scalars(q, k, v, weight, options)
    scalars |= {"BN": keys, "per_split": -(-blocks // splits) * keys, "STAGES": 3}
    sizes, tensor_names = split_workspace(splits, out)
    attend = build_kernel_launch(kernel, (rows, splits), scalars, tensor_names, num_warps=warps)
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
    options: AdditiveOptions,
    block: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, v and weight, the same in every run.

    Each split of the keys has its own sums for queries and weight.

    Args:
        block: the number of floats of a key block, and its warps. A single warp never waits for others.
    """
    q, k, v, weight, options = to_kernel_layout(q, k, v, weight, options)
    block_floats, warps = block or ((1024, 1) if max(q.shape[3], v.shape[3]) <= 256 else (2048, 4))
    keys = keys_per_block(q, v, block_floats)
    splits, blocks_per_split = split_keys(k, keys, warps)
    config = splits, blocks_per_split, keys, warps, d_lse is not None
    plan = get_or_build_plan(
        plan_key(plan_decode_backward, q, k, v, weight, options, config, d_out.dtype),
        lambda: plan_decode_backward(q, k, v, weight, options, *config),
    )
    dq = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
    dw = torch.empty((splits, *q.shape[:2], q.shape[3]), dtype=torch.float32, device=q.device)
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    tensors = {"out": out, "lse": lse, "d_out": d_out.contiguous(), "dq": dq, "dk": dk, "dv": dv, "dw": dw}
    tensors["d_lse"] = lse if d_lse is None else d_lse.contiguous()
    plan(tensor_arguments(q, k, v, weight, options) | tensors)
    d_weight = dw.sum((0, 1)) if weight.dim() == 2 else dw.sum((0, 1, 2))
    return dq.sum(0).to(q.dtype), dk, dv, d_weight.to(weight.dtype)


def split_keys(k: Tensor, keys: int, warps: int) -> tuple[int, int]:
    """The number of splits of the keys, and the number of key blocks in each."""
    blocks = -(-k.shape[2] // keys)
    wanted = count_multiprocessors(k.device) * 32 // warps // (k.shape[0] * k.shape[1])
    per_split = -(-blocks // max(1, min(wanted, blocks)))
    return -(-blocks // per_split), per_split


def plan_decode_backward(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, options: AdditiveOptions,
    splits: int, blocks_per_split: int, keys: int, warps: int, has_d_lse: bool,
) -> LaunchPlan:  # fmt: skip
    from foci.kernels.additive.decode import additive_decode_backward as kernel

    scalars: dict[str, Any] = additive_scalars(q, k, v, weight, options)
    scalars |= {"BN": keys, "per_split": blocks_per_split * keys, "LSE": has_d_lse}
    scalars |= {"ONE": q.shape[1] * q.shape[2] == k.shape[1], "STAGES": 2}
    launch = build_kernel_launch(kernel, (k.shape[0] * k.shape[1], splits), scalars, num_warps=warps, num_stages=1)
    return LaunchPlan({}, q.device, [launch])


def keys_per_block(q: Tensor, v: Tensor, block_floats: int) -> int:
    """The number of keys in a block of `block_floats` floats, at least 4."""
    return max(block_floats // next_power_of_two(max(q.shape[3], v.shape[3])), 4)

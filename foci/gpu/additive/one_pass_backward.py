"""The launch of additive attention's backward in one pass (kernels/additive/one_pass_backward.py).

B batch, H heads, G key heads, Tq queries, Tk keys, D width, Dv value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foci.gpu.additive.launch import (
    INTERPRETER_TILING,
    AdditiveOptions,
    AdditiveTiling,
    count_blocks,
    exponentials_workspace,
    launch_options,
    next_power_of_two,
    plan_key,
    scalar_arguments,
    tensor_arguments,
    tile_arguments,
    to_kernel_layout,
)
from foci.gpu.launcher import KernelLaunch, LaunchPlan, build_kernel_launch, count_multiprocessors, get_or_build_plan


def choose_one_pass_tiling(queries: int, device: torch.device) -> AdditiveTiling:
    """All the registers there are: eight warps on a processor, each with enough terms to wait for nothing."""
    if device.type != "cuda":
        return INTERPRETER_TILING
    return AdditiveTiling(queries=16 if queries <= 16 else 32 if queries <= 32 else 64)


def backward_in_one_pass(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    out: Tensor,
    lse: Tensor,
    terms: AdditiveOptions,
    tiling: AdditiveTiling | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and weight; from run to run they may differ in their last digits."""
    q, k, v, weight, terms = to_kernel_layout(q, k, v, weight, terms)
    most, has_d_lse = count_multiprocessors(q.device), d_lse is not None
    launches = get_or_build_plan(
        plan_key(plan_one_pass_backward, q, k, v, weight, terms, tiling, most, has_d_lse, d_out.dtype),
        lambda: plan_one_pass_backward(
            q, k, v, weight, terms, tiling or choose_one_pass_tiling(q.shape[2], q.device), most, has_d_lse
        ),
    )
    gradients: dict[str, Tensor] = {}

    def late() -> dict[str, Tensor]:
        for name, x in ("d_query", q), ("d_key", k), ("d_value", v), ("d_weight", weight):
            gradients[name] = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return gradients

    given = tensor_arguments(q, k, v, weight, terms) | {"out": out, "lse": lse, "d_out": d_out.contiguous()}
    given["d_lse"] = lse if d_lse is None else d_lse.contiguous()
    launches(given, late)
    return tuple(gradients.values())  # type: ignore[return-value]


def plan_one_pass_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    terms: AdditiveOptions,
    tiling: AdditiveTiling,
    processors: int,
    has_d_lse: bool,
) -> LaunchPlan:
    """What comes before, the pass, and what comes after it, which needs only the sums.

    Besides them the pass has the exponentials, and nothing else of their size.
    """
    from foci.kernels.additive.one_pass_backward import additive_one_pass_backward
    from foci.kernels.additive.one_pass_ends import one_pass_prologue

    turned = feature_loop_arguments(q.shape[3], v.shape[3], tiling)
    blocks, wanted = -(-k.shape[2] // tiling.keys) * k.shape[0] * k.shape[1], processors * tiling.programs
    splits = max(1, min(wanted // blocks, -(-q.shape[2] // tiling.queries)))
    programs = min(blocks * splits, wanted)
    numbers = scalar_arguments(q, k, v, weight, terms) | tile_arguments(q, v, tiling) | turned
    # Products of float32 take so much shared memory that no room is left for a tile.
    shared = q.is_cuda and q.dtype != torch.float32
    numbers |= {"items": blocks * splits, "programs": programs, "splits": splits, "LSE": has_d_lse, "SHARED": shared}
    sizes = exponentials_workspace(q, k, weight, tiling) | {"delta": q.numel() // q.shape[3]}
    room = {} if shared else {"room": programs * tiling.queries * tiling.keys}
    # Any array stands for the one that is not there: it is never read.
    instead = {"room": "delta"} if shared else {}
    lasting = gradient_sum_sizes(q, k, v, tiling, turned["DW"]) | {"dw": programs * weight.numel()}
    steps = [
        build_kernel_launch(one_pass_prologue, (count_blocks(q, k, tiling),), numbers, num_warps=4),
        build_kernel_launch(additive_one_pass_backward, (programs,), numbers, instead, **launch_options(tiling)),
        epilogue_launch(q, k, v, tiling, numbers),
    ]
    return LaunchPlan(sizes | room, q.device, steps, lasting=lasting)


def gradient_sum_sizes(q: Tensor, k: Tensor, v: Tensor, tiling: AdditiveTiling, width: int) -> dict[str, int]:
    """How many floats the sums have, in whole blocks of rows."""
    q_rows = q.shape[0] * q.shape[1] * -(-q.shape[2] // tiling.queries) * tiling.queries
    k_rows = k.shape[0] * k.shape[1] * -(-k.shape[2] // tiling.keys) * tiling.keys
    return {
        "dq": q_rows * width, "dk": k_rows * width, "dv": v.numel(),
    }  # fmt: skip


def epilogue_launch(q: Tensor, k: Tensor, v: Tensor, tiling: AdditiveTiling, numbers: dict[str, Any]) -> KernelLaunch:
    """The sums as gradients of q, k, v and weight."""
    from foci.kernels.additive.one_pass_ends import one_pass_epilogue as kernel

    (B, H, Tq, D), (G, Tk), Dv = q.shape, k.shape[1:3], v.shape[3]
    rows = max(1, 4096 // next_power_of_two(max(D, Dv)))
    numbers = numbers | {
        "q_rows": B * H * Tq, "k_rows": B * G * Tk, "ROWS": rows, "MANY": 32,
        "q_padded": -(-Tq // tiling.queries) * tiling.queries, "k_padded": -(-Tk // tiling.keys) * tiling.keys,
    }  # fmt: skip
    programs = -(-B * H * Tq // rows) + -(-B * G * Tk // rows) + numbers["weights"] * -(-D // 64)
    return build_kernel_launch(kernel, (programs,), numbers, num_warps=4)


def feature_loop_arguments(width: int, value_width: int, tiling: AdditiveTiling) -> dict[str, int]:
    """DC features at a time, DW in all; the threads are JT keys by DT features. VC features of the values at a time."""
    rest = width % 64
    at_once = min(next_power_of_two(width), 32 if 0 < rest <= 32 else 64)
    lanes = min(at_once, tiling.lanes)
    return {
        "DC": at_once, "DW": -(-width // at_once) * at_once, "DT": lanes, "JT": tiling.warps * 32 // lanes,
        "VC": min(next_power_of_two(value_width), 64),
    }  # fmt: skip

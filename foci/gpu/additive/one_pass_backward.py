"""The backward of additive attention in one pass (kernels/additive/one_pass_backward.py).

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width, Dv value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foci.gpu.additive.arguments import (
    INTERPRETER_TILING,
    AdditiveOptions,
    AdditiveTiling,
    additive_scalars,
    count_blocks,
    exponentials_workspace,
    plan_key,
    tensor_arguments,
    tile_arguments,
    to_kernel_layout,
)
from foci.gpu.arguments import next_power_of_two
from foci.gpu.launcher import KernelLaunch, LaunchPlan, build_kernel_launch, count_multiprocessors, get_or_build_plan


def backward_in_one_pass(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    out: Tensor,
    lse: Tensor,
    options: AdditiveOptions,
    tiling: AdditiveTiling | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, v and weight; the last digits may differ from run to run."""
    q, k, v, weight, options = to_kernel_layout(q, k, v, weight, options)
    multiprocessors, has_d_lse = count_multiprocessors(q.device), d_lse is not None
    plan = get_or_build_plan(
        plan_key(plan_one_pass_backward, q, k, v, weight, options, tiling, multiprocessors, has_d_lse, d_out.dtype),
        lambda: plan_one_pass_backward(
            q, k, v, weight, options, tiling or choose_one_pass_tiling(q.shape[2], q.device), multiprocessors, has_d_lse
        ),
    )
    gradients: dict[str, Tensor] = {}

    def allocate_late() -> dict[str, Tensor]:
        for name, x in ("d_query", q), ("d_key", k), ("d_value", v), ("d_weight", weight):
            gradients[name] = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return gradients

    tensors = tensor_arguments(q, k, v, weight, options) | {"out": out, "lse": lse, "d_out": d_out.contiguous()}
    tensors["d_lse"] = lse if d_lse is None else d_lse.contiguous()
    plan(tensors, allocate_late)
    return tuple(gradients.values())  # type: ignore[return-value]


def choose_one_pass_tiling(queries: int, device: torch.device) -> AdditiveTiling:
    """Choose tiles whose accumulators fill the registers of eight warps per multiprocessor."""
    if device.type != "cuda":
        return INTERPRETER_TILING
    return AdditiveTiling(queries=16 if queries <= 16 else 64)


def plan_one_pass_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    options: AdditiveOptions,
    tiling: AdditiveTiling,
    multiprocessors: int,
    has_d_lse: bool,
) -> LaunchPlan:
    """Plan the prologue, the pass, and the epilogue, which reads only the gradient sums.

    The large workspace arrays are the gradient sums and the exponentials. The gradients are allocated just before the
    epilogue, after the exponentials are freed.
    """
    from foci.kernels.additive.one_pass_backward import additive_one_pass_backward
    from foci.kernels.additive.one_pass_prologue_epilogue import one_pass_prologue

    feature_loop = feature_loop_arguments(q.shape[3], v.shape[3], tiling)
    blocks, wanted = -(-k.shape[2] // tiling.keys) * k.shape[0] * k.shape[1], multiprocessors * tiling.programs
    splits = max(1, min(wanted // blocks, -(-q.shape[2] // tiling.queries)))
    programs = min(blocks * splits, wanted)
    scalars = additive_scalars(q, k, v, weight, options) | tile_arguments(q, v, tiling) | feature_loop
    # A tile of logit gradients stays in shared memory; for float32, the operands of the products leave no space for it.
    shared = q.is_cuda and q.dtype != torch.float32
    scalars |= {"items": blocks * splits, "programs": programs, "splits": splits, "LSE": has_d_lse, "SHARED": shared}
    sizes = exponentials_workspace(q, k, weight, tiling) | {"delta": q.numel() // q.shape[3]}
    scratch = {} if shared else {"scratch": programs * tiling.queries * tiling.keys}
    # Without scratch memory the argument points at any other array and is never read.
    tensor_names = {"scratch": "delta"} if shared else {}
    last_sizes = gradient_sum_sizes(q, k, v, tiling, feature_loop["DW"]) | {"dw": programs * weight.numel()}
    launches = [
        build_kernel_launch(one_pass_prologue, (count_blocks(q, k, tiling),), scalars, num_warps=4),
        build_kernel_launch(additive_one_pass_backward, (programs,), scalars, tensor_names, **tiling.options()),
        epilogue_launch(q, k, v, tiling, scalars),
    ]
    return LaunchPlan(sizes | scratch, q.device, launches, last_sizes=last_sizes)


def gradient_sum_sizes(q: Tensor, k: Tensor, v: Tensor, tiling: AdditiveTiling, width: int) -> dict[str, int]:
    """The sizes of the float32 gradient sums; rows are padded to whole blocks."""
    q_rows = q.shape[0] * q.shape[1] * -(-q.shape[2] // tiling.queries) * tiling.queries
    k_rows = k.shape[0] * k.shape[1] * -(-k.shape[2] // tiling.keys) * tiling.keys
    return {"dq": q_rows * width, "dk": k_rows * width, "dv": v.numel()}


def epilogue_launch(q: Tensor, k: Tensor, v: Tensor, tiling: AdditiveTiling, scalars: dict[str, Any]) -> KernelLaunch:
    """The launch that turns the sums into the gradients of q, k, v and weight."""
    from foci.kernels.additive.one_pass_prologue_epilogue import one_pass_epilogue as kernel

    (B, H, Tq, D), (G, Tk), Dv = q.shape, k.shape[1:3], v.shape[3]
    rows = max(1, 4096 // next_power_of_two(max(D, Dv)))
    scalars = scalars | {
        "q_rows": B * H * Tq, "k_rows": B * G * Tk, "ROWS": rows, "PROGRAM_BLOCK": 32,
        "q_padded": -(-Tq // tiling.queries) * tiling.queries, "k_padded": -(-Tk // tiling.keys) * tiling.keys,
    }  # fmt: skip
    programs = -(-B * H * Tq // rows) + -(-B * G * Tk // rows) + scalars["weights"] * -(-D // 64)
    return build_kernel_launch(kernel, (programs,), scalars, num_warps=4)


def feature_loop_arguments(width: int, value_width: int, tiling: AdditiveTiling) -> dict[str, int]:
    """The loop over features: DC per iteration, DW in all; the threads are JT keys by DT features.

    VC is the number of value features per iteration.
    """
    rest = width % 64
    per_iteration = min(next_power_of_two(width), 32 if 0 < rest <= 32 else 64)
    threads = min(per_iteration, tiling.feature_threads)
    return {
        "DC": per_iteration, "DW": -(-width // per_iteration) * per_iteration,
        "DT": threads, "JT": tiling.warps * 32 // threads, "VC": min(next_power_of_two(value_width), 64),
    }  # fmt: skip

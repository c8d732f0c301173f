"""The deterministic backward of additive attention: one pass for queries and weight, one for keys and values.

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width, Dv value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foci.gpu.additive.arguments import (
    INTERPRETER_TILING,
    AdditiveOptions,
    AdditiveTiling,
    additive_scalars,
    exponentials_launch,
    exponentials_workspace,
    plan_key,
    tensor_arguments,
    tile_arguments,
    to_kernel_layout,
)
from foci.gpu.arguments import next_power_of_two
from foci.gpu.launcher import LaunchPlan, build_kernel_launch, count_multiprocessors, get_or_build_plan


def backward_in_two_passes(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    out: Tensor,
    lse: Tensor,
    options: AdditiveOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, v and weight, the same in every run."""
    q, k, v, weight, options = to_kernel_layout(q, k, v, weight, options)
    tiling = choose_two_pass_tiling(q.shape[2], v.shape[3], q.device)
    programs = count_programs(q, k, tiling)
    plan = get_or_build_plan(
        plan_key(plan_two_pass_backward, q, k, v, weight, options, programs, d_out.dtype),
        lambda: plan_two_pass_backward(q, k, v, weight, options, tiling, programs),
    )
    tensors = tensor_arguments(q, k, v, weight, options) | {"out": out, "lse": lse, "d_out": d_out.contiguous()}
    tensors["d_lse"] = torch.zeros_like(lse) if d_lse is None else d_lse.contiguous()
    dw = torch.zeros((programs[0], *weight.shape), dtype=torch.float32, device=q.device)
    tensors |= {"dq": torch.zeros(q.shape, dtype=torch.float32, device=q.device), "dw": dw}
    gradients: dict[str, Tensor] = {}

    def allocate_late() -> dict[str, Tensor]:
        """Free the float32 sums of the queries before those of the keys are allocated."""
        gradients["d_query"] = tensors.pop("dq").to(q.dtype)
        gradients["dk"] = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
        gradients["dv"] = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        return gradients

    plan(tensors, allocate_late)
    return gradients["d_query"], gradients["dk"].to(k.dtype), gradients["dv"], dw.sum(0).to(weight.dtype)


def choose_two_pass_tiling(queries: int, value_width: int, device: torch.device) -> AdditiveTiling:
    if device.type != "cuda":
        return INTERPRETER_TILING
    if value_width > 256:
        return AdditiveTiling(queries=32, keys=32, query_threads=16, warps=8)
    rows = 16 if queries <= 16 else 32 if queries <= 32 else 64
    if value_width > 128:
        return AdditiveTiling(queries=rows, query_threads=16, warps=8)
    return AdditiveTiling(queries=rows)


def count_programs(q: Tensor, k: Tensor, tiling: AdditiveTiling) -> tuple[int, int]:
    """The number of programs of the query pass and of the key pass."""
    rows, columns = -(-q.shape[2] // tiling.queries) * q.shape[1], -(-k.shape[2] // tiling.keys) * k.shape[1]
    maximum = count_multiprocessors(q.device) * tiling.programs
    return min(rows * q.shape[0], maximum), min(columns * k.shape[0], maximum)


def plan_two_pass_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    options: AdditiveOptions,
    tiling: AdditiveTiling,
    programs: tuple[int, int],
) -> LaunchPlan:
    from foci.kernels.additive.two_pass_backward import additive_key_gradients, additive_query_gradients

    features = min(next_power_of_two(q.shape[3]), 64)
    threads = min(features, 16)
    scalars = additive_scalars(q, k, v, weight, options) | tile_arguments(q, v, tiling)
    scalars |= {"DC": features, "DT": threads, "RT": tiling.warps * 32 // threads}
    tile = tiling.queries * tiling.keys
    scratch = programs[0] * (tile + tiling.keys * features), programs[1] * (tile + tiling.queries * features)
    sizes = exponentials_workspace(q, k, weight, tiling) | {"delta": q.numel() // q.shape[3], "scratch": max(scratch)}
    query_blocks = scalars["pairs"] * -(-q.shape[2] // tiling.queries)
    key_blocks = k.shape[0] * k.shape[1] * -(-k.shape[2] // tiling.keys)
    query_scalars = scalars | {"items": query_blocks, "programs": programs[0]}
    key_scalars = scalars | {"items": key_blocks, "programs": programs[1]}
    launches = [
        exponentials_launch(q, k, tiling, scalars),
        build_kernel_launch(additive_query_gradients, programs[:1], query_scalars, **tiling.options()),
        build_kernel_launch(additive_key_gradients, programs[1:], key_scalars, **tiling.options()),
    ]
    return LaunchPlan({}, q.device, launches, last_sizes=sizes)

"""Run additive attention: choose the forward and the backward kernels of a call.

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width, Dv value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foci.gpu.additive import decode, one_pass_backward, two_pass_backward
from foci.gpu.additive.arguments import (
    INTERPRETER_TILING,
    AdditiveOptions,
    AdditiveTiling,
    additive_scalars,
    allocate_results,
    choose_split_count,
    exponentials_launch,
    exponentials_workspace,
    plan_key,
    split_merge_launches,
    split_workspace,
    tensor_arguments,
    tile_arguments,
    to_kernel_layout,
)
from foci.gpu.launcher import KernelLaunch, LaunchPlan, build_kernel_launch, count_multiprocessors, get_or_build_plan

# Up to this many queries, each query has programs of its own (decode.py).
MAX_DECODE_QUERIES = 4


def forward(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, options: AdditiveOptions, tiling: AdditiveTiling | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the output (B, H, Tq, Dv) and the log-sum-exp (B, H, Tq), in base 2."""
    q, k, v, weight, options = to_kernel_layout(q, k, v, weight, options)
    out, lse = allocate_results(q, v)
    few_queries = q.shape[2] <= MAX_DECODE_QUERIES and tiling is None
    build = decode.plan_decode_forward if few_queries else plan_tiled_forward
    plan = get_or_build_plan(
        plan_key(build, q, k, v, weight, options, tiling), lambda: build(q, k, v, weight, options, out, tiling)
    )
    plan(tensor_arguments(q, k, v, weight, options) | {"out": out, "lse": lse})
    return out, lse


def plan_tiled_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    options: AdditiveOptions,
    out: Tensor,
    tiling: AdditiveTiling | None,
) -> LaunchPlan:
    """Plan the forward for blocks of queries; the tilings of other lengths are compiled with it."""
    pairs, Tq, Tk = q.shape[0] * q.shape[1], q.shape[2], k.shape[2]
    chosen = tiling or choose_forward_tiling(Tq, pairs, v.shape[3], q.dtype, q.device)
    splits = choose_split_count(-(-Tq // chosen.queries) * pairs, -(-Tk // chosen.keys), 1, q.device)
    sizes, tensor_names = split_workspace(splits, out)
    launches = forward_launches(q, k, v, weight, options, out, chosen, splits, tensor_names)
    siblings: list[KernelLaunch] = []
    if tiling is None and q.is_cuda:
        for other in forward_tilings(Tq, v.shape[3], q.dtype):
            siblings += [] if other == chosen else forward_launches(q, k, v, weight, options, out, other, 1, {})
    workspace = exponentials_workspace(q, k, weight, chosen) | sizes
    return LaunchPlan(workspace, q.device, launches, siblings=siblings)


def forward_launches(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, options: AdditiveOptions, out: Tensor,
    tiling: AdditiveTiling, splits: int, tensor_names: dict[str, str],
) -> list[KernelLaunch]:  # fmt: skip
    """The exponentials, the forward, and the merge of its splits."""
    from foci.kernels.additive.forward import additive_forward as kernel

    programs = -(-q.shape[2] // tiling.queries) * q.shape[0] * q.shape[1]
    blocks = -(-k.shape[2] // tiling.keys)
    scalars = additive_scalars(q, k, v, weight, options) | tile_arguments(q, v, tiling)
    scalars |= {"per_split": -(-blocks // splits), "SPLIT": splits > 1}
    attend = build_kernel_launch(kernel, (programs, splits), scalars, tensor_names, **tiling.options())
    return [exponentials_launch(q, k, tiling, scalars), attend, *split_merge_launches(splits, out)]


SMALL_TILINGS = (AdditiveTiling(queries=32), AdditiveTiling(queries=16))


def forward_tilings(queries: int, value_width: int, dtype: torch.dtype) -> tuple[AdditiveTiling, ...]:
    """All tilings of a kind of call, for any number of queries above or up to 16."""
    if queries <= 16:
        return SMALL_TILINGS[1:]
    if value_width > 256:
        return (AdditiveTiling(queries=32, warps=8, query_threads=16),)
    if value_width <= 128:
        return SMALL_TILINGS[0], AdditiveTiling()
    tall = AdditiveTiling(warps=8, query_threads=16)
    return (
        (SMALL_TILINGS[0], tall)
        if dtype == torch.float32
        else (SMALL_TILINGS[0], tall, AdditiveTiling(keys=128, warps=8))
    )


def choose_forward_tiling(
    queries: int, pairs: int, value_width: int, dtype: torch.dtype, device: torch.device
) -> AdditiveTiling:
    """Choose tiles that leave registers for wide values, and small query blocks where there are few queries."""
    if device.type != "cuda":
        return INTERPRETER_TILING
    small, *larger = forward_tilings(queries, value_width, dtype)
    if not larger:
        return small
    programs = -(-queries // 64) * pairs
    # On an H200, 128 of these programs took 0.24 ms; twice as many with half the queries took 0.29 ms.
    if len(larger) > 1 and queries > 32 and programs * 2 > count_multiprocessors(device):
        return larger[1]
    return small if queries <= 32 or programs < count_multiprocessors(device) else larger[0]


def backward(
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
    """Compute the gradients of q, k, v and weight.

    The one-pass kernel adds to the query gradients in no fixed order. The two-pass kernels take twice as long and are
    deterministic; torch.use_deterministic_algorithms(True) selects them. The decode kernel is deterministic, too.
    """
    inputs = d_out, d_lse, q, k, v, weight, out, lse, options
    if q.shape[2] <= MAX_DECODE_QUERIES:
        return decode.decode_backward(*inputs)
    if torch.are_deterministic_algorithms_enabled():
        return two_pass_backward.backward_in_two_passes(*inputs)
    return one_pass_backward.backward_in_one_pass(*inputs)

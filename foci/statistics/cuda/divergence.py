"""Launch the divergence kernels: an indexer, or a student with as many heads, against a teacher without gradients.

B batch, H teacher heads, P student heads, Tq queries, Tk keys, D width of the teacher, E width of the student.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.arguments import HALF_DTYPES, KERNEL_DTYPES, Call
from foci.gpu.arguments import (
    INTERPRETER_TILES,
    Tiling,
    layout_key,
    make_contiguous,
    mask_arguments,
    next_power_of_two,
    stride_arguments,
    with_contiguous_rows,
)
from foci.gpu.launcher import KernelLaunch, LaunchPlan, build_kernel_launch, get_or_build_plan
from foci.masks import kernel_inputs
from foci.masks.base import Mask
from foci.masks.kernel_inputs import KernelMasks
from foci.runtime.device import has_triton
from foci.scores import Dot
from foci.statistics.cuda.arguments import MAX_WIDTH

# A program holds a block of queries (rows) or a block of keys (columns).
QUERY_AXIS, KEY_AXIS = 0, 1
# By dtype and by the larger width, at least 64, for rows and columns: fixed, and independent of the lengths.
HALF_TILINGS = {
    64: (Tiling(128, 64, 8, 3), Tiling(128, 64, 8, 3)),
    128: (Tiling(64, 64, 4, 3), Tiling(128, 64, 8, 3)),
    256: (Tiling(64, 64, 8, 2), Tiling(64, 64, 8, 2)),
}
FLOAT32_TILINGS = {
    64: (Tiling(32, 32, 4, 2), Tiling(32, 32, 4, 2)),
    128: (Tiling(32, 32, 4, 1), Tiling(32, 32, 4, 1)),
    256: (Tiling(16, 16, 4, 1), Tiling(16, 16, 4, 1)),
}
# The programs of a sequence, enough for any GPU, and the fewest tiles of one: an indexer of 8,192 tokens has 64 blocks
# of queries, which are shared by 16 programs each.
PROGRAMS = 1024
LEAST_TILES = 4
INTERPRETER_LEAST_TILES = 1


class Side(NamedTuple):
    """The queries, keys and dot product of one matrix."""

    q: Tensor
    k: Tensor
    scale: float
    softcap: float | None


def refuses(teacher: Call, student: Call, averaged: tuple[bool, bool], keys: Tensor | None) -> list[str]:
    """Why the kernels do not compute this divergence; empty where they do."""
    if student.q.device.type != "cuda":
        return [f"the queries are on {student.q.device.type}, not on cuda"]
    return ["Triton is not installed"] if not has_triton() else refuses_kind(teacher, student, averaged, keys)


def refuses_kind(teacher: Call, student: Call, averaged: tuple[bool, bool], keys: Tensor | None) -> list[str]:
    """The same without asking for the device, which may be Triton's interpreter."""
    reasons = []
    if keys is not None:
        reasons.append("given keys are not supported")
    if averaged[1]:
        reasons.append("the student must not be a mean over heads")
    if student.q.shape[1] != (1 if averaged[0] else teacher.q.shape[1]):
        reasons.append("the student must have as many heads as the teacher")
    if torch.is_grad_enabled() and (teacher.q.requires_grad or teacher.k.requires_grad):
        reasons.append("the teacher must not need gradients")
    for name, call in (("teacher", teacher), ("student", student)):
        if not isinstance(call.score, Dot):
            reasons.append(f"the {name}'s score is not a dot product")
        if call.bias is not None or call.sink is not None or call.positions is not None:
            reasons.append(f"the {name} must have no bias, sink or positions")
        if call.q.dtype not in KERNEL_DTYPES or call.q.dtype != student.q.dtype:
            reasons.append(f"the {name} must be float16, bfloat16 or float32 like the student, got {call.q.dtype}")
        if not 0 < call.q.shape[-1] <= MAX_WIDTH:
            reasons.append(f"widths from 1 to {MAX_WIDTH} are supported")
        if call.is_transformed:
            reasons.append("torch.func is not supported")
    if min(teacher.q.numel(), teacher.k.numel(), student.q.numel(), student.k.numel()) == 0:
        reasons.append("the input is empty")
    if not reasons and not is_same_mask(teacher.mask, student.mask):
        reasons.append("teacher and student must have the same mask")
    return reasons or kernel_inputs.refuses(student)


def is_same_mask(a: Mask | None, b: Mask | None) -> bool:
    """Whether two masks hide the same keys of all heads, as far as can be told without reading tensors."""
    if a is None or b is None:
        return a is b
    tensors: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    described = [kernel_inputs.describe_mask(mask, found) for mask, found in zip((a, b), tensors, strict=True)]
    if None in described or described[0] != described[1]:
        return False
    memory = [{name: (x.data_ptr(), layout_key(x)) for name, x in found.items()} for found in tensors]
    return memory[0] == memory[1]


def compute_divergence(
    teacher: Call,
    student: Call,
    averaged: bool,
    lse: tuple[Tensor | None, Tensor | None],
    compute_again: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """What `statistics.divergence.compute_divergence` returns, for a call that `refuses` accepts.

    `lse` are the log-sum-exps of both sides where they are known. `compute_again` computes the divergence from the
    student's queries and keys in a way that can be differentiated twice.
    """
    masks = kernel_inputs.build_kernel_masks(student)
    sides = as_side(teacher), as_side(student)
    teacher_lse, student_lse = (
        compute_lse(side, masks) if known is None else known.detach().contiguous()
        for side, known in zip(sides, lse, strict=True)
    )
    inputs = (student.q, student.k, teacher_lse, student_lse, *sides, masks, averaged, compute_again)
    divergence = DivergenceFunction.apply(*inputs)  # type: ignore[no-untyped-call]
    seen = teacher_lse > -torch.inf
    counted = seen.any(1, keepdim=True) if averaged else seen
    return divergence, counted, torch.zeros_like(counted)


def as_side(call: Call) -> Side:
    assert isinstance(call.score, Dot)
    q, k = map(with_contiguous_rows, (call.q.detach(), call.k.detach()))
    return Side(q, k, call.score.factor(q.shape[-1]), call.score.softcap)


class DivergenceFunction(torch.autograd.Function):
    """The divergence of each query; the teacher gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        lse: Tensor,
        student_lse: Tensor,
        teacher: Side,
        student: Side,
        masks: KernelMasks,
        averaged: bool,
        compute_again: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        needs_gradient = any(ctx.needs_input_grad)
        batch, heads, queries, width = student.q.shape
        parts = count_parts(teacher, student, QUERY_AXIS)[0]
        divergence = q.new_empty((parts, batch, heads, queries), dtype=torch.float32)
        d_q = q.new_empty((parts, batch, heads, queries, width) if needs_gradient else (1,), dtype=torch.float32)
        tensors = kernel_tensors(teacher, student, masks, lse, student_lse) | {"divergence": divergence, "d_q": d_q}
        key = plan_key("forward", teacher, student, masks, averaged, needs_gradient)
        get_or_build_plan(key, lambda: plan_forward(teacher, student, masks, averaged, needs_gradient))(tensors)
        ctx.save_for_backward(q, k, lse, student_lse, add_parts(d_q))
        ctx.sides, ctx.masks, ctx.averaged, ctx.compute_again = (teacher, student), masks, averaged, compute_again
        return add_parts(divergence)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        q, k, lse, student_lse, d_q = ctx.saved_tensors
        teacher, student = ctx.sides
        if torch.is_grad_enabled():
            return (*differentiate_twice(ctx.compute_again, q, k, slopes), *[None] * 7)
        slopes = slopes.to(torch.float32).contiguous()
        found: list[Tensor | None] = [None, None]
        if ctx.needs_input_grad[0]:
            found[0] = (d_q * slopes.unsqueeze(-1)).to(q.dtype)
        if ctx.needs_input_grad[1]:
            batch, heads, keys, width = q.shape[0], q.shape[1], k.shape[2], k.shape[3]
            parts = count_parts(teacher, student, KEY_AXIS)[0]
            d_k = k.new_empty((parts, batch, heads, keys, width), dtype=torch.float32)
            tensors = kernel_tensors(teacher, student, ctx.masks, lse, student_lse) | {"slopes": slopes, "d_k": d_k}
            key = plan_key("keys", teacher, student, ctx.masks, ctx.averaged, True)
            get_or_build_plan(key, lambda: plan_keys(teacher, student, ctx.masks, ctx.averaged))(tensors)
            found[1] = add_parts(d_k).view(batch, k.shape[1], -1, keys, width).sum(2).to(k.dtype)
        return (*found, *[None] * 7)


def differentiate_twice(
    compute_again: Callable[[Tensor, Tensor], Tensor], q: Tensor, k: Tensor, slopes: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of a computation that can be differentiated again."""
    inputs = [x for x in (q, k) if x.requires_grad]
    gradients = iter(torch.autograd.grad(compute_again(q, k), inputs, slopes, create_graph=True))
    return tuple(next(gradients) if x.requires_grad else None for x in (q, k))


def add_parts(x: Tensor) -> Tensor:
    return x[0] if len(x) == 1 else x.sum(0)


def kernel_tensors(
    teacher: Side, student: Side, masks: KernelMasks, lse: Tensor, student_lse: Tensor
) -> dict[str, Tensor]:
    """The tensors of all kernels by name; lse stands for missing ones, which no kernel reads."""
    sides = {"q": teacher.q, "k": teacher.k, "lse": lse}
    sides |= {"student_q": student.q, "student_k": student.k, "student_lse": student_lse}
    given = make_contiguous(masks.key_ranges, masks.query_ids, masks.key_ids)
    names = "key_ranges", "query_ids", "key_ids"
    return sides | {name: lse if x is None else x for name, x in zip(names, given, strict=True)}


def plan_key(name: str, teacher: Side, student: Side, masks: KernelMasks, *flags: bool) -> Any:
    tensors = (teacher.q, teacher.k, student.q, student.k, masks.key_ranges, masks.query_ids, masks.key_ids)
    numbers = teacher.scale, teacher.softcap, student.scale, student.softcap, masks.causal, student.q.device
    return ("divergence", name, *map(layout_key, tensors), *numbers, *flags)


def compute_lse(side: Side, masks: KernelMasks) -> Tensor:
    """The log-sum-exp of a side (B, H, Tq)."""
    lse = side.q.new_empty(side.q.shape[:3], dtype=torch.float32)
    key = plan_key("lse", side, side, masks)
    get_or_build_plan(key, lambda: plan_lse(side, masks))(kernel_tensors(side, side, masks, lse, lse))
    return lse


def plan_lse(side: Side, masks: KernelMasks) -> LaunchPlan:
    from foci.kernels.divergence import row_lse

    tiling = choose_tiling(side, side, QUERY_AXIS)
    batch, heads, queries, _ = side.q.shape
    scalars = kernel_scalars(side, side, masks, False, tiling)
    grid = (-(-queries // tiling.queries) * batch * heads,)
    return LaunchPlan({}, side.q.device, [build(row_lse, grid, scalars, tiling)])


def plan_forward(teacher: Side, student: Side, masks: KernelMasks, averaged: bool, needs_gradient: bool) -> LaunchPlan:
    from foci.kernels.divergence import row_divergence

    tiling = choose_tiling(teacher, student, QUERY_AXIS)
    parts, tiles = count_parts(teacher, student, QUERY_AXIS)
    scalars = kernel_scalars(teacher, student, masks, averaged, tiling) | {"GRADIENT": needs_gradient, "tiles": tiles}
    batch, heads, queries, _ = student.q.shape
    grid = (-(-queries // tiling.queries) * batch * heads, parts)
    return LaunchPlan({}, student.q.device, [build(row_divergence, grid, scalars, tiling)])


def plan_keys(teacher: Side, student: Side, masks: KernelMasks, averaged: bool) -> LaunchPlan:
    from foci.kernels.divergence import key_gradients

    tiling = choose_tiling(teacher, student, KEY_AXIS)
    parts, tiles = count_parts(teacher, student, KEY_AXIS)
    scalars = kernel_scalars(teacher, student, masks, averaged, tiling) | {"tiles": tiles}
    grid = (-(-student.k.shape[2] // tiling.keys) * student.q.shape[0] * student.q.shape[1], parts)
    return LaunchPlan({}, student.q.device, [build(key_gradients, grid, scalars, tiling)])


def build(kernel: Any, grid: tuple[int, ...], scalars: dict[str, Any], tiling: Tiling) -> KernelLaunch:
    return build_kernel_launch(kernel, grid, scalars, **tiling.options())


def count_parts(teacher: Side, student: Side, axis: int) -> tuple[int, int]:
    """How many programs share a block of queries or of keys, and the tiles of each.

    They depend on lengths and heads only, so that a sequence gives the same result in every batch.
    """
    tiling = choose_tiling(teacher, student, axis)
    tiles = -(-student.q.shape[2] // tiling.queries), -(-student.k.shape[2] // tiling.keys)
    blocks, loop = tiles if axis == QUERY_AXIS else tiles[::-1]
    least = LEAST_TILES if student.q.device.type == "cuda" else INTERPRETER_LEAST_TILES
    parts = max(min(PROGRAMS // (blocks * student.q.shape[1]), loop // least), 1)
    each = -(-loop // parts)
    return -(-loop // each), each


def choose_tiling(teacher: Side, student: Side, axis: int) -> Tiling:
    if student.q.device.type == "cpu":
        return INTERPRETER_TILES
    width = max(next_power_of_two(side.q.shape[-1], 64) for side in (teacher, student))
    return (HALF_TILINGS if student.q.dtype in HALF_DTYPES else FLOAT32_TILINGS)[width][axis]


def kernel_scalars(teacher: Side, student: Side, masks: KernelMasks, averaged: bool, tiling: Tiling) -> dict[str, Any]:
    """The scalars of all three kernels; each takes those that it names."""
    q, k, student_q, student_k = teacher.q, teacher.k, student.q, student.k
    return {
        "H": q.shape[1], "P": student_q.shape[1], "group": q.shape[1] // k.shape[1],
        "student_group": student_q.shape[1] // student_k.shape[1],
        "Tq": q.shape[2], "Tk": k.shape[2], "D": q.shape[3], "E": student_q.shape[3],
        **stride_arguments("q", q, "query"), **stride_arguments("k", k, "key"),
        **stride_arguments("student_q", student_q, "query"), **stride_arguments("student_k", student_k, "key"),
        **mask_arguments(masks.key_ranges, masks.query_ids, masks.key_ids, None), "CAUSAL": masks.causal,
        "scale": teacher.scale, "softcap": float(teacher.softcap or 0.0),
        "student_scale": student.scale, "student_softcap": float(student.softcap or 0.0),
        "MEAN": averaged, "SOFTCAP": teacher.softcap is not None, "STUDENT_SOFTCAP": student.softcap is not None,
        "PRECISION": "ieee" if student_q.dtype == torch.float32 else "tf32",
        **tiling.sizes(),
        "BD": next_power_of_two(q.shape[3]), "BE": next_power_of_two(student_q.shape[3]),
    }  # fmt: skip

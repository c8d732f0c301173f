"""The divergence of two matrices, as an operator of PyTorch while tracing; see operators.py.

B batch, H heads (1 for the mean over heads), Tq queries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foci.arguments import Call
from foci.runtime.operators import operator
from foci.runtime.tracing import enable_autograd_in_operator
from foci.statistics import divergence as streaming
from foci.weights.encoding import EncodedCall, decode_call, encode_call
from foci.weights.operators import CALL_SCHEMA, is_operator_call, own_memory, softmax_dtype

TEACHER_SCHEMA = ", ".join(argument.replace(" ", " teacher_") for argument in CALL_SCHEMA.split(", "))
PAIR_SCHEMA = f"Tensor[] keys, {TEACHER_SCHEMA}, {CALL_SCHEMA}"
# The number of arguments of an encoded call.
SIDE_LENGTH = 6

# Two encoded calls, the teacher and the student, each followed by whether it is averaged.
Sides = tuple[Any, ...]


def compute_divergence(
    teacher: Call, student: Call, averaged: tuple[bool, bool], keys: Tensor | None, lse: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """`statistics.divergence.compute_divergence`, as an operator while tracing."""
    if not is_operator_call(teacher, teacher.q) or not is_operator_call(student, student.q):
        return streaming.compute_divergence(teacher, student, averaged, keys, lse)
    sides = (*encode_call(teacher), averaged[0], *encode_call(student), averaged[1])
    found: tuple[Tensor, Tensor, Tensor] = divergence_operator([] if keys is None else [keys], *sides)
    return found


def run_encoded(keys: list[Tensor], sides: Sides) -> tuple[Tensor, Tensor, Tensor]:
    (*teacher, teacher_averaged), (*student, student_averaged) = sides[:SIDE_LENGTH], sides[SIDE_LENGTH:]
    calls = decode_call(EncodedCall(*teacher)), decode_call(EncodedCall(*student))
    return streaming.compute_divergence(*calls, (teacher_averaged, student_averaged), keys[0] if keys else None)


@operator("divergence", f"({PAIR_SCHEMA}) -> (Tensor, Tensor, Tensor)")
def divergence_operator(keys: list[Tensor], *sides: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the divergence of each query, whether it sees a key, and whether a key is hidden from the student."""
    divergence, counted, hidden = run_encoded(keys, sides)
    return own_memory(divergence), own_memory(counted), own_memory(hidden)


@divergence_operator.register_fake
def _(keys: list[Tensor], *sides: Any) -> tuple[Tensor, Tensor, Tensor]:
    teacher, student = sides[0], sides[SIDE_LENGTH]
    heads = [1 if sides[SIDE_LENGTH - 1] else teacher.shape[1], 1 if sides[-1] else student.shape[1]]
    shape = (student.shape[0], heads[1] if heads[0] == 1 else heads[0], student.shape[2])
    dtype = torch.promote_types(softmax_dtype(teacher), softmax_dtype(student))
    flags = (student.new_empty(shape, dtype=torch.bool) for _ in range(2))
    return student.new_empty(shape, dtype=dtype), *flags


@operator("divergence_backward", f"(Tensor slope, bool[] needed, {PAIR_SCHEMA}) -> Tensor[]")
def divergence_backward(slope: Tensor, needed: list[bool], keys: list[Tensor], *sides: Any) -> list[Tensor]:
    """Compute the gradients of the queries, keys and other tensors of both sides that need one."""
    with enable_autograd_in_operator():
        pairs = zip(list_tensors(sides), needed, strict=True)
        leaves = [x.detach().requires_grad_(need) for x, need in pairs]
        found, _, _ = run_encoded(keys, replace_tensors(sides, leaves))
        chosen = [leaf for leaf in leaves if leaf.requires_grad]
        gradients = torch.autograd.grad(found, chosen, slope, materialize_grads=True)
    return [own_memory(gradient) for gradient in gradients]


@divergence_backward.register_fake
def _(slope: Tensor, needed: list[bool], keys: list[Tensor], *sides: Any) -> list[Tensor]:
    pairs = zip(list_tensors(sides), needed, strict=True)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x, need in pairs if need]


def list_tensors(sides: Sides) -> list[Any]:
    """The query, key and other tensors of both sides, or what else stands in their places."""
    listed = []
    for start in (0, SIDE_LENGTH):
        q, k, tensors = sides[start : start + 3]
        listed += [q, k, *tensors]
    return listed


def replace_tensors(sides: Sides, tensors: list[Any]) -> Sides:
    """The sides with other tensors, in the order of `list_tensors`."""
    replaced: list[Any] = list(sides)
    for start in (0, SIDE_LENGTH):
        count = 2 + len(sides[start + 2])
        (q, k, *others), tensors = tensors[:count], tensors[count:]
        replaced[start : start + 3] = [q, k, others]
    return tuple(replaced)


def save_sides(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    keys, *sides = inputs
    tensors = list_tensors(tuple(sides))
    ctx.sides = replace_tensors(tuple(sides), [None] * len(tensors))
    ctx.save_for_backward(*keys, *tensors)


def differentiate(ctx: Any, slope: Tensor, *unused: Any) -> tuple[Any, ...]:
    count = len(list_tensors(ctx.sides))
    saved = ctx.saved_tensors
    keys, tensors = list(saved[: len(saved) - count]), list(saved[len(saved) - count :])
    needed = [bool(need) for need in list_tensors(ctx.needs_input_grad[1:])]
    found = iter(divergence_backward(slope, needed, keys, *replace_tensors(ctx.sides, tensors)))
    placed = [next(found) if need else None for need in needed]
    gradients = replace_tensors(tuple(x if i % SIDE_LENGTH == 2 else None for i, x in enumerate(ctx.sides)), placed)
    return [None] * len(keys), *gradients


divergence_operator.register_autograd(differentiate, setup_context=save_sides)

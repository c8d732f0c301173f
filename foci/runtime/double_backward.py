"""Double backward: for a backward that is differentiated again (create_graph=True) or recomputes its forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T", Tensor, Tensor | None)


def make_distinct_views(*tensors: T) -> list[T]:
    """A view of each tensor, with its graph, so that each gets its own gradient.

    Two of the tensors may be the same one, or one may be computed from the other.
    """
    with torch.enable_grad():
        return [x if x is None or not x.requires_grad else x.view_as(x) for x in tensors]


def forbid_double_backward(gradients: Sequence[Tensor | None], *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of a kernel without double backward: differentiating them raises instead of giving zeros."""
    if not torch.is_grad_enabled():
        return tuple(gradients)
    return ForbidDoubleBackward.apply(len(gradients), *gradients, *inputs)  # type: ignore[no-any-return, no-untyped-call]


class ForbidDoubleBackward(torch.autograd.Function):
    """Connects gradients with the tensors they were computed from, and raises in its backward.

    PyTorch's once_differentiable has no such connection: torch.autograd.grad never reaches its error.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "backend must be 'blocked' or 'reference' for gradients of gradients (create_graph=True), got 'triton'"
        )

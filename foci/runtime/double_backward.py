"""What a backward needs that somebody differentiates in turn (create_graph=True), or that runs its forward again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T", Tensor, Tensor | None)


def make_distinct_views(*tensors: T) -> list[T]:
    """Each under another name, with its graph: what it gets is its own, also where two of them are the same tensor,
    or one was made from the other.
    """
    with torch.enable_grad():
        return [x if x is None or not x.requires_grad else x.view_as(x) for x in tensors]


def forbid_double_backward(gradients: Sequence[Tensor | None], *made_from: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of a kernel that has no second ones: whoever asks for those is refused, not given zeros."""
    if not torch.is_grad_enabled():
        return tuple(gradients)
    return ForbidDoubleBackward.apply(len(gradients), *gradients, *made_from)  # type: ignore[no-any-return, no-untyped-call]


class ForbidDoubleBackward(torch.autograd.Function):
    """Stands between gradients and what they were made from. PyTorch's once_differentiable is not connected with that:
    torch.autograd.grad never meets its error.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "expected a backend whose gradients have gradients, backend='blocked' or backend='reference',"
            " but got backend='triton'"
        )

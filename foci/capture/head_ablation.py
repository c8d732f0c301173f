"""Zeros the outputs of ablated heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foci.capture.errors import CaptureError


def zero_heads(out: Tensor, heads: list[int] | None, axis: int, name: str) -> Tensor:
    """Zeros the output of some heads; None zeros all of them."""
    if heads is None:
        return torch.zeros_like(out)
    if not heads:
        return out
    if max(heads) >= out.shape[axis]:
        raise CaptureError(f"ablate must name heads below {out.shape[axis]} of {name}, got H{max(heads)}")
    return out.index_fill(axis, torch.tensor(heads, device=out.device), 0.0)


def zero_heads_of_result(result: Any, has_weights: bool, ablated: list[int] | None, name: str) -> Any:
    """Zeros heads in a result of `foci.attention`: an output, or an output with weights."""
    if ablated == []:
        return result
    out = result[0] if has_weights else result
    # (T, D) and (B, T, D) have no head axis: their only head is number 0.
    zeroed = (
        zero_heads(out, ablated, -3, name)
        if out.dim() > 3
        else zero_heads(out.unsqueeze(0), ablated, 0, name).squeeze(0)
    )
    return (zeroed, result[1]) if has_weights else zeroed


def zero_heads_of_output(out: Tensor, ablated: list[int] | None, name: str) -> Tensor:
    zeroed: Tensor = zero_heads_of_result(out, False, ablated, name)
    return zeroed

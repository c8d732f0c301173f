"""Correctness gates: a contestant that fails one is not timed.

The truth is computed in float64 on the inputs that are timed. It covers some queries, one from each part of the
sequence, and all keys: with an output gradient that is zero for the other queries, these rows determine the
gradients of all queries, keys and values.

B batch, H heads, R some of the queries, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from peers import Attend, Case
from torch import Tensor

import foci

ROWS = 64

# In addition to twice the error of eager code in the same dtype: about half a unit in the last place of the output.
FLOOR = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


class GateError(Exception):
    """A contestant computes a wrong result."""


def row_error(found: Tensor, truth: Tensor) -> float:
    """The largest error of a row relative to its norm plus a tenth of the typical norm."""
    sizes = truth.norm(dim=-1)
    usual = sizes.square().mean().sqrt()
    return float(((found.to(truth.dtype) - truth).norm(dim=-1) / (sizes + 0.1 * usual)).max())


def gradient_error(found: Tensor, truth: Tensor) -> float:
    """The larger of the error of the whole tensor and of its worst row, relative to the largest row.

    A query with one visible key has gradient 0 as the difference of two large numbers, so its own norm is not a scale.
    """
    error = found.to(truth.dtype) - truth
    return max(float(error.norm() / truth.norm()), float(error.norm(dim=-1).max() / truth.norm(dim=-1).max()))


def error_of(name: str, found: Tensor, truth: Tensor) -> float:
    return row_error(found, truth) if name == "out" else gradient_error(found, truth)


@dataclass
class Gate:
    """The true output and gradients for some inputs, and the allowed errors."""

    q: Tensor
    k: Tensor
    v: Tensor
    rows: Tensor  # (R,)
    out_gradient: Tensor  # the gradient of the output, zero outside the rows: (B, H, Tq, D)
    truth: dict[str, Tensor]
    allowed: dict[str, float]

    @classmethod
    def of(cls, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Gate:
        """The gate for the inputs of one case."""
        rows = sample_rows(case.queries, q.device)
        out_gradient = torch.zeros(*q.shape[:3], v.shape[-1], device=q.device, dtype=q.dtype)
        out_gradient[:, :, rows] = torch.randn_like(out_gradient[:, :, rows])
        visible = case.visible(rows)
        few = (q[:, :, rows], k, v, out_gradient[:, :, rows])
        reference = cast(Attend, partial(foci.attention, mask=visible, backend="reference"))
        truth = output_and_gradients(reference, *(t.double() for t in few))
        eager = output_and_gradients(partial(eager_attention, visible=visible), *few)
        allowed = {name: 2 * error_of(name, eager[name], truth[name]) + FLOOR[q.dtype] for name in truth}
        truth["dq"] = torch.zeros_like(q, dtype=torch.float64).index_copy(2, rows, truth["dq"])
        return cls(q, k, v, rows, out_gradient, truth, allowed)

    def check_forward(self, attend: Attend) -> None:
        """Raise if the output is wrong."""
        with torch.no_grad():
            self.check_error("out", attend(self.q, self.k, self.v)[:, :, self.rows])

    def check_backward(self, attend: Attend) -> None:
        """Raise if a gradient is wrong."""
        leaves = [t.detach().requires_grad_() for t in (self.q, self.k, self.v)]
        gradients = torch.autograd.grad(attend(*leaves), leaves, self.out_gradient)
        for name, found in zip(("dq", "dk", "dv"), gradients, strict=True):
            self.check_error(name, found)

    def check_error(self, name: str, found: Tensor) -> None:
        truth = self.truth[name]
        if found.shape != truth.shape:
            raise GateError(f"{name} has shape {tuple(found.shape)}, expected {tuple(truth.shape)}")
        error = error_of(name, found, truth)
        # Written this way, NaN fails.
        if not error <= self.allowed[name]:
            raise GateError(f"{name} is off by {error:.2e}, allowed {self.allowed[name]:.2e}")


def sample_rows(length: int, device: torch.device) -> Tensor:
    """A random row from each part of the sequence; the last row is always included."""
    count = min(ROWS, length)
    edges = torch.arange(count + 1, dtype=torch.float64) * length / count
    starts, ends = edges[:-1].ceil(), edges[1:].ceil()
    rows = (starts + (torch.rand(count) * (ends - starts)).floor()).long()
    rows[-1] = length - 1
    return rows.to(device)


def output_and_gradients(attend: Attend, q: Tensor, k: Tensor, v: Tensor, out_gradient: Tensor) -> dict[str, Tensor]:
    """Output and gradients."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = attend(*leaves)
    dq, dk, dv = torch.autograd.grad(out, leaves, out_gradient)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def eager_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """Attention in eager code, in the dtype of the inputs: its error is the scale for the others."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores: Tensor = q @ k.mT * q.shape[-1] ** -0.5
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ v

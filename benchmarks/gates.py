"""The correctness gates: a contestant that fails one gets no figure.

The truth is computed in float64 on the very inputs that are timed. For the attention it covers some queries, one of
each stretch of the sequence, and all keys: with a gradient that reaches only these queries, the gradients of all
queries, keys and values are known from the same few rows.

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

# On top of twice the error of plain code in the same dtype: about half a unit in the last place of the output.
FLOOR = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


class GateError(Exception):
    """A contestant that computes something else."""


def row_error(found: Tensor, truth: Tensor) -> float:
    """The largest error of a row beside that row's size, to which a tenth of the usual size is added."""
    sizes = truth.norm(dim=-1)
    usual = sizes.square().mean().sqrt()
    return float(((found.to(truth.dtype) - truth).norm(dim=-1) / (sizes + 0.1 * usual)).max())


def gradient_error(found: Tensor, truth: Tensor) -> float:
    """The error of the whole, or of its worst row beside the largest one, whichever is larger.

    A query that sees one key has gradient 0 as the difference of two large numbers: its own size is no measure.
    """
    error = found.to(truth.dtype) - truth
    return max(float(error.norm() / truth.norm()), float(error.norm(dim=-1).max() / truth.norm(dim=-1).max()))


def error_of(name: str, found: Tensor, truth: Tensor) -> float:
    return row_error(found, truth) if name == "out" else gradient_error(found, truth)


@dataclass
class Gate:
    """What output and gradients must be on these inputs, and how far off a contestant may be."""

    q: Tensor
    k: Tensor
    v: Tensor
    rows: Tensor  # (R,)
    slope: Tensor  # the gradient of the output, zero outside the rows: (B, H, Tq, D)
    truth: dict[str, Tensor]
    allowed: dict[str, float]

    @classmethod
    def of(cls, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Gate:
        """The gate for one case's inputs."""
        rows = stretches(case.queries, q.device)
        slope = torch.zeros(*q.shape[:3], v.shape[-1], device=q.device, dtype=q.dtype)
        slope[:, :, rows] = torch.randn_like(slope[:, :, rows])
        visible = case.visible(rows)
        few = (q[:, :, rows], k, v, slope[:, :, rows])
        reference = cast(Attend, partial(foci.attention, mask=visible, backend="reference"))
        truth = solved(reference, *(t.double() for t in few))
        eager = solved(partial(plain, visible=visible), *few)
        allowed = {name: 2 * error_of(name, eager[name], truth[name]) + FLOOR[q.dtype] for name in truth}
        truth["dq"] = torch.zeros_like(q, dtype=torch.float64).index_copy(2, rows, truth["dq"])
        return cls(q, k, v, rows, slope, truth, allowed)

    def check_forward(self, attend: Attend) -> None:
        """Raises where the output is another one."""
        with torch.no_grad():
            self.judge("out", attend(self.q, self.k, self.v)[:, :, self.rows])

    def check_backward(self, attend: Attend) -> None:
        """Raises where a gradient is another one."""
        leaves = [t.detach().requires_grad_() for t in (self.q, self.k, self.v)]
        gradients = torch.autograd.grad(attend(*leaves), leaves, self.slope)
        for name, found in zip(("dq", "dk", "dv"), gradients, strict=True):
            self.judge(name, found)

    def judge(self, name: str, found: Tensor) -> None:
        truth = self.truth[name]
        if found.shape != truth.shape:
            raise GateError(f"{name} has shape {tuple(found.shape)}, expected {tuple(truth.shape)}")
        error = error_of(name, found, truth)
        # Asked this way round, NaN fails.
        if not error <= self.allowed[name]:
            raise GateError(f"{name} is off by {error:.2e}, allowed {self.allowed[name]:.2e}")


def stretches(length: int, device: torch.device) -> Tensor:
    """A random row of each stretch, the last row among them."""
    count = min(ROWS, length)
    edges = torch.arange(count + 1, dtype=torch.float64) * length / count
    starts, ends = edges[:-1].ceil(), edges[1:].ceil()
    rows = (starts + (torch.rand(count) * (ends - starts)).floor()).long()
    rows[-1] = length - 1
    return rows.to(device)


def solved(attend: Attend, q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> dict[str, Tensor]:
    """Output and gradients."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = attend(*leaves)
    dq, dk, dv = torch.autograd.grad(out, leaves, slope)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def plain(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """Attention as anybody would write it, in the dtype of the inputs: the measure of a fair error."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores: Tensor = q @ k.mT * q.shape[-1] ** -0.5
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ v

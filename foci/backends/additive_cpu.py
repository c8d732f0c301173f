"""The scores wᵀ tanh(q + k) of a strip on a CPU, from exponentials that are taken once per query and once per key.

tanh(a + b) = 1 - 2 / (1 + e^2a e^2b), so a term costs a product, a sum and a quotient. Compiled C does it where there
is a compiler, small blocks in torch where not. Where e^2a is no float of full precision, the formula is taken as it is.

B batch, H heads, G key heads, R queries, C keys, D width, r and c queries and keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foci.arguments import Call
from foci.backends import additive_cpu_c
from foci.runtime.checks import is_unreadable
from foci.runtime.double_backward import apart
from foci.scores import Additive

# Up to here e^2a and e^-2a are floats of full precision.
NEAR = 43.0

# Terms of a block in torch, and its rows: what stays in a core's cache.
TERMS = 2**19
ROWS = 32

PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class Quick(Additive):
    """The same score, computed here."""

    def raw(self, q: Tensor, k: Tensor) -> Tensor:
        if 0 in q.shape or 0 in k.shape:
            return Additive(self.weight).raw(q, k)
        weight = self.weight.to(q.dtype).expand(q.shape[1], q.shape[3])
        return Scores.apply(q, k, weight)  # type: ignore[no-any-return, no-untyped-call]


def quickened(call: Call) -> Call:
    """The call with its additive score computed here, where it is one that this serves.

    Whoever looks through operations (a compiler, torch.func) is given those of the formula.
    """
    if type(call.score) is not Additive or call.wide != torch.float32 or call.q.device.type != "cpu":
        return call
    unusual = any(type(tensor) not in PLAIN for tensor in (call.q, call.k, call.score.weight))
    if unusual or is_unreadable(call.q) or call.transformed:
        return call
    return replace(call, score=Quick(call.score.weight))


class Scores(torch.autograd.Function):
    """Keeps the inputs alone; a gradient that shall have a gradient itself is that of the formula."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, weight)
        if additive_cpu_c.refusal() is None:
            return additive_cpu_c.scores(q, k, weight)
        return in_blocks(q, k, weight)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        q, k, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            q, k, weight = apart(q, k, weight)
            with torch.enable_grad():
                wanted = [tensor for tensor in (q, k, weight) if tensor.requires_grad]
                found = iter(torch.autograd.grad(Additive(weight).raw(q, k), wanted, slopes, create_graph=True))
            return tuple(next(found) if tensor.requires_grad else None for tensor in (q, k, weight))
        if additive_cpu_c.refusal() is None:
            return additive_cpu_c.gradients(q, k, weight, slopes, is_near(q, k))
        return gradients_in_blocks(q, k, weight, slopes)


def is_near(q: Tensor, k: Tensor) -> bool:
    """Whether all exponentials are floats of full precision; NaN is not."""
    return all(float(edge.abs()) <= NEAR for x in (q.detach(), k.detach()) for edge in x.aminmax())


def in_blocks(q: Tensor, k: Tensor, weight: Tensor) -> Tensor:
    """(B, H, R, D), (B, G, C, D) and (H, D) -> (B, H, R, C)."""
    scores = q.new_empty(*q.shape[:3], k.shape[2])
    near = is_near(q, k)
    left, right = ((2.0 * q).exp_(), (2.0 * k).exp_()) if near else (q, k)
    room = room_of(q, k)
    for place, columns in blocks(q, k):
        b, h, rows = place
        x = shares(left[place], right[b, h * k.shape[1] // q.shape[1], columns], near, room)
        scores[b, h, rows, columns] = (x.flatten(0, 1) @ weight[h]).view(x.shape[:2])
    return torch.add(weight.sum(-1).view(-1, 1, 1), scores, alpha=-2.0)


def shares(left: Tensor, right: Tensor, near: bool, room: Tensor) -> Tensor:
    """1 / (1 + e^2(q + k)), which is half of 1 - tanh(q + k): (r, D) and (c, D) -> (r, c, D), in the given room."""
    x = room[: left.shape[0] * right.numel()].view(left.shape[0], *right.shape)
    left = left.unsqueeze(1)
    if near:
        return torch.addcmul(left.new_ones(()), left, right, out=x).reciprocal_()
    return torch.add(left, right, out=x).tanh_().mul_(-0.5).add_(0.5)


def gradients_in_blocks(q: Tensor, k: Tensor, weight: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With the shares s: sums of slope 4 w (s - s²) for queries and keys, and of slope (1 - 2 s) for the weight."""
    near = is_near(q, k)
    left, right = ((2.0 * q).exp_(), (2.0 * k).exp_()) if near else (q, k)
    room = room_of(q, k)
    d_q, d_k, d_weight = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(weight)
    for place, columns in blocks(q, k):
        b, h, rows = place
        key_place = b, h * k.shape[1] // q.shape[1], columns
        x = shares(left[place], right[key_place], near, room)
        slope = slopes[b, h, rows, columns].unsqueeze(-1)
        d_weight[h] += slope.flatten() @ x.flatten(0, 1)
        x.addcmul_(x, x, value=-1.0).mul_(slope)
        d_q[place] += x.sum(1) * weight[h]
        d_k[key_place] += x.sum(0) * weight[h]
    return d_q.mul_(4.0), d_k.mul_(4.0), slopes.sum((0, 2, 3)).unsqueeze(-1) - 2.0 * d_weight


def block_size(q: Tensor, k: Tensor) -> tuple[int, int]:
    rows = min(ROWS, q.shape[2])
    return rows, min(max(TERMS // (rows * q.shape[3]), 1), k.shape[2])


def room_of(q: Tensor, k: Tensor) -> Tensor:
    """For the terms of any block: memory that is new for each of them costs more than what is done in it."""
    rows, columns = block_size(q, k)
    return q.new_empty(rows * columns * q.shape[3])


def blocks(q: Tensor, k: Tensor) -> Iterator[tuple[tuple[int, int, slice], slice]]:
    """Some queries of a head and some keys at a time, few enough to stay in cache."""
    batch, heads, queries, _ = q.shape
    rows, step = block_size(q, k)
    for b in range(batch):
        for h in range(heads):
            for row in range(0, queries, rows):
                for column in range(0, k.shape[2], step):
                    yield (b, h, slice(row, row + rows)), slice(column, column + step)

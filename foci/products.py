"""Products with the lazy matrix: W x is attention with other values, Wᵀ x adds up by key.

B batch, H heads, Tq queries, Tk keys, E width of x.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from foci import backends, statistics
from foci.arguments import Call
from foci.statistics.strips import finite


def forward(call: Call, lead: tuple[int, ...], x: Tensor, averaged: bool) -> Tensor:
    """W x: (..., Tk, E) -> (..., Tq, E); a vector (Tk,) gives (..., Tq)."""
    values, vector = fitted(call, lead, x, call.k.shape[2], "W @ x", averaged)
    same_heads = values.shape[1] == call.q.shape[1] and call.group > 1
    k = call.k.repeat_interleave(call.group, dim=1) if same_heads else call.k
    if values.shape[1] == 1 and call.k.shape[1] > 1:
        values = values.expand(-1, call.k.shape[1], -1, -1)
    product = replace(call, k=k, v=values.to(call.q.dtype), needs_lse=call.sink is not None)
    out, lse = backends.run(product, None)
    if call.sink is not None:
        assert lse is not None
        share = torch.sigmoid(finite(lse) - call.sink.to(lse.dtype).view(1, -1, 1))
        out = out * torch.where(lse == -torch.inf, 0.0, share).unsqueeze(-1).to(out.dtype)
    return shaped(out.mean(1) if averaged else out, lead, vector)


def transposed(call: Call, lead: tuple[int, ...], x: Tensor, averaged: bool) -> Tensor:
    """Wᵀ x: (..., Tq, E) -> (..., Tk, E); a vector (Tq,) gives (..., Tk)."""
    values, vector = fitted(call, lead, x, call.q.shape[2], "W.T @ x", averaged)
    return shaped(statistics.transposed(call, values.to(call.wide), averaged), lead, vector)


def fitted(call: Call, lead: tuple[int, ...], x: Tensor, length: int, name: str, averaged: bool) -> tuple[Tensor, bool]:
    """x as (B, H or 1, length, E), and whether it came as a vector."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} takes a float tensor, but got {getattr(x, 'dtype', type(x).__name__)}")
    vector = x.dim() == 1
    matrix = x.unsqueeze(-1) if vector else x
    if matrix.shape[-2] != length:
        raise ValueError(f"{name} takes x with {length} rows, shape (..., {length}, E), but got {tuple(x.shape)}")
    try:
        matrix = matrix.expand(*torch.broadcast_shapes(matrix.shape[:-2], lead), *matrix.shape[-2:])
    except RuntimeError:
        raise ValueError(f"{name} takes x whose leading axes broadcast to {lead}, but got {tuple(x.shape)}") from None
    if matrix.shape[:-2] != torch.Size(lead):
        raise ValueError(f"{name} takes x whose leading axes broadcast to {lead}, but got {tuple(x.shape)}")
    heads = 1 if averaged else call.q.shape[1]
    return matrix.reshape(call.q.shape[0], heads, *matrix.shape[-2:]), vector


def shaped(out: Tensor, lead: tuple[int, ...], vector: bool) -> Tensor:
    out = out.reshape(*lead, *out.shape[-2:])
    return out.squeeze(-1) if vector else out

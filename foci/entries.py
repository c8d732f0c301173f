"""Exact entries of the attention matrix: some queries against some keys.

B batch, H heads, R chosen queries, C chosen keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foci.arguments import Call
from foci.backends import blocked, reference
from foci.statistics.strips import finite
from foci.where import Where


@dataclass(frozen=True, slots=True)
class Axis:
    """Chosen places along one axis; `dropped` where a single number was asked for."""

    index: Tensor
    dropped: bool


def axis_of(item: Any, size: int, name: str, device: torch.device) -> Axis:
    if isinstance(item, int) and not isinstance(item, bool):
        if not -size <= item < size:
            raise IndexError(f"{name} {item} is out of range: there are {size}")
        return Axis(torch.tensor([item % size], device=device), True)
    if isinstance(item, slice):
        return Axis(torch.arange(size, device=device)[item], False)
    index = torch.as_tensor(item, device=device)
    if index.dtype == torch.bool or index.is_floating_point() or index.dim() != 1:
        raise TypeError(f"a {name} axis takes a whole number, a slice or a list of whole numbers, but got {item!r}")
    if index.numel() and not bool(((index >= -size) & (index < size)).all()):
        raise IndexError(f"{name} indices must lie between {-size} and {size - 1}, but got {index.tolist()[:8]}")
    return Axis(index % size, False)


def entries(call: Call, lse: Tensor, rows: Tensor, columns: Tensor, averaged: bool) -> Tensor:
    """(B, H, R, C): recomputed from q, k and the log-sum-exp; with gradients where they are on."""
    step = max(blocked.GPU_ENTRIES // max(call.q.shape[0] * call.q.shape[1] * columns.numel(), 1), 1)
    if call.needs_grad:
        step = max(blocked.GPU_ENTRIES // 16 // max(call.q.shape[0] * call.q.shape[1] * call.k.shape[2], 1), 1)
    found = []
    for some in rows.split(step):
        arguments = (call, lse, some, columns, averaged)
        found.append(blocked.remembered(call, graph_rows if call.needs_grad else plain_rows, *arguments))
    return torch.cat(found, dim=2) if found else plain_rows(call, lse, rows, columns, averaged)


def plain_rows(call: Call, lse: Tensor, rows: Tensor, columns: Tensor, averaged: bool) -> Tensor:
    logits = reference.logits(call, call.q[:, :, rows], call.k[:, :, columns], where_at(call, rows, columns))
    weights = logits.sub_(finite(lse[:, :, rows]).unsqueeze(-1)).exp_()
    return weights.mean(1, keepdim=True) if averaged else weights


def graph_rows(call: Call, lse: Tensor, rows: Tensor, columns: Tensor, averaged: bool) -> Tensor:
    """Whole rows, normalised in the graph: a log-sum-exp from outside it would give wrong gradients."""
    everything = torch.arange(call.k.shape[2], device=call.k.device)
    logits = reference.logits(call, call.q[:, :, rows], call.k, where_at(call, rows, everything))
    weights, row_lse = reference.softmax(logits)
    if call.sink is not None:
        weights = weights * torch.sigmoid(finite(row_lse) - call.sink.to(row_lse.dtype).view(1, -1, 1)).unsqueeze(-1)
    weights = weights[..., columns]
    return weights.mean(1, keepdim=True) if averaged else weights


def where_at(call: Call, rows: Tensor, columns: Tensor) -> Where:
    """Where chosen entries stand, contiguous or not."""
    whole = call.everything()
    return Where(
        whole.batch,
        whole.head,
        whole.query[:, :, rows],
        whole.key[..., columns],
        whole.query_position[:, :, rows],
        whole.key_position[..., columns],
    )

"""Exact entries of the attention matrix: some queries against some keys.

B batch, H heads, R chosen queries, C chosen keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foci.arguments import Call
from foci.backends import blocked, reference
from foci.biases import Added
from foci.masks.tile import Where
from foci.runtime.checks import keeps_dtypes
from foci.statistics.streaming import finite

# How many strips' worth of entries are computed at a time where nothing is kept of them but the result.
STRIPS = 16

# A log-sum-exp beyond this has too few digits left to tell the weights of a row apart.
FAR = 1e4


@keeps_dtypes
def entries(call: Call, lse: Tensor, rows: Tensor, columns: Tensor, averaged: bool) -> Tensor:
    """(B, H, R, C): recomputed from q, k and the log-sum-exp; with gradients where they are on."""
    shape = (call.q.shape[0], 1 if averaged else call.q.shape[1], rows.numel(), columns.numel())
    if 0 in shape:
        return call.q.new_zeros(shape, dtype=call.wide)
    if call.needs_grad:
        some = rows.split(rows_at_once(call, call.k.shape[2], 1))
        return torch.cat([blocked.recomputed(call, whole_rows, call, part, columns, averaged) for part in some], dim=2)
    found = call.q.new_empty(shape, dtype=call.wide)
    start = 0
    for part in rows.split(rows_at_once(call, columns.numel(), STRIPS)):
        found[:, :, start : start + part.numel()] = plain_rows(call, lse, part, columns, averaged)
        start += part.numel()
    return found


def rows_at_once(call: Call, width: int, strips: int) -> int:
    return max(blocked.budget(call)[0] * strips // (call.q.shape[0] * call.q.shape[1] * width), 1)


def plain_rows(call: Call, lse: Tensor, rows: Tensor, columns: Tensor, averaged: bool) -> Tensor:
    lse = finite(lse[:, :, rows])
    if isinstance(call.bias, Added) and bool((lse.abs() > FAR).any()):
        # Somebody masks with -1e9: whole rows still know what the log-sum-exp does not.
        return whole_rows(call, rows, columns, averaged)
    logits = reference.logits(call, call.q[:, :, rows], call.k[:, :, columns], where_at(call, rows, columns))
    weights = logits.sub_(lse.unsqueeze(-1)).exp_()
    return weights.mean(1, keepdim=True) if averaged else weights


def whole_rows(call: Call, rows: Tensor, columns: Tensor, averaged: bool) -> Tensor:
    """Normalised by themselves, so in the graph: a log-sum-exp from outside it would give wrong gradients."""
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

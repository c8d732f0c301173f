"""The weight that queries put on given keys, as a logarithm: exact where the weight itself is rounded to 0.

B batch, H heads (1 for the mean over heads), R chosen queries, K given keys per query.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foci.arguments import Call
from foci.backends import reference, strips
from foci.masks.range_algebra import KeySegment
from foci.runtime.tracing import disable_autocast
from foci.statistics.divergence import log_sum_exp, mark_keys
from foci.statistics.streaming import finite_lse
from foci.weights.slices import tile_at


@disable_autocast
def compute_key_mass(call: Call, rows: Tensor, keys: Tensor, averaged: bool) -> Tensor:
    """ln of the weight that the given queries put on their keys, differentiable; -inf if they see none: (B, H, R).

    rows: (R,); keys: (B or 1, R, K), -1 for no key.
    """
    width = call.q.shape[0] * call.q.shape[1] * call.k.shape[2]
    step = max(strips.strip_budget(call)[0] // max(width, 1), 1)
    pieces = zip(rows.split(step), keys.split(step, dim=1), strict=True)
    return torch.cat(
        [strips.recompute_in_backward(call, mass_of_rows, call, part, some, averaged) for part, some in pieces], dim=2
    )


def mass_of_rows(call: Call, rows: Tensor, keys: Tensor, averaged: bool) -> Tensor:
    all_keys = torch.arange(call.k.shape[2], device=call.device)
    logits = reference.compute_logits(call, call.q[:, :, rows], call.k, tile_at(call, rows, all_keys))
    lse = log_sum_exp(logits)
    if call.sink is not None:
        lse = torch.logaddexp(finite_lse(lse), call.sink.to(lse.dtype).view(1, -1, 1))
    chosen = mark_keys(keys, KeySegment(0, all_keys.numel(), 0, 0))
    mass = log_sum_exp(logits.masked_fill(~chosen, -torch.inf)) - finite_lse(lse)
    if not averaged:
        return mass
    return (log_sum_exp(mass.movedim(1, -1)) - math.log(call.q.shape[1])).unsqueeze(1)

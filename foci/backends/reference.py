"""The specification: attention as the paper writes it, for any score, mask, bias and dtype.

    softmax( where(mask, softcap(scale · raw) + bias, -inf) ) V

It builds the matrix. `blocked` runs the same few functions on strips of it; there is no other copy.

B batch, H heads, G key heads, R queries, C keys, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foci.arguments import Call
from foci.masks.tile import Tile

NAME = "reference"


def refuses(call: Call) -> list[str]:
    return []


def refuses_by_default(call: Call) -> list[str]:
    return ["it builds the matrix: name backend='reference' to use it"]


def run(call: Call) -> tuple[Tensor, Tensor]:
    where = call.everything()
    weights, lse = softmax_with_lse(compute_logits(call, call.q, call.k, where))
    return apply_weights(call, weights, call.v, where).to(call.q.dtype), lse


def compute_logits(call: Call, q: Tensor, k: Tensor, where: Tile) -> Tensor:
    """How much each query wants to look at each key; -inf where it may not."""
    finished = compute_unmasked_logits(call, q, k, where)
    return finished if call.mask is None else finished.masked_fill(~call.mask.visible(where), -torch.inf)


def compute_unmasked_logits(call: Call, q: Tensor, k: Tensor, where: Tile) -> Tensor:
    """softcap(scale · raw) + bias, in float32 at least."""
    q, k = q.to(call.wide), k.to(call.wide)
    raw = call.score.raw(q, k)
    extra = call.bias.raw_term(q, where) if call.bias is not None else None
    finished = call.score.finish(raw if extra is None else raw + extra, q.shape[-1])
    added = call.bias.term(where) if call.bias is not None else None
    return finished if added is None else finished + added


def softmax_with_lse(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The weights and the log-sum-exp; a row that sees nothing has weights 0 and log-sum-exp -inf."""
    if logits.shape[-1] == 0:
        # The sum of nothing keeps the log-sum-exp in the graph.
        return logits, logits.sum(-1) - torch.inf
    peak = logits.detach().amax(-1, keepdim=True)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    exponentials = torch.exp(logits - peak)
    total = exponentials.sum(-1, keepdim=True)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -torch.inf, total.log() + peak)
    return exponentials / total, lse.squeeze(-1)


def apply_weights(call: Call, weights: Tensor, v: Tensor, where: Tile) -> Tensor:
    """The weighted sum of the values, and what a relative bias adds to it."""
    weights = apply_dropout(weights, call, where) if call.dropout else weights
    v = v.to(weights.dtype)
    # The rows of heads that share keys, counted rather than left to -1: there may be no keys.
    rows = weights.shape[1] // max(v.shape[1], 1) * weights.shape[2]
    out = (weights.reshape(*v.shape[:2], rows, v.shape[2]) @ v).view(*weights.shape[:3], v.shape[-1])
    extra = call.bias.value_term(weights, where) if call.bias is not None else None
    return out if extra is None else out + extra


def apply_dropout(weights: Tensor, call: Call, where: Tile) -> Tensor:
    """Dropout by a hash of (seed, sequence, head, query, key): the same for any tiling, and again in the backward."""
    assert call.seed is not None
    noise = hash_32_bits(call.seed + where.batch)
    for index in (where.head, where.query, where.key):
        noise = hash_32_bits(noise * 5 + index)
    keep = noise >= int(call.dropout * 2**32)
    return torch.where(keep, weights / (1.0 - call.dropout), 0.0)


def hash_32_bits(x: Tensor) -> Tensor:
    """A 32-bit integer hash in 64-bit arithmetic."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)

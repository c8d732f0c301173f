"""The specification: attention as the paper writes it, for any score, mask, bias and dtype.

    softmax( where(mask, softcap(scale · raw) + bias, -inf) ) V

It builds the whole matrix. `blocked` runs the same functions on strips of it; there is no other copy.

B batch, H heads, G key/value heads, R queries, C keys, D width.
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
    return ["it builds the whole matrix; use it with backend='reference'"]


def run(call: Call) -> tuple[Tensor, Tensor]:
    tile = call.full_tile()
    weights, lse = softmax_with_lse(compute_logits(call, call.q, call.k, tile))
    return apply_weights(call, weights, call.v, tile).to(call.q.dtype), lse


def compute_logits(call: Call, q: Tensor, k: Tensor, tile: Tile) -> Tensor:
    """softcap(scale · raw) + bias for each query and key; -inf where the mask hides the key."""
    logits = compute_unmasked_logits(call, q, k, tile)
    return logits if call.mask is None else logits.masked_fill(~call.mask.visible(tile), -torch.inf)


def compute_unmasked_logits(call: Call, q: Tensor, k: Tensor, tile: Tile) -> Tensor:
    """softcap(scale · raw) + bias, in float32 at least."""
    q, k = q.to(call.softmax_dtype), k.to(call.softmax_dtype)
    raw = call.score.raw(q, k)
    relative_term = call.bias.raw_term(q, tile) if call.bias is not None else None
    logits = call.score.finish(raw if relative_term is None else raw + relative_term, q.shape[-1])
    bias_term = call.bias.term(tile) if call.bias is not None else None
    return logits if bias_term is None else logits + bias_term


def softmax_with_lse(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the weights and the log-sum-exp; a fully masked row has weights 0 and log-sum-exp -inf."""
    if logits.shape[-1] == 0:
        # The sum over no keys keeps the log-sum-exp in the autograd graph.
        return logits, logits.sum(-1) - torch.inf
    peak = logits.detach().amax(-1, keepdim=True)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    exponentials = torch.exp(logits - peak)
    total = exponentials.sum(-1, keepdim=True)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -torch.inf, total.log() + peak)
    return exponentials / total, lse.squeeze(-1)


def apply_weights(call: Call, weights: Tensor, v: Tensor, tile: Tile) -> Tensor:
    """Returns the weighted sum of the values, plus the value term of a relative bias."""
    weights = apply_dropout(weights, call, tile) if call.dropout else weights
    v = v.to(weights.dtype)
    # Rows of all heads that share a key head; computed, because -1 is ambiguous where there are no keys.
    rows = weights.shape[1] // max(v.shape[1], 1) * weights.shape[2]
    out = (weights.reshape(*v.shape[:2], rows, v.shape[2]) @ v).view(*weights.shape[:3], v.shape[-1])
    relative_term = call.bias.value_term(weights, tile) if call.bias is not None else None
    return out if relative_term is None else out + relative_term


def apply_dropout(weights: Tensor, call: Call, tile: Tile) -> Tensor:
    """Drops weights by a hash of (seed, sequence, head, query, key): the same in any tiling and in the backward."""
    assert call.seed is not None
    noise = hash_32_bits(call.seed + tile.batch)
    for index in (tile.head, tile.query, tile.key):
        noise = hash_32_bits(noise * 5 + index)
    keep = noise >= int(call.dropout * 2**32)
    return torch.where(keep, weights / (1.0 - call.dropout), 0.0)


def hash_32_bits(x: Tensor) -> Tensor:
    """Hashes 32-bit integers that are stored in int64."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)

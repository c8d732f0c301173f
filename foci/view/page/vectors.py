"""The vectors behind a row: what "How it is computed" works out again in front of the reader.

B batch, H heads, G key heads, T tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foci.arguments import Call
from foci.record.layer import Layer
from foci.scores import Additive, Dot
from foci.view.page.arrays import PackedArrays


def get_dot_call(layer: Layer) -> Call | None:
    """The queries, keys and scores behind a layer, where it has them; General and Cosine as dot products."""
    if layer.weights is None:
        return None
    call = layer.weights.call
    return call.with_dot() or call


def describe_score(layer: Layer) -> dict[str, Any] | None:
    """How queries are compared with keys, in words and with the scale."""
    call = get_dot_call(layer)
    if call is None or layer.weights is None:
        return None
    given = layer.weights.call
    return {
        "kind": type(given.score).__name__,
        "additive": isinstance(call.score, Additive),
        "scale": call.score.factor(call.q.shape[-1]) if isinstance(call.score, Dot) else 1.0,
        "softcap": call.score.softcap if isinstance(call.score, Dot) else None,
        "width": call.q.shape[-1],
        "mask": None if call.mask is None else repr(call.mask),
        "bias": None if call.bias is None else type(call.bias).__name__,
        "sink": call.sink is not None,
    }


def get_vectors(layer: Layer, some: int) -> dict[str, Tensor]:
    """Queries, keys and, where they were kept, values of the first sequences."""
    call = get_dot_call(layer)
    if call is None:
        return {}
    found = {"q": call.q[:some], "k": call.k[:some]}
    return found if layer.values is None else {**found, "v": layer.values[:some]}


def count_vector_numbers(layer: Layer, some: int) -> int:
    return sum(part.numel() for part in get_vectors(layer, some).values())


def add_vectors(blob: PackedArrays, name: str, layer: Layer, some: int, lse: bool, kind: str | None) -> None:
    """The log-sum-exp of each row, and the vectors as `kind` where they are few enough."""
    if lse and "lse" in layer.available:
        # A query that sees nothing has -inf, which float32 can say.
        blob.add(f"{name}.lse", layer.lse[:some], "f4")
    call = get_dot_call(layer)
    if call is None:
        return
    if call.sink is not None:
        blob.add(f"{name}.sinkMass", layer.sink_mass()[:some], "f2")
    if kind is not None:
        for part, tensor in get_vectors(layer, some).items():
            blob.add(f"{name}.{part}", tensor, kind)
        if isinstance(call.score, Additive):
            blob.add(f"{name}.w", expand_additive_weight(call), "f4")


def expand_additive_weight(call: Call) -> Tensor:
    """The weight of an additive score, one row per head."""
    assert isinstance(call.score, Additive)
    weight = call.score.weight.detach().float()
    return weight if weight.dim() == 2 else weight.expand(call.q.shape[1], -1).contiguous()


def compute_row_arithmetic(layer: Layer, batch: int, head: int, query: int, keys: list[int]) -> dict[str, Any] | None:
    """One query against some keys, with every number on the way: what the explorer sends for a long sequence."""
    call = get_dot_call(layer)
    if call is None or layer.weights is None:
        return None
    with torch.no_grad():
        q, k = call.q[batch, head, query].float(), call.k[batch, head // call.group, keys].float()
        v = (
            None
            if layer.values is None
            else layer.values[batch, head * layer.values.shape[1] // layer.shape[1]].float()
        )
        row = layer.row(batch, head, query).float().to(q.device)
        return {
            "q": q.tolist(),
            "k": k.tolist(),
            "v": None if v is None else v[keys].tolist(),
            "weights": row[keys].tolist(),
            "lse": float(layer.lse[batch, head, query]),
            "out": None if v is None else (row @ v.to(row.device)).tolist(),
            "w": expand_additive_weight(call)[head].tolist() if isinstance(call.score, Additive) else None,
        }

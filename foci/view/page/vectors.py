"""Queries, keys and values behind a layer, from which the page's "How it is computed" view recomputes a row.

B batch, H heads, G key/value heads, T tokens, D width.
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
    """Return the call behind a layer's weights, if it has them; General and Cosine scores become dot products."""
    if layer.weights is None:
        return None
    call = layer.weights.call
    return call.with_dot() or call


def describe_score(layer: Layer) -> dict[str, Any] | None:
    """Describe the score function, mask, bias and sink of a layer."""
    call = get_dot_call(layer)
    if call is None or layer.weights is None:
        return None
    original = layer.weights.call
    return {
        "kind": type(original.score).__name__,
        "additive": isinstance(call.score, Additive),
        "scale": call.score.factor(call.q.shape[-1]) if isinstance(call.score, Dot) else 1.0,
        "softcap": call.score.softcap if isinstance(call.score, Dot) else None,
        "width": call.q.shape[-1],
        "mask": None if call.mask is None else repr(call.mask),
        "bias": None if call.bias is None else type(call.bias).__name__,
        "sink": call.sink is not None,
    }


def get_vectors(layer: Layer, sequences: int) -> dict[str, Tensor]:
    """Return the queries, keys and, if recorded, values of the first `sequences` sequences."""
    call = get_dot_call(layer)
    if call is None:
        return {}
    vectors = {"q": call.q[:sequences], "k": call.k[:sequences]}
    return vectors if layer.values is None else {**vectors, "v": layer.values[:sequences]}


def count_vector_numbers(layer: Layer, sequences: int) -> int:
    return sum(part.numel() for part in get_vectors(layer, sequences).values())


def add_vectors(arrays: PackedArrays, name: str, layer: Layer, sequences: int, lse: bool, kind: str | None) -> None:
    """Add the log-sum-exp of each row, and the vectors as `kind` unless it is None."""
    if lse and "lse" in layer.available:
        # The log-sum-exp of a fully masked row is -inf.
        arrays.add(f"{name}.lse", layer.lse[:sequences], "f4")
    call = get_dot_call(layer)
    if call is None:
        return
    if call.sink is not None:
        arrays.add(f"{name}.sinkMass", layer.sink_mass()[:sequences], "f2")
    if kind is not None:
        for part, tensor in get_vectors(layer, sequences).items():
            arrays.add(f"{name}.{part}", tensor, kind)
        if isinstance(call.score, Additive):
            arrays.add(f"{name}.w", expand_additive_weight(call), "f4")


def expand_additive_weight(call: Call) -> Tensor:
    """Return the weight of an additive score, one row per head."""
    assert isinstance(call.score, Additive)
    weight = call.score.weight.detach().float()
    return weight if weight.dim() == 2 else weight.expand(call.q.shape[1], -1).contiguous()


def compute_row_arithmetic(layer: Layer, batch: int, head: int, query: int, keys: list[int]) -> dict[str, Any] | None:
    """Return the vectors, weights, log-sum-exp and output of one query for some keys; None without lazy weights.

    The explorer sends this for sequences whose vectors are not in the payload.
    """
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

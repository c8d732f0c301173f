"""Builds a record from attention matrices of any library: tensors, arrays, Weights, layers, steps of a generation.

B batch, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foci.record.labels import Labels
from foci.record.layer import Layer
from foci.weights.weights import Weights

# How far row sums in half precision may be off from 1.
ROW_SUM_TOLERANCE = 0.02


def build_record_fields(attentions: Any, tokens: Any, source: Any, encoder: Any, cross: Any) -> dict[str, Any]:
    """The fields of a record, from the arguments of `Record.from_tensors`."""
    is_encoder_decoder = encoder is not None or cross is not None
    target, origin = ("target", "source") if is_encoder_decoder else ("input", "input")
    stacks = {
        "encoder": (encoder, origin, origin),
        "decoder" if is_encoder_decoder else "": (attentions, target, target),
        "cross": (cross, target, origin),
    }
    layers: dict[str, Layer] = {}
    prompt, calls = None, 0
    for stack, (tensors, queries, keys) in stacks.items():
        if tensors is None:
            continue
        built, first_length, count = read_layers(tensors, grows=stack != "cross")
        prompt, calls = (prompt if first_length is None else first_length), calls + count
        for index, layer in enumerate(built):
            name = f"{stack}.layers.{index}".lstrip(".")
            layers[name] = replace(layer, name=name, stack=stack, index=index, queries=queries, keys=keys)
    labels = {}
    if tokens is not None:
        labels[target] = to_labels(tokens)
    if source is not None:
        labels[origin] = to_labels(source)
    check_labels_fit(layers, labels)
    for layer in layers.values():
        check_row_sums(layer)
    return {"layers": layers, "labels": labels, "calls": calls, "prompt": prompt}


def check_labels_fit(layers: dict[str, Layer], labels: dict[str, Labels]) -> None:
    """Refuses labels that are shorter than their axes or have another batch size."""
    for layer in layers.values():
        if reason := explain_misfit(layer, labels):
            raise ValueError(reason)


def explain_misfit(layer: Layer, labels: dict[str, Labels]) -> str | None:
    """Why labels do not fit the axes of a layer; None if they do."""
    for name, length in ((layer.queries, layer.shape[-2]), (layer.keys, layer.shape[-1])):
        along = labels.get(name)
        if along is not None and (along.batch != layer.shape[0] or len(along) < length):
            return (
                f"the labels {name!r} must have {layer.shape[0]} sequences of {length} positions, as {layer.name} has,"
                f" got {along.batch} of {len(along)}"
            )
    grid = labels.get(layer.keys)
    if grid is not None and grid.grid is not None and len(grid) != layer.shape[-1]:
        return (
            f"the labels {layer.keys!r} must have {layer.shape[-1]} positions, as {layer.name} has, got"
            f" {grid.grid[0]} x {grid.grid[1]} patches after {grid.leading} positions"
        )
    return None


def check_labels_fit_any(layers: Iterable[Layer], name: str, labels: Labels) -> None:
    """Refuses labels that fit no layer of their sequence; some may not fit, because layers may differ in length."""
    reasons = [explain_misfit(layer, {name: labels}) for layer in layers if name in (layer.queries, layer.keys)]
    if reasons and all(reasons):
        raise ValueError(reasons[0])


def check_row_sums(layer: Layer) -> None:
    """Refuses negative weights and row sums above 1; smaller sums (sink, dropout, masked keys) and NaN are allowed."""
    if layer.matrix is None:
        return
    sums = layer.matrix.sum(-1, dtype=torch.promote_types(layer.matrix.dtype, torch.float32))
    below, above = layer.matrix[layer.matrix < -ROW_SUM_TOLERANCE], sums[sums > 1 + ROW_SUM_TOLERANCE]
    if below.numel() or above.numel():
        got = f"a weight of {float(below.min()):.4g}" if below.numel() else f"a row sum of {float(above.max()):.4g}"
        raise ValueError(
            f"{layer.name} must have attention weights of at least 0 with row sums of at most 1, got {got} (apply the"
            " softmax to scores; in training, dropout scales the weights: call eval())"
        )


def read_layers(attentions: Any, grows: bool) -> tuple[list[Layer], int | None, int]:
    """The layers, unnamed; the prompt length of a generation; and the number of tensors."""
    if isinstance(attentions, Weights | Layer):
        attentions = [attentions]
    if not isinstance(attentions, list | tuple):
        attentions = list(to_tensor(attentions))
    if not attentions:
        raise ValueError("attentions must have at least one layer, got none")
    if not isinstance(attentions[0], list | tuple):
        return [to_layer(layer) for layer in attentions], None, len(attentions)
    steps = [[to_layer_matrix(layer) for layer in step] for step in attentions]
    if len({len(step) for step in steps}) != 1:
        raise ValueError(f"every step must have the same number of layers, got {sorted({len(step) for step in steps})}")
    layers = [to_layer(join_step_matrices([step[i] for step in steps], grows)) for i in range(len(steps[0]))]
    return layers, steps[0][0].shape[2], sum(map(len, steps))


def join_step_matrices(steps: Sequence[Tensor], grows: bool) -> Tensor:
    """Joins the rows of all steps into one matrix; later keys have weight 0 in earlier steps."""
    keys = steps[-1].shape[3]
    rows = []
    done = steps[0].shape[3] - steps[0].shape[2]
    for number, step in enumerate(steps):
        done += step.shape[2]
        if step.shape[:2] != steps[0].shape[:2] or step.shape[3] != (done if grows else keys):
            expected = (*steps[0].shape[:2], step.shape[2], done if grows else keys)
            raise ValueError(f"step {number} must have shape {tuple(expected)} to continue, got {tuple(step.shape)}")
        rows.append(torch.nn.functional.pad(step, (0, keys - step.shape[3])))
    return torch.cat(rows, dim=2)


def to_layer(source: Any) -> Layer:
    """An unnamed layer; that of Weights is lazy."""
    if isinstance(source, Layer):
        return source.with_head_axis()
    if isinstance(source, Weights) and not source.is_averaged:
        weights = source.with_four_axes()
        return Layer("", weights=weights, kv_heads=weights.call.k.shape[1])
    if isinstance(source, Weights):
        source = source.dense().reshape(-1, 1, *source.shape[-2:])
    return Layer("", matrix=to_layer_matrix(source))


def to_layer_matrix(layer: Any) -> Tensor:
    """A layer's matrix (B, H, Tq, Tk)."""
    tensor = to_tensor(layer)
    if tensor.dim() == 3:
        tensor = tensor.unsqueeze(0)
    if tensor.dim() != 4 or not tensor.is_floating_point():
        raise ValueError(
            f"a layer must be a float tensor (batch, head, query, key), got {tensor.dtype} {tuple(tensor.shape)}"
        )
    return tensor.detach()


def to_tensor(array: Any) -> Tensor:
    if array is None:
        raise ValueError("a layer must be a tensor, got None (fused attention returns no weights: use foci.watch)")
    if isinstance(array, Weights | Layer):
        return array.dense()
    return array if isinstance(array, Tensor) else torch.as_tensor(array)


def to_labels(tokens: Any, decode: Any = None) -> Labels:
    """Labels from Labels, from texts [position] or [batch][position], or from token ids with `decode`."""
    if isinstance(tokens, Labels):
        return tokens
    if decode is not None:
        return Labels.from_ids(tokens, decode)
    rows = list(tokens)
    if rows and all(isinstance(row, str) for row in rows):
        rows = [rows]
    if not all(isinstance(text, str) for row in rows for text in row):
        raise TypeError(f"tokens must be texts, Labels, or token ids together with decode=, got {str(tokens)[:80]}")
    return Labels.tokens(rows)

"""Attention that somebody else computed: tuples of tensors, the steps of a generation, arrays, and labels for them.

B batch, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foci.record.labels import Labels
from foci.record.layer import Layer

# Rows in half precision add up to 1 only so exactly.
ROW_SUM_TOLERANCE = 0.02


def build_record_fields(attentions: Any, tokens: Any, source: Any, encoder: Any, cross: Any) -> dict[str, Any]:
    """What a record is made of, by the arguments of `Record.from_tensors`."""
    paired = encoder is not None or cross is not None
    own, read = ("target", "source") if paired else ("input", "input")
    stacks = {"encoder": (encoder, read, read), "decoder" if paired else "": (attentions, own, own)}
    stacks["cross"] = (cross, own, read)
    layers: dict[str, Layer] = {}
    prompt, calls = None, 0
    for stack, (given, queries, keys) in stacks.items():
        if given is None:
            continue
        matrices, first, count = read_layer_matrices(given, grows=stack != "cross")
        prompt, calls = (prompt if first is None else first), calls + count
        for index, matrix in enumerate(matrices):
            name = f"{stack}.layers.{index}".lstrip(".")
            layers[name] = Layer(name, stack, index, queries=queries, keys=keys, matrix=matrix)
    labels = {}
    if tokens is not None:
        labels[own] = to_labels(tokens)
    if source is not None:
        labels[read] = to_labels(source)
    check_labels_fit(layers, labels)
    for layer in layers.values():
        check_row_sums(layer)
    return {"layers": layers, "labels": labels, "calls": calls, "prompt": prompt}


def check_labels_fit(layers: dict[str, Layer], labels: dict[str, Labels]) -> None:
    """Labels that were given must fit the matrices that they are given for; there may be more of them."""
    for layer in layers.values():
        if reason := explain_misfit(layer, labels):
            raise ValueError(reason)


def explain_misfit(layer: Layer, labels: dict[str, Labels]) -> str | None:
    """Why labels cannot stand along a layer's axes; None where they can."""
    for name, length in ((layer.queries, layer.shape[2]), (layer.keys, layer.shape[3])):
        found = labels.get(name)
        if found is not None and (found.batch != layer.shape[0] or len(found) < length):
            return (
                f"{name} takes labels for {layer.shape[0]} sequences of {length} positions, as in {layer.name},"
                f" but got {found.batch} of {len(found)}"
            )
    return None


def check_row_sums(layer: Layer) -> None:
    """Weights are shares of 1; a row may have less (a sink, dropout, nothing to look at), and NaN is for the views."""
    assert layer.matrix is not None
    sums = layer.matrix.sum(-1, dtype=torch.promote_types(layer.matrix.dtype, torch.float32))
    below, above = layer.matrix[layer.matrix < -ROW_SUM_TOLERANCE], sums[sums > 1 + ROW_SUM_TOLERANCE]
    if below.numel() or above.numel():
        got = f"a weight of {float(below.min()):.4g}" if below.numel() else f"a row of {float(above.max()):.4g} in all"
        raise ValueError(
            f"{layer.name} takes attention weights, none below 0 and a row at most 1 in all, but got {got} (scores need"
            " their softmax first; a model in training has its weights scaled by dropout: call eval())"
        )


def read_layer_matrices(given: Any, grows: bool) -> tuple[list[Tensor], int | None, int]:
    """One matrix (B, H, Tq, Tk) per layer; of a generation also the length of its prompt; and how many there were."""
    if not isinstance(given, list | tuple):
        given = list(to_tensor(given))
    if not given:
        raise ValueError("from_tensors takes at least one layer, but got none")
    if not isinstance(given[0], list | tuple):
        return [to_layer_matrix(layer) for layer in given], None, len(given)
    steps = [[to_layer_matrix(layer) for layer in step] for step in given]
    if len({len(step) for step in steps}) != 1:
        raise ValueError(
            f"every step must have the same layers, but got {sorted({len(step) for step in steps})} of them"
        )
    layers = [join_step_matrices([step[i] for step in steps], grows) for i in range(len(steps[0]))]
    return layers, steps[0][0].shape[2], sum(map(len, steps))


def join_step_matrices(steps: Sequence[Tensor], grows: bool) -> Tensor:
    """The rows of all steps in one matrix; a step that could not see later keys gives them nothing."""
    keys = steps[-1].shape[3]
    rows = []
    done = steps[0].shape[3] - steps[0].shape[2]
    for number, step in enumerate(steps):
        done += step.shape[2]
        if step.shape[:2] != steps[0].shape[:2] or step.shape[3] != (done if grows else keys):
            expected = (*steps[0].shape[:2], step.shape[2], done if grows else keys)
            raise ValueError(f"step {number} must have shape {tuple(expected)} to go on, but got {tuple(step.shape)}")
        rows.append(torch.nn.functional.pad(step, (0, keys - step.shape[3])))
    return torch.cat(rows, dim=2)


def to_layer_matrix(layer: Any) -> Tensor:
    """(B, H, Tq, Tk)."""
    tensor = to_tensor(layer)
    if tensor.dim() == 3:
        tensor = tensor.unsqueeze(0)
    if tensor.dim() != 4 or not tensor.is_floating_point():
        raise ValueError(
            f"a layer must be a float matrix (batch, head, query, key), but got {tensor.dtype} {tuple(tensor.shape)}"
        )
    return tensor.detach()


def to_tensor(given: Any) -> Tensor:
    if given is None:
        raise ValueError("a layer must be a tensor, but got None (a fused attention gives none: foci.watch does)")
    return given if isinstance(given, Tensor) else torch.as_tensor(given)


def to_labels(tokens: Any, decode: Any = None) -> Labels:
    """Labels from Labels, texts [position] or [batch][position], or token numbers with what decodes them."""
    if isinstance(tokens, Labels):
        return tokens
    if decode is not None:
        return Labels.decoded(tokens, decode)
    rows = list(tokens)
    if rows and all(isinstance(row, str) for row in rows):
        rows = [rows]
    if not all(isinstance(text, str) for row in rows for text in row):
        raise TypeError(f"tokens must be texts, Labels, or numbers together with decode=, but got {str(tokens)[:80]}")
    return Labels.tokens(rows)

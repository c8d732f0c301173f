"""Builds a Record for `foci run --show` from the weights that a model returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from foci.record.labels import Labels
from foci.record.layer import ALIGNMENT_STACK, Layer, join_steps
from foci.record.record import Record
from foci.weights.weights import Weights

# Names of the labels along queries and keys, by stack; any other stack is cross-attention to the source.
STACK_LABELS = {"": ("input", "input"), "encoder": ("source", "source"), "decoder": ("target", "target")}


def build_task_record(
    model: nn.Module,
    weights: Mapping[str, Weights],
    labels: Mapping[str, Labels],
    answer: str | None = None,
    *,
    cross_queries: str = "target",
    alignment: Sequence[int] = (),
) -> Record:
    """Builds a record of weights named L0, encoder.L0, decoder.L0 or cross.L0.

    >>> import torch
    >>> import foci
    >>> model = foci.nn.EncoderDecoder.from_name("tiny", vocabulary=10).eval()
    >>> with torch.no_grad():
    ...     out = model(torch.tensor([[5, 3, 8]]), torch.tensor([[1, 4]]), return_weights=True)
    >>> labels = {"source": Labels.tokens([["a", "b", "c"]]), "target": Labels.tokens([["<start>", "d"]])}
    >>> build_task_record(model, out.weights, labels)["cross.L0H2"].shape
    (1, 2, 3)

    Args:
        model: names the record.
        weights: as models return them with `return_weights=True`.
        labels: "input" for a model of one stack; "source" and "target" for an encoder-decoder.
        answer: the text that the model answered.
        cross_queries: name of the labels along the queries of cross-attention.
        alignment: cross-attention layers whose mean is added as the stack "alignment", which views show first.
    """
    layers = {}
    for name, each in weights.items():
        stack, _, number = name.rpartition("L")
        stack = stack.removesuffix(".")
        queries, keys = STACK_LABELS.get(stack, (cross_queries, "source"))
        layers[name] = Layer(name, stack, int(number), queries=queries, keys=keys, weights=each)
    calls = len(layers)
    if alignment:
        layers[ALIGNMENT_STACK] = average_layers([layers[f"cross.L{number}"] for number in alignment])
    return Record(layers, dict(labels), model=type(model).__name__, calls=calls, answer=answer)


def average_layers(layers: Sequence[Layer]) -> Layer:
    """The mean of layers of one sequence, head by head, as a layer of its own."""
    renamed = [replace(layer, name=ALIGNMENT_STACK, stack=ALIGNMENT_STACK, index=0) for layer in layers]
    return replace(join_steps(dict(enumerate(renamed))), averaged=True)

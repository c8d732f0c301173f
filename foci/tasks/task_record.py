"""The weights that a model gave, with labels: a Record for `foci run --show`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from foci.record.labels import Labels
from foci.record.layer import Layer
from foci.record.record import Record
from foci.weights.weights import Weights

# What stands along the queries and the keys of each stack; of others that look from one to the other as of cross.
ALONG = {"": ("input", "input"), "encoder": ("source", "source"), "decoder": ("target", "target")}


def record_of(
    model: nn.Module,
    weights: Mapping[str, Weights],
    labels: Mapping[str, Labels],
    answer: str | None = None,
    *,
    across: str = "target",
) -> Record:
    """A record of the weights by their names: L0, encoder.L0, decoder.L0, cross.L0.

    >>> import torch
    >>> import foci
    >>> model = foci.nn.EncoderDecoder.from_name("tiny", vocabulary=10).eval()
    >>> with torch.no_grad():
    ...     out = model(torch.tensor([[5, 3, 8]]), torch.tensor([[1, 4]]), return_weights=True)
    >>> labels = {"source": Labels.tokens([["a", "b", "c"]]), "target": Labels.tokens([["<start>", "d"]])}
    >>> record_of(model, out.weights, labels)["cross.L0H2"].shape
    (1, 1, 2, 3)

    Args:
        model: whose weights they are, for the title.
        weights: as models give them with `return_weights=True`.
        labels: "input" for a model of one stack; "source" and "target" for one that reads and writes.
        answer: what the model said.
        across: which labels stand along the queries of what looks from one to the other.
    """
    layers = {}
    for name, each in weights.items():
        stack, _, number = name.rpartition("L")
        stack = stack.removesuffix(".")
        queries, keys = ALONG.get(stack, (across, "source"))
        layers[name] = Layer(name, stack, int(number), queries=queries, keys=keys, weights=each)
    return Record(layers, dict(labels), model=type(model).__name__, calls=len(layers), answer=answer)

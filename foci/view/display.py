"""Makes a Record of Weights or of a layer, so that every view can show them."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from foci.record.layer import Layer
from foci.record.record import Record
from foci.weights.weights import Weights

# The page of a larger matrix takes many seconds, too long for the end of a notebook cell.
MAX_NOTEBOOK_ENTRIES = 2**24


def build_view_record(shown: Record | Weights | Layer) -> Record:
    """Build the record that a view draws: one that has matrices where only the weights of text were kept."""
    return shown._with_matrices() if isinstance(shown, Record) else build_layer_record(shown)


def build_layer_record(shown: Weights | Layer, tokens: Any = None, source: Any = None) -> Record:
    """Build a record of one layer.

    >>> _, weights = foci.attention(*torch.randn(3, 2, 4, 6, 8), return_weights=True)
    >>> build_layer_record(weights[:, 1])
    Record: 1 layers, 1 heads, 1 attention calls

    Args:
        tokens: the texts of the positions; None: numbers, or the labels of the layer's record.
        source: the texts of the keys of Weights, if they belong to another sequence.
    """
    if isinstance(shown, Layer):
        return Record({shown.name: replace(shown.with_head_axis())}, shown.labels, calls=1)
    if source is None:
        return Record.from_tensors(shown, tokens)
    return Record.from_tensors(None, tokens, source=source, cross=shown)


def count_entries(shown: Record | Weights | Layer) -> int:
    """Count the entries of matrices that are not computed yet; kept statistics have none."""
    if isinstance(shown, Record):
        return sum(prod(layer.shape) for layer in shown.layers.values() if layer.kept is None)
    return prod(shown.shape)


def is_fast_to_embed(shown: Record | Weights | Layer) -> bool:
    """Tell whether the page of a matrix takes seconds at most."""
    return count_entries(shown) <= MAX_NOTEBOOK_ENTRIES

"""Selects what every view of a Record shows: a head, a query and its attention weights.

Terminal, figure and page share the defaults, so they show the same head and query unless others are named.

B batch, H heads, Tq queries, Tk keys, Uq and Uk text units (words, or single tokens) of queries and keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from foci.record.labels import CLASS_TOKEN, Labels
from foci.record.layer import ALIGNMENT_STACK, Layer
from foci.record.record import Record
from foci.runtime.printable import make_printable
from foci.view.units import (
    TextUnit,
    check_batch,
    list_layer_units,
    list_units,
    mark_word_positions,
    number_words,
    truncate_text,
)

# For longer sequences the statistics of all heads take too long to be computed before the first view.
MAX_SCANNED_LENGTH = 2048
# Positions this close, and the words before and after, are neighbors: many heads attend to them.
NEIGHBOR_DISTANCE = 2
# The words of a text that are searched for the one that gives an image the most weight.
MAX_SCANNED_WORDS = 256
# Layers with more entries are not searched for the clearest alignment.
MAX_SEARCHED_ENTRIES = 2**22


@dataclass(frozen=True)
class SelectedHead:
    """One head of a record, or the mean of a layer's heads (head is None)."""

    layer: Layer
    head: int | None
    name: str

    @property
    def head_indices(self) -> list[int]:
        """The indices of the heads along the layer's head axis."""
        heads = self.layer.heads
        return list(range(len(heads))) if self.head is None else [heads.index(self.head)]

    @property
    def has_entries(self) -> bool:
        """Whether every entry is available; otherwise only the top keys of each query are."""
        return "entries" in self.layer.available


def printable_name(record: Record, layer: Layer, head: int | None = None) -> str:
    """Return `Record.name_of` without control characters: the stack's name may come from an untrusted file."""
    return make_printable(truncate_text(record.name_of(layer, head)))


def select_head(record: Record, head: str | int | None = None, layer: int | None = None) -> SelectedHead:
    """Select a head by name: "L5H3", "cross.L0H2", "L5" (the mean of its heads), or by two numbers.

    If a record has several stacks and the name has none, cross-attention is searched first.
    """
    if not isinstance(head, str) and layer is None:
        raise ValueError(
            f"layer must be an int where head is {head}, got None; a name has both: {describe_head_names(record)}"
        )
    wanted = head if isinstance(head, str) else f"L{layer}" + ("" if head is None else f"H{head}")
    for candidate in list_cross_layers_first(record):
        for number in (None, *candidate.heads):
            name = record.name_of(candidate, number)
            if wanted in (name, name.removeprefix(f"{candidate.stack}.")):
                if number is None:
                    return select_layer_mean(record, candidate)
                return SelectedHead(candidate, number, printable_name(record, candidate, number))
    raise ValueError(f"head must be one of {describe_head_names(record)}, got {wanted!r}")


def list_layers(record: Record) -> list[Layer]:
    """List the layers; raise ValueError if there is nothing to see in one of them."""
    layers = list(record.layers.values())
    if not layers:
        raise ValueError("record must have at least one layer, got none")
    for layer in layers:
        if 0 in layer.shape:
            raise ValueError(f"{layer.label} must have at least one query and one key, got shape {layer.shape}")
    return layers


def list_cross_layers_first(record: Record) -> list[Layer]:
    """List the layers, cross-attention first: it holds the alignment."""
    return sorted(list_layers(record), key=lambda layer: layer.queries == layer.keys)


def describe_head_names(record: Record) -> str:
    """Return the first and the last head name of each stack."""
    stacks: dict[str, list[Layer]] = {}
    for layer in record.layers.values():
        stacks.setdefault(layer.stack, []).append(layer)
    ends = [
        (printable_name(record, s[0], s[0].heads[0]), printable_name(record, s[-1], s[-1].heads[-1]))
        for s in stacks.values()
    ]
    return ", ".join(f"{first} to {last}" for first, last in ends) or "none (the record is empty)"


def select_layer_mean(record: Record, layer: Layer) -> SelectedHead:
    """Select the mean of a layer's heads, or the head itself if there is only one."""
    head = layer.heads[0] if len(layer.heads) == 1 else None
    return SelectedHead(layer, head, printable_name(record, layer, head))


@torch.no_grad()
def select_default_head(record: Record, batch: int = 0) -> SelectedHead:
    """Select the head to show if none is named.

    Where a text attends to images, or to a recording within it: the mean of the layer that gives them the most weight,
    of several with the same weight the one with the lowest entropy.
    With cross-attention: the mean of the layer with the clearest alignment. For patches and very long texts: the mean
    of the last layer. For a text: the head that attends most clearly to words that are not neighbors of the query.
    """
    layers = list_cross_layers_first(record)
    check_batch(layers[0], batch)
    reading = [layer for layer in layers if find_media_columns(record, layer, batch) is not None]
    if reading:
        return select_layer_mean(record, max(reading, key=lambda layer: measure_media_weight(record, layer, batch)))
    cross = find_clearest_cross_layer(record, batch)
    return select_clearest_head(record, layers, batch) if cross is None else select_layer_mean(record, cross)


def find_media_columns(record: Record, layer: Layer, batch: int) -> tuple[list[int], list[int]] | None:
    """Return the queries that are text, and the keys that are image patches or audio frames among text.

    None unless a layer has both.
    """
    queries, keys = record.labels_of(layer)
    text, media = (
        queries.split_kinds(batch).get("text"),
        keys.split_kinds(batch).get("image") or keys.list_frames(batch),
    )
    return (text, media) if text and media else None


def measure_media_weight(record: Record, layer: Layer, batch: int) -> tuple[float, float]:
    """Return the mean weight of the text on images or recordings, then the negative entropy.

    In cross-attention the weight is 1 in all layers. Layers that take long to scan have 0.
    """
    found = find_media_columns(record, layer, batch)
    if found is None or not is_fast_to_scan(layer) or "entries" not in layer.available:
        return 0.0, 0.0
    text, media = found
    weight = float(layer.received(text)[batch].float().nan_to_num()[..., media].sum(-1).mean()) / len(text)
    return round(weight, 3), -float(layer.entropy()[batch][..., text].float().nanmean().nan_to_num())


@torch.no_grad()
def find_clearest_cross_layer(record: Record, batch: int = 0) -> Layer | None:
    """Return the layer of the alignment: that of the record, else the cross-attention with the clearest words."""
    layers = [layer for layer in record.layers.values() if layer.stack == ALIGNMENT_STACK]
    layers = layers or [layer for layer in record.layers.values() if layer.queries != layer.keys]
    return max(layers, key=lambda layer: measure_clarity(record, layer, batch), default=None)


def select_source_head(record: Record, alignment: SelectedHead, batch: int = 0) -> SelectedHead | None:
    """Select a self-attention head of the text that a cross-attention reads; None if there is none."""
    source = alignment.layer.keys
    layers = [layer for layer in record.layers.values() if layer.queries == layer.keys == source]
    if alignment.layer.queries == source or not layers or record.labels_of(layers[0])[1].kind != "tokens":
        return None
    return select_clearest_head(record, layers, batch)


def select_clearest_head(record: Record, layers: Sequence[Layer], batch: int) -> SelectedHead:
    """Select the default head among layers of one sequence."""
    if record.labels_of(layers[0])[1].kind == "patches" or not all(map(is_fast_to_scan, layers)):
        return select_layer_mean(record, layers[-1])
    # Squares prefer a head that is clear about some words to one that prefers many words a little.
    clarity = [measure_distant_weight(record, layer, batch).square().mean(1) for layer in layers]
    layer, best = max(zip(layers, clarity, strict=True), key=lambda pair: float(pair[1].max()))
    head = layer.heads[int(best.argmax())]
    return SelectedHead(layer, head, printable_name(record, layer, head))


def measure_clarity(record: Record, layer: Layer, batch: int) -> tuple[float, float]:
    """Return the mean over query words of the largest weight on a key word, then the negative entropy.

    Entropy alone would mislead: a head that always attends to the end of the sentence has a low one.
    """
    entropy = float(layer.entropy().float().nanmean().nan_to_num()) if "entropy" in layer.available else 0.0
    if "entries" not in layer.available or prod(layer.shape[1:]) > MAX_SEARCHED_ENTRIES:
        return 0.0, -entropy
    queries, keys = ([unit for unit in units if unit.is_word] for units in list_layer_units(record, layer, batch))
    if not queries or not keys:
        return 0.0, -entropy
    weights = compute_unit_weights(select_layer_mean(record, layer), batch, queries, keys)
    return float(weights.nan_to_num().amax(1).mean()), -entropy


def is_fast_to_scan(layer: Layer) -> bool:
    """Whether the top keys of the whole layer are computed without a noticeable wait."""
    return "top" in layer.available and max(layer.shape[-2:]) <= MAX_SCANNED_LENGTH


@torch.no_grad()
def measure_distant_weight(record: Record, layer: Layer, batch: int) -> Tensor:
    """Measure for each head and query how far its weight on one distant word exceeds the usual: (H, Tq).

    Neighbors of the query, punctuation and special tokens do not count.
    """
    _, heads, count, _ = layer.sizes
    values, keys = (part[batch].view(heads, count, -1).cpu() for part in layer.top(min(8, layer.max_top)))
    values = values.float()
    if "received" in layer.available:
        # The weight that a key receives from every query says little about one query.
        usual = layer.received()[batch].view(heads, -1).float().cpu().nan_to_num(0.0, 0.0) / count
        values = values - usual.unsqueeze(1).expand(-1, count, -1).gather(2, keys.clamp(min=0))
    query_is_word, key_is_word = (mark_word_positions(labels, batch) for labels in record.labels_of(layer))
    counts = key_is_word[keys.clamp(min=0)] & (keys >= 0)
    if layer.queries == layer.keys:
        positions = layer.positions
        words = number_words(record.labels_of(layer)[1], batch)
        counts &= (keys - positions.view(1, -1, 1)).abs() > NEIGHBOR_DISTANCE
        # Queries before the first key count as neighbors of it.
        counts &= (words[keys.clamp(min=0)] - words[positions.clamp(min=0)].view(1, -1, 1)).abs() > 1
    # NaN and infinite weights count as 0.
    return values.where(counts & values.isfinite(), 0).amax(-1) * query_is_word


def select_default_query(record: Record, selection: SelectedHead, batch: int = 0) -> int:
    """Select the query position to show: the default patch of an image, or the last token of the clearest word."""
    labels = record.labels_of(selection.layer)[0]
    if labels.kind == "patches" and labels.grid is not None:
        return select_patch(labels, None)[0]
    queries = list_layer_units(record, selection.layer, batch)[0]
    columns = find_media_columns(record, selection.layer, batch)
    if columns is not None:
        return select_word_with_media(record, selection, batch, *columns)
    return queries[find_clearest_unit(record, selection, batch, queries)].stop - 1


def select_word_with_media(
    record: Record, selection: SelectedHead, batch: int, text: list[int], media: list[int]
) -> int:
    """Select the position of the text with the clearest weight on media; of a very long text the last one."""
    labels = record.labels_of(selection.layer)[0]
    words = [position for position in text if mark_word_positions(labels, batch)[position]] or text
    if len(words) > MAX_SCANNED_WORDS or not selection.has_entries:
        return words[-1]
    weights = read_rows(selection, batch, words)[:, media].nan_to_num()
    # Squares prefer a word that is clear about some patches: in cross-attention, all words have the same sum.
    return words[int(weights.square().sum(1).argmax())]


def select_word_of_image(record: Record, selection: SelectedHead, batch: int = 0) -> int | None:
    """Select the last word of the text that an image attends to; None for other layers."""
    queries, keys = record.labels_of(selection.layer)
    if (
        "image" not in queries.split_kinds(batch)
        or "text" not in keys.split_kinds(batch)
        or selection.layer.queries == selection.layer.keys
    ):
        return None
    words = [unit for unit in list_units(keys, batch) if unit.is_word]
    return words[-1].start if words else keys.split_kinds(batch)["text"][-1]


def find_clearest_unit(record: Record, selection: SelectedHead, batch: int, queries: Sequence[TextUnit]) -> int:
    """Return the unit that attends most clearly to a distant word; of a very long text the last unit.

    A classifier answers from its class token, so that its attention says most about the answer.
    """
    if queries and queries[0].text == CLASS_TOKEN:
        return 0
    layer = selection.layer if selection.head is None else selection.layer.head(selection.head)
    if not is_fast_to_scan(layer):
        return len(queries) - 1
    position = int(measure_distant_weight(record, layer, batch).mean(0).argmax())
    return next((i for i, unit in enumerate(queries) if unit.start <= position < unit.stop), 0)


def select_patch(labels: Labels, patch: str | int | None) -> tuple[int, str]:
    """Return the position and the name of a patch given as "row,column" or as a position.

    None is the class token, or the middle patch of a model without one.
    """
    rows, columns = require_grid(labels) if labels.kind == "patches" else (0, 0)
    if patch is None and labels.kind == "patches":
        return (0, "the class token") if labels.leading else (rows // 2 * columns + columns // 2, "the middle patch")
    text = str(0 if patch is None else patch)
    numbers = [int(part) for part in text.split(",") if part.strip().isdigit()]
    if len(numbers) == 2 and numbers[0] < rows and numbers[1] < columns:
        return labels.leading + numbers[0] * columns + numbers[1], f"patch {numbers[0]},{numbers[1]}"
    if len(numbers) == 1 and numbers[0] < len(labels):
        return numbers[0], f"position {numbers[0]}"
    raise ValueError(f"patch must be row,column below {rows},{columns} or a position, got {patch!r}")


def require_grid(labels: Labels) -> tuple[int, int]:
    if labels.grid is None:
        raise ValueError(
            "labels must be those of an image with a grid of patches, got labels without a grid: give it with"
            " seen.label(foci.Labels.patches(rows, columns, image=image, extra=1))"
        )
    return labels.grid


def reshape_to_grid(weights: Tensor, labels: Labels) -> Tensor:
    """Reshape the weights on patches to the image's rows and columns."""
    height, width = require_grid(labels)
    return weights[labels.leading : labels.leading + height * width].view(height, width)


def read_rows(selection: SelectedHead, batch: int, queries: list[int]) -> Tensor:
    """Read the attention weights of some queries: (queries, Tk).

    If the record kept only the top keys of each query, the weights of other keys are 0.
    """
    check_batch(selection.layer, batch)
    with torch.no_grad():
        rows = [read_head_rows(selection.layer, batch, index, queries) for index in selection.head_indices]
    return torch.stack(rows).mean(0)


def read_head_rows(layer: Layer, batch: int, index: int, queries: list[int]) -> Tensor:
    if "entries" in layer.available:
        rows = layer[batch, index, queries]
        assert isinstance(rows, Tensor)
        return rows.float().cpu()
    if not layer.max_top:
        raise ValueError(f"{layer.label} has neither entries nor top keys: record it with keep='lazy'")
    values, keys = (part[batch, index, queries].cpu() for part in layer.top(layer.max_top))
    entries = torch.zeros(len(queries), layer.shape[3] + 1)
    # Fewer visible keys than k are filled with the key -1: it goes to an extra column, which is cut off.
    return entries.scatter_(1, keys % entries.shape[1], values.float())[:, :-1]


def compute_unit_weights(
    selection: SelectedHead, batch: int, queries: Sequence[TextUnit], keys: Sequence[TextUnit]
) -> Tensor:
    """Compute the weights between units: the mean over a unit's queries, the sum over a unit's keys: (Uq, Uk)."""
    if not queries or not keys:
        return torch.zeros(len(queries), len(keys))
    entries = read_rows(selection, batch, [i for unit in queries for i in unit.positions])
    unit_of_row = torch.tensor([index for index, unit in enumerate(queries) for _ in unit.positions])
    means = torch.zeros(len(queries), entries.shape[1]).index_add(0, unit_of_row, entries)
    means /= unit_of_row.bincount(minlength=len(queries)).unsqueeze(1)
    ends = means.cumsum(1, dtype=torch.float64)
    ends = torch.nn.functional.pad(ends, (1, 0))
    return ends[:, [unit.stop for unit in keys]].sub(ends[:, [unit.start for unit in keys]]).float()


@torch.no_grad()
def find_nonfinite_rows(selection: SelectedHead, batch: int) -> Tensor:
    """Mark queries with NaN or infinite weights: (Tq,). Very long lazy layers are not scanned: none is marked."""
    layer = selection.layer
    if layer.kept is None and max(layer.shape[2:]) > MAX_SCANNED_LENGTH:
        return torch.zeros(layer.shape[2], dtype=torch.bool)
    entropy = layer.entropy()[batch].view(layer.shape[1], layer.shape[2])
    return ~entropy[selection.head_indices].isfinite().all(0).cpu()


def read_picture(selection: SelectedHead, batch: int, rows: int, columns: int) -> Tensor:
    """Read the matrix, averaged in blocks: (rows, columns)."""
    with torch.no_grad():
        if selection.head is not None:
            return selection.layer.head(selection.head).picture(rows, columns)[batch].float().cpu()
        return selection.layer.picture(rows, columns)[batch].float().mean(0).cpu()

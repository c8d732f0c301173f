"""Where in an image a word looks, and which words look at a part of it, from the exact weights of single rows.

H heads, Tk keys; rows x columns of the map.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foci.record import metrics
from foci.record.dense import MAX_STRIP_ENTRIES
from foci.record.from_tensors import explain_misfit
from foci.record.labels import Labels, Segment
from foci.record.patch_layout import Box, check_box, enlarge, lay_out, measure_coverage, resize_to_finest
from foci.record.words import find_word, list_words

if TYPE_CHECKING:
    from foci.record.layer import Layer
    from foci.record.record import Record

# Words named in an error message.
MAX_LISTED_WORDS = 30

# Which of a word and an image has the queries.
DIRECTIONS = ("text->image", "image->text")


@torch.no_grad()
def compute_image_map(
    record: Record,
    query: Any,
    image: int,
    layer: Any,
    head: Any,
    upsample: Any,
    batch: int,
    step: Any = None,
    direction: Any = None,
) -> Tensor:
    """Implements `Record.image_map`."""
    if step == "each":
        records = [record.at(step=number) for number in range(record.steps)]
        maps = [compute_image_map(r, query, image, layer, head, upsample, batch, None, direction) for r in records]
        return torch.stack(maps)
    record = record if step is None else record.at(step=step)
    if reads_columns(record, direction, query, batch):
        layers, maps = map_columns(record, query, image, layer, head, batch)
        labels = record.labels_of(layers[0])[0]
    else:
        layers, maps = map_rows(record, query, image, layer, head, batch)
        labels = record.labels_of(layers[0])[1]
    maps = resize_to_finest(maps)
    result = torch.stack(maps) if layer == "each" else torch.stack(maps).mean(0)
    return result if upsample is False else enlarge(result, upsample, labels, image, batch)


def map_rows(
    record: Record, query: Any, image: int, layer: Any, head: Any, batch: int
) -> tuple[list[Layer], list[Tensor]]:
    """The maps of the keys that a query looks at, and the layers that they belong to."""
    layers = select_layers(record, layer, batch)
    layers, positions = find_query(record, layers, query, batch)
    check_heads(layers, head)
    rows = [rows_of(record, each, positions) for each in layers]
    if layer == "rollout":
        if head is not None:
            raise ValueError(f"head must be None for layer='rollout', which averages the heads, got {head!r}")
        return layers, [lay_out(roll_out(layers, rows[-1], batch), get_image(record, layers[0], image, batch))]
    # (Tk,), or (H, Tk) for each head.
    weights = [read_weights(each, batch, head, indices) for each, indices in zip(layers, rows, strict=True)]
    segments = [get_image(record, each, image, batch) for each in layers]
    return layers, [lay_out(part, grid) for part, grid in zip(weights, segments, strict=True)]


def map_columns(
    record: Record, query: Any, image: int, layer: Any, head: Any, batch: int
) -> tuple[list[Layer], list[Tensor]]:
    """The maps of the queries that look at a word, and the layers that they belong to."""
    if layer == "rollout":
        raise ValueError("layer must not be 'rollout' where the image attends to the text: use Record.rollout")
    layers = select_layers(record, layer, batch, axis=0)
    positions = find_key(record, layers, query, batch)
    check_heads(layers, head)
    maps = []
    for each in layers:
        weights = read_columns(each, batch, positions).float().mean(-1).cpu()  # (H, Tq)
        if head != "each":
            weights = weights.mean(0) if head is None else weights[each.heads.index(head)]
        maps.append(lay_out(weights, get_image(record, each, image, batch, axis=0)))
    return layers, maps


def reads_columns(record: Record, direction: Any, query: Any, batch: int) -> bool:
    """Whether the image attends to the word, and not the word to the image."""
    if direction not in (None, *DIRECTIONS):
        raise ValueError(f"direction must be one of {', '.join(map(repr, DIRECTIONS))}, got {direction!r}")
    reading = [each for each in record.layers.values() if shows_text_to_image(record, each, batch)]
    words = [each for each in record.layers.values() if shows_image_to_text(record, each, batch)]
    if direction == "image->text" and not words:
        raise ValueError(
            "direction must be 'text->image' for a record whose images attend to no text, got 'image->text'"
        )
    if direction == "text->image" and words and not reading:
        raise ValueError(
            "direction must be 'image->text' for a record whose text attends to no image, got 'text->image'"
        )
    if direction is not None or not words:
        return bool(direction == "image->text")
    # A patch that is named as it is labelled looks at other patches.
    return not reading and not is_patch_name(query)


def is_patch_name(query: Any) -> bool:
    """Whether a query is named as a patch is labelled, by its row and column: "2,3", or "1:2,3" with its frame."""
    return isinstance(query, str) and re.fullmatch(r"(\d+:)?\d+,\d+", query.strip()) is not None


def shows_text_to_image(record: Record, layer: Layer, batch: int) -> bool:
    """Whether the text of a layer attends to an image, and its weights were kept."""
    is_kept = layer.kept is None or "query_weights" in layer.kept
    return is_kept and has_image(record, layer, batch) and is_text(record.labels_of(layer)[0], batch)


def shows_image_to_text(record: Record, layer: Layer, batch: int) -> bool:
    """Whether the image of a layer attends to text, and its weights were kept."""
    is_kept = layer.kept is None or "key_weights" in layer.kept
    return is_kept and has_image(record, layer, batch, axis=0) and is_text(record.labels_of(layer)[1], batch)


def find_key(record: Record, layers: Sequence[Layer], query: Any, batch: int) -> list[int]:
    """The positions of a word, a number or several numbers among the keys."""
    labels = record.labels_of(layers[0])[1]
    if isinstance(query, str):
        positions = find_word(labels, query, batch)
        if positions:
            return positions
        words = [text for text, _ in list_words(labels, batch)]
        listed = " ".join(words[:MAX_LISTED_WORDS]) + " …" * (len(words) > MAX_LISTED_WORDS)
        raise ValueError(f"query must be a word of the text ({listed}) or a position, got {query!r}")
    return check_positions(query, len(labels))


def check_positions(query: Any, length: int) -> list[int]:
    numbers = list(query) if isinstance(query, Iterable) else [query]
    if not numbers or not all(isinstance(n, int) and -length <= n < length for n in numbers):
        raise ValueError(f"query must be a word or positions from {-length} to {length - 1}, got {query!r}")
    return [number % length for number in numbers]


@torch.no_grad()
def rank_words(
    record: Record, box: Any, image: int, layer: Any, head: Any, batch: int, step: Any = None, direction: Any = None
) -> list[tuple[str, float]]:
    """Implements `Record.words_for`."""
    check_box(box)
    record = record if step is None else record.at(step=step)
    if reads_columns(record, direction, None, batch):
        labels, weights = weigh_words_of_patches(record, box, image, layer, head, batch)
    else:
        labels, weights = weigh_words_on_patches(record, box, image, layer, head, batch)
    words = [
        (text, sum(weights[position] for position in positions if position in weights) / len(positions))
        for text, positions in list_words(labels, batch)
        if any(position in weights for position in positions)
    ]
    return sorted(words, key=lambda word: -word[1])


def weigh_words_on_patches(
    record: Record, box: Box, image: int, layer: Any, head: Any, batch: int
) -> tuple[Labels, dict[int, float]]:
    """The weight of each position of the text on a part of the image; only the rows of the text are read."""
    layers = [each for each in select_layers(record, layer, batch) if is_text(record.labels_of(each)[0], batch)]
    if not layers:
        raise ValueError("the record must have a text that attends to the image, got one of images only")
    check_heads(layers, head)
    labels = record.labels_of(layers[0])[0]
    positions = [position for _, positions in list_words(labels, batch) for position in positions]
    segments = get_image(record, layers[0], image, batch)
    coverage = torch.zeros(layers[0].shape[-1])
    for segment in segments:
        coverage[segment.positions] = measure_coverage(segment, box)
    parts = [weigh_keys(each, batch, head, coverage, positions) for each in layers]
    return labels, dict(zip(positions, torch.stack(parts).mean(0).tolist(), strict=True))


def weigh_words_of_patches(
    record: Record, box: Box, image: int, layer: Any, head: Any, batch: int
) -> tuple[Labels, dict[int, float]]:
    """The mean weight of the patches in a part of the image on each position of the text."""
    layers = select_layers(record, layer, batch, axis=0)
    check_heads(layers, head)
    labels = record.labels_of(layers[0])[1]
    keys = [position for _, positions in list_words(labels, batch) for position in positions]
    kept = [key for key in keys if all(not each.kept_keys or key in each.kept_keys for each in layers)]
    parts = []
    for each in layers:
        share = torch.zeros(each.shape[-2])
        for segment in get_image(record, each, image, batch, axis=0):
            share[segment.positions] = measure_coverage(segment, box)
        parts.append(weigh_queries(each, batch, head, share / share.sum(), kept))
    return labels, dict(zip(kept, torch.stack(parts).mean(0).tolist(), strict=True))


def select_layers(record: Record, layer: Any, batch: int, axis: int = 1) -> list[Layer]:
    """The layers that attend to images: all of them, the named one, or a group; with axis 0 those of images to text."""
    sequences = max((each.shape[0] for each in record.layers.values()), default=1)
    if not isinstance(batch, int) or not 0 <= batch < sequences:
        raise ValueError(f"batch must be from 0 to {sequences - 1}, got {batch!r}")
    if axis == 0:
        with_images = [each for each in record.layers.values() if shows_image_to_text(record, each, batch)]
    else:
        with_images = [each for each in record.layers.values() if has_image(record, each, batch)]
    if not with_images:
        misfits = [explain_misfit(each, record.labels) for each in record.layers.values()]
        if any(labels.grid or labels.segments for labels in record.labels.values()) and any(misfits):
            raise ValueError(next(filter(None, misfits)))
        raise ValueError(
            "the record must have image patches among its keys, got none: watch a model that reads images, or give the"
            " grid with seen.label(foci.Labels.patches(rows, columns, extra=1), name=...)"
        )
    if layer in (None, "each", "rollout"):
        return with_images
    if isinstance(layer, int):
        chosen = [each for each in with_images if each.index == layer]
        if not chosen:
            raise ValueError(f"layer must be a number from {sorted({x.index for x in with_images})}, got {layer}")
        return chosen
    chosen = [each for each in with_images if f"{each.name}.".startswith(f"{layer}.")]
    if chosen:
        return chosen
    try:
        named = record[layer]
    except KeyError:
        named = None
    chosen = [each for each in with_images if named is not None and each.name == named.name]
    if named is None or not chosen:
        names = ", ".join(record.name_of(each) for each in with_images[:8])
        what = "one that attends to an image" if axis else "one whose image attends to text"
        raise ValueError(f"layer must be {what} ({names}), got {layer!r}")
    return [named]


def has_image(record: Record, layer: Layer, batch: int, axis: int = 1) -> bool:
    """Whether the keys of a layer are or contain image patches; with axis 0 its queries."""
    return batch < layer.shape[0] and bool(record.labels_of(layer)[axis].grids(batch))


def get_image(record: Record, layer: Layer, image: int, batch: int, axis: int = 1) -> list[Segment]:
    """The segments of one image among the keys of a layer; with axis 0 among its queries."""
    images = record.labels_of(layer)[axis].grids(batch)
    if not isinstance(image, int) or isinstance(image, bool) or not 0 <= image < len(images):
        received = repr(image) if isinstance(image, int) else f"a {type(image).__name__}"
        raise ValueError(f"image must be from 0 to {len(images) - 1}, got {received}")
    return images[image]


def check_heads(layers: Sequence[Layer], head: Any) -> None:
    known = set.intersection(*({*layer.heads} for layer in layers))
    if head not in (None, "each") and (isinstance(head, bool) or head not in known):
        raise ValueError(f"head must be None, 'each' or a number from {sorted(known)}, got {head!r}")


def is_text(labels: Labels, batch: int) -> bool:
    return labels.kind == "tokens"


def find_query(record: Record, layers: Sequence[Layer], query: Any, batch: int) -> tuple[list[Layer], list[int]]:
    """The layers that have the query, and its positions: of a word, of a number, of several numbers.

    A number counts in the text if the model reads one, otherwise in the image.
    """
    texts = [each for each in layers if is_text(record.labels_of(each)[0], batch)]
    # The grids of a model may shrink from stage to stage: a patch is one of the first of them.
    layers = texts + [each for each in layers if each not in texts and each.queries == first_grid(layers, texts)]
    found = list(texts or layers)
    if isinstance(query, str):
        for group in (texts, [each for each in layers if each not in texts]):
            labels = sequence_of(record, group[0]) if group else None
            positions = [] if labels is None else find_word(labels, query, batch)
            if positions:
                return group, positions
        labels = sequence_of(record, found[0])
        words = [text for text, _ in list_words(labels, batch)] if texts else list(labels.texts[batch])
        listed = (" " if texts else "; ").join(words[:MAX_LISTED_WORDS]) + " …" * (len(words) > MAX_LISTED_WORDS)
        what = "a word of the text" if texts else "a label of the image"
        raise ValueError(f"query must be {what} ({listed}) or a position, got {query!r}")
    return found, check_positions(query, len(sequence_of(record, found[0])))


def first_grid(layers: Sequence[Layer], texts: Sequence[Layer]) -> str | None:
    return next((each.queries for each in layers if each not in texts), None)


def sequence_of(record: Record, layer: Layer) -> Labels:
    """The labels of the whole sequence that the queries of a layer are part of."""
    labels = record.labels.get(layer.queries)
    return record.labels_of(layer)[0] if labels is None or len(labels) < layer.shape[-2] else labels


def rows_of(record: Record, layer: Layer, positions: Sequence[int]) -> list[int]:
    """The rows of a layer at which these positions are queries."""
    is_cross = layer.queries != layer.keys
    rows = list(range(layer.shape[-2])) if is_cross else layer.positions.tolist()
    recorded = rows if layer.rows is None else list(layer.rows)
    missing = [position for position in positions if position not in recorded]
    if missing:
        raise ValueError(
            f"query must be recorded in {record.name_of(layer)}, got position {missing[0]}: it was not read by the"
            " model, or not kept (queries= of foci.watch)"
        )
    return [recorded.index(position) for position in positions]


def read_weights(layer: Layer, batch: int, head: Any, rows: list[int]) -> Tensor:
    """The mean of some rows, averaged over heads or of one head: (Tk,); of each head: (H, Tk)."""
    if layer.kept is not None:
        entries: Any = layer.lines(rows)[batch]
        entries = entries if head in (None, "each") else entries[layer.heads.index(head)]
    elif head in (None, "each"):
        entries = layer[batch, :, rows]
    else:
        entries = layer[batch, layer.heads.index(head), rows]
    assert isinstance(entries, Tensor)
    mean = entries.float().mean(-2).cpu()
    return mean.mean(0) if head is None else mean


def roll_out(layers: Sequence[Layer], rows: Sequence[int], batch: int) -> Tensor:
    """Attention rollout of some rows of the last layer through all layers: (Tk,)."""
    if any(layer.queries != layer.keys for layer in layers):
        raise ValueError("layer must not be 'rollout' for cross-attention to an image: use Record.rollout")
    ordered = sorted(layers, key=lambda layer: layer.index)
    return metrics.compute_rollout(ordered, rows, batch).cpu()


def weigh_keys(layer: Layer, batch: int, head: Any, x: Tensor, positions: Sequence[int]) -> Tensor:
    """The weight of the queries at some positions on some keys, (positions,); only their rows are read, in strips."""
    recorded = layer.positions.tolist() if layer.rows is None else list(layer.rows)
    recorded = recorded if layer.queries == layer.keys else list(range(layer.shape[-2]))
    place = {position: row for row, position in enumerate(recorded)}
    rows = [place[position] for position in positions]
    size = max(1, MAX_STRIP_ENTRIES // max(1, layer.sizes[1] * layer.shape[-1]))
    parts = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        entries: Any = layer.lines(part)[batch] if layer.kept is not None else layer.with_head_axis()[batch, :, part]
        shares = entries.float() @ x.to(entries.device)
        parts.append((shares.mean(0) if head is None else shares[layer.heads.index(head)]).cpu())
    return torch.cat(parts)


def weigh_queries(layer: Layer, batch: int, head: Any, x: Tensor, keys: Sequence[int]) -> Tensor:
    """The weights on some keys, summed over the queries with the factors x: (keys,); the columns are read in strips."""
    size = max(1, MAX_STRIP_ENTRIES // max(1, layer.sizes[1] * layer.shape[-2]))
    parts = []
    for start in range(0, len(keys), size):
        sums = x @ read_columns(layer, batch, keys[start : start + size]).float().cpu()
        parts.append(sums.mean(0) if head is None else sums[layer.heads.index(head)])
    return torch.cat(parts)


def read_columns(layer: Layer, batch: int, keys: Sequence[int]) -> Tensor:
    """The exact weights of all queries of a sequence on some keys: (H, Tq, keys)."""
    layer = layer.with_head_axis()
    entries: Any = layer.columns(keys)[batch] if layer.kept is not None else layer[batch, :, :, list(keys)]
    assert isinstance(entries, Tensor)
    return entries

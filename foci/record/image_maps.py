"""Where in an image a word looks, and which words look at a part of it, from the exact weights of single rows.

H heads, Tk keys; rows x columns of the map.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.record import metrics
from foci.record.labels import Labels, Segment

if TYPE_CHECKING:
    from foci.record.layer import Layer
    from foci.record.record import Record

# Words named in an error message.
MAX_LISTED_WORDS = 30

Box = tuple[float, float, float, float]


@torch.no_grad()
def compute_image_map(
    record: Record, query: Any, image: int, layer: Any, head: Any, upsample: Any, batch: int
) -> Tensor:
    """Implements `Record.image_map`."""
    layers = select_layers(record, layer, batch)
    layers, positions = find_query(record, layers, query, batch)
    check_heads(layers, head)
    segments = get_image(record, layers[0], image, batch)
    rows = [rows_of(record, each, positions) for each in layers]
    if layer == "rollout":
        if head is not None:
            raise ValueError(f"head must be None for layer='rollout', which averages the heads, got {head!r}")
        weights = roll_out(layers, rows[-1], batch)
    else:
        # (layers, Tk), or (layers, H, Tk) for each head.
        parts = [read_weights(each, batch, head, indices) for each, indices in zip(layers, rows, strict=True)]
        weights = torch.stack(parts) if layer == "each" else torch.stack(parts).mean(0)
    result = lay_out(weights, segments)
    return result if upsample is False else enlarge(result, upsample, record.labels_of(layers[0])[1], image, batch)


@torch.no_grad()
def rank_words(record: Record, box: Any, image: int, layer: Any, head: Any, batch: int) -> list[tuple[str, float]]:
    """Implements `Record.words_for`."""
    check_box(box)
    layers = [each for each in select_layers(record, layer, batch) if is_text(record.labels_of(each)[0], batch)]
    if not layers:
        raise ValueError("the record must have a text that attends to the image, got one of images only")
    check_heads(layers, head)
    segments = get_image(record, layers[0], image, batch)
    coverage = torch.zeros(layers[0].shape[-1])
    for segment in segments:
        coverage[segment.positions] = measure_coverage(segment, box)
    parts = [weigh_keys(each, batch, head, coverage) for each in layers]
    labels, weights = record.labels_of(layers[0])[0], torch.stack(parts).mean(0)
    words = [(text, float(weights[positions].mean())) for text, positions in list_words(labels, batch)]
    return sorted(words, key=lambda word: -word[1])


def select_layers(record: Record, layer: Any, batch: int) -> list[Layer]:
    """The layers whose keys are or contain image patches: all of them, or the named one."""
    with_images = [each for each in record.layers.values() if has_image(record, each, batch)]
    if not with_images:
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
    chosen = [record[layer]]
    if not has_image(record, chosen[0], batch):
        names = ", ".join(record.name_of(each) for each in with_images[:8])
        raise ValueError(f"layer must be one that attends to an image ({names}), got {layer!r}")
    return chosen


def has_image(record: Record, layer: Layer, batch: int) -> bool:
    return batch < layer.shape[0] and bool(record.labels_of(layer)[1].grids(batch))


def get_image(record: Record, layer: Layer, image: int, batch: int) -> list[Segment]:
    """The segments of one image among the keys of a layer."""
    images = record.labels_of(layer)[1].grids(batch)
    if not isinstance(image, int) or isinstance(image, bool) or not 0 <= image < len(images):
        raise ValueError(f"image must be from 0 to {len(images) - 1}, got {image!r}")
    return images[image]


def check_heads(layers: Sequence[Layer], head: Any) -> None:
    known = set.intersection(*({*layer.heads} for layer in layers))
    if head not in (None, "each") and head not in known:
        raise ValueError(f"head must be None, 'each' or a number from {sorted(known)}, got {head!r}")


def is_text(labels: Labels, batch: int) -> bool:
    return labels.kind == "tokens"


def find_query(record: Record, layers: Sequence[Layer], query: Any, batch: int) -> tuple[list[Layer], list[int]]:
    """The layers that have the query, and its positions: of a word, of a number, of several numbers.

    A number counts in the text if the model reads one, otherwise in the image.
    """
    texts = [each for each in layers if is_text(record.labels_of(each)[0], batch)]
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
    length = len(sequence_of(record, found[0]))
    numbers = [query] if isinstance(query, int) else list(query)
    if not numbers or not all(isinstance(n, int) and -length <= n < length for n in numbers):
        raise ValueError(f"query must be a word or positions from {-length} to {length - 1}, got {query!r}")
    return found, [number % length for number in numbers]


def sequence_of(record: Record, layer: Layer) -> Labels:
    """The labels of the whole sequence that the queries of a layer are part of."""
    labels = record.labels.get(layer.queries)
    return record.labels_of(layer)[0] if labels is None or len(labels) < layer.shape[-2] else labels


def find_word(labels: Labels, word: str, batch: int) -> list[int]:
    """The positions of a word or phrase: "the", "the#2" for its second occurrence; case does not matter.

    >>> labels = Labels.tokens([["The", " red", " sh", "oe", " and", " the", " boot"]])
    >>> find_word(labels, "shoe", 0), find_word(labels, "the#2", 0), find_word(labels, "hoe", 0)
    ([2, 3], [5], [])
    """
    if labels.kind != "tokens":
        return [position for position, text in enumerate(labels.texts[batch]) if text == word.strip()][:1]
    text, owners = join_texts(labels, batch)
    wanted, _, count = word.strip().partition("#")
    if not wanted:
        return []
    pattern = re.compile(rf"(?<!\w){re.escape(wanted)}(?!\w)", re.IGNORECASE)
    matches = list(pattern.finditer(text))
    number = int(count) if count.isdigit() else 1
    if not 1 <= number <= len(matches):
        return []
    match = matches[number - 1]
    return sorted({owner for owner in owners[match.start() : match.end()] if owner >= 0})


def join_texts(labels: Labels, batch: int) -> tuple[str, list[int]]:
    """The text without patches, and the position of each of its characters, -1 for a space between tokens."""
    patches = positions_of_segments(labels, batch)
    texts = labels.texts[batch]
    # Tokens that carry no spaces are words of their own.
    between = "" if any(text[:1].isspace() for text in texts[1:]) else " "
    parts: list[str] = []
    owners: list[int] = []
    for position, text in enumerate(texts):
        shown = " " if position in patches else text + between
        parts.append(shown)
        owners += [position if position not in patches and index < len(text) else -1 for index in range(len(shown))]
    return "".join(parts), owners


def positions_of_segments(labels: Labels, batch: int) -> set[int]:
    segments = [each for each in labels.segments if each.sequence == batch]
    return {position for each in segments for position in range(each.start, each.stop)}


def list_words(labels: Labels, batch: int) -> list[tuple[str, list[int]]]:
    """The words of a text and their positions, without the patches."""
    text, owners = join_texts(labels, batch)
    words = []
    for match in re.finditer(r"\S+", text):
        positions = sorted({owner for owner in owners[match.start() : match.end()] if owner >= 0})
        if positions:
            words.append((match.group(), positions))
    return words


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
    if head in (None, "each"):
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
    return torch.stack([metrics.compute_rollout(ordered, row, batch) for row in rows]).mean(0).cpu()


def weigh_keys(layer: Layer, batch: int, head: Any, x: Tensor) -> Tensor:
    """The weight of each query on some keys, (Tq,), by a product with the lazy matrix."""
    weights: Any = layer[batch] if head is None else layer.head(head)[batch]
    if head is None:
        weights = weights.mean(0) if isinstance(weights, Tensor) else weights.mean("heads")
    product: Tensor = weights @ x.to(weights.device, weights.dtype)
    return product.float().cpu()


def lay_out(weights: Tensor, segments: Sequence[Segment]) -> Tensor:
    """(..., Tk) -> (..., rows, columns): the weights at their places in the image; one more axis for frames.

    Several segments, such as tiles and the whole image, are added on the finest of their grids; a coarser patch spreads
    over the finer ones that it covers, so that the map sums to the weight on the image.
    """
    frames: dict[int | None, list[Segment]] = {}
    for segment in segments:
        frames.setdefault(segment.frame, []).append(segment)
    maps = [add_segments(weights, parts) for _, parts in sorted(frames.items(), key=lambda item: item[0] or 0)]
    return torch.stack(maps, -3) if segments[0].frame is not None else maps[0]


def add_segments(weights: Tensor, segments: Sequence[Segment]) -> Tensor:
    rows = max(round(each.rows / (each.box[2] - each.box[0])) for each in segments)
    columns = max(round(each.columns / (each.box[3] - each.box[1])) for each in segments)
    total = weights.new_zeros(*weights.shape[:-1], rows, columns)
    for each in segments:
        part = weights[..., each.positions]
        top, left, bottom, right = each.box
        down, across = overlap(each.rows, top, bottom, rows), overlap(each.columns, left, right, columns)
        is_exact = (each.rows, each.columns) == (rows, columns)
        total = total + (part if is_exact else down.to(part) @ part @ across.to(part).mT)
    return total


def overlap(cells: int, low: float, high: float, finer: int) -> Tensor:
    """(finer, cells): the share of each cell, from low to high, that lies in each of the finer cells from 0 to 1."""
    edges = torch.linspace(low, high, cells + 1, dtype=torch.float64)
    others = torch.linspace(0, 1, finer + 1, dtype=torch.float64)
    starts, ends = torch.maximum(edges[:-1], others[:-1, None]), torch.minimum(edges[1:], others[1:, None])
    return (ends - starts).clamp(min=0) / ((high - low) / cells)


def check_box(box: Any) -> None:
    numbers = list(box) if isinstance(box, list | tuple) else []
    fits = len(numbers) == 4 and all(isinstance(n, int | float) for n in numbers)
    if not fits or not (0 <= numbers[0] < numbers[2] <= 1 and 0 <= numbers[1] < numbers[3] <= 1):
        raise ValueError(f"box must be (top, left, bottom, right) in parts of the image from 0 to 1, got {box!r}")


def measure_coverage(segment: Segment, box: Box) -> Tensor:
    """(rows, columns): the part of each patch that lies in a box of the image."""
    spans = []
    for cells, low, high, start, end in (
        (segment.rows, segment.box[0], segment.box[2], box[0], box[2]),
        (segment.columns, segment.box[1], segment.box[3], box[1], box[3]),
    ):
        edges = torch.linspace(low, high, cells + 1, dtype=torch.float64)
        inside = edges[1:].clamp(max=end) - edges[:-1].clamp(min=start)
        spans.append(inside.clamp(min=0) / ((high - low) / cells))
    return (spans[0][:, None] * spans[1]).float()


def enlarge(result: Tensor, upsample: Any, labels: Labels, image: int, batch: int) -> Tensor:
    """The map at the size of the picture, or at a given size, interpolated between the patches."""
    if upsample is True:
        picture = labels.picture(batch, image)
        if picture is None:
            raise ValueError("upsample must be (height, width), got True: the record has no picture of the image")
        size = tuple(picture.shape[:2])
    elif isinstance(upsample, list | tuple) and len(upsample) == 2 and all(isinstance(n, int) for n in upsample):
        size = tuple(upsample)
    else:
        raise ValueError(f"upsample must be True, False or (height, width), got {upsample!r}")
    flat = result.reshape(1, -1, *result.shape[-2:])
    return F.interpolate(flat, size, mode="bilinear").reshape(*result.shape[:-2], *size)

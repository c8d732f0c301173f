"""Where in an image a word looks, and which words look at a part of it, from the exact weights of single rows.

H heads, Tk keys; rows x columns of the map.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.record import metrics
from foci.record.labels import Labels, Segment
from foci.runtime.checks import is_positive_int

if TYPE_CHECKING:
    from foci.record.layer import Layer
    from foci.record.record import Record

# Words named in an error message.
MAX_LISTED_WORDS = 30

# Which of a word and an image has the queries.
DIRECTIONS = ("text->image", "image->text")
# The largest number of matrix entries read at a time.
MAX_STRIP_ENTRIES = 1 << 22

Box = tuple[float, float, float, float]


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


def resize_to_finest(maps: Sequence[Tensor]) -> list[Tensor]:
    """Maps (..., rows, columns) on the finest of their grids; what a bicubic curve adds below 0 is cut off."""
    size = max((tuple(each.shape[-2:]) for each in maps), key=lambda shape: shape[0] * shape[1])
    resized = []
    for each in maps:
        if tuple(each.shape[-2:]) == size:
            resized.append(each)
            continue
        flat = each.reshape(1, -1, *each.shape[-2:])
        resized.append(F.interpolate(flat, size, mode="bicubic").clamp(min=0).reshape(*each.shape[:-2], *size))
    return resized


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
    named = record[layer]
    chosen = [each for each in with_images if each.name == named.name]
    if not chosen:
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
    elif isinstance(upsample, list | tuple) and len(upsample) == 2 and all(map(is_positive_int, upsample)):
        size = tuple(upsample)
    else:
        raise ValueError(f"upsample must be True, False or (height, width) of at least 1, got {upsample!r}")
    flat = result.reshape(1, -1, *result.shape[-2:])
    return F.interpolate(flat, size, mode="bilinear").reshape(*result.shape[:-2], *size)

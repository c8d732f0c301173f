"""Encodes a Record for the page: a JSON header and packed arrays, compressed.

Up to MAX_EXACT_LENGTH tokens the payload has every entry of every head. Beyond that it has the top keys of each query
and pictures of the matrix; the page says which of the two it shows. With `on_demand` it has only labels: a page that is
connected to the record asks for rows and tiles when it draws them.

B batch, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import struct
from typing import Any

import torch
from torch import Tensor

from foci.record.labels import Labels
from foci.record.layer import Layer
from foci.record.metrics import HEAD_SCORES
from foci.record.record import Record
from foci.view.page.arrays import PackedArrays
from foci.view.page.images import add_blocks, add_pictures, add_steps, describe_images
from foci.view.page.sounds import add_sounds, find_frame_seconds
from foci.view.page.vectors import add_vectors, count_vector_numbers, describe_score
from foci.view.selection import list_layers, select_default_head, select_default_query, select_word_of_image
from foci.view.units import display_texts

MAX_EXACT_LENGTH = 128
# Longer records are exact too if they have at most this many entries in total.
MAX_EXACT_ENTRIES = 2**21
PAYLOAD_TOP_KEYS = 16
PICTURE_SIDES = (512, 256, 128, 64)
MAX_SEQUENCES = 8
SURROGATES = re.compile("[\ud800-\udfff]")
MAX_TEXT_LENGTH = 1000

# The parts of labels that must be equal for two layers to share them.
COMPARED_FIELDS = ("texts", "words", "grid", "segments")

# The most numbers of each part: entries as float32, top keys, blocks of pictures.
MAX_FLOAT_ENTRIES = 2**20
MAX_TOP_NUMBERS = 13_000_000
MAX_PICTURE_BLOCKS = 5_000_000
# Larger records have no log-sum-exp: it would take more room than the "How it is computed" view is worth.
MAX_LSE_NUMBERS = 2**18
# Number of elements up to which the vectors of the "How it is computed" view are float32, and up to which float16;
# larger ones are left out.
MAX_VECTOR_NUMBERS = (2**18, 3 * 2**19)


def encode_payload(record: Record, title: str | None = None) -> bytes:
    """Encode a record as bytes."""
    arrays = PackedArrays()
    return compress_payload(build_header(record, title, arrays), arrays)


def compress_payload(header: dict[str, Any], arrays: PackedArrays) -> bytes:
    """Compress a payload: gzip of the length of the header, the header, the arrays."""
    header["arrays"] = arrays.index
    # NaN and infinity are not valid JSON.
    written = json.dumps(header, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # A tokenizer may return surrogates, which UTF-8 cannot encode.
    text = SURROGATES.sub("\ufffd", written).encode()
    # Without a time stamp, equal records give equal bytes.
    return gzip.compress(struct.pack("<I", len(text)) + text + arrays.data, compresslevel=6, mtime=0)


@torch.no_grad()
def build_header(record: Record, title: str | None, arrays: PackedArrays, on_demand: bool = False) -> dict[str, Any]:
    """Build the header, and add the large arrays to `arrays`."""
    layers = list_layers(record)
    total = max(layer.shape[0] for layer in layers)
    max_sequences = min(total, MAX_SEQUENCES if is_exact_throughout(layers) else 1)
    plan = plan_payload(layers, max_sequences)
    table: list[Labels] = []
    blocks: list[Any] = [None] * len(layers)
    steps, step_blocks = list(range(record.steps)) if record.steps > 1 else [], blocks
    if on_demand:
        plan["exact"] = set()
        written = [describe_absent_entries(layer, max_sequences) for layer in layers]
    else:
        written = [add_layer(arrays, f"{number}", layer, max_sequences, plan) for number, layer in enumerate(layers)]
        blocks = add_blocks(arrays, record, layers, plan["exact"], max_sequences)
        steps, step_blocks = add_steps(arrays, record, layers, max_sequences)
    initial = select_default_head(record)
    query, word = select_default_query(record, initial), select_word_of_image(record, initial)
    described = [describe_layer(record, layer, plan, table) for layer in layers]
    drawn = add_pictures(arrays, table, max_sequences)
    return {
        "format": 1,
        "title": truncate_with_length(title or record.model),
        "model": truncate_with_length(record.model),
        "sequences": max_sequences,
        "total": total,
        "prompt": record.prompt,
        "answer": record.answer,
        "notes": [truncate_with_length(note) for note in record.notes],
        "notRecorded": [truncate_with_length(reason) for reason in record.unseen],
        "layers": [
            layer | how | {"block": block, "stepBlock": step_block}
            for layer, how, block, step_block in zip(described, written, blocks, step_blocks, strict=True)
        ],
        "labels": [describe_labels(arrays, i, labels, max_sequences, drawn) for i, labels in enumerate(table)],
        # The denoising steps that the page can show, of so many.
        "steps": steps,
        "totalSteps": record.steps,
        "metrics": [] if on_demand else list_head_metrics(record, layers),
        "onDemand": on_demand,
        "initial": {
            "head": record.name_of(initial.layer, initial.head),
            # Where an image attends to text, the page shows the patches that attend to a word.
            "query": query if word is None else word,
            "direction": "to" if word is None else "from",
        },
    }


def is_exact_throughout(layers: list[Layer]) -> bool:
    return all(max(layer.shape[2:]) <= MAX_EXACT_LENGTH for layer in layers)


def plan_payload(layers: list[Layer], max_sequences: int) -> dict[str, Any]:
    """Choose what is written in which precision, to bound the size of the file."""
    small = sum(count_entries(layer) for layer in layers) * max_sequences <= MAX_EXACT_ENTRIES
    exact = [
        layer
        for layer in layers
        if "entries" in layer.available and (small or max(layer.shape[2:]) <= MAX_EXACT_LENGTH)
    ]
    entries = sum(count_entries(layer) for layer in exact) * max_sequences
    long = [layer for layer in layers if layer not in exact]
    queries = sum(layer.shape[1] * layer.shape[2] for layer in long) * max_sequences
    heads = sum(layer.shape[1] for layer in long) * max_sequences
    return {
        "exact": {layer.name for layer in exact},
        "entries": "f4" if entries <= MAX_FLOAT_ENTRIES else "log16",
        "top": next((k for k in (PAYLOAD_TOP_KEYS, 8, 4, 2) if queries * k <= MAX_TOP_NUMBERS), 1),
        "side": next(
            (side for side in PICTURE_SIDES if 2 * heads * side * side <= MAX_PICTURE_BLOCKS), PICTURE_SIDES[-1]
        ),
        "lse": sum(layer.shape[1] * layer.shape[2] for layer in layers) * max_sequences <= MAX_LSE_NUMBERS,
        "vectors": choose_vector_kind(sum(count_vector_numbers(layer, max_sequences) for layer in layers)),
    }


def choose_vector_kind(numbers: int) -> str | None:
    precise, rounded = MAX_VECTOR_NUMBERS
    return "f4" if numbers <= precise else "f2" if numbers <= rounded else None


def count_entries(layer: Layer) -> int:
    return math.prod(layer.shape[1:])


def describe_layer(record: Record, layer: Layer, plan: dict[str, Any], table: list[Labels]) -> dict[str, Any]:
    """Describe a layer; its labels are added to `table` once and referenced by index."""
    _, heads, queries, keys = layer.shape
    return {
        "name": layer.name,
        "label": record.name_of(layer),
        "names": [record.name_of(layer, head) for head in layer.heads],
        "stack": layer.stack,
        "index": layer.index,
        "heads": heads,
        "kvHeads": layer.kv_heads,
        "queries": layer.queries,
        "keys": layer.keys,
        "labels": [add_labels_once(labels, table) for labels in record.labels_of(layer)],
        "Tq": queries,
        "Tk": keys,
        "queryPositions": None if layer.query_positions is None else layer.query_positions.tolist(),
        "exact": layer.name in plan["exact"],
        "hasEntries": "entries" in layer.available,
        "score": describe_score(layer),
    }


def add_layer(
    arrays: PackedArrays, name: str, layer: Layer, max_sequences: int, plan: dict[str, Any]
) -> dict[str, Any]:
    """Add the arrays of a layer, each (sequences, H, ...).

    Returns the kind of its entries, and the number of rows with NaN or infinite weights per sequence and head.
    """
    sequences, kind = min(max_sequences, layer.shape[0]), plan["entries"]
    if layer.name in plan["exact"]:
        whole = read_entries(layer, sequences)
        missing = ~whole.isfinite().all(-1)
        # A logarithmic code cannot represent NaN.
        kind = "f4" if missing.any() else kind
        arrays.add(f"{name}.entries", whole, kind)
    else:
        whole_batch = summarize_long_layer(layer, plan["top"], plan["side"])
        statistics = {part: tensor[:sequences].cpu() for part, tensor in whole_batch.items()}
        add_statistics(arrays, name, layer, statistics)
        missing = (
            ~statistics["entropy"].isfinite() if "entropy" in statistics else torch.zeros(sequences, layer.shape[1], 1)
        )
    add_vectors(arrays, name, layer, sequences, plan["lse"], plan["vectors"])
    return {"entries": kind, "nonfiniteRows": missing.sum(-1).int().tolist()}


def describe_absent_entries(layer: Layer, max_sequences: int) -> dict[str, Any]:
    """Describe a layer without arrays; whether its rows are finite is not known before they are computed."""
    return {"entries": "f4", "nonfiniteRows": [[0] * layer.shape[1]] * min(max_sequences, layer.shape[0])}


def read_entries(layer: Layer, sequences: int) -> Tensor:
    """Read every entry: (sequences, H, Tq, Tk)."""
    entries = layer[:sequences, :, 0 : layer.shape[2], :]
    assert isinstance(entries, Tensor)
    return entries.float()


def summarize_long_layer(layer: Layer, top: int, side: int) -> dict[str, Tensor]:
    """Compute what replaces the entries of a long layer: top keys, pictures, entropy and received weights."""
    if layer.weights is not None:
        # One pass computes everything but the maxima.
        whole = layer.weights.summary(top=top, picture=side)
        assert whole.top is not None and whole.picture is not None
        rows, columns = whole.picture.shape[-2:]
        largest = layer.picture(rows, columns, "max")
        named = {"values": whole.top.values, "keys": whole.top.keys, "mean": whole.picture, "max": largest}
        return {**named, "entropy": whole.entropy, "received": whole.received}
    statistics: dict[str, Tensor] = {
        part: getattr(layer, part)() for part in ("entropy", "received") if part in layer.available
    }
    if "top" in layer.available:
        statistics["values"], statistics["keys"] = layer.top(min(top, layer.max_top))
    if "picture" in layer.available:
        # A kept picture has a fixed size and only means.
        kept = layer.kept is not None
        rows, columns = (size if kept else min(side, size) for size in layer.max_picture_size)
        statistics |= {
            reduce: layer.picture(rows, columns, reduce) for reduce in (("mean",) if kept else ("mean", "max"))
        }
    return statistics


def add_statistics(arrays: PackedArrays, name: str, layer: Layer, statistics: dict[str, Tensor]) -> None:
    """Add each statistic in an encoding with enough precision."""
    if "keys" in statistics:
        add_top(arrays, name, statistics["values"].float(), statistics["keys"].long(), layer.shape[3])
    for reduce in ("mean", "max"):
        if reduce in statistics:
            arrays.add(f"{name}.{reduce}", statistics[reduce].float().flatten(0, 1), "log8")
    if "entropy" in statistics:
        arrays.add(f"{name}.entropy", statistics["entropy"], "f2")
    if "received" in statistics:
        arrays.add(f"{name}.received", statistics["received"].float() / layer.shape[2], "log16")


def add_top(arrays: PackedArrays, name: str, values: Tensor, keys: Tensor, length: int) -> None:
    """Add the top keys of each query, sorted by position: the differences are small numbers."""
    last = torch.iinfo(torch.int64).max
    keys, order = torch.where(keys < 0, last, keys).sort(-1)
    values = values.gather(-1, order)
    there = keys < last
    before = torch.cat([torch.zeros_like(keys[..., :1]), keys[..., :-1]], -1)
    steps = torch.where(there, keys - torch.where(there, before, 0), 0)
    arrays.add(f"{name}.keys", steps, "u2" if length <= 2**16 else "u3")
    arrays.add(f"{name}.values", torch.where(there, values, 0.0), "log16")


def add_labels_once(labels: Labels, table: list[Labels]) -> int:
    """Return the index of labels in a table, and append them if no equal labels are there."""
    for number, known in enumerate(table):
        has_same_texts = all(getattr(known, name) == getattr(labels, name) for name in COMPARED_FIELDS)
        if known is labels or (has_same_texts and has_same_media(known, labels)):
            return number
    table.append(labels)
    return len(table) - 1


def has_same_media(labels: Labels, other: Labels) -> bool:
    """Whether two labels have the same pictures and recordings: the same tensors, which are not compared by value."""
    media = [(each.images, each.sounds, *each.pictures) for each in (labels, other)]
    return len(media[0]) == len(media[1]) and all(a is b for a, b in zip(*media, strict=True))


def describe_labels(
    arrays: PackedArrays, number: int, labels: Labels, max_sequences: int, drawn: set[str]
) -> dict[str, Any]:
    """Describe the labels of a sequence; long texts are cut."""
    is_heard = add_sounds(arrays, number, labels, max_sequences)
    sequences = range(min(max_sequences, labels.batch))
    frames = [labels.list_frames(i) if is_heard else [] for i in sequences]
    is_heard = is_heard and (labels.kind == "frames" or any(frames))
    seconds = find_frame_seconds(labels)
    return {
        "kind": labels.kind,
        "texts": [
            [truncate_with_length(text) for text in display_texts(labels, i)]
            for i in range(min(max_sequences, labels.batch))
        ],
        "words": None if labels.words is None else [list(words) for words in labels.words[:max_sequences]],
        "images": describe_images(labels, number, max_sequences, drawn),
        "leading": labels.leading,
        "seconds": seconds if seconds is not None and math.isfinite(seconds) else None,
        "spectrogram": is_heard,
        # The samples per second of the recording; None if only its spectrogram is known.
        "sound": labels.rate if is_heard and labels.sounds is not None else None,
        # Among tokens, the positions of the frames of the recording; None if all positions are.
        "frames": None if labels.kind == "frames" else frames,
    }


def truncate_with_length(text: str) -> str:
    """Cut a text to MAX_TEXT_LENGTH characters and append its length."""
    if len(text) <= MAX_TEXT_LENGTH:
        return text
    return f"{text[:MAX_TEXT_LENGTH]}… ({len(text):,} characters)"


def list_head_metrics(record: Record, layers: list[Layer]) -> list[dict[str, Any]]:
    """List the metrics by which heads are sorted and colored: name, description, and a value per layer and head."""
    metrics = []
    for name, values in record.scores().items():
        rows = [values[i, : layer.shape[1]].tolist() for i, layer in enumerate(layers)]
        # JSON has no NaN: a head without the metric has null.
        plain = [[value if math.isfinite(value) else None for value in row] for row in rows]
        metrics.append({"name": name, "description": HEAD_SCORES[name], "values": plain})
    return metrics

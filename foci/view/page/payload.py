"""A Record as the page reads it: a JSON head, and one blob of numbers.

Up to `EXACT` tokens every entry of every head is written. Above that the heaviest keys of each query are, and pictures
of the whole; the page says which of the two it has.

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
from foci.view.page.vectors import add_vectors, count_vector_numbers, describe_score
from foci.view.selection import select_default_head, select_default_query
from foci.view.units import display_texts

MAX_EXACT_LENGTH = 128
# Longer records are written whole too where they have so few entries in all.
MAX_EXACT_ENTRIES = 2**21
MAX_TOP_KEYS = 16
PICTURE_SIDES = (512, 256, 128, 64)
MAX_SEQUENCES = 8
SURROGATES = re.compile("[\ud800-\udfff]")
MAX_TEXT_LENGTH = 1000

# What each part may take, in numbers: float32 entries, heaviest keys, blocks of pictures.
MAX_FLOAT_ENTRIES = 2**20
MAX_TOP_NUMBERS = 13_000_000
MAX_PICTURE_BLOCKS = 5_000_000
MOST_ROLLOUT = 1024
# Beyond this a log-sum-exp for each query costs more than "How it is computed" is worth.
MAX_LSE_NUMBERS = 2**18
# Vectors for "How it is computed": as float32, as float16, or not at all.
MAX_VECTOR_NUMBERS = (2**18, 3 * 2**19)


@torch.no_grad()
def encode_payload(record: Record, title: str | None = None) -> bytes:
    """The record, compressed: the length of the head, the head, the blob."""
    blob = PackedArrays()
    head = build_header(record, title, blob)
    head["arrays"] = blob.head
    # NaN and infinity are no JSON: a page that has them would not open.
    written = json.dumps(head, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # Halves of characters, which a tokenizer may give, are no text that a browser could read.
    text = SURROGATES.sub("\ufffd", written).encode()
    # The same record gives the same bytes: no time stamp.
    return gzip.compress(struct.pack("<I", len(text)) + text + blob.data, compresslevel=6, mtime=0)


def build_header(record: Record, title: str | None, blob: PackedArrays) -> dict[str, Any]:
    """Everything but the large arrays, which go into the blob."""
    layers = list(record.layers.values())
    if not layers:
        raise ValueError("a page shows at least one layer of attention, but this record has none")
    for layer in layers:
        if 0 in layer.shape:
            raise ValueError(f"a page shows at least one query and one key, but {layer.label} is {layer.shape}")
    total = max(layer.shape[0] for layer in layers)
    shown = min(total, MAX_SEQUENCES if is_exact_throughout(layers) else 1)
    plan = plan_payload(layers, shown)
    table: list[Labels] = []
    written = [add_layer(blob, f"{number}", layer, shown, plan) for number, layer in enumerate(layers)]
    first = select_default_head(record)
    return {
        "format": 1,
        "title": truncate_with_length(title or record.model),
        "model": truncate_with_length(record.model),
        "sequences": shown,
        "total": total,
        "prompt": record.prompt,
        "answer": record.answer,
        "notes": [truncate_with_length(note) for note in record.notes],
        "unseen": [truncate_with_length(reason) for reason in record.unseen],
        "layers": [
            describe_layer(record, layer, plan, table) | how for layer, how in zip(layers, written, strict=True)
        ],
        "labels": [describe_labels(blob, f"image.{i}", labels, shown) for i, labels in enumerate(table)],
        "measures": list_head_metrics(record, layers),
        "first": {"head": record.name_of(first.layer, first.head), "query": select_default_query(record, first)},
    }


def is_exact_throughout(layers: list[Layer]) -> bool:
    return all(max(layer.shape[2:]) <= MAX_EXACT_LENGTH for layer in layers)


def plan_payload(layers: list[Layer], shown: int) -> dict[str, Any]:
    """How much of each kind is written, so that a file stays small enough to send."""
    small = sum(count_entries(layer) for layer in layers) * shown <= MAX_EXACT_ENTRIES
    exact = [
        layer
        for layer in layers
        if "entries" in layer.available and (small or max(layer.shape[2:]) <= MAX_EXACT_LENGTH)
    ]
    entries = sum(count_entries(layer) for layer in exact) * shown
    long = [layer for layer in layers if layer not in exact]
    queries = sum(layer.shape[1] * layer.shape[2] for layer in long) * shown
    heads = sum(layer.shape[1] for layer in long) * shown
    return {
        "exact": {layer.name for layer in exact},
        "entries": "f4" if entries <= MAX_FLOAT_ENTRIES else "log16",
        "top": next((k for k in (MAX_TOP_KEYS, 8, 4, 2) if queries * k <= MAX_TOP_NUMBERS), 1),
        "side": next(
            (side for side in PICTURE_SIDES if 2 * heads * side * side <= MAX_PICTURE_BLOCKS), PICTURE_SIDES[-1]
        ),
        "lse": sum(layer.shape[1] * layer.shape[2] for layer in layers) * shown <= MAX_LSE_NUMBERS,
        "vectors": choose_vector_kind(sum(count_vector_numbers(layer, shown) for layer in layers)),
    }


def choose_vector_kind(numbers: int) -> str | None:
    precise, rounded = MAX_VECTOR_NUMBERS
    return "f4" if numbers <= precise else "f2" if numbers <= rounded else None


def count_entries(layer: Layer) -> int:
    return math.prod(layer.shape[1:])


def describe_layer(record: Record, layer: Layer, plan: dict[str, Any], table: list[Labels]) -> dict[str, Any]:
    """What the page knows of a layer; labels are written once, in `table`, and named by their number."""
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
        "places": None if layer.query_positions is None else layer.query_positions.tolist(),
        "exact": layer.name in plan["exact"],
        "asks": "entries" in layer.available,
        "score": describe_score(layer),
    }


def add_layer(blob: PackedArrays, name: str, layer: Layer, shown: int, plan: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a layer, each array (sequences, H, ...).

    Gives how its entries are written, and how many rows of each sequence and head have weights that are no numbers.
    """
    some, kind = min(shown, layer.shape[0]), plan["entries"]
    if layer.name in plan["exact"]:
        whole = read_entries(layer, some)
        missing = ~whole.isfinite().all(-1)
        # Logarithms cannot tell NaN from 0.
        kind = "f4" if missing.any() else kind
        blob.add(f"{name}.entries", whole, kind)
    else:
        found = {
            part: tensor[:some].cpu() for part, tensor in compute_statistics(layer, plan["top"], plan["side"]).items()
        }
        add_statistics(blob, name, layer, found)
        missing = ~found["entropy"].isfinite() if "entropy" in found else torch.zeros(some, layer.shape[1], 1)
    add_vectors(blob, name, layer, some, plan["lse"], plan["vectors"])
    return {"entries": kind, "unknown": missing.sum(-1).int().tolist()}


def read_entries(layer: Layer, some: int) -> Tensor:
    """Every entry: (sequences, H, Tq, Tk)."""
    found = layer[:some, :, 0 : layer.shape[2], :]
    assert isinstance(found, Tensor)
    return found.float()


def compute_statistics(layer: Layer, top: int, side: int) -> dict[str, Tensor]:
    """What stands for a matrix that is too long to be written: heaviest keys, pictures, spread, what each key gets."""
    if layer.weights is not None:
        # One pass for all but the maxima.
        whole = layer.weights.summary(top=top, picture=side)
        assert whole.top is not None and whole.picture is not None
        rows, columns = whole.picture.shape[-2:]
        largest = layer.picture(rows, columns, "max")
        named = {"values": whole.top.values, "keys": whole.top.keys, "mean": whole.picture, "max": largest}
        return {**named, "entropy": whole.entropy, "received": whole.received}
    found: dict[str, Tensor] = {
        part: getattr(layer, part)() for part in ("entropy", "received") if part in layer.available
    }
    if "top" in layer.available:
        found["values"], found["keys"] = layer.top(min(top, layer.max_top))
    if "picture" in layer.available:
        # Statistics are there in the size in which they were kept, and of their means only.
        kept = layer.kept is not None
        rows, columns = (size if kept else min(side, size) for size in layer.max_picture_size)
        found |= {reduce: layer.picture(rows, columns, reduce) for reduce in (("mean",) if kept else ("mean", "max"))}
    return found


def add_statistics(blob: PackedArrays, name: str, layer: Layer, found: dict[str, Tensor]) -> None:
    """Each statistic in the kind of number that suits it."""
    if "keys" in found:
        add_top(blob, name, found["values"].float(), found["keys"].long(), layer.shape[3])
    for reduce in ("mean", "max"):
        if reduce in found:
            blob.add(f"{name}.{reduce}", found[reduce].float().flatten(0, 1), "log8")
    if "entropy" in found:
        blob.add(f"{name}.entropy", found["entropy"], "f2")
    if "received" in found:
        blob.add(f"{name}.received", found["received"].float() / layer.shape[2], "log16")


def add_top(blob: PackedArrays, name: str, values: Tensor, keys: Tensor, length: int) -> None:
    """The heaviest keys of each query, in the order of the keys: the steps between them are small numbers."""
    last = torch.iinfo(torch.int64).max
    keys, order = torch.where(keys < 0, last, keys).sort(-1)
    values = values.gather(-1, order)
    there = keys < last
    before = torch.cat([torch.zeros_like(keys[..., :1]), keys[..., :-1]], -1)
    steps = torch.where(there, keys - torch.where(there, before, 0), 0)
    blob.add(f"{name}.keys", steps, "u2" if length <= 2**16 else "u3")
    blob.add(f"{name}.values", torch.where(there, values, 0.0), "log16")


def add_labels_once(labels: Labels, table: list[Labels]) -> int:
    """The place of labels in a table, where equal ones are written once."""
    for number, known in enumerate(table):
        if known is labels or (known.texts, known.words) == (labels.texts, labels.words):
            return number
    table.append(labels)
    return len(table) - 1


def describe_labels(blob: PackedArrays, name: str, labels: Labels, shown: int) -> dict[str, Any]:
    """What stands at each position; a text of megabytes is cut, and says so."""
    if labels.images is not None:
        blob.add(name, labels.images[:shown], "u1")
    return {
        "kind": labels.kind,
        "texts": [
            [truncate_with_length(text) for text in display_texts(labels, i)] for i in range(min(shown, labels.batch))
        ],
        "words": None if labels.words is None else [list(words) for words in labels.words[:shown]],
        "grid": labels.grid,
        "leading": labels.leading,
        "seconds": labels.seconds if labels.seconds is not None and math.isfinite(labels.seconds) else None,
        "image": labels.images is not None,
    }


def truncate_with_length(text: str) -> str:
    """At most so many characters, and how many there were."""
    if len(text) <= MAX_TEXT_LENGTH:
        return text
    return f"{text[:MAX_TEXT_LENGTH]}… ({len(text):,} characters)"


def list_head_metrics(record: Record, layers: list[Layer]) -> list[dict[str, Any]]:
    """The numbers by which heads are sorted and coloured, one per layer and head, with what each means."""
    found = []
    for name, values in record.scores().items():
        rows = [values[i, : layer.shape[1]].tolist() for i, layer in enumerate(layers)]
        # JSON has no NaN: a head without the score has null.
        plain = [[value if math.isfinite(value) else None for value in row] for row in rows]
        found.append({"name": name, "about": HEAD_SCORES[name], "values": plain})
    return found

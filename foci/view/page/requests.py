"""Handles the page's requests for parts of a record: rows, columns, tiles, the arithmetic of a row, rollout.

H heads, Tq queries, Tk keys. Responses in bytes are little-endian float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foci.record.dense import MAX_STRIP_ENTRIES
from foci.record.layer import Layer
from foci.record.metrics import compute_cross_rollout, compute_rollout
from foci.record.record import Record
from foci.view.page.arrays import tensor_bytes
from foci.view.page.vectors import compute_row_arithmetic

# The cells along a side of a tile, and the most entries along a side of a cell.
TILE_CELLS = 256
MAX_TILE_STEP = 64
MAX_ARITHMETIC_KEYS = 64
PICTURE_SIDE = 512


class PageRequest:
    """A request of the page for a part of a record; its parameters are checked when they are read."""

    def __init__(self, record: Record, parameters: dict[str, str]) -> None:
        self.record, self.parameters = record, parameters

    def number(self, name: str, least: int, most: int) -> int:
        """Return an integer parameter from least to most."""
        text = self.parameters.get(name, "")
        if not text.isdecimal() or not least <= int(text) <= most:
            raise ValueError(f"{name} must be an integer from {least} to {most}, got {text[:20]!r}")
        return int(text)

    def choice(self, name: str, options: tuple[str, ...]) -> str:
        """Return a parameter that has one of these values, by default the first."""
        text = self.parameters.get(name, options[0])
        if text not in options:
            raise ValueError(f"{name} must be {' or '.join(options)}, got {text[:20]!r}")
        return text

    @property
    def layer(self) -> Layer:
        """The layer of the request, which must have entries."""
        layers = list(self.record.layers.values())
        layer = layers[self.number("layer", 0, len(layers) - 1)]
        if "entries" not in layer.available:
            raise ValueError(f"{layer.label} has only statistics, no entries")
        # Not "step", which is the size of the blocks of a tile.
        asked = "denoising" in self.parameters
        return layer.at(self.number("denoising", 0, self.record.steps - 1)) if asked else layer

    def heads(self, layer: Layer) -> list[int]:
        """Return the heads of the request; their weights are averaged."""
        names = self.parameters.get("heads", "").split(".")
        known = all(name.isdecimal() and int(name) < layer.shape[1] for name in names)
        if not known or len(names) > layer.shape[1]:
            raise ValueError(
                f"heads must be numbers from 0 to {layer.shape[1] - 1}, got {self.parameters.get('heads', '')[:40]!r}"
            )
        return [int(name) for name in names]

    def numbers(self, name: str, most: int, count: int) -> list[int]:
        """Return a list of at most `count` integers below `most`."""
        names = self.parameters.get(name, "").split(".")
        if len(names) > count or not all(part.isdecimal() and int(part) < most for part in names):
            raise ValueError(f"{name} must be at most {count} integers below {most}, got {'.'.join(names)[:40]!r}")
        return [int(part) for part in names]


def handle_row(request: PageRequest) -> bytes:
    """Return the attention weights of one query: (Tk,)."""
    layer = request.layer
    batch, head = request.number("seq", 0, layer.shape[0] - 1), request.number("head", 0, layer.shape[1] - 1)
    return float32_bytes(layer.row(batch, head, request.number("query", 0, layer.shape[2] - 1)))


def handle_column(request: PageRequest) -> bytes:
    """Return the attention weights on one key: (Tq,)."""
    layer = request.layer
    batch, head = request.number("seq", 0, layer.shape[0] - 1), request.number("head", 0, layer.shape[1] - 1)
    entries = layer[batch, head, :, request.number("key", 0, layer.shape[3] - 1)]
    assert isinstance(entries, Tensor)
    return float32_bytes(entries)


def handle_rows(request: PageRequest) -> bytes:
    """Return the attention weights of one query in all heads: (H, Tk)."""
    layer = request.layer
    batch = request.number("seq", 0, layer.shape[0] - 1)
    entries = layer[batch, :, [request.number("query", 0, layer.shape[2] - 1)]]
    assert isinstance(entries, Tensor)
    return float32_bytes(entries[:, 0])


def handle_columns(request: PageRequest) -> bytes:
    """Return the attention weights on one key in all heads: (H, Tq)."""
    layer = request.layer
    batch = request.number("seq", 0, layer.shape[0] - 1)
    return float32_bytes(layer.columns([request.number("key", 0, layer.shape[3] - 1)])[batch, ..., 0])


def handle_tile(request: PageRequest) -> bytes:
    """Return a part of the matrix in blocks of step x step entries, their mean or maximum: (rows, columns)."""
    layer = request.layer
    step = request.number("step", 1, MAX_TILE_STEP)
    batch = request.number("seq", 0, layer.shape[0] - 1)
    y, x = request.number("y", 0, layer.shape[2] - 1), request.number("x", 0, layer.shape[3] - 1)
    reduce = request.choice("reduce", ("mean", "max"))
    rows, columns = min(layer.shape[2] - y, TILE_CELLS * step), min(layer.shape[3] - x, TILE_CELLS * step)
    heads = request.heads(layer)
    return float32_bytes(
        sum(pool_head_tile(layer, batch, head, (y, rows), (x, columns), step, reduce) for head in heads) / len(heads)
    )


def pool_head_tile(
    layer: Layer, batch: int, head: int, rows: tuple[int, int], columns: tuple[int, int], step: int, reduce: str
) -> Tensor:
    """Pool a part of a head's matrix strip by strip; blocks at the edge are smaller."""
    (y, tall), (x, wide) = rows, columns
    strip = max(1, MAX_STRIP_ENTRIES // (wide * step)) * step
    strips = []
    for start in range(y, y + tall, strip):
        entries = layer[batch, head, start : min(start + strip, y + tall), x : x + wide]
        assert isinstance(entries, Tensor)
        strips.append(pool_in_blocks(entries.float().cpu(), step, reduce))
    return torch.cat(strips)


def pool_in_blocks(entries: Tensor, step: int, reduce: str) -> Tensor:
    """Pool entries in blocks of step x step."""
    pool = torch.nn.functional.avg_pool2d if reduce == "mean" else torch.nn.functional.max_pool2d
    # In ceil mode the mean of a block at the edge is over the entries inside.
    return entries if step == 1 else pool(entries[None], step, step, ceil_mode=True)[0]


def handle_arithmetic(request: PageRequest) -> dict[str, Any] | None:
    """Return the vectors and weights of one row for some keys; None if the record has no vectors."""
    layer = request.layer
    batch, head = request.number("seq", 0, layer.shape[0] - 1), request.number("head", 0, layer.shape[1] - 1)
    keys = request.numbers("keys", layer.shape[3], MAX_ARITHMETIC_KEYS)
    arithmetic = compute_row_arithmetic(layer, batch, head, request.number("query", 0, layer.shape[2] - 1), keys)
    # JSON has no infinity: the log-sum-exp of a fully masked row is sent as null.
    return arithmetic if arithmetic is None or math.isfinite(arithmetic["lse"]) else {**arithmetic, "lse": None}


def handle_rollout(request: PageRequest) -> bytes:
    """Return the attention rollout to one query: (T,), or the shares of source and target: (S + T,)."""
    longest = max(layer.shape[2] for layer in request.record.layers.values())
    batch = request.number("seq", 0, max(layer.shape[0] for layer in request.record.layers.values()) - 1)
    stack = request.parameters.get("stack", "")
    query, layers = request.number("query", 0, longest - 1), request.record.select_rollout_layers(stack)
    if any(layer.queries != layer.keys for layer in layers):
        return float32_bytes(torch.cat(compute_cross_rollout(layers, query, batch)))
    return float32_bytes(compute_rollout(layers, query, batch))


def handle_picture(request: PageRequest) -> bytes:
    """Return a picture of the whole matrix of one head, in at most PICTURE_SIDE blocks a side: (rows, columns)."""
    layer = request.layer
    batch, head = request.number("seq", 0, layer.shape[0] - 1), request.number("head", 0, layer.shape[1] - 1)
    reduce = request.choice("reduce", ("mean", "max"))
    rows, columns = (min(PICTURE_SIDE, size) for size in layer.shape[2:])
    if layer.weights is None:
        return float32_bytes(layer.picture(rows, columns, reduce)[batch, head])
    one = layer.weights[batch, head]
    assert not isinstance(one, Tensor)
    return float32_bytes(one.picture(rows, columns, reduce))


def float32_bytes(values: Any) -> bytes:
    return tensor_bytes(values.detach().float().cpu().contiguous())


# The kinds of requests, by the name that the page sends.
REQUEST_HANDLERS: dict[str, Callable[[PageRequest], Any]] = {
    "row": handle_row,
    "column": handle_column,
    "rows": handle_rows,
    "columns": handle_columns,
    "tile": handle_tile,
    "picture": handle_picture,
    "arithmetic": handle_arithmetic,
    "rollout": handle_rollout,
}

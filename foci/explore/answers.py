"""Exact answers about a record, as bytes for the page: rows, columns, tiles, the arithmetic of a row, rollout.

H heads, Tq queries, Tk keys. All numbers are little-endian float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from foci.record.layer import Layer
from foci.record.record import Record
from foci.view.page.arrays import tensor_bytes
from foci.view.page.vectors import compute_row_arithmetic

# A tile has at most so many cells a side, and so many entries behind each cell's side.
TILE_CELLS = 256
MAX_TILE_STEP = 64
# So many entries are computed at a time.
STRIP_ENTRIES = 2**22
MAX_ARITHMETIC_KEYS = 64


class Question:
    """The numbers of a question, checked."""

    def __init__(self, record: Record, given: dict[str, str]) -> None:
        self.record, self.given = record, given

    def number(self, name: str, least: int, most: int) -> int:
        """A whole number from least to most."""
        text = self.given.get(name, "")
        if not text.isdecimal() or not least <= int(text) <= most:
            raise ValueError(f"expected {name} from {least} to {most}, received {text[:20]!r}")
        return int(text)

    @property
    def layer(self) -> Layer:
        """The layer that is asked about, which must know its entries."""
        layers = list(self.record.layers.values())
        layer = layers[self.number("layer", 0, len(layers) - 1)]
        if "entries" not in layer.available:
            raise ValueError(f"{layer.label} kept statistics only: it has no single entries")
        return layer

    def heads(self, layer: Layer) -> list[int]:
        """Several heads are averaged."""
        names = self.given.get("heads", "").split(".")
        known = all(name.isdecimal() and int(name) < layer.shape[1] for name in names)
        if not known or len(names) > layer.shape[1]:
            raise ValueError(
                f"expected heads from 0 to {layer.shape[1] - 1}, received {self.given.get('heads', '')[:40]!r}"
            )
        return [int(name) for name in names]

    def numbers(self, name: str, most: int, count: int) -> list[int]:
        """A list of whole numbers below `most`."""
        names = self.given.get(name, "").split(".")
        if len(names) > count or not all(part.isdecimal() and int(part) < most for part in names):
            raise ValueError(f"expected at most {count} numbers below {most} as {name}, received {len(names)}")
        return [int(part) for part in names]


def answer_row(asked: Question) -> bytes:
    """Where one query looks: (Tk,)."""
    layer = asked.layer
    batch, head = asked.number("seq", 0, layer.shape[0] - 1), asked.number("head", 0, layer.shape[1] - 1)
    return float32_bytes(layer.row(batch, head, asked.number("query", 0, layer.shape[2] - 1)))


def answer_column(asked: Question) -> bytes:
    """Who looks at one key: (Tq,)."""
    layer = asked.layer
    batch, head = asked.number("seq", 0, layer.shape[0] - 1), asked.number("head", 0, layer.shape[1] - 1)
    found = layer[batch, head, :, asked.number("key", 0, layer.shape[3] - 1)]
    assert isinstance(found, Tensor)
    return float32_bytes(found)


def answer_tile(asked: Question) -> bytes:
    """A part of the matrix in blocks of step x step entries, mean or max: (rows, columns)."""
    layer = asked.layer
    step = asked.number("step", 1, MAX_TILE_STEP)
    batch = asked.number("seq", 0, layer.shape[0] - 1)
    y, x = asked.number("y", 0, layer.shape[2] - 1), asked.number("x", 0, layer.shape[3] - 1)
    reduce = asked.given.get("reduce", "mean")
    if reduce not in {"mean", "max"}:
        raise ValueError(f"expected reduce mean or max, received {reduce[:20]!r}")
    rows, columns = min(layer.shape[2] - y, TILE_CELLS * step), min(layer.shape[3] - x, TILE_CELLS * step)
    heads = asked.heads(layer)
    return float32_bytes(
        sum(pool_head_tile(layer, batch, head, (y, rows), (x, columns), step, reduce) for head in heads) / len(heads)
    )


def pool_head_tile(
    layer: Layer, batch: int, head: int, rows: tuple[int, int], columns: tuple[int, int], step: int, reduce: str
) -> Tensor:
    """Strip by strip of whole blocks; a block at the edge is smaller, and its mean is over what is there."""
    (y, tall), (x, wide) = rows, columns
    strip = max(1, STRIP_ENTRIES // (wide * step)) * step
    found = []
    for start in range(y, y + tall, strip):
        entries = layer[batch, head, start : min(start + strip, y + tall), x : x + wide]
        assert isinstance(entries, Tensor)
        found.append(pool_in_blocks(entries.float().cpu(), step, reduce))
    return torch.cat(found)


def pool_in_blocks(entries: Tensor, step: int, reduce: str) -> Tensor:
    """Entries in blocks of step x step."""
    pool = torch.nn.functional.avg_pool2d if reduce == "mean" else torch.nn.functional.max_pool2d
    # In ceil mode the mean of a block that reaches over the edge is over what lies inside.
    return entries if step == 1 else pool(entries[None], step, step, ceil_mode=True)[0]


def answer_arithmetic(asked: Question) -> dict[str, Any] | None:
    """Everything between query and output of one row, for some keys; None where that was not kept."""
    layer = asked.layer
    batch, head = asked.number("seq", 0, layer.shape[0] - 1), asked.number("head", 0, layer.shape[1] - 1)
    keys = asked.numbers("keys", layer.shape[3], MAX_ARITHMETIC_KEYS)
    found = compute_row_arithmetic(layer, batch, head, asked.number("query", 0, layer.shape[2] - 1), keys)
    # JSON has no infinity: the row of a query that sees nothing has no log-sum-exp.
    return found if found is None or math.isfinite(found["lse"]) else {**found, "lse": None}


def answer_rollout(asked: Question) -> bytes:
    """What reaches one query through all layers: (T,)."""
    longest = max(layer.shape[2] for layer in asked.record.layers.values())
    batch = asked.number("seq", 0, max(layer.shape[0] for layer in asked.record.layers.values()) - 1)
    stack = asked.given.get("stack", "")
    return float32_bytes(asked.record.rollout(asked.number("query", 0, longest - 1), batch, stack=stack))


def float32_bytes(found: Any) -> bytes:
    return tensor_bytes(found.detach().float().cpu().contiguous())

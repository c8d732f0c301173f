"""The choices of the contract suite by name: scores, masks, biases, sinks, dtypes and shapes.

A cell is one choice of each. `problem_of` builds its call.

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width, Dv value width.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import foci
from foci.masks.base import Mask
from tests.checker import Problem, Tensors

Cell = dict[str, str]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call; heads None: the inputs have no heads."""

    batch: tuple[int, ...] = (2,)
    heads: int | None = 4
    key_heads: int | None = 4
    queries: int = 13
    keys: int = 13
    width: int = 8
    value_width: int = 8
    layout: str = "plain"

    @property
    def rows(self) -> int:
        return math.prod(self.batch)

    def lead(self, heads: int | None) -> tuple[int, ...]:
        return self.batch if heads is None else (*self.batch, heads)


SHAPES = {
    "square": Sizes(),
    "grouped": Sizes(heads=6, key_heads=2, queries=11, keys=11),
    "one_key_head": Sizes(heads=3, key_heads=1, queries=5, keys=17),
    "cached": Sizes(queries=3, keys=37),
    "more_queries": Sizes(queries=9, keys=4),
    "one": Sizes(queries=1, keys=1),
    "2d": Sizes(batch=(), heads=None, key_heads=None),
    "3d": Sizes(batch=(3,), heads=None, key_heads=None, queries=6, keys=10),
    "5d": Sizes(batch=(2, 3), heads=2, key_heads=2, queries=5, keys=5),
    "wide_values": Sizes(value_width=21),
    "narrow_values": Sizes(width=7, value_width=3, queries=7, keys=15),
    "transposed": Sizes(layout="transposed"),
    "every_other": Sizes(layout="every_other"),
}

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}

# A score or bias: names and shapes of its tensors, and the function that builds it from them.
Parts = tuple[dict[str, tuple[int, ...]], Callable[[Tensors], Any]]


def per_head(sizes: Sizes) -> int:
    assert sizes.heads is not None, "cells without heads must not choose anything per head"
    return sizes.heads


SCORES: dict[str, Callable[[Sizes], Parts]] = {
    "dot": lambda s: ({}, lambda t: foci.Dot()),
    "plain_dot": lambda s: ({}, lambda t: foci.Dot(scale=1.0)),
    "softcap": lambda s: ({}, lambda t: foci.Dot(softcap=2.0)),
    "additive": lambda s: ({"weight": (s.width,)}, lambda t: foci.Additive(t["weight"])),
    "additive_headed": lambda s: ({"weight": (per_head(s), s.width)}, lambda t: foci.Additive(t["weight"])),
    # Divided by the width: logits of the same size as those of a scaled dot product.
    "general": lambda s: ({"matrix": (s.width, s.width + 3)}, lambda t: foci.General(t["matrix"] / s.width)),
    "general_headed": lambda s: (
        {"matrix": (per_head(s), s.width, s.width)},
        lambda t: foci.General(t["matrix"] / s.width),
    ),
    "cosine": lambda s: ({}, lambda t: foci.Cosine(3.0)),
    "cosine_headed": lambda s: ({"scale": (per_head(s),)}, lambda t: foci.Cosine(t["scale"])),
}


def lengths_of(sizes: Sizes) -> Tensor:
    """One length per sequence; the second sequence is empty."""
    ends = (sizes.keys - 1, 0, (sizes.keys + 1) // 2)
    return torch.tensor([ends[i % 3] for i in range(sizes.rows)]).reshape(sizes.batch or (1,))


def some(shape: tuple[int, ...]) -> Tensor:
    """Two thirds of the entries; the first row is fully masked."""
    entries = torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.66
    entries[..., 0, :] = False
    return entries


def packed(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Document ids of queries and keys; the last document of the queries has no keys."""
    keys = torch.arange(sizes.keys) * 3 // sizes.keys
    return (torch.arange(sizes.queries) * 4 // sizes.queries), keys


def scattered(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Documents that are not contiguous and differ from sequence to sequence."""
    start = torch.arange(sizes.rows).reshape(*sizes.batch, 1) if sizes.batch else torch.zeros(1, dtype=torch.int64)
    return (start + torch.arange(sizes.queries) * 2) % 3, (start + torch.arange(sizes.keys)) % 3


def striped(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (batch + head + query + key) % 3 != 0


MASKS: dict[str, Callable[[Sizes], Mask | Tensor | None]] = {
    "none": lambda s: None,
    "causal": lambda s: foci.causal,
    "causal_at": lambda s: foci.causal.at(1),
    "window": lambda s: foci.window(3),
    "two_sided": lambda s: foci.window(2, 1),
    "padding": lambda s: foci.padding(lengths_of(s)),
    "left_padding": lambda s: foci.padding(lengths_of(s), side="left"),
    "documents": lambda s: foci.documents(*packed(s)),
    "scattered": lambda s: foci.documents(*scattered(s)),
    "entries": lambda s: some((*s.lead(s.heads), s.queries, s.keys)),
    "row": lambda s: torch.arange(s.keys) % 4 != 1,
    "function": lambda s: foci.mask_function(striped),
    "prefix": lambda s: foci.causal | foci.prefix(2),
    "causal_padding": lambda s: foci.causal & foci.padding(lengths_of(s)),
    "outside": lambda s: ~foci.window(1, 1) & some((s.queries, s.keys)),
}


def heads_first(sizes: Sizes, *rest: int) -> tuple[int, ...]:
    return rest if sizes.heads is None else (sizes.heads, *rest)


def added(shape: tuple[int, ...], hidden: bool = False) -> Parts:
    def build(tensors: Tensors) -> Tensor:
        entries = tensors["entries"]
        return entries.masked_fill(~some(shape).to(entries.device), -torch.inf) if hidden else entries

    return {"entries": shape}, build


BIASES: dict[str, Callable[[Sizes], Parts]] = {
    "none": lambda s: ({}, lambda t: None),
    "fixed": lambda s: added(heads_first(s, s.queries, s.keys)),
    "hiding": lambda s: added((s.queries, s.keys), hidden=True),
    "learned": lambda s: added(heads_first(s, 1, s.keys)),
    "alibi": lambda s: ({}, lambda t: foci.ALiBi()),
    "learned_alibi": lambda s: ({"slopes": (per_head(s),)}, lambda t: foci.ALiBi(t["slopes"])),
    "buckets": lambda s: ({"table": (8, per_head(s))}, lambda t: foci.Buckets(t["table"], True, 6)),
    "causal_buckets": lambda s: ({"table": (6, per_head(s))}, lambda t: foci.Buckets(t["table"], False, 9)),
    "relative": lambda s: ({"near": (7, s.width)}, lambda t: foci.Relative(t["near"])),
    "relative_values": lambda s: (
        {"near": (per_head(s), 5, s.width), "far": (per_head(s), 5, s.value_width)},
        lambda t: foci.Relative(t["near"], t["far"]),
    ),
}

# Tensors without a gradient, by bias.
FIXED = {"fixed": frozenset({"entries"}), "hiding": frozenset({"entries"})}

CHOICES: dict[str, list[str]] = {
    "shape": list(SHAPES),
    "mask": list(MASKS),
    "bias": list(BIASES),
    "score": list(SCORES),
    "dtype": list(DTYPES),
    "sink": ["none", "sink"],
    "lse": ["out", "lse"],
}

# Choices that need heads.
PER_HEAD = {
    "score": {"additive_headed", "general_headed", "cosine_headed"},
    "bias": {"alibi", "learned_alibi", "buckets", "causal_buckets", "relative_values"},
    "sink": {"sink"},
}


def possible(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether two choices can occur in one call."""
    choices = dict((one, other))
    shape = choices.pop("shape", None)
    if shape is None or SHAPES[shape].heads is not None:
        return True
    return not any(value in PER_HEAD.get(name, ()) for name, value in choices.items())


def name_of(cell: Cell) -> str:
    return "-".join(cell[name] for name in CHOICES)


def problem_of(cell: Cell) -> Problem:
    """Builds the call of a cell."""
    return problem_with_sizes(cell, SHAPES[cell["shape"]], zlib.crc32(name_of(cell).encode()))


def problem_with_sizes(cell: Cell, sizes: Sizes, seed: int) -> Problem:
    """Builds a call with the choices of a cell, whose shape is not read."""
    score_shapes, score = SCORES[cell["score"]](sizes)
    bias_shapes, bias = BIASES[cell["bias"]](sizes)
    key_width = sizes.width + 3 if cell["score"] == "general" else sizes.width
    shapes = input_shapes(sizes, key_width) | score_shapes | bias_shapes
    if cell["sink"] == "sink":
        shapes["sink"] = (per_head(sizes),)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}

    def arguments(leaves: Tensors) -> dict[str, Any]:
        inputs = {name: laid_out(leaves[name], sizes.layout) for name in ("query", "key", "value")}
        mask = MASKS[cell["mask"]](sizes)
        mask = mask.to(leaves["query"].device) if isinstance(mask, Tensor) else mask
        return inputs | {"score": score(leaves), "mask": mask, "bias": bias(leaves), "sink": leaves.get("sink")}

    return Problem(tensors, arguments, DTYPES[cell["dtype"]], FIXED.get(cell["bias"], frozenset()))


def input_shapes(sizes: Sizes, key_width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of query, key and value in memory, before `laid_out`."""
    shapes = {
        "query": (*sizes.lead(sizes.heads), sizes.queries, sizes.width),
        "key": (*sizes.lead(sizes.key_heads), sizes.keys, key_width),
        "value": (*sizes.lead(sizes.key_heads), sizes.keys, sizes.value_width),
    }
    if sizes.layout == "transposed":
        return {name: (batch, length, heads, width) for name, (batch, heads, length, width) in shapes.items()}
    if sizes.layout == "every_other":
        return {name: (*lead, 2 * width) for name, (*lead, width) in shapes.items()}
    if sizes.layout == "shifted":
        return {name: (*lead, width + 1) for name, (*lead, width) in shapes.items()}
    return shapes


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The view that is passed to the call: (..., H, T, D), with the strides of the layout."""
    if layout == "transposed":
        return tensor.transpose(1, 2)
    if layout == "shifted":
        return tensor[..., 1:]
    return tensor[..., ::2] if layout == "every_other" else tensor

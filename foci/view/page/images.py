"""Encodes the images of a record for the page: grids of patches, pictures, and the weights between text and image.

The weights of a long layer are too many for a file. Those between its text and its images are not: the page gets them
as a block of rows and columns, of each head or of their mean, and for a diffusion model at some denoising steps too.

H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foci.record.dense import MAX_STRIP_ENTRIES
from foci.record.labels import Labels, Segment
from foci.record.layer import Layer
from foci.record.pictures import shrink_picture
from foci.record.record import Record
from foci.view.page.arrays import PackedArrays

# The longest side of a picture, and the most bytes of all pictures.
IMAGE_SIDES = (768, 512, 384, 256, 192, 128, 96, 64, 32)
MAX_PICTURE_BYTES = 6 * 2**20
# The most numbers of all blocks, and of those of single denoising steps.
MAX_BLOCK_NUMBERS = 3 * 2**20
MAX_STEP_NUMBERS = 2**21
# Steps that a file has at least before it has them for each head.
MIN_STEPS_OF_HEADS = 8


def describe_images(labels: Labels, number: int, max_sequences: int, drawn: set[str]) -> list[list[dict[str, Any]]]:
    """Describe the images of each sequence: their segments, each with its grid and the name of its picture."""
    sequences = range(min(max_sequences, labels.batch))
    return [
        [{"segments": [describe_segment(labels, number, each, drawn) for each in image]} for image in labels.grids(i)]
        for i in sequences
    ]


def describe_segment(labels: Labels, number: int, segment: Segment, drawn: set[str]) -> dict[str, Any]:
    picture = segment.sequence if labels.images is not None else segment.picture
    name = f"picture.{number}.{picture}"
    return {
        "start": segment.start,
        "rows": segment.rows,
        "columns": segment.columns,
        "stride": segment.stride or segment.columns,
        "order": segment.order,
        "frame": segment.frame,
        "box": segment.box,
        "picture": name if name in drawn else None,
    }


def add_pictures(arrays: PackedArrays, table: Sequence[Labels], max_sequences: int) -> set[str]:
    """Add the pictures of all labels, small enough for MAX_PICTURE_BYTES together, and return their names."""
    pictures: dict[str, Tensor] = {}
    for number, labels in enumerate(table):
        if labels.images is not None:
            found = dict(enumerate(labels.images[:max_sequences]))
        else:
            shown = {each.picture for each in labels.segments if each.sequence < max_sequences}
            found = {i: picture for i, picture in enumerate(labels.pictures) if i in shown}
        pictures |= {f"picture.{number}.{i}": picture for i, picture in found.items()}
    side = next((side for side in IMAGE_SIDES if count_bytes(pictures, side) <= MAX_PICTURE_BYTES), IMAGE_SIDES[-1])
    room = MAX_PICTURE_BYTES
    drawn: set[str] = set()
    for name, picture in pictures.items():
        small = shrink_picture(picture, side)
        room -= small.numel()
        if room < 0:
            break
        arrays.add(name, small, "u1")
        drawn.add(name)
    return drawn


def count_bytes(pictures: dict[str, Tensor], side: int) -> int:
    """Count the bytes of pictures whose longer side has at most `side` pixels."""
    scales = [min(1.0, side / max(picture.shape[:2])) for picture in pictures.values()]
    return sum(
        3 * round(picture.shape[0] * scale) * round(picture.shape[1] * scale)
        for picture, scale in zip(pictures.values(), scales, strict=True)
    )


def find_blocks(record: Record, layers: Sequence[Layer], with_vision: bool = True) -> dict[str, tuple[Any, Any]]:
    """Find the rows and columns of each layer that link its text and its images, of the first sequence.

    A layer of patches only has all of its rows.
    """
    blocks: dict[str, tuple[Any, Any]] = {}
    for layer in layers:
        if "entries" not in layer.available:
            continue
        queries, keys = (labels.split_kinds(0) for labels in record.labels_of(layer))
        if "text" in queries and "image" in keys:
            blocks[layer.name] = queries["text"], keys["image"]
        elif "image" in queries and "text" in keys:
            blocks[layer.name] = queries["image"], keys["text"]
        elif "image" in keys and with_vision:
            blocks[layer.name] = list(range(layer.shape[2])), keys["image"]
    return blocks


def add_blocks(
    arrays: PackedArrays, record: Record, layers: Sequence[Layer], exact: set[str], max_sequences: int
) -> list[dict[str, Any] | None]:
    """Add the blocks of the layers without entries, and describe them for each layer.

    Of each head if they fit, else of the mean of the heads; the largest are left out if those do not fit either.
    """
    blocks = find_blocks(record, [layer for layer in layers if layer.name not in exact])
    sizes = {name: count_block(block) for name, block in blocks.items()}
    whole = sum(layer.shape[1] * sizes[layer.name] for layer in layers if layer.name in sizes) * max_sequences
    by_head = whole <= MAX_BLOCK_NUMBERS
    while not by_head and sum(sizes.values()) * max_sequences > MAX_BLOCK_NUMBERS:
        del sizes[max(sizes, key=lambda name: sizes[name])]
    for number, layer in enumerate(layers):
        if layer.name in sizes:
            add_block(arrays, f"{number}.block", layer, blocks[layer.name], by_head, max_sequences)
    return [describe_block(blocks[layer.name]) if layer.name in sizes else None for layer in layers]


def add_steps(
    arrays: PackedArrays, record: Record, layers: Sequence[Layer], max_sequences: int
) -> tuple[list[int], list[dict[str, Any] | None]]:
    """Add the blocks of as many denoising steps as fit, and return the numbers of the steps and the blocks."""
    stepped = [layer for layer in layers if layer.steps and not layer.averaged]
    blocks = find_blocks(record, stepped, with_vision=False)
    sizes = {name: count_block(block) * max_sequences for name, block in blocks.items()}
    none: list[dict[str, Any] | None] = [None] * len(layers)
    if not sizes:
        return [], none
    whole = sum(layer.shape[1] * sizes[layer.name] for layer in stepped if layer.name in sizes)
    by_head = whole * min(record.steps, MIN_STEPS_OF_HEADS) <= MAX_STEP_NUMBERS
    count = min(record.steps, MAX_STEP_NUMBERS // (whole if by_head else sum(sizes.values())))
    chosen = [step * (record.steps - 1) // max(1, count - 1) for step in range(count)]
    for number, layer in enumerate(layers):
        for step in chosen if layer.name in sizes else ():
            if step in layer.steps:
                add_block(arrays, f"{number}@{step}.block", layer.at(step), blocks[layer.name], by_head, max_sequences)
    return chosen, [describe_block(blocks[layer.name]) if layer.name in sizes else None for layer in layers]


def count_block(block: tuple[Any, Any]) -> int:
    return len(block[0]) * len(block[1])


def describe_block(block: tuple[Any, Any]) -> dict[str, Any]:
    rows, columns = (shorten_range(positions) for positions in block)
    return {"rows": rows, "columns": columns}


def shorten_range(positions: list[int]) -> dict[str, int] | list[int]:
    """Describe neighboring positions by the first of them and their number."""
    start, count = positions[0], len(positions)
    return {"start": start, "count": count} if positions == list(range(start, start + count)) else positions


def add_block(
    arrays: PackedArrays, name: str, layer: Layer, block: tuple[Any, Any], by_head: bool, max_sequences: int
) -> None:
    """Add some rows and columns of a layer: (sequences, H or 1, rows, columns)."""
    sequences = min(max_sequences, layer.shape[0])
    parts = [read_block(layer, i, block, by_head) for i in range(sequences)]
    arrays.add(name, torch.stack(parts), "log16")


def read_block(layer: Layer, batch: int, block: tuple[Any, Any], by_head: bool) -> Tensor:
    """Read some rows and columns of a layer in strips: (H or 1, rows, columns)."""
    rows, columns = block
    strip = max(1, MAX_STRIP_ENTRIES // (layer.shape[1] * layer.shape[3]))
    parts = []
    for start in range(0, len(rows), strip):
        entries = layer[batch, :, rows[start : start + strip]]
        assert isinstance(entries, Tensor)
        part = entries.float().cpu()[..., columns]
        parts.append(part if by_head else part.mean(0, keepdim=True))
    return torch.cat(parts, -2)

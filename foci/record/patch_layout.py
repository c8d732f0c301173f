"""Weights on patches at their places in an image: tiles and frames together, other resolutions, and parts of the image.

Tk keys; rows x columns of the map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.record.labels import Labels, Segment
from foci.runtime.checks import is_positive_int

Box = tuple[float, float, float, float]


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

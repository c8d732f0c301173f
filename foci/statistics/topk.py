"""The k heaviest keys of each query.

The keys are looked at in groups. The k groups with the largest maxima hold the k largest entries: an entry outside
them is preceded by k maxima. So one maximum per group, the k best groups, and the same again inside them, until few
enough are left to choose from. Exact ties go to the lower key; rows that have one are rare and are done again by an
order that knows the keys.
"""

from __future__ import annotations

import torch
from torch import Tensor


def stable_topk(x: Tensor, k: int, hidden: float) -> tuple[Tensor, Tensor]:
    """(..., C) -> the min(k, C) largest of the last dimension, largest first, and their columns.

    What is below `hidden` counts as nothing: its order does not matter.
    """
    k = min(k, x.shape[-1])
    if x.device.type != "cpu":
        return topk_by_sorting(x, torch.arange(x.shape[-1], device=x.device).expand(x.shape), k)
    values, columns, tied = topk_by_groups(x, k, hidden)
    if bool(tied.any()):
        rows = x[tied]
        exact = topk_by_sorting(rows, torch.arange(x.shape[-1]).expand(rows.shape), k)
        values[tied], columns[tied] = exact
    return values, columns


def topk_by_groups(x: Tensor, k: int, hidden: float) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest with their columns, and the rows in which a tie leaves their choice or order open."""
    width = x.shape[-1]
    size = group_size(width, k)
    if size == 1:
        values, columns = x.topk(min(k + 1, width), dim=-1)
        tied = (values.diff(dim=-1) == 0) & (values[..., 1:] > hidden)
        return values[..., :k], columns[..., :k], tied.any(-1)
    whole = width // size * size
    maxima = x[..., :whole].unflatten(-1, (-1, size)).amax(-1)
    if whole < width:
        maxima = torch.cat([maxima, x[..., whole:].amax(-1, keepdim=True)], dim=-1)
    best, groups = maxima.topk(k + 1, dim=-1)
    tied = (best[..., k] == best[..., k - 1]) & (best[..., k] > hidden)
    columns = (groups[..., :k, None] * size + torch.arange(size)).flatten(-2)
    inside = x.gather(-1, columns.clamp(max=width - 1))
    if whole < width:
        inside = inside.masked_fill(columns >= width, -torch.inf)
    values, places, tied_inside = topk_by_groups(inside, k, hidden)
    return values, columns.gather(-1, places), tied | tied_inside


def group_size(width: int, k: int) -> int:
    """About 8 k groups, where that leaves at most half of the columns; 1 where choosing at once is cheaper."""
    few = 8 * k
    return 1 if width <= few else max(8, 1 << (width // few - 1).bit_length()) if width > 2 * few else 1


def topk_by_sorting(values: Tensor, labels: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values with their labels, largest first, and of equal values the lower label first."""
    order = values.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return values.gather(-1, order), labels.gather(-1, order)

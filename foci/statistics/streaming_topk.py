"""The k largest entries of each row, exact ties to the lower column.

Columns are searched in groups. The k largest entries lie in the k groups with the largest maxima: any entry elsewhere
is smaller than all k of these maxima. The search takes one maximum per group, keeps the k best groups and repeats
within them until few columns are left. Rows with exact ties are rare and are sorted stably instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foci.runtime.tracing import is_traced


def stable_topk(x: Tensor, k: int, masked_below: float) -> tuple[Tensor, Tensor]:
    """(..., C) -> the min(k, C) largest entries of the last dimension, largest first, and their columns.

    The order of entries below `masked_below` does not matter.
    """
    k = min(k, x.shape[-1])
    if x.device.type != "cpu" or is_traced(x):
        return topk_by_sorting(x, torch.arange(x.shape[-1], device=x.device).expand(x.shape), k)
    values, columns, tied = topk_by_groups(x, k, masked_below)
    if bool(tied.any()):
        rows = x[tied]
        exact = topk_by_sorting(rows, torch.arange(x.shape[-1], device=x.device).expand(rows.shape), k)
        values[tied], columns[tied] = exact
    return values, columns


def topk_by_groups(x: Tensor, k: int, masked_below: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the k largest entries, their columns, and the rows in which ties make selection or order ambiguous."""
    width = x.shape[-1]
    size = group_size(width, k)
    if size == 1:
        values, columns = x.topk(min(k + 1, width), dim=-1)
        tied = (values.diff(dim=-1) == 0) & (values[..., 1:] > masked_below)
        return values[..., :k], columns[..., :k], tied.any(-1)
    whole = width // size * size
    maxima = x[..., :whole].unflatten(-1, (-1, size)).amax(-1)
    if whole < width:
        maxima = torch.cat([maxima, x[..., whole:].amax(-1, keepdim=True)], dim=-1)
    best, groups = maxima.topk(k + 1, dim=-1)
    tied = (best[..., k] == best[..., k - 1]) & (best[..., k] > masked_below)
    columns = (groups[..., :k, None] * size + torch.arange(size, device=x.device)).flatten(-2)
    inside = x.gather(-1, columns.clamp(max=width - 1))
    if whole < width:
        inside = inside.masked_fill(columns >= width, -torch.inf)
    values, places, tied_inside = topk_by_groups(inside, k, masked_below)
    return values, columns.gather(-1, places), tied | tied_inside


def group_size(width: int, k: int) -> int:
    """Group size for about 8k groups; 1 if a plain topk is cheaper."""
    groups = 8 * k
    return 1 if width <= 2 * groups else max(8, 1 << (width // groups - 1).bit_length())


def topk_by_sorting(values: Tensor, labels: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k largest values with their labels, largest first, equal values by ascending label."""
    order = values.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return values.gather(-1, order), labels.gather(-1, order)

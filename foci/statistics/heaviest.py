"""The k heaviest keys of each query.

The keys are looked at in groups. The k groups with the largest maxima hold the k largest entries: an entry outside
them is preceded by k maxima. So one maximum per group, the k best groups, and then an exact choice among their entries
is all it takes. Exact ties go to the lower key, in both steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32


def heaviest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(..., C) -> the k largest of the last dimension, largest first, and their columns."""
    width = x.shape[-1]
    if width <= GROUP * max(k, 2):
        columns = torch.arange(width, device=x.device).expand(x.shape)
        return best(x, columns, k)
    groups = best_groups(x, k)  # (..., k)
    columns = (groups.unsqueeze(-1) * GROUP + torch.arange(GROUP, device=x.device)).flatten(-2)
    inside = columns < width
    candidates = x.gather(-1, columns.clamp(max=width - 1)).masked_fill(~inside, -torch.inf)
    return best(candidates, columns, k)


def best_groups(x: Tensor, k: int) -> Tensor:
    """The k groups of columns with the largest maxima."""
    whole = x.shape[-1] // GROUP * GROUP
    maxima = x[..., :whole].unflatten(-1, (-1, GROUP)).amax(-1)
    if whole < x.shape[-1]:
        maxima = torch.cat([maxima, x[..., whole:].amax(-1, keepdim=True)], dim=-1)
    groups = torch.arange(maxima.shape[-1], device=x.device).expand(maxima.shape)
    return best(maxima, groups, k)[1]


def best(values: Tensor, labels: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values with their labels, largest first; of equal values the lower label."""
    if values.dtype == torch.float64:
        # 64 bits leave no room for the label: a stable sort of label-ordered values does it.
        by_label = labels.argsort(-1)
        values, labels = values.gather(-1, by_label), labels.gather(-1, by_label)
        order = values.sort(dim=-1, descending=True, stable=True).indices[..., :k]
        return values.gather(-1, order), labels.gather(-1, order)
    bits = values.float().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.to(torch.int64) << 32) | (0x7FFFFFFF - labels)
    places = keys.topk(min(k, keys.shape[-1]), dim=-1).indices
    return values.gather(-1, places), labels.gather(-1, places)

"""Groups of neighbouring tokens: sub-words into words, turns, documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def group_ids(groups: Any, length: int, name: str, device: torch.device) -> tuple[Tensor, int]:
    """The group of each token, and how many there are; tokens in no group get that number.

    Groups are contiguous runs: (start, stop) pairs, slices or ranges; or one group number per token.
    """
    runs = runs_of(groups, length, name)
    if not runs:
        raise ValueError(f"{name} must name at least one group, but got none")
    ids = torch.full((length,), len(runs), dtype=torch.int64)
    for number, (start, stop) in enumerate(runs):
        if not 0 <= start < stop <= length:
            raise ValueError(
                f"{name}: group {number} is ({start}, {stop}), expected 0 <= start < stop <= {length} tokens"
            )
        if bool((ids[start:stop] != len(runs)).any()):
            raise ValueError(f"{name}: group {number}, ({start}, {stop}), overlaps another group")
        ids[start:stop] = number
    return ids.to(device), len(runs)


def runs_of(groups: Any, length: int, name: str) -> list[tuple[int, int]]:
    if isinstance(groups, Tensor) and groups.dim() == 1:
        return numbered_runs(groups, length, name)
    if isinstance(groups, Tensor):
        groups = groups.tolist()
    if not isinstance(groups, Sequence):
        raise TypeError(f"{name} must be (start, stop) pairs or one number per token, but got {type(groups).__name__}")
    if groups and all(isinstance(g, int) for g in groups):
        return numbered_runs(torch.tensor(groups), length, name)
    runs = []
    for group in groups:
        if isinstance(group, slice | range):
            if group.step not in {None, 1}:
                raise ValueError(f"{name} must be contiguous runs, but got {group!r}")
            group = (group.start or 0, length if group.stop is None else group.stop)
        if not isinstance(group, Sequence) or len(group) != 2:
            raise TypeError(f"{name} must be (start, stop) pairs, but got {group!r}")
        runs.append((int(group[0]), int(group[1])))
    return runs


def numbered_runs(numbers: Tensor, length: int, name: str) -> list[tuple[int, int]]:
    """One number per token, such as the word that each sub-word belongs to; every change starts a new run."""
    if numbers.shape != (length,) or numbers.is_floating_point():
        raise ValueError(f"{name} must hold one whole number for each of {length} tokens, but got {tuple(numbers.shape)}")
    values, counts = numbers.cpu().unique_consecutive(return_counts=True)
    if values.numel() != values.unique().numel():
        raise ValueError(f"{name} must be contiguous: a number comes back after another one")
    stops = counts.cumsum(0).tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))

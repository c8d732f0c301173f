"""Groups of neighbouring tokens: sub-words into words, turns, documents."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from foci.weights.indexing import to_int

TokenRange = tuple[int, int]


def assign_groups(groups: Any, length: int, name: str, device: torch.device) -> tuple[Tensor, int]:
    """The group of each token, and how many there are; tokens in no group get that number.

    Groups are contiguous runs: (start, stop) pairs, slices or ranges; or one group number per token, None for a token
    that belongs to none (which is what a tokenizer's `word_ids` gives).
    """
    runs = parse_groups(groups, length, name)
    if not runs:
        raise ValueError(f"{name} must name at least one group, but got none")
    ids = torch.full((length,), len(runs), dtype=torch.int64)
    for number, (start, stop) in enumerate(runs):
        if not 0 <= start < stop <= length:
            raise ValueError(
                f"{name} takes groups with 0 <= start < stop <= {length} tokens,"
                f" but group {number} is ({start}, {stop})"
            )
        if bool((ids[start:stop] != len(runs)).any()):
            raise ValueError(f"{name} takes groups that do not overlap, but group {number}, ({start}, {stop}), does")
        ids[start:stop] = number
    return ids.to(device), len(runs)


def parse_groups(groups: Any, length: int, name: str) -> list[TokenRange]:
    listed = groups.tolist() if hasattr(groups, "tolist") else groups
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise TypeError(f"{name} must be (start, stop) pairs or one number per token, but got {groups!r}")
    if listed and all(item is None or is_int_like(item) for item in listed):
        return parse_group_numbers(listed, length, name)
    return [parse_group(item, length, name) for item in listed]


def parse_group(group: Any, length: int, name: str) -> TokenRange:
    if isinstance(group, slice | range) and group.step in {None, 1}:
        group = (0 if group.start is None else group.start, length if group.stop is None else group.stop)
    if not isinstance(group, Sequence) or len(group) != 2 or not all(map(is_int_like, group)):
        raise TypeError(f"{name} must be (start, stop) pairs of whole numbers, but got {group!r}")
    return operator.index(group[0]), operator.index(group[1])


def parse_group_numbers(numbers: Sequence[Any], length: int, name: str) -> list[TokenRange]:
    """One number per token, such as the word that each sub-word belongs to; every change starts a new run."""
    if len(numbers) != length:
        raise ValueError(f"{name} must hold one number for each of {length} tokens, but got {len(numbers)} numbers")
    runs: dict[int, TokenRange] = {}
    start = 0
    for number, same in groupby(numbers):
        stop = start + len(list(same))
        if number in runs:
            raise ValueError(f"{name} must be contiguous, but number {number} comes back at token {start}")
        if number is not None:
            runs[number] = (start, stop)
        start = stop
    return list(runs.values())


def is_int_like(item: Any) -> bool:
    number = to_int(item)
    return isinstance(number, int) and not isinstance(number, bool)

"""Parses groups of neighboring tokens: the sub-words of words, turns, documents."""

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
    """The group of each token, and the number of groups, which is also the id of tokens in no group.

    Groups are contiguous: (start, stop) pairs, slices or ranges; or one group number per token, None for a token that
    belongs to none (the format of a tokenizer's `word_ids`).
    """
    ranges = parse_groups(groups, length, name)
    if not ranges:
        raise ValueError(f"{name} must have at least one group, got none")
    ids = [len(ranges)] * length
    for number, (start, stop) in enumerate(ranges):
        if not 0 <= start < stop <= length:
            raise ValueError(
                f"{name} must be groups with 0 <= start < stop <= {length} tokens,"
                f" got ({start}, {stop}) for group {number}"
            )
        if any(group != len(ranges) for group in ids[start:stop]):
            raise ValueError(
                f"{name} must not overlap, got ({start}, {stop}) for group {number}, which overlaps an earlier one"
            )
        ids[start:stop] = [number] * (stop - start)
    return torch.tensor(ids, device=device), len(ranges)


def parse_groups(groups: Any, length: int, name: str) -> list[TokenRange]:
    items = groups.tolist() if hasattr(groups, "tolist") else groups
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise TypeError(f"{name} must be (start, stop) pairs or one number per token, got {groups!r}")
    if items and all(item is None or is_int_like(item) for item in items):
        return parse_group_numbers(items, length, name)
    return [parse_group(item, length, name) for item in items]


def parse_group(group: Any, length: int, name: str) -> TokenRange:
    if isinstance(group, slice | range) and group.step in {None, 1}:
        group = (0 if group.start is None else group.start, length if group.stop is None else group.stop)
    if not isinstance(group, Sequence) or len(group) != 2 or not all(map(is_int_like, group)):
        raise TypeError(f"{name} must be (start, stop) pairs of integers, got {group!r}")
    return operator.index(group[0]), operator.index(group[1])


def parse_group_numbers(numbers: Sequence[Any], length: int, name: str) -> list[TokenRange]:
    """Ranges from one number per token, such as the word of each sub-word; every change starts a new range."""
    if len(numbers) != length:
        raise ValueError(f"{name} must have one number for each of {length} tokens, got {len(numbers)} numbers")
    ranges: dict[int, TokenRange] = {}
    start = 0
    for number, same in groupby(numbers):
        stop = start + len(list(same))
        if number in ranges:
            raise ValueError(f"{name} must be contiguous groups, got number {number} again at token {start}")
        if number is not None:
            ranges[number] = (start, stop)
        start = stop
    return list(ranges.values())


def is_int_like(item: Any) -> bool:
    number = to_int(item)
    return isinstance(number, int) and not isinstance(number, bool)

"""What an index of the lazy matrix names: sequences and heads, which leave it lazy, or queries and keys."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AxisIndex:
    """Chosen places along one axis; `dropped` where a single number was asked for, `listed` where a list was."""

    index: Tensor
    dropped: bool = False
    listed: bool = False


def split_index(index: Any, shape: tuple[int, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What the index says of the leading axes, and of queries and keys: nothing where it does not name them.

    >>> split_index((0, slice(2)), (2, 4, 10, 10))
    ((0, slice(None, 2, None)), ())
    >>> split_index((..., 3, slice(None)), (2, 4, 10, 10))
    ((slice(None, None, None), slice(None, None, None)), (3, slice(None, None, None)))
    """
    index = index if isinstance(index, tuple) else (index,)
    dots = [place for place, item in enumerate(index) if item is Ellipsis]
    if len(dots) > 1 or len(index) - len(dots) > len(shape):
        raise IndexError(f"weights {shape} take up to {len(shape)} indices and one ..., but got {index!r}")
    place = dots[0] if dots else len(index)
    before, after = index[:place], index[place + 1 :]
    leading = len(shape) - 2
    whole = (*before, *(slice(None),) * (len(shape) - len(before) - len(after)), *after)
    named = len(before) > leading or len(after) > 0
    return whole[:leading], whole[leading:] if named else ()


def parse_leading_index(item: Any, size: int) -> int | slice:
    """An index of a batch or head axis, from 0 on."""
    item = to_int(item)
    if isinstance(item, slice):
        return check_slice(item)
    if isinstance(item, bool) or not isinstance(item, int):
        raise TypeError(f"batch and head axes take whole numbers and slices, but got {item!r}")
    if not -size <= item < size:
        raise IndexError(f"a batch or head axis of size {size} takes {-size} to {size - 1}, but got {item}")
    return item % size


def parse_axis_index(item: Any, size: int, name: str, device: torch.device) -> AxisIndex:
    """An index of the query or key axis: a whole number, a slice, or a list of whole numbers."""
    item = to_int(item)
    if isinstance(item, slice):
        return AxisIndex(torch.arange(size, device=device)[check_slice(item)])
    try:
        index = torch.as_tensor(item, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(axis_error(name, item)) from None
    if index.dim() == 1 and index.numel() == 0:
        index = index.to(torch.int64)
    if index.dtype == torch.bool or index.is_floating_point() or index.is_complex() or index.dim() > 1:
        raise TypeError(axis_error(name, item))
    if not bool(((index >= -size) & (index < size)).all()):
        raise IndexError(f"{name} indices go from {-size} to {size - 1}, but got {item!r}")
    places = index.to(torch.int64).remainder(max(size, 1)).reshape(-1)
    return AxisIndex(places, dropped=index.dim() == 0, listed=index.dim() == 1)


def axis_error(name: str, item: Any) -> str:
    return f"a {name} axis takes a whole number, a slice or a list of whole numbers, but got {item!r}"


def to_int(item: Any) -> Any:
    """Whole numbers of other libraries, and tensors of one, as Python's; anything else as it is."""
    if isinstance(item, bool) or (isinstance(item, Tensor) and (item.dim() > 0 or item.dtype == torch.bool)):
        return item
    try:
        return operator.index(item)
    except TypeError:
        return item


def check_slice(item: slice) -> slice:
    if item.step is not None and item.step < 1:
        raise ValueError(f"weights take slices with a step of 1 or more, but got {item!r}")
    return item


def to_slice(index: Tensor) -> slice | Tensor:
    """The indices as a slice where they are evenly spaced, so that what they choose stays a view."""
    places = index.flatten().tolist()
    if not places:
        return slice(0, 0)
    step = max(places[1] - places[0], 1) if len(places) > 1 else 1
    run = range(places[0], places[-1] + 1, step)
    return slice(run.start, run.stop, run.step) if places == list(run) else index.flatten()

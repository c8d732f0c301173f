"""Parses an index of the lazy matrix: sequences and heads, which leave it lazy, and queries and keys."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foci.runtime.checks import check_values
from foci.runtime.tracing import is_traced
from foci.scores import describe_value


@dataclass(frozen=True, slots=True)
class AxisIndex:
    """Indices along one axis; `dropped` for a single number, whose axis is removed; `is_list` for a list."""

    index: Tensor
    dropped: bool = False
    is_list: bool = False


def split_index(index: Any, shape: tuple[int, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Splits an index into that of the leading axes and that of queries and keys, () if it does not name them.

    >>> split_index((0, slice(2)), (2, 4, 10, 10))
    ((0, slice(None, 2, None)), ())
    >>> split_index((..., 3, slice(None)), (2, 4, 10, 10))
    ((slice(None, None, None), slice(None, None, None)), (3, slice(None, None, None)))
    """
    index = index if isinstance(index, tuple) else (index,)
    ellipses = [position for position, item in enumerate(index) if item is Ellipsis]
    if len(ellipses) > 1 or len(index) - len(ellipses) > len(shape):
        raise IndexError(f"index must be up to {len(shape)} indices and one ... for weights {shape}, got {index!r}")
    split = ellipses[0] if ellipses else len(index)
    before, after = index[:split], index[split + 1 :]
    leading = len(shape) - 2
    full = (*before, *(slice(None),) * (len(shape) - len(before) - len(after)), *after)
    named = len(before) > leading or len(after) > 0
    return full[:leading], full[leading:] if named else ()


def parse_leading_index(index: Any, size: int) -> int | slice:
    """An index of a batch or head axis; negative numbers count from the end."""
    item: int | slice = to_int(index)
    if isinstance(item, slice):
        return check_slice(item)
    if not is_int(item):
        raise TypeError(f"an index of a batch or head axis must be an integer or a slice, got {describe_index(item)}")
    if not -size <= item < size:
        raise IndexError(f"an index of a batch or head axis must be from {-size} to {size - 1}, got {item}")
    return item % size


def describe_index(item: Any) -> str:
    """An index for an error message, without the entries of a tensor."""
    return describe_value(item) if isinstance(item, Tensor) else repr(item)


def parse_axis_index(item: Any, size: int, name: str, device: torch.device) -> AxisIndex:
    """An index of the query or key axis: an integer, a slice, or a list of integers."""
    item = to_int(item)
    if isinstance(item, slice):
        return AxisIndex(torch.arange(size, device=device)[check_slice(item)])
    if is_int(item):
        # Made on the device and checked in Python: neither waits for a GPU.
        check_range(-size <= item < size, name, item, size)
        place = item % size
        return AxisIndex(torch.arange(place, place + 1, device=device), dropped=True)
    if isinstance(item, list | tuple) and item and all(is_int(place) for place in item):
        check_range(all(-size <= place < size for place in item), name, item, size)
        return AxisIndex(torch.tensor([place % size for place in item], device=device), is_list=True)
    return parse_index_tensor(item, size, name, device)


def parse_index_tensor(item: Any, size: int, name: str, device: torch.device) -> AxisIndex:
    """An index that is a tensor, an array or an empty list."""
    try:
        index = torch.as_tensor(item, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(axis_error(name, item)) from None
    if index.dim() == 1 and index.numel() == 0:
        index = index.to(torch.int64)
    if index.dtype == torch.bool or index.is_floating_point() or index.is_complex() or index.dim() > 1:
        raise TypeError(axis_error(name, item))
    inside = (index >= -size) & (index < size)
    if is_traced(index):
        check_values(inside, lambda: "")
    else:
        check_range(bool(inside.all()), name, item, size)
    indices = index.to(torch.int64).remainder(max(size, 1)).reshape(-1)
    return AxisIndex(indices, dropped=index.dim() == 0, is_list=index.dim() == 1)


def check_range(inside: bool, name: str, item: Any, size: int) -> None:
    if not inside:
        raise IndexError(f"{name} indices must be from {-size} to {size - 1}, got {item!r}")


def to_range(item: Any, size: int) -> range | None:
    """An index that is an int or a slice with a positive step, as a range; None for any other, and out of bounds.

    >>> to_range(-1, 10), to_range(slice(2, None, 3), 10), to_range([1, 2], 10)
    (range(9, 10), range(2, 10, 3), None)
    """
    if isinstance(item, slice):
        return range(size)[item] if item.step is None or (isinstance(item.step, int) and item.step > 0) else None
    return range(item % size, item % size + 1) if type(item) is int and -size <= item < size else None


def axis_error(name: str, item: Any) -> str:
    return f"a {name} index must be an integer, a slice or a list of integers, got {item!r}"


def to_int(item: Any) -> Any:
    """Integers of other libraries and tensors with one integer as int; anything else unchanged."""
    # torch.compile of PyTorch 2.11 fails where `operator.index` refuses a tuple.
    if item is None or isinstance(item, int | slice | list | tuple | torch.SymInt):
        return item
    if isinstance(item, Tensor) and (item.dim() > 0 or item.dtype == torch.bool or is_traced(item)):
        return item
    try:
        return operator.index(item)
    except TypeError:
        return item


def is_int(item: Any) -> bool:
    """Whether this is an integer, perhaps one that a compiler does not know, and not a bool."""
    return isinstance(item, int | torch.SymInt) and not isinstance(item, bool)


def check_slice(item: slice) -> slice:
    if item.step is not None and item.step < 1:
        raise ValueError(f"a slice must have a step of 1 or more, got {item!r}")
    return item


def select_sequences(lead: tuple[int | slice, ...], batch: tuple[int, ...]) -> tuple[slice | Tensor, tuple[int, ...]]:
    """The sequences of a parsed index of the batch axes, all of them as one axis, and the batch axes that are left."""
    if not batch:
        return slice(0, 1), ()
    if len(batch) == 1:
        return select_from_axis(lead[0], batch[0])
    places = torch.arange(math.prod(batch), device="cpu").view(batch)[lead]
    return to_slice(places), tuple(places.shape)


def select_from_axis(item: int | slice, size: int) -> tuple[slice, tuple[int, ...]]:
    if not isinstance(item, slice):
        return slice(item, item + 1), ()
    start, stop, step = item.indices(size)
    # Not the length of a range, which must be a known number.
    return slice(start, max(start, stop), step), (max(-((start - stop) // step), 0),)


def to_slice(index: Tensor) -> slice | Tensor:
    """The indices as a slice if they are evenly spaced, so that the selection stays a view."""
    if is_traced(index):
        return index.flatten()
    places = index.flatten().tolist()
    if not places:
        return slice(0, 0)
    step = max(places[1] - places[0], 1) if len(places) > 1 else 1
    run = range(places[0], places[-1] + 1, step)
    return slice(run.start, run.stop, run.step) if places == list(run) else index.flatten()

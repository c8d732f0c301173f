"""Checks of tensors and paths that a caller passes; brings them to a normal form."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foci.runtime.tracing import is_traced

if TYPE_CHECKING:
    from foci.masks.tile import CallSizes

IMAGE_SUFFIXES = (".png", ".svg", ".pdf", ".jpg", ".webp")
# What `save` of a record, of weights and of a mask draws.
PICTURE_SUFFIXES = (".html", *IMAGE_SUFFIXES)
# C code reads the memory of these; subclasses such as DTensor hold their data elsewhere.
PLAIN_TENSOR_TYPES = (Tensor, torch.nn.Parameter)


def to_int_tensor(values: Tensor | list[int], name: str) -> Tensor:
    """Integers as a tensor; raises TypeError for anything else."""
    try:
        # as_tensor would move a tensor to the default device; to_call_device moves these from the CPU.
        tensor = values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")
    except (RuntimeError, TypeError, ValueError):
        raise TypeError(f"{name} must be integers, got {values!r}") from None
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} must be integers, got {tensor.dtype}")
    return tensor


def to_call_device(tensor: Tensor, sizes: CallSizes, name: str) -> Tensor:
    """The tensor on the device of the call; only tensors on the CPU are moved."""
    if tensor.device != sizes.device and tensor.device.type != "cpu":
        raise ValueError(f"{name} must be on {sizes.device} like the query, got {tensor.device}")
    return tensor.to(sizes.device)


def parse_suffix(path: str | os.PathLike[str], *accepted: str) -> str:
    """The suffix of a path in lower case; raises ValueError unless it is accepted."""
    suffix = Path(path).suffix.lower()
    if suffix not in accepted:
        raise ValueError(f"path must end with one of {', '.join(accepted)}, got {os.fspath(path)!r}")
    return suffix


def to_numpy(tensor: Tensor, dtype: Any, copy: bool | None) -> Any:
    """A tensor as the result of `__array__`; always a copy, because NumPy cannot share what is computed on demand."""
    if copy is False:
        raise ValueError("copy must be None or True: the entries are computed for the array, got copy=False")
    tensor = tensor.detach().cpu()
    # NumPy has no bfloat16.
    array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array.copy() if dtype is None else array.astype(dtype)


def check_values(condition: Tensor, message: Callable[[], str]) -> None:
    """Raises ValueError on a CPU unless all are True; asserts without a sync on a GPU and while compiling."""
    if is_traced(condition):
        torch._assert_async(condition.all(), "a value of this call is out of range")
    elif condition.device.type == "cpu":
        if not bool(condition.all()):
            raise ValueError(message())
    else:
        torch._assert_async(condition.all())


def is_broadcastable(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape broadcasts to `full`."""
    pairs = zip(shape[::-1], full[::-1], strict=False)
    return len(shape) <= len(full) and all(n in {1, m} for n, m in pairs)


def is_int(number: object) -> bool:
    """Whether this is an int, not a bool."""
    return isinstance(number, int) and not isinstance(number, bool)


def is_positive_int(number: Any) -> bool:
    return is_int(number) and number > 0


def suggest_axes(shape: tuple[int, ...], sizes: CallSizes) -> str:
    """The end of an error message for a tensor that lacks the axis of the heads, and perhaps of the queries."""
    *batch, heads, _, keys = (*sizes.batch, sizes.heads, sizes.queries, sizes.keys)
    if heads is None or not batch:
        return ""
    if shape == (*batch, keys):
        return ": for a row per sequence, index it by [..., None, None, :]"
    if shape == (*batch, sizes.queries, keys):
        return ": for a matrix per sequence, index it by [..., None, :, :]"
    return ""


def to_four_dimensions(tensor: Tensor, sizes: CallSizes, name: str) -> Tensor:
    """A tensor that broadcasts to the attention matrix, as (B or 1, H or 1, Tq or 1, Tk or 1)."""
    full = sizes.matrix_shape
    if not is_broadcastable(tensor.shape, full):
        hint = suggest_axes(tuple(tensor.shape), sizes)
        raise ValueError(f"{name} must broadcast to {full}, got shape {tuple(tensor.shape)}{hint}")
    tensor = tensor.reshape((1,) * (len(full) - tensor.dim()) + tuple(tensor.shape))
    if sizes.heads is None:
        tensor = tensor.unsqueeze(-3)
    batch, rest = tensor.shape[:-3], tensor.shape[-3:]
    if all(n == 1 for n in batch):
        return tensor.reshape(1, *rest)
    return tensor.expand(*sizes.batch, *rest).reshape(sizes.flat_batch, *rest)

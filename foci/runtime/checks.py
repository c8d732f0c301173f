"""How tensors that a caller gives are checked against a call and brought to normal form."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from foci.masks.tile import CallSizes

P = ParamSpec("P")
R = TypeVar("R")


class HasDevice(Protocol):
    """A tensor, or a call."""

    @property
    def device(self) -> torch.device: ...


X = TypeVar("X", bound=HasDevice)


def disable_autocast(function: Callable[Concatenate[X, P], R]) -> Callable[Concatenate[X, P], R]:
    """Autocast chooses the dtype of the inputs and has no say inside: logits and softmax stay in float32 at least, and
    a backward that is started in it computes what its forward did.
    """

    @wraps(function)
    def kept(x: X, /, *arguments: P.args, **options: P.kwargs) -> R:
        device = x.device.type
        if not is_autocast_enabled(device):
            return function(x, *arguments, **options)
        with torch.autocast(device, enabled=False):
            return function(x, *arguments, **options)

    return kept


def is_autocast_enabled(device_type: str) -> bool:
    """Whether autocast is on; a meta tensor has none, and PyTorch does not want to be asked."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def to_int_tensor(values: Tensor | list[int], name: str) -> Tensor:
    try:
        # A tensor stays where it is, whatever the default device.
        tensor = values if isinstance(values, Tensor) else torch.as_tensor(values)
    except (RuntimeError, TypeError, ValueError):
        raise TypeError(f"{name} must be whole numbers, but got {values!r}") from None
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} must be whole numbers, but got {tensor.dtype}")
    return tensor


def index_by_batch(ids: Tensor, batch: Tensor, index: Tensor) -> Tensor:
    """ids[batch, index], where ids may hold one row for the whole batch, or none of the batch dimension."""
    if ids.dim() == 1:
        return ids[index]
    return ids[torch.zeros_like(batch) if ids.shape[0] == 1 else batch, index]


def to_call_device(tensor: Tensor, sizes: CallSizes, name: str) -> Tensor:
    if tensor.device != sizes.device and tensor.device.type != "cpu":
        raise ValueError(f"{name} must be on {sizes.device} like the queries, but it is on {tensor.device}")
    return tensor.to(sizes.device)


def is_traced(tensor: Tensor) -> bool:
    """Whether there are no values to look at: while compiling, and in a fake tensor, or one that stands for it."""
    return torch.compiler.is_compiling() or isinstance(tensor, FakeTensor | FunctionalTensor)


def is_capturing_cuda_graph(tensor: Tensor) -> bool:
    """Whether what happens to it is captured as a CUDA graph: written down and not run, so nothing can be read."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def check_values(condition: Tensor, message: Callable[[], str]) -> None:
    """Raises on a CPU; asserts without a sync on a GPU and while compiling."""
    if is_traced(condition):
        torch._assert_async(condition.all(), "a value of this call is out of range")
    elif condition.device.type == "cpu":
        if not bool(condition.all()):
            raise ValueError(message())
    else:
        torch._assert_async(condition.all())


def is_broadcastable(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    pairs = zip(reversed(shape), reversed(full), strict=False)
    return len(shape) <= len(full) and all(n in {1, m} for n, m in pairs)


def to_four_dimensions(tensor: Tensor, sizes: CallSizes, name: str) -> Tensor:
    """A tensor that broadcasts to the attention matrix, as (B or 1, H or 1, Tq or 1, Tk or 1)."""
    full = sizes.full
    if not is_broadcastable(tensor.shape, full):
        raise ValueError(f"{name} must broadcast to {full}, but got shape {tuple(tensor.shape)}")
    tensor = tensor.reshape((1,) * (len(full) - tensor.dim()) + tuple(tensor.shape))
    if sizes.heads is None:
        tensor = tensor.unsqueeze(-3)
    batch, rest = tensor.shape[:-3], tensor.shape[-3:]
    if all(n == 1 for n in batch):
        return tensor.reshape(1, *rest)
    return tensor.expand(*sizes.batch, *rest).reshape(sizes.flat_batch, *rest)

"""Statistics on their way to the host while the model goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

# What gradients of many tensors travel in between machines: one call for all of them, where each view from Python costs
# as much as an allocation.
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


class PendingCopy(NamedTuple):
    """Tensors that are being copied, the stream that made them, and the end of the copies."""

    tensors: list[Tensor]
    made_on: Any
    arrived: Any


class HostCopier:
    """Moves tensors to the host without waiting for them; `wait` makes them readable.

    On CUDA they go to pinned memory on a stream of their own, so that neither the model nor Python waits. What leaves
    together is put in a row first, so that there is one piece of memory to find and one copy to start, and not one for
    each statistic: both are Python's time, of which a layer has little.

    Rows are held until the next ones leave; the stream that made them then waits for their copies, which are long done,
    and may use their memory again. Tensor.record_stream would keep that memory until the copies have happened, and
    Python, which is layers ahead of the GPU, would have taken more for each of these layers.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._leaving: dict[torch.device, PendingCopy] = {}

    def moved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of one device on the host, by name and still on their way."""
        device = next((tensor.device for tensor in tensors.values()), None)
        if device is None or device.type != "cuda":
            return {name: tensor.cpu() for name, tensor in tensors.items()}
        groups = group_by_itemsize(tensors)
        rows = [flatten_tensors(group.values()) for group in groups]
        stream, made_on = self._stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(made_on)
        with torch.cuda.stream(stream):
            there = [allocate_pinned(row).copy_(row, non_blocking=True) for row in rows]
        before = self._leaving.get(device)
        self._leaving[device] = PendingCopy(rows, made_on, stream.record_event())
        if before is not None:
            before.made_on.wait_event(before.arrived)
        found: dict[str, Tensor] = {}
        for group, row in zip(groups, there, strict=True):
            found |= unflatten_tensors(group, row)
        return found

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def wait(self) -> None:
        """Until everything has arrived."""
        for stream in self._streams.values():
            stream.synchronize()
        self._leaving.clear()


def allocate_pinned(like: Tensor) -> Tensor:
    """Room on the host that a GPU writes to by itself."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def group_by_itemsize(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors whose numbers are equally long, and fit in one row: nearly always all of them."""
    groups: dict[Any, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        # Truth values are bytes of which only two mean something.
        groups.setdefault((tensor.dtype.itemsize, tensor.dtype == torch.bool), {})[name] = tensor
    return list(groups.values())


def flatten_tensors(tensors: Iterable[Tensor]) -> Tensor:
    """All their numbers, one tensor after the other, under the dtype of the first: bits are copied, not converted."""
    first, *others = tensors
    same = [other if other.dtype == first.dtype else other.view(first.dtype) for other in others]
    row: Tensor = _flatten_dense_tensors([first, *same])
    return row


def unflatten_tensors(tensors: Mapping[str, Tensor], row: Tensor) -> dict[str, Tensor]:
    """The tensors of `in_a_row`, from its copy: views of it."""
    parts = _unflatten_dense_tensors(row, list(tensors.values()))
    found = {}
    for (name, tensor), part in zip(tensors.items(), parts, strict=True):
        same = part if part.dtype == tensor.dtype else part.view(tensor.dtype)
        # Of what is empty older releases of PyTorch forget the shape.
        found[name] = same if same.numel() else same.view(tensor.shape)
    return found

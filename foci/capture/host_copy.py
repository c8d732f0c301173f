"""HostCopier: copies statistics to the host while the model runs on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The functions that distributed training uses for gradients: one call for all tensors, where each view made from Python
# costs as much as an allocation.
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


class PendingCopy(NamedTuple):
    """Tensors that are being copied, the stream that computed them, and the event at the end of the copies."""

    tensors: list[Tensor]
    source_stream: Any
    done: Any


class HostCopier:
    """Copies tensors to the host without waiting; `wait` makes the copies readable.

    On CUDA the copies go to pinned memory on a separate stream, so neither the model nor Python waits. Tensors of one
    call are concatenated first: one allocation and one copy instead of one per statistic, which saves host time at
    every layer.

    The concatenated tensors are held until the next call. The stream that computed them then waits for their copies,
    which are long done, and may reuse their memory. Tensor.record_stream would hold that memory until the copies have
    run, and Python, which is layers ahead of the GPU, would have allocated more for each of these layers.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pending: dict[torch.device, PendingCopy] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Starts copying tensors of one device; returns the host tensors by name, readable after `wait`."""
        device = next((tensor.device for tensor in tensors.values()), None)
        if device is None or device.type != "cuda":
            return {name: tensor.cpu() for name, tensor in tensors.items()}
        groups = group_by_itemsize(tensors)
        buffers = [flatten_tensors(group.values()) for group in groups]
        stream, source_stream = self._stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(source_stream)
        with torch.cuda.stream(stream):
            on_host = [allocate_pinned(buffer).copy_(buffer, non_blocking=True) for buffer in buffers]
        previous = self._pending.get(device)
        self._pending[device] = PendingCopy(buffers, source_stream, stream.record_event())
        if previous is not None:
            previous.source_stream.wait_event(previous.done)
        copies: dict[str, Tensor] = {}
        for group, buffer in zip(groups, on_host, strict=True):
            copies |= unflatten_tensors(group, buffer)
        return copies

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def wait(self) -> None:
        """Waits until all copies are done."""
        for stream in self._streams.values():
            stream.synchronize()
        self._pending.clear()


def allocate_pinned(like: Tensor) -> Tensor:
    """An empty host tensor in pinned memory, to which a GPU copies asynchronously."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def group_by_itemsize(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Groups tensors of equal element size, which can share a buffer: nearly always one group."""
    groups: dict[Any, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        # A bool tensor cannot be viewed as another one-byte dtype: only two byte values are valid.
        groups.setdefault((tensor.dtype.itemsize, tensor.dtype == torch.bool), {})[name] = tensor
    return list(groups.values())


def flatten_tensors(tensors: Iterable[Tensor]) -> Tensor:
    """Concatenates tensors under the dtype of the first; bits are copied, not converted."""
    first, *others = tensors
    views = [other if other.dtype == first.dtype else other.view(first.dtype) for other in others]
    buffer: Tensor = _flatten_dense_tensors([first, *views])
    return buffer


def unflatten_tensors(tensors: Mapping[str, Tensor], buffer: Tensor) -> dict[str, Tensor]:
    """The tensors that `flatten_tensors` concatenated, as views of a copy of the buffer."""
    parts = _unflatten_dense_tensors(buffer, list(tensors.values()))
    views = {}
    for (name, tensor), part in zip(tensors.items(), parts, strict=True):
        view = part if part.dtype == tensor.dtype else part.view(tensor.dtype)
        # Older releases of PyTorch lose the shape of empty tensors.
        views[name] = view if view.numel() else view.view(tensor.shape)
    return views

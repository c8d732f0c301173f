"""HostCopier: copies statistics to the host while the model runs on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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


# Tensors on a GPU wait for others until they have this many bytes: a copy costs as much host time as several launches.
BATCH_BYTES = 2**22
# The same for weights on text, of which a denoising step of a large model has some dozens of MiB.
TEXT_BATCH_BYTES = 2**24
# The first copies stay in pinned memory. More of it is slow to allocate (a second for a few GiB, in which Python waits)
# and is taken from all other programs, so later copies only pass through it.
MAX_PINNED_BYTES = 2**28
# How many copies may wait to be moved out of pinned memory. Writing to new memory can take longer than the model, which
# then waits: more copies in flight would need more pinned memory, which is slower still.
MAX_MOVES = 8


class HostCopier:
    """Copies tensors to the host without waiting; `wait` makes the copies readable.

    On CUDA the copies go to pinned memory on a separate stream, so neither the model nor Python waits. Tensors of
    several calls are concatenated first: one allocation and one copy instead of one per statistic and layer.

    The concatenated tensors are held until the next copy. The stream that computed them then waits for their copies,
    which are long done, and may reuse their memory. After MAX_PINNED_BYTES a thread moves every copy from pinned memory
    to ordinary memory once it is done. Tensor.record_stream would hold that memory until the copies have
    run, and Python, which is layers ahead of the GPU, would have allocated more for each of these layers.

    Args:
        batch_bytes: how many bytes to collect before they are copied; 0 copies the tensors of each call at once.
    """

    def __init__(self, batch_bytes: int = BATCH_BYTES) -> None:
        self.batch_bytes = batch_bytes
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pending: dict[torch.device, PendingCopy] = {}
        self._collected: dict[torch.device, list[dict[str, Tensor]]] = {}
        self._collected_bytes = self._pinned_bytes = 0
        self._moves: deque[Future[None]] = deque()
        self._mover: ThreadPoolExecutor | None = None

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Starts copying tensors of one device; after `wait` the returned dict has the host tensors by name."""
        device = next((tensor.device for tensor in tensors.values()), None)
        if device is None or device.type != "cuda":
            return {name: tensor.cpu() for name, tensor in tensors.items()}
        copies, nbytes = dict(tensors), sum(tensor.nbytes for tensor in tensors.values())
        # Batches stay below the limit: PyTorch rounds pinned memory up to a power of two and uses equal sizes again.
        if self._collected_bytes + nbytes > self.batch_bytes:
            self.start()
        self._collected.setdefault(device, []).append(copies)
        self._collected_bytes += nbytes
        if nbytes >= self.batch_bytes:
            self.start()
        return copies

    def start(self) -> None:
        """Starts the copies of all collected tensors, and puts the host tensors into the dicts that `copy` returned."""
        for device, dicts in self._collected.items():
            named = {(number, name): tensor for number, each in enumerate(dicts) for name, tensor in each.items()}
            for (number, name), copied in self._start_copy(device, named).items():
                dicts[number][name] = copied
        self._collected.clear()
        self._collected_bytes = 0

    def _start_copy(self, device: torch.device, tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        groups = group_by_itemsize(tensors)
        buffers = [flatten_tensors(group.values()) for group in groups]
        stream, source_stream = self._stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(source_stream)
        with torch.cuda.stream(stream):
            on_host = [allocate_pinned(buffer).copy_(buffer, non_blocking=True) for buffer in buffers]
        previous, done = self._pending.get(device), stream.record_event()
        self._pending[device] = PendingCopy(buffers, source_stream, done)
        self._pinned_bytes += sum(buffer.nbytes for buffer in buffers)
        if self._pinned_bytes > MAX_PINNED_BYTES:
            on_host = self._move_when_done(on_host, done)
        if previous is not None:
            previous.source_stream.wait_event(previous.done)
        copies: dict[Any, Tensor] = {}
        for group, buffer in zip(groups, on_host, strict=True):
            copies |= unflatten_tensors(group, buffer)
        return copies

    def _move_when_done(self, pinned: Sequence[Tensor], done: Any) -> list[Tensor]:
        """Tensors in ordinary memory, to which a thread moves those in pinned memory; PyTorch then uses that again."""
        if self._mover is None:
            self._mover = ThreadPoolExecutor(1, "foci-host-copy")
        while len(self._moves) >= MAX_MOVES:
            self._moves.popleft().result()
        targets = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in pinned]
        self._moves.append(self._mover.submit(move_tensors, done, list(pinned), targets))
        return targets

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def wait(self) -> None:
        """Waits until all copies are done."""
        self.start()
        for stream in self._streams.values():
            stream.synchronize()
        self._pending.clear()
        for move in self._moves:
            move.result()
        self._moves.clear()
        if self._mover is not None:
            self._mover.shutdown()
            self._mover = None


def move_tensors(done: Any, sources: list[Tensor], targets: list[Tensor]) -> None:
    """Copies host tensors once the event at the end of the copies to them has passed."""
    done.synchronize()
    while sources:
        # The last reference to the source is dropped here, not when the Future is.
        targets[len(sources) - 1].copy_(sources.pop())


def allocate_pinned(like: Tensor) -> Tensor:
    """An empty host tensor in pinned memory, to which a GPU copies asynchronously."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def group_by_itemsize(tensors: Mapping[Any, Tensor]) -> list[dict[Any, Tensor]]:
    """Groups tensors of equal element size, which can share a buffer: nearly always one group."""
    groups: dict[Any, dict[Any, Tensor]] = {}
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


def unflatten_tensors(tensors: Mapping[Any, Tensor], buffer: Tensor) -> dict[Any, Tensor]:
    """The tensors that `flatten_tensors` concatenated, as views of a copy of the buffer."""
    parts = _unflatten_dense_tensors(buffer, list(tensors.values()))
    views = {}
    for (name, tensor), part in zip(tensors.items(), parts, strict=True):
        view = part if part.dtype == tensor.dtype else part.view(tensor.dtype)
        # Older releases of PyTorch lose the shape of empty tensors.
        views[name] = view if view.numel() else view.view(tensor.shape)
    return views

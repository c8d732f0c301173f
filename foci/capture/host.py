"""Statistics on their way to the host while the model goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Leaving(NamedTuple):
    """Tensors that are being copied, the stream that made them, and the end of the copies."""

    tensors: list[Tensor]
    made_on: Any
    arrived: Any


class Host:
    """Moves tensors to the host without waiting for them; `wait` makes them readable.

    On CUDA they go to pinned memory on a stream of their own, so that neither the model nor Python waits. They are
    held until the next ones leave; the stream that made them then waits for their copies, which are long done, and may
    use their memory again. Tensor.record_stream would keep that memory until the copies have happened, and Python,
    which is layers ahead of the GPU, would have taken more for each of these layers.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._leaving: dict[torch.device, Leaving] = {}

    def moved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of one device on the host, by name and still on their way."""
        device = next((tensor.device for tensor in tensors.values()), None)
        if device is None or device.type != "cuda":
            return {name: tensor.cpu() for name, tensor in tensors.items()}
        stream, made_on = self._stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(made_on)
        with torch.cuda.stream(stream):
            there = {name: pinned(tensor).copy_(tensor, non_blocking=True) for name, tensor in tensors.items()}
        before = self._leaving.get(device)
        self._leaving[device] = Leaving(list(tensors.values()), made_on, stream.record_event())
        if before is not None:
            before.made_on.wait_event(before.arrived)
        return there

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def wait(self) -> None:
        """Until everything has arrived."""
        for stream in self._streams.values():
            stream.synchronize()
        self._leaving.clear()


def pinned(like: Tensor) -> Tensor:
    """Room on the host that a GPU writes to by itself."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

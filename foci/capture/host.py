"""Statistics on their way to the host while the model goes on."""

from __future__ import annotations

import torch
from torch import Tensor


class Host:
    """Moves tensors to the host without waiting for them; `wait` makes them readable.

    On CUDA they go to pinned memory on a stream of their own, so that neither the model nor Python waits.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def moved(self, tensor: Tensor) -> Tensor:
        """The tensor on the host, still on its way."""
        if not tensor.is_cuda:
            return tensor.cpu()
        stream = self._streams.get(tensor.device)
        if stream is None:
            stream = self._streams[tensor.device] = torch.cuda.Stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            there.copy_(tensor, non_blocking=True)
        # Its memory is not given to others before the copy is done.
        tensor.record_stream(stream)
        return there

    def wait(self) -> None:
        """Until everything has arrived."""
        for stream in self._streams.values():
            stream.synchronize()

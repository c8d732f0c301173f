"""Replays training steps as CUDA graphs, one per batch shape: small kernels take longer to launch than to run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foci.runtime.cuda_graphs import capture_cuda_graph

StepFunction = Callable[[dict[str, Tensor], Tensor], None]
# The first calls of a shape run eagerly as warm-up; the next one is captured.
WARMUP_CALLS = 3


class GraphedStep:
    """Captures a function of a batch and a loss weight, which changes tensors in place, once per batch shape."""

    def __init__(self, function: StepFunction) -> None:
        self.function = function
        self.calls: dict[tuple[object, ...], int] = {}
        self.graphs: dict[tuple[object, ...], tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Tensor]] = {}
        self.pool: Any = None
        self.side_stream: torch.cuda.Stream | None = None

    def __call__(self, batch: dict[str, Tensor], weight: Tensor) -> None:
        shapes = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in batch.items())
        calls = self.calls[shapes] = self.calls.get(shapes, 0) + 1
        if calls <= WARMUP_CALLS:
            self._run_on_side_stream(batch, weight)
            return
        if shapes not in self.graphs:
            self.graphs[shapes] = self._capture(batch, weight)
        graph, static_batch, static_weight = self.graphs[shapes]
        for name, tensor in batch.items():
            static_batch[name].copy_(tensor, non_blocking=True)
        static_weight.copy_(weight)
        graph.replay()

    def _run_on_side_stream(self, batch: dict[str, Tensor], weight: Tensor) -> None:
        """Warms up on a side stream, as CUDA graph capture requires."""
        stream = self.side_stream = torch.cuda.Stream() if self.side_stream is None else self.side_stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.function(batch, weight)
        torch.cuda.current_stream().wait_stream(stream)

    def _capture(
        self, batch: dict[str, Tensor], weight: Tensor
    ) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Tensor]:
        """Captures the function with copies of the inputs; capturing runs no kernel."""
        static_batch, static_weight = {name: tensor.clone() for name, tensor in batch.items()}, weight.clone()
        try:
            # The graphs never run concurrently and keep no results in the pool, so they share its memory.
            graph, _ = capture_cuda_graph(lambda: self.function(static_batch, static_weight), self.pool)
        except RuntimeError as error:
            raise RuntimeError(
                f"the training step could not be captured as a CUDA graph (set train.graphs = false): {error}"
            ) from error
        self.pool = graph.pool()
        return graph, static_batch, static_weight

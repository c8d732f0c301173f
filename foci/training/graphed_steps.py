"""Work that a GPU replays as one graph for every shape it has seen often: launching takes longer than small kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foci.runtime.cuda_graphs import capture_cuda_graph

StepFunction = Callable[[dict[str, Tensor], Tensor], None]
# The first calls of a shape run as they are and warm it up; the next one is captured.
WARMUP_CALLS = 3


class GraphedStep:
    """A function of a batch and a weight that changes tensors in place, captured once for each shape of the batch."""

    def __init__(self, work: StepFunction) -> None:
        self.work = work
        self.seen: dict[tuple[object, ...], int] = {}
        self.graphs: dict[tuple[object, ...], tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Tensor]] = {}
        self.pool: Any = None
        self.aside: torch.cuda.Stream | None = None

    def __call__(self, batch: dict[str, Tensor], weight: Tensor) -> None:
        shapes = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in batch.items())
        times = self.seen[shapes] = self.seen.get(shapes, 0) + 1
        if times <= WARMUP_CALLS:
            self._aside(batch, weight)
            return
        if shapes not in self.graphs:
            self.graphs[shapes] = self._capture(batch, weight)
        graph, kept, kept_weight = self.graphs[shapes]
        for name, tensor in batch.items():
            kept[name].copy_(tensor, non_blocking=True)
        kept_weight.copy_(weight)
        graph.replay()

    def _aside(self, batch: dict[str, Tensor], weight: Tensor) -> None:
        """On a stream of its own, as what is captured will be."""
        stream = self.aside = torch.cuda.Stream() if self.aside is None else self.aside
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.work(batch, weight)
        torch.cuda.current_stream().wait_stream(stream)

    def _capture(
        self, batch: dict[str, Tensor], weight: Tensor
    ) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Tensor]:
        """Nothing runs while it is captured."""
        kept, kept_weight = {name: tensor.clone() for name, tensor in batch.items()}, weight.clone()
        try:
            # Graphs that never run at the same time and leave nothing behind can share their memory.
            graph, _ = capture_cuda_graph(lambda: self.work(kept, kept_weight), self.pool)
        except RuntimeError as error:
            raise RuntimeError(
                f"an update could not be captured (train.graphs = false goes without): {error}"
            ) from error
        self.pool = graph.pool()
        return graph, kept, kept_weight

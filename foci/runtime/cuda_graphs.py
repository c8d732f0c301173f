"""Work captured as a CUDA graph, which a GPU replays in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

GraphResult = TypeVar("Made")


def capture_cuda_graph(work: Callable[[], GraphResult], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, GraphResult]:
    """The graph of what `work` launches, and what it gave: tensors that every replay writes anew.

    All captures run on one stream, and cuBLAS keeps one workspace per stream. Were it left from an earlier capture, it
    would lie in memory that goes with that one's graph, and replays of this one would reach for it.
    """
    graph = torch.cuda.CUDAGraph()
    clear_cublas_workspaces()
    try:
        with torch.cuda.graph(graph, pool=pool):
            made = work()
    finally:
        clear_cublas_workspaces()
    return graph, made


def clear_cublas_workspaces() -> None:
    """Lets cuBLAS take new workspaces; those in a graph's own memory stay reserved for its replays."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()

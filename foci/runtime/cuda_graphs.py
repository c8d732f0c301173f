"""Captures work as a CUDA graph, which a GPU replays in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

GraphResult = TypeVar("GraphResult")


def capture_cuda_graph(work: Callable[[], GraphResult], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, GraphResult]:
    """The CUDA graph of what `work` launches, and its result: tensors that every replay overwrites.

    All captures run on one stream, and cuBLAS keeps one workspace per stream. A workspace of an earlier capture is
    freed with its graph, and replays of this graph would still use it: so each capture gets its own.
    """
    graph = torch.cuda.CUDAGraph()
    clear_cublas_workspaces()
    try:
        with torch.cuda.graph(graph, pool=pool):
            result = work()
    finally:
        clear_cublas_workspaces()
    return graph, result


def clear_cublas_workspaces() -> None:
    """Makes cuBLAS allocate new workspaces; those in the memory of a graph stay reserved for its replays."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()

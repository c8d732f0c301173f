"""Work captured as a CUDA graph, which a GPU replays in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Made = TypeVar("Made")


def captured(work: Callable[[], Made], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Made]:
    """The graph of what `work` launches, and what it gave: tensors that every replay writes anew.

    All captures run on one stream, and cuBLAS keeps one workspace per stream. Were it left from an earlier capture, it
    would lie in memory that goes with that one's graph, and replays of this one would reach for it.
    """
    graph = torch.cuda.CUDAGraph()
    forget_workspaces()
    try:
        with torch.cuda.graph(graph, pool=pool):
            made = work()
    finally:
        forget_workspaces()
    return graph, made


def forget_workspaces() -> None:
    """Lets cuBLAS take new workspaces; those in a graph's own memory stay reserved for its replays."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()

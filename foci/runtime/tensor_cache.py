"""Tensors that follow from plain numbers and are the same in every call: made once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from foci.runtime.tracing import is_capturing_cuda_graph, is_inside_torch_func, is_traced

T = TypeVar("T")

# How many kinds of calls are remembered. Lengths that never come again push all of them out now and then.
MAX_CACHED_TENSORS = 64
STREAM_CACHE: dict[Hashable, Any] = {}
PERMANENT_CACHE: dict[Hashable, Any] = {}


def cache_per_stream(key: Hashable, beside: Tensor, make: Callable[[], T]) -> T:
    """What was made for this key on the device of a tensor, or is now; for the stream in use, as no other one would
    wait until it is there. A CUDA graph, which may outlive it, makes its own.
    """
    if bypasses_cache(beside) or is_capturing_cuda_graph(beside):
        return make()
    device = beside.device
    whole = key, device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    found: T = get_or_make(STREAM_CACHE, MAX_CACHED_TENSORS, whole, lambda: make_outside_inference_mode(make))
    return found


def get_or_make(shelf: dict[Hashable, T], most: int, key: Hashable, make: Callable[[], T]) -> T:
    """What is on the shelf, or is put there now; a full one is cleared before."""
    found = shelf.get(key)
    if found is None:
        if len(shelf) >= most:
            shelf.clear()
        found = shelf[key] = make()
    return found


def cache_permanently(key: Hashable, beside: Tensor, make: Callable[[], T]) -> T:
    """The same for the few small things that may stay for good, and that every stream and graph may read."""
    if bypasses_cache(beside):
        return make()
    whole = key, beside.device
    found: T | None = PERMANENT_CACHE.get(whole)
    if found is None:
        if is_capturing_cuda_graph(beside):
            return make()
        found = make_outside_inference_mode(make)
        if beside.is_cuda:
            torch.cuda.current_stream(beside.device).synchronize()
        PERMANENT_CACHE[whole] = found
    return found


def bypasses_cache(beside: Tensor) -> bool:
    """Whether somebody looks on who must see how it is made: a compiler, a transform of torch.func, or a mode, whose
    tensors may be of its own kind, or which counts on the same operations when a forward runs again.
    """
    return (
        is_traced(beside)
        or is_inside_torch_func()
        or torch._C._len_torch_dispatch_stack() > 0
    )


def make_outside_inference_mode(make: Callable[[], T]) -> T:
    """A tensor that is made in inference mode could not be used in a later training step."""
    with torch.inference_mode(False):
        return make()

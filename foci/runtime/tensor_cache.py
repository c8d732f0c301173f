"""Caches of tensors that follow from plain numbers and are the same in every call."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from foci.runtime.tracing import is_capturing_cuda_graph, is_inside_torch_func, is_traced

T = TypeVar("T")

# A full cache is cleared, so that lengths that never repeat do not accumulate.
MAX_CACHED_TENSORS = 64
STREAM_CACHE: dict[Hashable, Any] = {}
PERMANENT_CACHE: dict[Hashable, Any] = {}


def cache_per_stream(key: Hashable, like: Tensor, make: Callable[[], T]) -> T:
    """The cached result of `make` for this key, on the device of `like` and its current stream.

    Another stream would not wait until the result is computed. While a CUDA graph is captured, nothing is cached,
    because the graph may outlive the cache.
    """
    if bypasses_cache(like) or is_capturing_cuda_graph(like):
        return make()
    full_key = key, like.device, current_stream_number(like.device)
    value: T = get_or_make(STREAM_CACHE, MAX_CACHED_TENSORS, full_key, lambda: make_outside_inference_mode(make))
    return value


def current_stream_number(device: torch.device) -> int:
    """The current stream of a device as a number; 0 on a CPU."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def get_or_make(cache: dict[Hashable, T], limit: int, key: Hashable, make: Callable[[], T]) -> T:
    """The cached value of a key, made if missing; a cache with `limit` entries is cleared first."""
    value = cache.get(key)
    if value is None:
        if len(cache) >= limit:
            cache.clear()
        value = cache[key] = make()
    return value


def cache_permanently(key: Hashable, like: Tensor, make: Callable[[], T]) -> T:
    """The cached result of `make`, never dropped, for all streams and CUDA graphs: for few and small tensors."""
    if bypasses_cache(like):
        return make()
    full_key = key, like.device
    value: T | None = PERMANENT_CACHE.get(full_key)
    if value is None:
        if is_capturing_cuda_graph(like):
            return make()
        value = make_outside_inference_mode(make)
        if like.is_cuda:
            torch.cuda.current_stream(like.device).synchronize()
        PERMANENT_CACHE[full_key] = value
    return value


def bypasses_cache(like: Tensor) -> bool:
    """Whether the tensors must be made in every call: inside a compiler, a torch.func transform or a dispatch mode.

    A mode may use tensors of its own class, or rely on the same operations when a forward is recomputed.
    """
    return is_traced(like) or is_inside_torch_func() or torch._C._len_torch_dispatch_stack() > 0


def make_outside_inference_mode(make: Callable[[], T]) -> T:
    """Calls `make` outside inference mode, whose tensors cannot be used in a later training step."""
    with torch.inference_mode(False):
        return make()

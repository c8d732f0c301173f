"""Tensors that follow from plain numbers and are the same in every call: made once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from foci.runtime.checks import is_captured, is_unreadable

T = TypeVar("T")

# How many kinds of calls are remembered. Lengths that never come again push all of them out now and then.
MOST = 64
KEPT: dict[Hashable, Any] = {}
FOREVER: dict[Hashable, Any] = {}


def remembered(key: Hashable, beside: Tensor, make: Callable[[], T]) -> T:
    """What was made for this key on the device of a tensor, or is now; for the stream in use, as no other one would
    wait until it is there. A CUDA graph, which may outlive it, makes its own.
    """
    if is_special(beside) or is_captured(beside):
        return make()
    device = beside.device
    whole = key, device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    found: T = found_or_made(KEPT, MOST, whole, lambda: for_all_modes(make))
    return found


def found_or_made(shelf: dict[Hashable, T], most: int, key: Hashable, make: Callable[[], T]) -> T:
    """What is on the shelf, or is put there now; a full one is cleared before."""
    found = shelf.get(key)
    if found is None:
        if len(shelf) >= most:
            shelf.clear()
        found = shelf[key] = make()
    return found


def once(key: Hashable, beside: Tensor, make: Callable[[], T]) -> T:
    """The same for the few small things that may stay for good, and that every stream and graph may read."""
    if is_special(beside):
        return make()
    whole = key, beside.device
    found: T | None = FOREVER.get(whole)
    if found is None:
        if is_captured(beside):
            return make()
        found = for_all_modes(make)
        if beside.is_cuda:
            torch.cuda.current_stream(beside.device).synchronize()
        FOREVER[whole] = found
    return found


def is_special(beside: Tensor) -> bool:
    """Whether somebody looks on who must see how it is made: a compiler, a transform of torch.func, or a mode, whose
    tensors may be of its own kind, or which counts on the same operations when a forward runs again.
    """
    return (
        is_unreadable(beside)
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
    )


def for_all_modes(make: Callable[[], T]) -> T:
    """A tensor that is made in inference mode could not be used in a later training step."""
    with torch.inference_mode(False):
        return make()

"""Hands the attention calls of a thread to the open `foci.watch` blocks, at no cost for any other call.

A block puts a dispatch key of PyTorch on its thread. Operators without a kernel for this key skip it, in C++;
F.scaled_dot_product_attention has one, by whatever name and from whatever code it is called, and so has the softmax, by
which eager attention code is recognized. foci's own functions read the key. The key and the interceptors belong to the
state that autograd hands to its threads, so that activation checkpointing, which runs modules again on these threads,
takes the path of the first pass.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.library import Library, fallthrough_kernel
from torch.overrides import TorchFunctionMode

# Nothing else uses this key: PyTorch reserves it for tests of its dispatcher. It comes before autocast and torch.func,
# as a torch function mode does.
KEY_NAME = "TESTING_ONLY_GenericMode"
KEY = torch._C._dispatch_key_parse(KEY_NAME)
KEY_SET = torch._C.DispatchKeySet(KEY)
STATE_NAME = "foci.interceptors"

# Operators by name, with the functions that run them.
INTERCEPTED_OPERATORS: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": F.scaled_dot_product_attention,
    "softmax.int": torch.softmax,
}

is_key_included = torch._C._dispatch_tls_is_dispatch_key_included


class Interceptor(Protocol):
    """Gets attention calls while it is open; calling `function` hands the call to the next one."""

    is_open: bool

    def intercept(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class CallTracer(TorchFunctionMode):
    """A torch function mode on the stack while a watched model is compiled: calls are traced as it runs them."""

    def trace_call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


def find_tracer() -> CallTracer | None:
    """The tracer of the graph that is being compiled; compilers trace this function, too."""
    if torch._C._is_torch_function_mode_enabled():
        for index in range(torch._C._len_torch_function_stack()):
            mode = torch._C._get_function_stack_at(index)
            if isinstance(mode, CallTracer):
                return mode
    return None


class Handling(threading.local):
    """How many interceptors of this thread, from the innermost one, are handling a call already."""

    depth = 0


HANDLING = Handling()


def get_interceptors() -> tuple[Interceptor, ...]:
    """The interceptors of this thread, outermost first; none while compiling, which would keep the answer."""
    if torch.compiler.is_compiling() or not is_key_included(KEY):
        return ()
    found: tuple[Interceptor, ...] = torch._C._get_obj_in_tls(STATE_NAME)
    return found


def is_intercepting() -> bool:
    """Whether `intercept` must get the calls of this thread."""
    if torch.compiler.is_compiling():
        return find_tracer() is not None
    # `get_interceptors` in fewer steps: this runs at every attention call.
    return is_key_included(KEY) and HANDLING.depth < len(torch._C._get_obj_in_tls(STATE_NAME))


def intercept(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hands a call to the innermost interceptor that is not handling one, where `is_intercepting` says there is one."""
    if torch.compiler.is_compiling():
        tracer = find_tracer()
        assert tracer is not None
        with torch._C.DisableTorchFunction():
            return tracer.trace_call(function, args, kwargs)
    depth = HANDLING.depth
    interceptor: Interceptor = torch._C._get_obj_in_tls(STATE_NAME)[-1 - depth]
    HANDLING.depth = depth + 1
    try:
        return interceptor.intercept(function, args, kwargs) if interceptor.is_open else function(*args, **kwargs)
    finally:
        HANDLING.depth = depth


def run_original(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an intercepted call as it is, from the only interceptor of the thread."""
    with hide_key():
        return function(*args, **kwargs)


@contextmanager
def without_interception() -> Iterator[None]:
    """Calls inside the block are not handed to any interceptor: those made only for a record."""
    depth = HANDLING.depth
    HANDLING.depth = len(get_interceptors())
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        HANDLING.depth = depth


def hide_key() -> Any:
    """Takes the key off the thread inside the block: higher-order operators refuse keys that they do not know."""
    return torch._C._ExcludeDispatchKeyGuard(KEY_SET)


@contextmanager
def add_interceptor(interceptor: Interceptor) -> Iterator[None]:
    """Hands the attention calls of this thread to the interceptor inside the block."""
    register_kernels()
    try:
        set_interceptors((*get_interceptors(), interceptor))
        yield
    finally:
        set_interceptors(tuple(each for each in get_interceptors() if each is not interceptor))


def set_interceptors(interceptors: tuple[Interceptor, ...]) -> None:
    references = sys.getrefcount(interceptors)
    torch._C._stash_obj_in_tls(STATE_NAME, interceptors)
    if sys.getrefcount(interceptors) <= references:
        # PyTorch 2.11 drops a reference later that it did not take here, which would free the tuple in use.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(interceptors))
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, bool(interceptors))


@cache
def register_kernels() -> tuple[Library, Library]:
    """Registers what operators do under the key, once for the process; the registration ends with the libraries."""
    every, aten = Library("_", "IMPL", KEY_NAME), Library("aten", "IMPL", KEY_NAME)
    every.fallback(fallthrough_kernel, KEY_NAME)
    for operator, function in INTERCEPTED_OPERATORS.items():
        aten.impl(operator, partial(run_intercepted, function), KEY_NAME)
    # A torch.autograd.Function inside torch.func is a higher-order operator: the fallback does not count for these.
    sys.modules["torch._functorch.autograd_function"].custom_function_call.fallthrough(KEY)
    return every, aten


def run_intercepted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The kernel of an intercepted operator under the key."""
    if is_intercepting():
        return intercept(function, args, kwargs)
    with hide_key():
        return function(*args, **kwargs)

"""PyTorch's state around a call: compilers, torch.func transforms, CUDA graph capture and autocast."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

P = ParamSpec("P")
R = TypeVar("R")


class HasDevice(Protocol):
    """A tensor or a `Call`."""

    @property
    def device(self) -> torch.device: ...


X = TypeVar("X", bound=HasDevice)


def is_traced(tensor: Tensor) -> bool:
    """Whether the tensor has no values to read: while compiling, and for fake and functional tensors."""
    return torch.compiler.is_compiling() or isinstance(tensor, FakeTensor | FunctionalTensor)


def is_capturing_cuda_graph(tensor: Tensor) -> bool:
    """Whether operations on the tensor are captured in a CUDA graph: recorded but not run, so no value can be read."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def is_inside_torch_func() -> bool:
    """Whether a torch.func transform (grad, jacrev, vmap) or forward-mode differentiation is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None or is_forward_differentiated()


def is_forward_differentiated() -> bool:
    """Whether forward-mode differentiation (torch.func.jvp, dual numbers) is active."""
    return forward_ad._current_level >= 0


def is_recomputation() -> bool:
    """Whether activation checkpointing recomputes a forward pass inside the backward pass."""
    return torch._C._current_graph_task_id() != -1


def is_vmapped(tensor: Tensor) -> bool:
    """Whether torch.func.vmap hides a batch dimension of the tensor."""
    return bool(torch._C._functorch.is_batchedtensor(tensor))


def is_autocast_enabled(device_type: str) -> bool:
    """Whether autocast is on; for meta tensors it does not exist, and PyTorch raises when it is queried."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def disable_autocast(function: Callable[Concatenate[X, P], R]) -> Callable[Concatenate[X, P], R]:
    """Runs the function without autocast, on the device of its first argument.

    Autocast chooses the dtype of the inputs only: logits and softmax stay in float32 at least, and a backward that is
    started under autocast computes in the dtypes of its forward.
    """

    @wraps(function)
    def run_without_autocast(x: X, /, *arguments: P.args, **options: P.kwargs) -> R:
        device = x.device.type
        if not is_autocast_enabled(device):
            return function(x, *arguments, **options)
        with torch.autocast(device, enabled=False):
            return function(x, *arguments, **options)

    return run_without_autocast


@contextmanager
def enable_autograd_in_operator() -> Iterator[None]:
    """Enables autograd inside the implementation of an operator, where PyTorch switches it off."""
    key = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    excluded = excluded.remove(key.AutogradFunctionality).remove(key.ADInplaceOrView)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def name_reversed_matmul() -> None:
    """Makes the compiler say that it exchanged the factors of `a @ b`, where `a` is not a tensor but overrides matmul.

    It does exchange them. For other operators it then names the reversed function, such as `Tensor.__rsub__`; up to
    PyTorch 2.13 its table lacks `Tensor.__rmatmul__`.
    """
    builtin = sys.modules.get("torch._dynamo.variables.builtin")
    reversed_functions = getattr(builtin, "BUILTIN_TO_TENSOR_RFN_MAP", None)
    if isinstance(reversed_functions, dict):
        reversed_functions.setdefault(operator.matmul, torch.Tensor.__rmatmul__)

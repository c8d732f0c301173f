"""Records F.multi_head_attention_forward: it hides its matrix products, so a copy of it runs, which reports them.

B batch, H heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.call import attention
from foci.capture.head_ablation import zero_heads
from foci.runtime.interception import intercept, is_intercepting, without_interception
from foci.scores import Dot

if TYPE_CHECKING:
    from foci.capture.recorder import Recorder


class TorchModule:
    """The torch module for a copy of F.multi_head_attention_forward: its matrix products report their arguments."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def bmm(self, *args: Tensor) -> Tensor:
        return run_matrix_product(torch.bmm, args)

    def baddbmm(self, *args: Tensor) -> Tensor:
        return run_matrix_product(torch.baddbmm, args)


def copy_function(function: Any, **names: Any) -> Any:
    """A copy of a function that finds other objects under some global names."""
    copy = FunctionType(function.__code__, function.__globals__ | names, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


has_torch_function, handle_torch_function = F.has_torch_function, F.handle_torch_function  # type: ignore[attr-defined]
multi_head_attention_forward = copy_function(
    F.multi_head_attention_forward, torch=TorchModule(), has_torch_function=lambda _: False
)
MULTI_HEAD_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
PATCH_LOCK = threading.Lock()


class MultiHeadPatch:
    """Intercepts F.multi_head_attention_forward, by whatever name it is called, while there are open blocks.

    The function asks whether a torch function mode is active, and then hands over its call: inside a block the answer
    is yes, on the threads of the block. PyTorch's inference fast path, which runs outside Python, is off meanwhile, on
    all threads.
    """

    def __init__(self) -> None:
        self.blocks, self.had_fast_path = 0, True

    def update(self, blocks: int) -> None:
        with PATCH_LOCK:
            was_open, self.blocks = self.blocks > 0, self.blocks + blocks
            if was_open == (self.blocks > 0):
                return
            if was_open:
                names: dict[str, Any] = {"has_torch_function": has_torch_function}
                names["handle_torch_function"] = handle_torch_function
                torch.backends.mha.set_fastpath_enabled(self.had_fast_path)
            else:
                names = {"has_torch_function": must_dispatch, "handle_torch_function": dispatch_torch_function}
                self.had_fast_path = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            vars(F).update(names)


MULTI_HEAD_PATCH = MultiHeadPatch()


@contextmanager
def intercept_multi_head_attention() -> Iterator[None]:
    """Calls of F.multi_head_attention_forward reach the interceptors of their thread inside the block."""
    try:
        MULTI_HEAD_PATCH.update(blocks=1)
        yield
    finally:
        MULTI_HEAD_PATCH.update(blocks=-1)


def must_dispatch(tensors: tuple[Any, ...]) -> bool:
    """Replaces `has_torch_function`, which only F.multi_head_attention_forward calls."""
    return has_torch_function(tensors) or is_intercepting() or RUNNING.products is not None


def dispatch_torch_function(function: Any, tensors: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
    """Replaces `handle_torch_function`; torch function modes come first.

    Without the matrix, F.multi_head_attention_forward calls F.scaled_dot_product_attention, which is intercepted.
    """
    if function is not F.multi_head_attention_forward or has_torch_function(tensors):
        return handle_torch_function(function, tensors, *args, **kwargs)
    if kwargs["need_weights"] and is_intercepting():
        return intercept(function, args, kwargs)
    return multi_head_attention_forward(*args, **kwargs)


@dataclass
class MultiHeadProducts:
    """The arguments of the two matrix products of F.multi_head_attention_forward, where it builds the whole matrix."""

    heads: int
    callers: tuple[tuple[Recorder, str], ...]  # each recorder, and its name of the module that makes the call
    queries: Tensor | None = None  # (B H, Tq, D), scaled
    keys: Tensor | None = None  # (B H, Tk, D)
    bias: Tensor | None = None  # (Tq, Tk), or (B H or 1, Tq, Tk)


class RunningProducts(threading.local):
    """The products of the F.multi_head_attention_forward that is running on this thread."""

    products: MultiHeadProducts | None = None


RUNNING = RunningProducts()


def handle_multi_head_attention(
    recorder: Recorder, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """F.multi_head_attention_forward with the matrix: its products are recorded when they are computed."""
    outer = RUNNING.products
    callers = () if outer is None else outer.callers
    heads = MULTI_HEAD_SIGNATURE.bind(*args, **kwargs).arguments["num_heads"]
    RUNNING.products = MultiHeadProducts(heads, (*callers, (recorder, name)))
    try:
        return func(*args, **kwargs)
    finally:
        RUNNING.products = outer


def run_matrix_product(function: Any, args: tuple[Tensor, ...]) -> Tensor:
    """torch.bmm and torch.baddbmm inside F.multi_head_attention_forward: first Q Kᵀ, then W V."""
    products = RUNNING.products
    if products is not None and products.queries is not None:
        return record_multi_head_attention(function(*args), args[1], products)
    if products is not None:
        *bias, products.queries, keys = args
        products.keys, products.bias = keys.mT, bias[0] if bias else None
    product: Tensor = function(*args)
    return product


def record_multi_head_attention(out: Tensor, values: Tensor, products: MultiHeadProducts) -> Tensor:
    """Records the call once its second product, W V of all heads (B H, Tq, D), is computed."""
    split = (-1, products.heads)
    assert products.queries is not None and products.keys is not None
    for recorder, name in products.callers:
        if recorder.count_and_check(name, products.queries, products.keys, values):
            q, k, v = (t.unflatten(0, split) for t in (products.queries, products.keys, values))
            bias = products.bias
            if bias is not None and bias.dim() == 3:
                bias = bias.unflatten(0, split) if bias.shape[0] > 1 else bias.unsqueeze(0)
            with without_interception():
                _, weights = attention(q, k, v, score=Dot(scale=1.0), bias=bias, return_weights=True)
            recorder.record_call(name, weights, v)
        out = zero_heads(out.unflatten(0, split), recorder.heads_to_ablate(name), 1, name).flatten(0, 1)
    return out

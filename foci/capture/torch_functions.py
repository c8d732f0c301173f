"""AttentionMode: a torch function mode that reports every attention call on this thread to a Recorder.

It intercepts F.scaled_dot_product_attention, `foci.attention` and the attention interface of transformers with their
arguments. F.multi_head_attention_forward hides its inner calls: a copy of it runs with the mode on, so that they are
intercepted too.

The model gets the output that it would get without the mode: from the same kernel if that returns the log-sum-exp (then
it is identical), else from one of foci's backends (then it is within rounding). With dropout, and where the model asks
for the whole matrix, the model's own call runs unchanged and the weights are computed in addition.

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from foci.arguments import cast_for_autocast, fold_batch
from foci.call import attention
from foci.capture.generation_steps import CaptureError
from foci.capture.huggingface.attention import attention_forward, translate_call
from foci.capture.recorder import is_recomputation
from foci.masks.kinds import causal
from foci.runtime.tracing import is_autocast_enabled, is_inside_torch_func
from foci.scores import Dot
from foci.weights.dense_attention import attention_with_matrix
from foci.weights.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from foci.capture.recorder import Recorder

# PyTorch aligns a causal mask with the first key, foci with the last.
TORCH_CAUSAL = causal.at(0)

PositionalArguments = tuple[Any, ...]
KeywordArguments = dict[str, Any]


class AttentionMode(TorchFunctionMode):
    """Reports every attention call that the model makes on this thread to its recorder."""

    # A replayed CUDA graph makes no Python calls: `foci.generate` does without CUDA graphs under such a mode.
    sees_every_call = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __exit__(self, *exception: Any) -> None:
        # PyTorch takes the mode off its stack during a call; Ctrl+C at that moment can keep it off.
        if torch.overrides._get_current_function_mode() is self:
            super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: PositionalArguments = (), kwargs: KeywordArguments | None = None
    ) -> Any:
        handler = HANDLERS.get(func)
        if handler is None and func not in BACKWARD_FUNCTIONS:
            # The fast path of nearly all calls: hundreds for each generated token.
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if func in BACKWARD_FUNCTIONS:
            # Activation checkpointing runs modules again in the backward; they must take the same path as before.
            if "gradient" in kwargs:
                kwargs["grad_tensors"] = kwargs.pop("gradient")
            with self:
                return BACKWARD_FUNCTIONS[func](*args, **kwargs)
        if handler is None or not self.recorder.is_open or not self.recorder.module_stack:
            return func(*args, **kwargs)
        if torch.compiler.is_compiling():
            raise CaptureError(
                "foci.watch cannot record a call while it is being compiled: compile the model before the block (inside"
                " it, compiled models run uncompiled), or do not use torch.compile"
            )
        return handler(self, func, args, kwargs)


@contextmanager
def without_recording() -> Iterator[None]:
    """Turns all torch function modes off: for calls made only for the record, which no other block may count."""
    with torch._C.DisableTorchFunction():
        yield


def count_and_check(recorder: Recorder, name: str) -> bool:
    """Counts an attention call of a module; returns whether to record it."""
    if not is_recomputation():
        recorder.count_call(name)
    if not recorder.is_selected(name):
        return False
    if is_inside_torch_func():
        recorder.mark_unseen(name, "it ran inside a torch.func transform, whose tensors cannot be kept")
        return False
    return True


def zero_heads(out: Tensor, heads: list[int] | None, axis: int, name: str) -> Tensor:
    """Zeros the output of some heads; None zeros all of them."""
    if heads is None:
        return torch.zeros_like(out)
    if not heads:
        return out
    if max(heads) >= out.shape[axis]:
        raise CaptureError(f"ablate must name heads below {out.shape[axis]} of {name}, got H{max(heads)}")
    return out.index_fill(axis, torch.tensor(heads, device=out.device), 0.0)


def handle_foci_attention(mode: AttentionMode, func: Any, args: PositionalArguments, kwargs: KeywordArguments) -> Any:
    """`foci.attention`."""
    recorder, name = mode.recorder, mode.recorder.current_module
    returns_weights = kwargs.get("return_weights", False)
    is_recorded, ablated = count_and_check(recorder, name), recorder.heads_to_ablate(name)
    if not is_recorded:
        return zero_heads_of_result(func(*args, **kwargs), returns_weights, ablated, name)
    query, key, value = args
    with_weights = kwargs | {"return_weights": True}
    if kwargs.get("dropout") or recorder.keeps_own_calls:
        result = func(*args, **kwargs)
        with without_recording(), torch.no_grad():
            _, weights = func(*args, **with_weights | {"dropout": 0.0})
    else:
        result = out, weights = func(*args, **with_weights)
        result = result if returns_weights else out
    recorder.record_call(name, weights, fold_batch(query, key, value)[2])
    return zero_heads_of_result(result, returns_weights, ablated, name)


def handle_huggingface_attention(
    mode: AttentionMode, func: Any, args: PositionalArguments, kwargs: KeywordArguments
) -> Any:
    """The attention interface of transformers: its call, translated into a recorded call of `foci.attention`."""

    def record_attention(*inputs: Tensor, **options: Any) -> Any:
        return handle_foci_attention(mode, attention, inputs, options)

    return translate_call(record_attention, *args, **kwargs)


def zero_heads_of_result(result: Any, has_weights: bool, ablated: list[int] | None, name: str) -> Any:
    """Zeros heads in a result of `foci.attention`: an output, or an output with weights."""
    if ablated == []:
        return result
    out = result[0] if has_weights else result
    # (T, D) and (B, T, D) have no head axis: their only head is number 0.
    zeroed = (
        zero_heads(out, ablated, -3, name)
        if out.dim() > 3
        else zero_heads(out.unsqueeze(0), ablated, 0, name).squeeze(0)
    )
    return (zeroed, result[1]) if has_weights else zeroed


def handle_attention_with_matrix(
    mode: AttentionMode, func: Any, args: PositionalArguments, kwargs: KeywordArguments
) -> tuple[Tensor, Tensor]:
    """`attention_with_matrix`: its own call runs unchanged, because the caller asked for the whole matrix."""
    recorder, name = mode.recorder, mode.recorder.current_module
    out, matrix = func(*args, **kwargs)
    if count_and_check(recorder, name):
        with without_recording(), torch.no_grad():
            _, weights = attention(*args, mask=kwargs["mask"], bias=kwargs["bias"], return_weights=True)
        recorder.record_call(name, weights, args[2])
    return zero_heads(out, recorder.heads_to_ablate(name), 1, name), matrix


@dataclass
class SdpaCall:
    """The arguments of F.scaled_dot_product_attention, brought to (B, H, T, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: KeywordArguments
    dropout: float
    lead: tuple[int, ...]

    @classmethod
    def from_arguments(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> SdpaCall:
        if query.is_nested or key.is_nested:
            raise ValueError("query and key must not be nested tensors: pad them")
        if not enable_gqa and query.dim() > 3 and query.shape[-3] != key.shape[-3] != 1:
            raise ValueError(f"key must have {query.shape[-3]} heads without enable_gqa, got {key.shape[-3]}")
        heads = query.shape[-3:-2] if query.dim() > 3 else ()
        batch, *others = (t.shape[: -2 - len(heads)] for t in (query, key, value))
        # broadcast_shapes is slow Python code, and the shapes are nearly always the same.
        leading = (batch if others == [batch, batch] else torch.broadcast_shapes(batch, *others)) + heads
        q, k, v, _ = fold_batch(*(t.unsqueeze(0) if t.dim() == 2 else t for t in (query, key, value)))
        options: KeywordArguments = {"score": Dot(scale=scale)}
        if is_causal:
            options["mask"] = TORCH_CAUSAL
        if attn_mask is not None:
            # As PyTorch does: autocast narrows an additive mask like the other inputs.
            narrowed = attn_mask.is_floating_point() and is_autocast_enabled(query.device.type)
            form = cast_for_autocast(attn_mask, query.device.type) if narrowed else attn_mask
            if query.dim() > 4 and form.dim() > 4:
                form = form.expand(*leading, *form.shape[-2:]).reshape(-1, leading[-1], *form.shape[-2:])
            elif query.dim() == 3 and form.dim() == 3:
                form = form.unsqueeze(1)
            options["mask" if form.dtype == torch.bool else "bias"] = form
        return cls(q, k, v, options, dropout_p, tuple(leading))

    def compute(self) -> tuple[Tensor, Weights]:
        """The output as the caller expects it, and the weights (B, H, Tq, Tk)."""
        out, weights = attention(self.q, self.k, self.v, **self.options, return_weights=True)
        return out.reshape(*self.lead, *out.shape[-2:]), weights


def handle_sdpa(mode: AttentionMode, func: Any, args: PositionalArguments, kwargs: KeywordArguments) -> Tensor:
    """F.scaled_dot_product_attention."""
    recorder, name = mode.recorder, mode.recorder.current_module
    is_recorded, ablated = count_and_check(recorder, name), recorder.heads_to_ablate(name)
    if not is_recorded:
        return zero_heads_of_output(func(*args, **kwargs), ablated, name)
    try:
        call = SdpaCall.from_arguments(*args, **kwargs)
        runs_own_call = bool(call.dropout) or recorder.keeps_own_calls
        out, weights = compute_without_dropout(call) if runs_own_call else call.compute()
    except CaptureError:
        raise
    except (TypeError, ValueError) as error:
        # PyTorch accepts arguments that foci does not; if these are invalid, PyTorch raises its own error here.
        out = func(*args, **kwargs)
        recorder.mark_unseen(name, f"foci does not support its call: {error}")
        return zero_heads_of_output(out, ablated, name)
    if runs_own_call:
        out = func(*args, **kwargs)
    recorder.record_call(name, weights, call.v)
    return zero_heads_of_output(out, ablated, name)


def compute_without_dropout(call: SdpaCall) -> tuple[Tensor, Weights]:
    """The weights before dropout; the model's own call computes the output."""
    with without_recording(), torch.no_grad():
        return call.compute()


def zero_heads_of_output(out: Tensor, ablated: list[int] | None, name: str) -> Tensor:
    zeroed: Tensor = zero_heads_of_result(out, False, ablated, name)
    return zeroed


def copy_without_override_check(function: Any) -> Any:
    """A copy of a function of PyTorch that does not check for torch function modes.

    The original would hand its call to the active mode again; the copy runs, and its inner calls reach the mode.
    """
    names = function.__globals__ | {"has_torch_function": lambda _: False}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


multi_head_attention_forward = copy_without_override_check(F.multi_head_attention_forward)
BACKWARD_FUNCTIONS = {
    torch.Tensor.backward: copy_without_override_check(torch.autograd.backward),
    torch.autograd.backward: copy_without_override_check(torch.autograd.backward),
    torch.autograd.grad: copy_without_override_check(torch.autograd.grad),
}
MULTI_HEAD_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


@dataclass
class MultiHeadProducts:
    """The arguments of the two matrix products of F.multi_head_attention_forward, where it builds the whole matrix."""

    heads: int
    queries: Tensor | None = None  # (B H, Tq, D), scaled
    keys: Tensor | None = None  # (B H, Tk, D)
    bias: Tensor | None = None  # (Tq, Tk), or (B H or 1, Tq, Tk)


_running = threading.local()


def handle_multi_head_attention(
    mode: AttentionMode, func: Any, args: PositionalArguments, kwargs: KeywordArguments
) -> Any:
    """F.multi_head_attention_forward: runs a copy with the mode on, so that its inner calls are intercepted."""
    bound = MULTI_HEAD_SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    outer = getattr(_running, "products", None)
    _running.products = MultiHeadProducts(bound.arguments["num_heads"]) if bound.arguments["need_weights"] else None
    try:
        with mode:
            return multi_head_attention_forward(*args, **kwargs)
    finally:
        _running.products = outer


def handle_matrix_product(
    mode: AttentionMode, func: Any, args: PositionalArguments, kwargs: KeywordArguments
) -> Tensor:
    """torch.bmm and torch.baddbmm inside F.multi_head_attention_forward: first Q Kᵀ, then W V."""
    products: MultiHeadProducts | None = getattr(_running, "products", None)
    if products is None:
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    if products.queries is None or products.queries is args[-2]:
        *bias, products.queries, keys = args
        products.keys, products.bias = keys.mT, bias[0] if bias else None
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    return record_multi_head_attention(mode, func(*args, **kwargs), args[1], products)


def record_multi_head_attention(
    mode: AttentionMode, out: Tensor, values: Tensor, products: MultiHeadProducts
) -> Tensor:
    """Records the call once its second product, W V of all heads (B H, Tq, D), is computed."""
    recorder, name = mode.recorder, mode.recorder.current_module
    split = (-1, products.heads)
    assert products.queries is not None and products.keys is not None
    if count_and_check(recorder, name):
        q, k, v = (t.unflatten(0, split) for t in (products.queries, products.keys, values))
        bias = products.bias
        if bias is not None and bias.dim() == 3:
            bias = bias.unflatten(0, split) if bias.shape[0] > 1 else bias.unsqueeze(0)
        with without_recording():
            _, weights = attention(q, k, v, score=Dot(scale=1.0), bias=bias, return_weights=True)
        recorder.record_call(name, weights, v)
    return zero_heads(out.unflatten(0, split), recorder.heads_to_ablate(name), 1, name).flatten(0, 1)


def handle_softmax(mode: AttentionMode, func: Any, args: PositionalArguments, kwargs: KeywordArguments) -> Tensor:
    """Notes that a module computes its own softmax over what may be a score matrix: its attention is not seen."""
    if getattr(_running, "products", None) is None and args and isinstance(args[0], Tensor) and args[0].dim() > 2:
        mode.recorder.softmax_modules.add(mode.recorder.current_module)
    return func(*args, **kwargs)  # type: ignore[no-any-return]


HANDLERS: dict[Any, Callable[[AttentionMode, Any, PositionalArguments, KeywordArguments], Any]] = {
    F.scaled_dot_product_attention: handle_sdpa,
    F.multi_head_attention_forward: handle_multi_head_attention,
    attention: handle_foci_attention,
    attention_forward: handle_huggingface_attention,
    attention_with_matrix: handle_attention_with_matrix,
    torch.bmm: handle_matrix_product,
    torch.baddbmm: handle_matrix_product,
    F.softmax: handle_softmax,
    torch.softmax: handle_softmax,
    torch.Tensor.softmax: handle_softmax,
}

"""How PyTorch's attention is seen: a torch function mode, which every call of PyTorch on this thread passes.

F.scaled_dot_product_attention, `foci.attention` and transformers' interface come here as they were called.
F.multi_head_attention_forward hides what it does inside: a copy of it runs with the mode switched on, so that its own
calls come here too.

What the model gets back is what it would have got: from the same kernel where that gives the log-sum-exp (then it is
identical), from one of foci's backends otherwise (then it is within rounding). With dropout, and where the model asks
for its whole matrix, the model's own call runs unchanged and the weights are computed beside it.

B batch, H heads, G key heads, Tq queries, Tk keys, D width.
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
from foci.capture.generation import CaptureError
from foci.capture.huggingface.attention import attention_forward, translate_call
from foci.capture.recorder import is_recomputation
from foci.masks.kinds import causal
from foci.runtime.checks import is_autocast_enabled
from foci.scores import Dot
from foci.weights.dense_attention import attention_with_matrix
from foci.weights.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from foci.capture.recorder import Recorder

# PyTorch counts from the first key, foci from the last.
TORCH_CAUSAL = causal.at(0)

PositionalArguments = tuple[Any, ...]
KeywordArguments = dict[str, Any]


class AttentionMode(TorchFunctionMode):
    """Tells a recorder of every attention call that its model makes on this thread."""

    # A captured CUDA graph makes its calls once and for all: `foci.generate` goes without one where this is on.
    sees_every_call = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: PositionalArguments = (), kwargs: KeywordArguments | None = None
    ) -> Any:
        handler = HANDLERS.get(func)
        if handler is None and func not in BACKWARD_FUNCTIONS:
            # Nearly every call: hundreds for each token that a model writes.
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if func in BACKWARD_FUNCTIONS:
            # Activation checkpointing runs modules again in there, and they must take the way of the first time.
            if "gradient" in kwargs:
                kwargs["grad_tensors"] = kwargs.pop("gradient")
            with self:
                return BACKWARD_FUNCTIONS[func](*args, **kwargs)
        if handler is None or not self.recorder.module_stack:
            return func(*args, **kwargs)
        if torch.compiler.is_compiling():
            raise CaptureError(
                "foci.watch sees calls as they are made, but this one is being compiled: compile the model before the"
                " block (inside it, compiled models run uncompiled), or leave torch.compile out"
            )
        return handler(self, func, args, kwargs)


@contextmanager
def without_recording() -> Iterator[None]:
    """What runs here is computed for the record alone: no other block counts it."""
    with torch._C.DisableTorchFunction():
        yield


def count_and_check(recorder: Recorder, name: str) -> bool:
    """Whether a call that a module makes is to be recorded; counts it."""
    if not is_recomputation():
        recorder.count_call(name)
    if not recorder.is_selected(name):
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        recorder.mark_unseen(name, "it ran inside a transform of torch.func, whose tensors end with it")
        return False
    return True


def zero_heads(out: Tensor, heads: list[int] | None, axis: int, name: str) -> Tensor:
    """The output with some heads zeroed; None: all of them."""
    if heads is None:
        return torch.zeros_like(out)
    if not heads:
        return out
    if max(heads) >= out.shape[axis]:
        raise CaptureError(f"silence names H{max(heads)} of {name}, which has {out.shape[axis]} heads")
    return out.index_fill(axis, torch.tensor(heads, device=out.device), 0.0)


def handle_foci_attention(mode: AttentionMode, func: Any, args: PositionalArguments, kwargs: KeywordArguments) -> Any:
    """`foci.attention`."""
    recorder, name = mode.recorder, mode.recorder.current_module
    asked = kwargs.get("return_weights", False)
    wanted, silent = count_and_check(recorder, name), recorder.heads_to_ablate(name)
    if not wanted:
        return zero_heads_of_result(func(*args, **kwargs), asked, silent, name)
    query, key, value = args
    weighing = kwargs | {"return_weights": True}
    if kwargs.get("dropout"):
        given = func(*args, **kwargs)
        with without_recording(), torch.no_grad():
            _, weights = func(*args, **weighing | {"dropout": 0.0})
    else:
        given = out, weights = func(*args, **weighing)
        given = given if asked else out
    recorder.record_call(name, weights, fold_batch(query, key, value)[2])
    return zero_heads_of_result(given, asked, silent, name)


def handle_huggingface_attention(
    mode: AttentionMode, func: Any, args: PositionalArguments, kwargs: KeywordArguments
) -> Any:
    """transformers' attention interface: `foci.attention`, and what has to be done before and after."""

    def told(*inputs: Tensor, **options: Any) -> Any:
        return handle_foci_attention(mode, attention, inputs, options)

    return translate_call(told, *args, **kwargs)


def zero_heads_of_result(given: Any, asked: bool, silent: list[int] | None, name: str) -> Any:
    """What `foci.attention` gave, with heads zeroed."""
    if silent == []:
        return given
    out = given[0] if asked else given
    # (T, D) and (B, T, D) have no heads: the one that there is, is number 0.
    found = (
        zero_heads(out, silent, -3, name) if out.dim() > 3 else zero_heads(out.unsqueeze(0), silent, 0, name).squeeze(0)
    )
    return (found, given[1]) if asked else found


def handle_attention_and_matrix(
    mode: AttentionMode, func: Any, args: PositionalArguments, kwargs: KeywordArguments
) -> tuple[Tensor, Tensor]:
    """`attention_and_matrix`: its caller asked for the whole matrix, and gets what it would have got."""
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
    def of(
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
            raise ValueError("its tensors are nested: pad them")
        if not enable_gqa and query.dim() > 3 and query.shape[-3] != key.shape[-3] != 1:
            raise ValueError(f"{query.shape[-3]} and {key.shape[-3]} heads without enable_gqa")
        heads = query.shape[-3:-2] if query.dim() > 3 else ()
        batch, *others = (t.shape[: -2 - len(heads)] for t in (query, key, value))
        # In Python, and slow: nearly always they are the same.
        leading = (batch if others == [batch, batch] else torch.broadcast_shapes(batch, *others)) + heads
        q, k, v, _ = fold_batch(*(t.unsqueeze(0) if t.dim() == 2 else t for t in (query, key, value)))
        options: KeywordArguments = {"score": Dot(scale=scale)}
        if is_causal:
            options["mask"] = TORCH_CAUSAL
        if attn_mask is not None:
            # As PyTorch does it: a mask that is added is narrowed like the others.
            narrowed = attn_mask.is_floating_point() and is_autocast_enabled(query.device.type)
            form = cast_for_autocast(attn_mask, query.device.type) if narrowed else attn_mask
            if query.dim() > 4 and form.dim() > 4:
                form = form.expand(*leading, *form.shape[-2:]).reshape(-1, leading[-1], *form.shape[-2:])
            elif query.dim() == 3 and form.dim() == 3:
                form = form.unsqueeze(1)
            options["mask" if form.dtype == torch.bool else "bias"] = form
        return cls(q, k, v, options, dropout_p, tuple(leading))

    def weighed(self) -> tuple[Tensor, Weights]:
        """The output as the caller expects it, and the weights (B, H, Tq, Tk)."""
        out, weights = attention(self.q, self.k, self.v, **self.options, return_weights=True)
        return out.reshape(*self.lead, *out.shape[-2:]), weights


def handle_sdpa(mode: AttentionMode, func: Any, args: PositionalArguments, kwargs: KeywordArguments) -> Tensor:
    """F.scaled_dot_product_attention."""
    recorder, name = mode.recorder, mode.recorder.current_module
    wanted, silent = count_and_check(recorder, name), recorder.heads_to_ablate(name)
    if not wanted:
        return zero_heads_of_output(func(*args, **kwargs), silent, name)
    try:
        fused = SdpaCall.of(*args, **kwargs)
        out, weights = compute_without_dropout(fused) if fused.dropout else fused.weighed()
    except CaptureError:
        raise
    except (TypeError, ValueError) as error:
        # PyTorch takes what foci does not, or says itself what is wrong: either way it is not foci that decides.
        out = func(*args, **kwargs)
        recorder.mark_unseen(name, f"foci refuses its call: {error}")
        return zero_heads_of_output(out, silent, name)
    if fused.dropout:
        out = func(*args, **kwargs)
    recorder.record_call(name, weights, fused.v)
    return zero_heads_of_output(out, silent, name)


def compute_without_dropout(fused: SdpaCall) -> tuple[Tensor, Weights]:
    """The weights alone: the model's own call gives the output."""
    with without_recording(), torch.no_grad():
        return fused.weighed()


def zero_heads_of_output(out: Tensor, silent: list[int] | None, name: str) -> Tensor:
    found: Tensor = zero_heads_of_result(out, False, silent, name)
    return found


def copy_without_override_check(function: Any) -> Any:
    """The function with one name changed: a mode that is on makes it hand itself over again, and here it must run."""
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
    """What the two products of F.multi_head_attention_forward were given, where it builds the whole matrix."""

    heads: int
    queries: Tensor | None = None  # (B H, Tq, D), scaled
    keys: Tensor | None = None  # (B H, Tk, D)
    bias: Tensor | None = None  # (Tq, Tk), or (B H or 1, Tq, Tk)


_running = threading.local()


def handle_multi_head_attention(
    mode: AttentionMode, func: Any, args: PositionalArguments, kwargs: KeywordArguments
) -> Any:
    """F.multi_head_attention_forward: run with the mode on, so that what it calls inside is seen."""
    given = MULTI_HEAD_SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    before = getattr(_running, "products", None)
    _running.products = MultiHeadProducts(given.arguments["num_heads"]) if given.arguments["need_weights"] else None
    try:
        with mode:
            return multi_head_attention_forward(*args, **kwargs)
    finally:
        _running.products = before


def handle_matrix_product(
    mode: AttentionMode, func: Any, args: PositionalArguments, kwargs: KeywordArguments
) -> Tensor:
    """torch.bmm and torch.baddbmm inside of F.multi_head_attention_forward: first Q Kᵀ, then W V."""
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
    """W V of all heads, (B H, Tq, D): everything is known now."""
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
    """A softmax of a module's own over something like a matrix of scores: no call shows its queries and keys."""
    if getattr(_running, "products", None) is None and args and isinstance(args[0], Tensor) and args[0].dim() > 2:
        mode.recorder.softmax_modules.add(mode.recorder.current_module)
    return func(*args, **kwargs)  # type: ignore[no-any-return]


HANDLERS: dict[Any, Callable[[AttentionMode, Any, PositionalArguments, KeywordArguments], Any]] = {
    F.scaled_dot_product_attention: handle_sdpa,
    F.multi_head_attention_forward: handle_multi_head_attention,
    attention: handle_foci_attention,
    attention_forward: handle_huggingface_attention,
    attention_with_matrix: handle_attention_and_matrix,
    torch.bmm: handle_matrix_product,
    torch.baddbmm: handle_matrix_product,
    F.softmax: handle_softmax,
    torch.softmax: handle_softmax,
    torch.Tensor.softmax: handle_softmax,
}

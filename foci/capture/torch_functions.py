"""Records the attention calls that a Recorder intercepts.

`foci.runtime.interception` hands over F.scaled_dot_product_attention and `foci.attention` with their arguments.
F.multi_head_attention_forward hides its matrix products: a copy of it runs in its place, which reports them.

The model gets the output that it would get without recording: from the same kernel if that returns the log-sum-exp
(then it is identical), else from one of foci's backends (then it is within rounding). With dropout, and where the model
asks for the whole matrix, the model's own call runs unchanged and the weights are computed in addition.

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.arguments import cast_for_autocast, fold_batch, prepare_call
from foci.backends import cpu_c, sdpa
from foci.call import DEFAULT_SCORE, attention
from foci.capture.generation_steps import CaptureError
from foci.masks.kinds import causal
from foci.runtime.interception import intercept, is_intercepting, run_original, without_interception
from foci.runtime.tracing import is_autocast_enabled, is_inside_torch_func, is_recomputation
from foci.scores import Dot
from foci.weights.dense_attention import attention_with_matrix
from foci.weights.weights import Weights

if TYPE_CHECKING:
    from foci.capture.recorder import Recorder

# PyTorch aligns a causal mask with the first key, foci with the last.
TORCH_CAUSAL = causal.at(0)

# The code of a module's call: on the Python stack it shows which modules are running.
MODULE_CALL = nn.Module._call_impl.__code__

PositionalArguments = tuple[Any, ...]
KeywordArguments = dict[str, Any]


def record_intercepted_call(
    recorder: Recorder, function: Any, args: PositionalArguments, kwargs: KeywordArguments
) -> Any:
    """Runs an attention call that was intercepted, and records it if a module of the watched model makes it."""
    name = recorder.find_running_module()
    if name is not None and function in PLAIN_CALLS and not is_seen_by_others():
        plain = PLAIN_CALLS[function](*args, **kwargs)
        if plain is not None:
            out = recorder.run_plain_call(name, *plain, function is F.scaled_dot_product_attention)
            if out is not None:
                recorder.foci_calls += function is attention
                return out
            if function is not attention and recorder.repeat_call(name, plain[0], plain[1], plain[3]):
                return run_original(function, args, kwargs)
    return function(*args, **kwargs) if name is None else HANDLERS[function](recorder, name, function, args, kwargs)


def is_seen_by_others() -> bool:
    """Whether another block or a torch function mode gets the intercepted call, too."""
    return is_intercepting() or torch._C._len_torch_function_stack() > 0


def count_and_check(recorder: Recorder, name: str, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Counts an attention call of a module; returns whether to record it."""
    recorder.fit_layer_name(name, q, k, v)
    if not is_recomputation():
        recorder.count_call(name)
    if not recorder.is_selected(name) or not recorder.keeps_part_of(name, q.shape[-2], k.shape[-2]):
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


def handle_foci_attention(
    recorder: Recorder, name: str, func: Any, args: PositionalArguments, kwargs: KeywordArguments
) -> Any:
    """`foci.attention`."""
    returns_weights = kwargs.get("return_weights", False)
    is_recorded, ablated = count_and_check(recorder, name, *args), recorder.heads_to_ablate(name)
    if not is_recorded:
        return zero_heads_of_result(func(*args, **kwargs), returns_weights, ablated, name)
    query, key, value = args
    with_weights = kwargs | {"return_weights": True}
    if kwargs.get("dropout") or recorder.keeps_own_calls:
        result = func(*args, **kwargs)
        with without_interception(), torch.no_grad():
            _, weights = func(*args, **with_weights | {"dropout": 0.0})
    else:
        result = out, weights = func(*args, **with_weights)
        result = result if returns_weights else out
    recorder.foci_calls += 1
    recorder.record_call(name, weights, fold_batch(query, key, value)[2])
    return zero_heads_of_result(result, returns_weights, ablated, name)


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
    recorder: Recorder, name: str, func: Any, args: PositionalArguments, kwargs: KeywordArguments
) -> tuple[Tensor, Tensor]:
    """`attention_with_matrix`: its own call runs unchanged, because the caller asked for the whole matrix."""
    out, matrix = func(*args, **kwargs)
    if count_and_check(recorder, name, *args):
        with without_interception(), torch.no_grad():
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
            raise ValueError("query and key must be plain tensors, got nested ones: pad them")
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
        backend = choose_identical_backend(self.q, self.k, self.v, **self.options)
        out, weights = attention(self.q, self.k, self.v, **self.options, backend=backend, return_weights=True)
        return out.reshape(*self.lead, *out.shape[-2:]), weights


def choose_identical_backend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str | None:
    """The backend whose output equals that of PyTorch's own call bit by bit; None where that is the default or none.

    On a CPU large calls of foci run in another kernel than those of PyTorch.
    """
    if not q.is_cpu or not cpu_c.is_large(q, k):
        return None
    mask, bias, score = (options.get(name) for name in ("mask", "bias", "score"))
    call = prepare_call(q, k, v, score or DEFAULT_SCORE, mask, bias, None, None, 0.0, True)
    return None if sdpa.refuses(call) else sdpa.NAME


def handle_sdpa(
    recorder: Recorder, name: str, func: Any, args: PositionalArguments, kwargs: KeywordArguments
) -> Tensor:
    """F.scaled_dot_product_attention."""
    tensors = (*args, *(kwargs.get(each) for each in ("query", "key", "value")[len(args) :]))[:3]
    if not all(isinstance(each, Tensor) for each in tensors):
        # PyTorch raises its own error.
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    is_recorded, ablated = count_and_check(recorder, name, *tensors), recorder.heads_to_ablate(name)
    if not is_recorded:
        return zero_heads_of_output(func(*args, **kwargs), ablated, name)
    try:
        refuse_decomposed_call(args)
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


def refuse_decomposed_call(args: PositionalArguments) -> None:
    """Raises if a tensor subclass makes the call for another one: nested tensors attend with parts of their memory."""
    subclass = find_decomposing_class(args[0])
    if subclass is not None:
        raise ValueError(f"query and key must be plain tensors, got {subclass.__name__}: pad them")


def find_decomposing_class(query: Tensor) -> type | None:
    """The tensor subclass that makes the call for another one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not MODULE_CALL:
        if frame.f_code.co_name == "__torch_function__":
            subclass = frame.f_locals.get("cls")
            if isinstance(subclass, type) and issubclass(subclass, Tensor) and not isinstance(query, subclass):
                return subclass
        frame = frame.f_back
    return None


def compute_without_dropout(call: SdpaCall) -> tuple[Tensor, Weights]:
    """The weights before dropout; the model's own call computes the output."""
    with without_interception(), torch.no_grad():
        return call.compute()


def zero_heads_of_output(out: Tensor, ablated: list[int] | None, name: str) -> Tensor:
    zeroed: Tensor = zero_heads_of_result(out, False, ablated, name)
    return zeroed


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
                names = {"has_torch_function": must_hand_over, "handle_torch_function": hand_over}
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


def must_hand_over(tensors: tuple[Any, ...]) -> bool:
    """Replaces `has_torch_function`, which only F.multi_head_attention_forward calls."""
    return has_torch_function(tensors) or is_intercepting() or RUNNING.products is not None


def hand_over(function: Any, tensors: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
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
    recorder: Recorder, name: str, func: Any, args: PositionalArguments, kwargs: KeywordArguments
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
        if count_and_check(recorder, name, products.queries, products.keys, values):
            q, k, v = (t.unflatten(0, split) for t in (products.queries, products.keys, values))
            bias = products.bias
            if bias is not None and bias.dim() == 3:
                bias = bias.unflatten(0, split) if bias.shape[0] > 1 else bias.unsqueeze(0)
            with without_interception():
                _, weights = attention(q, k, v, score=Dot(scale=1.0), bias=bias, return_weights=True)
            recorder.record_call(name, weights, v)
        out = zero_heads(out.unflatten(0, split), recorder.heads_to_ablate(name), 1, name).flatten(0, 1)
    return out


def handle_softmax(
    recorder: Recorder, name: str, func: Any, args: PositionalArguments, kwargs: KeywordArguments
) -> Any:
    """Notes that a module computes its own softmax over what may be a score matrix: its attention is not seen."""
    if args[0].dim() > 2:
        recorder.softmax_modules.add(name)
    return func(*args, **kwargs)


def read_plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score: Any,
    mask: Any,
    dropout: float,
    return_weights: bool,
    **others: Any,
) -> PlainArguments | None:
    """The arguments of `foci.attention` if they are the most common ones."""
    if return_weights or dropout or score is not DEFAULT_SCORE or any(each is not None for each in others.values()):
        return None
    return query, key, value, mask


def read_plain_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> PlainArguments | None:
    """The arguments of F.scaled_dot_product_attention if they are the most common ones."""
    if attn_mask is not None or dropout_p or (scale is not None and scale != query.shape[-1] ** -0.5):
        return None
    if find_decomposing_class(query) is not None:
        return None
    return query, key, value, causal if is_causal else None


PlainArguments = tuple[Tensor, Tensor, Tensor, Any]
PLAIN_CALLS: dict[Any, Callable[..., PlainArguments | None]] = {
    F.scaled_dot_product_attention: read_plain_sdpa,
    attention: read_plain_attention,
}
HANDLERS: dict[Any, Callable[[Recorder, str, Any, PositionalArguments, KeywordArguments], Any]] = {
    F.scaled_dot_product_attention: handle_sdpa,
    F.multi_head_attention_forward: handle_multi_head_attention,
    attention: handle_foci_attention,
    attention_with_matrix: handle_attention_with_matrix,
    torch.softmax: handle_softmax,
}

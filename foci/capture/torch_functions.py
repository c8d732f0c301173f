"""Records the attention calls that a Recorder intercepts.

`foci.runtime.interception` hands over F.scaled_dot_product_attention and `foci.attention` with their arguments;
`multi_head_attention` records F.multi_head_attention_forward.

The model gets the output that it would get without recording: from the same kernel if that returns the log-sum-exp
(then it is identical), else from one of foci's backends (then it is within rounding). With dropout, and where the model
asks for the whole matrix, the model's own call runs unchanged and the weights are computed in addition.

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.arguments import cast_for_autocast, fold_batch, prepare_call
from foci.backends import cpu_c, sdpa
from foci.call import DEFAULT_SCORE, attention
from foci.capture.errors import CaptureError
from foci.capture.head_ablation import zero_heads, zero_heads_of_output, zero_heads_of_result
from foci.capture.module_tracker import MODULE_CALL
from foci.capture.multi_head_attention import handle_multi_head_attention
from foci.masks.kinds import causal
from foci.runtime.interception import is_intercepting, run_original, without_interception
from foci.runtime.tracing import is_autocast_enabled
from foci.scores import Dot
from foci.weights.dense_attention import attention_with_matrix
from foci.weights.weights import Weights

if TYPE_CHECKING:
    from foci.capture.recorder import Recorder

# PyTorch aligns a causal mask with the first key, foci with the last.
TORCH_CAUSAL = causal.at(0)

PositionalArguments = tuple[Any, ...]
KeywordArguments = dict[str, Any]


def record_intercepted_call(
    recorder: Recorder, function: Any, args: PositionalArguments, kwargs: KeywordArguments
) -> Any:
    """Runs an attention call that was intercepted, and records it if a module of the watched model makes it."""
    if recorder.text_weights is not None and is_repeated(recorder, function, args, kwargs):
        return run_original(function, args, kwargs)
    name = recorder.find_running_module()
    if name is not None and function in PLAIN_CALLS and not is_seen_by_others():
        plain = PLAIN_CALLS[function](*args, **kwargs)
        if plain is not None:
            out = recorder.run_plain_call(name, *plain, function is F.scaled_dot_product_attention)
            if out is not None:
                recorder.foci_calls += function is attention
                return out
    if name is None:
        return function(*args, **kwargs)
    return CALL_HANDLERS[function](recorder, name, function, args, kwargs)


def is_seen_by_others() -> bool:
    """Whether another block or a torch function mode gets the intercepted call, too."""
    return is_intercepting() or torch._C._len_torch_function_stack() > 0


def handle_foci_attention(
    recorder: Recorder, name: str, func: Any, args: PositionalArguments, kwargs: KeywordArguments
) -> Any:
    """`foci.attention`."""
    if not all(isinstance(each, Tensor) for each in args):
        # It raises its own error.
        return func(*args, **kwargs)
    returns_weights = kwargs.get("return_weights", False)
    is_recorded, ablated = recorder.count_and_check(name, *args), recorder.heads_to_ablate(name)
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


def handle_attention_with_matrix(
    recorder: Recorder, name: str, func: Any, args: PositionalArguments, kwargs: KeywordArguments
) -> tuple[Tensor, Tensor]:
    """`attention_with_matrix`: its own call runs unchanged, because the caller asked for the whole matrix."""
    out, matrix = func(*args, **kwargs)
    if recorder.count_and_check(name, *args):
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
        if min(query.dim(), key.dim(), value.dim()) < (2 if query.dim() < 4 else 3):
            dims = f"{query.dim()}, {key.dim()} and {value.dim()}"
            raise ValueError(f"query, key and value must have 2 or more dimensions, and heads if query has, got {dims}")
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
    is_recorded, ablated = recorder.count_and_check(name, *tensors), recorder.heads_to_ablate(name)
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


def handle_softmax(
    recorder: Recorder, name: str, func: Any, args: PositionalArguments, kwargs: KeywordArguments
) -> Any:
    """Notes that a module computes its own softmax over what may be a score matrix: its attention is not seen."""
    if args[0].dim() > 2:
        recorder.softmax_modules.add(name)
    return func(*args, **kwargs)


def read_plain_attention(
    query: Any,
    key: Any,
    value: Any,
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
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
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
    width = query.shape[-1] if query.dim() else 0
    if attn_mask is not None or dropout_p or (scale is not None and (not width or scale != width**-0.5)):
        return None
    if find_decomposing_class(query) is not None:
        return None
    return query, key, value, causal if is_causal else None


def is_repeated(recorder: Recorder, function: Any, args: PositionalArguments, kwargs: KeywordArguments) -> bool:
    """Whether a call is a plain one without a mask that the recorder repeats: then it is recorded."""
    if function is not F.scaled_dot_product_attention or len(args) < 3 or is_seen_by_others():
        return False
    # PyTorch leaves out arguments that have their default.
    if kwargs or len(args) > 3:
        plain = read_plain_sdpa(*args, **kwargs)
        if plain is None or plain[3] is not None:
            return False
    return recorder.repeat_call(args[0], args[1])


PlainArguments = tuple[Tensor, Tensor, Tensor, Any]
PLAIN_CALLS: dict[Any, Callable[..., PlainArguments | None]] = {
    F.scaled_dot_product_attention: read_plain_sdpa,
    attention: read_plain_attention,
}
CALL_HANDLERS: dict[Any, Callable[[Recorder, str, Any, PositionalArguments, KeywordArguments], Any]] = {
    F.scaled_dot_product_attention: handle_sdpa,
    F.multi_head_attention_forward: handle_multi_head_attention,
    attention: handle_foci_attention,
    attention_with_matrix: handle_attention_with_matrix,
    torch.softmax: handle_softmax,
}

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

from foci.arguments import autocast, folded
from foci.call import attention
from foci.capture.generation import RefusedError
from foci.capture.huggingface.attention import attend, attended
from foci.capture.recorder import is_repeated
from foci.masks.kinds import causal
from foci.runtime.checks import autocasts
from foci.scores import Dot
from foci.weights.dense_attention import attention_and_matrix
from foci.weights.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from foci.capture.recorder import Recorder

# PyTorch counts from the first key, foci from the last.
FROM_THE_FIRST = causal.at(0)

Arguments = tuple[Any, ...]
Options = dict[str, Any]


class Seeing(TorchFunctionMode):
    """Tells a recorder of every attention call that its model makes on this thread."""

    # A captured CUDA graph makes its calls once and for all: `foci.generate` goes without one where this is on.
    sees_every_call = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Arguments = (), kwargs: Options | None = None) -> Any:
        handler = HANDLERS.get(func)
        if handler is None and func not in BACKWARD:
            # Nearly every call: hundreds for each token that a model writes.
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if func in BACKWARD:
            # Activation checkpointing runs modules again in there, and they must take the way of the first time.
            if "gradient" in kwargs:
                kwargs["grad_tensors"] = kwargs.pop("gradient")
            with self:
                return BACKWARD[func](*args, **kwargs)
        if handler is None or not self.recorder.stack:
            return func(*args, **kwargs)
        if torch.compiler.is_compiling():
            raise RefusedError(
                "foci.watch sees calls as they are made, but this one is being compiled: compile the model before the"
                " block (inside it, compiled models run uncompiled), or leave torch.compile out"
            )
        return handler(self, func, args, kwargs)


@contextmanager
def unseen() -> Iterator[None]:
    """What runs here is computed for the record alone: no other block counts it."""
    with torch._C.DisableTorchFunction():
        yield


def recorded(recorder: Recorder, name: str) -> bool:
    """Whether a call that a module makes is to be recorded; counts it."""
    if not is_repeated():
        recorder.met(name)
    if not recorder.wants(name):
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        recorder.cannot(name, "it ran inside a transform of torch.func, whose tensors end with it")
        return False
    return True


def quiet(out: Tensor, heads: list[int] | None, axis: int, name: str) -> Tensor:
    """The output with some heads zeroed; None: all of them."""
    if heads is None:
        return torch.zeros_like(out)
    if not heads:
        return out
    if max(heads) >= out.shape[axis]:
        raise RefusedError(f"silence names H{max(heads)} of {name}, which has {out.shape[axis]} heads")
    return out.index_fill(axis, torch.tensor(heads, device=out.device), 0.0)


def seen_own(mode: Seeing, func: Any, args: Arguments, kwargs: Options) -> Any:
    """`foci.attention`."""
    recorder, name = mode.recorder, mode.recorder.here
    asked = kwargs.get("return_weights", False)
    wanted, silent = recorded(recorder, name), recorder.silent(name)
    if not wanted:
        return own_quiet(func(*args, **kwargs), asked, silent, name)
    query, key, value = args
    weighing = kwargs | {"return_weights": True}
    if kwargs.get("dropout"):
        given = func(*args, **kwargs)
        with unseen(), torch.no_grad():
            _, weights = func(*args, **weighing | {"dropout": 0.0})
    else:
        given = out, weights = func(*args, **weighing)
        given = given if asked else out
    recorder.saw(name, weights, folded(query, key, value)[2])
    return own_quiet(given, asked, silent, name)


def seen_interface(mode: Seeing, func: Any, args: Arguments, kwargs: Options) -> Any:
    """transformers' attention interface: `foci.attention`, and what has to be done before and after."""

    def told(*inputs: Tensor, **options: Any) -> Any:
        return seen_own(mode, attention, inputs, options)

    return attended(told, *args, **kwargs)


def own_quiet(given: Any, asked: bool, silent: list[int] | None, name: str) -> Any:
    """What `foci.attention` gave, with heads zeroed."""
    if silent == []:
        return given
    out = given[0] if asked else given
    # (T, D) and (B, T, D) have no heads: the one that there is, is number 0.
    found = quiet(out, silent, -3, name) if out.dim() > 3 else quiet(out.unsqueeze(0), silent, 0, name).squeeze(0)
    return (found, given[1]) if asked else found


def seen_with_matrix(mode: Seeing, func: Any, args: Arguments, kwargs: Options) -> tuple[Tensor, Tensor]:
    """`attention_and_matrix`: its caller asked for the whole matrix, and gets what it would have got."""
    recorder, name = mode.recorder, mode.recorder.here
    out, matrix = func(*args, **kwargs)
    if recorded(recorder, name):
        with unseen(), torch.no_grad():
            _, weights = attention(*args, mask=kwargs["mask"], bias=kwargs["bias"], return_weights=True)
        recorder.saw(name, weights, args[2])
    return quiet(out, recorder.silent(name), 1, name), matrix


@dataclass
class Fused:
    """The arguments of F.scaled_dot_product_attention, brought to (B, H, T, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: Options
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
    ) -> Fused:
        if query.is_nested or key.is_nested:
            raise ValueError("its tensors are nested: pad them")
        if not enable_gqa and query.dim() > 3 and query.shape[-3] != key.shape[-3] != 1:
            raise ValueError(f"{query.shape[-3]} and {key.shape[-3]} heads without enable_gqa")
        heads = query.shape[-3:-2] if query.dim() > 3 else ()
        batch, *others = (t.shape[: -2 - len(heads)] for t in (query, key, value))
        # In Python, and slow: nearly always they are the same.
        leading = (batch if others == [batch, batch] else torch.broadcast_shapes(batch, *others)) + heads
        q, k, v, _ = folded(*(t.unsqueeze(0) if t.dim() == 2 else t for t in (query, key, value)))
        options: Options = {"score": Dot(scale=scale)}
        if is_causal:
            options["mask"] = FROM_THE_FIRST
        if attn_mask is not None:
            # As PyTorch does it: a mask that is added is narrowed like the others.
            narrowed = attn_mask.is_floating_point() and autocasts(query.device.type)
            form = autocast(attn_mask, query.device.type) if narrowed else attn_mask
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


def seen_fused(mode: Seeing, func: Any, args: Arguments, kwargs: Options) -> Tensor:
    """F.scaled_dot_product_attention."""
    recorder, name = mode.recorder, mode.recorder.here
    wanted, silent = recorded(recorder, name), recorder.silent(name)
    if not wanted:
        return fused_quiet(func(*args, **kwargs), silent, name)
    try:
        fused = Fused.of(*args, **kwargs)
        out, weights = beside(fused) if fused.dropout else fused.weighed()
    except RefusedError:
        raise
    except (TypeError, ValueError) as error:
        # PyTorch takes what foci does not, or says itself what is wrong: either way it is not foci that decides.
        out = func(*args, **kwargs)
        recorder.cannot(name, f"foci refuses its call: {error}")
        return fused_quiet(out, silent, name)
    if fused.dropout:
        out = func(*args, **kwargs)
    recorder.saw(name, weights, fused.v)
    return fused_quiet(out, silent, name)


def beside(fused: Fused) -> tuple[Tensor, Weights]:
    """The weights alone: the model's own call gives the output."""
    with unseen(), torch.no_grad():
        return fused.weighed()


def fused_quiet(out: Tensor, silent: list[int] | None, name: str) -> Tensor:
    found: Tensor = own_quiet(out, False, silent, name)
    return found


def unguarded(function: Any) -> Any:
    """The function with one name changed: a mode that is on makes it hand itself over again, and here it must run."""
    names = function.__globals__ | {"has_torch_function": lambda _: False}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


multi_head = unguarded(F.multi_head_attention_forward)
BACKWARD = {
    torch.Tensor.backward: unguarded(torch.autograd.backward),
    torch.autograd.backward: unguarded(torch.autograd.backward),
    torch.autograd.grad: unguarded(torch.autograd.grad),
}
SIGNATURE = inspect.signature(F.multi_head_attention_forward)


@dataclass
class Products:
    """What the two products of F.multi_head_attention_forward were given, where it builds the whole matrix."""

    heads: int
    queries: Tensor | None = None  # (B H, Tq, D), scaled
    keys: Tensor | None = None  # (B H, Tk, D)
    bias: Tensor | None = None  # (Tq, Tk), or (B H or 1, Tq, Tk)


_running = threading.local()


def seen_multi_head(mode: Seeing, func: Any, args: Arguments, kwargs: Options) -> Any:
    """F.multi_head_attention_forward: run with the mode on, so that what it calls inside is seen."""
    given = SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    before = getattr(_running, "products", None)
    _running.products = Products(given.arguments["num_heads"]) if given.arguments["need_weights"] else None
    try:
        with mode:
            return multi_head(*args, **kwargs)
    finally:
        _running.products = before


def seen_product(mode: Seeing, func: Any, args: Arguments, kwargs: Options) -> Tensor:
    """torch.bmm and torch.baddbmm inside of F.multi_head_attention_forward: first Q Kᵀ, then W V."""
    products: Products | None = getattr(_running, "products", None)
    if products is None:
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    if products.queries is None or products.queries is args[-2]:
        *bias, products.queries, keys = args
        products.keys, products.bias = keys.mT, bias[0] if bias else None
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    return seen_mixed(mode, func(*args, **kwargs), args[1], products)


def seen_mixed(mode: Seeing, out: Tensor, values: Tensor, products: Products) -> Tensor:
    """W V of all heads, (B H, Tq, D): everything is known now."""
    recorder, name = mode.recorder, mode.recorder.here
    split = (-1, products.heads)
    assert products.queries is not None and products.keys is not None
    if recorded(recorder, name):
        q, k, v = (t.unflatten(0, split) for t in (products.queries, products.keys, values))
        bias = products.bias
        if bias is not None and bias.dim() == 3:
            bias = bias.unflatten(0, split) if bias.shape[0] > 1 else bias.unsqueeze(0)
        with unseen():
            _, weights = attention(q, k, v, score=Dot(scale=1.0), bias=bias, return_weights=True)
        recorder.saw(name, weights, v)
    return quiet(out.unflatten(0, split), recorder.silent(name), 1, name).flatten(0, 1)


def seen_softmax(mode: Seeing, func: Any, args: Arguments, kwargs: Options) -> Tensor:
    """A softmax of a module's own over something like a matrix of scores: no call shows its queries and keys."""
    if getattr(_running, "products", None) is None and args and isinstance(args[0], Tensor) and args[0].dim() > 2:
        mode.recorder.own_softmax.add(mode.recorder.here)
    return func(*args, **kwargs)  # type: ignore[no-any-return]


HANDLERS: dict[Any, Callable[[Seeing, Any, Arguments, Options], Any]] = {
    F.scaled_dot_product_attention: seen_fused,
    F.multi_head_attention_forward: seen_multi_head,
    attention: seen_own,
    attend: seen_interface,
    attention_and_matrix: seen_with_matrix,
    torch.bmm: seen_product,
    torch.baddbmm: seen_product,
    F.softmax: seen_softmax,
    torch.softmax: seen_softmax,
    torch.Tensor.softmax: seen_softmax,
}

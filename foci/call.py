"""The public functions: `attention` checks its arguments, chooses a backend and runs it; `plan` and `merge`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Never, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from foci import backends, statistics
from foci.arguments import Call, prepare_call
from foci.biases import Bias
from foci.masks.base import Mask
from foci.runtime import call_observer
from foci.runtime.argument_names import hide_catch_all, refuse_arguments
from foci.runtime.interception import intercept, is_intercepting
from foci.scores import Dot, Score
from foci.weights.weights import Weights

DEFAULT_SCORE = Dot()
Positions = tuple[Tensor | None, Tensor | None]


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score: Score = ...,
    mask: Mask | Tensor | None = ...,
    bias: Bias | Tensor | None = ...,
    sink: Tensor | None = ...,
    positions: Positions | None = ...,
    dropout: float = ...,
    backend: str | None = ...,
    return_weights: Literal[False] = ...,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score: Score = ...,
    mask: Mask | Tensor | None = ...,
    bias: Bias | Tensor | None = ...,
    sink: Tensor | None = ...,
    positions: Positions | None = ...,
    dropout: float = ...,
    backend: str | None = ...,
    return_weights: Literal[True],
) -> tuple[Tensor, Weights]: ...


@hide_catch_all
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *misplaced: Never,
    score: Score = DEFAULT_SCORE,
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    sink: Tensor | None = None,
    positions: Positions | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
    return_weights: bool = False,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Weights]:
    """Computes attention, softmax(Q Kᵀ / √d) V, with any score, mask, bias and sink.

    >>> import torch, foci
    >>> q, k, v = (torch.randn(2, 8, 128, 64) for _ in range(3))     # (batch, heads, tokens, width)
    >>> foci.attention(q, k, v, mask=foci.causal).shape
    torch.Size([2, 8, 128, 64])
    >>> out, weights = foci.attention(q, k, v, mask=foci.causal & foci.window(16), return_weights=True)
    >>> weights[0, 3, 5, :6].shape                                   # sequence 0, head 3: the weights of token 5
    torch.Size([6])

    The result is softmax(where(mask, softcap(scale · raw) + bias, -inf), with the sink as one more column) V.

    Shapes are (..., H, T, D); 2-D (T, D) and 3-D (B, T, D) inputs have no heads. Key and value may have fewer heads
    than query: head h reads key head h // group. Query i has the position i + Tk - Tq, key j the position j:

        causal, 2 queries and 5 keys          causal, 5 queries and 2 keys
        ■ ■ ■ ■ ·                             · ·   fully masked rows:
        ■ ■ ■ ■ ■                             · ·   output 0, weights 0,
                                              · ·   log-sum-exp -inf,
                                              ■ ·   finite gradients
                                              ■ ■

    Args:
        score: how a query is compared with a key: Dot, Additive, General, Cosine.
        mask: which keys each query can attend to: a mask such as foci.causal, or a bool tensor (True = visible).
        bias: added to the score by position: ALiBi, Buckets, Relative, or a float tensor (-inf masks).
        sink: a logit per head (H,) that takes attention and has no value vector.
        positions: (query positions, key positions) that replace the default; int tensors (T,) or (B, T).
        dropout: the probability that a weight is dropped.
        backend: None for the fastest one that supports the call; a name forces that backend, and raises ValueError with
            its reasons if it refuses.
        return_weights: also return the attention matrix, as a lazy operator.
    """
    if misplaced or unknown:
        refuse_arguments(attention, misplaced, unknown)
    is_watched = is_intercepting()
    if is_watched or has_torch_function_variadic(query, key, value):
        # Overridable like PyTorch's own functions: foci.watch, and after it a function mode, gets the original call.
        options: dict[str, Any] = {"score": score, "mask": mask, "bias": bias, "sink": sink, "positions": positions}
        options |= {"dropout": dropout, "backend": backend, "return_weights": return_weights}
        if is_watched:
            return intercept(attention, (query, key, value), options)  # type: ignore[no-any-return]
        overridden: Any = handle_torch_function(attention, (query, key, value), query, key, value, **options)  # type: ignore[arg-type]
        return overridden  # type: ignore[no-any-return]
    if not (type(query) is type(key) is type(value) is Tensor) and is_sharded(query, key, value):
        options = {"score": score, "mask": mask, "bias": bias, "sink": sink, "positions": positions}
        options |= {"dropout": dropout, "backend": backend, "return_weights": return_weights}
        return attend_sharded(query, key, value, options)  # type: ignore[no-any-return]
    if call_observer.observe is not None:
        observe_call(call_observer.observe, query, key, value, score, mask, bias, sink, positions)
    if bias is None and sink is None and positions is None and backend is None and dropout == 0:
        plain = None
        if score is DEFAULT_SCORE:
            plain = (attend_with_weights if return_weights else backends.run_plain_call)(query, key, value, mask)
        if plain is None and not return_weights:
            plain = backends.run_repeated_call(query, key, value, score, mask)
        if plain is not None:
            return plain
    call = prepare_call(query, key, value, score, mask, bias, sink, positions, dropout, return_weights)
    out, lse = run_call(call, backend)
    out = call.restore_shape(out) if out.dim() != query.dim() or out.shape[:-1] != query.shape[:-1] else out
    if not return_weights:
        return out
    assert lse is not None
    return out, Weights.from_call(call, lse)


def is_sharded(*tensors: Any) -> bool:
    """Whether one of the tensors is a DTensor; by name, because importing the class takes a second."""
    return any(type(tensor).__name__ == "DTensor" for tensor in tensors)


def attend_sharded(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Any:
    from foci.sharding.attention import attend_sharded

    return attend_sharded(attention, query, key, value, options)


def attend_with_weights(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> tuple[Tensor, Weights] | None:
    """Output and weights of a plain call after a few comparisons; None for any other call."""
    found = backends.run_plain_call_with_lse(q, k, v, mask)
    if found is None:
        return None
    out, lse = found
    return out, Weights.from_plain_call(q, k, DEFAULT_SCORE, mask, lse)


def run_call(call: Call, backend: str | None) -> tuple[Tensor, Tensor | None]:
    """The output and, if the call needs it, the log-sum-exp, the sink included."""
    if call.sink is None:
        return backends.run(call, backend)
    found = backends.run_with_sink(call, backend)
    if found is not None:
        return found
    out, lse = backends.run(call, backend)
    assert lse is not None
    return apply_sink(call, out, lse)


def observe_call(
    observe: Callable[[Weights, Tensor], None],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Score,
    mask: Mask | Tensor | None,
    bias: Bias | Tensor | None,
    sink: Tensor | None,
    positions: Positions | None,
) -> None:
    """Passes the weights of a call, computed in addition to the call itself, and its values to a function."""
    with torch.no_grad():
        inputs = query.detach(), key.detach(), value.detach()
        call = prepare_call(*inputs, score, mask, bias, sink, positions, 0.0, True)
        _, lse = run_call(call, None)
        assert lse is not None
        observe(Weights.from_call(call, lse), call.v)


def apply_sink(call: Call, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Adds the sink, a column that takes attention and has no value: out · sigmoid(lse - s), and the new lse."""
    assert call.sink is not None
    logit = call.sink.to(lse.dtype).view(1, -1, 1)
    # In a fully masked row lse is -inf and the sink takes everything; the gradient of sigmoid stays finite.
    empty = lse == -torch.inf
    remaining = torch.where(empty, 0.0, torch.sigmoid(torch.where(empty, 0.0, lse) - logit))
    total = torch.where(empty, logit, torch.logaddexp(torch.where(empty, 0.0, lse), logit))
    return (out * remaining.unsqueeze(-1)).to(out.dtype), total


@hide_catch_all
def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *misplaced: Never,
    score: Score = DEFAULT_SCORE,
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    sink: Tensor | None = None,
    positions: Positions | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
    return_weights: bool = False,
    **unknown: Never,
) -> backends.Plan:
    """Returns which backend runs the same call to `attention`, and why each other one refuses; prints as a table.

    >>> import torch, foci
    >>> q = torch.randn(1, 2, 16, 8)
    >>> foci.plan(q, q, q, mask=foci.causal).chosen
    'sdpa'
    """
    if misplaced or unknown:
        refuse_arguments(plan, misplaced, unknown)
    call = prepare_call(query, key, value, score, mask, bias, sink, positions, dropout, return_weights)
    made = backends.make_plan(call, backend)
    if return_weights:
        made.notes["statistics"] = f"statistics of the weights: {statistics.describe_statistics_backend(call)}"
    return made


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merges attention over parts of the keys into attention over all of them, exactly.

    >>> import torch, foci
    >>> q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    >>> halves = [foci.attention(q, k[:, :, s], v[:, :, s], return_weights=True) for s in (slice(0, 4), slice(4, 6))]
    >>> out, lse = foci.merge([(out, weights.lse) for out, weights in halves])
    >>> torch.allclose(out, foci.attention(q, k, v), atol=1e-6)
    True

    Args:
        parts: (out, lse) pairs, out (..., T, D) and lse (..., T). Returns the merged pair.
    """
    if not isinstance(parts, list | tuple) or not parts or any(len(part) != 2 for part in parts):
        raise ValueError(f"parts must be a list of one or more (out, lse) pairs, got {type(parts).__name__}")
    for out, lse in parts:
        if not isinstance(out, Tensor) or not isinstance(lse, Tensor):
            got = f"{type(out).__name__} and {type(lse).__name__}"
            raise TypeError(f"parts must be pairs of tensors (out, lse), got {got}")
        if out.shape[:-1] != lse.shape or out.shape != parts[0][0].shape:
            raise ValueError(
                f"parts must be out (..., T, D) with lse (..., T), all of one shape, got {tuple(out.shape)}"
                f" with {tuple(lse.shape)} after {tuple(parts[0][0].shape)}"
            )
    lses = torch.stack([lse for _, lse in parts])
    peak = lses.detach().amax(0)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    shares = torch.exp(lses - peak)
    total = shares.sum(0)
    empty = total == 0
    safe = torch.where(empty, 1.0, total)
    out = sum(o.to(shares.dtype) * (share / safe).unsqueeze(-1) for (o, _), share in zip(parts, shares, strict=True))
    assert isinstance(out, Tensor)
    return out.to(parts[0][0].dtype), torch.where(empty, -torch.inf, safe.log() + peak)

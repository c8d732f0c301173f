"""One attention of a model of transformers, with everything that models hand over, as a call of `foci.attention`.

B batch, H heads, Tq queries, Tk keys, D width, Dv value width.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_variadic

from foci.call import DEFAULT_SCORE, attention
from foci.capture.huggingface.masks import DeferredMask, build_attention_mask, is_watched
from foci.capture.huggingface.switch import implementation_before_watch
from foci.masks.base import Mask, as_mask
from foci.masks.kinds import causal, window
from foci.scores import Dot

IMPLEMENTATION = "foci"

# What some models hand over that would change the answer.
UNSUPPORTED_OPTIONS = {"cache": "a paged cache", "block_indices": "blocks chosen by index"}


def register() -> None:
    """Tells transformers the name; an attention without its mask function would see no padding."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as missing:
        raise ImportError("foci.hf needs transformers 5: pip install 'foci[hf]'") from missing
    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, build_attention_mask)


class VisibleKeys(NamedTuple):
    """Who may look at whom: how many of the keys count, and what a mask or a bias says about them."""

    keys: int
    mask: Mask | Tensor | None
    bias: Tensor | None


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """One attention of a model of transformers: (B, H, Tq, D) in, (B, Tq, H, Dv) out, and the weights where asked.

    The mode of `foci.watch` is told of it as a whole, and not of each thing that is asked of a tensor on the way to
    `foci.attention`.
    """
    given = module, query, key, value, attention_mask
    if has_torch_function_variadic(query, key, value) and is_watched():
        found: tuple[Tensor, Tensor | None] = handle_torch_function(
            attention_forward, (query, key, value), *given, **options
        )
        return found
    return translate_call(attention, *given, **options)


def translate_call(
    compute: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """What `attend` says, by `foci.attention` or by who tells of it: `compute`."""
    for name, what in UNSUPPORTED_OPTIONS.items():
        if others.get(name) is not None:
            raise ValueError(f"attn_implementation='foci' does not serve {what}: expected {name}=None")
    looks_back = getattr(module, "is_causal", True) if is_causal is None else is_causal
    seen = read_visible_keys(attention_mask, position_bias, looks_back, sliding_window, query.shape[2], key.shape[2])
    options: dict[str, Any] = {
        "score": build_score(scaling, None if softcap is None or ignores_softcap(module) else softcap, query.shape[3]),
        "mask": seen.mask if indices is None else restrict_to_indices(indices, seen),
        "bias": seen.bias,
        "sink": None if s_aux is None else s_aux.reshape(-1),
        "dropout": dropout if module.training else 0.0,
    }
    key_now, value_now = take_first_keys(seen.keys, key), take_first_keys(seen.keys, value)
    if looks_back and is_watched() and is_in_static_cache(key):
        key_now, value_now = key_now.clone(), value_now.clone()
    query_key_value = query, key_now, value_now
    if not needs_weights(others):
        return compute(*query_key_value, **options).transpose(1, 2).contiguous(), None
    out, weights = compute(*query_key_value, **options, return_weights=True)
    dense = F.pad(weights.dense(limit=2**62), (0, key.shape[2] - seen.keys))
    return out.transpose(1, 2).contiguous(), dense.to(query.dtype)


def take_first_keys(count: int, keys: Tensor) -> Tensor:
    """The first keys of a cache; all of them as they are, as a slice takes time."""
    return keys if keys.shape[2] == count else keys[:, :, :count]


def read_visible_keys(
    attention_mask: Tensor | None,
    position_bias: Tensor | None,
    looks_back: bool,
    sliding_window: int | None,
    queries: int,
    keys: int,
) -> VisibleKeys:
    """Reads the mask in every form that models hand over, None included."""
    mask: Mask | Tensor | None = None
    if attention_mask is None and looks_back:
        # The queries are all there is, then: what a cache of fixed size has behind them is empty.
        keys = keys if queries == 1 else min(keys, queries)
        mask = causal if queries > 1 else None
        if sliding_window is not None and sliding_window < keys:
            mask = window(sliding_window - 1) if mask is None else causal & window(sliding_window - 1)
    elif isinstance(attention_mask, DeferredMask):
        mask, keys = attention_mask.mask, attention_mask.keys
    elif attention_mask is not None and attention_mask.dtype == torch.bool:
        mask = attention_mask[..., :keys]
    elif attention_mask is not None:
        added = attention_mask[..., :keys]
        position_bias = added if position_bias is None else position_bias[..., :keys] + added
    return VisibleKeys(keys, mask, None if position_bias is None else position_bias[..., :keys])


def restrict_to_indices(indices: Tensor, seen: VisibleKeys) -> Mask:
    """Only the keys that an indexer chose for each query, (B, Tq, some): a dense mask, as it is in eager code."""
    chosen = torch.zeros(*indices.shape[:2], seen.keys, dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(-1, indices.long(), True).unsqueeze(1)
    return as_mask(chosen) if seen.mask is None else as_mask(seen.mask) & chosen


def build_score(scaling: float | None, softcap: float | None, width: int) -> Dot:
    """The plain score itself where it is one: the short way of the call knows it by identity."""
    return DEFAULT_SCORE if softcap is None and scaling in {None, width**-0.5} else Dot(scaling, softcap)


def ignores_softcap(module: nn.Module) -> bool:
    """Whether a watched module goes without its softcap: SDPA did not take one, and older versions did not say so."""
    from transformers.integrations import sdpa_attention

    before = implementation_before_watch(getattr(module, "config", None))
    return before == "sdpa" and "softcap" not in inspect.getsource(sdpa_attention)


def is_in_static_cache(key: Tensor) -> bool:
    """Whether the keys lie in a cache of fixed size, where the next step writes between them."""
    return not key.is_inference() and key._version > 0


def needs_weights(others: dict[str, Any]) -> bool:
    """Whether the forward was called with output_attentions=True, handed down or collected by hooks."""
    if others.get("output_attentions"):
        return True
    if torch.compiler.is_compiling():
        return False
    # Where forwards are not told, hooks collect; the first versions of transformers always tell.
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collected = None if capturing is None else capturing._active_collector.get()
    return collected is not None and any("attentions" in name for name in collected)

"""Translates a call of the attention interface of transformers into a call of `foci.attention`.

B batch, H heads, Tq queries, Tk keys, D width, Dv value width.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.call import DEFAULT_SCORE, attention
from foci.capture.huggingface.masks import DeferredMask, build_attention_mask, is_watch_active
from foci.capture.huggingface.switch import implementation_before_watch
from foci.capture.recorder import Recorder, find_only_recorder
from foci.capture.torch_functions import choose_identical_backend
from foci.masks.base import Mask, as_mask
from foci.masks.kinds import causal, window
from foci.scores import Dot

IMPLEMENTATION = "foci"

# Options of some models that foci does not implement and that would change the output.
UNSUPPORTED_OPTIONS = {"cache": "a paged cache", "block_indices": "blocks chosen by index"}
# Options that change the matrix.
OTHER_OPTIONS = frozenset((*UNSUPPORTED_OPTIONS, "softcap", "s_aux", "position_bias", "indices"))


@cache
def register() -> None:
    """Registers the implementation with transformers: the attention and its mask function, which reads the padding."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as missing:
        raise ImportError("foci needs transformers 4.53 or newer: pip install 'foci[hf]'") from missing
    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, build_attention_mask)


class TranslatedMask(NamedTuple):
    """The number of keys that count, and their mask or bias."""

    keys: int
    mask: Mask | Tensor | None
    bias: Tensor | None


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """One attention of a transformers model: (B, H, Tq, D) in, (B, Tq, H, Dv) out, with weights if requested.

    >>> module, (q, k, v) = torch.nn.Module(), torch.randn(3, 1, 2, 5, 8)
    >>> foci.hf.attention_forward(module, q, k, v, None, scaling=8**-0.5)[0].shape
    torch.Size([1, 5, 2, 8])
    """
    recorder = find_only_recorder() if attention_mask is None else None
    out = None if recorder is None else run_watched_call(recorder, module, query, key, value, **options)
    if out is not None:
        return out.transpose(1, 2).contiguous(), None
    return translate_call(attention, module, query, key, value, attention_mask, **options)


def run_watched_call(
    recorder: Recorder,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> Tensor | None:
    """Runs and records the most common call of a watched model without translating it; None for any other call."""
    if (dropout and module.training) or (scaling and scaling != query.shape[3] ** -0.5):
        return None
    if not OTHER_OPTIONS.isdisjoint(others) and any(others.get(name) is not None for name in OTHER_OPTIONS):
        return None
    if others.get("output_attentions") or collects_weights() or is_in_static_cache(key):
        return None
    if sliding_window is not None and sliding_window < key.shape[2]:
        return None
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    name = recorder.names_by_id.get(id(module))
    mask = causal if is_causal and query.shape[2] > 1 else None
    is_sdpa = implementation_before_watch(getattr(module, "config", None)) == "sdpa"
    out = None if name is None else recorder.run_plain_call(name, query, key, value, mask, is_sdpa)
    recorder.foci_calls += out is not None
    return out


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
    """Implements `attention_forward`; `compute` is `foci.attention`, or a recorded call of it."""
    for name, what in UNSUPPORTED_OPTIONS.items():
        if others.get(name) is not None:
            raise ValueError(f"{name} must be None, got {what}, which attn_implementation='foci' does not support")
    is_causal_call = getattr(module, "is_causal", True) if is_causal is None else is_causal
    translated = translate_mask(
        attention_mask, position_bias, is_causal_call, sliding_window, query.shape[2], key.shape[2]
    )
    options: dict[str, Any] = {
        "score": build_dot_score(
            scaling, None if softcap is None or ignores_softcap(module) else softcap, query.shape[3]
        ),
        "mask": translated.mask if indices is None else restrict_to_indices(indices, translated),
        "bias": translated.bias,
        "sink": None if s_aux is None else s_aux.reshape(-1),
        "dropout": dropout if module.training else 0.0,
    }
    used_keys, used_values = take_first_keys(translated.keys, key), take_first_keys(translated.keys, value)
    if is_causal_call and is_watch_active() and is_in_static_cache(key):
        used_keys, used_values = used_keys.clone(), used_values.clone()
    inputs = query, used_keys, used_values
    if is_watch_active() and implementation_before_watch(getattr(module, "config", None)) == "sdpa" and s_aux is None:
        options["backend"] = choose_identical_backend(*inputs, **options)
    if not needs_weights(others):
        return compute(*inputs, **options).transpose(1, 2).contiguous(), None
    out, weights = compute(*inputs, **options, return_weights=True)
    dense = F.pad(weights.dense(limit=2**62), (0, key.shape[2] - translated.keys))
    return out.transpose(1, 2).contiguous(), dense.to(query.dtype)


def take_first_keys(count: int, keys: Tensor) -> Tensor:
    """The first keys of a cache; avoids the cost of a slice if it is all of them."""
    return keys if keys.shape[2] == count else keys[:, :, :count]


def translate_mask(
    attention_mask: Tensor | None,
    position_bias: Tensor | None,
    is_causal_call: bool,
    sliding_window: int | None,
    queries: int,
    keys: int,
) -> TranslatedMask:
    """Translates the mask, in every form that models pass, including None."""
    mask: Mask | Tensor | None = None
    if attention_mask is None and is_causal_call:
        # Without a mask the queries are the whole sequence: later slots of a static cache are empty.
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
    return TranslatedMask(keys, mask, None if position_bias is None else position_bias[..., :keys])


def restrict_to_indices(indices: Tensor, translated: TranslatedMask) -> Mask:
    """Restricts each query to the keys that an indexer chose, (B, Tq, n), with a dense mask as in eager code."""
    chosen = torch.zeros(*indices.shape[:2], translated.keys, dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(-1, indices.long(), True).unsqueeze(1)
    return as_mask(chosen) if translated.mask is None else as_mask(translated.mask) & chosen


def build_dot_score(scaling: float | None, softcap: float | None, width: int) -> Dot:
    """The score; a plain dot product is `DOT` itself, which the fast path of the call recognizes by identity."""
    return DEFAULT_SCORE if softcap is None and scaling in {None, width**-0.5} else Dot(scaling, softcap)


def ignores_softcap(module: nn.Module) -> bool:
    """Whether a watched module ran without its softcap: older versions of transformers ignored it under SDPA."""
    from transformers.integrations import sdpa_attention

    before = implementation_before_watch(getattr(module, "config", None))
    return before == "sdpa" and "softcap" not in inspect.getsource(sdpa_attention)


def is_in_static_cache(key: Tensor) -> bool:
    """Whether the keys are in a static cache, which the next step overwrites in place."""
    return not key.is_inference() and key._version > 0


def needs_weights(others: dict[str, Any]) -> bool:
    """Whether the model was called with output_attentions=True, passed down or collected by hooks."""
    return bool(others.get("output_attentions")) or (not torch.compiler.is_compiling() and collects_weights())


def collects_weights() -> bool:
    """Whether hooks of the model collect its weights: newer versions of transformers do not pass the option down."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collected = None if capturing is None else capturing._active_collector.get()
    return collected is not None and any("attentions" in name for name in collected)

"""Records the calls of the attention interface of transformers, which run unchanged: for `foci.Monitor`.

Models with sdpa call F.scaled_dot_product_attention and those with foci `foci.attention`, which are intercepted there.
Eager and flash attention are recorded here, from the arguments of the interface.

B batch, H heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, reduce
from operator import and_
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foci.call import attention
from foci.capture.huggingface.attention import IMPLEMENTATION, translate_call
from foci.capture.huggingface.masks import DeferredMask, MaskPositions
from foci.capture.recorder import active_recorders
from foci.masks.base import DenseMask, Mask
from foci.masks.kinds import causal, documents, window
from foci.runtime.interception import without_interception
from foci.runtime.tracing import is_recomputation

if TYPE_CHECKING:
    from foci.capture.recorder import Recorder

# Implementations whose calls are intercepted further down.
INTERCEPTED = ("sdpa", IMPLEMENTATION)
# Options that would return the matrix, or that flash attention uses instead of a mask.
MATRIX_OPTIONS = ("output_attentions", "position_ids")

INTERFACE_LOCK = Lock()
_open_blocks = 0


@contextmanager
def observe_interface() -> Iterator[None]:
    """Eager and flash attention is recorded while a block is open, in any thread, by the recorders of its thread."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as INTERFACE

    get_interface = getattr(type(INTERFACE), "get_interface", None)
    if get_interface is None:
        # Models of transformers 4 and of the first versions of 5 call eager code directly: it is reported as unseen.
        yield
        return
    global _open_blocks
    with INTERFACE_LOCK:
        _open_blocks += 1
        # An attribute of the instance hides the method of its class.
        vars(INTERFACE)["get_interface"] = partial(get_observed_interface, get_interface, INTERFACE)
    try:
        yield
    finally:
        with INTERFACE_LOCK:
            _open_blocks -= 1
            if _open_blocks == 0:
                vars(INTERFACE).pop("get_interface", None)


def get_observed_interface(
    get_interface: Callable[..., Callable[..., Any]], interface: Any, attn_implementation: str, default: Any
) -> Callable[..., Any]:
    """The attention function of an implementation; one that also records its calls if a recorder asks for them."""
    function = get_interface(interface, attn_implementation, default)
    recorders = [each for each in active_recorders() if each.keeps_own_calls and each.is_open]
    if not recorders or attn_implementation in INTERCEPTED:
        return function
    return partial(run_and_record, recorders, attn_implementation, function)


def run_and_record(
    recorders: list[Recorder],
    implementation: str | None,
    function: Callable[..., Any],
    module: nn.Module,
    *inputs: Any,
    **options: Any,
) -> Any:
    """Runs an attention function of transformers, then records its call."""
    result = function(module, *inputs, **options)
    for recorder in () if is_recomputation() else recorders:
        name = recorder.find_running_module()
        if name is None:
            continue
        recorder.count_call(name)
        if not recorder.is_selected(name):
            continue
        try:
            with without_interception(), torch.no_grad():
                record_interface_call(recorder, name, implementation or "eager", module, *inputs, **options)
        except (TypeError, ValueError) as error:
            recorder.mark_unseen(name, f"foci does not support its call: {error}")
    return result


def record_interface_call(
    recorder: Recorder,
    name: str,
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> None:
    """Records a call of eager or flash attention with the arguments of the interface; raises ValueError for others."""

    def compute(*inputs: Tensor, **found: Any) -> Tensor:
        out, weights = attention(*inputs, **found | {"dropout": 0.0}, return_weights=True)
        recorder.record_call(name, weights, inputs[2])
        return out

    if implementation == "eager":
        # Eager code applies no causal mask of its own: without a mask every key is visible.
        options["is_causal"] = False
    elif "flash" in implementation:
        attention_mask = read_flash_mask(module, query, key, attention_mask, **options)
    else:
        raise ValueError(f"attn_implementation must be eager, sdpa, foci or flash attention, got {implementation!r}")
    kept = {option: value for option, value in options.items() if option not in MATRIX_OPTIONS}
    translate_call(compute, module, query, key, value, attention_mask, **kept)


def read_flash_mask(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> Tensor | None:
    """The mask of a call of flash attention, whose attention_mask (B, Tk) marks the keys that are real tokens."""
    if cu_seq_lens_q is not None:
        raise ValueError("cu_seq_lens_q must be None, got packed sequences: use position_ids")
    (batch, _, queries, _), keys = query.shape, key.shape[2]
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    parts: list[Mask] = [causal] if is_causal and queries > 1 else []
    if sliding_window is not None:
        parts.append(window(sliding_window - 1, None if is_causal else sliding_window - 1))
    if attention_mask is not None:
        parts.append(DenseMask(attention_mask[:, None, None, -keys:].bool()))
    elif batch == 1 and position_ids is not None and queries == keys:
        # Packed sequences start where the position does not continue.
        steps = torch.diff(position_ids[:1], dim=-1, prepend=position_ids[:1, :1] - 1)
        parts.append(documents((steps != 1).cumsum(-1)))
    mask = reduce(and_, parts or [window(None, None)])
    return DeferredMask(mask, MaskPositions(batch, queries, keys, keys - queries, 0, query.device), keys)

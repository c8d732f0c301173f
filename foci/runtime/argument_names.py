"""Errors for arguments that a function does not have: the names of other libraries, misspelt names, positional ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from foci.runtime.spelling import suggest_name

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

CAUSAL = "use mask=foci.causal, or foci.causal.at(0) to align the first query with the first key as PyTorch does"
PADDING = "use mask=foci.padding(lengths), or a bool tensor (B, 1, 1, Tk) with True = visible"
WEIGHTS = "use return_weights=True, which returns the weights of every head as the second result"
# What foci has instead of the arguments of PyTorch, FlashAttention, FlexAttention and transformers.
NAMES_ELSEWHERE = {
    "is_causal": CAUSAL,
    "causal": CAUSAL,
    "attn_mask": "use mask= for a bool tensor (True = visible) and bias= for a float tensor",
    "attention_mask": "use mask= for a bool tensor (True = visible) and bias= for a float tensor",
    "attn_bias": "use bias=",
    "key_padding_mask": PADDING,
    "dropout_p": "use dropout=",
    "scale": "use score=foci.Dot(scale=...)",
    "softmax_scale": "use score=foci.Dot(scale=...)",
    "softcap": "use score=foci.Dot(softcap=...)",
    "enable_gqa": "leave it out, because key and value may always have fewer heads than query",
    "need_weights": WEIGHTS,
    "average_attn_weights": WEIGHTS,
    "window_size": "use mask=foci.window(left, right)",
    "alibi_slopes": "use bias=foci.ALiBi(slopes)",
    "mask_mod": "use mask=foci.mask_function(f)",
    "block_mask": "use mask=foci.mask_function(f)",
    "score_mod": "use bias= or score=",
    # Of transformers' generate.
    "max_new_tokens": "use new_tokens=",
    "max_length": "use new_tokens=, which does not count the prompt",
    "num_beams": "use method=foci.decoding.Beam(...)",
    "eos_token_id": "use stop=",
    **dict.fromkeys(("do_sample", "temperature", "top_k", "top_p", "min_p"), "use method=foci.decoding.Sampling(...)"),
    "repetition_penalty": "use method=foci.decoding.Sampling(repetition=...)",
}


def refuse_arguments(function: Callable[..., Any], misplaced: tuple[Any, ...], unknown: dict[str, Any]) -> NoReturn:
    """Raises TypeError for arguments that a function does not have, and names what to write instead.

    >>> refuse_arguments(foci.attention, (), {"maks": foci.causal})
    Traceback (most recent call last):
    TypeError: the options of attention must be among score, mask, ..., got maks: did you mean mask?
    """
    kinds = {name: parameter.kind for name, parameter in inspect.signature(function).parameters.items()}
    options = [name for name, kind in kinds.items() if kind == inspect.Parameter.KEYWORD_ONLY]
    places = [
        name for name, kind in kinds.items() if kind == inspect.Parameter.POSITIONAL_OR_KEYWORD and name != "self"
    ]
    if misplaced:
        name = name_of_argument(misplaced[0])
        hint = f"write {name}=..." if name in options else "write the others by name, such as mask=..."
        got = f"{len(places) + len(misplaced)}, the next a {type(misplaced[0]).__name__}"
        raise TypeError(f"the positional arguments must be {join_names(places)}, got {got}: {hint}")
    name = next(iter(unknown))
    hint = f": {NAMES_ELSEWHERE[name]}" if name in NAMES_ELSEWHERE else suggest_name(name, options)
    raise TypeError(f"the options of {function.__name__} must be among {', '.join(options)}, got {name}{hint}")


def name_of_argument(value: object) -> str:
    """The option that takes a value of this type."""
    if isinstance(value, Tensor):
        return "mask" if value.dtype == torch.bool else "bias"
    kinds = {kind.__name__ for kind in type(value).__mro__}
    return next((name.lower() for name in ("Mask", "Bias", "Score") if name in kinds), "")


def join_names(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if names[1:] else "".join(names)


def hide_catch_all(function: FunctionT) -> FunctionT:
    """Leaves the parameters that catch unknown arguments out of the signature that editors and help() show."""
    signature = inspect.signature(function)
    catch_all = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    shown = [each for each in signature.parameters.values() if each.kind not in catch_all]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return function

"""A file of weights, checked part by part: one that does not fit together is refused here, not by a later question.

B batch, H heads, G key heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor

from foci.arguments import FLOAT_DTYPES, Call, check_heads, normalize_positions, normalize_sink
from foci.biases import Bias
from foci.masks.base import Complement, DenseMask, Intersection, Mask, Union
from foci.masks.kinds import Padding
from foci.masks.tile import CallSizes
from foci.runtime import safetensors_file
from foci.scores import Score
from foci.weights.tensors import MATRIX_FIELDS, find_tensors

SHAPE_FIELDS = ("batch", "headed", "averaged", "group")
INT_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
WEIGHTS_PARTS = {*MATRIX_FIELDS, *SHAPE_FIELDS, "sizes", "lse"}


def load_weights(path: str | os.PathLike[str]) -> tuple[Call, Tensor, tuple[int, ...], bool, bool, int]:
    """What a `Weights` is made of, from a file that `Weights.save` wrote."""
    try:
        return check_parts(safetensors_file.load_parts(path))
    except (OSError, ImportError):
        raise
    except Exception as error:
        # Whatever a damaged or hostile file makes of the checks, its reader gets one answer.
        raise ValueError(f"{os.fspath(path)} is not a whole file of foci weights: {error}") from error


def check_parts(found: dict[str, Any]) -> tuple[Call, Tensor, tuple[int, ...], bool, bool, int]:
    """What a `Weights` is made of, from the parts of one; raises where they do not fit together."""
    require(
        isinstance(found, dict) and found.keys() == WEIGHTS_PARTS, f"the parts {sorted(WEIGHTS_PARTS)}", sorted(found)
    )
    call = rebuild_call(found)
    check_shape_fields(call, found)
    return call, found["lse"], found["batch"], found["headed"], found["averaged"], found["group"]


def require(condition: bool, expected: str, got: Any) -> None:
    if not condition:
        raise ValueError(f"expected {expected}, but got {got}")


def rebuild_call(found: dict[str, Any]) -> Call:
    """The call that was described, its parts fitted to each other again."""
    q, k = found["q"], found["k"]
    check_queries(q, k)
    sizes = rebuild_sizes(found["sizes"], q, k)
    # Masks, biases and positions were saved with all leading axes folded into one.
    folded = sizes._replace(batch=(sizes.flat_batch,), heads=sizes.heads or 1)
    call = Call(q, k, k, sizes, found["score"])
    require(isinstance(call.score, Score), "a score", call.score)
    call.score.check(q, k, None if sizes.heads is None else q.shape[1])
    call.mask, call.bias = rebuild_mask(found["mask"], folded), rebuild_bias(found["bias"], folded, call)
    call.batch_ids = check_ids(found["batch_ids"], q.shape[0], folded.flat_batch, "batch_ids")
    call.head_ids = check_ids(found["head_ids"], q.shape[1], folded.heads or 1, "head_ids")
    if found["sink"] is not None:
        call.sink = normalize_sink(found["sink"], sizes._replace(heads=sizes.heads and q.shape[1]))
    if found["positions"] is not None:
        call.positions = normalize_positions(found["positions"], folded)
    return call


def check_queries(q: Any, k: Any) -> None:
    require(
        isinstance(q, Tensor) and isinstance(k, Tensor), "tensors q and k", f"{type(q).__name__}, {type(k).__name__}"
    )
    require(q.dtype == k.dtype and q.dtype in FLOAT_DTYPES, "q and k of one float dtype", f"{q.dtype} and {k.dtype}")
    shapes = f"{tuple(q.shape)} and {tuple(k.shape)}"
    require(q.dim() == k.dim() == 4 and q.shape[0] == k.shape[0], "q (B, H, Tq, D) and k (B, G, Tk, D)", shapes)
    check_heads(q, k, k)


def rebuild_sizes(sizes: Any, q: Tensor, k: Tensor) -> CallSizes:
    require(isinstance(sizes, tuple) and len(sizes) == 4, "an sizes of four sizes", sizes)
    batch, heads, queries, keys = sizes
    require(
        is_int_tuple(batch) and (heads is None or is_int_tuple((heads,))),
        "whole numbers for batch and heads",
        (batch, heads),
    )
    require((queries, keys) == (q.shape[2], k.shape[2]), f"{q.shape[2]} queries and {k.shape[2]} keys", (queries, keys))
    return CallSizes(batch, heads, queries, keys, q.device)


def is_int_tuple(numbers: Any) -> bool:
    return isinstance(numbers, tuple) and all(type(n) is int and n >= 0 for n in numbers)


def rebuild_mask(mask: Any, folded: CallSizes) -> Mask | None:
    if mask is None:
        return None
    require(isinstance(mask, Mask), "a mask or None", mask)
    assert isinstance(mask, Mask)
    check_mask_dtypes(mask)
    return mask.fit(folded)


def check_mask_dtypes(mask: Any) -> None:
    """Entries are bool, the numbers of every other mask whole; what a mask is joined of, likewise."""
    if isinstance(mask, Intersection | Union):
        check_mask_dtypes(mask.left)
        check_mask_dtypes(mask.right)
    elif isinstance(mask, Complement):
        check_mask_dtypes(mask.mask)
    elif isinstance(mask, DenseMask):
        require(mask.entries.dtype == torch.bool, "a bool mask", mask.entries.dtype)
    else:
        for tensor in find_tensors(mask):
            require(tensor.dtype in INT_DTYPES, "whole numbers in a mask", tensor.dtype)
    if isinstance(mask, Padding):
        require(mask.side in {"left", "right"}, "side 'left' or 'right'", repr(mask.side))


def rebuild_bias(bias: Any, folded: CallSizes, call: Call) -> Bias | None:
    if bias is None:
        return None
    require(isinstance(bias, Bias), "a bias or None", bias)
    assert isinstance(bias, Bias)
    for tensor in find_tensors(bias):
        require(tensor.is_floating_point(), "a bias of float tensors", tensor.dtype)
    return bias.fit(folded, call.q, call.v)


def check_ids(ids: Any, count: int, total: int, name: str) -> Tensor | None:
    """Which of the original sequences or heads these are; None where they are all of them."""
    if ids is None:
        require(count == total, f"{total} of them without {name}", count)
        return None
    require(isinstance(ids, Tensor), f"a tensor or None for {name}", type(ids).__name__)
    assert isinstance(ids, Tensor)
    require(ids.dtype == torch.int64 and ids.shape == (count,), f"{name} int64 ({count},)", f"{ids.dtype} {ids.shape}")
    require(bool(((ids >= 0) & (ids < total)).all()), f"{name} from 0 to {total - 1}", ids.tolist()[:8])
    return ids


def check_shape_fields(call: Call, found: dict[str, Any]) -> None:
    lse, (batch, headed, averaged, group) = found["lse"], (found[name] for name in SHAPE_FIELDS)
    require(
        isinstance(lse, Tensor) and lse.shape == call.q.shape[:3], f"lse {tuple(call.q.shape[:3])}", describe_shape(lse)
    )
    require(lse.dtype == call.softmax_dtype, f"lse in {call.softmax_dtype}", lse.dtype)
    require(isinstance(headed, bool) and isinstance(averaged, bool), "true or false", (headed, averaged))
    require(not (headed and averaged), "an average without heads", "one with heads")
    require(headed or averaged or call.q.shape[1] == 1, "one head where there is no head axis", call.q.shape[1])
    require(
        is_int_tuple(batch) and math.prod(batch) == call.q.shape[0], f"batch axes of {call.q.shape[0]} sequences", batch
    )
    require(is_int_tuple((group,)) and group > 0, "a group of 1 or more heads", group)


def describe_shape(thing: Any) -> Any:
    return tuple(thing.shape) if isinstance(thing, Tensor) else type(thing).__name__

"""Rebuilds `Weights` from a file and checks every part, so that a damaged file is refused on loading.

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width.
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
from foci.runtime.printable import make_printable
from foci.scores import Score
from foci.weights import parts_file
from foci.weights.tensors import MATRIX_FIELDS, find_tensors

SHAPE_FIELDS = ("batch", "headed", "averaged", "group")
INT_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# Characters of a wrong value that an error shows.
MAX_SHOWN = 200
WEIGHTS_PARTS = {*MATRIX_FIELDS, *SHAPE_FIELDS, "sizes", "lse"}


def load_weights(path: str | os.PathLike[str]) -> tuple[Call, Tensor, tuple[int, ...], bool, bool, int]:
    """The arguments of `Weights`, from a file that `Weights.save` wrote."""
    with parts_file.explain_damage(path, "weights file"):
        return check_parts(parts_file.load_parts(path))


def check_parts(parts: dict[str, Any]) -> tuple[Call, Tensor, tuple[int, ...], bool, bool, int]:
    """The arguments of `Weights`, from its parts; raises ValueError if they do not fit together."""
    require(isinstance(parts, dict), "the parts", "a dict", type(parts).__name__)
    require(parts.keys() == WEIGHTS_PARTS, "the parts", sorted(WEIGHTS_PARTS), sorted(parts))
    call = rebuild_call(parts)
    check_shape_fields(call, parts)
    return call, parts["lse"], parts["batch"], parts["headed"], parts["averaged"], parts["group"]


def require(condition: bool, name: str, expected: Any, got: Any) -> None:
    if not condition:
        raise ValueError(f"{name} must be {expected}, got {make_printable(str(got)[:MAX_SHOWN])}")


def rebuild_call(parts: dict[str, Any]) -> Call:
    """The call of the saved weights, with its parts checked against each other."""
    q, k = parts["q"], parts["k"]
    check_queries(q, k)
    sizes = rebuild_sizes(parts["sizes"], q, k)
    # Masks, biases and positions were saved with all leading axes folded into one.
    folded = sizes._replace(batch=(sizes.flat_batch,), heads=sizes.heads or 1)
    call = Call(q, k, k, sizes, parts["score"])
    require(isinstance(call.score, Score), "score", "a Score", call.score)
    call.score.check(q, k, None if sizes.heads is None else q.shape[1])
    call.mask, call.bias = rebuild_mask(parts["mask"], folded), rebuild_bias(parts["bias"], folded, call)
    call.batch_ids = check_ids(parts["batch_ids"], q.shape[0], folded.flat_batch, "batch_ids")
    call.head_ids = check_ids(parts["head_ids"], q.shape[1], folded.heads or 1, "head_ids")
    if parts["sink"] is not None:
        call.sink = normalize_sink(parts["sink"], sizes._replace(heads=sizes.heads and q.shape[1]))
    if parts["positions"] is not None:
        call.positions = normalize_positions(parts["positions"], folded)
    return call


def check_queries(q: Any, k: Any) -> None:
    types = f"{type(q).__name__} and {type(k).__name__}"
    require(isinstance(q, Tensor) and isinstance(k, Tensor), "q and k", "tensors", types)
    require(q.dtype == k.dtype and q.dtype in FLOAT_DTYPES, "q and k", "of one float dtype", f"{q.dtype} and {k.dtype}")
    shapes = f"{tuple(q.shape)} and {tuple(k.shape)}"
    require(q.dim() == k.dim() == 4 and q.shape[0] == k.shape[0], "q and k", "(B, H, Tq, D) and (B, G, Tk, D)", shapes)
    check_heads(q, k, k)


def rebuild_sizes(sizes: Any, q: Tensor, k: Tensor) -> CallSizes:
    require(isinstance(sizes, tuple) and len(sizes) == 4, "sizes", "a tuple of 4", sizes)
    batch, heads, queries, keys = sizes
    require(
        is_int_tuple(batch) and (heads is None or is_int_tuple((heads,))),
        "batch and heads",
        "integers",
        (batch, heads),
    )
    require((queries, keys) == (q.shape[2], k.shape[2]), "queries and keys", (q.shape[2], k.shape[2]), (queries, keys))
    return CallSizes(batch, heads, queries, keys, q.device)


def is_int_tuple(numbers: Any) -> bool:
    return isinstance(numbers, tuple) and all(type(n) is int and n >= 0 for n in numbers)


def rebuild_mask(mask: Any, folded: CallSizes) -> Mask | None:
    if mask is None:
        return None
    require(isinstance(mask, Mask), "mask", "a Mask or None", mask)
    assert isinstance(mask, Mask)
    check_mask_dtypes(mask)
    return mask.fit(folded)


def check_mask_dtypes(mask: Any) -> None:
    """Raises unless dense masks are bool and the tensors of all other masks integers, inside combined masks too."""
    if isinstance(mask, Intersection | Union):
        check_mask_dtypes(mask.left)
        check_mask_dtypes(mask.right)
    elif isinstance(mask, Complement):
        check_mask_dtypes(mask.mask)
    elif isinstance(mask, DenseMask):
        require(mask.entries.dtype == torch.bool, "a dense mask", "bool", mask.entries.dtype)
    else:
        for tensor in find_tensors(mask):
            require(tensor.dtype in INT_DTYPES, "the tensors of a mask", "integers", tensor.dtype)
    if isinstance(mask, Padding):
        require(mask.side in {"left", "right"}, "side", "'left' or 'right'", repr(mask.side))


def rebuild_bias(bias: Any, folded: CallSizes, call: Call) -> Bias | None:
    if bias is None:
        return None
    require(isinstance(bias, Bias), "bias", "a Bias or None", bias)
    assert isinstance(bias, Bias)
    for tensor in find_tensors(bias):
        require(tensor.is_floating_point(), "the tensors of a bias", "floats", tensor.dtype)
    return bias.fit(folded, call.q, call.v)


def check_ids(ids: Any, count: int, total: int, name: str) -> Tensor | None:
    """The checked numbers of the sequences or heads in the original call; None if they are all of them."""
    if ids is None:
        require(count == total, f"the count without {name}", total, count)
        return None
    require(isinstance(ids, Tensor), name, "a tensor or None", type(ids).__name__)
    assert isinstance(ids, Tensor)
    require(ids.dtype == torch.int64 and ids.shape == (count,), name, f"int64 ({count},)", f"{ids.dtype} {ids.shape}")
    require(bool(((ids >= 0) & (ids < total)).all()), name, f"from 0 to {total - 1}", ids.tolist()[:8])
    return ids


def check_shape_fields(call: Call, parts: dict[str, Any]) -> None:
    lse, (batch, headed, averaged, group) = parts["lse"], (parts[name] for name in SHAPE_FIELDS)
    expected = tuple(call.q.shape[:3])
    require(isinstance(lse, Tensor) and lse.shape == expected, "lse", expected, describe_shape(lse))
    require(lse.dtype == call.softmax_dtype, "lse", call.softmax_dtype, lse.dtype)
    require(isinstance(headed, bool) and isinstance(averaged, bool), "headed and averaged", "bools", (headed, averaged))
    require(not (headed and averaged), "averaged weights", "without a head axis", "headed=True")
    require(headed or averaged or call.q.shape[1] == 1, "the number of heads without a head axis", 1, call.q.shape[1])
    is_valid = is_int_tuple(batch) and math.prod(batch) == call.q.shape[0]
    require(is_valid, "batch", f"axes of {call.q.shape[0]} sequences", batch)
    require(is_int_tuple((group,)) and group > 0, "group", "1 or more heads", group)


def describe_shape(thing: Any) -> Any:
    return tuple(thing.shape) if isinstance(thing, Tensor) else type(thing).__name__

"""A call as plain arguments: tensors, integers and a text, which is what an operator of PyTorch takes.

The text names the scores, masks and biases; `t0` and `n0` in it are the first tensor and the first integer:

    (Dot(None,None),Intersection(Causal(None),Padding(t0,'right',n2)),None,None,None,None,None)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.arguments import Call
from foci.masks.tile import CallSizes
from foci.weights.parts_file import SAVED_CLASSES

# A tensor or an integer in the text.
PLACEHOLDER = re.compile(r"[tn]\d+")
Builder = Callable[[list[Tensor], list[int]], Any]

# The fields of a call in the text; query and key are arguments of their own.
ENCODED_FIELDS = ("score", "mask", "bias", "sink", "positions", "batch_ids", "head_ids")


class EncodedCall(NamedTuple):
    """What determines the matrix of a call; `numbers` starts with the sequences and heads of the original call."""

    q: Tensor
    k: Tensor
    tensors: list[Tensor]
    numbers: list[int]
    text: str


def is_encodable(part: Any) -> bool:
    """Whether the score, mask or bias consists of classes of foci: functions and other classes have no text."""
    if part is None or isinstance(part, Tensor | bool | int | float | str | torch.SymInt):
        return True
    if isinstance(part, tuple):
        return all(is_encodable(item) for item in part)
    if SAVED_CLASSES.get(type(part).__name__) is not type(part):
        return False
    return all(is_encodable(getattr(part, name)) for name in part.__dataclass_fields__)


def encode_call(call: Call) -> EncodedCall:
    """The call as arguments of an operator; its score, mask and bias must be encodable."""
    tensors: list[Tensor] = []
    numbers: list[int] = [call.sizes.flat_batch, 1 if call.sizes.heads is None else call.sizes.heads]
    parts = [encode_part(getattr(call, name), tensors, numbers) for name in ENCODED_FIELDS]
    return EncodedCall(call.q, call.k, tensors, numbers, f"({','.join(parts)})")


def encode_part(part: Any, tensors: list[Tensor], numbers: list[int]) -> str:
    """The text of a part; its tensors and integers are added to the lists."""
    if isinstance(part, Tensor):
        tensors.append(part)
        return f"t{len(tensors) - 1}"
    if part is None or isinstance(part, bool | float | str):
        return repr(part)
    if isinstance(part, int | torch.SymInt):
        # Not in the text, because a compiler may not know its value.
        numbers.append(part)  # type: ignore[arg-type]
        return f"n{len(numbers) - 1}"
    if isinstance(part, tuple):
        return f"({','.join([encode_part(item, tensors, numbers) for item in part])},)"
    fields = [encode_part(getattr(part, name), tensors, numbers) for name in part.__dataclass_fields__]
    return f"{type(part).__name__}({','.join(fields)})"


def decode_call(encoded: EncodedCall) -> Call:
    """The call that `encode_call` encoded, without its values."""
    q, k, tensors, numbers, text = encoded
    parts = [build(tensors, numbers) for build in parse_text(text)]
    sizes = CallSizes((numbers[0],), numbers[1], q.shape[2], k.shape[2], q.device)
    return Call(q, k, k, sizes, **dict(zip(ENCODED_FIELDS, parts, strict=True)))


@lru_cache(maxsize=256)
def parse_text(text: str) -> list[Builder]:
    """Functions that build the fields of the text; the text itself is never run as code."""
    node = ast.parse(text, mode="eval").body
    if not isinstance(node, ast.Tuple) or len(node.elts) != len(ENCODED_FIELDS):
        raise ValueError(f"text must be an encoded call of {len(ENCODED_FIELDS)} fields, got {text!r}")
    return [make_builder(part) for part in node.elts]


def make_builder(node: ast.expr) -> Builder:
    """A function that builds a number, tensor, score, mask or bias; one that needs no argument is built only once."""
    match node:
        case ast.Name(id=name) if PLACEHOLDER.fullmatch(name):
            place, index = "tn".index(name[0]), int(name[1:])
            return lambda *arguments: arguments[place][index]
        case ast.Tuple(elts=items):
            kind: Any = collect_items
        case ast.Call(func=ast.Name(id=name), args=items, keywords=[]) if name in SAVED_CLASSES:
            kind = SAVED_CLASSES[name]
        case _:
            value = ast.literal_eval(node)
            return lambda tensors, numbers: value
    builders = [make_builder(item) for item in items]
    if not any(isinstance(each, ast.Name) and PLACEHOLDER.fullmatch(each.id) for each in ast.walk(node)):
        whole = kind(*(build([], []) for build in builders))
        return lambda tensors, numbers: whole
    return lambda tensors, numbers: kind(*[build(tensors, numbers) for build in builders])


def collect_items(*items: Any) -> tuple[Any, ...]:
    return items

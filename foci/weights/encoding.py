"""A call as plain arguments: tensors, integers and a text, which is what an operator of PyTorch takes.

The text names the scores, masks and biases; `t0` and `n0` in it are the first tensor and the first integer:

    (Dot(None,None),Intersection(Causal(None),Padding(t0,'right',n2)),None,None,None,None,None)
"""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.arguments import Call
from foci.masks.tile import CallSizes
from foci.weights.parts_file import SAVED_CLASSES

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
    names: dict[str, Any] = {f"t{index}": tensor for index, tensor in enumerate(tensors)}
    names |= {f"n{index}": number for index, number in enumerate(numbers)}
    parts = [decode_part(node, names) for node in parse_text(text)]
    sizes = CallSizes((numbers[0],), numbers[1], q.shape[2], k.shape[2], q.device)
    return Call(q, k, k, sizes, **dict(zip(ENCODED_FIELDS, parts, strict=True)))


@lru_cache(maxsize=256)
def parse_text(text: str) -> list[ast.expr]:
    """The fields of the text as syntax trees, which are never run as code."""
    node = ast.parse(text, mode="eval").body
    if not isinstance(node, ast.Tuple) or len(node.elts) != len(ENCODED_FIELDS):
        raise ValueError(f"text must be an encoded call of {len(ENCODED_FIELDS)} fields, got {text!r}")
    return node.elts


def decode_part(node: ast.expr, names: dict[str, Any]) -> Any:
    """A number, a tensor, or a score, mask or bias."""
    match node:
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Tuple(elts=items):
            return tuple(decode_part(item, names) for item in items)
        case ast.Call(func=ast.Name(id=kind), args=fields, keywords=[]) if kind in SAVED_CLASSES:
            return SAVED_CLASSES[kind](*(decode_part(field, names) for field in fields))
    return ast.literal_eval(node)

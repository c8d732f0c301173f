"""What a lazy matrix holds: references, not copies, watched for changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foci.arguments import Call


class Held:
    """The tensors behind a `Weights`: says what they weigh, and refuses to go on when one of them was changed."""

    def __init__(self, call: Call, lse: Tensor) -> None:
        if call.q.is_inference() or call.k.is_inference():
            # Inference tensors have no version, so a later change could not be seen: keep copies.
            call = replace(call, q=call.q.clone(), k=call.k.clone())
            call.v = call.k
        self.call, self.lse = call, lse
        self._marks = [(name, tensor, mark(tensor)) for name, tensor in tensors_of(call, lse)]

    def check(self) -> None:
        for name, tensor, was in self._marks:
            if tensor.untyped_storage().size() == 0 and tensor.numel():
                raise RuntimeError(f"the weights cannot be computed any more: {name} was freed since the call")
            if mark(tensor) != was:
                raise RuntimeError(
                    f"the weights cannot be computed any more: {name} was changed or moved in place since the call"
                    " (pass a clone to the call, or ask before changing it)"
                )

    @property
    def nbytes(self) -> int:
        sizes = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for _, tensor, _ in self._marks}
        return sum(sizes.values())


def mark(tensor: Tensor) -> tuple[int, int, torch.Size]:
    """Changes when the tensor's content, place or shape does."""
    return -1 if tensor.is_inference() else tensor._version, tensor.data_ptr(), tensor.shape


def tensors_of(call: Call, lse: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield from (("the query", call.q), ("the key", call.k), ("the log-sum-exp", lse))
    for name, made_of in (("score", call.score), ("mask", call.mask), ("bias", call.bias), ("positions", call.positions)):
        for tensor in nested(made_of):
            yield f"a tensor of the {name}", tensor
    if call.sink is not None:
        yield "the sink", call.sink


def nested(thing: Any) -> Iterator[Tensor]:
    """The tensors inside a score, a mask or a bias."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, tuple):
        for item in thing:
            yield from nested(item)
    elif is_dataclass(thing):
        for field in fields(thing):
            yield from nested(getattr(thing, field.name))

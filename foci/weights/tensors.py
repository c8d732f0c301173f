"""What a lazy matrix holds: references, not copies, watched for changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from foci.arguments import Call
from foci.biases import Relative
from foci.masks.kinds import Causal, Window
from foci.runtime.safetensors_file import map_tensors
from foci.runtime.tracing import is_traced
from foci.scores import Dot

# What makes the matrix, by its name in the call. The values are no part of it, nor are dropout and Shaw's value term.
MATRIX_FIELDS = ("q", "k", "score", "mask", "bias", "sink", "positions", "batch_ids", "head_ids")

# What has no tensors inside: most scores and masks, and most of what the others are made of.
TENSORLESS_TYPES = {type(None), bool, int, float, str, Dot, Causal, Window}


class TrackedTensors:
    """The tensors behind a `Weights`: says what they weigh, and refuses to go on when one of them was changed."""

    def __init__(self, call: Call, lse: Tensor) -> None:
        self.call, self.lse = call, lse
        # A compiler keeps its own account of changes; fake tensors and those inside torch.func have no memory to watch.
        watched = [] if is_traced(lse) or call.is_transformed else name_tensors(call, lse)
        self._marks = [(name, tensor, fingerprint(tensor)) for name, tensor in watched]

    def __getstate__(self) -> tuple[Call, Tensor]:
        """Copies, pickled ones too, have tensors of their own, without a graph, and are watched from then on; what
        cannot be computed any more is not copied.
        """
        self.check()
        own = map_tensors(select_matrix_fields(self.call), lambda tensor: tensor.detach().clone())
        return replace(self.call, **own, v=own["k"]), self.lse.detach().clone()

    def __setstate__(self, state: tuple[Call, Tensor]) -> None:
        TrackedTensors.__init__(self, *state)

    def check(self) -> None:
        for name, tensor, was in self._marks:
            if fingerprint(tensor) != was:
                # What is freed lies nowhere, so that its address is another one, too.
                if tensor.untyped_storage().nbytes() == 0 and tensor.numel():
                    raise RuntimeError(f"the weights cannot be computed any more: {name} was freed since the call")
                raise RuntimeError(
                    f"the weights cannot be computed any more: {name} was changed or moved in place since the call"
                    " (pass a clone to the call, or ask before changing it)"
                )

    def fingerprint_of(self, tensor: Tensor) -> tuple[Any, ...]:
        """The mark of one of the tensors when the weights were made."""
        return next(was for _, held, was in self._marks if held is tensor)

    @property
    def nbytes(self) -> int:
        """Tensors that begin at one place in memory are counted once."""
        bytes_by_address: dict[int, int] = {}
        for _, tensor in name_tensors(self.call, self.lse):
            bytes_by_address[memory_address(tensor)] = max(
                count_bytes(tensor), bytes_by_address.get(memory_address(tensor), 0)
            )
        return sum(bytes_by_address.values())


def drop_values(call: Call) -> Call:
    """The part of a call that makes its matrix, so that the values are not kept alive.

    Tensors of inference mode have no version, so a later change to them could not be seen: they are copied.
    """
    bias = Relative(call.bias.keys) if isinstance(call.bias, Relative) else call.bias
    # What `dataclasses.replace` does, without looking at each field.
    call = Call(
        call.q, call.k, call.k, call.sizes, call.score, call.mask, bias, call.sink, call.positions,
        needs_lse=call.needs_lse, batch_ids=call.batch_ids, head_ids=call.head_ids,
    )  # fmt: skip
    if torch.compiler.is_compiling() or not any(
        tensor.is_inference() for tensor in find_tensors(select_matrix_fields(call))
    ):
        return call
    own = map_tensors(
        select_matrix_fields(call), lambda tensor: tensor.clone() if is_inference_tensor(tensor) else tensor
    )
    return replace(call, **own, v=own["k"])


def select_matrix_fields(call: Call) -> dict[str, Any]:
    """What makes the matrix, by name."""
    return {name: getattr(call, name) for name in MATRIX_FIELDS}


def fingerprint(tensor: Tensor) -> tuple[Any, ...]:
    """Changes when the tensor's content, place or shape does."""
    version = -1 if is_inference_tensor(tensor) else tensor._version
    return version, memory_address(tensor), tensor.shape, tensor.stride()


def is_inference_tensor(tensor: Tensor) -> bool:
    """Whether changes to it leave no trace."""
    return not torch.compiler.is_compiling() and tensor.is_inference()


def memory_address(tensor: Tensor) -> int:
    """Where it lies; what lies nowhere (a fake tensor, one inside torch.func) has a number of its own."""
    if isinstance(tensor, FakeTensor):
        return id(tensor)
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return id(tensor)


def count_bytes(tensor: Tensor) -> int:
    """The bytes that it reads; an expanded axis repeats the same ones."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride or not length else 1
    return size


def name_tensors(call: Call, lse: Tensor) -> list[tuple[str, Tensor]]:
    found = [("the query", call.q), ("the key", call.k), ("the log-sum-exp", lse)]
    parts = {"score": call.score, "mask": call.mask, "bias": call.bias, "positions": call.positions}
    for name, part in parts.items():
        if type(part) not in TENSORLESS_TYPES:
            found += [(f"a tensor of the {name}", tensor) for tensor in find_tensors(part)]
    return found if call.sink is None else [*found, ("the sink", call.sink)]


def find_tensors(thing: Any) -> list[Tensor]:
    """The tensors inside a score, a mask or a bias."""
    if type(thing) in TENSORLESS_TYPES:
        return []
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, tuple):
        parts: Iterable[Any] = thing
    elif isinstance(thing, dict):
        parts = thing.values()
    else:
        # What `dataclasses.fields` reads, without its checks: every call with weights asks several times.
        parts = [getattr(thing, name) for name in getattr(thing, "__dataclass_fields__", ())]
    return [tensor for part in parts if type(part) not in TENSORLESS_TYPES for tensor in find_tensors(part)]

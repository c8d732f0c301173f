"""The tensors behind `Weights`: references, not copies, and the detection of in-place changes."""

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
from foci.runtime.tracing import is_traced
from foci.scores import Dot
from foci.weights.parts_file import map_tensors

# The fields of a call that determine its matrix: not the values, dropout or Shaw's value term.
MATRIX_FIELDS = ("q", "k", "score", "mask", "bias", "sink", "positions", "batch_ids", "head_ids")

# Types without tensors: most scores and masks, and most of their fields.
TENSORLESS_TYPES = {type(None), bool, int, float, str, Dot, Causal, Window}


class TrackedTensors:
    """The tensors behind a `Weights`: counts their bytes and raises if one of them was changed since the call."""

    def __init__(self, call: Call, lse: Tensor, is_plain: bool = False) -> None:
        """`is_plain`: neither traced nor inside torch.func, and without tensors in score, mask or bias."""
        self.call, self.lse = call, lse
        if is_plain:
            tracked = [("the query", call.q), ("the key", call.k), ("the log-sum-exp", lse)]
        else:
            # A compiler tracks changes itself; fake tensors and those inside torch.func have no memory to check.
            tracked = [] if is_traced(lse) or call.is_transformed else name_tensors(call, lse)
        self._fingerprints = [(name, tensor, read_fingerprint(tensor)) for name, tensor in tracked]

    def __getstate__(self) -> tuple[Call, Tensor]:
        """Copied and pickled weights get their own tensors without a graph; raises if a tensor was changed."""
        self.check()
        copies = map_tensors(select_matrix_fields(self.call), lambda tensor: tensor.detach().clone())
        return replace(self.call, **copies, v=copies["k"]), self.lse.detach().clone()

    def __setstate__(self, state: tuple[Call, Tensor]) -> None:
        TrackedTensors.__init__(self, *state)

    def check(self) -> None:
        """Raises RuntimeError if a tensor was changed, moved or freed since the call."""
        read = fingerprint if torch.compiler.is_compiling() else read_fingerprint
        for name, tensor, original in self._fingerprints:
            if read(tensor) != original:
                # A freed tensor has no address, so its fingerprint differs, too.
                if tensor.untyped_storage().nbytes() == 0 and tensor.numel():
                    raise RuntimeError(f"the weights can no longer be computed: {name} was freed since the call")
                raise RuntimeError(
                    f"the weights can no longer be computed: {name} was changed in place or moved since the call"
                    " (pass a clone to the call, or read the weights before changing it)"
                )

    def set_fingerprint(self, tensor: Tensor, original: tuple[Any, ...]) -> None:
        """Replaces the fingerprint of a tensor by an earlier one, that of the call."""
        self._fingerprints = [(n, each, original if each is tensor else known) for n, each, known in self._fingerprints]

    def is_changed(self) -> bool:
        """Whether a tensor was changed, moved or freed since the call."""
        return any(fingerprint(tensor) != original for _, tensor, original in self._fingerprints)

    def fingerprint_of(self, tensor: Tensor) -> tuple[Any, ...]:
        """The fingerprint of one of the tensors when the weights were made."""
        return next(original for _, tracked, original in self._fingerprints if tracked is tensor)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors; tensors that start at the same address are counted once."""
        bytes_by_address: dict[int, int] = {}
        for _, tensor in name_tensors(self.call, self.lse):
            bytes_by_address[memory_address(tensor)] = max(
                count_bytes(tensor), bytes_by_address.get(memory_address(tensor), 0)
            )
        return sum(bytes_by_address.values())


def drop_values(call: Call) -> Call:
    """The call without its values, so that these are not kept alive.

    Inference tensors have no version counter, so that changes to them cannot be detected: they are copied.
    """
    bias = Relative(call.bias.keys) if isinstance(call.bias, Relative) else call.bias
    # Faster than `dataclasses.replace`, which inspects each field.
    call = Call(
        call.q, call.k, call.k, call.sizes, call.score, call.mask, bias, call.sink, call.positions,
        needs_lse=call.needs_lse, batch_ids=call.batch_ids, head_ids=call.head_ids,
    )  # fmt: skip
    if torch.compiler.is_compiling() or not any(
        tensor.is_inference() for tensor in find_tensors(select_matrix_fields(call))
    ):
        return call
    copies = map_tensors(
        select_matrix_fields(call), lambda tensor: tensor.clone() if is_inference_tensor(tensor) else tensor
    )
    return replace(call, **copies, v=copies["k"])


def select_matrix_fields(call: Call) -> dict[str, Any]:
    """The fields of a call that determine its matrix, by name."""
    return {name: getattr(call, name) for name in MATRIX_FIELDS}


def fingerprint(tensor: Tensor) -> tuple[Any, ...]:
    """Version, address, shape and strides: changes when the content, address or shape of the tensor changes."""
    version = -1 if is_inference_tensor(tensor) else tensor._version
    return version, memory_address(tensor), tensor.shape, tensor.stride()


def read_fingerprint(tensor: Tensor) -> tuple[Any, ...]:
    """The same outside a compiler, in fewer calls."""
    try:
        address = tensor.data_ptr() if type(tensor) is Tensor else memory_address(tensor)
    except RuntimeError:
        # Inside torch.func it has none.
        address = id(tensor)
    return -1 if tensor.is_inference() else tensor._version, address, tensor.shape, tensor.stride()


def is_inference_tensor(tensor: Tensor) -> bool:
    """Whether it is an inference tensor, whose changes cannot be detected."""
    return not torch.compiler.is_compiling() and tensor.is_inference()


def copy_if_inference(lse: Tensor) -> Tensor:
    """The tensor for a caller; a copy in inference mode, where a change to it could not be detected."""
    return lse.clone() if is_inference_tensor(lse) else lse


def memory_address(tensor: Tensor) -> int:
    """The address of the tensor; its id if it has no memory (a fake tensor, or one inside torch.func)."""
    if isinstance(tensor, FakeTensor):
        return id(tensor)
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return id(tensor)


def count_bytes(tensor: Tensor) -> int:
    """Bytes of memory that the tensor covers; an expanded axis covers none."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride or not length else 1
    return size


def name_tensors(call: Call, lse: Tensor) -> list[tuple[str, Tensor]]:
    """The tensors that determine the matrix, with their names for error messages."""
    named = [("the query", call.q), ("the key", call.k), ("the log-sum-exp", lse)]
    parts = (("score", call.score), ("mask", call.mask), ("bias", call.bias), ("positions", call.positions))
    for name, part in parts:
        if type(part) not in TENSORLESS_TYPES:
            named += [(f"a tensor of the {name}", tensor) for tensor in find_tensors(part)]
    return named if call.sink is None else [*named, ("the sink", call.sink)]


def find_tensors(thing: Any) -> list[Tensor]:
    """The tensors inside a score, mask or bias."""
    if type(thing) in TENSORLESS_TYPES:
        return []
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, tuple):
        parts: Iterable[Any] = thing
    elif isinstance(thing, dict):
        parts = thing.values()
    else:
        # The attribute behind `dataclasses.fields`, without its checks: every call with weights reads it several times.
        parts = [getattr(thing, name) for name in getattr(thing, "__dataclass_fields__", ())]
    return [tensor for part in parts if type(part) not in TENSORLESS_TYPES for tensor in find_tensors(part)]

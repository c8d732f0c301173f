"""Tells cross-attention from self-attention by the inputs of the attention module.

Module names tell it for many models ("encoder_attn"). For the others, hooks note which tensors a module is given: in
cross-attention the keys are made from another tensor than the queries. Lengths alone never decide: the keys of cached
decoding are longer than its queries, and both come from one tensor.

Tq queries, Tk keys.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from foci.capture.hooks import hook_module
from foci.runtime.tracing import is_inside_torch_func

if TYPE_CHECKING:
    from foci.capture.naming import LayerNames
    from foci.capture.recorder import Recorder

# Parameters of a forward method that hold no sequence to attend to.
OTHER_PARAMETERS = re.compile(
    r"mask|bias|pos|rotary|rope|freq|^cos$|^sin$|cache|past|_ids$|^temb$|time|scale|label|^(use|output|return|need|is)_"
)
KEY_PARAMETER = re.compile(r"k|keys?", re.IGNORECASE)
# Cached results of `sequence_parameters_of`.
SEQUENCE_PARAMETERS: dict[type[nn.Module], dict[str, int]] = {}
PROJECTIONS = (nn.Linear, nn.Conv1d, nn.Conv2d)


class Input(NamedTuple):
    """A tensor that a module was given: its parameter, address and shape, but not the tensor itself."""

    parameter: str
    address: int
    shape: tuple[int, ...]

    @property
    def lengths(self) -> set[int]:
        return find_lengths(self.shape)


# Where a module was given one sequence, nothing else of it matters.
ONE_INPUT = [Input("", 0, (0, 0))]


class LeafCall(NamedTuple):
    """A call of a leaf module inside an attention module; `width` of its output, 0 if it is not a projection."""

    address: int
    result: int
    width: int


class ModuleInputs:
    """The tensors that the running modules were given, by module name."""

    def __init__(self) -> None:
        self._inputs: dict[str, list[Input]] = {}
        self._leaf_calls: dict[str, list[LeafCall]] = {}
        # Whether the key tensor of a module is another one than its query tensor, compared once by value.
        self._has_other_keys: dict[str, bool] = {}

    def note(
        self,
        name: str,
        parameters: dict[str, int],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        block: ExitStack,
        recorder: Recorder,
    ) -> None:
        """Notes the inputs of a module with parameters for several sequences, which starts on this block's thread."""
        tensors, given = {}, len(args)
        for parameter, index in parameters.items():
            value = args[index] if index < given else kwargs.get(parameter)
            if value is not None and isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1:
                tensors[parameter] = value
        if len(tensors) < 2:
            self._inputs[name] = ONE_INPUT if tensors else []
            return
        self._inputs[name] = [Input(each, address_of(tensors[each]), tuple(tensors[each].shape)) for each in tensors]
        if any(KEY_PARAMETER.fullmatch(each) for each in parameters):
            self._compare_keys(name, tensors)
        if has_same_length(self._inputs[name]):
            if name not in self._leaf_calls:
                self._watch_leaves(name, module, block, recorder)
            self._leaf_calls[name] = []

    def _compare_keys(self, name: str, tensors: dict[str, Tensor]) -> None:
        query = next(iter(tensors.values()), None)
        key = next((tensors[each] for each in tensors if KEY_PARAMETER.fullmatch(each)), None)
        if query is not None and key is not None and key is not query and name not in self._has_other_keys:
            self._has_other_keys[name] = not ends_with(key, query)

    def _watch_leaves(self, name: str, module: nn.Module, block: ExitStack, recorder: Recorder) -> None:
        """Notes the calls of leaf modules: what the projections read tells two sequences of one length apart."""

        def note_call(leaf: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            if args and isinstance(args[0], Tensor) and isinstance(out, Tensor) and not recorder.repeats_pass:
                width = out.shape[-1 if isinstance(leaf, nn.Linear) else 1] if isinstance(leaf, PROJECTIONS) else 0
                self._leaf_calls[name].append(LeafCall(address_of(args[0]), address_of(out), width))

        for leaf in module.modules():
            if not leaf._modules:
                hook_module(block, recorder, leaf, note_call, before=False)

    def tell_plain(self, name: str) -> tuple[bool, bool | None]:
        """What `tell_cross` returns for a call of a module, if that is known without its tensors, and whether it is."""
        inputs = self._inputs.get(name)
        if not inputs:
            return True, None
        if inputs is ONE_INPUT:
            return True, False
        return len({each.address for each in inputs}) == 1, False

    def tell_cross(self, running: Iterable[str], q: Tensor, k: Tensor, v: Tensor) -> bool | None:
        """Whether the keys of a call are made from another tensor than its queries; None if the inputs do not tell.

        `running` are the names of the running modules, innermost first. False: the module was given one sequence only.
        """
        for name in running if self._inputs else ():
            inputs = self._inputs.get(name)
            if not inputs:
                return None
            if len({each.address for each in inputs}) == 1:
                return False
            key = next((each for each in inputs if KEY_PARAMETER.fullmatch(each.parameter)), None)
            addresses = {each.address for each in inputs}
            if address_of(q) in addresses and address_of(k) in addresses:
                # Given as they are. If keys and values differ, an enclosing module has made all three.
                if address_of(k) == address_of(v):
                    return address_of(q) != address_of(k)
                continue
            if key is not None:
                if address_of(q) in addresses and is_cached_copy(k, key.shape):
                    # Given as they are, too, and appended to a cache.
                    continue
                return key.address != inputs[0].address and self._has_other_keys.get(name, True)
            return self._has_context(name, inputs, q, k) or None
        return None

    def _has_context(self, name: str, inputs: Sequence[Input], q: Tensor, k: Tensor) -> bool:
        """Whether one input is the queries' sequence and another one the keys'."""
        queries, keys = q.shape[-2], k.shape[-2]
        pairs = [(a, b) for a in inputs for b in inputs if a.address != b.address]
        pairs = [(a, b) for a, b in pairs if queries in a.lengths and keys in b.lengths]
        if queries != keys:
            return bool(pairs)
        width = q.numel() // max(1, inputs[0].shape[0] * queries)
        return any(is_read_as_context(self._leaf_calls.get(name, ()), a, b, width) for a, b in pairs)


def is_cached_copy(k: Tensor, given: tuple[int, ...]) -> bool:
    """Whether the keys may be the given ones, whose heads are split already, and those of earlier calls."""
    return len(given) == 4 and (*k.shape[:-2], k.shape[-1]) == (*given[:-2], given[-1]) and k.shape[-2] >= given[-2]


def find_sequence_parameters(names: LayerNames) -> dict[str, dict[str, int]]:
    """The modules that may be given a second sequence, by name, with the parameters that may hold one."""
    if names.layout.sequence_parameters is None:
        names.layout.sequence_parameters = inspect_modules(names)
    return names.layout.sequence_parameters


def inspect_modules(names: LayerNames) -> dict[str, dict[str, int]]:
    related = find_related_modules(names.attention_modules)
    found = {
        name: sequence_parameters_of(type(module))
        for name, module in names.modules.items()
        if not isinstance(module, torch.jit.ScriptModule) and is_related(name, related)
    }
    return {name: parameters for name, parameters in found.items() if len(parameters) > 1}


def find_related_modules(attention_modules: Iterable[str]) -> dict[str, bool]:
    """The attention modules and the modules around them, by name; True for an attention module itself."""
    related: dict[str, bool] = {}
    for name in attention_modules:
        parts = name.split(".")
        related |= {".".join(parts[:end]): False for end in range(len(parts))} | {name: True}
    return related


def is_related(name: str, related: dict[str, bool]) -> bool:
    """Whether a module is, contains or is inside an attention module; any module if no class name says attention."""
    parts = name.split(".")
    return not related or name in related or any(related.get(".".join(parts[:end])) for end in range(1, len(parts)))


def sequence_parameters_of(module_class: type[nn.Module]) -> dict[str, int]:
    """The parameters of forward that may hold a sequence, with their index."""
    if module_class not in SEQUENCE_PARAMETERS:
        SEQUENCE_PARAMETERS[module_class] = inspect_sequence_parameters(module_class)
    return SEQUENCE_PARAMETERS[module_class]


def inspect_sequence_parameters(module_class: type[nn.Module]) -> dict[str, int]:
    try:
        parameters = list(inspect.signature(module_class.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return {}
    return {
        each.name: index
        for index, each in enumerate(parameters)
        if each.kind is each.POSITIONAL_OR_KEYWORD and not OTHER_PARAMETERS.search(each.name)
    }


def address_of(tensor: Tensor) -> int:
    """The address of a tensor's memory; tensors without memory (meta, transforms) have that of the object."""
    try:
        return tensor.data_ptr() or id(tensor)
    except RuntimeError:
        return id(tensor)


def has_same_length(inputs: Sequence[Input]) -> bool:
    """Whether another input may be as long as the first."""
    first = inputs[0]
    return any(may_share_length(first.shape, each.shape) for each in inputs[1:] if each.address != first.address)


@lru_cache(1024)
def may_share_length(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return bool(find_lengths(shape) & find_lengths(other))


def find_lengths(shape: tuple[int, ...]) -> set[int]:
    """The sequence lengths that a tensor may have: (..., T, D), and for images (B, D, h, w) or (B, h, w, D)."""
    is_image = len(shape) == 4
    return {shape[-2]} | ({math.prod(shape[2:]), math.prod(shape[1:3])} if is_image else set())


def ends_with(key: Tensor, query: Tensor) -> bool:
    """Whether the keys end with the queries: the same values computed twice, or a cache of earlier inputs."""
    if key.is_meta or is_inside_torch_func() or key.dim() != query.dim() or key.dtype != query.dtype:
        return False
    different = [axis for axis in range(key.dim()) if key.shape[axis] != query.shape[axis]]
    if len(different) > 1:
        return False
    for axis in different:
        start = key.shape[axis] - query.shape[axis]
        if start < 0:
            return False
        key = key.narrow(axis, start, query.shape[axis])
    return torch.equal(key, query)


def is_read_as_context(calls: Sequence[LeafCall], sequence: Input, context: Input, width: int) -> bool:
    """Whether projections read `context`, and no more than the queries, of this width, is projected from `sequence`.

    In self-attention with a second input, such as positions, keys and values are projected from `sequence` too.
    """
    own, other = projected_width(calls, sequence.address), projected_width(calls, context.address)
    return 0 < own <= width and other > 0


def projected_width(calls: Sequence[LeafCall], address: int) -> int:
    """The total width that is projected from a tensor, directly or after a norm."""
    derived, total = {address}, 0
    for call in calls:
        if call.address in derived:
            total += call.width
            if not call.width:
                derived.add(call.result)
    return total

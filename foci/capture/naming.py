"""Names attention modules: their stack, their number in it, and the labels along queries and keys.

Names are derived from the module names that `model.named_modules()` gives. Adapters that know the model better replace
them with `Recorder.name_layers`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from foci.record.layer import format_layer_name
from foci.runtime.tensor_cache import MAX_CACHED_TENSORS, get_or_make

# Class names of attention modules.
ATTENTION_CLASS = re.compile(r"attn|attention", re.IGNORECASE)
# Module or class names of cross-attention.
CROSS_ATTENTION = re.compile(
    r"cross|enc_?dec|encoder_attn|encoder_attention|encoder_decoder|src_attn|align", re.IGNORECASE
)
# Names of embeddings that look up something other than tokens.
NON_TOKEN_EMBEDDINGS = re.compile(r"pos|type|segment|lang|time|relative|bucket|bias", re.IGNORECASE)
MODALITIES = {
    "vision": re.compile(r"vision|visual|image"),
    "audio": re.compile(r"audio|speech"),
    "text": re.compile(r"text|language"),
}


@dataclass(frozen=True)
class LayerName:
    """A stack ("" if there is only one), a number in it, and the names of the labels along queries and keys."""

    stack: str = ""
    index: int = 0
    queries: str = "input"
    keys: str = "input"

    @property
    def is_cross(self) -> bool:
        """Whether it attends to another sequence than that of its queries."""
        return self.queries != self.keys

    @property
    def short(self) -> str:
        """The short name of the layer: L5, cross.L5."""
        return format_layer_name(self.stack, self.index)


def find_attention_modules(class_names: Mapping[str, str]) -> list[str]:
    """The innermost modules whose class name says attention."""
    names = [name for name, class_name in class_names.items() if ATTENTION_CLASS.search(class_name)]
    return [name for name in names if not any(is_inside(other, name) for other in names)]


def class_name_of(module: nn.Module) -> str:
    """The name of a module's class; a scripted module holds the name of its original class."""
    return str(module.original_name) if isinstance(module, torch.jit.ScriptModule) else type(module).__name__


def outer_names(name: str) -> Iterator[str]:
    """The name of a module, and those of the modules around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def strip_compile_wrapper(name: str) -> str:
    """A module's name without the `_orig_mod` parts that torch.compile adds."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod") if "_orig_mod" in name else name


def is_inside(name: str, outer: str) -> bool:
    """Whether a module is a descendant of another one, by their names."""
    return name != outer and (outer == "" or name.startswith(f"{outer}."))


def never_attends(module: nn.Module) -> bool:
    """Whether a module is a leaf of torch.nn such as Linear or Dropout, which never attends."""
    if module._modules or isinstance(module, (nn.MultiheadAttention, nn.Embedding)):
        return False
    return type(module).__module__.startswith("torch.nn.modules.")


class HookedModule(NamedTuple):
    """A module with a hook before each run, and what the hook reports.

    has_forward: whether its class can be called, which nn.ModuleList cannot; is_outer: that it starts and ends, because
    it may be the outermost one of a pass; is_attention: that it runs; is_embedding: the token ids; parameters: those
    that may hold a sequence, with their index.
    """

    name: str
    has_forward: bool
    is_outer: bool
    is_attention: bool
    is_embedding: bool
    parameters: dict[str, int]


class ModelLayout:
    """What module names and classes tell about a model: its attention modules, their layer names, where passes begin.

    Args:
        modules: by module name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        class_names = {name: class_name_of(module) for name, module in modules.items()}
        # The modules whose attention calls are recorded.
        self.recorded = [
            name
            for name, module in modules.items()
            if not isinstance(module, torch.jit.ScriptModule) and not never_attends(module)
        ]
        self.token_embeddings = [
            name
            for name, module in modules.items()
            if isinstance(module, nn.Embedding) and not NON_TOKEN_EMBEDDINGS.search(name.rpartition(".")[2])
        ]
        self._outer_modules: dict[tuple[str, ...], frozenset[str]] = {}
        self._hooked_modules: dict[tuple[str, ...], list[HookedModule]] = {}
        self.containers = {
            name
            for name, each in modules.items()
            if not isinstance(each, torch.jit.ScriptModule) and type(each).forward is nn.Module.forward
        }
        self.convolutions = [name for name, module in modules.items() if isinstance(module, nn.Conv2d)]
        # What other modules of foci find out about the modules, once.
        self.windowed_modules: list[str] | None = None
        self.vision_models: list[str] | None = None
        self.transformers_modules: tuple[list[str], list[str], tuple[str, ...]] | None = None
        self.sequence_parameters: dict[str, dict[str, int]] | None = None
        # By what configs and modules say, the layer names of transformers models.
        self.transformers_layers: dict[Hashable, dict[str, LayerName]] = {}
        self.attention_modules = dict.fromkeys(find_attention_modules(class_names))
        self.cross_modules = {
            name for name in self.attention_modules if is_cross_attention(class_names, name, class_names[name])
        }
        self.is_encoder_decoder = has_component(class_names, "encoder") and has_component(class_names, "decoder")
        self.has_several_modalities = len({modality_of_name(name) for name in self.attention_modules}) > 1
        self.layer_names: dict[str, LayerName] = {}
        # Modules whose names do not number them: they are numbered again in the order of their calls.
        self.unnumbered: set[str] = set()
        for stack, members in group_by_stack((self.stack_of(name), name) for name in self.attention_modules):
            numbers = find_distinct_numbers(members)
            self.unnumbered.update(members if numbers is None else ())
            for name, index in zip(members, range(len(members)) if numbers is None else numbers, strict=True):
                self.layer_names[name] = self.build_layer_name(stack, index)

    def find_outer_modules(self, attention_modules: tuple[str, ...]) -> frozenset[str]:
        """The modules that may be the outermost one of a pass: those with several attention modules inside.

        Every module may be one if the class names do not tell where the model attends, or if it calls one attention
        module again and again.
        """
        if attention_modules not in self._outer_modules:
            counts = Counter(outer for name in attention_modules for outer in outer_names(name))
            least = 0 if not attention_modules else 1 if len(attention_modules) == 1 else 2
            outer = {name for name in self.recorded if counts[name] >= least}
            self._outer_modules[attention_modules] = frozenset(outer | ({""} & {*self.recorded}))
        return self._outer_modules[attention_modules]

    def find_hooked_modules(
        self, attention_modules: Collection[str], projecting: Collection[str] = ()
    ) -> list[HookedModule]:
        """The modules with a hook, those that may begin a pass first; `sequence_parameters` must be known.

        `projecting`: attention modules that make queries and keys themselves, so that the inputs of the modules around
        them tell nothing.
        """
        key = *attention_modules, "", *projecting
        if key not in self._hooked_modules:
            recorded = {*self.recorded}
            attending = dict.fromkeys(name for name in attention_modules if name in recorded)
            given = {
                name: parameters
                for name, parameters in (self.sequence_parameters or {}).items()
                if not contains_only(name, attending, projecting)
            }
            outer, embeddings = self.find_outer_modules(tuple(attending)), {*self.token_embeddings}
            self._hooked_modules[key] = [
                HookedModule(
                    name,
                    name not in self.containers,
                    name in outer,
                    name in attending,
                    name in embeddings,
                    given.get(name, {}),
                )
                for name in dict.fromkeys((*outer, *attending, *self.token_embeddings, *given))
            ]
        return self._hooked_modules[key]

    def stack_of(self, name: str) -> str:
        if name in self.cross_modules or (
            name not in self.attention_modules and CROSS_ATTENTION.search(name_within_block(name))
        ):
            return "cross"
        return self.self_attention_stack_of(name)

    def self_attention_stack_of(self, name: str) -> str:
        modality = modality_of_name(name)
        if self.has_several_modalities and modality:
            return modality
        for part in ("encoder", "decoder"):
            if self.is_encoder_decoder and has_component([name], part):
                return part
        return ""

    def build_layer_name(self, stack: str, index: int) -> LayerName:
        if stack == "cross":
            return LayerName(stack, index, "target" if self.is_encoder_decoder else "input", "source")
        sequence = {"encoder": "source", "decoder": "target", "": "input"}.get(stack, stack)
        return LayerName(stack, index, sequence, sequence)


def contains_only(outer: str, attention_modules: Iterable[str], names: Collection[str]) -> bool:
    """Whether a module contains attention modules, all of which are among some names."""
    inner = [name for name in attention_modules if is_inside(name, outer)]
    return bool(inner) and all(name in names for name in inner)


LAYOUT_CACHE: dict[Hashable, ModelLayout] = {}


def find_layout(modules: Mapping[str, nn.Module]) -> ModelLayout:
    """The layout of modules by name; models of the same names and classes share it."""
    scripted = [each.original_name for each in modules.values() if isinstance(each, torch.jit.ScriptModule)]
    key = tuple(modules), tuple(map(type, modules.values())), tuple(scripted)
    return get_or_make(LAYOUT_CACHE, MAX_CACHED_TENSORS, key, lambda: ModelLayout(modules))


class LayerNames:
    """The layer name of every attention module; modules whose class name does not say attention are named on first use.

    Args:
        modules: what `model.named_modules()` gives.
        layout: of these modules, whose names then have no `_orig_mod` parts.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], layout: ModelLayout | None = None) -> None:
        self.modules = dict(modules)
        if layout is None:
            self.modules = {strip_compile_wrapper(name): module for name, module in self.modules.items()}
            layout = find_layout(self.modules)
        self.layout = layout
        self.attention_modules = {name: self.modules[name] for name in self.layout.attention_modules}
        self.is_encoder_decoder = self.layout.is_encoder_decoder
        self.layer_names = dict(self.layout.layer_names)
        self._unnumbered = set(self.layout.unnumbered)
        self._names_before_calls: dict[str, LayerName] = {}
        # By stack, the modules in the order of their first calls.
        self._called: dict[str, list[str]] = {}
        self._fitted: dict[str, tuple[bool | None, str]] = {}

    def forget_modules(self) -> None:
        """Keeps the names only, so that the model can be freed."""
        nothing = nn.Module()
        self.modules, self.attention_modules = {}, dict.fromkeys(self.attention_modules, nothing)

    def set(self, layer_names: Mapping[str, LayerName]) -> None:
        """Sets layer names in place of those derived from the module names."""
        self.layer_names |= layer_names
        self._unnumbered.difference_update(layer_names)

    def of(self, name: str) -> LayerName:
        """The layer name of an attention module, by its module name."""
        if name not in self.layer_names:
            outer = self._attention_module_of(name)
            self.layer_names[name] = self._name_unknown_module(name) if outer is None else self.layer_names[outer]
        return self.layer_names[name]

    def _attention_module_of(self, name: str) -> str | None:
        """The attention module that is this module or contains it."""
        if name in self.attention_modules:
            return name
        return next((known for known in reversed(self.attention_modules) if is_inside(name, known)), None)

    def fit_to_call(self, name: str, is_cross: bool | None, context: str) -> None:
        """Fits a layer name to a call of its module: to its inputs, and to its place in the order of calls.

        Args:
            name: of the module.
            is_cross: whether the inputs show cross-attention or self-attention; None if they do not tell.
            context: the name of the keys' sequence in cross-attention that the module name does not tell.
        """
        if self._fitted.get(name) == (is_cross, context):
            return
        self._fitted[name] = is_cross, context
        before = self._names_before_calls.setdefault(name, self.of(name))
        layer_name, outer = before, self._attention_module_of(name)
        if is_cross and not before.is_cross:
            crossing = self.layout.build_layer_name("cross", before.index)
            is_plain = before.queries in {crossing.queries, "input"} and self.is_encoder_decoder
            # The only attention of a model needs no stack to be told apart.
            stack = "cross" if len(self.attention_modules) > 1 else before.stack
            layer_name = crossing if is_plain else LayerName(stack, before.index, before.queries, context)
        elif (
            is_cross is False
            and outer in self.layout.cross_modules
            and not is_named_cross(self.attention_modules, outer)
        ):
            layer_name = self.layout.build_layer_name(self.layout.self_attention_stack_of(name), before.index)
        if outer in self._unnumbered:
            called = self._called.setdefault(layer_name.stack, [])
            if outer not in called:
                called.append(outer)
            layer_name = replace(layer_name, index=called.index(outer))
        self.layer_names[name] = layer_name

    def is_only_one_of_stack(self, name: str) -> bool:
        """Whether a module is the only attention module of its stack."""
        stack = self.of(name).stack
        return sum(layer.stack == stack for layer in self.layer_names.values()) == 1

    def _name_unknown_module(self, name: str) -> LayerName:
        """Names a module by the first number in its path, or by the next free number."""
        stack = self.layout.stack_of(name)
        taken = {layer.index for layer in self.layer_names.values() if layer.stack == stack}
        in_path = [int(part) for part in name.split(".") if part.isdigit()]
        free = [number for number in (*in_path[:1], len(taken)) if number not in taken]
        return self.layout.build_layer_name(stack, free[0] if free else max(taken) + 1)


def is_cross_attention(names: Collection[str], name: str, class_name: str) -> bool:
    return bool(CROSS_ATTENTION.search(class_name)) or is_named_cross(names, name)


def is_named_cross(names: Collection[str], name: str) -> bool:
    """Whether the name of the module itself says cross-attention, not only that of its class."""
    if CROSS_ATTENTION.search(name_within_block(name)):
        return True
    # PyTorch's decoder layer has "self_attn" and names its cross-attention "multihead_attn".
    return name.endswith("multihead_attn") and name.removesuffix("multihead_attn") + "self_attn" in names


def name_within_block(name: str) -> str:
    """The part of a module name after its last number: the name within its block."""
    parts = name.split(".")
    last = max((index for index, part in enumerate(parts) if part.isdigit()), default=-1)
    return ".".join(parts[last + 1 :])


def modality_of_name(name: str) -> str:
    for part in name.lower().split("."):
        for modality, words in MODALITIES.items():
            if words.search(part):
                return modality
    return ""


def has_component(names: Iterable[str], part: str) -> bool:
    # Runs for every module of a model; the substring test settles most of them.
    return any(part in name.lower() and part in name.lower().split(".") for name in names)


def group_by_stack(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, list[str]]]:
    groups: dict[str, list[str]] = {}
    for stack, name in pairs:
        groups.setdefault(stack, []).append(name)
    yield from groups.items()


def find_distinct_numbers(names: list[str]) -> list[int] | None:
    """The first number in the module paths that differs for all modules; None if there is none."""
    paths = [[int(part) for part in name.split(".") if part.isdigit()] for name in names]
    for column in range(min(map(len, paths), default=0)):
        candidates = [path[column] for path in paths]
        if len(set(candidates)) == len(candidates):
            return candidates
    return None

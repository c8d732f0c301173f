"""Where a module's attention stands in its model: which stack, which number, and what its two axes are.

Everything here is read from the names of modules, as `model.named_modules()` gives them. Who knows better says so with
`Recorder.place`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from foci.runtime.tensor_cache import MAX_CACHED_TENSORS, get_or_make

# Classes that attend, by what people call them.
ATTENTION_CLASS = re.compile(r"attn|attention", re.IGNORECASE)
# Looks at another sequence than its own.
CROSS_ATTENTION = re.compile(
    r"cross|enc_?dec|encoder_attn|encoder_attention|encoder_decoder|src_attn|align", re.IGNORECASE
)
MODALITIES = {
    "vision": re.compile(r"vision|visual|image"),
    "audio": re.compile(r"audio|speech"),
    "text": re.compile(r"text|language"),
}


@dataclass(frozen=True)
class LayerName:
    """A stack ("" where there is only one), a number in it, and the labels along queries and keys."""

    stack: str = ""
    index: int = 0
    queries: str = "input"
    keys: str = "input"

    @property
    def cross(self) -> bool:
        """Whether it looks at another sequence than its own."""
        return self.queries != self.keys

    @property
    def name(self) -> str:
        """The short name of the layer: L5, cross.L5."""
        return f"{self.stack}.L{self.index}".lstrip(".")


def find_attention_modules(kinds: Mapping[str, str]) -> list[str]:
    """The innermost modules that are called attention: those that one expects to attend."""
    named = [name for name, kind in kinds.items() if ATTENTION_CLASS.search(kind)]
    return [name for name in named if not any(is_inside(other, name) for other in named)]


def class_name_of(module: nn.Module) -> str:
    """The name of a module's class; a scripted one tells it otherwise."""
    return str(module.original_name) if isinstance(module, torch.jit.ScriptModule) else type(module).__name__


def strip_compile_wrapper(name: str) -> str:
    """A module's name without what torch.compile puts into it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod") if "_orig_mod" in name else name


def is_inside(name: str, outer: str) -> bool:
    """Whether a module stands inside another one."""
    return name != outer and (outer == "" or name.startswith(f"{outer}."))


class ModelLayout:
    """What the names of a model's modules and of their classes tell.

    Args:
        kinds: the class names by module name.
    """

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self.known = dict.fromkeys(find_attention_modules(kinds))
        self.crossing = {name for name in self.known if is_cross_attention(kinds, name, kinds[name])}
        self.paired = has_component(kinds, "encoder") and has_component(kinds, "decoder")
        self.several = len({modality_of_name(name) for name in self.known}) > 1
        self.found: dict[str, LayerName] = {}
        for stack, members in group_by_stack((self.stack(name), name) for name in self.known):
            for name, index in zip(members, number_layers(members), strict=True):
                self.found[name] = self.made(stack, index)

    def stack(self, name: str) -> str:
        if name in self.crossing or (name not in self.known and CROSS_ATTENTION.search(name_within_block(name))):
            return "cross"
        side = modality_of_name(name)
        if self.several and side:
            return side
        for part in ("encoder", "decoder"):
            if self.paired and has_component([name], part):
                return part
        return ""

    def made(self, stack: str, index: int) -> LayerName:
        if stack == "cross":
            return LayerName(stack, index, "target" if self.paired else "input", "source")
        sequence = {"encoder": "source", "decoder": "target", "": "input"}.get(stack, stack)
        return LayerName(stack, index, sequence, sequence)


LAYOUT_CACHE: dict[Hashable, ModelLayout] = {}


class LayerNames:
    """The place of every module that attends: known ones from the start, others when they are first met.

    Args:
        modules: what `model.named_modules()` gives.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        by_name = {strip_compile_wrapper(name): module for name, module in modules}
        kinds = {name: class_name_of(module) for name, module in by_name.items()}
        # Many blocks are opened around one model.
        self.told = get_or_make(LAYOUT_CACHE, MAX_CACHED_TENSORS, tuple(kinds.items()), lambda: ModelLayout(kinds))
        self.known = {name: by_name[name] for name in self.told.known}
        self.paired = self.told.paired
        self.found = dict(self.told.found)

    def set(self, name: str, place: LayerName) -> None:
        self.found[name] = place

    def of(self, name: str) -> LayerName:
        """The place of a module that attends, by its name."""
        if name not in self.found:
            outer = [known for known in self.known if is_inside(name, known)]
            self.found[name] = self.found[outer[-1]] if outer else self._new(name)
        return self.found[name]

    def alone(self, name: str) -> bool:
        """Whether a module is the only one of its stack."""
        stack = self.of(name).stack
        return sum(place.stack == stack for place in self.found.values()) == 1

    def _new(self, name: str) -> LayerName:
        """A module whose class says nothing: the number in its path where that is free, else the next one."""
        stack = self.told.stack(name)
        taken = {place.index for place in self.found.values() if place.stack == stack}
        written = [int(part) for part in name.split(".") if part.isdigit()]
        free = [number for number in (*written[:1], len(taken)) if number not in taken]
        return self.told.made(stack, free[0] if free else max(taken) + 1)


def is_cross_attention(names: Collection[str], name: str, kind: str) -> bool:
    if CROSS_ATTENTION.search(name_within_block(name)) or CROSS_ATTENTION.search(kind):
        return True
    # PyTorch's decoder layer calls its attention to the memory "multihead_attn", beside "self_attn".
    return name.endswith("multihead_attn") and name.removesuffix("multihead_attn") + "self_attn" in names


def name_within_block(name: str) -> str:
    """What a path says after its last number: what a module is within its block."""
    parts = name.split(".")
    last = max((place for place, part in enumerate(parts) if part.isdigit()), default=-1)
    return ".".join(parts[last + 1 :])


def modality_of_name(name: str) -> str:
    for part in name.lower().split("."):
        for side, words in MODALITIES.items():
            if words.search(part):
                return side
    return ""


def has_component(names: Iterable[str], part: str) -> bool:
    # Asked of every module of a model: most are told by the first look.
    return any(part in name.lower() and part in name.lower().split(".") for name in names)


def group_by_stack(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, list[str]]]:
    groups: dict[str, list[str]] = {}
    for stack, name in pairs:
        groups.setdefault(stack, []).append(name)
    yield from groups.items()


def number_layers(names: list[str]) -> list[int]:
    """The first number of the paths that tells them all apart; where none does, they are counted."""
    paths = [[int(part) for part in name.split(".") if part.isdigit()] for name in names]
    for column in range(min(map(len, paths), default=0)):
        found = [path[column] for path in paths]
        if len(set(found)) == len(found):
            return found
    return list(range(len(names)))

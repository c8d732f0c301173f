"""ModelStructure: the modules of a model and their names, which are found once and checked at every later block."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, call
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from foci.capture.naming import find_layout, strip_compile_wrapper

STRUCTURES: WeakKeyDictionary[nn.Module, ModelStructure] = WeakKeyDictionary()

# Checks run in every block, and models have hundreds of modules: for a single one they call nothing in Python.
get_parts = attrgetter("_modules")


class ModelStructure:
    """The modules of a model by name, without keeping any of them alive.

    Args:
        named: what `model.named_modules()` gives.
    """

    def __init__(self, named: list[tuple[str, nn.Module]]) -> None:
        modules = [module for _, module in named]
        self.names = [name for name, _ in named]
        self._references = [*map(ref, modules)]
        self._classes = [*map(type, modules)]
        self._ids = [*map(id, modules)]
        self._counts = [len(module._modules) for module in modules]
        parts = [(part, child) for module in modules for part, child in module._modules.items()]
        self._parts = [part for part, _ in parts]
        self.has_compile_wrappers = "_orig_mod" in self._parts
        # That of None for a part that is not set.
        self._child_ids = [id(child) for _, child in parts]
        # Scripted modules keep their parts elsewhere.
        self._is_scripted = any(isinstance(module, torch.jit.ScriptModule) for module in modules)
        self.layer_names = [*map(strip_compile_wrapper, self.names)]
        by_name = dict(zip(self.layer_names, modules, strict=True))
        self.layout = find_layout(by_name)
        self.names_by_id = {id(by_name[name]): name for name in self.layout.recorded}

    def find_modules(self, model: nn.Module) -> list[nn.Module] | None:
        """The modules in the order of their names; None if the model has changed."""
        modules: list[Any] = [*map(call, self._references)]
        # By their ids: other modules may be equal. A reference to a module that is gone gives None.
        if self._is_scripted or modules[0] is not model or [*map(id, modules)] != self._ids:
            return None
        if [*map(type, modules)] != self._classes:
            return None
        every: list[dict[str, nn.Module]] = [*map(get_parts, modules)]
        parts = [*filter(None, every)]
        if [*map(len, every)] != self._counts or [*chain.from_iterable(parts)] != self._parts:
            return None
        return modules if [*map(id, chain.from_iterable(map(dict.values, parts)))] == self._child_ids else None


def read_structure(model: nn.Module) -> tuple[ModelStructure, list[nn.Module]]:
    """The structure of a model, and its modules in the order of their names."""
    known = STRUCTURES.get(model)
    modules = None if known is None else known.find_modules(model)
    if known is None or modules is None:
        named = list_modules(model)
        known, modules = ModelStructure(named), [module for _, module in named]
        STRUCTURES[model] = known
    return known, modules


def list_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """What `model.named_modules()` gives, without its nested generators, which are slow for hundreds of modules."""
    found: list[tuple[str, nn.Module]] = [("", model)]
    seen = {id(model)}

    def visit(prefix: str, module: nn.Module) -> None:
        for part, child in module._modules.items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append((prefix + part, child))
                if child._modules:
                    visit(f"{prefix}{part}.", child)

    visit("", model)
    return found

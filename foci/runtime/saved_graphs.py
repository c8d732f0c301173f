"""Registers the operators of foci before PyTorch reads a saved graph, which may contain them.

`import foci` does not import torch, and a process that loads a graph with `torch.export.load` need not use any other
name of foci.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

# The modules of PyTorch that read saved graphs: torch.export.load and torch._inductor.aoti_load_package.
GRAPH_READERS = ("torch._export.serde.serialize", "torch._inductor.package.package")
# The module that imports all operators.
OPERATORS_MODULE = "foci.call"


class OperatorFinder:
    """An import hook that finds nothing: it registers the operators when PyTorch imports a reader of graphs."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name in GRAPH_READERS:
            register_now()


def register_now() -> None:
    import_module(OPERATORS_MODULE)
    import_module("foci.runtime.operators").register_operators()


def register_operators_on_load() -> None:
    """Registers the operators as soon as a reader of graphs is imported; now, if one is already."""
    if any(name in sys.modules for name in GRAPH_READERS):
        register_now()
    elif OperatorFinder not in sys.meta_path:
        sys.meta_path.insert(0, OperatorFinder)

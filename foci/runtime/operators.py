"""Operators of PyTorch, registered when a compiler traces or a program names the first one.

Eager calls run without them. Registering one takes up to 40 ms, and the first call of a process would wait for all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "foci"
# Held while they are registered: another thread must not find the list empty before.
LOCK = threading.RLock()


class Operator:
    """An operator that is registered on its first call, and before PyTorch reads a saved graph.

    Args:
        name: its name in the namespace of foci.
        schema: arguments and results, as for `torch.library.custom_op`.
        function: computes the results.
    """

    def __init__(self, name: str, schema: str, function: Callable[..., Any]) -> None:
        self.name, self.schema, self.function = name, schema, function
        self.fake: Callable[..., Any] | None = None
        self.gradients: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        UNREGISTERED.append(self)

    def __call__(self, *arguments: Any) -> Any:
        register_operators()
        return getattr(torch.ops.foci, self.name).default(*arguments)

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Sets what returns uninitialized results while tracing."""
        self.fake = function
        return function

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., Any]) -> None:
        """Sets the backward."""
        self.gradients = backward, setup_context

    def register(self) -> None:
        # PyTorch keeps only a weak reference.
        self.definition = torch.library.custom_op(
            f"{NAMESPACE}::{self.name}", self.function, mutates_args=(), schema=self.schema
        )
        if self.fake is not None:
            self.definition.register_fake(self.fake)
        if self.gradients is not None:
            backward, setup_context = self.gradients
            self.definition.register_autograd(backward, setup_context=setup_context)

    @property
    def overload(self) -> Any:
        """The registered operator."""
        register_operators()
        return getattr(torch.ops.foci, self.name).default


UNREGISTERED: list[Operator] = []


def operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Operator]:
    """Makes a function an operator: foci::<name>."""
    return lambda function: Operator(name, schema, function)


def register_operators() -> None:
    """Registers all operators that were defined so far."""
    with LOCK:
        while UNREGISTERED:
            # PyTorch asks `Namespace` for the operator before it defines it.
            each = UNREGISTERED.pop()
            try:
                each.register()
            except BaseException:
                UNREGISTERED.append(each)
                raise


# See runtime/device.py.
register_operators._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Namespace(torch._ops._OpNamespace):
    """torch.ops.foci, by which programs name the operators: checkpointing policies, tests, graphs from elsewhere."""

    # That of its operators, from which graphs spell their names.
    __module__ = "torch._ops"

    def __getattr__(self, name: str) -> Any:
        with LOCK:
            if any(each.name == name for each in UNREGISTERED):
                register_operators()
        return super().__getattr__(name)


setattr(torch.ops, NAMESPACE, Namespace(NAMESPACE))

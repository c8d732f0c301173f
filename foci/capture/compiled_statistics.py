"""Statistics of attention calls inside compiled models, which run the second graph that `call_observer` describes.

A compiled graph makes no Python calls. An operator at the end of each call's statistics hands them to the open block
while the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from foci.runtime import call_observer
from foci.runtime.tracing import is_recomputation
from foci.weights.weights import Weights

Observer = Callable[[Weights, Tensor], None]

# The tensors of each call of the open block, in the order in which the calls ran; None: no block is open.
_computed: list[list[Tensor]] | None = None


@torch.library.custom_op("foci::collect_tensors", mutates_args=("calls",), tags=(torch.Tag.cudagraph_unsafe,))
def collect_tensors(computed: list[Tensor], calls: Tensor) -> None:
    """Adds the tensors of a call to those of the open block; `calls`, which counts them, keeps the calls in order."""
    calls.add_(1)
    if _computed is not None and not is_recomputation():
        # The graph may use their memory again.
        _computed.append([tensor.clone() for tensor in computed])


@collect_tensors.register_fake
def _(computed: list[Tensor], calls: Tensor) -> None:
    return None


def make_observer(compute: Callable[[Weights, Tensor], list[Tensor]], device: torch.device) -> Observer:
    """The function that a compiled graph runs for each call, with its weights (B, H, Tq, Tk) and values.

    A model must get the same one in every block, because its second graph is guarded on it.
    """
    with torch.inference_mode(False):
        # It outlives the block: an inference tensor could not be changed outside of inference mode.
        calls = torch.zeros((), dtype=torch.int64, device=device)

    def observe(weights: Weights, values: Tensor) -> None:
        collect_tensors(compute(weights.with_four_axes(), values), calls)

    return observe


@contextmanager
def observe_compiled_calls(observe: Observer) -> Iterator[list[list[Tensor]]]:
    """Collects what is computed for all calls of `foci.attention` inside the block."""
    global _computed
    if _computed is not None:
        raise RuntimeError("only one block of foci.Monitor or foci.watch can be open on compiled models")
    found: list[list[Tensor]] = []
    _computed = found
    call_observer.observe = observe
    try:
        yield found
    finally:
        _computed = call_observer.observe = None


class CompletePasses:
    """The complete passes of a compiled model: drops the calls of other models, and those of passes that fail.

    Other methods than forward, such as `generate`, run a model without its hooks: then no call is dropped.

    Args:
        computed: what was computed for each call so far.
    """

    def __init__(self, computed: list[list[Tensor]]) -> None:
        self.computed = computed
        # The number of calls in complete passes, and of those that were dropped.
        self.calls = self.dropped = 0
        self.has_begun = False

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Drops calls inside the block and at its end."""
        if model._compiled_call_impl is not None:
            # Its hooks would change its graph; those of other modules run outside of graphs.
            yield
            return
        hooks = model.register_forward_pre_hook(self.begin, with_kwargs=True), model.register_forward_hook(self.end)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if self.has_begun:
            self._drop_others()

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook."""
        self.has_begun = True
        self._drop_others()

    def end(self, model: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        """A forward hook, which does not run after an error."""
        self.calls = len(self.computed)

    def _drop_others(self) -> None:
        """Drops the calls since the last complete pass."""
        self.dropped += len(self.computed) - self.calls
        del self.computed[self.calls :]


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or one of its modules is compiled."""
    return any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in model.modules())


def find_device(model: nn.Module) -> torch.device:
    """The device of the model's first parameter."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device

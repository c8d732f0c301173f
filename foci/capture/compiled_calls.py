"""Head totals of attention calls inside compiled models, which run the second graph that `call_observer` describes.

A compiled graph makes no Python calls. An operator at the end of each call's statistics hands them to the monitor while
the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from foci.record.head_totals import compute_head_totals
from foci.runtime import call_observer
from foci.runtime.tracing import is_recomputation
from foci.weights.weights import Weights

# The totals of the calls of the open block, in the order in which they ran; None: no block is open.
_totals: list[Tensor] | None = None


@torch.library.custom_op("foci::hand_over_totals", mutates_args=("calls",), tags=(torch.Tag.cudagraph_unsafe,))
def hand_over_totals(totals: Tensor, calls: Tensor) -> None:
    """Adds the totals of a call to those of the open block; `calls`, which counts them, keeps the calls in order."""
    calls.add_(1)
    if _totals is not None and not is_recomputation():
        _totals.append(totals.clone())


@hand_over_totals.register_fake
def _(totals: Tensor, calls: Tensor) -> None:
    return None


def make_observer(statistics: tuple[str, ...], device: torch.device) -> Callable[[Weights], None]:
    """The function that a compiled graph runs for each call; the same one in every block, because it is guarded on."""
    calls = torch.zeros((), dtype=torch.int64, device=device)

    def observe(weights: Weights) -> None:
        hand_over_totals(compute_head_totals(weights.with_four_axes(), statistics), calls)

    return observe


@contextmanager
def observe_compiled_calls(observe: Callable[[Weights], None]) -> Iterator[list[Tensor]]:
    """Collects the totals of all calls of `foci.attention` inside the block, (H, COLUMNS) each."""
    global _totals
    if _totals is not None:
        raise RuntimeError("only one foci.Monitor can have an open block on a compiled model")
    found: list[Tensor] = []
    _totals = found
    call_observer.observe = observe
    try:
        yield found
    finally:
        _totals = call_observer.observe = None


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or one of its modules is compiled."""
    return any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in model.modules())

"""Backends: an ordered list of implementations, each of which runs a call or refuses it with reasons.

sdpa: PyTorch's fused kernels (cpu, cuda; padding prepares their tensors).
cpu_c: our C kernel for CPUs, compiled where there is a C compiler.
triton: our own GPU kernels, launched by foci.gpu.
repeated_calls: calls of a kind that our kernels ran before, without their checks.
flex: FlexAttention, compiled (block_masks, compiled_calls).
blocked: attention strip by strip for every call on any device.
strips: a call cut into parts and strips, and the logits of a strip; also used by the statistics.
mask_struct: a mask as the argument of our C kernels.
additive_cpu: fast additive scores of a strip on a CPU.
reference: the specification, which builds the matrix.

A backend module has `NAME`, `refuses(call)`, `run(call)` and optionally `refuses_by_default(call)`: why it is used only
when the caller names it; `is_batch_invariant(call)`, False without it; `describe_limits(call)`: notes for `foci.plan`;
`run_with_sink(call)`: the call with its sink, else the caller adds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor

from foci.arguments import Call
from foci.backends import blocked, cpu_c, flex, reference, repeated_calls, sdpa, triton
from foci.runtime.tracing import disable_autocast

# The first that refuses neither the call nor its use by default is chosen, unless the caller names another.
BACKENDS: tuple[ModuleType, ...] = (sdpa, cpu_c, triton, flex, blocked, reference)
BACKEND_NAMES = tuple(backend.NAME for backend in BACKENDS)
run_plain_call, run_plain_call_with_lse = sdpa.run_plain_call, sdpa.run_plain_call_with_lse


@dataclass(frozen=True)
class Plan:
    """Which backend runs a call, and why each other one refuses it; prints as a table."""

    chosen: str | None
    refusals: dict[str, list[str]]
    notes: dict[str, str]

    def __str__(self) -> str:
        width = max(map(len, BACKEND_NAMES))
        lines = []
        for name in BACKEND_NAMES:
            reasons = "; ".join(self.refusals.get(name, [])) or self.notes.get(name, "supported")
            mark = "->" if name == self.chosen else "  "
            lines.append(f"{mark} {name:<{width}}  {'chosen' if name == self.chosen else reasons}")
        return "\n".join([*lines, *(f"   {line}" for key, line in self.notes.items() if key not in BACKEND_NAMES)])


def choose_backend(call: Call, name: str | None) -> ModuleType:
    """Returns the backend that runs the call; raises with the reasons of all where none does."""
    if name is not None:
        return get_backend(call, name)
    for backend in BACKENDS:
        if not default_refusals(backend, call) and not backend.refuses(call):
            return backend
    raise ValueError(f"no backend supports this call (backend='reference' would build the matrix):\n{make_plan(call)}")


def run_repeated_call(q: Tensor, k: Tensor, v: Tensor, score: Any, mask: Any) -> Tensor | None:
    """Runs a call without gradients of a kind that our kernels ran before; None leaves it to the full path."""
    return repeated_calls.run_repeated_call(q, k, v, score, mask, choose_backend)


def default_refusals(backend: ModuleType, call: Call) -> list[str]:
    """Why a backend that supports the call is not chosen unless the caller names it."""
    return backend.refuses_by_default(call) if hasattr(backend, "refuses_by_default") else []


def get_backend(call: Call, name: str) -> ModuleType:
    """Returns the named backend; raises with its reasons where it refuses the call."""
    for backend in BACKENDS:
        if name == backend.NAME:
            reasons = backend.refuses(call)
            if reasons:
                raise ValueError(f"backend {name!r} refuses this call: {'; '.join(reasons)}")
            return backend
    raise unknown_backend_error(name)


def unknown_backend_error(name: str) -> ValueError:
    return ValueError(f"backend must be one of {', '.join(BACKEND_NAMES)}, got {name!r}")


def make_plan(call: Call, name: str | None = None) -> Plan:
    """Collects the reasons of every backend; `name`: the backend that the caller names."""
    if name is not None and name not in BACKEND_NAMES:
        raise unknown_backend_error(name)
    refusals = {backend.NAME: backend.refuses(call) for backend in BACKENDS}
    notes = {backend.NAME: "; ".join(reasons) for backend in BACKENDS if (reasons := default_refusals(backend, call))}
    supporting = [backend for backend in BACKEND_NAMES if not refusals[backend]]
    supporting = [backend for backend in supporting if (backend not in notes if name is None else backend == name)]
    if supporting:
        notes |= describe_chosen(call, next(each for each in BACKENDS if supporting[0] == each.NAME))
    return Plan(supporting[0] if supporting else None, {k: v for k, v in refusals.items() if v}, notes)


def describe_chosen(call: Call, backend: ModuleType) -> dict[str, str]:
    """Notes on the backend that runs the call: batch invariance, and what its `describe_limits` adds."""
    invariant = hasattr(backend, "is_batch_invariant") and backend.is_batch_invariant(call)
    text = (
        "a sequence gives bitwise the same result alone and in any batch"
        if invariant
        else f"not guaranteed by {backend.NAME}: the last bits of a sequence may depend on the others"
    )
    limits = backend.describe_limits(call) if hasattr(backend, "describe_limits") else {}
    return {"batch invariance": f"batch invariance: {text}"} | limits


@disable_autocast
def run_with_sink(call: Call, name: str | None) -> tuple[Tensor, Tensor | None] | None:
    """Runs a call with its sink; None where the backend of the call has no sinks."""
    backend = choose_backend(call, name)
    return backend.run_with_sink(call) if hasattr(backend, "run_with_sink") else None


@disable_autocast
def run(call: Call, name: str | None) -> tuple[Tensor, Tensor | None]:
    return choose_backend(call, name).run(call)  # type: ignore[no-any-return]

"""Who computes a call: an ordered list of backends, each of which serves a call or says why not."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from foci.arguments import Call
from foci.backends import blocked, flex, reference, sdpa, triton
from foci.runtime.checks import disable_autocast

# The first that serves the call and does not hesitate is used; one that hesitates is used when it is named.
BACKENDS: tuple[ModuleType, ...] = (sdpa, triton, flex, blocked, reference)
BACKEND_NAMES = tuple(backend.NAME for backend in BACKENDS)
run_plain_call = sdpa.run_plain_call


@dataclass(frozen=True)
class Plan:
    """Which backend serves a call, and every other backend's reasons not to; prints as a table."""

    chosen: str | None
    refusals: dict[str, list[str]]
    notes: dict[str, str]

    def __str__(self) -> str:
        width = max(map(len, BACKEND_NAMES))
        lines = []
        for name in BACKEND_NAMES:
            reasons = "; ".join(self.refusals.get(name, [])) or self.notes.get(name, "serves it")
            mark = "->" if name == self.chosen else "  "
            lines.append(f"{mark} {name:<{width}}  {'chosen' if name == self.chosen else reasons}")
        return "\n".join([*lines, *(f"   {line}" for key, line in self.notes.items() if key not in BACKEND_NAMES)])


def choose_backend(call: Call, name: str | None) -> ModuleType:
    """The backend that serves the call; refuses with every reason where none does."""
    if name is not None:
        return get_backend(call, name)
    for backend in BACKENDS:
        if not default_refusals(backend, call) and not backend.refuses(call):
            return backend
    raise ValueError(f"no backend serves this call (name backend='reference' to build the matrix):\n{make_plan(call)}")


def default_refusals(backend: ModuleType, call: Call) -> list[str]:
    """A backend's reasons not to be chosen for a call that it would serve when it is named."""
    return backend.hesitates(call) if hasattr(backend, "hesitates") else []


def get_backend(call: Call, name: str) -> ModuleType:
    for backend in BACKENDS:
        if name == backend.NAME:
            reasons = backend.refuses(call)
            if reasons:
                raise ValueError(f"backend {name!r} refuses this call: {'; '.join(reasons)}")
            return backend
    raise unknown_backend_error(name)


def unknown_backend_error(name: str) -> ValueError:
    return ValueError(f"unknown backend {name!r}: expected one of {', '.join(BACKEND_NAMES)}")


def make_plan(call: Call, name: str | None = None) -> Plan:
    if name is not None and name not in BACKEND_NAMES:
        raise unknown_backend_error(name)
    refusals = {backend.NAME: backend.refuses(call) for backend in BACKENDS}
    notes = {backend.NAME: "; ".join(reasons) for backend in BACKENDS if (reasons := default_refusals(backend, call))}
    serving = [backend for backend in BACKEND_NAMES if not refusals[backend]]
    serving = [backend for backend in serving if (backend not in notes if name is None else backend == name)]
    return Plan(serving[0] if serving else None, {k: v for k, v in refusals.items() if v}, notes)


@disable_autocast
def run(call: Call, name: str | None) -> tuple[Tensor, Tensor | None]:
    return choose_backend(call, name).run(call)  # type: ignore[no-any-return]

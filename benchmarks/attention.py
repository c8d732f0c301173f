"""foci beside every attention that PyTorch has, forward and backward: times, TFLOP/s and memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gates import Gate, GateError
from peers import Attend, Case, Peer, cases, contestants
from table import Options, Table, options, short
from timing import (
    Clock,
    Contestant,
    Measured,
    clock_of,
    compare,
    import_seconds,
    microseconds,
    one_line,
    release,
    say,
)
from torch import Tensor

import foci

COLUMNS = ("case", "dtype", "direction", "contestant", "ms", "spread", "rounds", "tflops", "mib", "speed", "us", "note")

# Two products of matrices forward, five backward (one of them the scores again), each a multiplication and an addition.
OPERATIONS = {"forward": 4, "backward": 10}


def main() -> int:
    """Runs what the command line asks for; 1 where foci failed a gate."""
    asked = options("attention", __doc__ or "", (torch.float32, torch.bfloat16))
    table = Table(asked.device, COLUMNS, asked.path)
    for name, cost in (("call", call_cost), ("import", import_cost)):
        try:
            cost(asked, table)
        except Exception as error:  # noqa: BLE001 - the rest can still be measured
            table.add(case=name, contestant="foci", us=None, note=one_line(error))
    clock = clock_of(asked.device)
    for dtype in asked.dtypes:
        for case in cases(asked.device, asked.quick):
            if not asked.wants(case.name):
                continue
            if asked.over:
                table.add(
                    case=case.name, dtype=short(dtype), contestant="foci", ms=None, note="not run: the time was over"
                )
                continue
            try:
                run_case(case, dtype, asked, table, clock)
            except Exception as error:  # noqa: BLE001 - the other cases can still be measured
                table.add(case=case.name, dtype=short(dtype), contestant="foci", ms=None, note=one_line(error))
            release()
    finish(table)
    return int(table.wrong())


def run_case(case: Case, dtype: torch.dtype, asked: Options, table: Table, clock: Clock) -> None:
    """Both directions of one case: the gate, then the clock."""
    say(f"{case.name} {short(dtype)}")
    q, k, v = case.inputs(asked.device, dtype)
    gate = Gate.of(case, q, k, v)
    pairs = case.pairs(asked.device)
    peers = list(contestants(case, asked.device))
    for direction, check, prepared in (
        ("forward", gate.check_forward, partial(forward, q, k, v)),
        ("backward", gate.check_backward, partial(backward, q, k, v)),
    ):
        passed: list[Contestant] = []
        found: dict[str, Measured | str] = {}
        for peer in peers:
            failure = failure_of(peer, check)
            if failure is None:
                passed.append(prepared(peer))
            else:
                say(f"  {'!! ' if 'GATE' in failure else ''}{direction}, {peer.name}: {failure}")
                found[peer.name] = failure
        found |= compare(passed, clock, asked.seconds)
        operations = OPERATIONS[direction] * pairs * case.width
        add_rows(table, {"case": case.name, "dtype": short(dtype), "direction": direction}, peers, found, operations)


def failure_of(peer: Peer, check: Callable[[Attend], None]) -> str | None:
    """Why the contestant gets no figure."""
    try:
        with peer.context():
            check(peer.attend)
    except GateError as error:
        return f"GATE FAILED: {error}"
    except Exception as error:  # noqa: BLE001 - whatever stops a contestant is its result
        release()
        return one_line(error)
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, peer: Peer) -> Contestant:
    def run() -> Tensor:
        with torch.no_grad():
            return peer.attend(q, k, v)

    return Contestant(peer.name, run, context=peer.context)


def backward(q: Tensor, k: Tensor, v: Tensor, peer: Peer) -> Contestant:
    """The forward is done anew each time, before the clock starts; its memory counts."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    slope = torch.randn(*q.shape[:3], v.shape[-1], device=q.device, dtype=q.dtype)

    def run(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, slope)

    return Contestant(peer.name, run, before=lambda: peer.attend(*leaves), context=peer.context)


def add_rows(
    table: Table, about: dict[str, Any], peers: list[Peer], found: dict[str, Measured | str], operations: int
) -> None:
    """A row per contestant; `speed` is the fastest peer's time over this one's."""
    others = [m.ms for name, m in found.items() if isinstance(m, Measured) and name != "foci"]
    for peer in peers:
        measured = found[peer.name]
        if isinstance(measured, str):
            table.add(**about, contestant=peer.name, ms=None, note=measured)
            continue
        table.add(
            **about,
            contestant=peer.name,
            ms=measured.ms,
            spread=measured.spread,
            rounds=measured.rounds,
            tflops=operations / measured.ms / 1e9,
            mib=measured.mib,
            speed=min(others) / measured.ms if others else None,
        )


def call_cost(asked: Options, table: Table) -> None:
    """What the call itself costs, at a shape where there is nothing else to do."""
    name = "call b1 h2 d64 n8"
    if not asked.wants(name):
        return
    say(name)
    q = torch.randn(1, 2, 8, 64, device=asked.device, dtype=asked.dtypes[0])
    sdpa = F.scaled_dot_product_attention
    calls: dict[str, dict[str, Callable[[], Any]]] = {
        "full": {"sdpa": lambda: sdpa(q, q, q), "foci": lambda: foci.attention(q, q, q)},
        "causal": {
            "sdpa": lambda: sdpa(q, q, q, is_causal=True),
            "foci": lambda: foci.attention(q, q, q, mask=foci.causal),
            "foci, weights": lambda: foci.attention(q, q, q, mask=foci.causal, return_weights=True),
        },
    }
    with torch.no_grad():
        for kind, competing in calls.items():
            costs = microseconds(competing, asked.device, asked.quick)
            for contestant, cost in costs.items():
                table.add(case=f"{name} {kind}", dtype=short(asked.dtypes[0]), contestant=contestant, us=cost)
                say(f"  {kind}, {contestant}: {cost:.1f} us, {cost - costs['sdpa']:+.1f} us over sdpa")


def import_cost(asked: Options, table: Table) -> None:
    """`import foci` after `import torch`."""
    if not asked.wants("import"):
        return
    seconds = import_seconds(1 if asked.quick else 5, Path(foci.__file__).resolve().parent.parent)
    for package, taken in seconds.items():
        table.add(case=f"import {package}", contestant=package, us=taken * 1e6)
        say(f"import {package}: {taken:.3f} s{' beyond torch' if package == 'foci' else ''}")


def finish(table: Table) -> None:
    """The short tables and what has no figure."""
    table.show("microseconds of a call, and of an import (foci: beyond torch)", ("case",), "us", {})
    own = {"foci TFLOP/s": ("foci", "tflops"), "foci MiB": ("foci", "mib"), "speed": ("foci", "speed")}
    table.show(
        "milliseconds, median (speed: the fastest peer's time over foci's; MiB: peak beyond the inputs)",
        ("case", "dtype", "direction"),
        "ms",
        own,
    )
    table.complaints()
    table.close()


if __name__ == "__main__":
    sys.exit(main())

"""foci and every attention function of PyTorch, forward and backward: time, TFLOP/s and memory."""

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
from table import Options, Table, dtype_name, parse_options
from timing import (
    Clock,
    Contestant,
    Measured,
    compare,
    format_error,
    free_memory,
    log,
    make_clock,
    measure_call_overhead,
    measure_imports,
)
from torch import Tensor

import foci

COLUMNS = ("case", "dtype", "direction", "contestant", "ms", "spread", "rounds", "tflops", "mib", "speed", "us", "note")

# Two matrix products forward, five backward (one recomputes the scores), each a multiplication and an addition.
OPERATIONS = {"forward": 4, "backward": 10}


def main() -> int:
    """Run the benchmark; the exit status is 1 if foci failed a gate."""
    options = parse_options("attention", __doc__ or "", (torch.float32, torch.bfloat16))
    table = Table(options.device, COLUMNS, options.path)
    for name, cost in (("call", call_cost), ("import", import_cost)):
        try:
            cost(options, table)
        except Exception as error:  # noqa: BLE001 - continue with the rest
            table.add(case=name, contestant="foci", us=None, note=format_error(error))
    clock = make_clock(options.device)
    for dtype in options.dtypes:
        for case in cases(options.device, options.quick):
            if not options.wants(case.name):
                continue
            if options.out_of_time:
                table.add(
                    case=case.name, dtype=dtype_name(dtype), contestant="foci", ms=None, note="not run: out of time"
                )
                continue
            try:
                run_case(case, dtype, options, table, clock)
            except Exception as error:  # noqa: BLE001 - continue with the other cases
                table.add(case=case.name, dtype=dtype_name(dtype), contestant="foci", ms=None, note=format_error(error))
            free_memory()
    finish(table)
    return int(table.has_failed_gate())


def run_case(case: Case, dtype: torch.dtype, options: Options, table: Table, clock: Clock) -> None:
    """Check and time both directions of one case."""
    log(f"{case.name} {dtype_name(dtype)}")
    q, k, v = case.inputs(options.device, dtype)
    gate = Gate.of(case, q, k, v)
    pairs = case.pairs(options.device)
    peers = list(contestants(case, options.device))
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
                log(f"  {'!! ' if 'GATE' in failure else ''}{direction}, {peer.name}: {failure}")
                found[peer.name] = failure
        found |= compare(passed, clock, options.seconds)
        operations = OPERATIONS[direction] * pairs * case.width
        add_rows(
            table, {"case": case.name, "dtype": dtype_name(dtype), "direction": direction}, peers, found, operations
        )


def failure_of(peer: Peer, check: Callable[[Attend], None]) -> str | None:
    """Why a contestant is not timed; None if it passes."""
    try:
        with peer.context():
            check(peer.attend)
    except GateError as error:
        return f"GATE FAILED: {error}"
    except Exception as error:  # noqa: BLE001 - an error is the result of a contestant
        free_memory()
        return format_error(error)
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, peer: Peer) -> Contestant:
    def run() -> Tensor:
        with torch.no_grad():
            return peer.attend(q, k, v)

    return Contestant(peer.name, run, context=peer.context)


def backward(q: Tensor, k: Tensor, v: Tensor, peer: Peer) -> Contestant:
    """The backward; its forward runs before the timing, and its memory counts."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out_gradient = torch.randn(*q.shape[:3], v.shape[-1], device=q.device, dtype=q.dtype)

    def run(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, out_gradient)

    return Contestant(peer.name, run, before=lambda: peer.attend(*leaves), context=peer.context)


def add_rows(
    table: Table, about: dict[str, Any], peers: list[Peer], found: dict[str, Measured | str], operations: int
) -> None:
    """One row per contestant; `speed` is the time of the fastest peer divided by that of the contestant."""
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


def call_cost(options: Options, table: Table) -> None:
    """The overhead of a call, at a tiny shape."""
    name = "call b1 h2 d64 n8"
    if not options.wants(name):
        return
    log(name)
    q = torch.randn(1, 2, 8, 64, device=options.device, dtype=options.dtypes[0])
    sdpa = F.scaled_dot_product_attention
    _, weights = foci.attention(q, q, q, mask=foci.causal, return_weights=True)
    calls: dict[str, dict[str, Callable[[], Any]]] = {
        "full": {"sdpa": lambda: sdpa(q, q, q), "foci": lambda: foci.attention(q, q, q)},
        "causal": {
            "sdpa": lambda: sdpa(q, q, q, is_causal=True),
            "foci": lambda: foci.attention(q, q, q, mask=foci.causal),
            "foci, weights": lambda: foci.attention(q, q, q, mask=foci.causal, return_weights=True),
            "foci, row of the weights": lambda: weights[0, 1, 5],
        },
    }
    with torch.no_grad():
        for kind, competing in calls.items():
            costs = measure_call_overhead(competing, options.device, options.quick)
            for contestant, cost in costs.items():
                table.add(case=f"{name} {kind}", dtype=dtype_name(options.dtypes[0]), contestant=contestant, us=cost)
                log(f"  {kind}, {contestant}: {cost:.1f} us, {cost - costs['sdpa']:+.1f} us over sdpa")


def import_cost(options: Options, table: Table) -> None:
    """`import foci` after `import torch`."""
    if not options.wants("import"):
        return
    seconds = measure_imports(1 if options.quick else 5, Path(foci.__file__).resolve().parent.parent)
    for package, taken in seconds.items():
        table.add(case=f"import {package}", contestant=package, us=taken * 1e6)
        log(f"import {package}: {taken:.3f} s{' in addition to torch' if package == 'foci' else ''}")


def finish(table: Table) -> None:
    """Print the short tables and the failures."""
    table.print_table("microseconds of a call, and of an import (foci: in addition to torch)", ("case",), "us", {})
    own = {"foci TFLOP/s": ("foci", "tflops"), "foci MiB": ("foci", "mib"), "speed": ("foci", "speed")}
    table.print_table(
        "milliseconds, median (speed: time of the fastest peer / time of foci; MiB: peak in addition to the inputs)",
        ("case", "dtype", "direction"),
        "ms",
        own,
    )
    table.print_failures()
    table.print_footer()


if __name__ == "__main__":
    sys.exit(main())

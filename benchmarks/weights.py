"""The cost of weights: output and statistics, compared with a fused forward alone and with eager code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from dense import PICTURE, TOP, Found, Truth, eager
from gates import GateError
from peers import Case, Peer, foci_attention, sdpa, varlen
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
)
from torch import Tensor

import foci

COLUMNS = (
    "case",
    "scores",
    "keys",
    "dtype",
    "contestant",
    "ms",
    "spread",
    "rounds",
    "times",
    "mib",
    "extra_mib",
    "us",
    "note",
)

Statistics = Callable[[foci.Weights], Found]


@dataclass(frozen=True)
class Run:
    """A case, the distribution of its scores, and which contestants run."""

    case: Case
    scores: str = "random"
    long: bool = False  # memory by length: the forward and the whole summary only

    @property
    def name(self) -> str:
        return f"{self.case.name} {self.scores}{' long' if self.long else ''}"

    def inputs(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values with such scores."""
        q, k, v = self.case.inputs(device, dtype)
        if self.scores == "peaked":
            return q * 6, k, v
        if self.scores == "ascending":
            # Every key has a larger score than those before it: the worst order for a running top-k.
            along = torch.nn.functional.normalize(torch.randn(q.shape[-1], device=device), dim=0)
            climb = torch.linspace(0, 8, k.shape[2], device=device).unsqueeze(-1)
            return (0.02 * q + along * q.shape[-1] ** 0.5).to(dtype), (0.02 * k + along * climb).to(dtype), v
        return q, k, v


def main() -> int:
    """Run the benchmark; the exit status is 1 if foci failed a gate."""
    options = parse_options("weights", __doc__ or "", (torch.float32,))
    table = Table(options.device, COLUMNS, options.path)
    clock = make_clock(options.device)
    measure_calls(options, table)
    for dtype in options.dtypes:
        for run in runs(options.device, options.quick):
            if not options.wants(run.name):
                continue
            if options.out_of_time:
                table.add(**about(run, dtype), contestant="foci summary", times=None, note="not run: out of time")
                continue
            try:
                measure(run, dtype, options, table, clock)
            except Exception as error:  # noqa: BLE001 - continue with the other cases
                table.add(**about(run, dtype), contestant="foci summary", times=None, note=format_error(error))
            free_memory()
    finish(table)
    return int(table.has_failed_gate())


def measure_calls(options: Options, table: Table) -> None:
    """Microseconds of short calls on a GPU, attention included: they are spent in Python."""
    dtype = torch.bfloat16
    for tokens in (64, 512):
        if options.device.type != "cuda" or not options.wants(f"call {tokens}"):
            continue
        q, k, v = (torch.randn(2, 8, tokens, 64, device=options.device, dtype=dtype) for _ in range(3))
        calls: dict[str, Callable[[], Any]] = {
            "sdpa": partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True),
            "foci out": partial(foci.attention, q, k, v, mask=foci.causal),
        } | {name: partial(use_weights, use, q, k, v) for name, use in USES.items()}
        for name, us in measure_call_overhead(calls, options.device, options.quick).items():
            table.add(case=f"call {tokens}", dtype=dtype_name(dtype), contestant=name, us=us)
            log(f"call at {tokens} tokens, {name}: {us:.1f} us")


def use_weights(use: Callable[[foci.Weights], Any], q: Tensor, k: Tensor, v: Tensor) -> Any:
    return use(foci.attention(q, k, v, mask=foci.causal, return_weights=True)[1])


# What short calls do with the weights.
USES: dict[str, Callable[[foci.Weights], Any]] = {
    "foci lazy": lambda weights: weights,
    "foci row": lambda weights: weights[0, 3, 5],
    "foci entropy": foci.Weights.entropy,
    "foci summary": foci.Weights.summary,
}


def measure(run: Run, dtype: torch.dtype, options: Options, table: Table, clock: Clock) -> None:
    """Check one case, then time it."""
    log(f"{run.name} {dtype_name(dtype)}")
    q, k, v = run.inputs(options.device, dtype)
    truth = Truth(run.case, q, k, v)
    log("  truth computed")
    passed: list[Contestant] = []
    found: dict[str, Measured | str] = {}
    for contestant in contestants(run, q, k, v):
        failure = failure_of(contestant, truth)
        if failure is None:
            passed.append(contestant)
        else:
            log(f"  {'!! ' if 'GATE' in failure else ''}{contestant.name}: {failure}")
            found[contestant.name] = failure
    del truth
    free_memory()
    found |= compare(passed, clock, options.seconds)
    add_rows(table, about(run, dtype), found)


def about(run: Run, dtype: torch.dtype) -> dict[str, Any]:
    scores = "long" if run.long else run.scores
    return {"case": run.case.name, "scores": scores, "keys": run.case.tk, "dtype": dtype_name(dtype)}


def failure_of(contestant: Contestant, truth: Truth) -> str | None:
    """Why a contestant is not timed; None if it passes."""
    try:
        truth.check(contestant.run_once())
    except GateError as error:
        return f"GATE FAILED: {error}"
    except Exception as error:  # noqa: BLE001 - an error is the result of a contestant
        free_memory()
        return format_error(error)
    return None


def contestants(run: Run, q: Tensor, k: Tensor, v: Tensor) -> Iterator[Contestant]:
    """Fused forwards, foci with various statistics, and eager code."""
    case = run.case
    for peer in forwards(case, q.device):
        yield Contestant(peer.name, without_gradients(partial(attended, peer, q, k, v)), context=peer.context)
    mask = case.mask(q.device)
    for name, statistics in STATISTICS.items():
        if not run.long or name == "foci summary":
            yield Contestant(name, without_gradients(partial(foci_with_statistics, statistics, q, k, v, mask)))
    if not run.long:
        yield from eager_contestants(case, q, k, v)


def forwards(case: Case, device: torch.device) -> Iterator[Peer]:
    """Contestants that compute only the output."""
    yield from (peer for peer in sdpa(case, device) if peer.name in {"sdpa", "cudnn"})
    if device.type == "cuda" and case.kind == "window":
        yield Peer("varlen", varlen(case, device))
    yield Peer("foci out", foci_attention(case, device), nullcontext)


def attended(peer: Peer, q: Tensor, k: Tensor, v: Tensor) -> Found:
    return {"out": peer.attend(q, k, v)}


def foci_with_statistics(statistics: Statistics, q: Tensor, k: Tensor, v: Tensor, mask: foci.Mask | None) -> Found:
    out, weights = foci.attention(q, k, v, mask=mask, return_weights=True)
    return {"out": out, **statistics(weights)}


def summary(weights: foci.Weights, top: int, every: bool = True) -> Found:
    """The statistics of `summary`; `every` adds distance and largest logit, which no peer computes."""
    whole = weights.summary(top=top, picture=PICTURE, largest_logit=every, distance=every)
    names = ("entropy", "received", "distance", "lse", "picture")
    found = {name: getattr(whole, name) for name in names} | {"largest": whole.largest_logit}
    found = {name: tensor for name, tensor in found.items() if tensor is not None}
    if whole.top is not None:
        found |= {"top_values": whole.top.values, "top_keys": whole.top.keys}
    return found


def picture(weights: foci.Weights) -> Found:
    queries, keys = weights.shape[-2:]
    return {"picture": weights.picture(min(PICTURE, queries), min(PICTURE, keys))}


# The statistics of each contestant, each with a forward of its own.
STATISTICS: dict[str, Statistics] = {
    "foci lazy": lambda weights: {},
    "foci three": partial(summary, top=0, every=False),
    "foci four": partial(summary, top=TOP, every=False),
    "foci summary-0": partial(summary, top=0),
    "foci summary": partial(summary, top=TOP),
    "foci entropy": lambda weights: {"entropy": weights.entropy()},
    "foci received": lambda weights: {"received": weights.received()},
    "foci picture": picture,
    "foci top": lambda weights: dict(zip(("top_values", "top_keys"), weights.top(TOP), strict=True)),
    "foci distance": lambda weights: {"distance": weights.distance()},
    "foci logit": lambda weights: {"largest": weights.largest_logit()},
}


def eager_contestants(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Iterator[Contestant]:
    """Eager code with the same statistics, and torch.compile of it."""
    # Scores, masked scores, weights and one more of their size.
    needed, there = 4 * 4 * case.batch * case.heads * case.queries * case.tk, memory_of(q.device)
    if needed > 0.8 * there:
        yield Contestant("eager", partial(refuse, f"not run: needs about {needed >> 30} GiB of {there >> 30}"))
        return
    visible = case.visible(torch.arange(case.queries, device=q.device))
    for name, top in (("eager-0", False), ("eager", True)):
        yield Contestant(name, without_gradients(partial(eager, q, k, v, visible, top)))
    if case.compiled:
        torch._dynamo.reset()
        compiled = torch.compile(eager, dynamic=False)
        yield Contestant("compiled", without_gradients(partial(compiled, q, k, v, visible, True)))


def memory_of(device: torch.device) -> int:
    """What the machine has, in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def refuse(reason: str) -> Found:
    raise MemoryError(reason)


def without_gradients(function: Callable[[], Found]) -> Callable[[], Found]:
    def run() -> Found:
        with torch.no_grad():
            return function()

    return run


def add_rows(table: Table, described: dict[str, Any], found: dict[str, Measured | str]) -> None:
    """A row per contestant; `times` and `extra_mib` are beside the fastest forward of PyTorch alone."""
    forwards = [m for name in ("sdpa", "cudnn", "varlen") if isinstance(m := found.get(name), Measured)]
    base = min(forwards, key=lambda measured: measured.ms, default=None)
    for name, measured in found.items():
        if isinstance(measured, str):
            table.add(**described, contestant=name, ms=None, times=None, extra_mib=None, note=measured)
            continue
        table.add(
            **described,
            contestant=name,
            ms=measured.ms,
            spread=measured.spread,
            rounds=measured.rounds,
            times=measured.ms / base.ms if base else None,
            mib=measured.mib,
            extra_mib=measured.mib - base.mib if base else None,
        )


def runs(device: torch.device, quick: bool) -> list[Run]:
    """The important ones first: a run that is out of time leaves out the last."""
    gpu = device.type == "cuda"
    if quick:
        causal = Case("causal", 1, 4, 512, 64, compiled=gpu)
        others = Case("full", 1, 4, 512, 64, kv_heads=2), Case("window", 1, 4, 512, 64, window=128)
        kinds = [Run(replace(causal, compiled=False), scores) for scores in ("peaked", "ascending")]
        return [Run(causal), *map(Run, others), *kinds, Run(causal, long=True)]
    if not gpu:
        causal = Case("causal", 1, 8, 4096, 64, compiled=True)
        kinds = [Run(replace(causal, compiled=False), scores) for scores in ("peaked", "ascending")]
        return [Run(causal), Run(Case("full", 1, 8, 4096, 64)), *kinds]
    return gpu_runs()


def gpu_runs() -> list[Run]:
    """16 heads; 8 for the long ones."""
    main_case = Case("causal", 1, 16, 8192, 128, compiled=True)
    kinds = [Run(main_case), *(Run(replace(main_case, compiled=False), s) for s in ("peaked", "ascending"))]
    long = [Run(Case("causal", 1, 8, length, 128), long=True) for length in (8192, 16384, 32768, 65536, 131072)]
    ragged = [Run(Case("causal", 1, 16, length, 128)) for length in (8000, 2000)]
    masked = [
        Run(Case("causal", 1, 32, 8192, 128, kv_heads=8)),
        Run(Case("window", 1, 16, 8192, 128, window=1024)),
        Run(Case("documents", 1, 16, 8192, 128)),
        Run(Case("padding", 2, 16, 8192, 128)),
        Run(Case("window", 1, 16, 32768, 128, window=4096)),
    ]
    lengths = [Run(Case("causal", 1, 16, length, 128)) for length in (32768, 2048, 16384, 4096)]
    full = [Run(Case("full", 1, 16, length, 128)) for length in (8192, 2048, 32768)]
    narrow = [Run(Case(kind, 1, 16, n, 64)) for n in (8192, 2048, 32768) for kind in ("causal", "full")]
    return [*kinds, *ragged, *long, *masked, *lengths, *full, *narrow]


def finish(table: Table) -> None:
    """Print the short tables and the failures."""
    down = ("case", "scores", "dtype")
    table.print_table("microseconds of a call, attention included", ("case",), "us", {})
    own = {"sdpa ms": ("sdpa", "ms"), "summary ms": ("foci summary", "ms")}
    table.print_table(
        "multiples of the fastest fused forward (every contestant also computes the output)", down, "times", own
    )
    table.print_table("peak MiB in addition to that forward", down, "extra_mib", {})
    print("\nthree: entropy, received and picture in one pass; four: plus the top keys.")
    print("summary: entropy, received, picture, distance, largest logit, top keys; summary-0: without the top keys.")
    print("eager: entropy, received, picture and the top keys; eager-0: without the top keys.")
    table.print_failures()
    table.print_footer()


if __name__ == "__main__":
    sys.exit(main())

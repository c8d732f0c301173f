"""Additive attention, wᵀ tanh(q + k): foci, eager code and torch.compile; forward, and forward with backward.

    python benchmarks/additive.py                       everybody, every shape
    python benchmarks/additive.py --variants            foci's own kernels under other tilings, for tuning
    python benchmarks/additive.py --only n4096 --out /tmp/additive.csv

Terms are B H Tq Tk D: one tanh of the plain formula each. Nobody gets a figure whose output, or gradient, is further
from float64 than twice the error of eager code and a floor.

B batch, H heads, R some of the queries, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
from gates import FLOOR, GateError, error_of, sample_rows
from table import Options, Table, dtype_name, parse_options
from timing import Clock, Contestant, Measured, compare, format_error, free_memory, log, make_clock
from torch import Tensor

import foci
from foci.gpu.additive import launch, one_pass_backward
from foci.gpu.additive.arguments import AdditiveOptions, AdditiveTiling
from foci.runtime import native

COLUMNS = (
    "case", "dtype", "direction", "contestant", "ms", "spread", "rounds", "terms_e12", "terms_e9", "gb_s", "mib",
    "over_compiled", "over_eager", "error", "allowed", "note",
)  # fmt: skip

Tensors = dict[str, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
NAMES = ("q", "k", "v", "weight")
NO_OPTIONS = AdditiveOptions(None, None, None, None, None, False, 0.0)
# Eager code holds several tensors of size B H Tq Tk D.
MOST_EAGER = 2**34


@dataclass(frozen=True)
class Case:
    """One shape; the number of keys defaults to the number of queries."""

    batch: int
    heads: int
    queries: int
    width: int
    keys: int = 0

    @property
    def tk(self) -> int:
        return self.keys or self.queries

    @property
    def name(self) -> str:
        length = f"n{self.queries}" if not self.keys else f"n{self.queries}/{self.keys}"
        return f"b{self.batch} h{self.heads} {length} d{self.width}"

    @property
    def terms(self) -> int:
        return self.batch * self.heads * self.queries * self.tk * self.width

    def inputs(self, device: torch.device, dtype: torch.dtype) -> Tensors:
        lead = (self.batch, self.heads)
        shapes = {
            "q": (*lead, self.queries, self.width),
            "k": (*lead, self.tk, self.width),
            "v": (*lead, self.tk, self.width),
        }
        made = {name: torch.randn(size, device=device, dtype=dtype) for name, size in shapes.items()}
        weight = torch.randn(self.width, device=device) * 3 * self.width**-0.5
        return made | {"weight": weight.to(dtype)}


def cases(quick: bool, gpu: bool) -> list[Case]:
    if quick:
        return [Case(2, 1, 65, 24), Case(1, 2, 1, 16, keys=200)]
    if not gpu:
        return [
            Case(1, 8, 512, 64),
            Case(1, 2, 1024, 64),
            Case(4, 1, 256, 256),
            Case(16, 1, 64, 256),
            Case(16, 1, 1, 256, keys=512),
        ]
    return [
        Case(1, 8, 4096, 64),
        Case(4, 8, 1024, 64),
        Case(16, 1, 512, 256),
        Case(64, 1, 128, 256),
        Case(1, 8, 8192, 64),
        Case(64, 1, 1, 256, keys=4096),
        Case(8, 8, 1, 64, keys=32768),
    ]


def eager(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """The formula in eager code."""
    scores = torch.tanh(q.unsqueeze(3) + k.unsqueeze(2)) @ weight
    return scores.softmax(-1) @ v


def foci_attention(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """foci's default backend."""
    return foci.attention(q, k, v, score=foci.Additive(weight))


def foci_without_compiler(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """foci without a C compiler, forward and backward."""
    return Uncompiled.apply(q, k, v, weight)  # type: ignore[no-any-return, no-untyped-call]


class Uncompiled(torch.autograd.Function):
    """foci without compiled code; the switch must also be off in the backward, which runs later."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        with torch.enable_grad(), without_compiler():
            leaves = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
            out = foci_attention(*leaves)
        ctx.graph = (leaves, out)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor, ...]:
        leaves, out = ctx.graph
        with without_compiler():
            return torch.autograd.grad(out, leaves, out_gradient)


def without_compiler() -> Any:
    return mock.patch.object(native, "why_unavailable", return_value="a machine without a compiler")


def exponential(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """The formula with precomputed exponentials, as our kernels compute it, for torch.compile."""
    shares = 1 / (1 + torch.exp(2 * q).unsqueeze(3) * torch.exp(2 * k).unsqueeze(2))
    return (weight.sum() - 2 * (shares * weight).sum(-1)).softmax(-1) @ v


class Tiled(torch.autograd.Function):
    """foci's kernels with given tilings; None is the default."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor,
        there: AdditiveTiling | None,
        back: AdditiveTiling | None,
    ) -> Tensor:
        out, lse = launch.forward(q, k, v, weight, NO_OPTIONS, there)
        ctx.save_for_backward(q, k, v, weight, out, lse)
        ctx.back = back
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        found = one_pass_backward.backward_in_one_pass(d_out, None, *ctx.saved_tensors, NO_OPTIONS, ctx.back)
        return (*found, None, None)


FORWARD = {
    "64x64": AdditiveTiling(),
    "64x64 c4": AdditiveTiling(chunk=4),
    "64x64 c4 r168": AdditiveTiling(chunk=4, registers=168),
    "64x64 c4 r128": AdditiveTiling(chunk=4, registers=128),
    "64x64 r168": AdditiveTiling(registers=168),
    "64x64 c16": AdditiveTiling(chunk=16),
    "64x64 s2": AdditiveTiling(stages=2),
    "64x64 w8": AdditiveTiling(warps=8, query_threads=16),
    "128x64 w8": AdditiveTiling(queries=128, warps=8, query_threads=16),
    "64x128 w8": AdditiveTiling(keys=128, warps=8),
    "128x128 w8 c4": AdditiveTiling(queries=128, keys=128, warps=8, query_threads=16, chunk=4),
    "32x64": AdditiveTiling(queries=32),
    "32x64 r128": AdditiveTiling(queries=32, registers=128),
    "32x128 w8": AdditiveTiling(queries=32, keys=128, warps=8),
    "64x64 by two": AdditiveTiling(max_shared=2),
}
BACKWARD = {
    "64x64": AdditiveTiling(),
    "64x64 c4": AdditiveTiling(chunk=4),
    "64x64 w8 r128": AdditiveTiling(warps=8, query_threads=16, registers=128, feature_threads=64),
    "64x32 r128": AdditiveTiling(keys=32, registers=128, programs=4),
    "32x64": AdditiveTiling(queries=32),
}


def contestants(case: Case, direction: str, variants: bool, gpu: bool) -> Iterator[tuple[str, Attend]]:
    yield "foci", foci_attention
    if variants:
        chosen = FORWARD if direction == "forward" else BACKWARD
        for name, tiling in chosen.items():
            pair = {"there": tiling, "back": None} if direction == "forward" else {"there": None, "back": tiling}
            yield name, partial(tiled, **pair)
        return
    if case.terms <= MOST_EAGER:
        yield "eager", eager
    yield "compiled", compiled
    if not gpu:
        yield "foci, no compiler", foci_without_compiler
        yield "compiled, exponential", compiled_exponential


def tiled(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, there: AdditiveTiling | None, back: AdditiveTiling | None
) -> Tensor:
    return Tiled.apply(q, k, v, weight, there, back)  # type: ignore[no-any-return, no-untyped-call]


def compiled(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    return COMPILED(q, k, v, weight)


def compiled_exponential(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    return COMPILED_EXPONENTIAL(q, k, v, weight)


COMPILED = torch.compile(eager, dynamic=False)
COMPILED_EXPONENTIAL = torch.compile(exponential, dynamic=False)


@dataclass
class Gate:
    """The truth for some queries: the output gradient is zero elsewhere, so these determine all gradients."""

    inputs: Tensors
    rows: Tensor
    out_gradient: Tensor
    truth: Tensors
    allowed: dict[str, float]

    @classmethod
    def of(cls, inputs: Tensors) -> Gate:
        q = inputs["q"]
        # The float64 formula holds several tensors of size B H Tk D per row.
        most = max(1, 2**26 // (inputs["k"].numel()))
        rows = sample_rows(q.shape[2], q.device)[: min(64, most)]
        out_gradient = torch.zeros(*q.shape[:3], inputs["v"].shape[-1], device=q.device, dtype=q.dtype)
        out_gradient[:, :, rows] = torch.randn_like(out_gradient[:, :, rows])
        few = inputs | {"q": q[:, :, rows]}
        truth = output_and_gradients(
            reference, {name: x.double() for name, x in few.items()}, out_gradient[:, :, rows].double()
        )
        plain = output_and_gradients(eager, few, out_gradient[:, :, rows])
        allowed = {name: 2 * error(name, plain[name], truth[name]) + FLOOR[q.dtype] for name in truth}
        truth["q"] = torch.zeros_like(q, dtype=torch.float64).index_copy(2, rows, truth["q"])
        return cls(inputs, rows, out_gradient, truth, allowed)

    def check(self, attend: Attend, direction: str) -> tuple[float, float]:
        """The error closest to its limit, and that limit; raises if an error is above its limit."""
        if direction == "forward":
            with torch.no_grad():
                found = {"out": attend(*self.inputs.values())}
        else:
            found = output_and_gradients(attend, self.inputs, self.out_gradient)
        found["out"] = found["out"][:, :, self.rows]
        errors = {name: error(name, tensor, self.truth[name]) for name, tensor in found.items()}
        for name, value in errors.items():
            # Written this way, NaN fails.
            if not value <= self.allowed[name]:
                raise GateError(f"{name} is off by {value:.2e}, allowed {self.allowed[name]:.2e}")
        worst = max(errors, key=lambda name: errors[name] / self.allowed[name])
        return errors[worst], self.allowed[worst]


def error(name: str, found: Tensor, truth: Tensor) -> float:
    if name == "weight":
        return float((found.double() - truth).norm() / truth.norm())
    return error_of(name, found, truth)


def reference(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    return foci.attention(q, k, v, score=foci.Additive(weight), backend="reference")


def output_and_gradients(attend: Attend, inputs: Tensors, out_gradient: Tensor) -> Tensors:
    """The output and the gradients of all inputs."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    out = attend(*leaves.values())
    gradients = torch.autograd.grad(out, list(leaves.values()), out_gradient)
    return {"out": out.detach()} | dict(zip(leaves, gradients, strict=True))


def timed_function(attend: Attend, inputs: Tensors, out_gradient: Tensor, direction: str) -> Callable[[], Any]:
    """The function that is timed."""
    leaves = [x.detach().requires_grad_() for x in inputs.values()]

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*inputs.values())

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*leaves), leaves, out_gradient)

    return forward if direction == "forward" else both


def run_case(case: Case, dtype: torch.dtype, options: Options, variants: bool, table: Table, clock: Clock) -> None:
    log(case.name)
    if options.device.type == "cpu":
        # Every shape is compiled separately; Dynamo stops after eight.
        torch.compiler.reset()
    inputs = case.inputs(options.device, dtype)
    chosen = foci.plan(*list(inputs.values())[:3], score=foci.Additive(inputs["weight"])).chosen
    if options.device.type == "cuda" and chosen != "triton":
        raise RuntimeError(f"the default backend must be triton, got {chosen}")
    gate = Gate.of(inputs)
    out_gradient = torch.randn_like(gate.out_gradient)
    for direction in ("forward", "forward + backward"):
        passed: list[Contestant] = []
        found: dict[str, Measured | str] = {}
        errors: dict[str, tuple[float, float]] = {}
        for name, attend in contestants(case, direction, variants, options.device.type == "cuda"):
            try:
                errors[name] = gate.check(attend, direction)
            except Exception as failure:  # noqa: BLE001 - an error is the result of a contestant
                found[name] = f"{'GATE FAILED: ' if isinstance(failure, GateError) else ''}{format_error(failure)}"
                log(f"  {direction}, {name}: {found[name]}")
                free_memory()
                continue
            passed.append(Contestant(name, timed_function(attend, inputs, out_gradient, direction)))
        found |= compare(passed, clock, options.seconds)
        add_rows(table, case, dtype, direction, found, errors)


def add_rows(
    table: Table,
    case: Case,
    dtype: torch.dtype,
    direction: str,
    found: dict[str, Measured | str],
    errors: dict[str, tuple[float, float]],
) -> None:
    peers = {name: found[name].ms for name in ("compiled", "eager") if isinstance(found.get(name), Measured)}  # type: ignore[union-attr]
    about = {"case": case.name, "dtype": dtype_name(dtype), "direction": direction}
    read = 2 * case.batch * case.heads * case.tk * case.width * dtype.itemsize
    for name, measured in found.items():
        if isinstance(measured, str):
            table.add(**about, contestant=name, ms=None, note=measured)
            continue
        table.add(
            **about,
            contestant=name,
            ms=measured.ms,
            spread=measured.spread,
            rounds=measured.rounds,
            mib=measured.mib,
            terms_e12=case.terms / measured.ms / 1e9,
            terms_e9=case.terms / measured.ms / 1e6,
            gb_s=read / measured.ms / 1e6 if case.queries == 1 else None,
            over_compiled=peers["compiled"] / measured.ms if "compiled" in peers else None,
            over_eager=peers["eager"] / measured.ms if "eager" in peers else None,
            error=errors[name][0],
            allowed=errors[name][1],
        )


def compile_one(case: Case, direction: str, name: str, variants: bool) -> None:
    """Compile one contestant in a separate process; the result stays in the caches of the compilers."""
    attend = dict(contestants(case, direction, variants, gpu=True))[name]
    inputs = case.inputs(torch.device("cuda"), torch.bfloat16)
    timed_function(attend, inputs, torch.randn_like(inputs["q"]), direction)()


def compile_all(chosen: list[Case], variants: bool) -> None:
    """Compile everything before the timing, one process each."""
    jobs = {
        (case, direction, name)
        for case in chosen
        for direction in ("forward", "forward + backward")
        for name, _ in contestants(case, direction, variants, gpu=True)
        if name != "eager"
    }
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        done = [pool.submit(compile_one, *job, variants) for job in sorted(jobs, key=str)]
    failed = [format_error(failure) for job in done if (failure := job.exception())]
    log(f"compiled {len(done)}, {len(failed)} failed {failed[:1]}")


def main() -> int:
    """Run the benchmark; the exit status is 1 if foci failed a gate."""
    variants = "--variants" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--variants"]
    options = parse_options("additive", __doc__ or "", (torch.float32,))
    table = Table(options.device, COLUMNS, options.path)
    gpu = options.device.type == "cuda"
    chosen = [case for case in cases(options.quick, gpu) if options.wants(case.name)]
    if gpu:
        compile_all([case for case in chosen if case.queries > 1] if variants else chosen, variants)
    clock = make_clock(options.device)
    for dtype in options.dtypes:
        for case in chosen:
            if variants and case.queries == 1:
                continue
            if options.out_of_time:
                table.add(
                    case=case.name, dtype=dtype_name(dtype), contestant="foci", ms=None, note="not run: out of time"
                )
                continue
            run_case(case, dtype, options, variants, table, clock)
            free_memory()
    finish(table, variants)
    return int(table.has_failed_gate())


def finish(table: Table, variants: bool) -> None:
    down = ("case", "direction")
    table.print_table("milliseconds, median", down, "ms", {})
    gpu = table.device.type == "cuda"
    table.print_table("terms/s, 1e12" if gpu else "terms/s, 1e9", down, "terms_e12" if gpu else "terms_e9", {})
    if not variants:
        own = {"over compiled": "over_compiled", "over eager": "over_eager", "GB/s": "gb_s", "error": "error"}
        table.print_table(
            "peak MiB beyond the inputs, and foci's figures",
            down,
            "mib",
            {title: ("foci", name) for title, name in own.items()},
        )
    table.print_failures()
    table.print_footer()


if __name__ == "__main__":
    sys.exit(main())

"""Distance biases (T5's buckets, Shaw's vectors, ALiBi): foci, SDPA with a dense bias, and FlexAttention.

    python benchmarks/relative.py                       everybody, every case
    python benchmarks/relative.py --variants            foci's own kernels under other tiles, for tuning
    python benchmarks/relative.py --profile             where foci's time goes, kernel by kernel
    python benchmarks/relative.py --only buckets --out /tmp/relative.csv

Nobody gets a figure whose output or gradients, those of the tables included, are further from float64 than twice the
error of eager code and a floor. A dense bias is built from its table inside the timing: it changes with every step.

B batch, H heads, R some of the queries, T queries and keys, D width, W distances.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F
from gates import FLOOR, GateError, error_of, sample_rows
from table import Options, Table, dtype_name, parse_options
from timing import Clock, Contestant, Measured, compare, format_error, free_memory, log, make_clock
from torch import Tensor

import foci
from foci.gpu.arguments import Tiling
from foci.gpu.attention import tilings

COLUMNS = (
    "case", "dtype", "direction", "contestant", "ms", "spread", "rounds", "tflops", "mib", "over_dense", "error",
    "allowed", "note",
)  # fmt: skip

Tensors = dict[str, Tensor]
Attend = Callable[[Tensors], Tensor]
DIRECTIONS = ("forward", "backward")

# Two matrix products forward, five backward, each a multiplication and an addition; recomputation is not counted.
OPERATIONS = {"forward": 4, "backward": 10}
# Eager code holds the matrix several times.
MOST_EAGER = 2**28


@dataclass(frozen=True)
class Case:
    """One bias and one shape: buckets, relative (keys alone), values (keys and values) or alibi."""

    kind: str
    batch: int
    heads: int
    length: int
    width: int = 64
    causal: bool = False
    reach: int = 128  # the largest distance of buckets, the clip of vectors

    @property
    def name(self) -> str:
        seen = " causal" if self.causal else ""
        return f"{self.kind}{seen} b{self.batch} h{self.heads} n{self.length} d{self.width} r{self.reach}"

    @property
    def entries(self) -> int:
        """The number of visible entries of the matrix."""
        square = self.length * (self.length + 1) // 2 if self.causal else self.length**2
        return self.batch * self.heads * square

    def inputs(self, device: torch.device, dtype: torch.dtype) -> Tensors:
        shape = (self.batch, self.heads, self.length, self.width)
        made = {name: torch.randn(shape, device=device, dtype=dtype) for name in ("q", "k", "v")}
        if self.kind == "alibi":
            return made
        if self.kind == "buckets":
            return made | {"table": torch.randn(32, self.heads, device=device, dtype=dtype)}
        names = ("near", "far") if self.kind == "values" else ("near",)
        return made | {n: torch.randn(2 * self.reach + 1, self.width, device=device, dtype=dtype) for n in names}

    def bias(self, tensors: Tensors) -> foci.ALiBi | foci.Buckets | foci.Relative:
        if self.kind == "alibi":
            return foci.ALiBi()
        if self.kind == "buckets":
            return foci.Buckets(tensors["table"], not self.causal, self.reach)
        return foci.Relative(tensors["near"], tensors.get("far"))

    @property
    def mask(self) -> foci.Mask | None:
        return foci.causal if self.causal else None


def cases(quick: bool, gpu: bool) -> list[Case]:
    if quick or not gpu:
        kinds = (("buckets", False), ("values", True), ("alibi", True))
        return [Case(kind, 1, 2, 70, 16, causal, reach=9) for kind, causal in kinds]
    return [
        Case("buckets", 4, 16, 2048),
        Case("relative", 4, 16, 2048, reach=16),
        Case("values", 4, 16, 2048, reach=16),
        Case("buckets", 4, 16, 2048, causal=True),
        Case("buckets", 4, 16, 2048, width=128),
        Case("alibi", 4, 32, 4096, causal=True),
        Case("relative", 1, 16, 2048, reach=512),
        Case("buckets", 1, 16, 16384),
        Case("values", 1, 16, 16384, reach=16),
    ]


def foci_attention(case: Case, tensors: Tensors) -> Tensor:
    """foci's default backend; without a GPU, Triton's interpreter."""
    backend = None if tensors["q"].is_cuda else "triton"
    q, k, v = (tensors[name] for name in "qkv")
    return foci.attention(q, k, v, bias=case.bias(tensors), mask=case.mask, backend=backend)


def distances(rows: Tensor, length: int) -> Tensor:
    return torch.arange(length, device=rows.device) - rows.unsqueeze(-1)


def dense_bias(case: Case, tensors: Tensors, rows: Tensor) -> Tensor:
    """The bias as a dense tensor: (1 or B, H, R, T)."""
    distance = distances(rows, case.length)
    if case.kind == "alibi":
        slopes = 2.0 ** (-8.0 * torch.arange(1, case.heads + 1, device=rows.device) / case.heads)
        added = -(slopes.view(-1, 1, 1) * distance.abs()).unsqueeze(0).to(tensors["q"].dtype)
    elif case.kind == "buckets":
        added = tensors["table"][bucket(case, distance)].permute(2, 0, 1).unsqueeze(0)
    else:
        index = distance.clamp(-case.reach, case.reach) + case.reach
        per_row = tensors["q"] @ tensors["near"].mT * case.width**-0.5
        added = per_row.gather(-1, index.expand(*per_row.shape[:2], -1, -1))
    return added.masked_fill(distance > 0, -torch.inf) if case.causal else added


def bucket(case: Case, distance: Tensor) -> Tensor:
    return foci.Buckets(torch.zeros(32, 1, device=distance.device), not case.causal, case.reach).bucket(distance)


def eager(case: Case, tensors: Tensors, rows: Tensor | None = None) -> Tensor:
    """The formula in eager code, for all queries or for some rows."""
    rows = torch.arange(case.length, device=tensors["q"].device) if rows is None else rows
    scores = tensors["q"] @ tensors["k"].mT * case.width**-0.5 + dense_bias(case, tensors, rows)
    weights = scores.softmax(-1)
    out = weights @ tensors["v"]
    if "far" not in tensors:
        return out
    index = (distances(rows, case.length).clamp(-case.reach, case.reach) + case.reach).expand_as(weights)
    by_distance = weights.new_zeros(*weights.shape[:-1], 2 * case.reach + 1).scatter_add(-1, index, weights)
    return out + by_distance @ tensors["far"]


def dense(case: Case, tensors: Tensors) -> Tensor:
    rows = torch.arange(case.length, device=tensors["q"].device)
    bias = dense_bias(case, tensors, rows)
    return F.scaled_dot_product_attention(tensors["q"], tensors["k"], tensors["v"], attn_mask=bias)


@cache
def flex_alibi(case: Case) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    slopes = 2.0 ** (-8.0 * torch.arange(1, case.heads + 1, device="cuda") / case.heads)
    size = case.length
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, size, size) if case.causal else None
    compiled = torch.compile(flex_attention, dynamic=False)

    def score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[h] * (i - j).abs()

    return lambda tensors: compiled(tensors["q"], tensors["k"], tensors["v"], score_mod=score, block_mask=blocks)


Tiles = Tiling
# Tiles to try, by pass and width; foci uses the first of each.
VARIANTS: dict[str, dict[int, list[Tiling]]] = {
    "forward": {
        64: [
            Tiles(128, 64, 8, 3, 128), Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 2, 128), Tiles(64, 64, 4, 3, 168),
            Tiles(128, 128, 8, 2), Tiles(128, 128, 8, 3), Tiles(128, 32, 4, 4, 168),
        ],
        128: [Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2), Tiles(128, 128, 8, 2)],
    },
    "queries": {
        64: [
            Tiles(64, 64, 4, 2, 168), Tiles(64, 64, 4, 3, 168), Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 2),
            Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 3, 128), Tiles(64, 32, 4, 3, 128), Tiles(64, 128, 4, 2),
        ],
        128: [Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 3), Tiles(128, 32, 8, 3)],
    },
    "keys": {
        64: [
            Tiles(32, 64, 4, 3), Tiles(32, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(64, 128, 8, 2), Tiles(64, 128, 8, 3),
            Tiles(32, 128, 8, 3), Tiles(32, 128, 8, 3, 128), Tiles(32, 64, 4, 4, 168), Tiles(64, 64, 4, 3),
        ],
        128: [Tiles(32, 128, 8, 2), Tiles(32, 128, 8, 3), Tiles(32, 64, 4, 2), Tiles(64, 64, 4, 2)],
    },
}  # fmt: skip
TUNED = (Case("buckets", 4, 16, 2048), Case("values", 4, 16, 2048, reach=16), Case("buckets", 4, 16, 2048, width=128))


@contextmanager
def tiled(name: str, width: int, tiles: Tiling) -> Iterator[None]:
    """foci's kernels with these tiles in one pass."""
    before = tilings.ROW_TABLE_TILINGS[name][width]
    tilings.ROW_TABLE_TILINGS[name][width] = tiles
    try:
        yield
    finally:
        tilings.ROW_TABLE_TILINGS[name][width] = before


def contestants(case: Case, direction: str, variants: bool) -> Iterator[Contestant]:
    """The contestants that support the case; `run` takes the tensors."""
    yield Contestant("foci", partial(foci_attention, case))
    if variants:
        for name in ("forward",) if direction == "forward" else ("queries", "keys"):
            for tiles in VARIANTS[name][case.width]:
                label = f"{name} {tiles.queries}x{tiles.keys} w{tiles.warps} s{tiles.stages} r{tiles.registers or ''}"
                context = partial(tiled, name, case.width, tiles)
                yield Contestant(label, partial(foci_attention, case), context=context)
        return
    if case.kind != "values" and case.entries <= 8 * MOST_EAGER:
        yield Contestant("sdpa, dense bias", partial(dense, case))
    if case.entries <= MOST_EAGER:
        yield Contestant("eager", partial(eager, case))
    if case.kind == "alibi" and torch.cuda.is_available():
        yield Contestant("flex", flex_alibi(case))


@dataclass
class Gate:
    """The truth for some queries: the output gradient is zero elsewhere, so these determine all gradients."""

    inputs: Tensors
    rows: Tensor
    out_gradient: Tensor
    truth: Tensors
    allowed: dict[str, float]

    @classmethod
    def of(cls, case: Case, inputs: Tensors) -> Gate:
        q = inputs["q"]
        rows = sample_rows(q.shape[2], q.device)
        out_gradient = torch.zeros_like(q)
        out_gradient[:, :, rows] = torch.randn_like(out_gradient[:, :, rows])
        few = inputs | {"q": q[:, :, rows]}
        truth = output_and_gradients(
            partial(reference, case, rows), {n: x.double() for n, x in few.items()}, out_gradient[:, :, rows].double()
        )
        plain = output_and_gradients(partial(eager, case, rows=rows), few, out_gradient[:, :, rows])
        allowed = {name: 2 * error(name, plain[name], truth[name]) + FLOOR[q.dtype] for name in truth}
        truth["q"] = torch.zeros_like(q, dtype=torch.float64).index_copy(2, rows, truth["q"])
        return cls(inputs, rows, out_gradient, truth, allowed)

    def check(self, contestant: Contestant, direction: str) -> tuple[float, float]:
        """The error closest to its limit, and that limit; raises if an error is above its limit."""
        with contestant.context():
            if direction == "forward":
                with torch.no_grad():
                    found = {"out": contestant.run(self.inputs)}
            else:
                found = output_and_gradients(contestant.run, self.inputs, self.out_gradient)
        found["out"] = found["out"][:, :, self.rows]
        errors = {name: error(name, tensor, self.truth[name]) for name, tensor in found.items()}
        for name, value in errors.items():
            # Written this way, NaN fails.
            if not value <= self.allowed[name]:
                raise GateError(f"{name} is off by {value:.2e}, allowed {self.allowed[name]:.2e}")
        worst = max(errors, key=lambda name: errors[name] / self.allowed[name])
        return errors[worst], self.allowed[worst]


def error(name: str, found: Tensor, truth: Tensor) -> float:
    if name in {"table", "near", "far"}:
        return float((found.double() - truth).norm() / truth.norm())
    return error_of(name, found, truth)


def reference(case: Case, rows: Tensor, tensors: Tensors) -> Tensor:
    """The reference for some queries, at the positions of their rows."""
    q, k, v = (tensors[name] for name in "qkv")
    arguments: dict[str, Any] = {"bias": case.bias(tensors), "mask": case.mask, "positions": (rows, None)}
    return foci.attention(q, k, v, **arguments, backend="reference")


def output_and_gradients(attend: Attend, inputs: Tensors, out_gradient: Tensor) -> Tensors:
    """The output and the gradients of all inputs."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    out = attend(leaves)
    gradients = torch.autograd.grad(out, list(leaves.values()), out_gradient)
    return {"out": out.detach()} | dict(zip(leaves, gradients, strict=True))


def timed_function(contestant: Contestant, inputs: Tensors, out_gradient: Tensor, direction: str) -> Contestant:
    """The function that is timed: the forward without gradients, or the backward alone."""
    attend, leaves = contestant.run, {name: x.detach().requires_grad_() for name, x in inputs.items()}

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(inputs)

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, list(leaves.values()), out_gradient)

    if direction == "forward":
        return Contestant(contestant.name, forward, context=contestant.context)
    return Contestant(contestant.name, backward, partial(attend, leaves), contestant.context)


def run_case(case: Case, dtype: torch.dtype, options: Options, variants: bool, table: Table, clock: Clock) -> None:
    log(case.name)
    inputs = case.inputs(options.device, dtype)
    chosen = foci.plan(*(inputs[name] for name in "qkv"), bias=case.bias(inputs), mask=case.mask).chosen
    if options.device.type == "cuda" and chosen != "triton":
        raise RuntimeError(f"the default backend must be triton, got {chosen}")
    gate = Gate.of(case, inputs)
    out_gradient = torch.randn_like(gate.out_gradient)
    for direction in DIRECTIONS:
        passed: list[Contestant] = []
        found: dict[str, Measured | str] = {}
        errors: dict[str, tuple[float, float]] = {}
        for contestant in contestants(case, direction, variants):
            try:
                errors[contestant.name] = gate.check(contestant, direction)
            except Exception as failure:  # noqa: BLE001 - an error is the result of a contestant
                text = f"{'GATE FAILED: ' if isinstance(failure, GateError) else ''}{format_error(failure)}"
                found[contestant.name] = text
                log(f"  {direction}, {contestant.name}: {text}")
                free_memory()
                continue
            passed.append(timed_function(contestant, inputs, out_gradient, direction))
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
    about = {"case": case.name, "dtype": dtype_name(dtype), "direction": direction}
    peer = found.get("sdpa, dense bias", found.get("eager"))
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
            tflops=OPERATIONS[direction] * case.entries * case.width / measured.ms / 1e9,
            over_dense=peer.ms / measured.ms if isinstance(peer, Measured) else None,
            error=errors[name][0],
            allowed=errors[name][1],
        )


def compile_one(case: Case, direction: str, name: str, variants: bool) -> None:
    """Compile one contestant in a separate process; the result stays in the caches of the compilers."""
    inputs = case.inputs(torch.device("cuda"), torch.bfloat16)
    contestant = next(c for c in contestants(case, direction, variants) if c.name == name)
    timed_function(contestant, inputs, torch.randn_like(inputs["q"]), direction).run_once()


def compile_all(chosen: list[Case], variants: bool) -> None:
    """Compile everything before the timing, one process each."""
    jobs = [
        (case, direction, contestant.name)
        for case in chosen
        for direction in DIRECTIONS
        for contestant in contestants(case, direction, variants)
        if contestant.name not in {"eager", "sdpa, dense bias"}
    ]
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        done = [pool.submit(compile_one, *job, variants) for job in jobs]
    failed = [
        f"{job[2]}: {format_error(failure)}"
        for job, run in zip(jobs, done, strict=True)
        if (failure := run.exception())
    ]
    log(f"compiled {len(done)}, {len(failed)} failed {failed[:3]}")


def show_totals(table: Table) -> None:
    """Print the time of forward and backward together, and as a multiple of foci's time."""
    times: dict[tuple[str, str], dict[str, float]] = {}
    for row in table.rows:
        if row.get("ms"):
            times.setdefault((row["case"], row["contestant"]), {})[row["direction"]] = row["ms"]
    totals = {key: sum(parts.values()) for key, parts in times.items() if len(parts) == len(DIRECTIONS)}
    print("\nforward + backward, ms")
    for (case, name), total in totals.items():
        own = totals.get((case, "foci"))
        print(f"  {case:<40} {name:<18} {total:8.3f}" + (f"  {total / own:6.2f} x foci" if own else ""))


def profile(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """Print every kernel of a forward and a backward, longest first."""
    leaves = {name: x.requires_grad_() for name, x in case.inputs(device, dtype).items()}
    out_gradient = torch.randn_like(leaves["q"])
    for _ in range(3):
        torch.autograd.grad(foci_attention(case, leaves), list(leaves.values()), out_gradient)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(5):
            torch.autograd.grad(foci_attention(case, leaves), list(leaves.values()), out_gradient)
        torch.cuda.synchronize()
    print(f"\n{case.name}: microseconds of a forward and a backward")
    for event in sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)[:14]:
        print(f"  {event.self_device_time_total / 5:9.1f}  x{event.count / 5:<4g} {event.key[:90]}")


def show_variants(table: Table) -> None:
    """Print the variants, fastest first."""
    for row in sorted(table.rows, key=lambda row: (row["case"], row["direction"], row.get("ms") or 1e9)):
        ms = f"{row['ms']:8.3f}" if row.get("ms") else "  failed"
        print(f"{row['case']:<32} {row['direction']:<9} {row['contestant']:<28} {ms}")


def main() -> int:
    """Run the benchmark; the exit status is 1 if foci failed a gate."""
    variants, profiled = "--variants" in sys.argv, "--profile" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument not in {"--variants", "--profile"}]
    options = parse_options("relative", __doc__ or "", (torch.float32,))
    table, clock = Table(options.device, COLUMNS, options.path), make_clock(options.device)
    gpu = options.device.type == "cuda"
    chosen = [c for c in (TUNED if variants and gpu else cases(options.quick, gpu)) if options.wants(c.name)]
    if gpu:
        compile_all(chosen, variants)
    if profiled:
        for case in chosen:
            profile(case, options.dtypes[0], options.device)
        return 0
    for case in chosen:
        for dtype in options.dtypes:
            if options.out_of_time:
                log(f"out of time before {case.name}")
                break
            run_case(case, dtype, options, variants, table, clock)
            free_memory()
    if variants:
        show_variants(table)
    else:
        table.print_table(
            "ms", ("case", "direction"), "ms", {"foci TFLOP/s": ("foci", "tflops"), "foci MiB": ("foci", "mib")}
        )
        show_totals(table)
    table.print_failures()
    table.print_footer()
    return int(table.has_failed_gate())


if __name__ == "__main__":
    sys.exit(main())

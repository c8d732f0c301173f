"""The statistics pass on a GPU, next to cuDNN's forward on the same inputs: the Gluon kernel for Hopper and the plain
Triton kernel, each for every request that it supports.

Causal, 16 heads of 128, 8,192 tokens; --shapes adds others. Every result is checked before it is timed: two
heads are compared with the dense matrix in float32. Kernels are timed as CUDA graphs, without the launches from Python.
They are compiled before, in separate processes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from table import Table, parse_options
from timing import Contestant, Measured, compare, format_error, free_memory, log, make_clock

from foci.statistics.cuda import hopper
from foci.statistics.cuda import plan as launcher
from foci.statistics.cuda.arguments import common_arguments, is_tma_compatible
from foci.statistics.cuda.tiling import TileConfig, default_config
from foci.statistics.request import Request

COLUMNS = (
    *("case", "scores", "wanted", "contestant", "chosen", "ms", "spread", "rounds", "with_forward", "mib"),
    *("tiles_ms", "choose_ms", "again_ms", "note"),
)
# Bounds of the errors: absolute for entropy, cells times their size, relative for the others.
LIMITS = {"entropy": 2e-4, "received": 2e-4, "picture": 2e-3, "top values": 3e-3, "top keys": 3e-3}
LIMITS |= {"distance": 1e-4, "largest_logit": 1e-3}
FORWARD = "cuDNN forward"
KINDS = ("random", "peaked", "ascending")
LEAST_CELL, MOST_CELLS = 32, 256


@dataclass(frozen=True)
class Case:
    """Query heads, key/value heads, tokens, width."""

    heads: int = 16
    groups: int = 16
    tokens: int = 8192
    width: int = 128
    causal: bool = True

    @property
    def name(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.heads}/{self.groups} heads of {self.width}, {self.tokens} tokens, {mask}"

    def wanted(self) -> dict[str, Request]:
        side = min(self.tokens // LEAST_CELL, MOST_CELLS)
        picture = (side, side, "mean")
        named = {name: Request("e" in name, "r" in name, picture if "p" in name else None) for name in SUBSETS}
        three = Request(entropy=True, received=True, picture=picture)
        return {label: named[name] for name, label in SUBSETS.items()} | {
            THREE: three,
            ALL_BUT_TOP: Request(True, True, picture, largest_logit=True, distance=True),
            "top 8": Request(top=8),
            FOUR: Request(True, True, picture, top=8),
            EVERY: Request(True, True, picture, top=8, largest_logit=True, distance=True),
        }


SUBSETS = {
    "e": "entropy",
    "r": "received",
    "p": "picture",
    "er": "entropy, received",
    "ep": "entropy, picture",
    "rp": "received, picture",
}
THREE, FOUR = "entropy, received, picture", "and top 8"
ALL_BUT_TOP, EVERY = "and distance, largest logit", "and top 8, distance, largest logit"
MAIN = Case()
SHAPES = [Case(width=64), Case(heads=32, groups=8), Case(causal=False)]
SHAPES += [Case(tokens=tokens) for tokens in (2048, 16384, 32768)]


def make(kind: str, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """random: unit normal. peaked: queries times 8. ascending: logits that grow with the position of the key."""
    q = torch.randn(1, case.heads, case.tokens, case.width, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, case.groups, case.tokens, case.width, device="cuda", dtype=q.dtype) for _ in range(2))
    if kind == "peaked":
        q = q * 8
    if kind == "ascending":
        q[..., :16] = 1.0
        k[..., :16] = (torch.arange(case.tokens, device="cuda")[:, None] / case.tokens * 16).to(k.dtype)
    return q, k, v


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """cuDNN's output and log-sum-exp; it needs one key head per query head."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) if x.shape[1] < q.shape[1] else x for x in (k, v))
    out = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
    return out[0], out[1].reshape(q.shape[:3])


def configs(q: Tensor, k: Tensor, lse: Tensor, case: Case, wanted: Request) -> dict[str, tuple[TileConfig, bool]]:
    """Each kernel that supports the request, and whether foci chooses it."""
    arguments = common_arguments(q, k, lse, 1.0, None, None, case.causal, None, None, None, None)
    chosen = launcher.choose_config(arguments, False, wanted)
    found = {"triton": default_config(case.width, q.dtype, wanted, is_tma_compatible(k), short=False)}
    if not hopper.refuses(arguments, False, wanted):
        found = {"gluon": hopper.hopper_config(wanted, case.tokens)} | found
    return {name: (config, config == chosen) for name, config in found.items()}


def measuring(
    q: Tensor, k: Tensor, lse: Tensor, case: Case, wanted: Request, config: TileConfig
) -> Callable[[], dict[str, Tensor]]:
    scale = case.width**-0.5
    return lambda: launcher.launch_statistics(q, k, lse, scale=scale, causal=case.causal, request=wanted, config=config)


def truth(q: Tensor, k: Tensor, lse: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    """Logits and weights of the first two heads in float32; writes their log-sum-exp to `lse`."""
    group = case.heads // case.groups
    s = q[0, :2].float() @ k[0, [0, 1 // group]].float().mT * case.width**-0.5
    if case.causal:
        s.masked_fill_(torch.ones(s.shape[1:], dtype=torch.bool, device="cuda").triu(1), -torch.inf)
    lse[0, :2] = s.logsumexp(-1)
    return s, (s - lse[0, :2, :, None]).exp()


def errors(got: dict[str, Tensor], s: Tensor, w: Tensor) -> dict[str, float]:
    """The largest error of each statistic divided by its bound, if above 1."""
    got = {name: x[0, :2] for name, x in got.items()}
    found = {}
    if "entropy" in got:
        found["entropy"] = (got["entropy"] - torch.special.entr(w).sum(-1)).abs()
    if "received" in got:
        found["received"] = (got["received"] - w.sum(-2)).abs() / (1 + w.sum(-2))
    if "picture" in got:
        rows, columns = got["picture"].shape[-2:]
        means = w.unflatten(-1, (columns, -1)).unflatten(-3, (rows, -1)).mean((-3, -1))
        found["picture"] = (got["picture"] - means).abs() * (w.shape[-1] // columns) * (w.shape[-2] // rows)
    if "distance" in got:
        place = torch.arange(w.shape[-1], device="cuda").float()
        far = (w * (place[:, None] - place).abs()).sum(-1)
        found["distance"] = (got["distance"] - far).abs() / w.shape[-1]
    if "largest_logit" in got:
        found["largest_logit"] = (got["largest_logit"] - s.amax((-1, -2))).abs()
    if "top_keys" in got:
        values, keys = got["top_values"], got["top_keys"].long()
        best = w.topk(values.shape[-1], -1).values
        named = w.gather(-1, keys.clamp(min=0)).where(keys >= 0, 0.0)
        order = keys.sort(-1).values
        twice = (order.diff(dim=-1) == 0) & (order[..., 1:] >= 0)
        found["top values"] = (values - best).abs() / (best + 1e-9)
        found["top keys"] = (named - values).abs() / (values + 1e-9) + twice.any()
    over = {name: float(error.max()) / LIMITS[name] for name, error in found.items()}
    return {name: error for name, error in over.items() if not error <= 1}


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """Replay of a CUDA graph: device time without the launches from Python."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def parts(run: Callable[[], object], calls: int = 8) -> dict[str, float]:
    """The milliseconds of each kernel, from the profiler."""
    names = {"statistics": "tiles_ms", "choose": "choose_ms", "refine": "again_ms"}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in seen.key_averages():
        for name, column in names.items():
            if event.key.startswith(name):
                found[column] = found.get(column, 0.0) + event.device_time_total / calls / 1e3
    return found


def gated(run: Callable[[], dict[str, Tensor]], s: Tensor, w: Tensor) -> str:
    """Why the result is wrong; empty if it is right."""
    # New memory is filled with NaN, so that entries that a kernel does not write are found.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        wrong = errors(run(), s, w)
    except Exception as error:  # noqa: BLE001 - an error is the result of a contestant
        return format_error(error)
    finally:
        torch.use_deterministic_algorithms(False)
    return "GATE: " + ", ".join(f"{name} {error:.1f} times its bound" for name, error in wrong.items()) if wrong else ""


def run_case(case: Case, kind: str, labels: list[str], table: Table, seconds: float) -> None:
    """Check one case, then time all contestants in turns."""
    q, k, v = make(kind, case)
    _, lse = forward(q, k, v, case.causal)
    s, w = truth(q, k, lse, case)
    runs: dict[str, Callable[[], Any]] = {FORWARD: lambda: forward(q, k, v, case.causal)}
    rows: dict[str, dict[str, Any]] = {FORWARD: {"wanted": "", "contestant": FORWARD}}
    for label in labels:
        wanted = case.wanted()[label]
        for name, (config, chosen) in configs(q, k, lse, case, wanted).items():
            key, run = f"{name}: {label}", measuring(q, k, lse, case, wanted, config)
            rows[key] = {"wanted": label, "contestant": f"foci {name}", "chosen": "yes" if chosen else "no"}
            rows[key]["note"] = gated(run, s, w)
            if not rows[key]["note"]:
                runs[key] = run
    del s, w
    clock = make_clock(q.device)
    found = compare([Contestant(key, captured(run)) for key, run in runs.items()], clock, seconds)
    base = found[FORWARD]
    for key, row in rows.items():
        measured = found.get(key)
        if isinstance(measured, Measured) and isinstance(base, Measured):
            with_forward = 1.0 if key == FORWARD else 1 + measured.ms / base.ms
            mib = clock.memory(Contestant(key, runs[key]))
            row |= {"ms": measured.ms, "spread": measured.spread, "rounds": measured.rounds, "mib": mib}
            row |= {"with_forward": with_forward} | (parts(runs[key]) if row["wanted"] in (THREE, FOUR, EVERY) else {})
        elif isinstance(measured, str):
            row["note"] = measured
        table.add(case=case.name, scores=kind, **row)


def labels_of(case: Case, kind: str) -> list[str]:
    return list(case.wanted()) if (case, kind) == (MAIN, "random") else [THREE, FOUR, EVERY]


def build(number: int, label: str) -> None:
    """Compile the kernels of one request; the result stays in Triton's cache."""
    case = [MAIN, *SHAPES][number]
    q, k, _ = make("random", case)
    lse = torch.zeros(q.shape[:3], device="cuda")
    wanted = case.wanted()[label]
    for config, _ in configs(q, k, lse, case, wanted).values():
        measuring(q, k, lse, case, wanted, config)()
    torch.cuda.synchronize()


def build_all(cases: list[Case], limit: float = 120.0) -> None:
    """Compile everything in parallel, which takes as long as the slowest."""
    jobs = [(n, label) for n, case in enumerate(cases) for label in labels_of(case, "random")]
    command = [sys.executable, __file__, "--build"]
    running = [subprocess.Popen([*command, str(number), label]) for number, label in jobs]
    for (_, label), process in zip(jobs, running, strict=True):
        try:
            process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            log(f"building took more than {limit:.0f} s: {label}")


def main() -> int:
    """Run the benchmark; the exit status is 1 if a result was wrong."""
    torch.manual_seed(0)
    if "--build" in sys.argv:
        build(int(sys.argv[2]), sys.argv[3])
        return 0
    shapes = "--shapes" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--shapes"]
    options = parse_options("statistics_kernel", __doc__ or "", (torch.float32,))
    if options.device.type != "cuda":
        sys.exit(f"device must be cuda, got {options.device.type}")
    # Not named statistics.py, which would hide Python's module.
    path = options.path and options.path.with_name(options.path.name.replace("statistics_kernel-", "statistics-"))
    table = Table(options.device, COLUMNS, path)
    cases = [MAIN, *(SHAPES if shapes else [])]
    build_all(cases)
    log("built")
    torch.backends.cuda.matmul.allow_tf32 = False
    for case in cases:
        for kind in KINDS if case == MAIN else KINDS[:1]:
            run_case(case, kind, labels_of(case, kind), table, 0.2 if options.quick else options.seconds)
            log(f"{case.name}, {kind}")
            free_memory()
    table.print_table("ms", ("case", "scores", "wanted"), "ms", {})
    table.print_failures()
    table.print_footer()
    return int(table.has_failed_gate())


if __name__ == "__main__":
    sys.exit(main())

"""The statistics pass on a GPU: right first, then how long, next to cuDNN's forward on the same inputs.

python benchmarks/statistics_kernel.py --csv out.csv [--quick] [--only main,parts,sweep,lengths]

A gate compares every statistic with torch in float32 on small inputs, on several masks. Without a green gate nothing is
timed. Times are medians of interleaved rounds; each version is timed once per round. `--only` picks the tables.
"""

from __future__ import annotations

import argparse
import csv
import statistics as plain_statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from foci.statistics import triton as launcher
from foci.statistics.tiling import Config, default
from foci.statistics.triton import statistics
from foci.statistics.wanted import Wanted

PICTURE = (256, 256, "mean")
WANTED = {
    "entropy": Wanted(entropy=True),
    "received": Wanted(received=True),
    "picture": Wanted(picture=PICTURE),
    "entropy+received": Wanted(entropy=True, received=True),
    "entropy+received+picture": Wanted(entropy=True, received=True, picture=PICTURE),
    "top-8": Wanted(top=8),
    "all+top-8": Wanted(entropy=True, received=True, picture=PICTURE, top=8),
    "everything": Wanted(entropy=True, received=True, picture=PICTURE, top=8, largest=True, distance=True),
}
# Heads, heads of the keys, tokens, width, causal.
CASES = [(16, 16, n, 128, True) for n in (2048, 4096, 16384, 32768, 131072, 7311)]
CASES += [(32, 8, 8192, 128, True), (16, 16, 8192, 64, True), (16, 16, 8192, 128, False), (1, 1, 8192, 128, True)]
LENGTHS = ["entropy", "entropy+received+picture", "all+top-8"]
GOALS = ["entropy", "entropy+received", "entropy+received+picture", "all+top-8"]
CONFIGS = {
    "128x64 4w s3 p2 f16": Config(128, 64, 4, 3, 2, fine=16),
    "128x64 4w s3 p2 f32": Config(128, 64, 4, 3, 2, fine=32),
    "128x64 4w s2 p2 f16": Config(128, 64, 4, 2, 2, fine=16),
    "128x64 4w s4 p2 f16": Config(128, 64, 4, 4, 2, fine=16),
    "128x64 8w s3 p1 f16": Config(128, 64, 8, 3, 1, fine=16),
    "128x64 4w s2 p3 f16 r168": Config(128, 64, 4, 2, 3, fine=16, registers=168),
    "128x64 8w s3 p2 f16 r128": Config(128, 64, 8, 3, 2, fine=16, registers=128),
    "128x128 8w s3 p1 f16": Config(128, 128, 8, 3, 1, fine=16),
    "128x128 8w s2 p1 f16": Config(128, 128, 8, 2, 1, fine=16),
    "64x64 4w s3 p3 f16": Config(64, 64, 4, 3, 3, fine=16),
    "64x128 4w s3 p2 f16": Config(64, 128, 4, 3, 2, fine=16),
    "256x64 8w s3 p1 f16": Config(256, 64, 8, 3, 1, fine=16),
}


def make(kind: str, batch: int, heads: int, groups: int, tokens: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """random: unit normal. peaked: queries times 8. ascending: logits that grow with the key's place."""
    q = torch.randn(batch, heads, tokens, width, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(batch, groups, tokens, width, device="cuda", dtype=torch.bfloat16)
    v = torch.randn_like(k)
    if kind == "peaked":
        q = q * 8
    if kind == "ascending":
        slope = torch.arange(tokens, device="cuda")[:, None] / tokens * 16
        q[..., :16] = 1.0
        k[..., :16] = slope.to(torch.bfloat16)
    return q, k, v


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> tuple[Tensor, Tensor]:
    out = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
    lse = out[1]
    return out[0], lse.reshape(q.shape[:3])


def truth(q: Tensor, k: Tensor, seen: Tensor, softcap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Dense logits, log-sum-exp and weights in float32 (the products of half precision are exact there)."""
    torch.backends.cuda.matmul.allow_tf32 = False
    s = q.float() @ k.float().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~seen, -torch.inf)
    lse = s.logsumexp(-1)
    return s, lse, torch.where(seen, (s - lse.unsqueeze(-1)).exp(), 0.0)


def masks(tokens: int) -> dict[str, tuple[Tensor, dict[str, Any]]]:
    """What is seen, and how the launcher is told."""
    i, j = torch.arange(tokens, device="cuda")[:, None], torch.arange(tokens, device="cuda")[None]
    low, high = (i[:, 0] - 200).clamp(min=0), i[:, 0] + 1
    window = torch.stack([low, high]).int()[None, None].contiguous()
    start = torch.full_like(low, 40).clamp(max=tokens)
    runs = torch.stack([torch.stack([torch.zeros_like(low), start]), torch.stack([low.clamp(min=40), high])]).int()[
        None
    ]
    ids = (torch.arange(tokens, device="cuda") // 300)[None]
    dense = torch.rand(1, 1, tokens, tokens, device="cuda") < 0.5
    return {
        "none": (torch.ones_like(dense), {}),
        "causal": (j <= i, {"causal": True}),
        "window": ((j >= low[:, None]) & (j <= i), {"spans": window}),
        "two runs": ((j < 40) | ((j >= low[:, None]) & (j <= i)), {"spans": runs.contiguous()}),
        "documents": ((ids[0][:, None] == ids[0]) & (j <= i), {"causal": True, "query_ids": ids, "key_ids": ids}),
        "dense": (dense & (j <= i), {"causal": True, "dense": dense}),
        "softcap": (j <= i, {"causal": True, "softcap": 5.0}),
    }


def errors(got: dict[str, Tensor], s: Tensor, w: Tensor, seen: Tensor, top: int) -> dict[str, float]:
    """Largest absolute errors, and for the heaviest keys relative ones."""
    rows, columns = got["picture"].shape[-2:]
    row_edges = torch.arange(rows + 1, device="cuda") * w.shape[-2] // rows
    column_edges = torch.arange(columns + 1, device="cuda") * w.shape[-1] // columns
    sums = torch.nn.functional.pad(w.double().cumsum(-1).cumsum(-2), (1, 0, 1, 0))[..., row_edges, :][..., column_edges]
    area = row_edges.diff()[:, None] * column_edges.diff()
    picture = sums.diff(dim=-1).diff(dim=-2) / area
    values, keys = got["top_values"], got["top_keys"].long()
    best = w.sort(-1, descending=True).values[..., :top]
    named = w.gather(-1, keys.clamp(min=0)).where(keys >= 0, 0.0)
    visible = seen.expand_as(w).gather(-1, keys.clamp(min=0)).where(keys >= 0, True)
    place = (torch.arange(w.shape[-2], device="cuda")[:, None] - torch.arange(w.shape[-1], device="cuda")).abs()
    twice = (keys.sort(-1).values.diff(dim=-1) == 0) & (keys.sort(-1).values[..., 1:] >= 0)
    return {
        "entropy": float((got["entropy"] - torch.special.entr(w).sum(-1)).abs().max()),
        "received": float(((got["received"] - w.sum(-2)).abs() / (1 + w.sum(-2))).max()),
        "picture": float(((got["picture"] - picture).abs() * area).max()),
        "distance": float(((got["distance"] - (w * place).sum(-1)).abs() / w.shape[-1]).max()),
        "largest": float((got["largest"] - s.amax((-1, -2))).abs().max()),
        "top values": float(((values - best).abs() / (best + 1e-9)).max()),
        "top keys": float(((named - values).abs() / (values + 1e-9)).max()) + float((~visible).sum() + twice.sum()),
    }


LIMITS = {"entropy": 2e-4, "received": 2e-4, "picture": 2e-3, "distance": 1e-4, "largest": 1e-3}
LIMITS |= {"top values": 3e-3, "top keys": 3e-3}


def gate(config: Config | None, name: str, quick: bool, only: str | None = None) -> bool:
    """True where every statistic is right on every mask, odd and even sizes."""
    green = True
    sizes = [(512, (32, 32, "mean")), (777, (100, 9, "mean")), (2048, PICTURE)][: 1 if quick else 3]
    for tokens, picture in sizes:
        for kind in ("random",) if quick else ("random", "peaked", "ascending"):
            for mask, (seen, options) in masks(tokens).items():
                few = quick or tokens == 2048
                if (only and mask != only) or (few and mask not in ("causal", "two runs")):
                    continue
                q, k, _ = make(kind, 2, 4, 2, tokens, 128)
                s, lse, w = truth(q, k, seen, options.get("softcap"))
                wanted = Wanted(entropy=True, received=True, picture=picture, top=8, largest=True, distance=True)
                got = statistics(q, k, lse, scale=128**-0.5, wanted=wanted, config=config, **options)
                wrong = {what: e for what, e in errors(got, s, w, seen, 8).items() if not e <= LIMITS[what]}
                if wrong:
                    green = False
                    print(f"WRONG {name}: {tokens} {kind} {mask}: {wrong}", flush=True)
    return green


def warm(item: str) -> None:
    """Compiles what one part of the run needs; the results lie in Triton's cache."""
    what, _, name = item.partition(":")
    if what == "gate":
        gate(None, "default", False, name)
        return
    if what == "case":
        heads, groups, tokens, width, causal = CASES[int(name)]
        q, k, v = make("random", 1, heads, groups, tokens, width)
        lse = torch.zeros(q.shape[:3], device="cuda")
        for run in versions_of(q, k, lse, None, LENGTHS, causal).values():
            run()
        torch.cuda.synchronize()
        return
    q, k, v = make("random", 1, 16, 16, 8192, 128)
    _, lse = forward(q, k, v)
    config = CONFIGS.get(name)
    if config is None:
        for run in versions_of(q, k, lse, None, list(WANTED)).values():
            run()
    elif gate(config, name, True):
        for run in versions_of(q, k, lse, config, GOALS).values():
            run()
    torch.cuda.synchronize()


def warm_all(tables: list[str]) -> None:
    """Compiling takes longer than running: in parallel, in processes of their own."""
    items = [f"gate:{mask}" for mask in ("none", "causal", "window", "two runs", "documents", "dense", "softcap")]
    items += ["config:default"] if "main" in tables else []
    items += [f"config:{name}" for name in CONFIGS] if "sweep" in tables else []
    items += [f"case:{number}" for number in range(len(CASES))] if "lengths" in tables else []
    command = [sys.executable, __file__, "--csv", "unused.csv", "--warm"]
    running: list[subprocess.Popen[bytes]] = []
    for item in items:
        if len(running) >= 14:
            running.pop(0).wait()
        running.append(subprocess.Popen([*command, item]))
    for process in running:
        process.wait()


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """A graph's replay: what the device takes, without the time that Python needs to launch."""
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


def timed(versions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds: the median over rounds, in each of which every version runs once, with an emptied cache before."""
    scratch = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")
    replays = {name: captured(run) for name, run in versions.items()}
    times: dict[str, list[float]] = {name: [] for name in versions}
    for turn in range(rounds + 2):
        for name, run in replays.items():
            scratch.zero_()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            stop.record()
            stop.synchronize()
            if turn >= 2:
                times[name].append(start.elapsed_time(stop))
    return {name: plain_statistics.median(values) for name, values in times.items()}


def launched(run: Callable[[], object], calls: int = 20) -> float:
    """Milliseconds per call as a caller sees them: calls back to back, Python's time included."""
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1e3


def memory(run: Callable[[], object]) -> float:
    """MiB above what was there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = run()
    torch.cuda.synchronize()
    del kept
    return (torch.cuda.max_memory_allocated() - before) / 2**20


class Table:
    """Rows for the CSV and for the end of the output."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def add(self, table: str, name: str, ms: float, base: float, **more: object) -> None:
        self.rows.append({"table": table, "name": name, "ms": round(ms, 4), "x_forward": round(ms / base, 3), **more})

    def write(self, path: Path) -> None:
        names = list(dict.fromkeys(key for row in self.rows for key in row))
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(self.rows)

    def show(self) -> None:
        last = None
        for row in self.rows:
            if row["table"] != last:
                last = row["table"]
                print(f"\n{last}")
            more = " ".join(
                f"{key}={value}" for key, value in row.items() if key not in ("table", "name", "ms", "x_forward")
            )
            print(f"  {row['name']!s:44} {row['ms']:8.4f} ms  {row['x_forward']:6.3f}x  {more}")


def versions_of(
    q: Tensor, k: Tensor, lse: Tensor, config: Config | None, names: list[str], causal: bool = True
) -> dict[str, Any]:
    def run(wanted: Wanted) -> Callable[[], object]:
        options = {"scale": q.shape[-1] ** -0.5, "causal": causal, "wanted": wanted, "config": config}
        return lambda: statistics(q, k, lse, **options)

    return {name: run(WANTED[name]) for name in names}


def main_table(table: Table, rounds: int) -> None:
    """8,192 tokens, 16 heads of 128, causal: every statistic, on three kinds of scores."""
    for kind in ("random", "peaked", "ascending"):
        q, k, v = make(kind, 1, 16, 16, 8192, 128)
        _, lse = forward(q, k, v)
        names = list(WANTED) if kind == "random" else ["entropy+received+picture", "top-8", "all+top-8"]
        runs = {"cuDNN forward": lambda q=q, k=k, v=v: forward(q, k, v)} | versions_of(q, k, lse, None, names)
        times = timed(runs, rounds)
        for name, ms in times.items():
            extra = {"MiB": round(memory(runs[name]), 1), "eager_ms": round(launched(runs[name]), 4)}
            table.add(f"8192 causal {kind}", name, ms, times["cuDNN forward"], **extra)


def parts_table(table: Table, rounds: int) -> None:
    """Where the heaviest keys cost: the kernels of one call apart, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    for kind in ("random", "peaked", "ascending"):
        q, k, v = make(kind, 1, 16, 16, 8192, 128)
        _, lse = forward(q, k, v)
        run = versions_of(q, k, lse, None, ["all+top-8"])["all+top-8"]
        run()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(rounds):
                run()
            torch.cuda.synchronize()
        for event in seen.key_averages():
            if event.device_time_total > 0:
                table.add(f"kernels of all+top-8, {kind}", event.key[:44], event.device_time_total / rounds / 1e3, 1.0)


def sweep_table(table: Table, rounds: int) -> None:
    """Every way to cut, for the two goals."""
    q, k, v = make("random", 1, 16, 16, 8192, 128)
    _, lse = forward(q, k, v)
    runs: dict[str, Any] = {"cuDNN forward": lambda: forward(q, k, v)}
    for name, config in CONFIGS.items():
        try:
            if not gate(config, name, True):
                continue
            made = versions_of(
                q, k, lse, config, ["entropy", "entropy+received", "entropy+received+picture", "all+top-8"]
            )
            for run in made.values():
                run()
            torch.cuda.synchronize()
            runs |= {f"{name} | {what}": run for what, run in made.items()}
        except Exception as error:  # noqa: BLE001
            print(f"{name}: {type(error).__name__}: {str(error)[:160]}", flush=True)
    plain = default(128, torch.bfloat16, WANTED["all+top-8"])
    for change in ({"choosing_rows": 4}, {"choosing_rows": 8}, {"refining_keys": 128}, {"refining_warps": 2}):
        name = " ".join(f"{what} {value}" for what, value in change.items())
        runs |= {f"{name} | all+top-8": versions_of(q, k, lse, replace(plain, **change), ["all+top-8"])["all+top-8"]}
    times = timed(runs, max(3, rounds // 2))
    for name, ms in sorted(times.items(), key=lambda item: (item[0].split(" | ")[-1], item[1])):
        table.add("ways to cut, 8192 causal random", name, ms, times["cuDNN forward"])


def lengths_table(table: Table, rounds: int) -> None:
    """Other lengths, widths, groups of heads, and no mask."""
    for heads, groups, tokens, width, causal in CASES:
        q, k, v = make("random", 1, heads, groups, tokens, width)
        all_k, all_v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
        _, lse = forward(q, all_k, all_v, causal)
        runs = {"cuDNN forward": lambda q=q, k=all_k, v=all_v, causal=causal: forward(q, k, v, causal)}
        runs |= versions_of(q, k, lse, None, LENGTHS, causal)
        times = timed(runs, max(3, rounds // (8 if tokens > 65536 else 2)))
        title = f"{heads}/{groups} heads, {tokens} tokens, width {width}, {'causal' if causal else 'full'}"
        for name, ms in times.items():
            extra = {} if name == "cuDNN forward" else {"MiB": round(memory(runs[name]), 1)}
            table.add(title, name, ms, times["cuDNN forward"], **extra)
        del q, k, v, all_k, all_v, lse, runs
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--only", default="main,parts,sweep,lengths")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="a shorter gate")
    parser.add_argument("--warm", help="compile one part and stop")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    if chosen.warm:
        warm(chosen.warm)
        return
    start = time.monotonic()
    warm_all(chosen.only.split(","))
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    if not gate(None, "default", chosen.quick):
        sys.exit("the gate is red: nothing is timed")
    print(f"gate green, {torch.cuda.get_device_name()}, torch {torch.__version__}, {launcher.__name__}", flush=True)
    table = Table()
    tables: dict[str, Callable[[], None]] = {
        "main": lambda: main_table(table, chosen.rounds),
        "parts": lambda: parts_table(table, chosen.rounds),
        "sweep": lambda: sweep_table(table, chosen.rounds),
        "lengths": lambda: lengths_table(table, chosen.rounds),
    }
    for name in chosen.only.split(","):
        tables[name]()
        table.write(chosen.csv)
        print(f"{name} done after {time.monotonic() - start:.0f} s", flush=True)
    table.show()


if __name__ == "__main__":
    main()

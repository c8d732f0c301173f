"""Timing and peak memory of contestants that run in turns.

Every contestant runs once per round, so that drift (clock speed, temperature, other processes) affects all of them
equally; the median is reported. README.md in this folder describes the method.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

STARTED = time.perf_counter()


def log(text: str) -> None:
    """Print a progress line."""
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {text}", flush=True)


@dataclass(frozen=True)
class Contestant:
    """One implementation: `run` is timed; `before` is not, and its result is passed to `run`."""

    name: str
    run: Callable[..., Any]
    before: Callable[[], Any] | None = None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def run_once(self) -> Any:
        """Run both steps without timing."""
        with self.context():
            return self.run(self.before()) if self.before is not None else self.run()


@dataclass(frozen=True)
class Measured:
    """Milliseconds (median and interquartile range) and the peak memory in addition to the inputs."""

    ms: float
    spread: float
    rounds: int
    mib: float


class Clock(Protocol):
    """Measures the time and the memory of one run."""

    min_rounds: int

    def sample(self, contestant: Contestant) -> Callable[[], float]:
        """Run it; the returned function gives the milliseconds after the round has finished."""

    def finish(self) -> None:
        """Finish a round."""

    def memory(self, contestant: Contestant) -> float:
        """The peak in MiB, in addition to the memory in use before."""


class CudaClock:
    """CUDA events around the run; the L2 cache is overwritten before each."""

    min_rounds = 10

    def __init__(self, device: torch.device) -> None:
        # Several times the size of the L2. Writing it also gives the host time to queue the run.
        self.flush = torch.empty(2**27, dtype=torch.int32, device=device)

    def sample(self, contestant: Contestant) -> Callable[[], float]:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with contestant.context():
            prepared = () if contestant.before is None else (contestant.before(),)
            self.flush.zero_()
            start.record()
            result = contestant.run(*prepared)
            stop.record()
        del result, prepared
        return lambda: float(start.elapsed_time(stop))

    def finish(self) -> None:
        torch.cuda.synchronize()

    def memory(self, contestant: Contestant) -> float:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        there = torch.cuda.memory_allocated()
        result = contestant.run_once()
        torch.cuda.synchronize()
        del result
        return (torch.cuda.max_memory_allocated() - there) / 2**20


class CpuClock:
    """The clock of the process; memory from the profiler, which records every allocation and free_memory."""

    min_rounds = 5

    def __init__(self) -> None:
        # Otherwise the profiler reports each start and stop on stderr.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")

    def sample(self, contestant: Contestant) -> Callable[[], float]:
        with contestant.context():
            prepared = () if contestant.before is None else (contestant.before(),)
            start = time.perf_counter()
            result = contestant.run(*prepared)
            elapsed = time.perf_counter() - start
        del result
        return lambda: elapsed * 1e3

    def finish(self) -> None:
        pass

    def memory(self, contestant: Contestant) -> float:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            result = contestant.run_once()
        del result
        events = profile.profiler.kineto_results.events()
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        now = peak = 0
        for _, change in changes:
            now += change
            peak = max(peak, now)
        return peak / 2**20


def make_clock(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def compare(
    contestants: Sequence[Contestant],
    clock: Clock,
    seconds: float,
    on_first_run: Callable[[str, Measured | str], None] | None = None,
) -> dict[str, Measured | str]:
    """The result of each contestant or the text of its error; `on_first_run` is called after its first run."""
    found: dict[str, Measured | str] = {}
    expected: dict[str, float] = {}
    memory: dict[str, float] = {}
    for contestant in contestants:
        name = contestant.name
        try:
            expected[name], memory[name] = warm_up(contestant, clock)
        except Exception as error:  # noqa: BLE001 - an error is the result of a contestant
            found[name] = format_error(error)
            free_memory()
        if on_first_run is not None:
            on_first_run(name, found[name] if name in found else Measured(expected[name], 0.0, 1, memory[name]))
    share = seconds * 1e3 / max(len(expected), 1)
    rounds = {name: min(max(round(share / ms), clock.min_rounds), 200) for name, ms in expected.items()}
    samples = take_turns([c for c in contestants if c.name in expected], rounds, clock)
    return found | {name: summarize_samples(times, memory[name]) for name, times in samples.items()}


def warm_up(contestant: Contestant, clock: Clock) -> tuple[float, float]:
    """Compile and fill caches; return the milliseconds and the peak memory of one run."""
    contestant.run_once()
    memory = clock.memory(contestant)
    ms = clock.sample(contestant)
    clock.finish()
    return max(ms(), 1e-3), memory


def take_turns(contestants: Sequence[Contestant], rounds: dict[str, int], clock: Clock) -> dict[str, list[float]]:
    """Run the contestants in turns; slow ones skip some rounds, evenly spread."""
    samples: dict[str, list[float]] = {c.name: [] for c in contestants}
    gc.collect()
    gc.disable()
    try:
        total = max(rounds.values(), default=0)
        for turn in range(total):
            pending = [
                (c.name, clock.sample(c))
                for c in rotated(contestants, turn)
                if (turn + 1) * rounds[c.name] // total > turn * rounds[c.name] // total
            ]
            clock.finish()
            for name, ms in pending:
                samples[name].append(ms())
    finally:
        gc.enable()
    return samples


def rotated(contestants: Sequence[Contestant], turn: int) -> Iterator[Contestant]:
    """Start each round with another contestant, so that none always runs after the slowest."""
    start = turn % max(len(contestants), 1)
    yield from contestants[start:]
    yield from contestants[:start]


def summarize_samples(times: list[float], mib: float) -> Measured:
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return Measured(middle, (high - low) / middle, len(times), mib)


def format_error(error: BaseException) -> str:
    """An error in one line, short enough for a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


def free_memory() -> None:
    """Free the memory that a finished or failed contestant may still hold."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_call_overhead(calls: dict[str, Callable[[], Any]], device: torch.device, quick: bool) -> dict[str, float]:
    """The host time of one call, or the device time if that is longer: medians of many batches."""
    repeats, rounds = (50, 5) if quick else (200, 25)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            for _ in range(5):
                call()
            synchronize(device)
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            synchronize(device)
            samples[name].append((time.perf_counter() - start) / repeats * 1e6)
    return {name: statistics.median(times) for name, times in samples.items()}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure_imports(rounds: int, folder: Path) -> dict[str, float]:
    """Seconds of `import torch` in a new process, and of `import foci` from that folder after it."""
    code = (
        "import time; a = time.perf_counter(); import torch; b = time.perf_counter(); import foci;"
        " print(b - a, time.perf_counter() - b)"
    )
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    outputs = []
    for _ in range(rounds + 1):
        done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        outputs.append(done.stdout.split())
    # The first one may have read or compiled the files.
    torch_times, foci_times = zip(*((float(a), float(b)) for a, b in outputs[1:]), strict=True)
    return {"torch": statistics.median(torch_times), "foci": statistics.median(foci_times)}

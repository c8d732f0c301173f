"""What the benchmarks share: contestants that take turns, fair clocks and peak memory.

Every contestant runs once a round, round after round, so that drift (clocks, heat, neighbours) hits all of them
alike; what is reported is the median. How a run is set up is described in README.md beside this file.
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


def say(text: str) -> None:
    """A progress line."""
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {text}", flush=True)


@dataclass(frozen=True)
class Contestant:
    """One way to do the work: `run` is timed, `before` is not and hands its result to `run`."""

    name: str
    run: Callable[..., Any]
    before: Callable[[], Any] | None = None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def go(self) -> Any:
        """Both steps, untimed."""
        with self.context():
            return self.run(self.before()) if self.before is not None else self.run()


@dataclass(frozen=True)
class Measured:
    """Milliseconds (median, and the middle half of the samples), and the peak of memory beyond the inputs."""

    ms: float
    spread: float
    rounds: int
    mib: float


class Clock(Protocol):
    """Times one run, and the memory of one run."""

    least: int

    def sample(self, contestant: Contestant) -> Callable[[], float]:
        """Runs it; what is returned gives the milliseconds, once the round is over."""

    def finish(self) -> None:
        """Ends a round."""

    def memory(self, contestant: Contestant) -> float:
        """The peak in MiB beyond what was there before."""


class CudaClock:
    """Events around the run, the L2 cache overwritten before each."""

    least = 10

    def __init__(self, device: torch.device) -> None:
        # Several times the L2. Writing it also gives the host time to queue the run, so that the GPU does not wait.
        self.flush = torch.empty(2**27, dtype=torch.int32, device=device)

    def sample(self, contestant: Contestant) -> Callable[[], float]:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with contestant.context():
            given = () if contestant.before is None else (contestant.before(),)
            self.flush.zero_()
            start.record()
            result = contestant.run(*given)
            stop.record()
        del result, given
        return lambda: float(start.elapsed_time(stop))

    def finish(self) -> None:
        torch.cuda.synchronize()

    def memory(self, contestant: Contestant) -> float:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        there = torch.cuda.memory_allocated()
        result = contestant.go()
        torch.cuda.synchronize()
        del result
        return (torch.cuda.max_memory_allocated() - there) / 2**20


class CpuClock:
    """The process's clock; memory from the profiler, which is told of every allocation and release."""

    least = 5

    def __init__(self) -> None:
        # The profiler would announce each start and stop on stderr.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")

    def sample(self, contestant: Contestant) -> Callable[[], float]:
        with contestant.context():
            given = () if contestant.before is None else (contestant.before(),)
            start = time.perf_counter()
            result = contestant.run(*given)
            elapsed = time.perf_counter() - start
        del result
        return lambda: elapsed * 1e3

    def finish(self) -> None:
        pass

    def memory(self, contestant: Contestant) -> float:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            result = contestant.go()
        del result
        events = profile.profiler.kineto_results.events()
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        now = peak = 0
        for _, change in changes:
            now += change
            peak = max(peak, now)
        return peak / 2**20


def clock_of(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def compare(
    contestants: Sequence[Contestant],
    clock: Clock,
    seconds: float,
    told: Callable[[str, Measured | str], None] | None = None,
) -> dict[str, Measured | str]:
    """Each contestant's figures, or the text of its error; `told` hears of each as soon as it ran a first time."""
    found: dict[str, Measured | str] = {}
    expected: dict[str, float] = {}
    memory: dict[str, float] = {}
    for contestant in contestants:
        name = contestant.name
        try:
            expected[name], memory[name] = warm(contestant, clock)
        except Exception as error:  # noqa: BLE001 - whatever stops a contestant is its result
            found[name] = one_line(error)
            release()
        if told is not None:
            told(name, found[name] if name in found else Measured(expected[name], 0.0, 1, memory[name]))
    share = seconds * 1e3 / max(len(expected), 1)
    rounds = {name: min(max(round(share / ms), clock.least), 200) for name, ms in expected.items()}
    samples = take_turns([c for c in contestants if c.name in expected], rounds, clock)
    return found | {name: summed_up(times, memory[name]) for name, times in samples.items()}


def warm(contestant: Contestant, clock: Clock) -> tuple[float, float]:
    """Compiles, fills caches and says how long one run takes, in milliseconds, and its peak of memory."""
    contestant.go()
    memory = clock.memory(contestant)
    ms = clock.sample(contestant)
    clock.finish()
    return max(ms(), 1e-3), memory


def take_turns(contestants: Sequence[Contestant], rounds: dict[str, int], clock: Clock) -> dict[str, list[float]]:
    """Every contestant in turn; slow ones sit out some rounds, evenly spread."""
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
    """Another one begins each round: nobody always runs after the slowest."""
    start = turn % max(len(contestants), 1)
    yield from contestants[start:]
    yield from contestants[:start]


def summed_up(times: list[float], mib: float) -> Measured:
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return Measured(middle, (high - low) / middle, len(times), mib)


def one_line(error: BaseException) -> str:
    """What went wrong, short enough for a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


def release() -> None:
    """Gives back what a finished or failed contestant may still hold."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def microseconds(calls: dict[str, Callable[[], Any]], device: torch.device, quick: bool) -> dict[str, float]:
    """What one call costs the host, work on the device included where that takes longer: medians of many batches."""
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


def import_seconds(rounds: int, folder: Path) -> dict[str, float]:
    """`import torch` in a fresh process, and what `import foci` from that folder takes on top of it."""
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
    # The first one may have had to read or compile the files.
    torch_times, foci_times = zip(*((float(a), float(b)) for a, b in outputs[1:]), strict=True)
    return {"torch": statistics.median(torch_times), "foci": statistics.median(foci_times)}

"""Reports progress of training and evaluation: progress bar (rich), log lines, metrics.jsonl, TensorBoard."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from foci.capture.statistics_writers import flatten_statistics, write_histograms
from foci.record.history import StepStatistics, format_line
from foci.runtime.durable_files import write_text_atomically
from foci.runtime.printable import make_printable

# Seconds between two lines if there is no progress bar.
LINE_SECONDS = 10.0


class Progress:
    """Prints and logs in the first process; does nothing in the others."""

    def __init__(self, folder: Path, total: int, *, is_first: bool, quiet: bool = False) -> None:
        self.folder, self.total, self.is_first, self.quiet = folder, total, is_first, quiet
        self.bar: Any = None
        self.board: Any = None
        self.start_time = self.report_time = time.monotonic()
        self.start_step = 0

    def __enter__(self) -> Self:
        if self.is_first:
            self.board = open_tensorboard(self.folder)
            if not self.quiet and sys.stderr.isatty():
                self.bar = start_rich_bar(self.total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for part in (self.bar, self.board):
            if part is not None:
                part.stop() if part is self.bar else part.close()

    def start_at(self, step: int) -> None:
        """Starts measuring speed at this step, and removes metrics of later steps, logged before a crash."""
        self.start_time = self.report_time = time.monotonic()
        self.start_step = step
        if self.is_first:
            for name in ("metrics.jsonl", "attention.jsonl"):
                truncate_metrics(self.folder / name, step)

    def report(self, step: int, values: dict[str, float], targets: float) -> None:
        """Logs and prints the metrics since the last report; `targets` counts the targets since then."""
        now = time.monotonic()
        per_second, self.report_time = targets / max(now - self.report_time, 1e-6), now
        self.log(step, values | {"targets_per_second": round(per_second, 1)})
        if not self.is_first or self.quiet:
            return
        numbers = f"loss {values['loss']:.4f}  rate {values['rate']:.2e}  norm {values['norm']:.2f}"
        text = f"{numbers}  {per_second:,.0f} targets/s"
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=step, description=text)
        else:
            self.message(f"step {step}/{self.total}  {text}  {format_duration(self.seconds_left(step))} left")

    def seconds_left(self, step: int) -> float:
        """Estimates the remaining seconds from the speed so far."""
        elapsed = time.monotonic() - self.start_time
        return elapsed / max(step - self.start_step, 1) * (self.total - step)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Appends a line to metrics.jsonl, and logs to TensorBoard."""
        if not self.is_first:
            return
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | values) + "\n")
        for name, value in values.items() if self.board is not None else ():
            if isinstance(value, int | float):
                self.board.add_scalar(name, value, step)

    def log_attention(self, entries: list[StepStatistics]) -> None:
        """Appends monitored steps to attention.jsonl, and logs the statistics of each layer."""
        for entry in entries if self.is_first else ():
            with (self.folder / "attention.jsonl").open("a", encoding="utf-8") as file:
                file.write(format_line(entry))
            values = {name: value for name, value in flatten_statistics(entry).items() if math.isfinite(value)}
            self.log(entry.step, values)
            if self.board is not None:
                write_histograms(self.board, entry)

    def message(self, text: str) -> None:
        """Prints a line to stderr."""
        if not self.is_first or self.quiet:
            return
        if self.bar is not None:
            self.bar.console.print(make_printable(text), highlight=False, markup=False)
        else:
            print(make_printable(text), file=sys.stderr, flush=True)


def truncate_metrics(path: Path, step: int) -> None:
    """Removes the lines of a file of metrics after a step, and lines cut off by a crash."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            # The process was killed while it wrote this line.
            continue
    write_text_atomically(path, "".join(kept))


@contextmanager
def decoding_progress(total: int) -> Iterator[Callable[[float], None]]:
    """Yields a function that adds to the number of decoded examples and shows the progress in a terminal."""
    is_terminal = sys.stderr.isatty()
    bar = start_rich_bar(total) if is_terminal else None
    last_line, done = time.monotonic(), 0.0

    def add(count: float) -> None:
        nonlocal last_line, done
        done += count
        if bar is not None:
            # Fractions of an example may not add up exactly.
            bar.update(bar.task_ids[0], completed=round(done, 6))
        elif is_terminal and time.monotonic() - last_line > LINE_SECONDS:
            last_line = time.monotonic()
            print(f"{done:,.0f}/{total:,} answered", file=sys.stderr, flush=True)

    try:
        yield add
    finally:
        if bar is not None:
            bar.stop()


def start_rich_bar(total: int) -> Any:
    """Starts a progress bar with the remaining time; returns None if rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    text = TextColumn("{task.description}")
    bar = Bar(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), text, console=Console(stderr=True))
    bar.add_task("", total=total)
    bar.start()
    return bar


def open_tensorboard(folder: Path) -> Any:
    """Opens a TensorBoard writer; returns None if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"))


def format_duration(seconds: float) -> str:
    """Formats seconds as M:SS or H:MM:SS.

    >>> format_duration(75), format_duration(7384)
    ('1:15', '2:03:04')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

"""What a training, or a long evaluation, says while it runs: a bar where rich is installed, lines, metrics.jsonl."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from foci.training.checkpoint import write_text_atomically

# So many seconds are between two lines where there is no bar.
LINE_SECONDS = 10.0


class Progress:
    """Speaks and writes for the first process; for the others it is silent."""

    def __init__(self, folder: Path, total: int, *, first: bool, quiet: bool = False) -> None:
        self.folder, self.total, self.first, self.quiet = folder, total, first, quiet
        self.bar: Any = None
        self.board: Any = None
        self.began = self.reported = time.monotonic()
        self.step_then = 0

    def __enter__(self) -> Self:
        if self.first:
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
        """From here on the rate is measured; what was logged beyond this step before a crash is taken back."""
        self.began = self.reported = time.monotonic()
        self.step_then = step
        if self.first:
            truncate_metrics(self.folder / "metrics.jsonl", step)

    def report(self, step: int, values: dict[str, float], targets: float) -> None:
        """Figures of the updates since the last report, which had so many targets."""
        now = time.monotonic()
        per_second, self.reported = targets / max(now - self.reported, 1e-6), now
        self.log(step, values | {"targets_per_second": round(per_second, 1)})
        if not self.first or self.quiet:
            return
        figures = f"loss {values['loss']:.4f}  rate {values['rate']:.2e}  norm {values['norm']:.2f}"
        text = f"{figures}  {per_second:,.0f} targets/s"
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=step, description=text)
        else:
            self.say(f"step {step}/{self.total}  {text}  {format_duration(self.left(step))} left")

    def left(self, step: int) -> float:
        """The seconds that are left at the rate so far."""
        taken = time.monotonic() - self.began
        return taken / max(step - self.step_then, 1) * (self.total - step)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """A line of metrics.jsonl, and TensorBoard."""
        if not self.first:
            return
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | values) + "\n")
        for name, value in values.items() if self.board is not None else ():
            if isinstance(value, int | float):
                self.board.add_scalar(name, value, step)

    def say(self, text: str) -> None:
        """A line for whoever watches."""
        if not self.first or self.quiet:
            return
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)


def truncate_metrics(path: Path, step: int) -> None:
    """Leaves only the lines up to a step."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            # A line that was cut off when the process was killed.
            continue
    write_text_atomically(path, "".join(kept))


@contextmanager
def decoding_progress(total: int) -> Iterator[Callable[[float], None]]:
    """What is told how many more of so many examples are answered, and shows it to whoever watches in a terminal."""
    watched = sys.stderr.isatty()
    bar = start_rich_bar(total) if watched else None
    told, done = time.monotonic(), 0.0

    def add(count: float) -> None:
        nonlocal told, done
        done += count
        if bar is not None:
            # Parts of an example that are added up may miss the whole by a little.
            bar.update(bar.task_ids[0], completed=round(done, 6))
        elif watched and time.monotonic() - told > LINE_SECONDS:
            told = time.monotonic()
            print(f"{done:,.0f}/{total:,} answered", file=sys.stderr, flush=True)

    try:
        yield add
    finally:
        if bar is not None:
            bar.stop()


def start_rich_bar(total: int) -> Any:
    """A bar with the time left; None where rich is not installed, and plain lines serve."""
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
    """A writer for TensorBoard; None where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"))


def format_duration(seconds: float) -> str:
    """Minutes and seconds, or hours.

    >>> clock(75), clock(7384)
    ('1:15', '2:03:04')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

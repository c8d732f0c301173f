"""MonitorCallback: `foci.Monitor` for the Trainer of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from foci.capture.monitor import Monitor
from foci.record.history import HISTORY_SUFFIX, format_line


class MonitorCallback(TrainerCallback):  # type: ignore[misc]
    """Monitors the attention of the model that a Trainer trains: Trainer(..., callbacks=[MonitorCallback(every=50)]).

    A step is an optimizer step with all its micro-batches. Every monitored step is a line of attention.jsonl in the
    output directory, which `foci view` shows; `monitor` is the `foci.Monitor`, from the beginning of the training on.

    Args:
        every: steps from one monitored step to the next.
        writer: where the statistics are written too, in the first process: as in `Monitor.log`.
        options: further arguments of `foci.Monitor`: alerts, on_alert, statistics, ...
    """

    def __init__(self, every: int = 50, writer: Any = None, **options: Any) -> None:
        self.every, self.writer, self.options = every, writer, options
        self.monitor: Monitor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        if self.monitor is not None:
            # A training that ended with an error, or with Ctrl+C, leaves the block of its step open.
            self.monitor.__exit__(RuntimeError, None, None)
        self.monitor = Monitor(model, every=self.every, step=state.global_step, **self.options)

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.monitor is not None:
            # Callbacks of a Trainer have no block: `on_pre_optimizer_step` leaves it.
            self.monitor.__enter__()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.monitor is not None:
            self.monitor.__exit__(None, None, None)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.monitor is None:
            return
        is_first = state.is_world_process_zero
        entries = self.monitor.log(self.writer if is_first else None)
        if entries and is_first:
            path = Path(args.output_dir) / f"attention{HISTORY_SUFFIX}"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.writelines(map(format_line, entries))

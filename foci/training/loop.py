"""The training loop: `train` prepares a run, `run_training` goes from the first step to the finished model."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from foci.capture.monitor import Monitor
from foci.runtime.safetensors_file import import_safetensors
from foci.training import checkpoint
from foci.training.batches import Batches, BatchPosition, StepBatch, derive_seed, iterate_in_workers, prefetch
from foci.training.best_models import BestModels
from foci.training.config import RunConfig
from foci.training.defaults import MAX_BATCH_TOKENS
from foci.training.distributed import destroy_processes, explain_lost_processes, init_processes
from foci.training.learner import Learner
from foci.training.lock import lock_run
from foci.training.progress import Progress
from foci.training.run import Run, prepare_run
from foci.training.schedule import learning_rate_at
from foci.training.state import State

# How many steps a GPU may run before the losses are checked for NaN and infinity: each check waits for the GPU.
MAX_UNCHECKED_STEPS = 16


def train(config: RunConfig, folder: Path, *, resume: bool = False, quiet: bool = False) -> dict[str, float | str]:
    """Trains a task in a run directory, and returns the metrics of the finished model on the dev set.

    The directory then holds model.safetensors, which is all that `foci run` needs, config.toml, run.json, checkpoints,
    metrics.jsonl and, with train.monitor, attention.jsonl. A run that is killed at any moment after its first step and
    resumed ends with the same weights: all randomness depends only on the seed and the number of the step.
    """
    # Fail now, not when the first model is saved.
    import_safetensors("a training run", "tasks")
    processes = init_processes(config.train.device, config.train.parallel, config.train.shard)
    try:
        with explain_lost_processes(), lock_run(folder, processes) as messages:
            run = prepare_run(config, folder, processes, resume=resume)
            with allow_tf32(), Progress(folder, run.total, is_first=processes.is_first, quiet=quiet) as progress:
                for message in (*messages, *run.messages):
                    progress.message(message)
                return run_training(run, progress)
    finally:
        destroy_processes()


def run_training(run: Run, progress: Progress) -> dict[str, float | str]:
    """Runs the steps from the last checkpoint to the end; one long function, so that the order is visible."""
    config, processes = run.config.train, run.processes
    torch.manual_seed(run.config.seed)
    learner = Learner(run.task, run.task.model(), config, processes)
    state = restore_state(run, learner, progress)
    best_models = BestModels(run, learner, progress)
    monitor = build_monitor(learner, config.monitor, state.step, progress)
    start_time = time.monotonic() - state.seconds
    unchecked: list[tuple[StepBatch, int, Tensor]] = []

    with open_batches(run, learner, state.next_batch) as batches, catch_stop_signals() as signals:
        while state.step < run.total and not (state.evaluations_without_improvement >= config.patience > 0):
            batch = next(batches)
            totals = run_training_step(run, learner, batch, state.step, monitor)
            state.step += 1
            state.next_batch = BatchPosition(batch.position.epoch, batch.position.batch + 1)
            state.seconds = time.monotonic() - start_time
            unchecked.append((batch, state.step, totals))
            if state.step == 1:
                run.write_description()

            out_of_time = 0 < config.minutes * 60 < state.seconds
            interrupted, out_of_time = run.agree_on_stop(state.step, (bool(signals), out_of_time))
            is_last = interrupted or out_of_time or state.step == run.total
            logs, evaluates, saves = (
                is_last or state.step % every == 0
                for every in (config.log_every, config.evaluate_every or run.total, config.checkpoint_every)
            )
            if logs or evaluates or saves or not learner.on_gpu or len(unchecked) == MAX_UNCHECKED_STEPS:
                check_finite_loss(unchecked, state)
            if monitor is not None:
                progress.log_attention(monitor.log())
            if logs:
                log_metrics(run, state, progress, float(totals[2]))
            if evaluates and not interrupted:
                best_models.evaluate(state)
            if saves:
                checkpoint.save_checkpoint(
                    run.folder / "checkpoints", learner.tensors(), state, processes, learner.tensor_orders()
                )
            if interrupted:
                progress.message(f"stopped at step {state.step}; checkpoint saved: --resume continues from here")
                return {"stopped_at_step": state.step}
            if is_last:
                break

    return best_models.finish(state)


def build_monitor(learner: Learner, every: int, step: int, progress: Progress) -> Monitor | None:
    """Builds the monitor of the model's attention; None if no step is monitored."""
    if not every:
        return None
    return Monitor(
        learner.model, every=every, step=step, on_alert=lambda alert: progress.message(f"attention: {alert}")
    )


def run_training_step(run: Run, learner: Learner, batch: StepBatch, step: int, monitor: Monitor | None) -> Tensor:
    """Runs all micro-batches and the optimizer; returns summed loss, targets and gradient norm, on the device."""
    with monitor if monitor is not None else nullcontext():
        # A replayed CUDA graph makes no calls that could be monitored.
        replays = monitor is None or not monitor.is_monitored
        for index, (micro_batch, counts) in enumerate(batch.micro_batches):
            torch.manual_seed(derive_seed(run.config.seed, "update", step, run.processes.random_rank, index))
            learner.accumulate(micro_batch, counts, replays=replays)
    totals = learner.step(learning_rate_at(step, run.total, run.config.train))
    learner.update_average(step + 1)
    return totals


def check_finite_loss(unchecked: list[tuple[StepBatch, int, Tensor]], state: State) -> None:
    """Reads the totals of the last steps, and raises FloatingPointError if a loss or norm is not finite."""
    totals = torch.stack([each for _, _, each in unchecked]).tolist() if unchecked else []
    for (batch, step, _), (loss, targets, norm) in zip(unchecked, totals, strict=True):
        if not math.isfinite(loss) or not math.isfinite(norm):
            where = f"batch {batch.position.batch} of epoch {batch.position.epoch} with {batch.examples} examples"
            raise FloatingPointError(
                f"the loss at step {step} is {loss / max(targets, 1.0):g} and the gradient norm {norm:g} ({where});"
                " earlier checkpoints are intact: use --resume with a lower train.rate"
            )
        state.loss, state.targets = state.loss + loss, state.targets + targets
    unchecked.clear()


def log_metrics(run: Run, state: State, progress: Progress, norm: float) -> None:
    """Logs the metrics since the last log line."""
    values = {
        "loss": state.loss / max(state.targets, 1.0),
        "rate": learning_rate_at(state.step - 1, run.total, run.config.train),
        "norm": norm,
        "epoch": float(state.next_batch.epoch),
    }
    progress.report(state.step, values, state.targets)
    state.loss = state.targets = 0.0


def restore_state(run: Run, learner: Learner, progress: Progress) -> State:
    """Restores the newest intact checkpoint of a resumed run; without one, returns the initial state."""
    latest = checkpoint.load_newest(run.folder / "checkpoints", progress.message) if run.resumed else None
    state = State()
    if latest is not None:
        learner.allocate_optimizer_state()
        latest.load_into(learner.tensors(), run.processes, learner.tensor_orders())
        state = latest.state
        progress.message(f"resumed at step {state.step}")
    progress.start_at(state.step)
    return state


@contextmanager
def open_batches(run: Run, learner: Learner, start: BatchPosition) -> Iterator[Generator[StepBatch]]:
    """Iterates over the batches from a position on; workers, or a thread on a GPU, prepare them in advance."""
    config, processes = run.config.train, run.processes
    budget = config.batch_tokens or MAX_BATCH_TOKENS
    place = processes.data_rank, processes.data_world
    source = Batches(run.task, run.train, budget, config.accumulate, *place, run.config.seed)
    batches = (
        iterate_in_workers(source, start, config.workers, config.ahead) if config.workers else source.iterate(start)
    )
    if config.ahead and learner.on_gpu and not config.workers:
        batches = prefetch(batches, config.ahead)
    try:
        yield batches
    finally:
        batches.close()


@contextmanager
def allow_tf32() -> Iterator[None]:
    """Allows TF32 tensor cores for float32 matmuls: training does not need the lost precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def catch_stop_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, so the current step is finished and saved; a second signal interrupts at once."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, old in before.items():
            signal.signal(number, old)

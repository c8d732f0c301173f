"""The loop, to be read from top to bottom."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from foci.runtime.safetensors_file import import_safetensors
from foci.training import checkpoint
from foci.training.batches import Batches, BatchPosition, StepBatch, derive_seed, iterate_in_workers, prefetch
from foci.training.best_models import BestModels
from foci.training.config import RunConfig
from foci.training.distributed import destroy_processes, init_processes
from foci.training.learner import Learner
from foci.training.progress import Progress
from foci.training.run import Run, prepare_run
from foci.training.schedule import learning_rate_at
from foci.training.state import State

# How many updates a GPU may be ahead before somebody looks whether their losses are finite: looking waits for it.
MAX_UNCHECKED_STEPS = 16


def train(config: RunConfig, folder: Path, *, resume: bool = False, quiet: bool = False) -> dict[str, float | str]:
    """Trains a task in a folder, and gives what the finished model reaches on the dev part.

    The folder then has model.safetensors, which is all that `foci run` needs, config.toml, run.json, metrics.jsonl and
    checkpoints. Killed at any moment after its first update and resumed, a run ends with the same weights: all chance
    is drawn from the seed and the number of the update alone.
    """
    # Hours later it would be too late to say so.
    import_safetensors("a training", "tasks")
    processes = init_processes(config.train.device)
    try:
        run = prepare_run(config, folder, processes, resume=resume)
        with allow_tf32(), Progress(folder, run.total, first=processes.first, quiet=quiet) as progress:
            for message in run.messages:
                progress.say(message)
            return run_training(run, progress)
    finally:
        destroy_processes()


def run_training(run: Run, progress: Progress) -> dict[str, float | str]:
    """From where the run stands to its end; longer than other functions, so that the order is seen at once."""
    config, processes = run.config.train, run.processes
    torch.manual_seed(run.config.seed)
    learner = Learner(run.task, run.task.model(), config, processes)
    state = restore_state(run, learner, progress)
    selection = BestModels(run, learner, progress)
    began = time.monotonic() - state.seconds
    unseen: list[tuple[StepBatch, int, Tensor]] = []

    with open_batches(run, learner, state.place) as updates, catch_stop_signals() as stop:
        while state.step < run.total and not (state.waiting >= config.patience > 0):
            update = next(updates)
            found = run_training_step(run, learner, update, state.step)
            state.step, state.place = state.step + 1, BatchPosition(update.place.epoch, update.place.batch + 1)
            state.seconds = time.monotonic() - began
            unseen.append((update, state.step, found))
            if state.step == 1:
                run.begin()

            late = 0 < config.minutes * 60 < state.seconds
            stopped, late = run.agreed(state.step, (bool(stop), late))
            ends = stopped or late or state.step == run.total
            logs, judges, saves = (
                ends or state.step % every == 0
                for every in (config.log_every, config.evaluate_every, config.checkpoint_every)
            )
            if logs or judges or saves or not learner.on_gpu or len(unseen) == MAX_UNCHECKED_STEPS:
                check_finite(unseen, state)
            if logs:
                log_metrics(run, state, progress, float(found[2]))
            if judges and not stopped:
                selection.judge(state)
            if saves:
                checkpoint.save_checkpoint(
                    run.folder / "checkpoints", state.step, learner.tensors(), asdict(state), processes
                )
            if stopped:
                progress.say(f"stopped at step {state.step} and saved: --resume goes on from here")
                return {"stopped_at_step": state.step}
            if ends:
                break

    return selection.finish(state)


def run_training_step(run: Run, learner: Learner, update: StepBatch, step: int) -> Tensor:
    """All micro-batches of one update; gives the summed loss, the targets and the norm, on the device."""
    for part, (batch, counts) in enumerate(update.parts):
        torch.manual_seed(derive_seed(run.config.seed, "update", step, run.processes.rank, part))
        learner.add(batch, counts)
    found = learner.update(learning_rate_at(step, run.total, run.config.train))
    learner.blend(step + 1)
    return found


def check_finite(unseen: list[tuple[StepBatch, int, Tensor]], state: State) -> None:
    """Reads what the last updates gave, and stops where it is not finite."""
    figures = torch.stack([found for _, _, found in unseen]).tolist() if unseen else []
    for (update, step, _), (loss, targets, norm) in zip(unseen, figures, strict=True):
        if not math.isfinite(loss) or not math.isfinite(norm):
            place = f"batch {update.place.batch} of epoch {update.place.epoch} with {update.examples} examples"
            raise FloatingPointError(
                f"expected a finite loss, but at step {step} it is {loss / max(targets, 1.0):g} with a gradient norm of"
                f" {norm:g}, {place}; the checkpoints before it are whole: --resume with a lower train.rate"
            )
        state.loss, state.targets = state.loss + loss, state.targets + targets
    unseen.clear()


def log_metrics(run: Run, state: State, progress: Progress, norm: float) -> None:
    """A line of figures since the last one."""
    values = {
        "loss": state.loss / max(state.targets, 1.0),
        "rate": learning_rate_at(state.step - 1, run.total, run.config.train),
        "norm": norm,
        "epoch": float(state.place.epoch),
    }
    progress.report(state.step, values, state.targets)
    state.loss = state.targets = 0.0


def restore_state(run: Run, learner: Learner, progress: Progress) -> State:
    """Where the last whole checkpoint left off; without one, at the beginning."""
    found = checkpoint.load_newest(run.folder / "checkpoints", progress.say)
    state = State()
    if found is not None:
        learner.make_room()
        found.fill(learner.tensors(), run.processes)
        state = State.from_json(found.state)
        progress.say(f"resumed at step {state.step}")
    progress.start_at(state.step)
    return state


@contextmanager
def open_batches(run: Run, learner: Learner, place: BatchPosition) -> Iterator[Generator[StepBatch]]:
    """The batches from a place on; for a GPU, or by workers, they are made in advance."""
    config, processes = run.config.train, run.processes
    source = Batches(
        run.task, run.train, config.batch_tokens, config.accumulate, processes.rank, processes.world, run.config.seed
    )
    updates = (
        iterate_in_workers(source, place, config.workers, config.ahead) if config.workers else source.updates(place)
    )
    if config.ahead and learner.on_gpu and not config.workers:
        updates = prefetch(updates, config.ahead)
    try:
        yield updates
    finally:
        updates.close()


@contextmanager
def allow_tf32() -> Iterator[None]:
    """Products of float32 by the tensor cores of a GPU (TF32): learning does not need the digits that they lose."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def catch_stop_signals() -> Iterator[list[int]]:
    """Collects the wish to stop (Ctrl-C, SIGTERM), so that an update is finished and saved first."""
    asked: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, old in before.items():
            signal.signal(number, old)

"""Trains a task: reads a config, prepares a run directory, runs the loop and keeps the best models.

config: the TOML config of a run, and single values changed with `key=value`
run: prepares a run: run directory, data and task
lock: locks a run directory while a command trains in it
defaults: batch size, epochs and warm-up chosen from the data where they are not set
advice: messages about a training run that looks wrong, with the setting that helps
loop: `train`, the training loop from the first step to the finished model
batches: batches by token budget, in an order that depends only on seed and epoch
learner: model, optimizer and weight average; gradients in, new weights out
graphed_steps: replays forward, backward and optimizer step as CUDA graphs
schedule: the learning rate of a step
state: the counters of a run that a checkpoint saves
evaluation: loss and metric on the dev set
best_models: selects, saves and averages the best models
checkpoint: atomic, checksummed checkpoints
distributed: collective operations for one or many processes
parallel: FSDP2, tensor and context parallelism
progress: progress bar, log lines, metrics.jsonl and TensorBoard
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from foci.training.config import RunConfig, TrainConfig, read_config

if TYPE_CHECKING:
    from foci.training.loop import train

__all__ = ["RunConfig", "TrainConfig", "read_config", "train"]


def __getattr__(name: str) -> Any:
    """Imports the loop on first use: it needs torch.distributed.tensor, which takes a second that `foci run` saves."""
    if name == "train":
        return import_module("foci.training.loop").train
    raise AttributeError(f"module 'foci.training' has no attribute {name!r}")

"""Evaluates a model on examples that it was not trained on: mean loss, and the task's metric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from foci.inputs.padding import LENGTH_MULTIPLE, group_by_size
from foci.tasks.task import Task
from foci.training.batches import seeded_generator
from foci.training.distributed import Processes


@torch.no_grad()
def mean_loss(
    task: Task[Any, Any], model: nn.Module, examples: Sequence[Any], budget: int, processes: Processes
) -> float:
    """Computes the loss per target, without label smoothing; the processes share the batches."""
    examples = task.epoch_examples(examples, False, seeded_generator("evaluation"))
    batches = group_by_size([task.size(example) for example in examples], budget, LENGTH_MULTIPLE)
    totals = torch.zeros(2, dtype=torch.float64, device=processes.device)
    # Every process computes equally many batches, because a sharded model needs all of them in each forward.
    for first in range(0, len(batches), processes.data_world):
        index = first + processes.data_rank
        chosen = batches[index] if index < len(batches) else batches[first][:1]
        batch = task.batch([examples[i] for i in chosen], False, seeded_generator("evaluation", index))
        loss, count = task.loss(model, {name: tensor.to(processes.device) for name, tensor in batch.items()})
        if index < len(batches):
            totals += torch.stack([loss.double(), count.double()])
    processes.all_reduce([totals])
    return float(totals[0] / totals[1].clamp(min=1))


@torch.no_grad()
def score_answers(
    task: Task[Any, Any], model: nn.Module, examples: Sequence[Any], processes: Processes
) -> dict[str, float | str]:
    """Scores the model's answers with the task's metrics; the processes share the examples."""
    # Only unsharded models are decoded, so that every process has a share of its own.
    own = examples[processes.rank :: processes.world]
    gathered = processes.all_gather(task.decode(model, own) if own else [])
    answers = [gathered[i % processes.world][i // processes.world] for i in range(len(examples))]
    return task.score(answers, examples)

"""How good a model is on a part that it does not learn from."""

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
    """The loss per target, without label smoothing; every process takes a part of the batches."""
    examples = task.epoch(examples, False, seeded_generator("evaluation"))
    batches = group_by_size([task.size(example) for example in examples], budget, LENGTH_MULTIPLE)
    totals = torch.zeros(2, dtype=torch.float64, device=processes.device)
    # All take equally many, because a model that is shared out is computed by all together.
    for first in range(0, len(batches), processes.world):
        place = first + processes.rank
        chosen = batches[place] if place < len(batches) else batches[first][:1]
        batch = task.batch([examples[i] for i in chosen], False, seeded_generator("evaluation", place))
        loss, count = task.loss(model, {name: tensor.to(processes.device) for name, tensor in batch.items()})
        if place < len(batches):
            totals += torch.stack([loss.double(), count.double()])
    processes.add_up([totals])
    return float(totals[0] / totals[1].clamp(min=1))


@torch.no_grad()
def score_answers(
    task: Task[Any, Any], model: nn.Module, examples: Sequence[Any], processes: Processes
) -> dict[str, float | str]:
    """The task's own figures, of answers that the model gives; every process gives some of them."""
    own = examples[processes.rank :: processes.world]
    gathered = processes.gathered(task.decode(model, own) if own else [])
    answers = [gathered[i % processes.world][i // processes.world] for i in range(len(examples))]
    return task.score(answers, examples)

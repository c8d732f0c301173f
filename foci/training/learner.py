"""Model, optimizer and average: micro-batches go in, new weights come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from foci.nn.model import Model, iter_unique_tensors
from foci.tasks.task import Task
from foci.training.config import TrainConfig
from foci.training.distributed import Processes, shard_model
from foci.training.graphed_steps import GraphedStep


class Learner:
    """What changes while a model is trained."""

    def __init__(self, task: Task[Any, Any], model: Model, config: TrainConfig, processes: Processes) -> None:
        self.task, self.config, self.processes = task, config, processes
        self.model = model.to(processes.device).train()
        if config.shard and processes.world > 1:
            shard_model(self.model, processes)
        self.shared = config.shard and processes.world > 1
        self.parameters = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = build_adamw(self.model, config, processes.device, self.shared)
        self.ema = [each.detach().clone() for each in self.parameters] if config.ema else []
        self._blend = get_ema_multi_avg_fn(config.ema) if config.ema else None
        # The loss and the targets of an update, summed; then the norm of its gradient.
        self.totals = torch.zeros(3, device=processes.device)
        self.on_gpu = processes.device.type == "cuda"
        if config.compile and self.on_gpu:
            self.model.compile()
        graphs = config.graphs and self.on_gpu
        self._add: Callable[[dict[str, Tensor], Tensor], None] = (
            GraphedStep(self._backward) if graphs else self._backward
        )
        self._step: Callable[[dict[str, Tensor], Tensor], None] = self._stepped
        if graphs and processes.world == 1:
            self._step = GraphedStep(self._stepped)
        self._weights = {flag: torch.tensor(float(flag), device=processes.device) for flag in (False, True)}

    def add(self, batch: dict[str, Tensor], counts: bool) -> None:
        """Forward and backward of one micro-batch; gradients and totals add up."""
        self._add(self.moved(batch), self._weights[counts])

    def update(self, rate: float) -> Tensor:
        """New weights from the gradients so far; gives the summed loss, the targets and the gradient's norm, (3,)."""
        for group in self.optimizer.param_groups:
            group["lr"].fill_(rate)
        self.processes.add_up([self.totals[:2]])
        if not self.shared and self.processes.world > 1:
            self.processes.add_up(self._every_gradient())
        self._step({}, self._weights[True])
        found = self.totals.clone()
        self.totals.zero_()
        # A captured graph adds to gradients where they stood when it was captured.
        self.optimizer.zero_grad(set_to_none=not self.config.graphs)
        return found

    def blend(self, step: int) -> None:
        """Moves the average on; until the warm-up is over it is the weights themselves."""
        if self._blend is None:
            return
        weights = [each.detach() for each in self.parameters]
        if step <= self.config.warmup or self.shared:
            for average, weight in zip(self.ema, weights, strict=True):
                average.copy_(weight) if step <= self.config.warmup else average.lerp_(weight, 1 - self.config.ema)
        else:
            self._blend(self.ema, weights, step)

    def moved(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch on the device, without a wait for it."""
        device = self.processes.device
        if not self.on_gpu:
            return batch
        return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}

    def autocast(self) -> torch.autocast:
        precision = self.config.precision
        wanted = precision == "bfloat16" or (precision == "auto" and self.on_gpu)
        # A captured graph must not rely on casts that were kept from another one.
        return torch.autocast(self.processes.device.type, torch.bfloat16, wanted, cache_enabled=not self.config.graphs)

    @contextmanager
    def averaged(self) -> Iterator[Model]:
        """The model in eval mode with the averaged weights, where there are any; afterwards as it was."""
        own = [each.detach().clone() for each in self.parameters] if self.ema else []
        self.put(self.ema)
        self.model.eval()
        try:
            with torch.no_grad():
                yield self.model
        finally:
            self.put(own)
            self.model.train()

    @torch.no_grad()
    def put(self, weights: Sequence[Tensor]) -> None:
        """Copies weights into the model, where it stands: captured graphs find them there."""
        for parameter, weight in zip(self.parameters if weights else (), weights, strict=True):
            parameter.copy_(weight)

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint holds, by name."""
        found = {f"model.{name}": tensor.detach() for name, tensor in iter_unique_tensors(self.model)}
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        found |= {f"ema.{names[each]}": kept for each, kept in zip(self.parameters, self.ema, strict=False)}
        for parameter, state in self.optimizer.state.items():
            found |= {f"optimizer.{names[parameter]}.{key}": value for key, value in state.items()}
        return found

    def make_room(self) -> None:
        """Gives the optimizer the tensors that it makes in its first step, so that a checkpoint can fill them."""
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group in self.optimizer.param_groups:
            group["lr"].fill_(0.0)
        before = [each.detach().clone() for each in self.parameters]
        self.optimizer.step()
        self.put(before)
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()
        self.optimizer.zero_grad(set_to_none=not self.config.graphs)

    def _backward(self, batch: dict[str, Tensor], weight: Tensor) -> None:
        with self.autocast():
            loss, count = self.task.loss(self.model, batch)
        (loss * weight).backward()
        self.totals[0].add_(loss.detach() * weight)
        self.totals[1].add_(count * weight)

    def _every_gradient(self) -> list[Tensor]:
        """All gradients, zeros where a batch of this process did not reach a parameter: processes send the same."""
        for each in self.parameters:
            if each.grad is None:
                each.grad = torch.zeros_like(each)
        return [each.grad for each in self.parameters if each.grad is not None]

    def _stepped(self, _nothing: dict[str, Tensor], _weight: Tensor) -> None:
        grads = [each.grad for each in self.parameters if each.grad is not None]
        share = 1.0 / self.totals[1].clamp(min=1.0)
        norm = torch.nn.utils.get_total_norm(grads)
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm) * share
        if self.config.clip:
            share = share * (self.config.clip / (norm + 1e-6)).clamp(max=1.0)
        if self.shared:
            for grad in grads:
                grad.mul_(share)
        else:
            torch._foreach_mul_(grads, share)
        self.optimizer.step()
        self.totals[2].copy_(norm)


def build_adamw(model: nn.Module, config: TrainConfig, device: torch.device, shared: bool) -> torch.optim.AdamW:
    """Weight decay is for matrices: norms, biases and single vectors are left as they are."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in parameters if each.dim() >= 2], "weight_decay": config.decay},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    # The rate is a tensor, because a captured graph sees changes of tensors only.
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=torch.tensor(0.0, device=device),
        betas=(config.momentum, config.variance),
        eps=1e-9,
        fused=not (shared and device.type == "cpu"),
        capturable=config.graphs and device.type == "cuda",
    )
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.0, device=device)
    return optimizer

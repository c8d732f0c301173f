"""Model, optimizer and moving average of the weights: micro-batches in, new weights out."""

from __future__ import annotations

import re
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
from foci.training.distributed import Processes
from foci.training.graphed_steps import GraphedStep
from foci.training.parallel import parallelize_model


class Learner:
    """Holds everything that training changes, and runs forward, backward and optimizer step."""

    def __init__(self, task: Task[Any, Any], model: Model, config: TrainConfig, processes: Processes) -> None:
        self.task, self.config, self.processes = task, config, processes
        self.model = model.to(processes.device).train()
        self.sharded = processes.parallel is not None
        # The order of the rows of tensors that are reordered for tensor parallelism, by name.
        self.orders: dict[str, Tensor] = {}
        if processes.parallel is not None:
            self.orders = parallelize_model(self.model, processes.parallel, processes.device)
        self.parameters = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = build_adamw(self.model, config, processes.device, sharded=self.sharded)
        self.ema = [each.detach().clone() for each in self.parameters] if config.ema else []
        self._average = get_ema_multi_avg_fn(config.ema) if config.ema else None
        # Summed loss and number of targets of the step, then the gradient norm.
        self.totals = torch.zeros(3, device=processes.device)
        self.on_gpu = processes.device.type == "cuda"
        if config.compile and self.on_gpu:
            self.model.compile()
        graphs = config.graphs and self.on_gpu
        self._run_backward: Callable[[dict[str, Tensor], Tensor], None] = (
            GraphedStep(self._backward) if graphs else self._backward
        )
        self._run_optimizer: Callable[[dict[str, Tensor], Tensor], None] = self._optimizer_step
        if graphs and processes.world == 1:
            self._run_optimizer = GraphedStep(self._optimizer_step)
        self._loss_weights = {flag: torch.tensor(float(flag), device=processes.device) for flag in (False, True)}

    def accumulate(self, batch: dict[str, Tensor], counts: bool, *, replays: bool = True) -> None:
        """Runs forward and backward of one micro-batch; gradients and totals accumulate. `replays`: as a CUDA graph."""
        run = self._run_backward if replays else self._backward
        run(self.to_device(batch), self._loss_weights[counts])

    def step(self, rate: float) -> Tensor:
        """Updates the weights; returns the summed loss, the number of targets and the gradient norm, (3,)."""
        for group in self.optimizer.param_groups:
            group["lr"].fill_(rate)
        self.processes.all_reduce([self.totals[:2]])
        if self.processes.copies > 1:
            self.totals[:2] /= self.processes.copies
        if not self.sharded and self.processes.world > 1:
            self.processes.all_reduce(self._all_gradients())
        self._run_optimizer({}, self._loss_weights[True])
        totals = self.totals.clone()
        self.totals.zero_()
        # A captured graph accumulates into the gradient tensors of its capture, so they must stay allocated.
        self.optimizer.zero_grad(set_to_none=not self.config.graphs)
        return totals

    def update_average(self, step: int) -> None:
        """Updates the moving average; during the warm-up it equals the weights."""
        if self._average is None:
            return
        weights = [each.detach() for each in self.parameters]
        warmup = self.config.warmup or 0
        if step <= warmup or self.sharded:
            for average, weight in zip(self.ema, weights, strict=True):
                average.copy_(weight) if step <= warmup else average.lerp_(weight, 1 - self.config.ema)
        else:
            self._average(self.ema, weights, step)

    def to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies the batch to the device without waiting for it."""
        device = self.processes.device
        if not self.on_gpu:
            return batch
        return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}

    def autocast(self) -> torch.autocast:
        precision = self.config.precision
        enabled = precision == "bfloat16" or (precision == "auto" and self.on_gpu)
        # A captured graph must not reuse casts that are cached in another graph's memory.
        return torch.autocast(self.processes.device.type, torch.bfloat16, enabled, cache_enabled=not self.config.graphs)

    @contextmanager
    def averaged_weights(self) -> Iterator[Model]:
        """Puts the model in eval mode with the averaged weights, if there are any, and restores it afterwards."""
        own = [each.detach().clone() for each in self.parameters] if self.ema else []
        self.copy_weights(self.ema)
        self.model.eval()
        try:
            with torch.no_grad():
                yield self.model
        finally:
            self.copy_weights(own)
            self.model.train()

    @torch.no_grad()
    def copy_weights(self, weights: Sequence[Tensor]) -> None:
        """Copies weights into the parameters in place, because captured graphs read those tensors."""
        for parameter, weight in zip(self.parameters if weights else (), weights, strict=True):
            parameter.copy_(weight)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of a checkpoint by name."""
        tensors = {f"model.{name}": tensor.detach() for name, tensor in iter_unique_tensors(self.model)}
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        tensors |= {f"ema.{names[each]}": average for each, average in zip(self.parameters, self.ema, strict=False)}
        for parameter, state in self.optimizer.state.items():
            tensors |= {f"optimizer.{names[parameter]}.{key}": value for key, value in state.items()}
        return tensors

    def tensor_orders(self) -> dict[str, Tensor]:
        """The orders of reordered tensors by the names of `tensors`."""
        if not self.orders:
            return {}
        parts = (
            (name, re.sub(r"^(model|ema|optimizer)\.|\.(exp_avg|exp_avg_sq)$", "", name)) for name in self.tensors()
        )
        return {name: self.orders[part] for name, part in parts if part in self.orders}

    def allocate_optimizer_state(self) -> None:
        """Creates the optimizer state, which AdamW makes only in its first step, so that a checkpoint can fill it."""
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group in self.optimizer.param_groups:
            group["lr"].fill_(0.0)
        before = [each.detach().clone() for each in self.parameters]
        self.optimizer.step()
        self.copy_weights(before)
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()
        self.optimizer.zero_grad(set_to_none=not self.config.graphs)

    def _backward(self, batch: dict[str, Tensor], weight: Tensor) -> None:
        with self.autocast():
            loss, count = self.task.loss(self.model, batch)
        # Every process of "cp" computes the loss of all tokens, and the gradients of its own: they are summed.
        (loss * weight / (1 if self.processes.parallel is None else self.processes.parallel.cp)).backward()
        self.totals[0].add_(loss.detach() * weight)
        self.totals[1].add_(count * weight)

    def _all_gradients(self) -> list[Tensor]:
        """Returns all gradients, zeros for parameters without one, so every process reduces the same tensors."""
        for each in self.parameters:
            if each.grad is None:
                each.grad = torch.zeros_like(each)
        return [each.grad for each in self.parameters if each.grad is not None]

    def _sharded_norm(self, grads: Sequence[Tensor]) -> Tensor:
        """The norm of gradients that are sharded over meshes of one or two dimensions."""
        total = torch.zeros(1, device=self.processes.device)
        for grad in grads:
            # Where not all dimensions shard, several processes have the same gradient.
            shards = grad.device_mesh.size() if isinstance(grad, DTensor) else 1
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            total += torch.linalg.vector_norm(local.float()) ** 2 * shards / self.processes.world
        self.processes.all_reduce([total])
        return total[0].sqrt()

    def _optimizer_step(self, _batch: dict[str, Tensor], _weight: Tensor) -> None:
        grads = [each.grad for each in self.parameters if each.grad is not None]
        scale = 1.0 / self.totals[1].clamp(min=1.0)
        norm = (self._sharded_norm(grads) if self.sharded else torch.nn.utils.get_total_norm(grads)) * scale
        if self.config.clip:
            scale = scale * (self.config.clip / (norm + 1e-6)).clamp(max=1.0)
        if self.sharded:
            for grad in grads:
                grad.mul_(scale)
        else:
            torch._foreach_mul_(grads, scale)
        self.optimizer.step()
        self.totals[2].copy_(norm)


def build_adamw(model: nn.Module, config: TrainConfig, device: torch.device, sharded: bool) -> torch.optim.AdamW:
    """Builds AdamW with weight decay on matrices only, not on norms, biases and other vectors."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    groups: list[dict[str, Any]] = []
    # One group per mesh: an operation on many tensors takes those of one mesh.
    for mesh in dict.fromkeys(each.device_mesh if isinstance(each, DTensor) else None for each in parameters):
        own = [each for each in parameters if (each.device_mesh if isinstance(each, DTensor) else None) == mesh]
        groups += [
            {"params": [each for each in own if each.dim() >= 2], "weight_decay": config.decay},
            {"params": [each for each in own if each.dim() < 2], "weight_decay": 0.0},
        ]
    # The rate is a tensor, because a captured graph sees only changes of tensors.
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=torch.tensor(0.0, device=device),
        betas=(config.momentum, config.variance),
        eps=1e-9,
        fused=not (sharded and device.type == "cpu"),
        capturable=config.graphs and device.type == "cuda",
    )
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.0, device=device)
    return optimizer

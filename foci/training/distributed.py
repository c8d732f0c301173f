"""One process or many: who they are, what they add up, and how they share out a large model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foci.nn.block import Block

ValueT = TypeVar("Thing")
# Gradients travel in pieces of so many numbers, so that their copy stays small.
MAX_BUCKET_NUMEL = 2**24


@dataclass(frozen=True)
class Processes:
    """The processes that train together, and this one's place among them."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this one speaks and writes for all."""
        return self.rank == 0

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replaces every tensor by its sum over all processes."""
        if self.world == 1:
            return
        for some in bucket_tensors(tensors):
            flat = torch.cat([tensor.flatten() for tensor in some])
            dist.all_reduce(flat)
            parts = flat.split([tensor.numel() for tensor in some])
            for tensor, part in zip(some, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def gathered(self, thing: ValueT) -> list[ValueT]:
        """What each process has, in their order."""
        if self.world == 1:
            return [thing]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, thing)
        return found

    def from_first(self, thing: ValueT | None) -> ValueT:
        """What the first process has."""
        if self.world == 1:
            return thing  # type: ignore[return-value]
        found = [thing]
        dist.broadcast_object_list(found, src=0)
        return found[0]  # type: ignore[return-value]

    def wait(self) -> None:
        """Goes on when all have come here."""
        if self.world > 1:
            dist.barrier()


def bucket_tensors(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors in groups of one dtype, none much larger than it must be."""
    found: list[list[Tensor]] = []
    room: dict[torch.dtype, tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        group, taken = room.get(tensor.dtype, ([], 0))
        if not group or taken + tensor.numel() > MAX_BUCKET_NUMEL:
            group, taken = [], 0
            found.append(group)
        group.append(tensor)
        room[tensor.dtype] = group, taken + tensor.numel()
    return found


def init_processes(device: str) -> Processes:
    """Joins the processes that torchrun started; without it there is one."""
    on_gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise ValueError("expected a CUDA device because of train.device = 'cuda', but there is none")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    here = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(here)
    if world == 1:
        return Processes(0, 1, here)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo")
    return Processes(dist.get_rank(), dist.get_world_size(), here)


def destroy_processes() -> None:
    """Ends what `join` began."""
    if dist.is_initialized():
        dist.destroy_process_group()


def shard_model(model: nn.Module, processes: Processes) -> None:
    """FSDP2: every process keeps a part of each weight, and gathers a block's when it is that block's turn."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(processes.device.type, (processes.world,))
    for module in model.modules():
        if isinstance(module, Block):
            sum_gradients(fully_shard(module, mesh=mesh))
    sum_gradients(fully_shard(model, mesh=mesh))


def sum_gradients(module: Any) -> None:
    """Losses are sums over targets, so gradients are added up, and divided by the targets of all later."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)

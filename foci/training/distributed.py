"""Collective operations and FSDP2 sharding for one or many training processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foci.nn.block import Block

ValueT = TypeVar("ValueT")
# Gradients are reduced in buckets of at most this many elements, which bounds the size of their flat copy.
MAX_BUCKET_NUMEL = 2**24


@dataclass(frozen=True)
class Processes:
    """The group of training processes, and the rank and device of this one."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the files and prints."""
        return self.rank == 0

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replaces every tensor with its sum over all processes."""
        if self.world == 1:
            return
        for bucket in bucket_tensors(tensors):
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            dist.all_reduce(flat)
            parts = flat.split([tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def all_gather(self, value: ValueT) -> list[ValueT]:
        """Returns the value of every process, by rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: ValueT | None) -> ValueT:
        """Returns the value of rank 0."""
        if self.world == 1:
            return value  # type: ignore[return-value]
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]  # type: ignore[return-value]

    def barrier(self) -> None:
        """Waits until all processes get here."""
        if self.world > 1:
            dist.barrier()


def bucket_tensors(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Groups tensors of one dtype into buckets of at most MAX_BUCKET_NUMEL elements, or a single larger tensor."""
    buckets: list[list[Tensor]] = []
    last_bucket: dict[torch.dtype, tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        bucket, numel = last_bucket.get(tensor.dtype, ([], 0))
        if not bucket or numel + tensor.numel() > MAX_BUCKET_NUMEL:
            bucket, numel = [], 0
            buckets.append(bucket)
        bucket.append(tensor)
        last_bucket[tensor.dtype] = bucket, numel + tensor.numel()
    return buckets


def init_processes(device: str) -> Processes:
    """Initializes the process group that torchrun describes; without torchrun, one process."""
    on_gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise ValueError(
            "train.device must be 'cpu' or 'auto' on this machine, got 'cuda': PyTorch finds no CUDA device"
        )
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
    """Destroys the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def shard_model(model: nn.Module, processes: Processes) -> None:
    """Shards the model with FSDP2: each process holds a shard of every weight, and a block is gathered when it runs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(processes.device.type, (processes.world,))
    for module in model.modules():
        if isinstance(module, Block):
            sum_gradients(fully_shard(module, mesh=mesh))
    sum_gradients(fully_shard(model, mesh=mesh))


def sum_gradients(module: Any) -> None:
    """Makes FSDP2 sum gradients: losses are sums over targets, and the learner divides by all targets later."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)

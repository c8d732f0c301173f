"""Collective operations for one or many training processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from foci.training.parallel import Parallel, parse_parallel

ValueT = TypeVar("ValueT")
# Gradients are reduced in buckets of at most this many elements, which bounds the size of their flat copy.
MAX_BUCKET_NUMEL = 2**24


@dataclass(frozen=True)
class Processes:
    """The group of training processes, and the rank and device of this one."""

    rank: int
    world: int
    device: torch.device
    parallel: Parallel | None = None  # None: every process holds the whole model

    @property
    def copies(self) -> int:
        """How many processes compute the same batch: those that share its heads and tokens."""
        return 1 if self.parallel is None else self.parallel.tp * self.parallel.cp

    @property
    def data_rank(self) -> int:
        """The number of this process's share of each batch."""
        return self.rank // self.copies

    @property
    def data_world(self) -> int:
        """How many shares a batch has."""
        return self.world // self.copies

    @property
    def random_rank(self) -> int:
        """Processes with the same number draw the same random numbers: those that share the heads."""
        return self.rank // (1 if self.parallel is None else self.parallel.tp)

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


def init_processes(device: str, parallel: str = "", shard: bool = False) -> Processes:
    """Initializes the process group that torchrun describes; without torchrun, one process."""
    sizes = parse_parallel(parallel) if parallel else None
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
    if sizes is not None and sizes.size != world:
        raise ValueError(
            f"train.parallel must multiply to the {world} processes that torchrun started, got {parallel!r},"
            f" which needs {sizes.size}"
        )
    if world == 1:
        return Processes(0, 1, here)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo")
    # PyTorch's advice on how it gathers tensors that two dimensions of a mesh shard; there is no other way.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if shard:
        sizes = Parallel(fsdp=world)
    return Processes(dist.get_rank(), dist.get_world_size(), here, sizes)


@contextmanager
def explain_lost_processes() -> Iterator[None]:
    """Turns the error of a collective operation whose other processes are gone into one sentence."""
    try:
        yield
    except RuntimeError as error:
        # Gloo has no type of its own for errors.
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise ConnectionError(
            "the connection to another process was lost: its own output says why it ended; earlier checkpoints are"
            " intact, so start all processes again with --resume"
        ) from error


def destroy_processes() -> None:
    """Destroys the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()

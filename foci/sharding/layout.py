"""Which axis of an attention call each dimension of a DeviceMesh shards, and which part belongs to this process.

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from foci.masks.tile import CallSizes


@dataclass(frozen=True)
class Part:
    """The part of the matrix that belongs to this process: all keys of some sequences, heads and queries."""

    batch: tuple[slice, ...]
    heads: slice
    queries: slice


@dataclass(frozen=True)
class CallLayout:
    """The sizes of a whole call, and the axis of the query that each mesh dimension shards; None: none."""

    mesh: DeviceMesh
    axes: tuple[int | None, ...]
    batch: tuple[int, ...]
    heads: int | None
    kv_heads: int
    queries: int
    keys: int

    @property
    def head_axis(self) -> int:
        """The axis of the heads; -1 for inputs without heads."""
        return -1 if self.heads is None else len(self.batch)

    @property
    def query_axis(self) -> int:
        return len(self.batch) + (self.heads is not None)

    @property
    def lead(self) -> tuple[int, ...]:
        """The sizes before those of the matrix."""
        return self.batch if self.heads is None else (*self.batch, self.heads)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placements of the query and of the output."""
        return tuple(Replicate() if axis is None else Shard(axis) for axis in self.axes)

    @property
    def has_whole_groups(self) -> bool:
        """Whether every process has all query heads of its key/value heads, so that these can be sharded as well."""
        count = 1
        for axis, size in zip(self.axes, self.mesh.shape, strict=True):
            count *= size if axis == self.head_axis else 1
        return self.kv_heads == self.heads or (self.kv_heads % count == 0 and (self.heads or 0) % count == 0)

    def sizes(self, device: torch.device) -> CallSizes:
        """The sizes of the whole call, which masks and biases are checked against."""
        return CallSizes(self.batch, self.heads, self.queries, self.keys, device)

    def part(self) -> Part:
        """The part of this process."""
        shape = (*self.lead, self.queries)
        sizes, starts = compute_local_shape_and_global_offset(shape, self.mesh, self.placements)
        ranges = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        heads = slice(0, 1) if self.heads is None else ranges[self.head_axis]
        return Part(tuple(ranges[: len(self.batch)]), heads, ranges[-1])

    def place(self, tensor: DTensor, is_query: bool) -> Tensor:
        """What this process needs of a query, or of a key or value; its gradient goes the same way back."""
        placements = [self._placement(axis, tensor, is_query) for axis in self.axes]
        gradients = [
            Partial() if axis is not None and placement.is_replicate() else placement
            for axis, placement in zip(self.axes, placements, strict=True)
        ]
        return redistribute(tensor, placements).to_local(grad_placements=gradients)

    def _placement(self, axis: int | None, tensor: DTensor, is_query: bool) -> Placement:
        if axis is None or (axis < len(self.batch) and tensor.shape[axis] != self.batch[axis]):
            return Replicate()
        if not is_query and (axis == self.query_axis or (axis == self.head_axis and not self.has_whole_groups)):
            return Replicate()
        return Shard(axis)

    def gather_parameter(self, tensor: Tensor) -> Tensor:
        """All of a tensor of a mask, bias or score; the gradient of a DTensor is summed over the processes."""
        if not isinstance(tensor, DTensor):
            return tensor
        replicated: list[Placement] = [Replicate()] * tensor.device_mesh.ndim
        sharded = dict(zip(self.mesh.mesh_dim_names or (), self.axes, strict=False))
        names = tensor.device_mesh.mesh_dim_names or ()
        axes = self.axes if tensor.device_mesh == self.mesh else [sharded.get(name) for name in names]
        gradients: list[Placement] = [Replicate() if axis is None else Partial() for axis in axes]
        return redistribute(tensor, replicated).to_local(grad_placements=gradients)

    def without(self, axes: set[int], replacement: int | None = None) -> CallLayout:
        """The same call with other axes sharded in place of the given ones."""
        return replace(self, axes=tuple(replacement if axis in axes else axis for axis in self.axes))


def find_layout(query: Any, key: Any, value: Any) -> CallLayout:
    """The layout of a call; raises TypeError unless query, key and value are DTensors on one mesh."""
    tensors = (query, key, value)
    for name, tensor in zip(("query", "key", "value"), tensors, strict=True):
        if not isinstance(tensor, DTensor):
            raise TypeError(
                f"query, key and value must all be DTensors if one is, got {name} as {type(tensor).__name__}:"
                " use torch.distributed.tensor.distribute_tensor or DTensor.from_local"
            )
    mesh = query.device_mesh
    if key.device_mesh != mesh or value.device_mesh != mesh:
        raise ValueError(f"query, key and value must be on one mesh, got {[each.device_mesh for each in tensors]}")
    leading = 3 if query.dim() >= 4 else 2
    try:
        batch = tuple(torch.broadcast_shapes(*(each.shape[:-leading] for each in tensors)))
    except RuntimeError:
        shapes = ", ".join(str(tuple(each.shape)) for each in tensors)
        raise ValueError(f"the batch dimensions of query, key and value must broadcast, got {shapes}") from None
    heads, kv_heads = (query.shape[-3], key.shape[-3]) if leading == 3 else (None, 1)
    none = (None,) * mesh.ndim
    layout = CallLayout(mesh, none, batch, heads, kv_heads, query.shape[-2], key.shape[-2])
    return replace(layout, axes=tuple(choose_axis(layout, tensors, index) for index in range(mesh.ndim)))


def choose_axis(layout: CallLayout, tensors: tuple[DTensor, ...], index: int) -> int | None:
    """The axis that a mesh dimension shards: that of the query, or batch or heads of a key or value."""
    for tensor in tensors:
        placement = tensor.placements[index]
        if type(placement) is not Shard or placement.dim > layout.query_axis:
            continue
        axis = placement.dim
        if axis < len(layout.batch) and tensor.shape[axis] == 1:
            continue
        if axis < layout.query_axis or tensor is tensors[0]:
            return axis
    return None


def redistribute(tensor: DTensor, placements: list[Placement]) -> DTensor:
    return tensor if tensor.placements == tuple(placements) else tensor.redistribute(placements=placements)


def from_local(local: Tensor, mesh: DeviceMesh, placements: list[Placement], shape: tuple[int, ...]) -> DTensor:
    """A DTensor from the part of this process; parts may have unequal sizes."""
    stride = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        stride[axis] = stride[axis + 1] * max(shape[axis + 1], 1)
    return DTensor.from_local(
        local.contiguous(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )

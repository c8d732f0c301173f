"""What the modules of foci.nn need to run on a part of the heads and tokens of their inputs.

Heads are sharded by "tp" (tensor parallel), tokens by "cp" (context parallel); a mesh has both dimensions. Between
attention modules every process has whole states of its own tokens, the same on all processes of "tp".

B batch, H heads, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from foci.sharding.layout import from_local
from foci.weights.parts_file import map_tensors


@dataclass(frozen=True)
class ModuleShards:
    """The mesh ("cp", "tp") of a model."""

    mesh: DeviceMesh

    @property
    def cp(self) -> int:
        return self.mesh["cp"].size()

    @property
    def tp(self) -> int:
        return self.mesh["tp"].size()

    def attend(
        self, attend: Callable[..., Any], tensors: tuple[Tensor, ...], counts: tuple[int, int] | None, options: Any
    ) -> Any:
        """`foci.attention` of this process's heads and tokens; `counts`: all queries and keys, if tokens are sharded.

        Query, key and value are (B, H, T, D), and so is the output. Weights are those of all heads and tokens.
        """
        placements: list[Placement] = [Replicate() if counts is None else Shard(2), Shard(1)]
        q, k, v = (
            from_local(each, self.mesh, placements, self._whole_shape(each, None if counts is None else counts[i > 0]))
            for i, each in enumerate(tensors)
        )
        parameters = {name: map_tensors(options[name], self._replicate_parameter) for name in ("score", "bias")}
        result = attend(q, k, v, **options | parameters)
        return (result[0].to_local(), result[1]) if isinstance(result, tuple) else result.to_local()

    def _whole_shape(self, tensor: Tensor, count: int | None) -> tuple[int, ...]:
        batch, heads, tokens, width = tensor.shape
        return batch, heads * self.tp, tokens if count is None else count, width

    def _replicate_parameter(self, tensor: Tensor) -> Tensor:
        """A parameter of all heads, whose gradient is summed over "tp"; over "cp" the optimizer's reduction sums it."""
        return DTensor.from_local(tensor, self.mesh["tp"], [Replicate()], run_check=False)

    def take_tokens(self, x: Tensor) -> Tensor:
        """This process's tokens of (..., T, D), or of positions (..., T, 1)."""
        size = -(-x.shape[-2] // self.cp)
        start = min(size * self.mesh["cp"].get_local_rank(), x.shape[-2])
        return x.narrow(-2, start, min(size, x.shape[-2] - start))

    def take_positions(self, positions: Tensor | None, count: int, device: torch.device) -> Tensor:
        """This process's positions of (T,) or (B, T); None: in order from 0."""
        whole = torch.arange(count, device=device) if positions is None else positions
        return self.take_tokens(whole.unsqueeze(-1)).squeeze(-1)

    def gather_tokens(self, x: Tensor, count: int) -> Tensor:
        """(B, T, D) with the tokens of all processes; their gradients are summed and split again."""
        shape = (x.shape[0], count, x.shape[2])
        whole = from_local(x, self.mesh["cp"], [Shard(1)], shape).redistribute(placements=[Replicate()])
        # FSDP2 warns of outputs that are views.
        return whole.to_local(grad_placements=[Partial()]).clone()


def copy_to_group(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """x itself; its gradient is summed over the mesh. For inputs that every process uses with other weights."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def sum_over_group(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of x over the mesh; its gradient is the same on every process."""
    return DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()

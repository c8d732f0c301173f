"""FSDP2, tensor and context parallelism of a model on one set of processes.

Processes are numbered fsdp first and tp last. "tp" shards the heads of attention and the hidden units of feed-forwards,
"cp" the tokens, and the weights, gradients and optimizer state are sharded over fsdp x cp.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foci.nn.attention import Attention
from foci.nn.block import Block, FeedForward
from foci.nn.stack import Stack

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SIZE_PATTERN = re.compile(r"(fsdp|tp|cp) *= *([1-9]\d{0,5})")


@dataclass(frozen=True)
class Parallel:
    """How many processes share the weights and batches (fsdp), the heads (tp) and the tokens (cp)."""

    fsdp: int = 1
    tp: int = 1
    cp: int = 1

    @property
    def size(self) -> int:
        return self.fsdp * self.tp * self.cp


def parse_parallel(text: str) -> Parallel:
    """Parses "fsdp=2,tp=2,cp=2"; a size that is not named is 1.

    >>> parse_parallel("fsdp=2,tp=4")
    Parallel(fsdp=2, tp=4, cp=1)
    """
    found = [SIZE_PATTERN.fullmatch(part.strip()) for part in text.split(",")]
    names = [match[1] for match in found if match]
    if None in found or len(set(names)) < len(found):
        raise ValueError(f"train.parallel must be sizes such as 'fsdp=2,tp=2,cp=2', each once, got {text!r}")
    return Parallel(**{match[1]: int(match[2]) for match in found if match})


def parallelize_model(model: nn.Module, parallel: Parallel, device: torch.device) -> dict[str, Tensor]:
    """Shards a model in place; returns the order of the rows of each tensor that was reordered for tp, by name."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from foci.sharding.modules import ModuleShards, sum_over_group

    check_model(model, parallel)
    weights = init_device_mesh(device.type, (parallel.fsdp * parallel.cp, parallel.tp), mesh_dim_names=("data", "tp"))
    orders: dict[str, Tensor] = {}
    if parallel.tp > 1:
        for name, module in model.named_modules():
            if isinstance(module, Attention | FeedForward):
                orders |= {f"{name}.{each}": order for each, order in shard_heads(module, weights["tp"])}
    if parallel.tp > 1 or parallel.cp > 1:
        sizes = (parallel.fsdp, parallel.cp, parallel.tp)
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("fsdp", "cp", "tp"))
        shards = ModuleShards(mesh["cp", "tp"])
        for module in model.modules():
            if isinstance(module, Attention | Stack):
                module.shards = shards
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    uses = Counter(parameter for block in blocks for parameter in block.parameters())
    # A table that several blocks share stays whole: FSDP2 shards a parameter with one module.
    shared = {parameter for parameter, count in uses.items() if count > 1}
    for parameter in shared:
        parameter.register_hook(lambda grad: sum_over_group(grad, weights["data"]))
    for block in blocks:
        sum_gradients(fully_shard(block, mesh=weights["data"], ignored_params=shared))
    sum_gradients(fully_shard(model, mesh=weights["data"], ignored_params=shared))
    return orders


def sum_gradients(module: Any) -> None:
    """Makes FSDP2 sum gradients: losses are sums over targets, and the learner divides by all targets later."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def check_model(model: nn.Module, parallel: Parallel) -> None:
    """Raises ValueError for sizes that the model cannot be split by."""
    kind = type(model).__name__
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    if parallel.tp * parallel.cp > 1 and not attentions:
        raise ValueError(
            f"train.parallel must be fsdp=N for {kind}, which has no Transformer blocks to split by heads or tokens,"
            f" got tp={parallel.tp}, cp={parallel.cp}"
        )
    for module in model.modules():
        sizes: dict[str, int] = {}
        if isinstance(module, Attention):
            sizes = {"heads": module.heads, "key/value heads": module.kv_heads}
        elif isinstance(module, FeedForward):
            sizes = {"hidden units": module.outer.in_features}
        for name, size in sizes.items():
            if size % parallel.tp:
                raise ValueError(f"tp in train.parallel must divide the {size} {name} of {kind}, got tp={parallel.tp}")


def shard_heads(module: Attention | FeedForward, mesh: DeviceMesh) -> Iterator[tuple[str, Tensor]]:
    """Shards the linear layers of a module over heads or hidden units; yields the names of reordered tensors.

    One layer holds queries, keys and values, or gate and units. Its rows are reordered so that the shard of a process
    has its share of each.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    from foci.sharding.modules import copy_to_group, sum_over_group

    count = mesh.size()
    if isinstance(module, Attention):
        first, last, names = module.project, module.output, ("project", "output")
        parts = [each * module.head_width for each in (module.heads, module.kv_heads, module.kv_heads)]
        module.heads, module.kv_heads = module.heads // count, module.kv_heads // count
    else:
        first, last, names = module.inner, module.outer, ("inner", "outer")
        parts = [last.in_features] * (2 if module.gated else 1)
    order = interleave_parts(parts, count).to(first.weight.device)
    for name, parameter in list(first.named_parameters(recurse=False)):
        spread = distribute_tensor(parameter.detach()[order], mesh, [Shard(0)], src_data_rank=None)
        first.register_parameter(name, nn.Parameter(spread))
        if len(parts) > 1:
            yield f"{names[0]}.{name}", order
    spread = distribute_tensor(last.weight.detach(), mesh, [Shard(1)], src_data_rank=None)
    last.register_parameter("weight", nn.Parameter(spread))
    saved: dict[tuple[nn.Module, str], Any] = {}

    def use_local_weights(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        for layer in (first, last):
            for name, parameter in layer._parameters.items():
                if parameter is None:
                    continue
                saved[layer, name] = parameter
                is_added_once = layer is last and name == "bias"
                spread: Any = parameter
                local = copy_to_group(spread, mesh) / count if is_added_once else spread.to_local()
                layer._parameters[name] = local  # type: ignore[assignment]
        return tuple(copy_to_group(each, mesh) if isinstance(each, Tensor) else each for each in args)

    def sum_output(_module: nn.Module, _args: Any, result: Any) -> Any:
        restore_weights(saved)
        if isinstance(result, tuple):
            return sum_over_group(result[0], mesh), *result[1:]
        return result if result is None else sum_over_group(result, mesh)

    module.register_forward_pre_hook(use_local_weights)
    module.register_forward_hook(sum_output, always_call=True)


def restore_weights(saved: dict[tuple[nn.Module, str], Any]) -> None:
    for (layer, name), parameter in saved.items():
        layer._parameters[name] = parameter
    saved.clear()


def interleave_parts(parts: list[int], count: int) -> Tensor:
    """The order in which each of `count` equal shards of the rows has its share of every part.

    >>> interleave_parts([4, 2], 2)
    tensor([0, 1, 4, 2, 3, 5])
    """
    rows = torch.arange(sum(parts)).split(parts)
    return torch.cat([part.chunk(count)[shard] for shard in range(count) for part in rows])

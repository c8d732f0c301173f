"""Launches the pass of kernels/statistics_gluon.py, which Hopper alone runs.

B batch, H query heads, G key heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from foci.statistics.tiling import Config, Launch, shares

KEYS = 64
WIDTHS = (64, 128)
# What the kernel takes of the plain one's arguments; the rest is about calls that it does not serve.
TAKEN = ("lse", "H", "group", "Tq", "Tk", "scale", "spans_batch")


def reasons(q: Tensor, k: Tensor, arguments: dict[str, Any]) -> list[str]:
    """Why the kernel does not take this call; empty where it does."""
    found = []
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device)[0] != 9:
        found.append("the GPU is not a Hopper")
    if find_spec("triton.experimental") is None or find_spec("triton.experimental.gluon") is None:
        found.append("this Triton has no Gluon")
    if q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] not in WIDTHS:
        found.append(f"{q.dtype} of width {q.shape[-1]}, not half precision of width 64 or 128")
    if any(arguments[name] for name in ("SOFTCAP", "ALIBI", "IDS", "DENSE")) or arguments["SPANS"] > 1:
        found.append("a softcap, a bias or a mask beyond one run of keys per query")
    if not (fetchable(arguments["q"]) and fetchable(arguments["k"])):
        found.append("q or k that do not start, or step, at 16 bytes")
    return found


def fetchable(x: Tensor) -> bool:
    """Whether tiles of it can be fetched as such."""
    steps = [step for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    return x.data_ptr() % 16 == 0 and all(step > 0 and step * x.element_size() % 16 == 0 for step in steps)


def descriptor(x: Tensor, rows: int) -> Any:
    """For fetching tiles of so many rows."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = [1, 1, rows, x.shape[-1]]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16)
    # A step that is never taken may be anything in a tensor, but not in a descriptor.
    longest = max(step for step in (*x.stride(), x.shape[-1]))
    strides = [step if size > 1 else longest for size, step in zip(x.shape, x.stride(), strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides[:-1], 1], block, layout)


def edges(spans: Tensor, Tk: int, width: int, parts: int) -> Tensor:
    """(1 or B, 1, 2, Tq) -> (1 or B, tiles, 4): which tiles of keys some of `width` queries see, from and to, and which
    all of them see entirely. The tiles are a multiple of `parts`.
    """
    low, high = spans[:, 0, 0].clamp(min=0), spans[:, 0, 1].clamp(max=Tk)
    queries = spans.shape[-1]
    missing = -queries % (width * parts)
    some = torch.nn.functional.pad(high > low, (0, missing)).unflatten(-1, (-1, width))
    inside = torch.nn.functional.pad(torch.ones_like(low, dtype=torch.bool), (0, missing)).unflatten(-1, (-1, width))
    low, high = (torch.nn.functional.pad(x, (0, missing)).unflatten(-1, (-1, width)) for x in (low, high))
    first = torch.where(some, low, Tk).amin(-1) // KEYS
    last = torch.maximum(-(-torch.where(some, high, 0).amax(-1) // KEYS), first)
    full = (-(-torch.where(inside, low, 0).amax(-1) // KEYS)).clamp(first, last)
    end = (torch.where(inside, high, Tk).amin(-1) // KEYS).clamp(full, last)
    return torch.stack([first, last, full, end], -1).to(torch.int32).contiguous()


def run(arguments: dict[str, Any], common: dict[str, Any], launch: Launch, config: Config) -> None:
    """One launch."""
    from foci.kernels.statistics_gluon import statistics as kernel

    q, k = arguments["q"], arguments["k"]
    if refused := reasons(q, k, arguments):
        raise ValueError(f"expected a call that the kernel for Hopper takes, got {', '.join(refused)}")
    per_group = config.queries // config.groups
    parts = 2 if config.plan == 1 else 1
    table = arguments["spans"]
    if arguments["SPANS"]:
        table = edges(arguments["spans"], k.shape[2], per_group, config.groups)
    registers, of_a_group = shares(config.groups, config.per_processor)
    third = common["third"]
    kernel[(launch.pairs * common["slots"],)](
        **{name: arguments[name] for name in TAKEN}, **common | {"third": third.view(torch.int32)},
        q=descriptor(q, per_group // parts), k=descriptor(k, KEYS), spans=arguments["spans"], edges=table,
        edges_batch=0 if table.shape[0] == 1 else table.stride(0),
        first_pair=launch.first_pair, first_tile=launch.first_tile, tiles=launch.tiles,
        SEEN=2 if arguments["SPANS"] else int(arguments["CAUSAL"]), WIDTH=per_group, GROUPS=config.groups,
        PLAN=config.plan, STAGES=config.stages, ROUNDS=config.rounds, REGISTERS=of_a_group,
        num_warps=4, maxnreg=registers,
    )  # fmt: skip

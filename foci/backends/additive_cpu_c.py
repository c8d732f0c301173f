"""The scores wᵀ tanh(q + k) of a strip and their gradients in compiled C: the fastest way on a CPU with a C compiler.

B batch, H heads, G key heads, R queries, C keys, D width.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from foci.runtime import native

# Exponentials of the keys pay off from so many queries on.
FEW = 4

# Terms that are worth a thread.
PER_THREAD = 2**18

TENSORS = (
    *("queries", "keys", "weight", "panels", "near", "scores", "slopes"),
    *("d_queries", "d_keys", "d_weight"),
)
SIZES = ("pairs", "heads", "group", "query_count", "key_count", "panel_count", "width", "parts", "exponentials")


class Work(ctypes.Structure):
    """What kernels/additive.c is given, in its order."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in TENSORS),
        *((name, ctypes.c_int64) for name in (*SIZES, "next", "failed")),
    )


def refusal() -> str | None:
    """Why there is no such library here; None where there is one."""
    return native.refusal("additive")


def scores(q: Tensor, k: Tensor, weight: Tensor) -> Tensor:
    """(B, H, R, D), (B, G, C, D) and (H, D), float32 -> (B, H, R, C)."""
    library = native.library("additive")
    lanes = library.lanes()
    panels = -(-k.shape[2] // lanes)
    tensors = {"queries": q.contiguous(), "keys": k.contiguous(), "weight": weight.contiguous()}
    tensors["scores"] = q.new_empty(*q.shape[:3], k.shape[2])
    if q.shape[2] >= FEW:
        tensors["panels"] = k.new_empty(*k.shape[:2], panels, k.shape[3], lanes)
        tensors["near"] = k.new_empty(*k.shape[:2], panels, dtype=torch.int64)
    work = work_of(tensors, panel_count=panels)
    if "panels" in tensors:
        run(library.lay_out, work)
    run(library.score, work)
    return tensors["scores"]


def gradients(q: Tensor, k: Tensor, weight: Tensor, slopes: Tensor, near: bool) -> tuple[Tensor, ...]:
    """What the gradient of the scores, (B, H, R, C), gives to queries, keys and weight; `near`: exponentials exist."""
    library = native.library("additive")
    beyond = -q.shape[3] % library.lanes()
    exponentials = near and q.shape[2] >= FEW
    queries, keys = (widened((x * 2).exp_() if exponentials else x, beyond) for x in (q, k))
    parts = parts_of(q, k)
    tensors = {
        "queries": queries,
        "keys": keys,
        "weight": widened(weight, beyond),
        "slopes": slopes.contiguous(),
        "d_queries": q.new_zeros(queries.shape),
        "d_keys": k.new_zeros(parts, *keys.shape),
        "d_weight": q.new_zeros(parts, *q.shape[:2], queries.shape[3]),
    }
    run(library.slope, work_of(tensors, parts=parts, exponentials=int(exponentials)))
    d_keys = tensors["d_keys"][0] if parts == 1 else tensors["d_keys"].sum(0)
    d_weight = slopes.sum((0, 2, 3)).unsqueeze(-1) - 2.0 * tensors["d_weight"].sum((0, 1))
    return tuple(found[..., : q.shape[3]] for found in (tensors["d_queries"], d_keys, d_weight))


def widened(x: Tensor, beyond: int) -> Tensor:
    """As much wider, with zeros, and contiguous."""
    return pad(x, (0, beyond)).contiguous() if beyond else x.contiguous()


def work_of(tensors: dict[str, Tensor], **more: int) -> Work:
    queries, keys = tensors["queries"], tensors["keys"]
    return Work(
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        pairs=queries.shape[:2].numel(),
        heads=queries.shape[1],
        group=queries.shape[1] // keys.shape[1],
        query_count=queries.shape[2],
        key_count=keys.shape[2],
        width=queries.shape[3],
        **more,
    )


def run(function: Any, work: Work) -> None:
    work.next = 0
    native.run(function, work, threads(work.pairs * work.query_count * work.key_count * work.width))
    if work.failed:
        raise MemoryError("there is no memory for the few queries that are compared at once")


def threads(terms: int) -> int:
    return min(torch.get_num_threads(), max(terms // PER_THREAD, 1))


def parts_of(q: Tensor, k: Tensor) -> int:
    """Where heads alone do not give every thread the same, the rows are shared out too, a few parts for each thread."""
    pieces, count = k.shape[:2].numel(), threads(q.numel() * k.shape[2])
    return 1 if pieces % count == 0 else min(-(-4 * count // pieces), -(-q.shape[2] // FEW))

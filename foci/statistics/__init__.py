"""One pass over (q, k, log-sum-exp) that gives every statistic asked for, without the matrix."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from foci.arguments import Call
from foci.runtime.checks import disable_autocast
from foci.statistics import cpu_c, cuda, streaming
from foci.statistics.request import Request

__all__ = ["Wanted", "distance", "entropy", "grouped", "measure", "transposed", "who"]


@disable_autocast
def compute_statistics(call: Call, lse: Tensor, wanted: Request, averaged: bool) -> dict[str, Tensor]:
    """Every wanted statistic in one pass, without gradients."""
    found = measured(call, lse, wanted, averaged)
    if wanted.narrow and wanted.top:
        # On a GPU they are.
        found["top_keys"] = found["top_keys"].to(torch.int32)
    return found


def measured(call: Call, lse: Tensor, wanted: Request, averaged: bool) -> dict[str, Tensor]:
    if is_empty_call(call):
        return streaming.empty_statistics(call, wanted, 1 if averaged else call.q.shape[1])
    if not cuda.refuses(call, wanted, averaged):
        return cuda.compute_statistics(call, lse.detach(), wanted)
    if not cpu_c.refuses(call, wanted, averaged):
        return cpu_c.compute_statistics(call, lse.detach(), wanted)
    return streaming.compute_statistics(call, lse, wanted, averaged)


def describe_method(call: Call, wanted: Request | None = None) -> str:
    """Who measures the weights of such a call, in words."""
    if is_empty_call(call):
        return "nobody, as there are none"
    refusals = {"triton": cuda.refuses(call, wanted), "compiled C": cpu_c.refuses(call, wanted)}
    if not refusals["triton"]:
        return cuda.describe_kernel(call, wanted)
    if not refusals["compiled C"]:
        return "compiled C, in one pass"
    said = "; ".join(f"{name} refuses: {', '.join(reasons)}" for name, reasons in refusals.items())
    return f"blocked, strip by strip ({said})"


@disable_autocast
def compute_entropy(call: Call, averaged: bool) -> Tensor:
    """Differentiable: (B, H, Tq)."""
    if is_empty_call(call):
        return zeros_per_head(call, averaged, call.q.shape[2])
    return streaming.compute_per_query(call, averaged, streaming.strip_entropy)


@disable_autocast
def compute_distance(call: Call, averaged: bool) -> Tensor:
    """Differentiable: (B, H, Tq)."""
    if is_empty_call(call):
        return zeros_per_head(call, averaged, call.q.shape[2])
    return streaming.compute_per_query(call, averaged, streaming.strip_distance)


@disable_autocast
def compute_transposed_product(call: Call, x: Tensor, averaged: bool) -> Tensor:
    """Wᵀ x, differentiable: x (B or 1, H or 1, Tq, E) or (Tq, E) -> (B, H, Tk, E)."""
    if is_empty_call(call):
        return zeros_per_head(call, averaged, call.k.shape[2], x.shape[-1])
    x = x.expand(call.q.shape[0], 1 if averaged else call.q.shape[1], *x.shape[-2:])
    return streaming.sum_over_queries(call, averaged, partial(streaming.strip_transposed_product, x=x))


@disable_autocast
def compute_group_mass(call: Call, rows: tuple[Tensor, int], columns: tuple[Tensor, int], averaged: bool) -> Tensor:
    """The mass between groups, differentiable: (B, H, query groups, key groups)."""
    (row_ids, row_count), (_, column_count) = rows, columns
    if is_empty_call(call):
        return zeros_per_head(call, averaged, row_count, column_count)
    sums = streaming.sum_over_queries(call, averaged, partial(streaming.strip_group_mass, rows=rows, columns=columns))
    sizes = torch.bincount(row_ids, minlength=row_count + 1)[:row_count].to(sums.dtype)
    return sums[..., :row_count, :column_count] / sizes.unsqueeze(-1)


def is_empty_call(call: Call) -> bool:
    """Whether there is no sequence, head, query or key: nothing to go over."""
    return 0 in {*call.q.shape[:3], call.k.shape[2]}


def zeros_per_head(call: Call, averaged: bool, *shape: int) -> Tensor:
    return call.q.new_zeros(call.q.shape[0], 1 if averaged else call.q.shape[1], *shape, dtype=call.softmax_dtype)

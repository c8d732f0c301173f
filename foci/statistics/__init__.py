"""Statistics of attention weights from query, key and log-sum-exp in one pass, without building the matrix.

request: which statistics to compute.
cuda: our GPU kernels.
cpu_c: compiled C for the CPU.
streaming: strip by strip on any device, and the differentiable statistics.
streaming_topk: the largest entries of each row of a strip, in PyTorch; the C code is in kernels/c/topk.h.
picture: the matrix pooled into a few rows and columns of blocks.
divergence: the divergence of two matrices, strip by strip.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from foci.arguments import Call
from foci.runtime.tracing import disable_autocast
from foci.scores import Additive
from foci.statistics import cpu_c, cuda, streaming
from foci.statistics.cuda.repeated_pass import run_repeated_pass
from foci.statistics.request import Request

__all__ = [
    "Request",
    "compute_distance",
    "compute_entropy",
    "compute_group_mass",
    "compute_statistics",
    "compute_transposed_product",
    "describe_statistics_backend",
    "run_repeated_pass",
]


@disable_autocast
def compute_statistics(call: Call, lse: Tensor, request: Request, averaged: bool) -> dict[str, Tensor]:
    """Computes the requested statistics in one pass, without gradients; `averaged`: of the mean over heads."""
    results = run_first_supported(call, lse, request, averaged)
    if request.int32_keys and request.top:
        # The GPU kernels return int32 already.
        results["top_keys"] = results["top_keys"].to(torch.int32)
    return results


def run_first_supported(call: Call, lse: Tensor, request: Request, averaged: bool) -> dict[str, Tensor]:
    """The first of GPU kernels, compiled C and strips that supports the request."""
    if is_empty_call(call):
        return streaming.empty_statistics(call, request, 1 if averaged else call.q.shape[1])
    if score_refusals(call):
        return streaming.compute_statistics(call, lse, request, averaged)
    if not cuda.refuses(call, request, averaged):
        return cuda.compute_statistics(call, lse.detach(), request)
    if not cpu_c.refuses(call, request, averaged):
        return cpu_c.compute_statistics(call, lse.detach(), request)
    return streaming.compute_statistics(call, lse, request, averaged)


def score_refusals(call: Call) -> list[str]:
    """Why no kernel supports the score: it is one of the caller's own."""
    if call.score.is_dot_product or type(call.score) is Additive:
        return []
    return [f"the score {type(call.score).__name__} is not a dot product or Additive"]


def describe_statistics_backend(call: Call, request: Request | None = None) -> str:
    """Says in words how statistics of this call are computed, for `foci.plan`."""
    if is_empty_call(call):
        return "nothing to compute: empty input"
    of_score = score_refusals(call)
    refusals = {
        "triton": of_score or cuda.refuses(call, request),
        "compiled C": of_score or cpu_c.refuses(call, request),
    }
    if not refusals["triton"]:
        return cuda.describe_kernel(call, request)
    if not refusals["compiled C"]:
        return "compiled C, in one pass"
    reasons_text = "; ".join(f"{name} refuses: {', '.join(reasons)}" for name, reasons in refusals.items())
    return f"strip by strip ({reasons_text})"


@disable_autocast
def compute_entropy(call: Call, averaged: bool) -> Tensor:
    """Entropy of each query's weights in nats, differentiable: (B, H, Tq)."""
    if is_empty_call(call):
        return zeros_per_head(call, averaged, call.q.shape[2])
    return streaming.compute_per_query(call, averaged, streaming.strip_entropy)


@disable_autocast
def compute_distance(call: Call, averaged: bool) -> Tensor:
    """Mean distance between each query and its keys, differentiable: (B, H, Tq)."""
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
    """Mean weight of the keys of one group for queries of another, differentiable: (B, H, query groups, key groups)."""
    (row_ids, row_count), (_, column_count) = rows, columns
    if is_empty_call(call):
        return zeros_per_head(call, averaged, row_count, column_count)
    sums = streaming.sum_over_queries(call, averaged, partial(streaming.strip_group_mass, rows=rows, columns=columns))
    # Not bincount, which waits for a GPU.
    sizes = sums.new_zeros(row_count + 1).index_add(0, row_ids, sums.new_ones(row_ids.shape[0]))
    return sums[..., :row_count, :column_count] / sizes[:row_count].unsqueeze(-1)


def is_empty_call(call: Call) -> bool:
    """Whether there is no sequence, head, query or key."""
    return 0 in {*call.q.shape[:3], call.k.shape[2]}


def zeros_per_head(call: Call, averaged: bool, *shape: int) -> Tensor:
    return call.q.new_zeros(call.q.shape[0], 1 if averaged else call.q.shape[1], *shape, dtype=call.softmax_dtype)

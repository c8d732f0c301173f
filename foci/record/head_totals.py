"""Totals of each head over queries, from which the statistics of `foci.Monitor` follow; totals of several calls merge.

The totals of a layer are one float64 tensor (H, TOTAL_COLUMNS): sums over the queries, histograms, and maxima. They
stay on the device: nothing here waits for it.

B batch, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foci.arguments import Call
from foci.biases import DenseBias
from foci.masks.base import DenseMask, split_conjunction
from foci.masks.kinds import Causal, Documents, Padding
from foci.record.kept import find_first_visible_key
from foci.runtime.tensor_cache import cache_permanently
from foci.runtime.tracing import disable_autocast
from foci.statistics import Request
from foci.weights import operators
from foci.weights.weights import Weights, compute_sink_mass

if TYPE_CHECKING:
    from foci.sharding.weights import ShardedWeights

# Each statistic is one number per head; means are over the queries that are not fully masked.
HEAD_STATISTICS = {
    "largest_logit": "the largest visible logit",
    "entropy": "the mean entropy of a query in nats: 0 = one key, ln n = uniform over n keys",
    "least_entropy": "the least entropy of a query that sees more than one key",
    "heaviest": "the mean of the largest weight of a query",
    "first_token": "the mean weight on the first key, often an attention sink",
    "sink_mass": "the mean share of a learned sink, 0 without one",
    "distance": "the mean distance between a query and its keys, in positions",
}

# The lower edges of the bins of each histogram over queries; the last bin is open.
HISTOGRAM_EDGES: dict[str, tuple[float, ...]] = {
    "entropy": tuple(0.5 * index for index in range(24)),
    "heaviest": tuple(index / 20 for index in range(20)),
    "sink_mass": tuple(index / 20 for index in range(20)),
    "distance": (0.0, *(2.0**power for power in range(19))),
}

# The columns of the totals: sums, then histograms, then maxima.
SUM_COLUMNS = ("queries", "invalid", "entropy", "heaviest", "first_token", "sink_mass", "distance")
HISTOGRAM_COLUMNS = sum(map(len, HISTOGRAM_EDGES.values()))
SUMMED = len(SUM_COLUMNS) + HISTOGRAM_COLUMNS
TOTAL_COLUMNS = SUMMED + 2


@torch.no_grad()
@disable_autocast
def compute_head_totals(weights: Weights, names: Collection[str]) -> Tensor:
    """The totals of weights (B, H, Tq, Tk), (H, TOTAL_COLUMNS), in one pass; `names` are the statistics to compute."""
    call, lse = weights.call, weights.tensors.lse
    request = Request(
        entropy="entropy" in names or "least_entropy" in names,
        received="first_token" in names,
        top=min(1, call.k.shape[2]) if "heaviest" in names else 0,
        largest_logit="largest_logit" in names,
        distance="distance" in names,
        int32_keys=True,
    )
    found = operators.compute_statistics(call, lse, request, False)
    per_query: dict[str, Tensor] = {name: found[name] for name in ("entropy", "distance") if name in found}
    if request.top:
        per_query["heaviest"] = found["top_values"][..., 0]
    if "sink_mass" in names and call.sink is not None:
        per_query["sink_mass"] = compute_sink_mass(lse, call.sink)
    # Logits that are NaN or +inf. PyTorch's kernel for CPUs gives a row of NaN the log-sum-exp 0.
    invalid = lse.isnan() | (lse == torch.inf)
    for name in ("entropy", "heaviest"):
        invalid = invalid | per_query[name].isnan() if name in per_query else invalid
    counted = lse.isfinite() & ~invalid
    if call.sink is not None and request.top:
        # The sink takes all attention of a fully masked row, whose log-sum-exp is finite.
        counted = counted & (per_query["heaviest"] > 0)
    sums = {"queries": count_queries(counted), "invalid": count_queries(invalid)}
    sums |= {
        name: torch.where(counted, values, 0.0).sum((0, 2), dtype=torch.float64) for name, values in per_query.items()
    }
    if request.received:
        sums["first_token"] = sum_first_token(found["received"])
    zeros = torch.zeros_like(sums["queries"])
    columns = [sums.get(name, zeros) for name in SUM_COLUMNS]
    histograms = [
        count_bins(per_query[name], counted, edges) if name in per_query else zeros.new_zeros(len(zeros), len(edges))
        for name, edges in HISTOGRAM_EDGES.items()
    ]
    single = find_single_key_queries(call)
    maxima = compute_maxima(found, counted if single is None else counted & ~single, zeros)
    return torch.cat([torch.stack(columns, -1), *histograms, torch.stack(maxima, -1)], -1)


@torch.no_grad()
@disable_autocast
def compute_sharded_head_totals(weights: ShardedWeights, names: Collection[str]) -> Tensor:
    """The share of this process in the totals of all heads: some heads with all queries, (H, TOTAL_COLUMNS)."""
    own = weights.by_heads()
    totals = torch.zeros(own.heads, TOTAL_COLUMNS, dtype=torch.float64, device=weights.device)
    totals[:, SUMMED:] = -math.inf
    if own.is_counted and own.part.stop > own.part.start and own.local.shape[0]:
        totals[own.part] = compute_head_totals(own.local, names)
    return totals


def count_queries(marked: Tensor) -> Tensor:
    """How many queries of each head are marked: (H,)."""
    return marked.sum((0, 2), dtype=torch.float64)


def sum_first_token(received: Tensor) -> Tensor:
    """The attention that the first visible key of each sequence receives, (H,) from (B, H, Tk)."""
    first = find_first_visible_key(received).view(-1, 1, 1).expand(*received.shape[:2], 1)
    return received.gather(2, first).sum((0, 2), dtype=torch.float64)


def count_bins(values: Tensor, counted: Tensor, edges: Sequence[float]) -> Tensor:
    """How many of the counted queries have their value in each bin: (H, bins) from (B, H, Tq).

    Comparisons with every edge, not a scatter: no atomic additions, so that the result is deterministic.
    """
    edges, dtype = tuple(edges), values.dtype
    lower = cache_permanently(
        ("edges", edges, dtype), values, lambda: torch.tensor(edges, dtype=dtype, device=values.device)
    )
    # Rounding may give slightly less than 0.
    values = torch.where(counted, values.clamp(min=0.0), -1.0)
    at_least = (values.unsqueeze(-1) >= lower).sum((0, 2)).double()
    return at_least - torch.nn.functional.pad(at_least[:, 1:], (0, 1))


def find_single_key_queries(call: Call) -> Tensor | None:
    """The queries that see only one key, whose entropy is always 0: (B or 1, H or 1, Tq); None if there are none.

    They are known for a dense mask or bias, and for a causal one: the first query, also of each document and after
    padding on the left. Queries that other masks leave a single key are not found.
    """
    masks, (queries, keys) = split_conjunction(call.mask), (call.q.shape[2], call.k.shape[2])
    dense = [mask.entries for mask in masks if isinstance(mask, DenseMask)]
    if isinstance(call.bias, DenseBias):
        # Eager code masks with -inf or with the lowest number.
        dense.append(call.bias.entries > torch.finfo(call.bias.entries.dtype).min / 2)
    marks = [entries.sum(-1) == 1 for entries in dense if entries.shape[-2] == queries]
    if queries == keys and call.positions is None and any(isinstance(mask, Causal) for mask in masks):
        index = torch.arange(queries, device=call.q.device)
        marks.append((index == 0).view(1, 1, -1))
        for mask in masks:
            if isinstance(mask, Documents):
                ids = mask.query_ids
                starts = ids != torch.cat([ids[:, :1], ids[:, :-1]], -1)
                marks.append(starts.unsqueeze(1))
            elif isinstance(mask, Padding) and mask.side == "left":
                marks.append((index == keys - mask.lengths.view(-1, 1)).unsqueeze(1))
    return reduce(or_, marks) if marks else None


def compute_maxima(found: Mapping[str, Tensor], counted: Tensor, zeros: Tensor) -> list[Tensor]:
    """The largest logit, and minus the least entropy of the counted queries, (H,) each; -inf where there is none."""
    missing = torch.full_like(zeros, -math.inf)
    if not counted.numel():
        return [missing, missing]
    largest = found["largest_logit"].amax(0).double() if "largest_logit" in found else missing
    entropy = found.get("entropy")
    least = missing if entropy is None else torch.where(counted, -entropy, -math.inf).amax((0, 2)).double()
    return [largest, least]


def merge_head_totals(totals: Tensor) -> Tensor:
    """The totals of several calls, steps or processes, (n, ..., TOTAL_COLUMNS), as one: (..., TOTAL_COLUMNS)."""
    if len(totals) == 1:
        return totals[0]
    return torch.cat([totals[..., :SUMMED].sum(0), totals[..., SUMMED:].amax(0)], -1)


def head_statistics(totals: Tensor) -> dict[str, Tensor]:
    """The statistics of each head from its totals: (H,) each; NaN for a head without visible queries."""
    sums = dict(zip(SUM_COLUMNS, totals[:, : len(SUM_COLUMNS)].unbind(-1), strict=True))
    largest, least = totals[:, SUMMED:].unbind(-1)
    found = {name: sums[name] / sums["queries"] for name in HEAD_STATISTICS if name in sums}
    found["least_entropy"] = torch.where(least == -math.inf, math.nan, -least)
    # Logits that are NaN or infinite are reported as such, whatever the kernel makes of their maximum.
    found["largest_logit"] = torch.where((sums["invalid"] > 0) | (sums["queries"] == 0), math.nan, largest)
    return {name: found[name] for name in HEAD_STATISTICS}


def head_histograms(totals: Tensor) -> dict[str, Tensor]:
    """The histograms over queries of each head, (H, bins) each, with the bins of HISTOGRAM_EDGES."""
    counts = totals[:, len(SUM_COLUMNS) : SUMMED].round().long()
    parts = counts.split([len(edges) for edges in HISTOGRAM_EDGES.values()], -1)
    return dict(zip(HISTOGRAM_EDGES, parts, strict=True))

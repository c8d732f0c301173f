"""Statistics strip by strip: works for every call on any device, and gives the differentiable statistics.

B batch, H heads, R rows of the strip, C keys that the strip sees, Tq queries, Tk keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from foci.arguments import Call
from foci.backends import reference, strips
from foci.backends.strips import PartIndex, Strip
from foci.biases import DenseBias
from foci.masks.range_algebra import KeySegment
from foci.scores import LOG2_E, Dot
from foci.statistics import picture
from foci.statistics.request import Request
from foci.statistics.streaming_topk import stable_topk

StripStatistic = Callable[[Call, PartIndex, Strip, Tensor], Tensor]

# log2 of a masked weight; finite, because -inf times a weight of 0 would be NaN.
MASKED_LOG2 = -1e30


def compute_statistics(call: Call, lse: Tensor, request: Request, averaged: bool = False) -> dict[str, Tensor]:
    """Computes the requested statistics in one pass, without gradients; `averaged`: of the mean over heads."""
    results = empty_statistics(call, request, 1 if averaged else call.q.shape[1])
    with torch.no_grad():
        for (batches, heads), part in strips.split_into_parts(call, whole=averaged):
            kept = slice(0, 1) if averaged else heads
            views = {name: tensor[batches, kept] for name, tensor in results.items()}
            part = replace(part, q=part.q.to(part.softmax_dtype), k=part.k.to(part.softmax_dtype))
            for strip in strips.split_into_strips(part):
                if strip.segments:
                    add_strip_statistics(part, lse[batches, heads, strip.rows], strip, request, averaged, views)
    if request.entropy:
        # Where one key has all the weight, rounding may give slightly less than 0.
        results["entropy"].clamp_(min=0.0)
    if request.picture is not None and request.picture[2] == "mean":
        rows, columns, _ = request.picture
        results["picture"] /= picture.block_areas(rows, columns, call.q.shape[2], call.k.shape[2], call.q.device)
    return results


def empty_statistics(call: Call, request: Request, heads: int) -> dict[str, Tensor]:
    """Allocates the statistics with their values for a fully masked matrix."""
    queries, keys = call.q.shape[2], call.k.shape[2]
    lead = (call.q.shape[0], heads)
    zeros = call.q.new_zeros
    results = {}
    if request.entropy:
        results["entropy"] = zeros(*lead, queries, dtype=call.softmax_dtype)
    if request.distance:
        results["distance"] = zeros(*lead, queries, dtype=call.softmax_dtype)
    if request.received:
        results["received"] = zeros(*lead, keys, dtype=call.softmax_dtype)
    if request.largest_logit:
        results["largest_logit"] = call.q.new_full(lead, -torch.inf, dtype=call.softmax_dtype)
    if request.picture is not None:
        results["picture"] = zeros(*lead, *request.picture[:2], dtype=call.softmax_dtype)
    if request.top:
        results["top_values"] = zeros(*lead, queries, request.top, dtype=call.softmax_dtype)
        results["top_keys"] = call.q.new_full((*lead, queries, request.top), -1, dtype=torch.int64)
    return results


def add_strip_statistics(
    call: Call, lse: Tensor, strip: Strip, request: Request, averaged: bool, results: dict[str, Tensor]
) -> None:
    """Adds one strip to the statistics in place."""
    x = compute_log2_weights(call, lse, strip)
    if averaged:
        mean = torch.exp2(x).mean(1, keepdim=True)
        x = torch.where(mean > 0, mean.log2(), MASKED_LOG2)
    peaks = write_top_keys(x, strip, request.top, results) if request.top else None
    if request.largest_logit:
        peaks = x.amax(-1) if peaks is None else peaks
        logits = torch.where(peaks > MASKED_LOG2 / 2, peaks / LOG2_E + finite_lse(lse), -torch.inf)
        results["largest_logit"].copy_(torch.maximum(results["largest_logit"], logits.amax(-1)))
    if request.entropy or request.distance or request.received or request.picture is not None:
        add_sums(call, x, mean if averaged else torch.exp2(x), strip, request, results)


def add_sums(
    call: Call, x: Tensor, weights: Tensor, strip: Strip, request: Request, results: dict[str, Tensor]
) -> None:
    """Adds the statistics that are sums over the strip's weights; x are their log2 and are overwritten."""
    if request.entropy:
        results["entropy"][:, :, strip.rows] = x.mul_(weights).sum(-1).div_(-LOG2_E)
    for columns, piece in strips.split_by_segment(strip, weights):
        if request.distance:
            results["distance"][:, :, strip.rows] += sum_distances(call, strip.rows, columns, piece)
        if request.picture is not None:
            add_picture(piece, strip, columns, request, call, results)
        elif request.received:
            results["received"][:, :, columns] += piece.sum(-2)


def compute_log2_weights(call: Call, lse: Tensor, strip: Strip) -> Tensor:
    """log2 of the strip's weights, MASKED_LOG2 where masked; base 2 because exp2 is three times as fast as exp."""
    lse = finite_lse(lse).unsqueeze(-1)
    if type(call.score) is Dot and call.score.softcap is None and call.bias is None and len(strip.segments) == 1:
        return dot_log2_weights(call, lse, strip, strip.segments[0])
    if isinstance(call.bias, DenseBias):
        return renormalized_log2_weights(call, strip)
    logits = strips.strip_logits(call, strip, MASKED_LOG2)
    return logits.sub_(lse).mul_(LOG2_E).clamp_(min=MASKED_LOG2)


def renormalized_log2_weights(call: Call, strip: Strip) -> Tensor:
    """The same, normalized over the strip itself: the log-sum-exp of a row biased by -1e9 has lost all digits."""
    logits = strips.strip_logits(call, strip)
    x = torch.log_softmax(logits, dim=-1)
    if call.sink is not None:
        own = torch.logsumexp(logits, dim=-1) - call.sink.to(x.dtype).view(1, -1, 1)
        x += torch.nn.functional.logsigmoid(own).unsqueeze(-1)
    return torch.where(logits == -torch.inf, MASKED_LOG2, x * LOG2_E).clamp_(min=MASKED_LOG2)


def dot_log2_weights(call: Call, lse: Tensor, strip: Strip, segment: KeySegment) -> Tensor:
    """Product, scale and log-sum-exp in one matrix operation."""
    assert isinstance(call.score, Dot)
    q = call.q[:, :, strip.rows]
    k = call.k[:, :, segment.start : segment.stop].flatten(0, 1)
    # Heads that share keys are rows of one product; sizes are explicit because -1 is ambiguous for empty tensors.
    count = q.shape[2] * call.group
    shift = (lse * -LOG2_E).to(q.dtype).reshape(k.shape[0], count, 1)
    rows = q.reshape(k.shape[0], count, q.shape[-1])
    x = torch.baddbmm(shift, rows, k.mT, alpha=call.score.factor(q.shape[-1]) * LOG2_E)
    x = x.view(*q.shape[:3], k.shape[1])
    strips.mask_segment_edges(call, x, strip.rows, segment, MASKED_LOG2)
    return x


def finite_lse(lse: Tensor) -> Tensor:
    return torch.where(lse == -torch.inf, 0.0, lse)


def sum_distances(call: Call, rows: slice, columns: slice, weights: Tensor) -> Tensor:
    """Σ w |key position - query position|; below the diagonal the sign is known and a vector product suffices."""
    tile = call.tile(rows, columns)
    if call.positions is None and columns.stop - 1 <= rows.start + call.k.shape[2] - call.q.shape[2]:
        # Relative to the first query: counted from 0 both sums would be large and their difference inexact.
        origin = tile.query_position[0, 0, 0, 0]
        queries, keys = tile.query_position - origin, tile.key_position - origin
        return queries.squeeze(-1) * weights.sum(-1) - weights @ keys.flatten().to(weights.dtype)
    if call.positions is None:
        edge = min(max(rows.start + call.k.shape[2] - call.q.shape[2] - columns.start, 0), weights.shape[-1])
        if edge > 0 and weights.shape[-1] - edge < edge:
            near = slice(columns.start + edge, columns.stop)
            far = sum_distances(call, rows, slice(columns.start, columns.start + edge), weights[..., :edge])
            return far + sum_distances(call, rows, near, weights[..., edge:])
    return (weights * (tile.key_position - tile.query_position).abs().to(weights.dtype)).sum(-1)


def write_top_keys(x: Tensor, strip: Strip, k: int, results: dict[str, Tensor]) -> Tensor:
    """Writes the top keys of the strip's rows and returns the largest entry of each row."""
    values, columns = stable_topk(x, k, MASKED_LOG2 / 2)
    keys = columns + strip.segments[0].start
    if len(strip.segments) > 1:
        keys = torch.cat([torch.arange(s.start, s.stop, device=x.device) for s in strip.segments])[columns]
    hidden = values <= MASKED_LOG2 / 2
    results["top_values"][:, :, strip.rows, : values.shape[-1]] = values.exp2().masked_fill_(hidden, 0.0)
    results["top_keys"][:, :, strip.rows, : values.shape[-1]] = keys.masked_fill_(hidden, -1)
    return values[..., 0]


def add_picture(
    weights: Tensor, strip: Strip, columns: slice, request: Request, call: Call, results: dict[str, Tensor]
) -> None:
    """Pools rows first: this reads memory in order, leaves little work for the columns, and also yields their sums."""
    assert request.picture is not None
    height, width, reduce = request.picture
    first_row, pooled_rows = picture.pool_rows(weights, strip.rows.start, height, call.q.shape[2], reduce)
    first, pooled = picture.pool_columns(pooled_rows, columns.start, width, call.k.shape[2], reduce)
    picture.add_to_picture(results["picture"], pooled, first_row, first, reduce)
    if request.received:
        results["received"][:, :, columns] += (pooled_rows if reduce == "mean" else weights).sum(-2)


def differentiable_weights(call: Call, strip: Strip, averaged: bool) -> Tensor:
    """The strip's weights with the whole softmax in the autograd graph, so that gradients through them are right."""
    weights, lse = reference.softmax_with_lse(strips.strip_logits(call, strip))
    if call.sink is not None:
        logit = call.sink.to(lse.dtype).view(1, -1, 1)
        weights = weights * torch.sigmoid(finite_lse(lse) - logit).unsqueeze(-1)
    return weights.mean(1, keepdim=True) if averaged else weights


def compute_per_query(call: Call, averaged: bool, statistic: StripStatistic) -> Tensor:
    """Computes a differentiable statistic of each row, strip by strip: (B, H, Tq, ...)."""
    rows = torch.cat([torch.cat([*results], dim=2).flatten(0, 1) for results in map_strips(call, averaged, statistic)])
    return rows.reshape(call.q.shape[0], -1, *rows.shape[1:])


def sum_over_queries(call: Call, averaged: bool, statistic: StripStatistic) -> Tensor:
    """Sums a differentiable statistic over the rows: (B, H, ...)."""
    sums = []
    for results in map_strips(call, averaged, statistic):
        total = next(results)
        for more in results:
            total = total + more
        sums.append(total.flatten(0, 1))
    whole = torch.cat(sums)
    return whole.reshape(call.q.shape[0], -1, *whole.shape[1:])


def map_strips(call: Call, averaged: bool, statistic: StripStatistic) -> Iterator[Iterator[Tensor]]:
    """Yields for each part the statistic of its strips; the backward recomputes everything but the result."""
    for place, part in strips.split_into_parts(call, whole=averaged):

        def compute_strip(part: Call, place: PartIndex, strip: Strip) -> Tensor:
            weights = differentiable_weights(part, strip, averaged)
            results = statistic(part, place, strip, weights)
            # Zeros of fully masked rows stay in the autograd graph.
            return results if strip.segments else results + weights.sum()

        yield (
            strips.recompute_in_backward(part, compute_strip, part, place, strip)
            for strip in strips.split_into_strips(part)
        )


def strip_entropy(call: Call, place: PartIndex, strip: Strip, weights: Tensor) -> Tensor:
    """-Σ w ln w, with a finite gradient where w is 0."""
    return -(weights * torch.where(weights > 0, weights, 1.0).log()).sum(-1)


def strip_distance(call: Call, place: PartIndex, strip: Strip, weights: Tensor) -> Tensor:
    total = weights.new_zeros(weights.shape[:-1])
    for columns, piece in strips.split_by_segment(strip, weights):
        total = total + sum_distances(call, strip.rows, columns, piece)
    return total


def strip_transposed_product(call: Call, place: PartIndex, strip: Strip, weights: Tensor, x: Tensor) -> Tensor:
    """Wᵀ x over the strip's rows: (B, H, Tk, E)."""
    batches, heads = place
    chosen = x[batches, heads if x.shape[1] > 1 else slice(None), strip.rows]
    return scatter_to_keys(strip, weights.mT @ chosen.to(weights.dtype), call.k.shape[2])


def strip_group_mass(
    call: Call, place: PartIndex, strip: Strip, weights: Tensor, rows: tuple[Tensor, int], columns: tuple[Tensor, int]
) -> Tensor:
    """Sums between groups; tokens without a group go to an extra row and column: (B, H, groups + 1, groups + 1)."""
    (row_ids, row_count), (column_ids, column_count) = rows, columns
    sums = weights.new_zeros(*weights.shape[:3], column_count + 1)
    for keys, piece in strips.split_by_segment(strip, weights):
        sums = sums.index_add(-1, column_ids[keys], piece)
    whole = weights.new_zeros(*weights.shape[:2], row_count + 1, column_count + 1)
    return whole.index_add(-2, row_ids[strip.rows], sums)


def scatter_to_keys(strip: Strip, sums: Tensor, keys: int) -> Tensor:
    """Scatters sums over the strip's columns, (..., C, E), to all keys, (..., Tk, E)."""
    whole = sums.new_zeros(*sums.shape[:-2], keys, sums.shape[-1])
    if not strip.segments:
        return whole + sums.sum()
    start = 0
    for segment in strip.segments:
        width = segment.stop - segment.start
        whole[..., segment.start : segment.stop, :] = sums[..., start : start + width, :]
        start += width
    return whole

"""The weights strip by strip, and what is measured on them: the path of a CPU, and of every call on any device.

B batch, H heads, R rows of the strip, C keys that the strip sees, Tq queries, Tk keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from foci.arguments import Call
from foci.backends import reference, strips
from foci.backends.strips import LOG2_E, PartIndex, Strip
from foci.biases import DenseBias
from foci.masks.ranges import Segment
from foci.scores import Dot
from foci.statistics import picture
from foci.statistics.request import Request
from foci.statistics.topk import stable_topk

StripStatistic = Callable[[Call, PartIndex, Strip, Tensor], Tensor]

# Stands for -inf where it is multiplied by a weight of 0.
MASKED_LOG2 = -1e30


def compute_statistics(call: Call, lse: Tensor, wanted: Request, averaged: bool = False) -> dict[str, Tensor]:
    """Every wanted statistic in one pass, without gradients; `averaged`: of the mean over the heads."""
    found = empty_statistics(call, wanted, 1 if averaged else call.q.shape[1])
    with torch.no_grad():
        for (batches, heads), part in strips.split_into_parts(call, whole=averaged):
            kept = slice(0, 1) if averaged else heads
            views = {name: tensor[batches, kept] for name, tensor in found.items()}
            part = replace(part, q=part.q.to(part.softmax_dtype), k=part.k.to(part.softmax_dtype))
            for strip in strips.split_into_strips(part):
                if strip.segments:
                    add_strip_statistics(part, lse[batches, heads, strip.rows], strip, wanted, averaged, views)
    if wanted.entropy:
        # Where one key has all the weight, rounding may leave a little less than 0.
        found["entropy"].clamp_(min=0.0)
    if wanted.picture is not None and wanted.picture[2] == "mean":
        rows, columns, _ = wanted.picture
        found["picture"] /= picture.block_areas(rows, columns, call.q.shape[2], call.k.shape[2], call.q.device)
    return found


def empty_statistics(call: Call, wanted: Request, heads: int) -> dict[str, Tensor]:
    """What the statistics are of a matrix that nobody sees."""
    queries, keys = call.q.shape[2], call.k.shape[2]
    lead = (call.q.shape[0], heads)
    zeros = call.q.new_zeros
    found = {}
    if wanted.entropy:
        found["entropy"] = zeros(*lead, queries, dtype=call.softmax_dtype)
    if wanted.distance:
        found["distance"] = zeros(*lead, queries, dtype=call.softmax_dtype)
    if wanted.received:
        found["received"] = zeros(*lead, keys, dtype=call.softmax_dtype)
    if wanted.largest:
        found["largest"] = call.q.new_full(lead, -torch.inf, dtype=call.softmax_dtype)
    if wanted.picture is not None:
        found["picture"] = zeros(*lead, *wanted.picture[:2], dtype=call.softmax_dtype)
    if wanted.top:
        found["top_values"] = zeros(*lead, queries, wanted.top, dtype=call.softmax_dtype)
        found["top_keys"] = call.q.new_full((*lead, queries, wanted.top), -1, dtype=torch.int64)
    return found


def add_strip_statistics(
    call: Call, lse: Tensor, strip: Strip, wanted: Request, averaged: bool, found: dict[str, Tensor]
) -> None:
    """Adds one strip to what was found."""
    x = compute_log2_weights(call, lse, strip)
    if averaged:
        mean = torch.exp2(x).mean(1, keepdim=True)
        x = torch.where(mean > 0, mean.log2(), MASKED_LOG2)
    peaks = write_top_keys(x, strip, wanted.top, found) if wanted.top else None
    if wanted.largest:
        peaks = x.amax(-1) if peaks is None else peaks
        logits = torch.where(peaks > MASKED_LOG2 / 2, peaks / LOG2_E + finite_lse(lse), -torch.inf)
        found["largest"].copy_(torch.maximum(found["largest"], logits.amax(-1)))
    if wanted.entropy or wanted.distance or wanted.received or wanted.picture is not None:
        add_sums(call, x, mean if averaged else torch.exp2(x), strip, wanted, found)


def add_sums(call: Call, x: Tensor, weights: Tensor, strip: Strip, wanted: Request, found: dict[str, Tensor]) -> None:
    """Adds what is summed over the strip's weights; what is chosen among its entries needs no weights."""
    if wanted.entropy:
        found["entropy"][:, :, strip.rows] = x.mul_(weights).sum(-1).div_(-LOG2_E)
    for columns, piece in strips.split_by_segment(strip, weights):
        if wanted.distance:
            found["distance"][:, :, strip.rows] += sum_distances(call, strip.rows, columns, piece)
        if wanted.picture is not None:
            add_picture(piece, strip, columns, wanted, call, found)
        elif wanted.received:
            found["received"][:, :, columns] += piece.sum(-2)


def compute_log2_weights(call: Call, lse: Tensor, strip: Strip) -> Tensor:
    """log2 of the strip's weights, HIDDEN where nothing is seen: base 2, because exp2 is three times as fast as exp."""
    lse = finite_lse(lse).unsqueeze(-1)
    if isinstance(call.score, Dot) and call.score.softcap is None and call.bias is None and len(strip.segments) == 1:
        return dot_log2_weights(call, lse, strip, strip.segments[0])
    if isinstance(call.bias, DenseBias):
        return renormalized_log2_weights(call, strip)
    logits = strips.strip_logits(call, strip, MASKED_LOG2)
    return logits.sub_(lse).mul_(LOG2_E).clamp_(min=MASKED_LOG2)


def renormalized_log2_weights(call: Call, strip: Strip) -> Tensor:
    """The same, normalised by the strip itself: the log-sum-exp of a row biased by -1e9 has no digits left for it."""
    logits = strips.strip_logits(call, strip)
    x = torch.log_softmax(logits, dim=-1)
    if call.sink is not None:
        own = torch.logsumexp(logits, dim=-1) - call.sink.to(x.dtype).view(1, -1, 1)
        x += torch.nn.functional.logsigmoid(own).unsqueeze(-1)
    return torch.where(logits == -torch.inf, MASKED_LOG2, x * LOG2_E).clamp_(min=MASKED_LOG2)


def dot_log2_weights(call: Call, lse: Tensor, strip: Strip, segment: Segment) -> Tensor:
    """The product, the scale and the log-sum-exp in one matrix operation."""
    assert isinstance(call.score, Dot)
    q = call.q[:, :, strip.rows]
    k = call.k[:, :, segment.start : segment.stop].flatten(0, 1)
    # Heads that share keys are rows of one product; what is empty tells no size by -1.
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
    """Σ w |key position - query position|; far from the diagonal the sign is known, a vector product does."""
    where = call.tile(rows, columns)
    if call.positions is None and columns.stop - 1 <= rows.start + call.k.shape[2] - call.q.shape[2]:
        # Counted from the first query: from 0 the two sums would be large and their difference have few digits.
        origin = where.query_position[0, 0, 0, 0]
        queries, keys = where.query_position - origin, where.key_position - origin
        return queries.squeeze(-1) * weights.sum(-1) - weights @ keys.flatten().to(weights.dtype)
    if call.positions is None:
        edge = min(max(rows.start + call.k.shape[2] - call.q.shape[2] - columns.start, 0), weights.shape[-1])
        if edge > 0 and weights.shape[-1] - edge < edge:
            near = slice(columns.start + edge, columns.stop)
            far = sum_distances(call, rows, slice(columns.start, columns.start + edge), weights[..., :edge])
            return far + sum_distances(call, rows, near, weights[..., edge:])
    return (weights * (where.key_position - where.query_position).abs().to(weights.dtype)).sum(-1)


def write_top_keys(x: Tensor, strip: Strip, k: int, found: dict[str, Tensor]) -> Tensor:
    """Writes the heaviest keys of the strip's rows and returns the largest entry of each row."""
    values, columns = stable_topk(x, k, MASKED_LOG2 / 2)
    keys = columns + strip.segments[0].start
    if len(strip.segments) > 1:
        keys = torch.cat([torch.arange(s.start, s.stop, device=x.device) for s in strip.segments])[columns]
    hidden = values <= MASKED_LOG2 / 2
    found["top_values"][:, :, strip.rows, : values.shape[-1]] = values.exp2().masked_fill_(hidden, 0.0)
    found["top_keys"][:, :, strip.rows, : values.shape[-1]] = keys.masked_fill_(hidden, -1)
    return values[..., 0]


def add_picture(
    weights: Tensor, strip: Strip, columns: slice, wanted: Request, call: Call, found: dict[str, Tensor]
) -> None:
    """Rows are joined first: that runs along the memory, leaves little for the columns, and gives their sums."""
    assert wanted.picture is not None
    height, width, reduce = wanted.picture
    first_row, joined = picture.pool_rows(weights, strip.rows.start, height, call.q.shape[2], reduce)
    first, pooled = picture.pool_columns(joined, columns.start, width, call.k.shape[2], reduce)
    picture.add_to_picture(found["picture"], pooled, first_row, first, reduce)
    if wanted.received:
        found["received"][:, :, columns] += (joined if reduce == "mean" else weights).sum(-2)


def differentiable_weights(call: Call, strip: Strip, averaged: bool) -> Tensor:
    """The strip's weights with the whole softmax in the graph, so that gradients through them are right."""
    weights, lse = reference.softmax_with_lse(strips.strip_logits(call, strip))
    if call.sink is not None:
        logit = call.sink.to(lse.dtype).view(1, -1, 1)
        weights = weights * torch.sigmoid(finite_lse(lse) - logit).unsqueeze(-1)
    return weights.mean(1, keepdim=True) if averaged else weights


def compute_per_query(call: Call, averaged: bool, statistic: StripStatistic) -> Tensor:
    """A differentiable statistic of each row, strip by strip: (B, H, Tq, ...)."""
    rows = torch.cat([torch.cat([*found], dim=2).flatten(0, 1) for found in map_strips(call, averaged, statistic)])
    return rows.reshape(call.q.shape[0], -1, *rows.shape[1:])


def sum_over_queries(call: Call, averaged: bool, statistic: StripStatistic) -> Tensor:
    """A differentiable statistic that is summed over the rows: (B, H, ...)."""
    sums = []
    for found in map_strips(call, averaged, statistic):
        total = next(found)
        for more in found:
            total = total + more
        sums.append(total.flatten(0, 1))
    whole = torch.cat(sums)
    return whole.reshape(call.q.shape[0], -1, *whole.shape[1:])


def map_strips(call: Call, averaged: bool, statistic: StripStatistic) -> Iterator[Iterator[Tensor]]:
    """The statistic of every strip, part by part; nothing but its result is kept for the backward."""
    for place, part in strips.split_into_parts(call, whole=averaged):

        def of_strip(part: Call, place: PartIndex, strip: Strip) -> Tensor:
            weights = differentiable_weights(part, strip, averaged)
            found = statistic(part, place, strip, weights)
            # Zeros of rows that see nothing are a part of the graph all the same.
            return found if strip.segments else found + weights.sum()

        yield (
            strips.recompute_in_backward(part, of_strip, part, place, strip) for strip in strips.split_into_strips(part)
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
    """What the strip's rows give to each key: (B, H, Tk, E)."""
    batches, heads = place
    chosen = x[batches, heads if x.shape[1] > 1 else slice(None), strip.rows]
    return scatter_to_keys(strip, weights.mT @ chosen.to(weights.dtype), call.k.shape[2])


def strip_group_mass(
    call: Call, place: PartIndex, strip: Strip, weights: Tensor, rows: tuple[Tensor, int], columns: tuple[Tensor, int]
) -> Tensor:
    """Sums between groups; tokens in no group fall into one more row and column: (B, H, groups + 1, groups + 1)."""
    (row_ids, row_count), (column_ids, column_count) = rows, columns
    sums = weights.new_zeros(*weights.shape[:3], column_count + 1)
    for keys, piece in strips.split_by_segment(strip, weights):
        sums = sums.index_add(-1, column_ids[keys], piece)
    whole = weights.new_zeros(*weights.shape[:2], row_count + 1, column_count + 1)
    return whole.index_add(-2, row_ids[strip.rows], sums)


def scatter_to_keys(strip: Strip, sums: Tensor, keys: int) -> Tensor:
    """(..., C, E) sums of the strip's own columns to (..., Tk, E)."""
    whole = sums.new_zeros(*sums.shape[:-2], keys, sums.shape[-1])
    if not strip.segments:
        return whole + sums.sum()
    start = 0
    for segment in strip.segments:
        width = segment.stop - segment.start
        whole[..., segment.start : segment.stop, :] = sums[..., start : start + width, :]
        start += width
    return whole

"""The weights strip by strip, and what is measured on them: the path of a CPU, and of every call on any device.

B batch, H heads, R rows of the strip, C keys that the strip sees, Tq queries, Tk keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from foci.arguments import Call
from foci.backends import blocked, reference
from foci.backends.blocked import Place, Strip
from foci.statistics import pooling
from foci.statistics.heaviest import heaviest
from foci.statistics.wanted import Wanted

Statistic = Callable[[Call, Place, Strip, Tensor], Tensor]

# Stands for -inf where it is multiplied by a weight of 0.
HIDDEN = -1e30


def measure(call: Call, lse: Tensor, wanted: Wanted, averaged: bool = False) -> dict[str, Tensor]:
    """Every wanted statistic in one pass, without gradients; `averaged`: of the mean over the heads."""
    found = empty(call, wanted, 1 if averaged else call.q.shape[1])
    with torch.no_grad():
        for (batches, heads), part in blocked.parts(call, whole=averaged):
            kept = slice(0, 1) if averaged else heads
            views = {name: tensor[batches, kept] for name, tensor in found.items()}
            for strip in blocked.strips(part):
                if strip.segments:
                    measure_strip(part, lse[batches, heads], strip, wanted, averaged, views)
    if wanted.picture is not None and wanted.picture[2] == "mean":
        rows, columns, _ = wanted.picture
        found["picture"] /= pooling.areas(rows, columns, call.q.shape[2], call.k.shape[2], call.q.device)
    return found


def empty(call: Call, wanted: Wanted, heads: int) -> dict[str, Tensor]:
    """What the statistics are of a matrix that nobody sees."""
    queries, keys = call.q.shape[2], call.k.shape[2]
    lead = (call.q.shape[0], heads)
    zeros = call.q.new_zeros
    found = {}
    if wanted.entropy:
        found["entropy"] = zeros(*lead, queries, dtype=call.wide)
    if wanted.distance:
        found["distance"] = zeros(*lead, queries, dtype=call.wide)
    if wanted.received:
        found["received"] = zeros(*lead, keys, dtype=call.wide)
    if wanted.largest:
        found["largest"] = call.q.new_full(lead, -torch.inf, dtype=call.wide)
    if wanted.picture is not None:
        found["picture"] = zeros(*lead, *wanted.picture[:2], dtype=call.wide)
    if wanted.top:
        found["top_values"] = zeros(*lead, queries, wanted.top, dtype=call.wide)
        found["top_keys"] = call.q.new_full((*lead, queries, wanted.top), -1, dtype=torch.int64)
    return found


def measure_strip(
    call: Call, lse: Tensor, strip: Strip, wanted: Wanted, averaged: bool, found: dict[str, Tensor]
) -> None:
    """Adds one strip to what was found; `x` is the logarithm of the weights, HIDDEN where nothing is seen."""
    x = blocked.logits(call, strip, HIDDEN)
    if call.bias is not None:
        x.clamp_(min=HIDDEN)
    if wanted.largest:
        found["largest"].copy_(torch.maximum(found["largest"], visible_maximum(x)))
    x.sub_(finite(lse[:, :, strip.rows]).unsqueeze(-1))
    weights = x.exp()
    if averaged:
        weights = weights.mean(1, keepdim=True)
        x = torch.where(weights > 0, weights.log(), HIDDEN)
    if wanted.top:
        write_top(call, x, strip, wanted.top, found)
    if wanted.entropy:
        found["entropy"][:, :, strip.rows] = -(x.mul_(weights).sum(-1))
    for columns, piece in blocked.pieces(strip, weights):
        if wanted.received:
            found["received"][:, :, columns] += piece.sum(-2)
        if wanted.distance:
            found["distance"][:, :, strip.rows] += distances(call, strip.rows, columns, piece)
        if wanted.picture is not None:
            add_picture(found["picture"], piece, strip, columns.start, wanted.picture, call)


def finite(lse: Tensor) -> Tensor:
    return torch.where(lse == -torch.inf, 0.0, lse)


def visible_maximum(x: Tensor) -> Tensor:
    """The largest logit per head, -inf where nothing is seen."""
    peak = x.amax((-2, -1))
    return torch.where(peak > HIDDEN / 2, peak, -torch.inf)


def distances(call: Call, rows: slice, columns: slice, weights: Tensor) -> Tensor:
    where = call.where(rows, columns)
    distance = (where.key_position - where.query_position).abs().to(weights.dtype)
    return (weights * distance).sum(-1)


def write_top(call: Call, x: Tensor, strip: Strip, k: int, found: dict[str, Tensor]) -> None:
    values, columns = heaviest(x, k)
    keys = torch.cat([torch.arange(s.start, s.stop, device=x.device) for s in strip.segments])[columns]
    hidden = values <= HIDDEN / 2
    found["top_values"][:, :, strip.rows, : values.shape[-1]] = values.exp().masked_fill_(hidden, 0.0)
    found["top_keys"][:, :, strip.rows, : values.shape[-1]] = keys.masked_fill_(hidden, -1)


def add_picture(
    picture: Tensor, weights: Tensor, strip: Strip, start: int, size: tuple[int, int, str], call: Call
) -> None:
    rows, columns, reduce = size
    first, pooled = pooling.pool_columns(weights, start, columns, call.k.shape[2], reduce)
    index = torch.arange(strip.rows.start, strip.rows.stop, device=weights.device)
    pooling.add_rows(picture, pooled, pooling.block_of(index, rows, call.q.shape[2]), first, reduce)


def softened(call: Call, strip: Strip, averaged: bool) -> Tensor:
    """The strip's weights with the whole softmax in the graph, so that gradients through them are right."""
    weights, lse = reference.softmax(blocked.logits(call, strip))
    if call.sink is not None:
        logit = call.sink.to(lse.dtype).view(1, -1, 1)
        weights = weights * torch.sigmoid(finite(lse) - logit).unsqueeze(-1)
    return weights.mean(1, keepdim=True) if averaged else weights


def per_query(call: Call, averaged: bool, statistic: Statistic) -> Tensor:
    """A differentiable statistic of each row, strip by strip: (B, H, Tq, ...)."""
    rows = [torch.cat(found, dim=2).flatten(0, 1) for found in each_strip(call, averaged, statistic)]
    return torch.cat(rows).unflatten(0, (call.q.shape[0], -1))


def over_queries(call: Call, averaged: bool, statistic: Statistic) -> Tensor:
    """A differentiable statistic that is summed over the rows: (B, H, ...)."""
    sums = []
    for found in each_strip(call, averaged, statistic):
        total = next(found)
        for more in found:
            total = total + more
        sums.append(total.flatten(0, 1))
    return torch.cat(sums).unflatten(0, (call.q.shape[0], -1))


def each_strip(call: Call, averaged: bool, statistic: Statistic) -> Iterator[Iterator[Tensor]]:
    """The statistic of every strip, part by part; nothing but its result is kept for the backward."""
    for place, part in blocked.parts(call, whole=averaged):

        def of_strip(part: Call, place: Place, strip: Strip) -> Tensor:
            return statistic(part, place, strip, softened(part, strip, averaged))

        yield (blocked.remembered(part, of_strip, part, place, strip) for strip in blocked.strips(part))


def entropy_of(call: Call, place: Place, strip: Strip, weights: Tensor) -> Tensor:
    """-Σ w ln w, with a finite gradient where w is 0."""
    return -(weights * torch.where(weights > 0, weights, 1.0).log()).sum(-1)


def distance_of(call: Call, place: Place, strip: Strip, weights: Tensor) -> Tensor:
    total = weights.new_zeros(weights.shape[:-1])
    for columns, piece in blocked.pieces(strip, weights):
        total = total + distances(call, strip.rows, columns, piece)
    return total


def transposed_of(call: Call, place: Place, strip: Strip, weights: Tensor, x: Tensor) -> Tensor:
    """What the strip's rows give to each key: (B, H, Tk, E)."""
    batches, heads = place
    chosen = x[batches, heads if x.shape[1] > 1 else slice(None), strip.rows]
    return spread(strip, weights.mT @ chosen.to(weights.dtype), call.k.shape[2])


def grouped_of(
    call: Call, place: Place, strip: Strip, weights: Tensor, rows: tuple[Tensor, int], columns: tuple[Tensor, int]
) -> Tensor:
    """Sums between groups; tokens in no group fall into one more row and column: (B, H, groups + 1, groups + 1)."""
    (row_ids, row_count), (column_ids, column_count) = rows, columns
    sums = weights.new_zeros(*weights.shape[:3], column_count + 1)
    for keys, piece in blocked.pieces(strip, weights):
        sums = sums.index_add(-1, column_ids[keys], piece)
    whole = weights.new_zeros(*weights.shape[:2], row_count + 1, column_count + 1)
    return whole.index_add(-2, row_ids[strip.rows], sums)


def spread(strip: Strip, sums: Tensor, keys: int) -> Tensor:
    """(..., C, E) sums of the strip's own columns to (..., Tk, E)."""
    whole = sums.new_zeros(*sums.shape[:-2], keys, sums.shape[-1])
    start = 0
    for segment in strip.segments:
        width = segment.stop - segment.start
        whole[..., segment.start : segment.stop, :] = sums[..., start : start + width, :]
        start += width
    return whole

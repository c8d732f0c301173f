"""Head scores, their totals over a data set, and attention rollout.

B batch, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foci.record.dense import MAX_STRIP_ENTRIES
from foci.record.kept import find_first_visible_key
from foci.record.layer import Layer

# Each score is one number per head: a mean over the queries that are not fully masked.
HEAD_SCORES = {
    "entropy": "how spread out the attention is, in nats: 0 = one key, ln n = uniform over n keys",
    "distance": "the mean distance between a query and its keys, in positions",
    "heaviest": "the largest weight of a query",
    "first_token": "the weight on the first key, often an attention sink",
    "sink_mass": "the share of a learned sink, if there is one",
    "previous_token": "the weight on the key directly before the query",
    "duplicate_token": "the weight on earlier keys with the same token as the query",
    "induction": "the weight on keys directly after an earlier copy of the query's token",
    "alignment": "share of queries whose heaviest key is not before that of the previous query: 1 if monotonic",
}
# Scores that need the tokens of both axes.
TOKEN_SCORES = ("duplicate_token", "induction")
# Scores that compare positions, which is meaningless between two sequences.
POSITION_SCORES = ("distance", "previous_token")
# Up to so many queries of a rollout are read as rows; more take passes over the matrix.
MAX_ROLLOUT_ROWS = 64

TokenTexts = Sequence[Sequence[object]]


@dataclass
class ScoreTotals:
    """Sums over queries, by score: (sum, count), each (H,) in float64. Totals of several records can be added."""

    sums: dict[str, tuple[Tensor, Tensor]]

    def add(self, other: ScoreTotals) -> ScoreTotals:
        """The sum of two totals; scores that only one of them has are dropped, so all means are over both."""
        both = [name for name in self.sums if name in other.sums]
        if both and self.sums[both[0]][0].shape != other.sums[both[0]][0].shape:
            shapes = f"{tuple(self.sums[both[0]][0].shape)} and {tuple(other.sums[both[0]][0].shape)}"
            raise ValueError(f"other must have layers with the same heads, got {shapes}")
        return ScoreTotals(
            {
                name: (self.sums[name][0] + other.sums[name][0], self.sums[name][1] + other.sums[name][1])
                for name in both
            }
        )

    def means(self) -> dict[str, Tensor]:
        """The mean of each score, (H,); NaN if no query counts."""
        return {name: total / count for name, (total, count) in self.sums.items()}


@torch.no_grad()
def compute_score_totals(layer: Layer, tokens: tuple[TokenTexts, TokenTexts] | None = None) -> ScoreTotals:
    """Every score that the recorded statistics of a layer determine; `tokens` are the texts along queries and keys."""
    totals: dict[str, tuple[Tensor, Tensor]] = {}
    if layer.kept is not None:
        totals |= sum_kept_statistics(layer)
    else:
        totals |= sum_matrix_entries(layer, tokens)
    if layer.max_top:
        heaviest = layer.top(1)
        is_visible = (heaviest.keys[..., 0] >= 0) & heaviest.values[..., 0].isfinite()
        totals["heaviest"] = sum_per_head(heaviest.values[..., 0], is_visible)
        onward = heaviest.keys[..., 1:, 0] >= heaviest.keys[..., :-1, 0]
        totals["alignment"] = sum_per_head(onward.double(), is_visible[..., 1:] & is_visible[..., :-1])
    skipped = () if layer.queries == layer.keys else POSITION_SCORES
    return ScoreTotals({name: totals[name] for name in HEAD_SCORES if name in totals and name not in skipped})


def sum_kept_statistics(layer: Layer) -> dict[str, tuple[Tensor, Tensor]]:
    assert layer.kept is not None
    if "lse" not in layer.kept:
        # Only weights of text were kept.
        return {}
    is_visible = layer.lse != -torch.inf
    totals = {
        "entropy": sum_per_head(layer.entropy(), is_visible),
        "distance": sum_per_head(layer.distance(), is_visible),
    }
    if "first" in layer.kept:
        totals["first_token"] = sum_per_head(layer.kept["first"], is_visible)
    if "previous" in layer.kept:
        totals["previous_token"] = sum_per_head(layer.kept["previous"], is_visible)
    sink = find_sink_mass(layer)
    return totals if sink is None else totals | {"sink_mass": sum_per_head(sink, is_visible)}


def find_sink_mass(layer: Layer) -> Tensor | None:
    """The share of a learned sink for each query; None for a layer without one."""
    sink = layer.sink_mass() if "sink_mass" in layer.available else None
    return sink if sink is not None and bool(sink.any()) else None


def sum_matrix_entries(layer: Layer, tokens: tuple[TokenTexts, TokenTexts] | None) -> dict[str, tuple[Tensor, Tensor]]:
    """Totals from exact entries, read in strips of whole rows so that memory stays linear in the length."""
    entropy, distance = layer.entropy(), layer.distance()
    sink = find_sink_mass(layer)
    copies = None if tokens is None else (number_tokens(tokens, layer), layer.positions.to(entropy.device))
    leading = find_first_visible_key(layer.received()).to(entropy.device) if layer.shape[-1] else None
    values: dict[str, list[Tensor]] = {"first_token": [], "previous_token": []}
    values |= {} if copies is None else {name: [] for name in TOKEN_SCORES}
    is_visible = []
    for rows, entries in read_strips(layer):
        is_visible.append((entries.sum(-1) if sink is None else entries.sum(-1) + sink[..., rows]) > 0)
        first = entries.sum(-1) if leading is None else weight_on_key(entries, leading)
        values["first_token"].append(first)
        values["previous_token"].append(weight_on_previous_key(entries, layer.positions[rows]))
        if copies is not None:
            (queries, keys), positions = copies
            for name, share in weight_on_copies(entries, queries[:, rows], keys, positions[rows]).items():
                values[name].append(share)
    counted = torch.cat(is_visible, -1)
    totals = {name: sum_per_head(torch.cat(parts, -1), counted) for name, parts in values.items()}
    whole = {"entropy": entropy, "distance": distance} | ({} if sink is None else {"sink_mass": sink})
    return totals | {name: sum_per_head(each, counted) for name, each in whole.items()}


def read_strips(layer: Layer) -> Iterator[tuple[slice, Tensor]]:
    batch, heads, queries, keys = layer.sizes
    step = max(1, MAX_STRIP_ENTRIES // max(1, batch * heads * keys))
    # At least one strip, which is empty if there are no queries.
    for start in range(0, max(queries, 1), step):
        rows = slice(start, min(start + step, queries))
        entries = layer[..., rows, :]
        assert isinstance(entries, Tensor)
        yield rows, entries


def weight_on_key(entries: Tensor, keys: Tensor) -> Tensor:
    """(B, ..., R): the weight on one key of each sequence."""
    index = keys.view(-1, *(1,) * (entries.dim() - 1)).expand(*entries.shape[:-1], 1)
    return entries.gather(-1, index).squeeze(-1)


def weight_on_previous_key(entries: Tensor, positions: Tensor) -> Tensor:
    """(..., R): the weight on the key right before each query; 0 if there is none."""
    if entries.shape[-1] == 0:
        return entries.sum(-1)
    before = (positions - 1).to(entries.device)
    inside = (before >= 0) & (before < entries.shape[-1])
    index = before.clamp(0, entries.shape[-1] - 1)[:, None].expand(*entries.shape[:-1], 1)
    return torch.where(inside, entries.gather(-1, index).squeeze(-1), 0.0)


def weight_on_copies(entries: Tensor, queries: Tensor, keys: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """The weight on earlier copies of the query's token, and on the keys after them; queries (B, R), keys (B, Tk)."""
    earlier = torch.arange(keys.shape[1], device=keys.device) < positions[:, None]
    same = (queries[:, :, None] == keys[:, None]) & earlier  # (B, R, Tk)
    after = torch.zeros_like(same)
    after[..., 1:] = same[..., :-1]
    if entries.dim() == 4:
        same, after = same[:, None], after[:, None]
    return {"duplicate_token": (entries * same).sum(-1), "induction": (entries * after).sum(-1)}


def number_tokens(tokens: tuple[TokenTexts, TokenTexts], layer: Layer) -> tuple[Tensor, Tensor]:
    """The tokens of both axes as integers, equal for equal tokens: (B, Tq) and (B, Tk)."""
    numbers: dict[object, int] = {}
    ids = [
        torch.tensor([[numbers.setdefault(token, len(numbers)) for token in row] for row in side]) for side in tokens
    ]
    batch, _, queries, keys = layer.sizes
    if ids[0].shape != (batch, queries) or ids[1].shape != (batch, keys):
        shapes = f"{tuple(ids[0].shape)} and {tuple(ids[1].shape)}"
        raise ValueError(
            f"tokens of {layer.label} must have the shapes {(batch, queries)} and {(batch, keys)}, got {shapes}"
        )
    device = layer.entropy().device
    return ids[0].to(device), ids[1].to(device)


def sum_per_head(values: Tensor, is_counted: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and count per head over sequences and queries: (H,) each."""
    values, is_counted = (x.unsqueeze(1) if x.dim() == 2 else x for x in (values, is_counted))
    total = torch.where(is_counted, values.double(), 0.0).sum((0, 2))
    return total.cpu(), is_counted.sum((0, 2)).double().cpu()


def check_rollout_index(layer: Layer, query: int, batch: int) -> None:
    """Refuses a query or a sequence that the layer does not have."""
    sequences, _, queries, keys = layer.sizes
    if not (sequences and queries and keys):
        raise ValueError(f"{layer.label} must have at least one query and one key for a rollout, got {layer.shape}")
    for name, number, size in (("query", query, queries), ("batch", batch, sequences)):
        if not -size <= number < size:
            raise IndexError(f"{name} must be from {-size} to {size - 1}, got {number}")


@torch.no_grad()
def compute_rollout(
    layers: Sequence[Layer], query: int | Sequence[int], batch: int = 0, values: bool = False
) -> Tensor:
    """Attention rollout (Abnar and Zuidema): the share of each input position in one query of the last layer, (T,).

    The mean of several queries costs as much as one.

    Each layer is taken as the mean of its attention, averaged over heads, and the identity (the residual connection).
    values=True weights the attention by the norms of the values. Only matrix-vector products are computed.
    """
    queries = [query] if isinstance(query, int) else list(query)
    for each in queries:
        check_rollout_index(layers[-1], each, batch)
    length = layers[-1].shape[-1]
    flow = torch.zeros(length, device=read_rows(layers[-1], batch, queries[:1]).device)
    places = layers[-1].positions[queries].to(flow.device)
    flow.index_add_(0, places, flow.new_full((len(queries),), 1.0 / len(queries)))
    for layer in reversed(layers):
        if layer.shape[-1] != length:
            raise ValueError(
                f"layers must have one length for a rollout, got {length} keys and {layer.shape[-1]} in {layer.label}"
            )
        if layer is not layers[-1] and layer.rows is not None:
            raise ValueError(
                f"layers must have all queries for a rollout, got {layer.shape[-2]} of {layer.label}:"
                " use queries='all' in foci.watch"
            )
        flow = roll_back_layer(layer, batch, flow, values)
    return flow


@torch.no_grad()
def compute_cross_rollout(
    layers: Sequence[Layer], query: int, batch: int = 0, values: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention rollout of an encoder-decoder: the shares of the source and of the target in one query of the decoder.

    The shares are traced back through cross-attention and self-attention of each decoder layer; the share of the source
    then through the encoder layers. Returns (S,) and (T,), which add up to 1.
    """
    partial = next((layer for layer in layers if layer.rows is not None), None)
    if partial is not None:
        raise ValueError(
            f"layers must have all queries for a rollout, got {partial.shape[2]} of {partial.label}:"
            " use queries='all' in foci.watch"
        )
    cross = [layer for layer in layers if layer.queries != layer.keys]
    check_rollout_index(cross[-1], query, batch)
    selves = [layer for layer in layers if layer.queries == layer.keys]
    queries, keys = cross[-1].shape[2:]
    encoder = [layer for layer in selves if layer.keys == cross[-1].keys and layer.shape[3] == keys]
    decoder = [layer for layer in selves if layer not in encoder and layer.shape[2] == queries]
    places = decoder[-1].positions if decoder else torch.arange(queries)
    device = cross[-1].entropy().device
    target = torch.zeros(decoder[-1].shape[3] if decoder else queries, device=device)
    source = torch.zeros(keys, device=device)
    target[int(places[query])] = 1.0
    # In a decoder layer, cross-attention follows self-attention; the flow goes back in the reverse order.
    for layer in sorted([*decoder, *cross], key=lambda layer: (-layer.index, layer.queries == layer.keys)):
        if layer in decoder:
            target = roll_back_layer(layer, batch, target, values)
        else:
            target[places], attended = split_flow(layer, batch, target[places], values)
            source += attended
    for layer in sorted(encoder, key=lambda layer: -layer.index):
        source = roll_back_layer(layer, batch, source, values)
    return source, target


def roll_back_layer(layer: Layer, batch: int, flow: Tensor, values: bool) -> Tensor:
    """(Tk,) -> (Tk,): multiplies by the mean of the head-averaged matrix and the identity, with rows scaled to 1."""
    positions = layer.positions.to(flow.device)
    residual = flow.clone()
    residual[positions], attended = split_flow(layer, batch, flow[positions], values)
    return residual + attended


def split_flow(layer: Layer, batch: int, flow: Tensor, values: bool) -> tuple[Tensor, Tensor]:
    """(Tq,) -> (Tq,) and (Tk,): the part of each query that comes from the residual, and what comes from the keys."""
    rows = flow.nonzero().flatten().tolist()
    if not rows:
        return torch.zeros_like(flow), flow.new_zeros(layer.shape[-1])
    if not values and len(rows) <= MAX_ROLLOUT_ROWS:
        entries = read_rows(layer, batch, rows).to(flow.dtype)
        share = torch.zeros_like(flow)
        share[rows] = flow[rows] / (1.0 + entries.sum(-1))
        return share, share[rows] @ entries
    weights = layer[batch]
    # A single head has no head axis.
    averaged: Any = (
        weights if layer.single else weights.mean(0) if isinstance(weights, Tensor) else weights.mean("heads")
    )
    row_sums = averaged @ torch.ones(layer.shape[3], dtype=averaged.dtype, device=flow.device)
    share = flow / (1.0 + row_sums.to(flow.dtype))
    if values:
        return share, weigh_by_value_norms(layer, batch, weights, share)
    return share, (share.to(averaged.dtype) @ averaged).to(flow.dtype)


def read_rows(layer: Layer, batch: int, rows: Sequence[int]) -> Tensor:
    """Some rows of the head-averaged matrix: (rows, Tk)."""
    entries = layer.with_head_axis()[batch, :, list(rows)]
    assert isinstance(entries, Tensor)
    return entries.float().mean(0)


def weigh_by_value_norms(layer: Layer, batch: int, weights: Any, share: Tensor) -> Tensor:
    """share @ W with each entry weighted by the norm of its value, row sums unchanged, averaged over heads."""
    norms = layer.norms()[batch].to(torch.float32)  # (H, Tk), or (Tk,) of one head
    column = norms.unsqueeze(-1)
    matrix = weights.float() if isinstance(weights, Tensor) else weights
    mass, weighted = matrix @ torch.ones_like(column), matrix @ column
    scaled = torch.where(weighted > 0, share.unsqueeze(-1) * mass / weighted, 0.0)  # (H, Tq, 1)
    attended = (scaled.mT @ matrix).squeeze(-2) * norms
    return attended if layer.single else attended.mean(0)

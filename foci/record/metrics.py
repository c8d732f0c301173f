"""What can be said of heads and across layers: scores of each head, sums over a data set, and rollout.

B batch, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foci.record.kept import find_first_visible_key
from foci.record.layer import Layer

# Each is a mean over the queries that look at anything, one number per head.
HEAD_SCORES = {
    "entropy": "how many nats of choice a query has: 0 looks at one key, ln n at n keys alike",
    "distance": "how many positions away from itself a query looks on average",
    "heaviest": "the weight of the heaviest key of a query",
    "sink share": "the weight on the first key, and what a learned sink takes",
    "previous token": "the weight on the key right before the query",
    "duplicate token": "the weight on earlier keys that are the same token as the query",
    "induction": "the weight on keys that stand right after an earlier copy of the query's token",
    "alignment": "how often the heaviest key of the next query does not go back: 1 for a head that reads along",
}
# Which of them need to know the tokens of both sides.
TOKEN_SCORES = ("duplicate token", "induction")
# Which of them compare where the two stand: that says nothing where they are of two sequences.
POSITION_SCORES = ("distance", "previous token")
# So many entries of a matrix are looked at at a time.
MAX_STRIP_ENTRIES = 1 << 22

TokenTexts = Sequence[Sequence[object]]


@dataclass
class ScoreTotals:
    """Sums over queries, by score: (sum, how many), each (H,) in float64. They add up over a data set."""

    sums: dict[str, tuple[Tensor, Tensor]]

    def add(self, other: ScoreTotals) -> ScoreTotals:
        """Both together; what only one of them knows is dropped, so that all means are over the same queries."""
        both = [name for name in self.sums if name in other.sums]
        if both and self.sums[both[0]][0].shape != other.sums[both[0]][0].shape:
            shapes = f"{tuple(self.sums[both[0]][0].shape)} and {tuple(other.sums[both[0]][0].shape)}"
            raise ValueError(f"records of one model add up, but their layers have {shapes} heads")
        return ScoreTotals(
            {
                name: (self.sums[name][0] + other.sums[name][0], self.sums[name][1] + other.sums[name][1])
                for name in both
            }
        )

    def means(self) -> dict[str, Tensor]:
        """The mean of each score, NaN where no query counts: (H,)."""
        return {name: total / count for name, (total, count) in self.sums.items()}


@torch.no_grad()
def compute_score_totals(layer: Layer, tokens: tuple[TokenTexts, TokenTexts] | None = None) -> ScoreTotals:
    """Every score of a layer that what was kept can tell; `tokens` are those along queries and keys."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    if layer.kept is not None:
        found |= sum_kept_statistics(layer)
    else:
        found |= sum_matrix_entries(layer, tokens)
    if layer.most:
        heaviest = layer.top(1)
        seen = (heaviest.keys[..., 0] >= 0) & heaviest.values[..., 0].isfinite()
        found["heaviest"] = sum_per_head(heaviest.values[..., 0], seen)
        onward = heaviest.keys[..., 1:, 0] >= heaviest.keys[..., :-1, 0]
        found["alignment"] = sum_per_head(onward.double(), seen[..., 1:] & seen[..., :-1])
    skipped = () if layer.queries == layer.keys else POSITION_SCORES
    return ScoreTotals({name: found[name] for name in HEAD_SCORES if name in found and name not in skipped})


def sum_kept_statistics(layer: Layer) -> dict[str, tuple[Tensor, Tensor]]:
    assert layer.kept is not None
    seen = layer.lse != -torch.inf
    found = {"entropy": sum_per_head(layer.entropy(), seen), "distance": sum_per_head(layer.distance(), seen)}
    if "first" in layer.kept:
        found["sink share"] = sum_per_head(layer.kept["first"] + layer.sink_mass(), seen)
    if "previous" in layer.kept:
        found["previous token"] = sum_per_head(layer.kept["previous"], seen)
    return found


def sum_matrix_entries(layer: Layer, tokens: tuple[TokenTexts, TokenTexts] | None) -> dict[str, tuple[Tensor, Tensor]]:
    """Strip by strip of whole rows, so that memory stays linear in the length."""
    entropy, distance = layer.entropy(), layer.distance()
    sink = layer.sink_mass() if "sink_mass" in layer.can else torch.zeros_like(entropy)
    copies = None if tokens is None else (number_tokens(tokens, layer), layer.places.to(entropy.device))
    leading = find_first_visible_key(layer.received()).to(entropy.device) if layer.shape[3] else None
    values: dict[str, list[Tensor]] = {"sink share": [], "previous token": []}
    values |= {} if copies is None else {name: [] for name in TOKEN_SCORES}
    seen = []
    for rows, entries in read_strips(layer):
        seen.append(entries.sum(-1) + sink[..., rows] > 0)
        first = entries.sum(-1) if leading is None else weight_on_key(entries, leading)
        values["sink share"].append(first + sink[..., rows])
        values["previous token"].append(weight_on_previous_key(entries, layer.places[rows]))
        if copies is not None:
            (queries, keys), places = copies
            for name, share in weight_on_copies(entries, queries[:, rows], keys, places[rows]).items():
                values[name].append(share)
    counted = torch.cat(seen, -1)
    found = {name: sum_per_head(torch.cat(parts, -1), counted) for name, parts in values.items()}
    return found | {"entropy": sum_per_head(entropy, counted), "distance": sum_per_head(distance, counted)}


def read_strips(layer: Layer) -> Iterator[tuple[slice, Tensor]]:
    batch, heads, queries, keys = layer.shape
    step = max(1, MAX_STRIP_ENTRIES // max(1, batch * heads * keys))
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        entries = layer[..., rows, :]
        assert isinstance(entries, Tensor)
        yield rows, entries


def weight_on_key(entries: Tensor, keys: Tensor) -> Tensor:
    """(B, ..., R): the weight on one key of each sequence."""
    index = keys.view(-1, *(1,) * (entries.dim() - 1)).expand(*entries.shape[:-1], 1)
    return entries.gather(-1, index).squeeze(-1)


def weight_on_previous_key(entries: Tensor, places: Tensor) -> Tensor:
    """(..., R): the weight on the key right before each query; 0 where there is none."""
    before = (places - 1).to(entries.device)
    inside = (before >= 0) & (before < entries.shape[-1])
    index = before.clamp(0, entries.shape[-1] - 1)[:, None].expand(*entries.shape[:-1], 1)
    return torch.where(inside, entries.gather(-1, index).squeeze(-1), 0.0)


def weight_on_copies(entries: Tensor, queries: Tensor, keys: Tensor, places: Tensor) -> dict[str, Tensor]:
    """Shares on copies of the query's token and on what stands after them; queries (B, R), keys (B, Tk)."""
    earlier = torch.arange(keys.shape[1], device=keys.device) < places[:, None]
    same = (queries[:, :, None] == keys[:, None]) & earlier  # (B, R, Tk)
    after = torch.zeros_like(same)
    after[..., 1:] = same[..., :-1]
    if entries.dim() == 4:
        same, after = same[:, None], after[:, None]
    return {"duplicate token": (entries * same).sum(-1), "induction": (entries * after).sum(-1)}


def number_tokens(tokens: tuple[TokenTexts, TokenTexts], layer: Layer) -> tuple[Tensor, Tensor]:
    """The tokens of both sides as numbers that tell them apart: (B, Tq) and (B, Tk)."""
    numbers: dict[object, int] = {}
    found = [
        torch.tensor([[numbers.setdefault(token, len(numbers)) for token in row] for row in side]) for side in tokens
    ]
    batch, _, queries, keys = layer.shape
    if found[0].shape != (batch, queries) or found[1].shape != (batch, keys):
        shapes = f"{tuple(found[0].shape)} and {tuple(found[1].shape)}"
        raise ValueError(f"{layer.label} takes tokens {(batch, queries)} and {(batch, keys)}, but got {shapes}")
    device = layer.entropy().device
    return found[0].to(device), found[1].to(device)


def sum_per_head(values: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and count per head over sequences and queries: (H,) each."""
    values, seen = (x.unsqueeze(1) if x.dim() == 2 else x for x in (values, seen))
    total = torch.where(seen, values.double(), 0.0).sum((0, 2))
    return total.cpu(), seen.sum((0, 2)).double().cpu()


@torch.no_grad()
def compute_rollout(layers: Sequence[Layer], query: int, batch: int = 0, values: bool = False) -> Tensor:
    """What of each position of the input reaches one query of the last layer: (T,), products all the way down.

    Abnar and Zuidema's rollout: half of what a layer gives on is what it sees, averaged over its heads, half is what
    was there. values=True weighs what is seen with the lengths of the values.
    """
    length = layers[-1].shape[3]
    flow = torch.zeros(length, device=layers[-1].entropy().device)
    flow[int(layers[-1].places[query])] = 1.0
    for layer in reversed(layers):
        if layer.shape[3] != length:
            raise ValueError(
                f"rollout takes layers of one length, but {layer.label} has {layer.shape[3]}, not {length}"
            )
        if layer is not layers[-1] and layer.rows is not None:
            raise ValueError(
                f"rollout takes all queries of the layers before the last, but of {layer.label} {layer.shape[2]} were"
                " kept: watch with queries='all'"
            )
        flow = roll_back_layer(layer, batch, flow, values)
    return flow


def roll_back_layer(layer: Layer, batch: int, flow: Tensor, values: bool) -> Tensor:
    """(Tk,) -> (Tk,): row i of the averaged matrix and of the identity, together scaled to 1."""
    places, weights = layer.places.to(flow.device), layer[batch]
    # One head has no head axis of its own.
    averaged: Any = (
        weights if layer.single else weights.mean(0) if isinstance(weights, Tensor) else weights.mean("heads")
    )
    given = averaged @ torch.ones_like(flow).to(averaged.dtype)
    share = flow[places] / (1.0 + given.to(flow.dtype))
    stayed = flow.clone()
    stayed[places] = share
    seen = (
        weigh_by_value_norms(layer, batch, weights, share)
        if values
        else (share.to(averaged.dtype) @ averaged).to(flow.dtype)
    )
    return stayed + seen


def weigh_by_value_norms(layer: Layer, batch: int, weights: Any, share: Tensor) -> Tensor:
    """share @ W with each entry weighed by its value's length, rows as heavy as before, averaged over heads."""
    norms = layer.norms()[batch].to(torch.float32)  # (H, Tk), or (Tk,) of one head
    lengths = norms.unsqueeze(-1)
    wide = weights.float() if isinstance(weights, Tensor) else weights
    mass, weighed = wide @ torch.ones_like(lengths), wide @ lengths
    scaled = torch.where(weighed > 0, share.unsqueeze(-1) * mass / weighed, 0.0)  # (H, Tq, 1)
    seen = (scaled.mT @ wide).squeeze(-2) * norms
    return seen if layer.single else seen.mean(0)

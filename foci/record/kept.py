"""Keep and Kept: statistics of attention that are kept in place of the matrix.

B batch, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foci.weights.summary import Top
from foci.weights.weights import Weights

# The axes after (B, H) of each statistic: q queries, k keys.
STATISTIC_AXES = {
    "entropy": "q",
    "received": "k",
    "distance": "q",
    "lse": "q",
    "sink_mass": "q",
    "largest_logit": "",
    "first": "q",
    "previous": "q",
    "top_values": "qn",
    "top_keys": "qn",
    "picture": "rc",
}


@dataclass(frozen=True)
class Keep:
    """Which statistics `foci.watch` keeps in place of queries and keys; memory is linear in the length.

    >>> keep = foci.Keep(top=16, picture=64)

    Entropy, received attention, distance, log-sum-exp and the sinks' mass are always kept.

    Args:
        top: how many of the heaviest keys of each query; 0: none.
        picture: rows and columns of each head's picture; 0: none.
        largest_logit: also the largest logit of each head.
        shares: also what each query gives to the key before it and to the first one. These cost a pass over the
            diagonal, which shows on a GPU.
        values: also the norms of the values.
    """

    top: int = 8
    picture: int = 256
    largest_logit: bool = False
    shares: bool = False
    values: bool = True

    def __post_init__(self) -> None:
        for name in ("top", "picture"):
            number = getattr(self, name)
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise ValueError(f"Keep takes a whole number, 0 or more, for {name}, but got {number!r}")

    def compute(self, weights: Weights) -> dict[str, Tensor]:
        """The statistics of some weights (B, H, Tq, Tk), where these are; the sinks' mass where there are sinks."""
        with torch.no_grad():
            # Keys are half as long on their way to the host; `top` gives them as they were.
            kept = weights.summary_tensors(self.top, self.picture, self.largest_logit, narrow=True)
            if weights.tensors.call.sink is not None:
                kept["sink_mass"] = weights.sink_mass()
            if self.shares:
                kept |= compute_key_shares(weights, kept["received"])
        return kept

    def nbytes(self, batch: int, heads: int, queries: int, keys: int) -> int:
        """What is kept of one call, in bytes."""
        rows, columns = min(self.picture, queries), min(self.picture, keys)
        per_query = 4 + 2 * self.shares + 2 * min(self.top, keys)
        return 4 * batch * heads * (queries * per_query + keys + rows * columns + self.largest_logit)


def find_first_visible_key(received: Tensor) -> Tensor:
    """The first key of each sequence that anybody looks at, (B,): with padding on the left that is not key 0."""
    return (received.flatten(1, -2).sum(1) if received.dim() > 2 else received).gt(0).to(torch.int8).argmax(-1)


def compute_key_shares(weights: Weights, received: Tensor) -> dict[str, Tensor]:
    """What each query gives to the first key, and to the key before its own; 0 where there is none."""
    queries, keys = weights.shape[-2:]
    firsts = [weights[b : b + 1, ..., int(key)] for b, key in enumerate(find_first_visible_key(received).tolist())]
    first = torch.cat(firsts)  # type: ignore[arg-type]
    previous = torch.zeros_like(first)
    behind = keys - queries - 1
    # Blocks along the diagonal: linear in the length, and a few calls only.
    for start in range(max(0, -behind), queries, 128):
        stop = min(start + 128, queries)
        block = weights[..., start:stop, start + behind : stop + behind]
        assert isinstance(block, Tensor)
        previous[..., start:stop] = block.diagonal(dim1=-2, dim2=-1)
    return {"first": first, "previous": previous}


class KeptStatistics(Mapping[str, Tensor]):
    """Kept statistics by name, each (B, H, ...); answers what was kept and refuses the rest with a reason.

    >>> Kept({"entropy": torch.rand(2, 4, 6)}, (2, 4, 6, 6)).entropy().shape
    torch.Size([2, 4, 6])

    Args:
        statistics: by the names in AXES.
        shape: (B, H, Tq, Tk) of the matrix, (B, Tq, Tk) for one head.
    """

    def __init__(self, statistics: Mapping[str, Tensor], shape: tuple[int, ...]) -> None:
        found = dict(statistics)
        if "lse" in found and "sink_mass" not in found:
            # Without sinks their mass is neither computed nor moved.
            found["sink_mass"] = found["lse"].new_zeros(()).expand_as(found["lse"])
        self.statistics, self.shape = {name: found[name] for name in STATISTIC_AXES if name in found}, shape

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.statistics:
            kept = ", ".join(self.statistics)
            raise ValueError(f"{name} was asked, but only {kept} were kept: watch with keep='lazy', or see foci.Keep")
        return self.statistics[name]

    def __contains__(self, name: object) -> bool:
        return name in self.statistics

    def __iter__(self) -> Iterator[str]:
        return iter(self.statistics)

    def __len__(self) -> int:
        return len(self.statistics)

    def head(self, place: int) -> KeptStatistics:
        """Of one head, without its axis."""
        return KeptStatistics({name: kept[:, place] for name, kept in self.items()}, (self.shape[0], *self.shape[2:]))

    @property
    def lse(self) -> Tensor:
        return self["lse"]

    def entropy(self) -> Tensor:
        return self["entropy"]

    def distance(self) -> Tensor:
        return self["distance"]

    def sink_mass(self) -> Tensor:
        return self["sink_mass"]

    def largest_logit(self) -> Tensor:
        return self["largest_logit"]

    def received(self, queries: Any = None, per: str = "query_head") -> Tensor:
        if queries is not None or per != "query_head":
            raise ValueError("received was kept for all queries and per query head only: watch with keep='lazy'")
        return self["received"]

    def top(self, k: int) -> Top:
        kept = self.statistics["top_keys"].shape[-1] if "top_keys" in self.statistics else 0
        if k > kept:
            raise ValueError(f"top({k}) was asked, but {kept} were kept: watch with keep=foci.Keep(top={k})")
        return Top(self["top_values"][..., :k], self["top_keys"][..., :k].long())

    def picture(self, rows: int, columns: int, reduce: str = "mean") -> Tensor:
        """The kept picture, or a coarser one whose edges are among its edges."""
        kept = self["picture"]
        if reduce != "mean":
            raise ValueError(f"a picture of means was kept, but {reduce!r} was asked: watch with keep='lazy'")
        for kind, asked, has in (("rows", rows, kept.shape[-2]), ("columns", columns, kept.shape[-1])):
            if asked < 1 or has % asked:
                raise ValueError(
                    f"a picture of {rows} x {columns} was asked, but {kept.shape[-2]} x {kept.shape[-1]} was kept:"
                    f" ask for {kind} that divide {has}, or watch with keep='lazy'"
                )
        queries, keys = self.shape[-2:]
        return coarsen_picture(coarsen_picture(kept, rows, queries).mT, columns, keys).mT


def coarsen_picture(picture: Tensor, rows: int, length: int) -> Tensor:
    """Fewer rows: blocks of a mean picture joined, each with as much weight as it has entries."""
    has = picture.shape[-2]
    if has == rows:
        return picture
    edges = torch.arange(has + 1, device=picture.device) * length // has
    sizes = edges.diff()[:, None]
    weighted, entries = (t.reshape(*t.shape[:-2], rows, has // rows, -1).sum(-2) for t in (picture * sizes, sizes))
    return weighted / entries

"""Keep and KeptStatistics: attention statistics that are kept in place of the matrix.

B batch, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.weights.slices import compute_columns, compute_columns_of_short_rows, has_plain_columns
from foci.weights.summary import Top
from foci.weights.weights import Weights

# The axes after (B, H) of each statistic: q queries, k keys, t those of them that are text.
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
    "key_weights": "qt",
    "query_weights": "tk",
}
# The statistics whose mean over several matrices says something.
MEAN_STATISTICS = tuple(name for name in STATISTIC_AXES if not name.startswith("top_") and name != "largest_logit")


@dataclass(frozen=True)
class Keep:
    """Which statistics `foci.watch` keeps in place of queries and keys; their memory is linear in the length.

    >>> keep = foci.Keep(top=16, picture=64)
    >>> keep = foci.Keep(keys="text")                       # of a diffusion model: where each word of the prompt lies

    Entropy, received attention, distance, log-sum-exp and sink mass are always kept, except with `keys` and `queries`.

    Args:
        top: the number of heaviest keys of each query; 0: none.
        picture: rows and columns of each head's picture; 0: none.
        largest_logit: whether to keep the largest logit of each head.
        shares: whether to keep the weight of each query on the previous key and on the first key. This takes a pass
            over the diagonal, which is noticeable on a GPU.
        values: whether to keep the norms of the values.
        keys: "text": of a model that attends to text and images, only the exact weights on the keys that are text (not
            its padding), in half precision if the model computes so; no other statistic. Layers that do not attend to
            text are not recorded. Of a guided pipeline, whose batch has a half without the prompt, only the other half
            is.
        queries: "text": only the exact weights of the queries that are text; may be combined with `keys`.
    """

    top: int = 8
    picture: int = 256
    largest_logit: bool = False
    shares: bool = False
    values: bool = True
    keys: str | None = None
    queries: str | None = None

    def __post_init__(self) -> None:
        for name in ("keys", "queries"):
            if getattr(self, name) not in {None, "text"}:
                raise ValueError(f"{name} must be 'text' or None, got {getattr(self, name)!r}")
        if self.keeps_text and replace(self, keys=None, queries=None) != Keep():
            raise ValueError(f"keys and queries must be given without other arguments, got {self}")
        for name in ("top", "picture"):
            number = getattr(self, name)
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise ValueError(f"{name} must be an int of at least 0, got {number!r}")

    @property
    def keeps_text(self) -> bool:
        """Whether only weights of text are kept."""
        return self.keys is not None or self.queries is not None

    def compute_text(self, weights: Weights, text: TextPositions) -> dict[str, Tensor]:
        """The exact weights (B, H, Tq, Tk) on the keys that are text, and those of the queries that are text."""
        kept, dtype = {}, stored_dtype(weights.tensors.call.q)
        with torch.no_grad():
            if self.keys is not None and text.keys:
                kept["key_weights"] = read_columns(weights, as_index(text.keys)).to(dtype)
            if self.queries is not None and text.queries:
                kept["query_weights"] = read_entries(weights, (..., as_index(text.queries), slice(None))).to(dtype)
        return kept

    def compute_text_of_plain_call(
        self, q: Tensor, k: Tensor, keys: slice | list[int], rows: slice | None
    ) -> dict[str, Tensor]:
        """The same for some sequences of a plain call with few keys, and without text among its queries; faster."""
        return {"key_weights": compute_columns_of_short_rows(q, k, keys, rows, stored_dtype(q))}

    def compute(self, weights: Weights) -> dict[str, Tensor]:
        """The statistics of weights (B, H, Tq, Tk), on their device; the sink mass only if there are sinks."""
        with torch.no_grad():
            # Keys as int32 halve the copy to the host; `top` returns int64.
            kept = weights.summary_tensors(self.top, self.picture, self.largest_logit, int32_keys=True)
            if weights.tensors.call.sink is not None:
                kept["sink_mass"] = weights.sink_mass()
            if self.shares:
                kept |= compute_key_shares(weights, kept["received"])
        return kept

    def nbytes(self, batch: int, heads: int, queries: int, keys: int, text: TextPositions | None = None) -> int:
        """The bytes kept for one call; with weights of text, at most."""
        if text is not None:
            columns = len(text.keys) * queries if self.keys else 0
            return 4 * batch * heads * (columns + (len(text.queries) * keys if self.queries else 0))
        rows, columns = min(self.picture, queries), min(self.picture, keys)
        per_query = 4 + 2 * self.shares + 2 * min(self.top, keys)
        return 4 * batch * heads * (queries * per_query + keys + rows * columns + self.largest_logit)


class TextPositions(NamedTuple):
    """The queries and the keys of a call that are text."""

    queries: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()


def stored_dtype(q: Tensor) -> torch.dtype:
    """The dtype of kept weights: half precision if the model computes so."""
    return torch.float16 if q.element_size() == 2 else torch.float32


def as_index(numbers: Sequence[int]) -> slice | list[int]:
    """Numbers as a slice if they follow each other, which reads them without copying."""
    first = numbers[0]
    return slice(first, first + len(numbers)) if list(numbers) == [*range(first, first + len(numbers))] else [*numbers]


def read_columns(weights: Weights, keys: slice | list[int]) -> Tensor:
    call = weights.call
    if isinstance(keys, slice) and has_plain_columns(call, keys.stop - keys.start):
        return compute_columns(call, weights.tensors.lse, keys)
    return read_entries(weights, (..., slice(None), keys))


def read_entries(weights: Weights, index: Any) -> Tensor:
    entries = weights[index]
    assert isinstance(entries, Tensor)
    return entries


def find_first_visible_key(received: Tensor) -> Tensor:
    """The first key of each sequence that is not fully masked, (B,): with left padding that is not key 0."""
    return (received.flatten(1, -2).sum(1) if received.dim() > 2 else received).gt(0).to(torch.int8).argmax(-1)


def compute_key_shares(weights: Weights, received: Tensor) -> dict[str, Tensor]:
    """The weight of each query on the first key, and on the key before its own; 0 if there is none."""
    firsts = [weights[b : b + 1, ..., int(key)] for b, key in enumerate(find_first_visible_key(received).tolist())]
    return {"first": torch.cat(firsts), "previous": weights.diagonal(-1)}  # type: ignore[arg-type]


class KeptStatistics(Mapping[str, Tensor]):
    """Kept statistics by name, each (B, H, ...); statistics that were not kept raise an error.

    >>> KeptStatistics({"entropy": torch.rand(2, 4, 6)}, (2, 4, 6, 6)).entropy().shape
    torch.Size([2, 4, 6])

    Args:
        statistics: by the names in STATISTIC_AXES.
        shape: (B, H, Tq, Tk) of the matrix, (B, Tq, Tk) for one head.
    """

    def __init__(self, statistics: Mapping[str, Tensor], shape: tuple[int, ...]) -> None:
        complete = dict(statistics)
        if "lse" in complete and "sink_mass" not in complete:
            # Without sinks their mass is 0 and is neither computed nor copied.
            complete["sink_mass"] = complete["lse"].new_zeros(()).expand_as(complete["lse"])
        self.statistics, self.shape = {name: complete[name] for name in STATISTIC_AXES if name in complete}, shape

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.statistics:
            raise ValueError(self._describe_missing(name))
        return self.statistics[name]

    def _describe_missing(self, name: str) -> str:
        available = ", ".join(self)
        return f"{name!r} was not recorded; available: {available}. Use keep='lazy' or foci.Keep(...) in foci.watch"

    def __contains__(self, name: object) -> bool:
        return name in self.statistics

    def __iter__(self) -> Iterator[str]:
        return iter(self.statistics)

    def __len__(self) -> int:
        return len(self.statistics)

    def head(self, index: int) -> KeptStatistics:
        """The statistics of one head, without a head axis."""
        return KeptStatistics({name: kept[:, index] for name, kept in self.items()}, (self.shape[0], *self.shape[2:]))

    def with_head_axis(self) -> KeptStatistics:
        """The statistics of one head, (B, ...), as those of a layer of one head."""
        batch, queries, keys = self.shape
        return KeptStatistics({name: kept.unsqueeze(1) for name, kept in self.items()}, (batch, 1, queries, keys))

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
            raise ValueError(
                "queries must be None and per 'query_head' for kept statistics, got"
                f" {reprlib.repr(queries)} and {per!r}: use keep='lazy' in foci.watch"
            )
        return self["received"]

    def top(self, k: int) -> Top:
        kept = self.statistics["top_keys"].shape[-1] if "top_keys" in self.statistics else 0
        if not kept:
            raise ValueError(self._describe_missing("top"))
        if k > kept:
            raise ValueError(
                f"k must be at most {kept}, the recorded number of keys, got {k}: use keep=foci.Keep(top={k})"
            )
        return Top(self["top_values"][..., :k], self["top_keys"][..., :k].long())

    def picture(self, rows: int, columns: int, reduce: str = "mean") -> Tensor:
        """The kept picture, or a coarser one whose block edges are among its edges."""
        kept = self["picture"]
        if reduce != "mean":
            raise ValueError(
                f"reduce must be 'mean' for kept statistics, got {reduce!r}; use keep='lazy' in foci.watch"
            )
        for kind, requested, available in (("rows", rows, kept.shape[-2]), ("columns", columns, kept.shape[-1])):
            if requested < 1 or available % requested:
                raise ValueError(
                    f"{kind} must divide {available}, because a picture of {kept.shape[-2]} x {kept.shape[-1]} was"
                    f" recorded, got {requested}; use keep='lazy' in foci.watch for other sizes"
                )
        queries, keys = self.shape[-2:]
        return coarsen_picture(coarsen_picture(kept, rows, queries).mT, columns, keys).mT


def coarsen_picture(picture: Tensor, rows: int, length: int) -> Tensor:
    """Merges rows of a mean picture; each block counts by its number of entries."""
    available = picture.shape[-2]
    if available == rows:
        return picture
    edges = torch.arange(available + 1, device=picture.device) * length // available
    sizes = edges.diff()[:, None]
    weighted, entries = (
        t.reshape(*t.shape[:-2], rows, available // rows, -1).sum(-2) for t in (picture * sizes, sizes)
    )
    return weighted / entries

"""Weights: the attention matrix W as a lazy operator.

It holds the queries, the keys, the log-sum-exp and what made the scores; every question is answered exactly from these,
and the matrix is never built unless somebody asks for all of it.

B batch, H heads, G key heads, Tq queries, Tk keys.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci import backends, products, saving, statistics
from foci.arguments import Call
from foci.biases import Relative
from foci.entries import axis_of, entries
from foci.grouping import group_ids
from foci.held import Held, nested
from foci.statistics import Wanted
from foci.where import Extent


class Top(NamedTuple):
    """The heaviest keys of each query, heaviest first; 0 and -1 where fewer are visible."""

    values: Tensor
    keys: Tensor


@dataclass(frozen=True)
class Summary:
    """The statistics of an attention matrix, each as the method of `Weights` of the same name gives it."""

    entropy: Tensor
    received: Tensor
    distance: Tensor
    lse: Tensor
    sink_mass: Tensor
    largest_logit: Tensor
    top: Top | None
    picture: Tensor | None


class Weights:
    """The attention matrix, shape (..., H, Tq, Tk), as a lazy operator.

    >>> import torch, foci
    >>> q, k, v = (torch.randn(2, 4, 10, 8) for _ in range(3))
    >>> out, weights = foci.attention(q, k, v, mask=foci.causal, return_weights=True)
    >>> weights
    Weights(2, 4, 10, 10), causal, float32 on cpu, holds 5,440 bytes
    >>> weights[0, 3]                                 # no query or key axis was named: a smaller lazy matrix
    Weights(10, 10), causal, float32 on cpu, holds 680 bytes
    >>> weights[0, 3, 9].shape                        # where the last token looks, exact
    torch.Size([10])
    >>> weights.entropy().shape, weights.top(3).keys.shape
    (torch.Size([2, 4, 10]), torch.Size([2, 4, 10, 3]))
    >>> torch.allclose(weights @ v, out, atol=1e-6)
    True

    Rows sum to 1, to 0 where a query sees nothing, and with a sink to 1 minus what the sink takes. These are the weights
    before dropout, of every head. Where gradients are on, slices, products, `entropy`, `received`, `grouped` and
    `distance` are differentiable.
    """

    def __init__(self, call: Call, lse: Tensor, batch: tuple[int, ...], headed: bool, averaged: bool = False) -> None:
        # The values are no part of W and are not kept alive; neither are dropout and Shaw's value term.
        bias = Relative(call.bias.keys) if isinstance(call.bias, Relative) else call.bias
        self._held = Held(replace(call, v=call.k, bias=bias, dropout=0.0, seed=None), lse)
        self._batch, self._headed, self._averaged = batch, headed, averaged

    @classmethod
    def of(cls, call: Call, lse: Tensor) -> Weights:
        """The weights of a call, with the shape that its caller used."""
        return cls(call, lse, call.extent.batch, call.extent.heads is not None)

    @property
    def _call(self) -> Call:
        """The call behind the weights, refused when its tensors were changed since."""
        self._held.check()
        return self._held.call

    @property
    def _lead(self) -> tuple[int, ...]:
        return (*self._batch, self._held.call.q.shape[1]) if self._headed else self._batch

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self._lead, self._held.call.q.shape[2], self._held.call.k.shape[2])

    @property
    def device(self) -> torch.device:
        return self._held.lse.device

    @property
    def dtype(self) -> torch.dtype:
        return self._held.call.wide

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors that it holds; most of them are the caller's own queries and keys."""
        return self._held.nbytes

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of each row, the sink included: (..., H, Tq)."""
        return self._shaped(self._of_heads("lse"))

    def _of_heads(self, name: str) -> Tensor:
        if self._averaged:
            raise ValueError(f"{name} belongs to single heads: ask it before mean('heads')")
        return self._held.lse

    def _shaped(self, found: Tensor) -> Tensor:
        """(B, H, ...) in the shape of these weights."""
        return found.reshape(*self._lead, *found.shape[2:])

    def __repr__(self) -> str:
        mask = f", {self._held.call.mask!r}" if self._held.call.mask is not None else ""
        mean = ", mean over heads" if self._averaged else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"Weights{self.shape}{mask}{mean}, {dtype} on {self.device}, holds {self.nbytes:,} bytes"

    def __getitem__(self, index: Any) -> Weights | Tensor:
        lead, named = self._split_index(index)
        chosen = self._at(lead) if any(item != slice(None) for item in lead) else self
        return chosen._entries(*named) if named else chosen

    def _split_index(self, index: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What the index says of batch and heads, and of queries and keys: nothing where it does not name them."""
        index = index if isinstance(index, tuple) else (index,)
        axes, leading = len(self.shape), len(self._lead)
        dots = [place for place, item in enumerate(index) if item is Ellipsis]
        if len(dots) > 1 or len(index) - len(dots) > axes:
            raise IndexError(f"weights have the axes {self.shape}, but the index was {index!r}")
        place = dots[0] if dots else len(index)
        before, after = index[:place], index[place + 1 :]
        whole = (*before, *(slice(None),) * (axes - len(before) - len(after)), *after)
        named = len(before) > leading or len(after) > 0
        return whole[:leading], whole[leading:] if named else ()

    def _at(self, lead: tuple[Any, ...]) -> Weights:
        """The matrix of some sequences and heads, again lazy."""
        for item, size in zip(lead, self._lead, strict=True):
            if isinstance(item, bool) or not isinstance(item, int | slice):
                raise TypeError(f"batch and head axes take whole numbers and slices, but got {item!r}")
            if isinstance(item, int) and not -size <= item < size:
                raise IndexError(f"index {item} is out of range for an axis of size {size} of weights {self.shape}")
        call = self._call
        batches = torch.arange(call.q.shape[0]).view(self._batch)[lead[: len(self._batch)]]
        head = lead[-1] if self._headed else slice(None)
        heads = slice(head % call.q.shape[1], head % call.q.shape[1] + 1) if isinstance(head, int) else head
        some = run_of(batches.flatten())
        part = call.part(some, heads)
        headed = self._headed and isinstance(head, slice)
        return Weights(part, self._held.lse[some][:, heads], tuple(batches.shape), headed, self._averaged)

    def _entries(self, query: Any, key: Any) -> Tensor:
        call = self._call
        rows = axis_of(query, call.q.shape[2], "query", self.device)
        columns = axis_of(key, call.k.shape[2], "key", self.device)
        found = entries(call, self._held.lse, rows.index, columns.index, self._averaged)
        dropped = [axis for axis, gone in ((-2, rows.dropped), (-1, columns.dropped)) if gone]
        return self._shaped(found).squeeze(dropped) if dropped else self._shaped(found)

    def dense(self, limit: int = 2**30) -> Tensor:
        """All of the matrix; above `limit` bytes an error that says its size."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        if count > limit:
            raise ValueError(
                f"the dense matrix {self.shape} takes {count / 2**30:.2f} GiB, above the limit of {limit / 2**30:.2f} GiB:"
                " ask for slices or statistics, or pass a larger limit="
            )
        return self._entries(slice(None), slice(None))

    def mean(self, over: str) -> Weights:
        """The average over the heads, again lazy: `weights.mean("heads")`."""
        if over != "heads":
            raise ValueError(f"weights can be averaged over 'heads', but got {over!r}")
        if not self._headed:
            raise ValueError(f"weights {self.shape} have no heads to average")
        return Weights(self._call, self._held.lse, self._batch, headed=False, averaged=True)

    def __matmul__(self, x: Tensor) -> Tensor:
        return products.forward(self._call, self._lead, x, self._averaged)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        return (self.T @ x.mT).mT if x.dim() > 1 else self.T @ x

    @property
    def T(self) -> Transposed:  # noqa: N802
        return Transposed(self)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Lets `x @ weights` and `torch.matmul` reach the lazy products."""
        if function in {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__} and len(args) == 2:
            left, right = args
            return left @ right if isinstance(left, Weights) else right.__rmatmul__(left)
        if function is torch.Tensor.__rmatmul__:
            return args[1] @ args[0]
        raise TypeError(f"{getattr(function, '__name__', function)} needs a tensor: slice the weights or use dense()")

    def _measured(self, wanted: Wanted) -> dict[str, Tensor]:
        return statistics.measure(self._call, self._held.lse, wanted, self._averaged)

    def top(self, k: int) -> Top:
        """The k heaviest keys of each query, heaviest first, exact ties to the lower key; (..., Tq, k) each."""
        keys = self.shape[-1]
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= keys:
            raise ValueError(f"top takes a whole number from 1 to the {keys} keys, but got {k!r}")
        found = self._measured(Wanted(top=k))
        return Top(self._shaped(found["top_values"]), self._shaped(found["top_keys"]))

    def entropy(self) -> Tensor:
        """Nats per query, -Σ w ln w over the keys: 0 for a query that looks at one key only; (..., Tq)."""
        if self._call.needs_grad:
            return self._shaped(statistics.entropy(self._call, self._averaged))
        return self._shaped(self._measured(Wanted(entropy=True))["entropy"])

    def received(self, queries: Any = None, per: str = "query_head") -> Tensor:
        """The attention that each key gets, the column sums: (..., Tk).

        `queries` counts only some queries (a slice, a list of indices); per="kv_head" adds up heads that share keys.
        """
        if per not in {"query_head", "kv_head"}:
            raise ValueError(f"received takes per='query_head' or per='kv_head', but got {per!r}")
        found = self._shaped(self._received(queries))
        if per == "query_head":
            return found
        if not self._headed:
            raise ValueError(f"weights {self.shape} have no heads to add up: per='kv_head' needs (..., H, Tq, Tk)")
        return found.unflatten(-2, (-1, self._call.group)).sum(-2)

    def _received(self, queries: Any) -> Tensor:
        call = self._call
        if queries is None and not call.needs_grad:
            return self._measured(Wanted(received=True))["received"]
        counted = torch.ones(call.q.shape[2], 1, device=self.device, dtype=self.dtype)
        if queries is not None:
            chosen = axis_of(queries, call.q.shape[2], "query", self.device).index
            counted = torch.zeros_like(counted).index_fill(0, chosen, 1.0)
        return statistics.transposed(call, counted, self._averaged).squeeze(-1)

    def picture(self, rows: int, columns: int, reduce: str = "mean") -> Tensor:
        """The matrix in rows x columns blocks with edges floor(r T / rows), averaged or their maximum.

        Masked entries count as 0. (..., rows, columns)
        """
        return self._shaped(self._measured(Wanted(picture=self._picture_size(rows, columns, reduce)))["picture"])

    def _picture_size(self, rows: int, columns: int, reduce: str) -> tuple[int, int, str]:
        queries, keys = self.shape[-2:]
        if reduce not in {"mean", "max"}:
            raise ValueError(f"picture takes reduce='mean' or reduce='max', but got {reduce!r}")
        if not (isinstance(rows, int) and isinstance(columns, int) and 1 <= rows <= queries and 1 <= columns <= keys):
            raise ValueError(
                f"a picture of {queries} queries and {keys} keys takes 1 to {queries} rows and 1 to {keys} columns,"
                f" but got {rows!r} x {columns!r}"
            )
        return rows, columns, reduce

    def grouped(self, query_groups: Any, key_groups: Any) -> Tensor:
        """The mass between groups of tokens: summed over the keys, averaged over the queries of each group.

        Groups are contiguous runs: (start, stop) pairs, or one number per token (the word of each sub-word).

        >>> weights.grouped([(0, 2), (2, 3)], [(0, 2), (2, 3)]).shape        # two words of three sub-words
        torch.Size([2, 4, 2, 2])
        """
        queries, keys = self.shape[-2:]
        rows = group_ids(query_groups, queries, "query_groups", self.device)
        columns = group_ids(key_groups, keys, "key_groups", self.device)
        return self._shaped(statistics.grouped(self._call, rows, columns, self._averaged))

    def distance(self) -> Tensor:
        """How far each query looks on average, Σ w |key position - query position|: (..., Tq)."""
        if self._call.needs_grad:
            return self._shaped(statistics.distance(self._call, self._averaged))
        return self._shaped(self._measured(Wanted(distance=True))["distance"])

    def largest_logit(self) -> Tensor:
        """The largest visible score of each head, -inf where nothing is visible: (..., H)."""
        self._of_heads("largest_logit")
        return self._shaped(self._measured(Wanted(largest=True))["largest"])

    def sink_mass(self) -> Tensor:
        """The share of each query's attention that the sink takes, 0 without a sink: (..., Tq)."""
        lse = self._of_heads("sink_mass")
        sink = self._call.sink
        mass = torch.zeros_like(lse) if sink is None else torch.exp(sink.to(lse.dtype).view(1, -1, 1) - lse)
        return self._shaped(mass)

    def summary(self, top: int = 8, picture: int = 256) -> Summary:
        """Every statistic in one pass; `top` and `picture` are cut to the size of the matrix, 0 leaves them out."""
        queries, keys = self.shape[-2:]
        size = (min(picture, queries), min(picture, keys), "mean") if picture and queries and keys else None
        k = min(top, keys)
        if self._averaged:
            raise ValueError("summary belongs to single heads: ask it before mean('heads')")
        wanted = Wanted(entropy=True, received=True, picture=size, top=k, largest=True, distance=True)
        with torch.no_grad():
            found = {name: self._shaped(tensor) for name, tensor in self._measured(wanted).items()}
            heaviest = Top(found["top_values"], found["top_keys"]) if k else None
            return Summary(
                entropy=found["entropy"],
                received=found["received"],
                distance=found["distance"],
                lse=self.lse.detach(),
                sink_mass=self.sink_mass(),
                largest_logit=found["largest"],
                top=heaviest,
                picture=found.get("picture"),
            )

    def to(self, device: torch.device | str) -> Weights:
        """The same weights with everything they hold on another device."""
        call, device = self._call, torch.device(device)
        moved = saving.mapped(held_of(call), lambda tensor: tensor.to(device))
        return self._rebuilt(moved, self._held.lse.to(device))

    def save(self, path: str | os.PathLike[str]) -> None:
        """One safetensors file with everything the weights need; `Weights.load(path)` reads it."""
        shape = {"batch": self._batch, "headed": self._headed, "averaged": self._averaged}
        saving.save(path, held_of(self._call) | shape | {"lse": self._held.lse})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Weights:
        """Weights from a file that `save` wrote; a damaged or foreign one is refused, and nothing in it is executed."""
        found = saving.load(path)
        try:
            return cls(rebuilt(found), found["lse"], found["batch"], found["headed"], found["averaged"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{os.fspath(path)} is not a whole file of foci weights: {error!r}") from error

    def _rebuilt(self, found: dict[str, Any], lse: Tensor) -> Weights:
        return Weights(rebuilt(found), lse, self._batch, self._headed, self._averaged)


class Transposed:
    """Wᵀ, lazy: `weights.T @ x` gives each key the sum of the x of those who look at it."""

    def __init__(self, weights: Weights) -> None:
        self.T = weights
        self.shape = (*weights.shape[:-2], weights.shape[-1], weights.shape[-2])

    def __matmul__(self, x: Tensor) -> Tensor:
        weights = self.T
        return products.transposed(weights._call, weights._lead, x, weights._averaged)

    def __repr__(self) -> str:
        return f"Transposed {self.T!r}"


KEPT = ("q", "k", "score", "mask", "bias", "sink", "positions", "batch_ids", "head_ids")


def held_of(call: Call) -> dict[str, Any]:
    """What makes the matrix, by name."""
    extent = call.extent
    sizes = {"extent": (extent.batch, extent.heads, extent.queries, extent.keys)}
    return {name: getattr(call, name) for name in KEPT} | sizes


def rebuilt(found: dict[str, Any]) -> Call:
    """The call that `held_of` described."""
    batch, heads, queries, keys = found["extent"]
    made_of = {name: found[name] for name in KEPT}
    return Call(v=found["k"], extent=Extent(tuple(batch), heads, queries, keys, found["q"].device), **made_of)


def run_of(index: Tensor) -> slice:
    """The indices as a slice: what basic indexing of a batch leaves is evenly spaced, or is copied as such."""
    places = index.tolist()
    if not places:
        return slice(0, 0)
    step = places[1] - places[0] if len(places) > 1 else 1
    if places != list(range(places[0], places[-1] + 1, max(step, 1))):
        raise IndexError("batch axes of one index must be evenly spaced: index them one after the other")
    return slice(places[0], places[-1] + 1, step)

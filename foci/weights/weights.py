"""Weights: the attention matrix W as a lazy operator.

It holds the queries, the keys, the log-sum-exp and what made the scores; every question is answered exactly from these,
and the matrix is never built unless somebody asks for all of it.

B batch, H heads, G key heads, Tq queries, Tk keys.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foci import statistics
from foci.arguments import Call
from foci.runtime import safetensors_file
from foci.statistics import Request
from foci.statistics.streaming import finite_lse
from foci.weights import file, products
from foci.weights.grouping import assign_groups
from foci.weights.indexing import parse_axis_index, parse_leading_index, split_index, to_slice
from foci.weights.slices import compute_entries
from foci.weights.summary import Summary, Top
from foci.weights.tensors import TrackedTensors, drop_values, is_inference_tensor, select_matrix_fields


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

    Rows sum to 1, to 0 where a query sees nothing, and with a sink to 1 minus what the sink takes. These are the
    weights before dropout, of every head. Where gradients are on, slices, products, `entropy`, `received`, `grouped`
    and `distance` are differentiable.
    """

    def __init__(
        self, call: Call, lse: Tensor, batch: tuple[int, ...], headed: bool, averaged: bool = False, group: int = 0
    ) -> None:
        self.tensors = TrackedTensors(call, lse)
        self.batch_shape, self._headed, self._averaged = batch, headed, averaged
        self._lead = (*batch, call.q.shape[1]) if headed else batch
        self.shape: tuple[int, ...] = (*self._lead, call.q.shape[2], call.k.shape[2])
        # How many heads shared keys in the call: a part of its heads cannot tell.
        self.group = group or call.group

    @classmethod
    def from_call(cls, call: Call, lse: Tensor) -> Weights:
        """The weights of a call, with the shape that its caller used."""
        return cls(drop_values(call), lse, call.sizes.batch, call.sizes.heads is not None)

    @property
    def call(self) -> Call:
        """The call behind the weights, refused when its tensors were changed since."""
        self.tensors.check()
        return self.tensors.call

    @property
    def device(self) -> torch.device:
        return self.tensors.lse.device

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors.call.softmax_dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors that it holds; most of them are the caller's own queries and keys."""
        return self.tensors.nbytes

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of each row, the sink included: (..., H, Tq)."""
        lse = self._of_heads("lse")
        return copy_if_inference(lse).reshape(self.shape[:-1])

    def _of_heads(self, name: str) -> Tensor:
        if self._averaged:
            raise ValueError(f"{name} belongs to single heads: ask it before mean('heads')")
        self.tensors.check()
        return self.tensors.lse

    def _shaped(self, found: Tensor) -> Tensor:
        """(B, H, ...) in the shape of these weights."""
        if self._headed and len(self.batch_shape) == 1:
            return found
        return found.reshape((*self._lead, *found.shape[2:]))

    def __repr__(self) -> str:
        mask = f", {self.tensors.call.mask!r}" if self.tensors.call.mask is not None else ""
        mean = ", mean over heads" if self._averaged else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"Weights{self.shape}{mask}{mean}, {dtype} on {self.device}, holds {self.nbytes:,} bytes"

    def __getitem__(self, index: Any) -> Weights | Tensor:
        lead, named = split_index(index, self.shape)
        chosen = self if all(isinstance(item, slice) and item == slice(None) for item in lead) else self._at(lead)
        return chosen._entries(*named) if named else chosen

    def _at(self, lead: tuple[Any, ...]) -> Weights:
        """The matrix of some sequences and heads, again lazy."""
        lead = tuple(parse_leading_index(item, size) for item, size in zip(lead, self._lead, strict=True))
        call = self.call
        batches = torch.arange(call.q.shape[0]).view(self.batch_shape)[lead[: len(self.batch_shape)]]
        head = lead[-1] if self._headed else slice(None)
        heads = slice(head, head + 1) if isinstance(head, int) else head
        some = to_slice(batches)
        headed = self._headed and isinstance(head, slice)
        lse = self.tensors.lse[some][:, heads]
        return Weights(call.select(some, heads), lse, tuple(batches.shape), headed, self._averaged, self.group)

    def _entries(self, query: Any, key: Any) -> Tensor:
        call = self.call
        rows = parse_axis_index(query, call.q.shape[2], "query", self.device)
        columns = parse_axis_index(key, call.k.shape[2], "key", self.device)
        if rows.listed and columns.listed:
            # A tensor would pair the two lists, which reads like asking for all their combinations.
            raise IndexError(f"weights take a list on one axis, queries or keys, but got {query!r} and {key!r}")
        found = self._shaped(compute_entries(call, self.tensors.lse, rows.index, columns.index, self._averaged))
        return found.squeeze([axis for axis, gone in ((-2, rows.dropped), (-1, columns.dropped)) if gone])

    def dense(self, limit: int = 2**30) -> Tensor:
        """All of the matrix; above `limit` bytes an error that says its size."""
        size = math.prod(self.shape) * self.dtype.itemsize
        if not isinstance(limit, int | float):
            raise TypeError(f"dense takes limit= in bytes, such as 2**30, but got {limit!r}")
        if size > limit:
            raise ValueError(
                f"the dense matrix {self.shape} takes {format_bytes(size)}, above the limit of {format_bytes(limit)}:"
                " ask for slices or statistics, or pass a larger limit="
            )
        return self._entries(slice(None), slice(None))

    def mean(self, over: str) -> Weights:
        """The average over the heads, again lazy: `weights.mean("heads")`."""
        if over != "heads":
            raise ValueError(f"weights can be averaged over 'heads', but got {over!r}")
        if not self._headed or not self._lead[-1]:
            raise ValueError(f"mean('heads') takes weights with heads, (..., H, Tq, Tk), but these are {self.shape}")
        return Weights(self.call, self.tensors.lse, self.batch_shape, False, True, self.group)

    def __matmul__(self, x: Tensor) -> Tensor:
        return products.multiply(self.call, self._lead, x, self._averaged)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        found = products.multiply_transposed(self.call, self._lead, transpose_operand(x), self._averaged, "x @ W")
        return found.mT if x.dim() > 1 else found

    @property
    def T(self) -> Transposed:  # noqa: N802
        return Transposed(self)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Lets `x @ weights` and `torch.matmul` reach the lazy products."""
        return dispatch_product(function, args, kwargs)

    def _measured(self, wanted: Request, call: Call | None = None) -> dict[str, Tensor]:
        """What is wanted of the call, which is checked here unless it was."""
        return statistics.compute_statistics(call or self.call, self.tensors.lse, wanted, self._averaged)

    def top(self, k: int) -> Top:
        """The k heaviest keys of each query, heaviest first, exact ties to the lower key; (..., Tq, k) each."""
        keys = self.shape[-1]
        if not is_positive_int(k) or k > keys:
            raise ValueError(f"top takes a whole number from 1 to the {keys} keys, but got {k!r}")
        found = self._measured(Request(top=k))
        return Top(self._shaped(found["top_values"]), self._shaped(found["top_keys"]))

    def entropy(self) -> Tensor:
        """Nats per query, -Σ w ln w over the keys: 0 for a query that looks at one key only; (..., Tq)."""
        call = self.call
        if call.needs_grad:
            return self._shaped(statistics.compute_entropy(call, self._averaged))
        return self._shaped(self._measured(Request(entropy=True), call)["entropy"])

    def received(self, queries: Any = None, per: str = "query_head") -> Tensor:
        """The attention that each key gets, the column sums: (..., Tk).

        `queries` counts only some queries (a slice, a list of indices), each once; per="kv_head" adds up heads that
        share keys.
        """
        if per not in {"query_head", "kv_head"}:
            raise ValueError(f"received takes per='query_head' or per='kv_head', but got {per!r}")
        if per == "query_head":
            return self._shaped(self._received(queries))
        if not self._headed:
            raise ValueError(f"per='kv_head' takes weights with heads, (..., H, Tq, Tk), but these are {self.shape}")
        found = self._received(queries)
        shared, place = (self.call.head_index.flatten() // self.group).unique_consecutive(return_inverse=True)
        sums = found.new_zeros(found.shape[0], shared.numel(), found.shape[2]).index_add(1, place, found)
        return sums.reshape(*self.batch_shape, *sums.shape[1:])

    def _received(self, queries: Any) -> Tensor:
        call = self.call
        if queries is None and not call.needs_grad:
            return self._measured(Request(received=True), call)["received"]
        counted = torch.ones(call.q.shape[2], 1, device=self.device, dtype=self.dtype)
        if queries is not None:
            chosen = parse_axis_index(queries, call.q.shape[2], "query", self.device).index
            counted = torch.zeros_like(counted).index_fill(0, chosen, 1.0)
        return statistics.compute_transposed_product(call, counted, self._averaged).squeeze(-1)

    def picture(self, rows: int, columns: int, reduce: str = "mean") -> Tensor:
        """The matrix in rows x columns blocks with edges floor(r T / rows), averaged or their maximum.

        Masked entries count as 0. (..., rows, columns)
        """
        return self._shaped(self._measured(Request(picture=self._picture_size(rows, columns, reduce)))["picture"])

    def _picture_size(self, rows: int, columns: int, reduce: str) -> tuple[int, int, str]:
        queries, keys = self.shape[-2:]
        if reduce not in {"mean", "max"}:
            raise ValueError(f"picture takes reduce='mean' or reduce='max', but got {reduce!r}")
        if not (is_positive_int(rows) and is_positive_int(columns) and rows <= queries and columns <= keys):
            raise ValueError(
                f"a picture of {queries} queries and {keys} keys takes 1 to {queries} rows and 1 to {keys} columns,"
                f" but got {rows!r} x {columns!r}"
            )
        return rows, columns, reduce

    def grouped(self, query_groups: Any, key_groups: Any) -> Tensor:
        """The mass between groups of tokens: summed over the keys, averaged over the queries of each group.

        Groups are contiguous runs: (start, stop) pairs, or one number per token (the word of each sub-word, None for a
        token that belongs to none). Tokens in no group are left out.

        >>> _, weights = foci.attention(*torch.randn(3, 2, 4, 3, 8), return_weights=True)
        >>> weights.grouped([(0, 2), (2, 3)], [(0, 2), (2, 3)]).shape        # two words of three sub-words
        torch.Size([2, 4, 2, 2])
        """
        queries, keys = self.shape[-2:]
        rows = assign_groups(query_groups, queries, "query_groups", self.device)
        columns = assign_groups(key_groups, keys, "key_groups", self.device)
        return self._shaped(statistics.compute_group_mass(self.call, rows, columns, self._averaged))

    def distance(self) -> Tensor:
        """How far each query looks on average, Σ w |key position - query position|: (..., Tq)."""
        call = self.call
        if call.needs_grad:
            return self._shaped(statistics.compute_distance(call, self._averaged))
        return self._shaped(self._measured(Request(distance=True), call)["distance"])

    def largest_logit(self) -> Tensor:
        """The largest visible score of each head, -inf where nothing is visible: (..., H)."""
        self._of_heads("largest_logit")
        return self._shaped(self._measured(Request(largest=True))["largest"])

    def sink_mass(self) -> Tensor:
        """The share of each query's attention that the sink takes, 0 without a sink: (..., Tq)."""
        return self._shaped(compute_sink_mass(self._of_heads("sink_mass"), self.tensors.call.sink))

    def summary(self, top: int = 8, picture: int = 256, largest_logit: bool = True, distance: bool = True) -> Summary:
        """Every statistic in one pass; `top` and `picture` are cut to the size of the matrix, 0 leaves them out.

        The pass is shorter by what is left out.
        """
        for name, asked in (("top", top), ("picture", picture)):
            if asked != 0 and not is_positive_int(asked):
                raise ValueError(f"summary takes a whole number, 0 or more, for {name}, but got {asked!r}")
        with torch.no_grad():
            found = self.summary_tensors(top, picture, largest_logit, distance)
            return Summary(
                entropy=found["entropy"],
                received=found["received"],
                distance=found.get("distance"),
                lse=found["lse"],
                # Checked with the rest.
                sink_mass=self._shaped(compute_sink_mass(self.tensors.lse, self.tensors.call.sink)),
                largest_logit=found.get("largest_logit"),
                top=Top(found["top_values"], found["top_keys"]) if "top_keys" in found else None,
                picture=found.get("picture"),
            )

    def summary_tensors(
        self, top: int, picture: int, largest_logit: bool, distance: bool = True, narrow: bool = False
    ) -> dict[str, Tensor]:
        """What a summary is made of, by name, without the sinks' mass; narrow: the heaviest keys in int32."""
        if self._averaged:
            raise ValueError("summary belongs to single heads: ask it before mean('heads')")
        queries, keys = self.shape[-2:]
        size = (min(picture, queries), min(picture, keys), "mean") if picture and queries and keys else None
        wanted = Request(True, True, size, min(top, keys), largest_logit, distance, narrow)
        found = {name: self._shaped(tensor) for name, tensor in self._measured(wanted).items()}
        if largest_logit:
            found["largest_logit"] = found.pop("largest")
        # Checked with the rest.
        found["lse"] = self._shaped(copy_if_inference(self.tensors.lse).detach())
        return found

    def to(self, device: torch.device | str) -> Weights:
        """The same weights with everything they hold on another device."""
        call, device = self.call, torch.device(device)
        moved = safetensors_file.map_tensors(select_matrix_fields(call), lambda tensor: tensor.to(device))
        call = replace(call, **moved, v=moved["k"], sizes=call.sizes._replace(device=moved["q"].device))
        return Weights(call, self.tensors.lse.to(device), self.batch_shape, self._headed, self._averaged, self.group)

    def save(self, path: str | os.PathLike[str]) -> None:
        """One safetensors file with everything the weights need; `Weights.load(path)` reads it."""
        safetensors_file.save_parts(path, self.parts())

    def parts(self) -> dict[str, Any]:
        """Everything the weights need, by name: what a file of them holds."""
        form = {"batch": self.batch_shape, "headed": self._headed, "averaged": self._averaged, "group": self.group}
        sizes = tuple(self.call.sizes)[:4]
        return select_matrix_fields(self.call) | form | {"lse": self.tensors.lse, "sizes": sizes}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Weights:
        """Weights from a file that `save` wrote; a damaged or foreign one is refused, and nothing in it is executed."""
        return cls(*file.load_weights(path))

    @classmethod
    def from_parts(cls, parts: dict[str, Any]) -> Weights:
        """Weights from what `parts` gave, checked; raises ValueError where it does not fit together."""
        return cls(*file.check_parts(parts))


class Transposed:
    """Wᵀ, lazy: `weights.T @ x` gives each key the sum of the x of those who look at it."""

    def __init__(self, weights: Weights) -> None:
        self.T = weights
        self.shape = (*weights.shape[:-2], weights.shape[-1], weights.shape[-2])

    def __matmul__(self, x: Tensor) -> Tensor:
        weights = self.T
        return products.multiply_transposed(weights.call, weights._lead, x, weights._averaged)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        weights = self.T
        found = products.multiply(weights.call, weights._lead, transpose_operand(x), weights._averaged, "x @ W.T")
        return found.mT if x.dim() > 1 else found

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch_product(function, args, kwargs)

    def __repr__(self) -> str:
        return f"Transposed {self.T!r}"


def dispatch_product(function: Any, args: Any, kwargs: Any) -> Any:
    """A product that PyTorch was asked for, as a lazy one; anything else needs a tensor."""
    if function in {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__} and len(args) == 2 and not kwargs:
        left, right = args
        return left.__matmul__(right) if isinstance(left, Weights | Transposed) else right.__rmatmul__(left)
    if function is torch.Tensor.__rmatmul__:
        return args[1] @ args[0]
    name = getattr(function, "__name__", function)
    raise TypeError(f"{name} takes tensors, but got lazy weights: slice them, ask a product, or use dense()")


def transpose_operand(x: Any) -> Any:
    """A matrix with its last two axes exchanged; a vector as it is."""
    return x.mT if isinstance(x, Tensor) and x.dim() > 1 else x


def copy_if_inference(lse: Tensor) -> Tensor:
    """For a caller: in inference mode a change to it could not be seen, so it is a copy."""
    return lse.clone() if is_inference_tensor(lse) else lse


def compute_sink_mass(lse: Tensor, sink: Tensor | None) -> Tensor:
    """(B, H, Tq), the share that the sink takes of each query's attention."""
    return torch.zeros_like(lse) if sink is None else torch.exp(sink.to(lse.dtype).view(1, -1, 1) - finite_lse(lse))


def is_positive_int(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def format_bytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size:,} bytes"

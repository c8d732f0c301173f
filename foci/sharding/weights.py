"""`ShardedWeights`: the attention matrix of DTensors as a lazy operator.

Every process holds the rows of its own queries, with all keys. What is computed for each query is sharded like the
queries; what sums over queries is a partial sum, which is reduced where it is used.

B batch, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from foci.runtime.checks import is_positive_int
from foci.sharding.layout import CallLayout, from_local, redistribute
from foci.sharding.local_call import LocalCall, build_local_call
from foci.statistics.picture import block_edges
from foci.weights import operators
from foci.weights.checks import check_over, check_picture_size
from foci.weights.grouping import assign_groups
from foci.weights.indexing import parse_axis_index, parse_leading_index, split_index
from foci.weights.summary import Summary, Top
from foci.weights.weights import Weights, compute_sink_mass, transpose_operand

# How many rows of a picture of maxima exist at a time.
MAX_PICTURE_ROWS = 64


class ShardedWeights:
    """The attention matrix of DTensors, shape (..., H, Tq, Tk), with the methods of `foci.Weights`.

    `entropy`, `distance`, `top`, `lse` and `sink_mass` are sharded like the queries. `received`, `picture` and
    `grouped` are partial sums, `largest_logit` a partial maximum: `.full_tensor()` or the next operation reduces them.
    `weights[...]` gives entries as a DTensor; `full()` gives the whole matrix as plain `foci.Weights`.
    """

    def __init__(
        self, layout: CallLayout, call: LocalCall, local: Weights, query: DTensor, key: DTensor, options: dict[str, Any]
    ) -> None:
        self._layout, self._call, self._local = layout, call, local
        self._query, self._key, self._options = query, key, options

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self._lead, self._layout.queries, self._layout.keys)

    @property
    def _lead(self) -> tuple[int, ...]:
        return self._layout.batch if self._local.is_averaged else self._layout.lead

    @property
    def device_mesh(self) -> Any:
        return self._layout.mesh

    @property
    def dtype(self) -> torch.dtype:
        return self._local.dtype

    @property
    def device(self) -> torch.device:
        return self._local.device

    @property
    def is_averaged(self) -> bool:
        """Whether this is the result of `mean("heads")`."""
        return self._local.is_averaged

    def to_local(self) -> Weights:
        """The rows of this process as plain weights (B, H, Tq, Tk), with all keys."""
        return self._local

    def __repr__(self) -> str:
        names = {self._layout.head_axis: "heads", self._layout.query_axis: "queries"}
        axes = [None if axis is None else names.get(axis, "batch") for axis in self._layout.axes]
        mesh = ", ".join(
            f"{axis or 'nothing'} by {size}" for axis, size in zip(axes, self._layout.mesh.shape, strict=True)
        )
        return f"ShardedWeights{self.shape}, {mesh}, this process: {self._local!r}"

    def _wrap(self, local: Tensor, query_axis: int | None, reduce: str = "sum") -> DTensor:
        """A DTensor from a statistic (B, H, ...) of this process.

        `query_axis` is the axis of the queries after batch and heads; None: the statistic reduces the queries.
        """
        lead, local = len(self._lead), self._restore(local)
        shape = [*self._lead, *local.shape[lead:]]
        if query_axis is not None:
            shape[lead + query_axis] = self._layout.queries
        placements: list[Placement] = []
        for axis in self._layout.axes:
            if axis is None:
                placements.append(Replicate())
            elif axis != self._layout.query_axis:
                placements.append(Shard(axis))
            else:
                placements.append(Partial(reduce) if query_axis is None else Shard(lead + query_axis))
        return from_local(local, self._layout.mesh, placements, tuple(shape))

    def _restore(self, local: Tensor) -> Tensor:
        """(B, H, ...) with the leading axes of these weights."""
        return local.reshape(*self._call.lead[: len(self._lead)], *local.shape[2:])

    def _with_head_axis(self, local: Tensor) -> Tensor:
        """(B, H, ...) from a result of the local weights, which has no heads after mean("heads")."""
        return local.unsqueeze(1) if self.is_averaged else local

    @property
    def lse(self) -> DTensor:
        """The log-sum-exp of each row, the sink included: (..., H, Tq), sharded like the queries."""
        return self._wrap(self._local._per_head_lse("lse"), 0)

    def entropy(self) -> DTensor:
        """Entropy in nats of each query, sharded like the queries: (..., Tq)."""
        return self._wrap(self._with_head_axis(self._local.entropy()), 0)

    def distance(self) -> DTensor:
        """The mean distance of each query to its keys, sharded like the queries: (..., Tq)."""
        local = self._call.build_weights(self._local.tensors.lse, positions=True)
        local = local.mean("heads") if self._local.is_averaged else local
        return self._wrap(self._with_head_axis(local.distance()), 0)

    def sink_mass(self) -> DTensor:
        """The share of each query's attention that goes to the sink, sharded like the queries: (..., Tq)."""
        lse = self._local._per_head_lse("sink_mass")
        return self._wrap(compute_sink_mass(lse, self._local.tensors.call.sink), 0)

    def top(self, k: int) -> Top:
        """The k heaviest keys of each query, sharded like the queries: (..., Tq, k) each."""
        return Top(*(self._wrap(self._with_head_axis(each), 0) for each in self._local.top(k)))

    def largest_logit(self) -> DTensor:
        """The largest visible logit of each head, a partial maximum: (..., H)."""
        return self._wrap(self._local.largest_logit(), None, "max")

    def received(self, queries: Any = None, per: str = "query_head") -> DTensor:
        """The attention that each key receives, a partial sum: (..., Tk). Arguments as in `Weights.received`."""
        if per != "query_head":
            raise ValueError(
                f"per must be 'query_head' for sharded weights, got {per!r}: sum the heads of full_tensor()"
            )
        if queries is not None:
            queries = self._own_queries(parse_axis_index(queries, self._layout.queries, "query", self.device).index)[1]
        return self._wrap(self._with_head_axis(self._local.received(queries)), None)

    def _own_queries(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Where an index of queries names some of this process, and their numbers among its own."""
        return find_owned(index, self._call.part.queries)

    def grouped(self, query_groups: Any, key_groups: Any) -> DTensor:
        """The attention between groups of tokens, a partial sum. Arguments as in `Weights.grouped`."""
        rows = assign_groups(query_groups, self._layout.queries, "query_groups", self.device)
        columns = assign_groups(key_groups, self._layout.keys, "key_groups", self.device)
        return self._wrap(self._sum_groups(rows, columns), None)

    def _sum_groups(self, rows: tuple[Tensor, int], columns: tuple[Tensor, int]) -> Tensor:
        """The share of this process in the mass between groups, summed over keys and averaged over all queries."""
        numbers, count = rows
        local, own = self._local, numbers[self._call.part.queries]
        # Numbered by those that this process has; tokens in no group have the highest number, as before.
        present, index = own.unique(return_inverse=True)
        present = present[present < count]
        lead = (self._local.shape[0], 1 if self.is_averaged else self._local.shape[1])
        if not present.numel():
            return torch.zeros(*lead, count, columns[1], dtype=self.dtype, device=self.device)
        rows = (index, present.numel())
        mass = operators.compute_group_mass(local.call, local.tensors.lse, rows, columns, local.is_averaged)
        shares = (
            torch.bincount(own, minlength=count + 1)[present] / torch.bincount(numbers, minlength=count + 1)[present]
        )
        return scatter_entries(mass * shares.to(mass.dtype).unsqueeze(-1), 2, present, count)

    def picture(self, rows: int, columns: int, reduce: str = "mean") -> DTensor:
        """The matrix reduced to rows x columns blocks, a partial sum or maximum. Arguments as in `Weights.picture`."""
        queries, keys = self._layout.queries, self._layout.keys
        check_picture_size(rows, columns, reduce, queries, keys)
        if reduce == "max":
            return self._wrap(self._block_maxima(rows, columns), None, "max")
        edges = block_edges(columns, keys, self.device)
        mass = self._sum_groups(
            *(number_blocks(blocks, n, self.device) for blocks, n in ((rows, queries), (columns, keys)))
        )
        return self._wrap(mass / edges.diff().to(mass.dtype), None)

    def _block_maxima(self, rows: int, columns: int) -> Tensor:
        """The largest weight of this process in each block; 0 in blocks without its queries."""
        own, local = self._call.part.queries, self._local
        edges = block_edges(rows, self._layout.queries, torch.device("cpu")).tolist()
        lead = (local.tensors.lse.shape[0], 1 if local.is_averaged else local.tensors.lse.shape[1])
        maxima = torch.zeros(*lead, rows, columns, dtype=self.dtype, device=self.device)
        starts = block_edges(columns, self._layout.keys, self.device)
        block_of_key = torch.bucketize(torch.arange(self._layout.keys, device=self.device), starts, right=True) - 1
        for row in range(rows):
            begin, end = max(edges[row], own.start) - own.start, min(edges[row + 1], own.stop) - own.start
            for start in range(begin, end, MAX_PICTURE_ROWS):
                strip = local[..., start : min(end, start + MAX_PICTURE_ROWS), :]
                assert isinstance(strip, Tensor)
                entries = self._with_head_axis(strip)
                index = block_of_key.expand(*lead, -1)
                maxima[:, :, row].scatter_reduce_(-1, index, entries.detach().amax(-2), "amax")
        return maxima

    def summary(self, top: int = 8, picture: int = 256, largest_logit: bool = True, distance: bool = True) -> Summary:
        """All statistics; arguments as in `Weights.summary`, placements as in the method of each."""
        for name, number in (("top", top), ("picture", picture)):
            if number != 0 and not is_positive_int(number):
                raise ValueError(f"{name} must be an int >= 0, got {number!r}")
        queries, keys = self.shape[-2:]
        size = (min(picture, queries), min(picture, keys))
        with torch.no_grad():
            return Summary(
                entropy=self.entropy(),
                received=self.received(),
                distance=self.distance() if distance else None,
                lse=self.lse.detach(),
                sink_mass=self.sink_mass(),
                largest_logit=self.largest_logit() if largest_logit else None,
                top=self.top(min(top, keys)) if top and keys else None,
                picture=self.picture(*size) if all(size) else None,
            )

    def mean(self, over: str) -> ShardedWeights:
        """The average over the heads of all processes, again lazy. Sharded heads become sharded queries."""
        check_over(over)
        if self._local.is_averaged or self._layout.heads is None:
            raise ValueError(f"weights must have heads, (..., H, Tq, Tk), for mean('heads'), got {self.shape}")
        layout = self._layout.without({self._layout.head_axis}, self._layout.query_axis)
        return self._rebuild(layout, lambda local: local.mean("heads"))

    def full(self) -> Weights:
        """The whole matrix as plain weights on every process: gathers the queries and keys, not the matrix."""
        layout = self._layout.without(set(range(len(self.shape))))
        weights = self._rebuild(layout, lambda local: local)
        call, local = weights._call, weights._local
        whole = Weights(
            local.call,
            local.tensors.lse,
            layout.batch,
            layout.heads is not None,
            group=call.q.shape[1] // call.k.shape[1],
        )
        return whole.mean("heads") if self._local.is_averaged else whole

    def by_heads(self) -> OwnHeads:
        """Some heads with all of their queries, others on every process. Used by foci.Monitor."""
        axes = self._layout.axes
        head_axis = None if self._layout.heads is None else self._layout.head_axis
        layout = self._layout.without({self._layout.query_axis}, head_axis)
        spread = self._rebuild(layout, lambda local: local)
        # Of processes that would compute the same, the first one counts.
        coordinate = self._layout.mesh.get_coordinate() or [0] * len(axes)
        is_counted = all(axis is not None or place == 0 for axis, place in zip(layout.axes, coordinate, strict=True))
        return OwnHeads(spread._local, spread._call.part.heads, self._layout.heads or 1, is_counted)

    def _rebuild(self, layout: CallLayout, change: Callable[[Weights], Weights]) -> ShardedWeights:
        """The same matrix with other axes sharded."""
        if layout == self._layout and not self._local.is_averaged:
            return ShardedWeights(layout, self._call, change(self._local), self._query, self._key, self._options)
        call = build_local_call(layout, self._query, self._key, self._key, self._options)
        lse = redistribute(self._wrap_lse(), list(layout.placements)).to_local()
        local = call.build_weights(lse.reshape(call.q.shape[:3]))
        return ShardedWeights(layout, call, change(local), self._query, self._key, self._options)

    def _wrap_lse(self) -> DTensor:
        layout = self._layout
        local = self._call.restore_lead(self._local.tensors.lse)
        return from_local(local, layout.mesh, list(layout.placements), (*layout.lead, layout.queries))

    def dense(self, limit: int = 2**30) -> DTensor:
        """The whole matrix, sharded like the queries; raises if the part of a process is larger than `limit` bytes."""
        return self._wrap(self._with_head_axis(self._local.dense(limit)), 0)

    def __getitem__(self, index: Any) -> DTensor:
        """Entries as a DTensor: axes that are taken whole stay sharded, of the others each process adds what it owns.

        An index of batch or heads alone is refused: use `full()[...]`.
        """
        lead, matrix = split_index(index, self.shape)
        if not matrix:
            raise IndexError(
                f"an index of sharded weights must name queries or keys, got {index!r}: use weights.full()[...]"
            )
        columns = parse_axis_index(matrix[1], self._layout.keys, "key", self.device)
        rows = parse_axis_index(matrix[0], self._layout.queries, "query", self.device)
        if rows.is_list and columns.is_list:
            raise IndexError(
                f"only one of the query and key indices must be a list, got {matrix[0]!r} and {matrix[1]!r}"
            )
        local, part = self._local, self._call.part
        places, own = self._own_queries(rows.index)
        found = operators.compute_entries(local.call, local.tensors.lse, own, columns.index, local.is_averaged)
        found = self._restore(found)
        whole = [item == slice(None) for item in (*lead, matrix[0])]
        if not whole[-1]:
            found = scatter_entries(found, -2, places, rows.index.numel())
        dropped = [axis for axis, each in ((-2, rows), (-1, columns)) if each.dropped]
        owned = [*part.batch, part.heads]
        for axis, item in enumerate(lead):
            if whole[axis]:
                continue
            chosen = parse_leading_index(item, self._lead[axis])
            numbers = torch.arange(self._lead[axis], device=self.device)[chosen].flatten()
            places, own = find_owned(numbers, owned[axis])
            found = scatter_entries(found.index_select(axis, own), axis, places, numbers.numel())
            dropped += [] if isinstance(chosen, slice) else [axis - len(lead) - 2]
        return self._wrap_entries(found, whole, sorted(axis + found.dim() for axis in dropped))

    def _wrap_entries(self, found: Tensor, whole: list[bool], dropped: list[int]) -> DTensor:
        """A DTensor from entries (..., R, C) of this process; `whole`: which of the axes but the last stay sharded."""
        shape = list(found.shape)
        full = (*self._lead, self._layout.queries)
        placements: list[Placement] = []
        for axis in self._layout.axes:
            # Without heads, the queries of averaged weights are one axis earlier.
            place = len(self._lead) if axis == self._layout.query_axis else axis
            if place is None:
                placements.append(Replicate())
            elif not whole[place]:
                placements.append(Partial())
            else:
                shape[place] = full[place]
                placements.append(Shard(place - sum(each < place for each in dropped)))
        shape = [size for axis, size in enumerate(shape) if axis not in dropped]
        return from_local(found.squeeze(dropped), self._layout.mesh, placements, tuple(shape))

    def __matmul__(self, x: Tensor) -> DTensor:
        product = self._local @ self._operand(x, self._layout.keys, "W @ x", by_query=False)
        return self._wrap_product(product, x, 0)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        product = self._multiply_transposed(transpose_operand(x), "x @ W")
        return product.mT if x.dim() > 1 else product

    @property
    def T(self) -> ShardedTransposed:  # noqa: N802
        """The transpose of the last two axes, lazy: `weights.T @ x`."""
        return ShardedTransposed(self)

    mT = T  # noqa: N815

    def _multiply_transposed(self, x: Tensor, name: str = "W.T @ x") -> DTensor:
        product = self._local.T @ self._operand(x, self._layout.queries, name, by_query=True)
        return self._wrap_product(product, x, None)

    def _wrap_product(self, product: Tensor, x: Tensor, query_axis: int | None) -> DTensor:
        product = self._with_head_axis(product)
        return self._wrap(product.squeeze(-1) if x.dim() == 1 else product, query_axis)

    def _operand(self, x: Any, length: int, name: str, by_query: bool) -> Tensor:
        """What this process needs of x (..., T, E), expanded to (B, H, T, E); plain tensors are the same everywhere."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"x must be a float tensor in {name}, got {type(x).__name__}")
        mesh, axes = self._layout.mesh, self._layout.axes
        if not isinstance(x, DTensor):
            x = from_local(x, mesh, [Replicate()] * mesh.ndim, tuple(x.shape))
        x = x.unsqueeze(-1) if x.dim() == 1 else x
        if x.shape[-2] != length:
            raise ValueError(f"x must have the shape (..., {length}, E) in {name}, got {tuple(x.shape)}")
        lead, missing = self._lead, len(self._lead) + 2 - x.dim()
        if not self.is_averaged and x.dim() > 2 and x.shape[-3] == self._layout.kv_heads < (self._layout.heads or 1):
            x = x.repeat_interleave(lead[-1] // self._layout.kv_heads, -3)
        placements: list[Placement] = []
        for axis in axes:
            place = None if axis is None else len(lead) if axis == self._layout.query_axis else axis
            is_sharded = (
                place is not None
                and place >= missing
                and (by_query if place == len(lead) else x.shape[place - missing] > 1)
            )
            placements.append(Shard(place - missing) if is_sharded and place is not None else Replicate())
        gradients = [
            Partial() if axis is not None and placement.is_replicate() else placement
            for axis, placement in zip(axes, placements, strict=True)
        ]
        local = redistribute(x, placements).to_local(grad_placements=gradients)
        own = self._call.lead[: len(lead)]
        folded = (self._local.shape[0],) if self.is_averaged else self._local.shape[:2]
        return local.expand(*own, *local.shape[-2:]).reshape(*folded, *local.shape[-2:])


class OwnHeads(NamedTuple):
    """The weights (B, H, Tq, Tk) of a process's own heads, and which of all heads these are."""

    local: Weights
    part: slice
    heads: int
    is_counted: bool


class ShardedTransposed:
    """Wᵀ, lazy: `weights.T @ x` sums x over the queries of each key, a partial sum."""

    def __init__(self, weights: ShardedWeights) -> None:
        self.T = self.mT = weights
        self.shape = (*weights.shape[:-2], weights.shape[-1], weights.shape[-2])

    def __matmul__(self, x: Tensor) -> DTensor:
        return self.T._multiply_transposed(x)


def find_owned(index: Tensor, own: slice) -> tuple[Tensor, Tensor]:
    """Where an index names numbers of a range, and these numbers, counted from the start of the range."""
    places = ((index >= own.start) & (index < own.stop)).nonzero().flatten()
    return places, index[places] - own.start


def scatter_entries(entries: Tensor, axis: int, places: Tensor, size: int) -> Tensor:
    """Entries at their places along an axis of the given size; 0 elsewhere."""
    shape = list(entries.shape)
    shape[axis] = size
    return entries.new_zeros(shape).index_copy(axis, places, entries)


def number_blocks(blocks: int, length: int, device: torch.device) -> tuple[Tensor, int]:
    """The block of each token in a picture, and the number of blocks."""
    edges = block_edges(blocks, length, device)
    return torch.bucketize(torch.arange(length, device=device), edges, right=True) - 1, blocks

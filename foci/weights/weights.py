"""`Weights`: the attention matrix W as a lazy operator.

It holds the query, the key, the log-sum-exp, score, mask and bias. Every result is computed exactly from these; the
whole matrix is built only by `dense`.

B batch, H heads, G key/value heads, Tq queries, Tk keys.
"""

from __future__ import annotations

import operator
import os
import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from foci.arguments import Call
from foci.masks.base import Mask
from foci.masks.tile import CallSizes
from foci.runtime.checks import PICTURE_SUFFIXES, is_positive_int, parse_suffix, to_numpy
from foci.runtime.spelling import suggest_name
from foci.runtime.tracing import name_reversed_matmul
from foci.scores import Score
from foci.statistics import Request
from foci.statistics.cuda import arguments, entries
from foci.statistics.streaming import finite_lse
from foci.weights import file, operators, parts_file, products
from foci.weights.checks import check_dense_limit, check_k, check_over, check_picture_size
from foci.weights.grouping import assign_groups
from foci.weights.indexing import parse_axis_index, parse_leading_index, select_sequences, split_index, to_range
from foci.weights.slices import compute_diagonal, compute_row, has_plain_rows
from foci.weights.summary import Summary, SummaryParts, Top
from foci.weights.tensors import TrackedTensors, copy_if_inference, drop_values, select_matrix_fields

MATRIX_PRODUCTS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, operator.matmul}


class Weights:
    """The attention matrix, shape (..., H, Tq, Tk), as a lazy operator.

    >>> import torch, foci
    >>> q, k, v = (torch.randn(2, 4, 10, 8) for _ in range(3))
    >>> out, weights = foci.attention(q, k, v, mask=foci.causal, return_weights=True)
    >>> weights
    Weights(2, 4, 10, 10), causal, float32 on cpu, holds 5,440 bytes
    >>> weights[0, 3]                                 # no query or key index: a smaller lazy matrix
    Weights(10, 10), causal, float32 on cpu, holds 680 bytes
    >>> weights[0, 3, 9].shape                        # the weights of the last token, exact
    torch.Size([10])
    >>> weights.entropy().shape, weights.top(3).keys.shape
    (torch.Size([2, 4, 10]), torch.Size([2, 4, 10, 3]))
    >>> torch.allclose(weights @ v, out, atol=1e-6)
    True

    Rows sum to 1, fully masked rows to 0, and with a sink to 1 minus the sink mass. These are the weights before
    dropout, of every head. If gradients are enabled, slices, products, `entropy`, `received`, `grouped`, `diagonal` and
    `distance` are differentiable.
    """

    def __init__(
        self,
        call: Call,
        lse: Tensor,
        batch: tuple[int, ...],
        headed: bool,
        averaged: bool = False,
        group: int = 0,
        is_plain: bool = False,
    ) -> None:
        # The call and the log-sum-exp without a check for changes; `is_plain` as there. Used by foci.capture and
        # foci.record.
        self.tensors = TrackedTensors(call, lse, is_plain)
        self._batch_shape, self._headed, self._averaged = batch, headed, averaged
        _, heads, queries, _ = call.q.shape
        self._lead = (*batch, heads) if headed else batch
        self.shape: tuple[int, ...] = (*self._lead, queries, call.k.shape[2])
        # Query heads per key head in the original call, which some of its heads do not determine. Used by foci.capture.
        self.group = group or call.group

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The dimensions before the heads; () for inputs without a batch."""
        return self._batch_shape

    @classmethod
    def from_call(cls, call: Call, lse: Tensor) -> Weights:
        """The weights of a call, with the leading axes of its query. Used by foci.attention."""
        return cls(drop_values(call), lse, call.sizes.batch, call.sizes.heads is not None)

    @classmethod
    def from_plain_call(cls, q: Tensor, k: Tensor, score: Score, mask: Mask | None, lse: Tensor) -> Weights:
        """The weights of (B, H, T, D) tensors that need no checks. Used by foci.attention."""
        batch, heads, queries, _ = q.shape
        sizes = CallSizes((batch,), heads, queries, k.shape[2], q.device)
        call = Call(q, k, k, sizes, score, mask, needs_lse=True)
        if q.is_inference() or k.is_inference():
            call = drop_values(call)
        return cls(call, lse, sizes.batch, True, group=heads // k.shape[1], is_plain=True)

    @property
    def call(self) -> Call:
        """The call behind the weights; raises if its tensors were changed. Used by foci.capture and foci.view."""
        self.tensors.check()
        return self.tensors.call

    @property
    def is_averaged(self) -> bool:
        """Whether this is the result of `mean("heads")`."""
        return self._averaged

    @property
    def device(self) -> torch.device:
        return self.tensors.lse.device

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors.call.softmax_dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that it holds; most of them are the query and key of the caller."""
        return self.tensors.nbytes

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of each row, the sink included: (..., H, Tq)."""
        lse = self._per_head_lse("lse")
        return copy_if_inference(lse).reshape(self.shape[:-1])

    def _per_head_lse(self, name: str) -> Tensor:
        """(B, H, Tq); raises for averaged weights."""
        if self._averaged:
            raise ValueError(f"{name} is per head: compute it before mean('heads')")
        self.tensors.check()
        return self.tensors.lse

    def _reshape(self, result: Tensor) -> Tensor:
        """(B, H, ...) with the leading axes of these weights."""
        if self._headed and len(self.batch_shape) == 1:
            return result
        return result.reshape((*self._lead, *result.shape[2:]))

    def __getattr__(self, name: str) -> NoReturn:
        """Raises AttributeError; for what a tensor has, it names the matrix as a tensor."""
        is_tensors = not name.startswith("_") and hasattr(Tensor, name)
        hint = ": weights.dense() is the matrix as a tensor" if is_tensors else suggest_name(name, dir(self))
        raise AttributeError(f"'Weights' object has no attribute {name!r}{hint}")

    def __repr__(self) -> str:
        mask = f", {self.tensors.call.mask!r}" if self.tensors.call.mask is not None else ""
        mean = ", mean over heads" if self._averaged else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"Weights{self.shape}{mask}{mean}, {dtype} on {self.device}, holds {self.nbytes:,} bytes"

    def __getitem__(self, index: Any) -> Weights | Tensor:
        if type(index) is tuple and (row := self._row(index)) is not None:
            return row
        lead, matrix = split_index(index, self.shape)
        if matrix and (rows := self._rows_on_gpu((*lead, *matrix))) is not None:
            return rows
        selected = self if all(isinstance(item, slice) and item == slice(None) for item in lead) else self._select(lead)
        return selected._entries(*matrix) if matrix else selected

    def _row(self, index: tuple[Any, ...]) -> Tensor | None:
        """The row of one sequence, head and query given as numbers, after a few comparisons; None for another index."""
        if len(index) != 3 or len(self._lead) != 2 or not self._headed or self._averaged:
            return None
        batch, head, query = index
        if not (type(batch) is type(head) is type(query) is int):
            return None
        batches, heads, queries, _ = self.shape
        if not (-batches <= batch < batches and -heads <= head < heads and -queries <= query < queries):
            return None
        call, lse = self.call, self.tensors.lse
        batch, head, query = batch % batches, head % heads, query % queries
        if arguments.is_on_gpu(lse):
            return entries.compute_row(call, lse, batch, head, query)
        return compute_row(call, lse, batch, head, query) if has_plain_rows(call) else None

    def _rows_on_gpu(self, index: tuple[Any, ...]) -> Tensor | None:
        """A few rows of the matrix by one kernel; None for any other index or device, and for invalid ones."""
        if self._averaged or not arguments.is_on_gpu(self.tensors.lse) or len(self._batch_shape) > 1:
            return None
        ranges = [to_range(item, size) for item, size in zip(index, self.shape, strict=True)]
        queries, keys = ranges[-2:]
        batches = ranges[0] if self._batch_shape else range(1)
        heads = ranges[-3] if self._headed else range(1)
        if batches is None or heads is None or queries is None or keys is None:
            return None
        call = self.call
        if batches.step * heads.step != 1 or entries.refuses(call, len(queries)):
            return None
        shape = tuple(
            len(axis) for axis, item in zip(ranges, index, strict=True) if axis is not None and type(item) is not int
        )
        return entries.compute_rows(call, self.tensors.lse, batches, heads, queries, keys, shape)

    def _select(self, lead: tuple[Any, ...]) -> Weights:
        """The matrix of some sequences and heads, again lazy."""
        lead = tuple(parse_leading_index(item, size) for item, size in zip(lead, self._lead, strict=True))
        call = self.call
        sequences, batch = select_sequences(lead[: len(self.batch_shape)], self.batch_shape)
        head = lead[-1] if self._headed else slice(None)
        headed = self._headed and isinstance(head, slice)
        heads = head if isinstance(head, slice) else slice(head, head + 1)
        lse = self.tensors.lse[sequences][:, heads]
        return Weights(call.select(sequences, heads), lse, batch, headed, self._averaged, self.group)

    def _entries(self, query: Any, key: Any) -> Tensor:
        call = self.call
        rows = parse_axis_index(query, call.q.shape[2], "query", self.device)
        columns = parse_axis_index(key, call.k.shape[2], "key", self.device)
        if rows.is_list and columns.is_list:
            # Indexing a tensor would pair the two lists, which is easily mistaken for all their combinations.
            raise IndexError(f"only one of the query and key indices must be a list, got {query!r} and {key!r}")
        found = operators.compute_entries(call, self.tensors.lse, rows.index, columns.index, self._averaged)
        removed = [axis for axis, index in ((-2, rows), (-1, columns)) if index.dropped]
        return self._reshape(found).squeeze(removed)

    def dense(self, limit: int = 2**30) -> Tensor:
        """The whole matrix as a tensor; raises if it is larger than `limit` bytes."""
        check_dense_limit(self.shape, self.dtype, limit)
        return self._entries(slice(None), slice(None))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """The whole matrix for NumPy and matplotlib, within the limit of `dense`."""
        return to_numpy(self.dense(), dtype, copy)

    def mean(self, over: str) -> Weights:
        """The average over the heads, again lazy: `weights.mean("heads")`."""
        check_over(over)
        if not self._headed or not self._lead[-1]:
            raise ValueError(f"weights must have heads, (..., H, Tq, Tk), for mean('heads'), got {self.shape}")
        return Weights(self.call, self.tensors.lse, self.batch_shape, False, True, self.group)

    def __matmul__(self, x: Tensor) -> Tensor:
        return products.multiply(self.call, self._lead, x, self._averaged)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        product = self._multiply_transposed(transpose_operand(x), "x @ W")
        return product.mT if x.dim() > 1 else product

    def _multiply_transposed(self, x: Tensor, name: str = "W.T @ x") -> Tensor:
        return products.multiply_transposed(self.call, self.tensors.lse, self._lead, x, self._averaged, name)

    @property
    def T(self) -> Transposed:  # noqa: N802
        """The transpose of the last two axes, lazy."""
        return Transposed(self)

    @property
    def mT(self) -> Transposed:  # noqa: N802
        """The transpose of the last two axes, lazy, by the name that it has for tensors."""
        return Transposed(self)

    @property
    def __torch_function__(self) -> Any:
        """Dispatches `torch.matmul` to the lazy products."""
        return choose_torch_function()

    def _compute(self, request: Request, call: Call | None = None) -> Mapping[str, Tensor]:
        """The requested statistics; checks the tensors unless the caller passes the checked call."""
        return operators.compute_statistics(call or self.call, self.tensors.lse, request, self._averaged)

    def top(self, k: int) -> Top:
        """The k heaviest keys of each query, heaviest first; ties go to the lower key. (..., Tq, k) each.

        If fewer than k keys are visible, the rest has value 0 and key -1.
        """
        check_k(k, self.shape[-1])
        result = self._compute(Request(top=k))
        return Top(self._reshape(result["top_values"]), self._reshape(result["top_keys"]))

    def entropy(self) -> Tensor:
        """Entropy in nats, -Σ w ln w over the keys: 0 = one key, ln n = uniform over n keys. (..., Tq)"""
        return self._reshape(operators.compute_entropy(self.call, self.tensors.lse, self._averaged))

    def received(self, queries: Any = None, per: str = "query_head") -> Tensor:
        """The attention that each key receives, the column sums: (..., Tk).

        Args:
            queries: sum over these queries only (a slice, or a list of indices, each counted once).
            per: "query_head", or "kv_head" to sum over the query heads that share a key head.
        """
        if per not in {"query_head", "kv_head"}:
            raise ValueError(f"per must be 'query_head' or 'kv_head', got {per!r}")
        if per == "query_head":
            return self._reshape(self._received(queries))
        if not self._headed:
            raise ValueError(f"weights must have heads, (..., H, Tq, Tk), for per='kv_head', got {self.shape}")
        received = self._received(queries)
        if self.call.head_ids is None:
            sums = received.view(received.shape[0], -1, self.group, received.shape[2]).sum(2)
            return sums.reshape(*self.batch_shape, *sums.shape[1:])
        key_heads, index = (self.call.head_index.flatten() // self.group).unique_consecutive(return_inverse=True)
        sums = received.new_zeros(received.shape[0], key_heads.numel(), received.shape[2]).index_add(1, index, received)
        return sums.reshape(*self.batch_shape, *sums.shape[1:])

    def _received(self, queries: Any) -> Tensor:
        call, lse = self.call, self.tensors.lse
        if queries is None:
            return operators.compute_received(call, lse, self._averaged)
        selected = parse_axis_index(queries, call.q.shape[2], "query", self.device).index
        counted = torch.zeros(call.q.shape[2], 1, device=self.device, dtype=self.dtype).index_fill(0, selected, 1.0)
        return operators.compute_transposed_product(call, lse, counted, self._averaged).squeeze(-1)

    def picture(self, rows: int, columns: int, reduce: str = "mean") -> Tensor:
        """The matrix reduced to rows x columns blocks with edges floor(r T / rows): (..., rows, columns).

        Args:
            rows, columns: number of blocks, at most the number of queries and keys.
            reduce: "mean" or "max" of each block; masked entries count as 0.
        """
        check_picture_size(rows, columns, reduce, *self.shape[-2:])
        return self._reshape(self._compute(Request(picture=(rows, columns, reduce)))["picture"])

    def grouped(self, query_groups: Any, key_groups: Any) -> Tensor:
        """The attention between groups of tokens: summed over the keys, averaged over the queries of each group.

        Groups are contiguous: (start, stop) pairs, or one number per token (the word of each sub-word, None for a
        token that belongs to none). Tokens in no group are ignored.

        >>> _, weights = foci.attention(*torch.randn(3, 2, 4, 3, 8), return_weights=True)
        >>> weights.grouped([(0, 2), (2, 3)], [(0, 2), (2, 3)]).shape        # two words of three sub-words
        torch.Size([2, 4, 2, 2])
        """
        queries, keys = self.shape[-2:]
        rows = assign_groups(query_groups, queries, "query_groups", self.device)
        columns = assign_groups(key_groups, keys, "key_groups", self.device)
        return self._reshape(operators.compute_group_mass(self.call, self.tensors.lse, rows, columns, self._averaged))

    def distance(self) -> Tensor:
        """The mean distance of each query to its keys, Σ w |key position - query position|: (..., Tq)."""
        return self._reshape(operators.compute_distance(self.call, self.tensors.lse, self._averaged))

    def diagonal(self, offset: int = 0) -> Tensor:
        """What each query gives to the key at its own position, or `offset` after it: (..., Tq).

        Where there is no such key it is 0. In self-attention a token gets `received() - diagonal()` from others.

        >>> _, weights = foci.attention(*torch.randn(3, 4, 6, 8), mask=foci.causal, return_weights=True)
        >>> torch.allclose(weights.diagonal(-1)[:, 1:], weights.dense().diagonal(-1, -2, -1), atol=1e-6)
        True
        """
        if not isinstance(offset, int) or isinstance(offset, bool):
            raise TypeError(f"offset must be an int, got {reprlib.repr(offset)}")
        return self._reshape(compute_diagonal(self.call, self.tensors.lse, offset, self._averaged))

    def largest_logit(self) -> Tensor:
        """The largest visible logit of each head, -inf if all keys are masked: (..., H)."""
        self._per_head_lse("largest_logit")
        return self._reshape(self._compute(Request(largest_logit=True))["largest_logit"])

    def sink_mass(self) -> Tensor:
        """The share of each query's attention that goes to the sink, 0 without a sink: (..., Tq)."""
        return self._reshape(compute_sink_mass(self._per_head_lse("sink_mass"), self.tensors.call.sink))

    def summary(self, top: int = 8, picture: int = 256, largest_logit: bool = True, distance: bool = True) -> Summary:
        """Computes all statistics in one pass, which is faster without those that are left out.

        Args:
            top: number of heaviest keys per query, at most the number of keys; 0 leaves them out.
            picture: rows and columns of the picture, at most the size of the matrix; 0 leaves it out.
            largest_logit, distance: whether to compute these.
        """
        for name, number in (("top", top), ("picture", picture)):
            if number != 0 and not is_positive_int(number):
                raise ValueError(f"{name} must be an int >= 0, got {number!r}")
        # Not under no_grad, which an exported graph keeps as a graph of its own: no statistic has a gradient here.
        results = self._summarize(top, picture, largest_logit, distance)
        # _summarize has checked the tensors.
        lse, sink = copy_if_inference(self.tensors.lse), self.tensors.call.sink
        made = {} if sink is None else {"sink_mass": self._reshape(compute_sink_mass(lse, sink).detach())}
        # Not the weights themselves, which hold query and key.
        has_lead = self._headed and len(self._batch_shape) == 1
        return Summary.from_parts(SummaryParts(results, lse, None if has_lead else self._lead), made)

    def summary_tensors(
        self, top: int, picture: int, largest_logit: bool, distance: bool = True, int32_keys: bool = False
    ) -> dict[str, Tensor]:
        """The tensors of a summary but sink_mass, by name; int32_keys: top keys as int32. Used by foci.record."""
        results = self._summarize(top, picture, largest_logit, distance, int32_keys)
        tensors = {name: self._reshape(tensor) for name, tensor in results.items()}
        # _summarize has checked the tensors.
        tensors["lse"] = self._reshape(copy_if_inference(self.tensors.lse).detach())
        return tensors

    def _summarize(
        self, top: int, picture: int, largest_logit: bool, distance: bool, int32_keys: bool = False
    ) -> Mapping[str, Tensor]:
        """The results of the pass for a summary, (B, H, ...)."""
        if self._averaged:
            raise ValueError("summary is per head: compute it before mean('heads')")
        queries, keys = self.shape[-2:]
        size = (min(picture, queries), min(picture, keys), "mean") if picture and queries and keys else None
        request = Request(True, True, size, min(top, keys), largest_logit, distance, int32_keys)
        return self._compute(request)

    def to(self, device: torch.device | str) -> Weights:
        """The same weights with all tensors on another device."""
        call, device = self.call, torch.device(device)
        moved = parts_file.map_tensors(select_matrix_fields(call), lambda tensor: tensor.to(device))
        call = replace(call, **moved, v=moved["k"], sizes=call.sizes._replace(device=moved["q"].device))
        return Weights(call, self.tensors.lse.to(device), self.batch_shape, self._headed, self._averaged, self.group)

    def with_four_axes(self) -> Weights:
        """The same weights as (B, H, Tq, Tk), with all batch axes in one. Used by foci.capture and foci.record."""
        if len(self.shape) == 4:
            return self
        call = self.call
        return Weights(call, self.tensors.lse, (call.q.shape[0],), True, group=self.group)

    def show(self, *arguments: Any, tokens: Any = None, source: Any = None, **options: Any) -> None:
        """Prints the weights in the terminal: the heads, the attention of one query and the matrix.

        Args:
            arguments, options: those of `Record.show`: the word, head="L0H3", batch=1, ...
            tokens: the texts of the positions, [position] or [batch][position]; with `source`, those of the queries.
            source: the texts of the keys, if they belong to another sequence.
        """
        from foci.view.display import build_layer_record

        build_layer_record(self, tokens, source).show(*arguments, **options)

    def save(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Saves in the format of the suffix: .safetensors for `Weights.load`, .html a page, .png, .svg, .pdf images.

        Args:
            options: of a page or an image: `tokens` and `source` as in `show`; those of `Record.save`: head="L0H3",
                what="heads", dpi=150, ...
        """
        if parse_suffix(path, ".safetensors", *PICTURE_SUFFIXES) == ".safetensors":
            if options:
                raise TypeError(f"options must be empty for a .safetensors file, got {', '.join(options)}")
            parts_file.save_parts(path, self.parts())
            return
        from foci.view.display import build_layer_record

        record = build_layer_record(self, options.pop("tokens", None), options.pop("source", None))
        record.save(path, **options)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """The representation in a notebook."""
        from foci.view.widget import render_in_notebook

        return render_in_notebook(self)

    def parts(self) -> dict[str, Any]:
        """All tensors and settings of the weights, by name. Used by `save` and foci.record."""
        form = {"batch": self.batch_shape, "headed": self._headed, "averaged": self._averaged, "group": self.group}
        sizes = tuple(self.call.sizes)[:4]
        return select_matrix_fields(self.call) | form | {"lse": self.tensors.lse, "sizes": sizes}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Weights:
        """Reads weights from a file that `save` wrote; raises ValueError for any other file. No code is run."""
        return cls(*file.load_weights(path))

    @classmethod
    def from_parts(cls, parts: dict[str, Any]) -> Weights:
        """Weights from the result of `parts`; raises ValueError if it is inconsistent. Used by foci.record."""
        return cls(*file.check_parts(parts))


class Transposed:
    """Wᵀ, lazy: `weights.T @ x` sums x over the queries of each key, weighted by their attention."""

    def __init__(self, weights: Weights) -> None:
        self.T = self.mT = weights
        self.shape = (*weights.shape[:-2], weights.shape[-1], weights.shape[-2])

    def __matmul__(self, x: Tensor) -> Tensor:
        return self.T._multiply_transposed(x)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        weights = self.T
        product = products.multiply(weights.call, weights._lead, transpose_operand(x), weights._averaged, "x @ W.T")
        return product.mT if x.dim() > 1 else product

    @property
    def __torch_function__(self) -> Any:
        return choose_torch_function()

    def __repr__(self) -> str:
        return f"Transposed {self.T!r}"


def choose_torch_function() -> Any:
    """The function that PyTorch calls for `torch.matmul` and `x @ weights`, and a compiler for `weights @ x`."""
    if not torch.compiler.is_dynamo_compiling():
        # Not traced: the compiler itself reads the attribute before it chooses the function.
        name_reversed_matmul()
    return dispatch_product


def dispatch_product(function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """A matrix product of PyTorch as a lazy one; raises TypeError for any other function."""
    if function in MATRIX_PRODUCTS and len(args) == 2 and not kwargs:
        left, right = args
        return left.__matmul__(right) if isinstance(left, Weights | Transposed) else right.__rmatmul__(left)
    if function is torch.Tensor.__rmatmul__:
        right, left = args
        return left.__matmul__(right)
    name = getattr(function, "__name__", function)
    raise TypeError(f"the arguments of {name} must be tensors, got lazy Weights: use a slice, a product or dense()")


def transpose_operand(x: Any) -> Any:
    """A matrix with its last two axes exchanged; a vector unchanged."""
    return x.mT if isinstance(x, Tensor) and x.dim() > 1 else x


def compute_sink_mass(lse: Tensor, sink: Tensor | None) -> Tensor:
    """(B, H, Tq), the share of each query's attention that goes to the sink."""
    return torch.zeros_like(lse) if sink is None else torch.exp(sink.to(lse.dtype).view(1, -1, 1) - finite_lse(lse))

"""Layer: one attention layer of a record and its statistics.

B batch, H heads, G key/value heads, Tq queries, Tk keys.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from foci.record.dense import DenseWeights
from foci.record.kept import STATISTIC_AXES, KeptStatistics, as_index
from foci.record.labels import Labels
from foci.record.step_mean import StepMean, average_steps
from foci.record.window_weights import WindowWeights
from foci.runtime.checks import to_numpy
from foci.weights.summary import Top
from foci.weights.weights import Weights

# The stack of a mean of cross-attention layers that a task chose as its alignment; views show it first.
ALIGNMENT_STACK = "alignment"
COMMON_STATISTICS = ("entropy", "received", "distance", "top", "picture", "grouped")
WEIGHTS_STATISTICS = frozenset(
    {
        *COMMON_STATISTICS,
        "entries",
        "columns",
        "lines",
        "products",
        "lse",
        "sink_mass",
        "largest_logit",
        "first",
        "previous",
    }
)
# The methods that read kept statistics of other names.
PUBLIC_STATISTICS = {"top_values": "top", "top_keys": "top", "key_weights": "columns", "query_weights": "lines"}
MATRIX_STATISTICS = WEIGHTS_STATISTICS - {"lse", "sink_mass", "largest_logit"}


@dataclass(eq=False)
class Layer:
    """One attention layer, backed by lazy `weights`, `kept` statistics or a dense `matrix`.

    >>> record = foci.Record.from_tensors([torch.rand(1, 4, 6, 6).softmax(-1)])
    >>> layer = record["L0"]
    >>> layer.shape, layer.entropy().shape, layer.top(2).keys.shape
    ((1, 4, 6, 6), torch.Size([1, 4, 6]), torch.Size([1, 4, 6, 2]))
    >>> head = record["L0H3"]                       # one head: results have no head axis, as with `weights[:, 3]`
    >>> head.shape, head.entropy().shape, head.row(0, 5).shape
    ((1, 6, 6), torch.Size([1, 6]), torch.Size([6]))

    Statistics have the names and shapes of those of `foci.Weights`. `available` lists those that were recorded; others
    raise an error that says what to do. With gradients enabled, lazy weights return results with a graph; views call
    them under `torch.no_grad()`.

    Args:
        name: the path of the attention module, "encoder.layer.3.attention.self"; "...#2" for a second call.
        stack: "", or one of several stacks: "encoder", "decoder", "cross", "vision".
        index: the number of the layer in its stack, from 0.
        heads: the numbers of the recorded heads, () for all of them: (3,) if only L5H3 was selected.
        queries, keys: the names of the record's labels along each axis.
        rows: the numbers of the recorded queries; None: all.
        weights, kept, matrix: the data; exactly one of them.
        values: (B, G, Tk, Dv), if they were kept.
        value_norms: norms of the values, (B, G, Tk).
        single: whether this is one head, whose results have no head axis.
        kv_heads: the number of key/value heads.
        query_positions: the positions of the queries among the keys, (Tq,); None: the last query at the last key.
        kept_keys, kept_queries: with `foci.Keep(keys="text")` or `queries="text"`, the keys and queries whose weights
            were kept.
        steps: by number, the layer at each denoising step of a diffusion model; the layer itself is their mean, and has
            no other data.
        windows: the data of a layer that attends in windows of a grid of patches, in place of weights, kept and matrix.
        averaged: whether this is the mean over the steps on its own, as `Record.mean("steps")` returns it.
        labels: those of its record, which sets them.
    """

    name: str
    stack: str = ""
    index: int = 0
    heads: tuple[int, ...] = ()
    queries: str = "input"
    keys: str = "input"
    rows: tuple[int, ...] | None = None
    weights: Weights | None = None
    kept: KeptStatistics | None = None
    matrix: Tensor | None = None
    values: Tensor | None = None
    value_norms: Tensor | None = None
    single: bool = False
    kv_heads: int = 0
    query_positions: Tensor | None = None
    kept_keys: tuple[int, ...] = ()
    kept_queries: tuple[int, ...] = ()
    steps: dict[int, Layer] = field(default_factory=dict, repr=False)
    averaged: bool = False
    windows: WindowWeights | None = None
    labels: dict[str, Labels] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._mean: StepMean | None = None
        if self.steps:
            self._average_steps()
        sources = [self.weights, self.kept, self.matrix, self.windows, self._mean]
        count = sum(source is not None for source in sources)
        if count != 1:
            raise ValueError(f"exactly one of weights, kept, matrix and steps must be given, got {count}")
        if len(self.shape) != (3 if self.single else 4):
            raise ValueError(f"a layer must have the shape (B, H, Tq, Tk), got {self.shape}")
        _, heads, queries, _ = self.sizes
        self.heads = self.heads or tuple(range(heads))
        self.kv_heads = self.kv_heads or heads
        if len(self.heads) != heads:
            raise ValueError(f"heads must have {heads} numbers, got {self.heads}")
        if self.rows is not None and len(self.rows) != queries:
            raise ValueError(f"rows must have {queries} numbers, got {len(self.rows)}")

    def _average_steps(self) -> None:
        shapes = {step.shape for step in self.steps.values()}
        if len(shapes) != 1:
            raise ValueError(f"steps must have one shape, got {sorted(shapes)}")
        mean = average_steps([step._source for step in self.steps.values()])
        if isinstance(mean, StepMean):
            self._mean = mean
        else:
            self.kept = mean

    def at(self, step: int) -> Layer:
        """The layer at one denoising step of a diffusion model; negative numbers count from the last step."""
        last = max(self.steps, default=-1)
        number = step + last + 1 if isinstance(step, int) and step < 0 else step
        if number not in self.steps:
            numbers = f"one of {', '.join(map(str, self.steps))}" if self.steps else "asked of a layer with steps"
            raise ValueError(f"step of {self.label} must be {numbers}, got {step!r}")
        return self.steps[number]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `dense()`: (B, H, Tq, Tk), for a single head (B, Tq, Tk)."""
        if self.kept is not None:
            return tuple(self.kept.shape)
        sources = (self.weights, self.kept, self.matrix, self.windows, self._mean)
        source = next(each for each in sources if each is not None)
        return tuple(source.shape)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(B, H, Tq, Tk), with H = 1 for a single head."""
        batch, *heads, queries, keys = self.shape
        return batch, heads[0] if heads else 1, queries, keys

    @property
    def label(self) -> str:
        """The short name: L5, cross.L5; L5H3 for a single head."""
        head = f"H{self.heads[0]}" if self.single else ""
        return format_layer_name(self.stack, self.index) + head

    @property
    def available(self) -> frozenset[str]:
        """The recorded statistics: "entries", "top", "picture", "entropy", ..."""
        if self.kept is None:
            return WEIGHTS_STATISTICS if self.weights is not None else MATRIX_STATISTICS
        kept = {name for name in STATISTIC_AXES if name in self.kept}
        return frozenset(PUBLIC_STATISTICS.get(name, name) for name in kept)

    @property
    def max_picture_size(self) -> tuple[int, int]:
        """Rows and columns of the finest `picture`."""
        if self.kept is None:
            return self.sizes[2:]
        kept = self.kept["picture"]
        return kept.shape[-2], kept.shape[-1]

    @property
    def max_top(self) -> int:
        """The largest k that `top(k)` takes."""
        if self.kept is None:
            return self.shape[-1]
        return self.kept["top_keys"].shape[-1] if "top_keys" in self.kept else 0

    @property
    def positions(self) -> Tensor:
        """The positions of the queries among the keys, (Tq,): in self-attention, the token of each query."""
        if self.query_positions is not None:
            return self.query_positions
        queries, keys = self.shape[-2:]
        return torch.arange(queries) + (keys - queries)

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        if self.steps:
            return sum(step.nbytes for step in self.steps.values())
        kept = [] if self.kept is None else list(self.kept.values())
        tensors = [t for t in (*kept, self.matrix, self.values, self.value_norms) if t is not None]
        lazy = [each for each in (self.weights, self.windows) if each is not None]
        return sum(t.nbytes for t in tensors) + sum(each.nbytes for each in lazy)

    def head(self, number: int) -> Layer:
        """One head by its number in the model; its results have no head axis."""
        if number not in self.heads:
            raise KeyError(
                f"the head of {self.label} must be one of {', '.join(f'H{h}' for h in self.heads)}, got H{number}"
            )
        if self.single:
            return self
        index = self.heads.index(number)
        kv_head = index * self.kv_heads // self.shape[1]
        shared = slice(kv_head, kv_head + 1)
        if self.steps:
            return self._with_steps({n: step.head(number) for n, step in self.steps.items()})
        weights = None if self.weights is None else self.weights[:, index]
        assert weights is None or isinstance(weights, Weights)
        return replace(
            self,
            heads=(number,),
            single=True,
            kv_heads=1,
            weights=weights,
            kept=None if self.kept is None else self.kept.head(index),
            matrix=None if self.matrix is None else self.matrix[:, index],
            windows=None if self.windows is None else self.windows.select_heads(index),
            values=None if self.values is None else self.values[:, shared],
            value_norms=None if self.value_norms is None else self.value_norms[:, shared],
        )

    def with_head_axis(self) -> Layer:
        """A single head as a layer of one head; any other layer unchanged."""
        if not self.single:
            return self
        if self.steps:
            return self._with_steps({number: step.with_head_axis() for number, step in self.steps.items()})
        return replace(
            self,
            single=False,
            weights=None if self.weights is None else self.weights.with_four_axes(),
            kept=None if self.kept is None else self.kept.with_head_axis(),
            matrix=None if self.matrix is None else self.matrix.unsqueeze(1),
            windows=None if self.windows is None else self.windows.with_head_axis(),
        )

    def _with_steps(self, steps: dict[int, Layer]) -> Layer:
        """The mean of other steps of the same layer."""
        first = next(iter(steps.values()))
        return replace(self, steps=steps, kept=None, heads=first.heads, single=first.single, kv_heads=first.kv_heads)

    @property
    def _source(self) -> Weights | KeptStatistics | DenseWeights | StepMean | WindowWeights:
        if self._mean is not None:
            return self._mean
        if self.windows is not None:
            return self.windows
        if self.matrix is not None:
            return DenseWeights(self.matrix, self.query_positions)
        source = self.weights if self.weights is not None else self.kept
        assert source is not None
        return source

    def _require_matrix(self, statistic: str) -> Weights | DenseWeights | StepMean | WindowWeights:
        """The source if it has single entries, else an error."""
        source = self._source
        if isinstance(source, KeptStatistics):
            available = ", ".join(sorted(self.available))
            raise ValueError(
                f"{statistic!r} of {self.label} was not recorded; available: {available}. Use keep='lazy' in foci.watch"
            )
        return source

    def entropy(self) -> Tensor:
        """Entropy of each query in nats: (B, H, Tq)."""
        return self._source.entropy()

    def received(self, queries: Any = None, per: str = "query_head") -> Tensor:
        """The attention that each key receives, summed over queries: (B, H, Tk)."""
        return self._source.received(queries, per)

    def distance(self) -> Tensor:
        """The mean distance between each query and its keys, weighted by attention: (B, H, Tq).

        NaN for cross-attention, whose queries and keys have no common positions.
        """
        distance = self._source.distance()
        return distance if self.queries == self.keys else torch.full_like(distance, torch.nan)

    def top(self, k: int) -> Top:
        """The k heaviest keys of each query, heaviest first: values and keys (B, H, Tq, k)."""
        return self._source.top(k)

    def picture(self, rows: int, columns: int, reduce: str = "mean") -> Tensor:
        """The matrix reduced to blocks: (B, H, rows, columns); at most `max_picture_size`."""
        return self._source.picture(rows, columns, reduce)

    def grouped(self, query_groups: Any, key_groups: Any) -> Tensor:
        """The attention between groups of tokens: (B, H, query groups, key groups)."""
        return self._require_matrix("grouped").grouped(query_groups, key_groups)

    def largest_logit(self) -> Tensor:
        """The largest logit of each head: (B, H)."""
        return self._require_scores("largest_logit").largest_logit()

    def sink_mass(self) -> Tensor:
        """The attention that each query gives to the sink: (B, H, Tq)."""
        return self._require_scores("sink_mass").sink_mass()

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of each row: (B, H, Tq)."""
        return self._require_scores("lse").lse

    def _require_scores(self, statistic: str) -> Weights | KeptStatistics:
        source = self._source
        if isinstance(source, DenseWeights | StepMean | WindowWeights):
            available = ", ".join(sorted(self.available))
            what = "the mean over steps" if isinstance(source, StepMean) else "a dense matrix"
            raise ValueError(f"{statistic!r} of {self.label} cannot be computed from {what}; available: {available}")
        return source

    def row(self, *index: int, values: bool = False) -> Tensor:
        """The exact weights of one query: `row(batch, head, query)`, for a single head `row(batch, query)` -> (Tk,).

        `head` is an index into `heads`. values=True multiplies each weight with the norm of its value: the contribution
        of a key, not only its weight.
        """
        expected = 2 if self.single else 3
        if len(index) != expected:
            wanted = "row(batch, query)" if self.single else "row(batch, head, query)"
            raise TypeError(f"row of {self.label} must be called as {wanted}, got {len(index)} numbers")
        names = ("batch", "query") if self.single else ("batch", "head", "query")
        for name, number, size in zip(names, index, self.shape, strict=False):
            if size == 0:
                raise IndexError(f"{name} must be an index into {self.label}, got {number}: it has shape {self.shape}")
        weights = self[index]
        assert isinstance(weights, Tensor)
        return weights * self.norms()[index[:-1]].to(weights) if values else weights

    def norms(self) -> Tensor:
        """The norms of the values for each query head: (B, H, Tk)."""
        if self.value_norms is None:
            raise ValueError(
                f"the values of {self.label} were not recorded, or changed in place after the call: use"
                " keep=foci.Keep(values=True) or keep='lazy'"
            )
        norms = self.value_norms
        if self.single:
            return norms[:, 0]
        heads = self.sizes[1]
        return norms if norms.shape[1] == heads else norms.repeat_interleave(heads // norms.shape[1], dim=1)

    def __getitem__(self, index: Any) -> Weights | StepMean | WindowWeights | Tensor:
        """Exact entries, indexed like `foci.Weights`: layer[batch, head, query]."""
        return self._require_matrix("entries")[index]

    def __matmul__(self, x: Tensor) -> Tensor:
        return self._require_matrix("products") @ x

    def __rmatmul__(self, x: Tensor) -> Tensor:
        return self._require_matrix("products").__rmatmul__(x)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Implements `x @ layer`."""
        if function in {torch.Tensor.__matmul__, torch.matmul} and len(args) == 2 and not kwargs:
            left, right = args
            return left.__matmul__(right) if isinstance(left, Layer) else right.__rmatmul__(left)
        if function is torch.Tensor.__rmatmul__:
            return args[1] @ args[0]
        raise TypeError(f"{getattr(function, '__name__', function)} must be called with tensors, got a Layer")

    def columns(self, keys: Sequence[int]) -> Tensor:
        """The exact weights of all queries on some keys: (B, H, Tq, keys).

        >>> record = foci.Record.from_tensors([torch.rand(1, 4, 6, 6).softmax(-1)])
        >>> record["L0"].columns([2, 3]).shape
        torch.Size([1, 4, 6, 2])
        """
        return self._read_some(keys, "key")

    def with_columns(self, keys: str) -> Layer:
        """The kept weights on text as a layer of its own, whose keys are a sequence of this name."""
        return self._with_part("key_weights", keys=keys)

    def with_rows(self) -> Layer:
        """The kept weights of text as a layer that has only these queries."""
        return self._with_part("query_weights", rows=self.kept_queries)

    def _with_part(self, statistic: str, **changes: Any) -> Layer:
        nothing: dict[str, Any] = {"kept": None, "kept_keys": (), "kept_queries": ()}
        if self.steps:
            steps = {number: step._with_part(statistic, **changes) for number, step in self.steps.items()}
            return replace(self, steps=steps, **nothing, **changes)
        assert self.kept is not None
        return replace(self, matrix=self.kept[statistic].float(), **nothing, **changes)

    def lines(self, queries: Sequence[int]) -> Tensor:
        """The exact weights of some queries on all keys: (B, H, queries, Tk)."""
        return self._read_some(queries, "query")

    def _read_some(self, numbers: Sequence[int], axis: str) -> Tensor:
        """The columns of some keys, or the rows of some queries, from the matrix or from what was kept of it."""
        name, known = f"{axis}_weights", self.kept_keys if axis == "key" else self.kept_queries
        at = (..., slice(None), list(numbers)) if axis == "key" else (..., list(numbers), slice(None))
        if self.kept is None or name not in self.kept:
            entries = self._require_matrix(f"weights of single {'keys' if axis == 'key' else 'queries'}")[at]
            assert isinstance(entries, Tensor)
            return entries
        missing = [number for number in numbers if number not in known]
        if missing:
            raise ValueError(f"{axis} must be one of those kept of {self.label} ({known}), got {missing[0]}")
        index = [known.index(number) for number in numbers]
        kept = self.kept[name].float()
        return kept[..., index] if axis == "key" else kept[..., index, :]

    def quadrants(self, batch: int = 0) -> dict[str, Tensor]:
        """The share of attention from text and image to text and image, where one sequence holds both: (H,) each.

        >>> labels = foci.Labels.tokens([["a", " shoe", "", "", "", ""]])
        >>> labels = labels.with_segments([foci.Segment("patches", start=2, rows=2, columns=2)])
        >>> seen = foci.Record.from_tensors([torch.full((1, 4, 6, 6), 1 / 6)], labels)
        >>> {name: round(float(share[0]), 2) for name, share in seen["L0"].quadrants().items()}
        {'text->text': 0.33, 'text->image': 0.67, 'image->text': 0.33, 'image->image': 0.67}

        Each is the mean, over the queries of its kind, of their weight on the keys of the other kind: those of one kind
        of queries add up to 1. `block` reads the weights themselves. `batch` is the number of the sequence.
        """
        rows, columns = self._split_sequences(batch)
        shares: dict[str, Tensor] = {}
        for kind, queries in rows.items():
            received = self.received(queries)[batch] / max(len(queries), 1)
            shares |= {f"{kind}->{other}": received[..., keys].sum(-1) for other, keys in columns.items()}
        return shares

    def block(self, queries: str, keys: str, batch: int = 0, limit: int = 2**30) -> Tensor:
        """The exact weights between the text or the image of each axis, (H, rows, columns): `block("image", "text")`.

        Args:
            queries, keys: "text" or "image".
            batch: the number of the sequence.
            limit: the largest number of bytes of the result.
        """
        parts = self._split_sequences(batch)
        for name, kind, known in (("queries", queries, parts[0]), ("keys", keys, parts[1])):
            if kind not in known:
                raise ValueError(f"{name} must be {' or '.join(map(repr, known))} for {self.label}, got {kind!r}")
        rows, columns = parts[0][queries], parts[1][keys]
        size = 4 * self.sizes[1] * len(rows) * len(columns)
        if size > limit:
            raise ValueError(
                f"limit must be at least the {size:,} bytes of this block of {self.label}, got {limit:,}: read some"
                " rows, or pass a larger limit="
            )
        if self.kept is None:
            entries = self[batch, ..., rows, as_index(columns)]
            assert isinstance(entries, Tensor)
            return entries
        if "key_weights" in self.kept and keys == "text":
            return self.columns(columns)[batch, ..., rows, :]
        return self.lines(rows)[batch, ..., columns]

    def _split_sequences(self, batch: int) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """The positions of text and image along queries and keys."""
        found = []
        for name, length in ((self.queries, self.shape[-2]), (self.keys, self.shape[-1])):
            labels = self.labels.get(name)
            if labels is None or len(labels) != length or not 0 <= batch < labels.batch:
                raise ValueError(f"{self.label} must have labels of text and image, got none that fit {name!r}")
            found.append(labels.split_kinds(batch))
        return found[0], found[1]

    def mean(self, over: str) -> Weights | DenseWeights | StepMean | WindowWeights:
        """The mean over the heads, lazy for lazy weights."""
        return self._require_matrix("mean").mean(over)

    def dense(self, limit: int = 2**30) -> Tensor:
        """The whole matrix; an error above `limit` bytes."""
        source = self._require_matrix("dense")
        return source.matrix if isinstance(source, DenseWeights) else source.dense(limit)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """The whole matrix for NumPy and matplotlib, within the limit of `dense`."""
        return to_numpy(self.dense(), dtype, copy)

    def show(self, *arguments: Any, **options: Any) -> None:
        """Prints the layer, or the single head, in the terminal; the arguments are those of `Record.show`."""
        from foci.view.display import build_layer_record

        build_layer_record(self).show(*arguments, **options)

    def save(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Saves the layer, or the single head, as a record of its own: see `Record.save`."""
        from foci.view.display import build_layer_record

        build_layer_record(self).save(path, **options)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """The representation in a notebook."""
        from foci.view.widget import render_in_notebook

        return render_in_notebook(self)

    def __repr__(self) -> str:
        kind = "lazy" if self.weights is not None else "kept statistics" if self.kept is not None else "dense"
        kind = "windows" if self.windows is not None else kind
        kind = f"mean of {len(self.steps)} steps" if self.steps else kind
        size = f"{self.nbytes:,} bytes"
        return f"Layer({self.label}, {self.name!r}, {self.shape}, {kind}, {size})"


def format_layer_name(stack: str, index: int) -> str:
    """The short name of a layer: L5, cross.L5."""
    return f"{stack}.L{index}".lstrip(".")


def join_steps(steps: dict[int, Layer]) -> Layer:
    """A layer of several denoising steps, which is their mean."""
    first = next(iter(steps.values()))
    # The values differ from step to step.
    without = dict.fromkeys(("weights", "kept", "matrix", "windows", "values", "value_norms"))
    return replace(first, **without, steps=dict(steps))  # type: ignore[arg-type]

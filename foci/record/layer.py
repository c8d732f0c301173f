"""Layer: one attention of a model, and every question that its weights answer.

B batch, H heads, G key heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foci.record.dense import DenseWeights
from foci.record.kept import STATISTIC_AXES, KeptStatistics
from foci.weights.summary import Top
from foci.weights.weights import Weights

COMMON_STATISTICS = ("entropy", "received", "distance", "top", "picture", "grouped")
WEIGHTS_STATISTICS = frozenset(
    {*COMMON_STATISTICS, "entries", "products", "lse", "sink_mass", "largest_logit", "first", "previous"}
)
MATRIX_STATISTICS = WEIGHTS_STATISTICS - {"lse", "sink_mass", "largest_logit"}


@dataclass(eq=False)
class Layer:
    """One attention of a model. Behind it stands one of three: lazy `weights`, `kept` statistics, a dense `matrix`.

    >>> record = foci.Record.from_tensors([torch.rand(1, 4, 6, 6).softmax(-1)])
    >>> layer = record["L0"]
    >>> layer.shape, layer.entropy().shape, layer.top(2).keys.shape
    ((1, 4, 6, 6), torch.Size([1, 4, 6]), torch.Size([1, 4, 6, 2]))
    >>> head = record["L0H3"]                       # one head: answers have no head axis, as those of `weights[:, 3]`
    >>> head.shape, head.entropy().shape, head.row(0, 5).shape
    ((1, 1, 6, 6), torch.Size([1, 6]), torch.Size([6]))

    Questions have the names and the shapes that they have in `foci.Weights`. `can` says which of them are answered; the
    others are refused with what to do. Where gradients are on, lazy weights answer with a graph: views ask under
    `torch.no_grad()`.

    Args:
        name: path of the module that attends, "encoder.layer.3.attention.self"; a second call: "...#2".
        stack: "", or which of several stacks it belongs to: "encoder", "decoder", "cross", "vision".
        index: its number in the stack, from 0.
        heads: the numbers of the heads that are here, () for all of them: (3,) where only L5H3 was chosen.
        queries, keys: which labels of the record stand along each axis.
        rows: the numbers of the queries that are here, where not all were kept; None: all.
        weights, kept, matrix: what stands behind; exactly one of them.
        values: (B, G, Tk, Dv), where they were kept.
        value_norms: their lengths, (B, G, Tk).
        single: whether this is one head, whose answers have no head axis.
        kv_heads: how many heads the keys have.
        query_places: where the queries stand among the keys, (Tq,); None: the last query at the last key.
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
    query_places: Tensor | None = None

    def __post_init__(self) -> None:
        given = [self.weights, self.kept, self.matrix]
        if sum(thing is not None for thing in given) != 1:
            raise ValueError("a layer has weights, kept statistics or a matrix, exactly one of them")
        behind = self._shape_behind
        if len(behind) != (3 if self.single else 4):
            raise ValueError(f"a layer takes weights of shape (B, H, Tq, Tk), but got {behind}")
        self.heads = self.heads or tuple(range(self.shape[1]))
        self.kv_heads = self.kv_heads or self.shape[1]
        if len(self.heads) != self.shape[1]:
            raise ValueError(f"a layer of {self.shape[1]} heads takes as many numbers, but got {self.heads}")
        if self.rows is not None and len(self.rows) != self.shape[2]:
            raise ValueError(f"a layer of {self.shape[2]} queries takes as many rows, but got {len(self.rows)}")

    @property
    def _shape_behind(self) -> tuple[int, ...]:
        thing = next(thing for thing in (self.weights, self.kept, self.matrix) if thing is not None)
        return tuple(thing.shape)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Tq, Tk), always four numbers."""
        behind = self._shape_behind
        batch, heads = (behind[0], 1) if self.single else behind[:2]
        return batch, heads, behind[-2], behind[-1]

    @property
    def label(self) -> str:
        """L5, cross.L5; with a head chosen L5H3."""
        head = f"H{self.heads[0]}" if self.single else ""
        return f"{self.stack}.L{self.index}{head}".lstrip(".")

    @property
    def can(self) -> frozenset[str]:
        """Which questions it answers: "entries", "top", "picture", "entropy", ... Views ask this first."""
        if self.kept is None:
            return WEIGHTS_STATISTICS if self.weights is not None else MATRIX_STATISTICS
        found = {name for name in STATISTIC_AXES if name in self.kept}
        return frozenset(found - {"top_values", "top_keys"} | ({"top"} if "top_keys" in found else set()))

    @property
    def finest(self) -> tuple[int, int]:
        """Rows and columns of the finest picture that it can give."""
        if self.kept is None:
            return self.shape[2], self.shape[3]
        kept = self.kept["picture"]
        return kept.shape[-2], kept.shape[-1]

    @property
    def most(self) -> int:
        """The largest k that `top(k)` takes."""
        if self.kept is None:
            return self.shape[3]
        return self.kept["top_keys"].shape[-1] if "top_keys" in self.kept else 0

    @property
    def places(self) -> Tensor:
        """Where the queries stand among the keys, (Tq,): of a self-attention, which token each of them is."""
        if self.query_places is not None:
            return self.query_places
        queries, keys = self.shape[2:]
        return torch.arange(queries) + (keys - queries)

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors that it holds."""
        kept = [] if self.kept is None else list(self.kept.values())
        tensors = [t for t in (*kept, self.matrix, self.values, self.value_norms) if t is not None]
        return sum(t.nbytes for t in tensors) + (0 if self.weights is None else self.weights.nbytes)

    def head(self, number: int) -> Layer:
        """One head by its number in the model; its answers have no head axis."""
        if number not in self.heads:
            raise KeyError(f"{self.label} has the heads {', '.join(f'H{h}' for h in self.heads)}, but got H{number}")
        if self.single:
            return self
        place = self.heads.index(number)
        shared = slice(place * self.kv_heads // self.shape[1], place * self.kv_heads // self.shape[1] + 1)
        weights = None if self.weights is None else self.weights[:, place]
        assert weights is None or isinstance(weights, Weights)
        return replace(
            self,
            heads=(number,),
            single=True,
            kv_heads=1,
            weights=weights,
            kept=None if self.kept is None else self.kept.head(place),
            matrix=None if self.matrix is None else self.matrix[:, place],
            values=None if self.values is None else self.values[:, shared],
            value_norms=None if self.value_norms is None else self.value_norms[:, shared],
        )

    @property
    def _behind(self) -> Weights | KeptStatistics | DenseWeights:
        if self.matrix is not None:
            return DenseWeights(self.matrix, self.query_places)
        found = self.weights if self.weights is not None else self.kept
        assert found is not None
        return found

    def _matrix(self, question: str) -> Weights | DenseWeights:
        """What answers questions about single entries."""
        behind = self._behind
        if isinstance(behind, KeptStatistics):
            kept = ", ".join(sorted(self.can))
            raise ValueError(f"{question} of {self.label} was not kept, only {kept}: watch with keep='lazy'")
        return behind

    def entropy(self) -> Tensor:
        """Nats per query: (B, H, Tq)."""
        return self._behind.entropy()

    def received(self, queries: Any = None, per: str = "query_head") -> Tensor:
        """The attention that each key gets: (B, H, Tk)."""
        return self._behind.received(queries, per)

    def distance(self) -> Tensor:
        """How far each query looks on average: (B, H, Tq)."""
        return self._behind.distance()

    def top(self, k: int) -> Top:
        """The k heaviest keys of each query, heaviest first: values and keys (B, H, Tq, k)."""
        return self._behind.top(k)

    def picture(self, rows: int, columns: int, reduce: str = "mean") -> Tensor:
        """The matrix in blocks: (B, H, rows, columns). `finest` says how fine it can be."""
        return self._behind.picture(rows, columns, reduce)

    def grouped(self, query_groups: Any, key_groups: Any) -> Tensor:
        """The mass between groups of tokens: (B, H, query groups, key groups)."""
        return self._matrix("grouped").grouped(query_groups, key_groups)

    def largest_logit(self) -> Tensor:
        """The largest score of each head: (B, H)."""
        return self._scored("largest_logit").largest_logit()

    def sink_mass(self) -> Tensor:
        """What the sink takes of each query's attention: (B, H, Tq)."""
        return self._scored("sink_mass").sink_mass()

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of each row: (B, H, Tq)."""
        return self._scored("lse").lse

    def _scored(self, question: str) -> Weights | KeptStatistics:
        behind = self._behind
        if isinstance(behind, DenseWeights):
            raise ValueError(f"{question} of {self.label} cannot be told from a dense matrix: it has lost the scores")
        return behind

    def row(self, *index: int, values: bool = False) -> Tensor:
        """Where one query looks, exactly: `row(batch, head, query)`, of a single head `row(batch, query)` -> (Tk,).

        `head` is counted along the heads that are here. values=True multiplies each weight with the length of its
        value: what a key adds, not only how much it is looked at.
        """
        expected = 2 if self.single else 3
        if len(index) != expected:
            wanted = "row(batch, query)" if self.single else "row(batch, head, query)"
            raise TypeError(f"{self.label} takes {wanted}, but got {len(index)} numbers")
        found = self[index]
        assert isinstance(found, Tensor)
        return found * self.norms()[index[:-1]].to(found) if values else found

    def norms(self) -> Tensor:
        """The lengths of the values for each query head: (B, H, Tk)."""
        if self.value_norms is None:
            raise ValueError(
                f"the values of {self.label} were not kept: watch with foci.Keep(values=True) or keep='lazy'"
            )
        norms = self.value_norms
        if self.single:
            return norms[:, 0]
        if norms.shape[1] == self.shape[1]:
            return norms
        return norms.repeat_interleave(self.shape[1] // norms.shape[1], dim=1)

    def __getitem__(self, index: Any) -> Weights | Tensor:
        """Exact entries, as of `foci.Weights`: layer[batch, head, query]."""
        return self._matrix("entries")[index]

    def __matmul__(self, x: Tensor) -> Tensor:
        return self._matrix("products") @ x

    def __rmatmul__(self, x: Tensor) -> Tensor:
        return self._matrix("products").__rmatmul__(x)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Lets `x @ layer` reach the product."""
        if function in {torch.Tensor.__matmul__, torch.matmul} and len(args) == 2 and not kwargs:
            left, right = args
            return left.__matmul__(right) if isinstance(left, Layer) else right.__rmatmul__(left)
        if function is torch.Tensor.__rmatmul__:
            return args[1] @ args[0]
        raise TypeError(f"{getattr(function, '__name__', function)} takes tensors, but got a layer")

    def mean(self, over: str) -> Weights | DenseWeights:
        """The average over the heads, again lazy."""
        return self._matrix("mean").mean(over)

    def dense(self, limit: int = 2**30) -> Tensor:
        """All of the matrix; above `limit` bytes an error that says its size."""
        behind = self._matrix("dense")
        return behind.dense(limit) if isinstance(behind, Weights) else behind.matrix

    def __repr__(self) -> str:
        behind = "lazy" if self.weights is not None else "kept statistics" if self.kept is not None else "dense"
        size = f"{self.nbytes:,} bytes"
        return f"Layer({self.label}, {self.name!r}, {self.shape}, {behind}, {size})"

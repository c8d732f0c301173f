"""The mean over the denoising steps of a layer: of lazy matrices, or of kept statistics; no matrix is built.

B batch, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from foci.record.dense import MAX_STRIP_ENTRIES, DenseWeights, RightOperand, pool_matrix_rows
from foci.record.kept import MEAN_STATISTICS, KeptStatistics
from foci.record.window_weights import WindowWeights
from foci.weights.checks import check_dense_limit, check_k, check_picture_size
from foci.weights.summary import Top
from foci.weights.weights import Weights


class StepMean(RightOperand):
    """The mean of the attention matrices of several steps, with the methods of `Weights`.

    >>> steps = [torch.rand(1, 2, 4, 6).softmax(-1) for _ in range(3)]
    >>> mean = StepMean([DenseWeights(step) for step in steps])
    >>> mean.shape, bool(torch.allclose(mean[0, 1, 2], torch.stack(steps).mean(0)[0, 1, 2]))
    ((1, 2, 4, 6), True)

    What is linear in the weights is the mean of the steps; entropies and heaviest keys are those of the mean matrix,
    read in strips of rows.

    Args:
        steps: the matrices, all of one shape.
    """

    def __init__(self, steps: Sequence[Weights | DenseWeights | StepMean | WindowWeights]) -> None:
        self.steps = list(steps)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.steps[0].shape)

    @property
    def device(self) -> torch.device:
        return self.steps[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.steps[0].dtype

    def _average(self, compute: Callable[[Any], Tensor]) -> Tensor:
        """The mean of one result per step, added up step by step."""
        total = compute(self.steps[0])
        for step in self.steps[1:]:
            total = total + compute(step)
        return total / len(self.steps)

    def __getitem__(self, index: Any) -> StepMean | Tensor:
        first = self.steps[0][index]
        if isinstance(first, Tensor):
            return self._average(lambda step: step[index])
        selected: list[Any] = [first, *(step[index] for step in self.steps[1:])]
        return StepMean(selected)

    def __matmul__(self, x: Tensor) -> Tensor:
        return self._average(lambda step: step @ x)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        return self._average(lambda step: step.__rmatmul__(x))

    def mean(self, over: str) -> StepMean:
        """The mean over the heads, again lazy."""
        return StepMean([step.mean(over) for step in self.steps])

    def received(self, queries: Any = None, per: str = "query_head") -> Tensor:
        return self._average(lambda step: step.received(queries, per))

    def distance(self) -> Tensor:
        return self._average(lambda step: step.distance())

    def grouped(self, query_groups: Any, key_groups: Any) -> Tensor:
        return self._average(lambda step: step.grouped(query_groups, key_groups))

    def entropy(self) -> Tensor:
        return torch.cat([strip.entropy() for strip in self._strips()], -1)

    def top(self, k: int) -> Top:
        check_k(k, self.shape[-1])
        parts = [strip.top(k) for strip in self._strips()]
        return Top(torch.cat([part.values for part in parts], -2), torch.cat([part.keys for part in parts], -2))

    def _strips(self) -> Iterator[DenseWeights]:
        *lead, queries, keys = self.shape
        size = max(1, MAX_STRIP_ENTRIES // max(1, keys * torch.Size(lead).numel()))
        # At least one strip, which is empty if there are no queries.
        for start in range(0, max(queries, 1), size):
            yield DenseWeights(self._rows(slice(start, start + size)))

    def _rows(self, rows: slice) -> Tensor:
        entries = self[..., rows, :]
        assert isinstance(entries, Tensor)
        return entries

    def picture(self, rows: int, columns: int, reduce: str = "mean") -> Tensor:
        check_picture_size(rows, columns, reduce, *self.shape[-2:])
        if reduce == "mean":
            return self._average(lambda step: step.picture(rows, columns, reduce))
        queries = self.shape[-2]
        edges = [row * queries // rows for row in range(rows + 1)]
        strips = [self._rows(slice(low, high)).amax(-2) for low, high in pairwise(edges)]
        return pool_matrix_rows(torch.stack(strips, -2).mT, columns, reduce).mT

    def dense(self, limit: int = 2**30) -> Tensor:
        check_dense_limit(self.shape, self.dtype, limit)
        return self._rows(slice(None))


class MeanStatistics(KeptStatistics):
    """The mean over steps of kept statistics, each computed when it is read.

    The mean of entropies is not the entropy of the mean matrix, which was not kept.

    Args:
        steps: the statistics of each step.
    """

    def __init__(self, steps: Sequence[KeptStatistics]) -> None:
        self.steps, self.shape = list(steps), steps[0].shape
        self._names = [name for name in MEAN_STATISTICS if all(name in step for step in steps)]
        # Those that were read.
        self.statistics: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name in self._names and name not in self.statistics:
            total = self.steps[0][name].float()
            for step in self.steps[1:]:
                total = total + step[name]
            self.statistics[name] = total / len(self.steps)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def head(self, index: int) -> KeptStatistics:
        return MeanStatistics([step.head(index) for step in self.steps])

    def with_head_axis(self) -> KeptStatistics:
        return MeanStatistics([step.with_head_axis() for step in self.steps])


def average_steps(
    sources: Sequence[Weights | DenseWeights | StepMean | WindowWeights | KeptStatistics],
) -> StepMean | MeanStatistics:
    """The mean of the data of a layer at several steps."""
    kept = [source for source in sources if isinstance(source, KeptStatistics)]
    return MeanStatistics(kept) if kept else StepMean([s for s in sources if not isinstance(s, KeptStatistics)])

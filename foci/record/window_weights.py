"""WindowWeights: attention within windows of a grid, such as Swin's, as one matrix over the whole grid.

B batch, H heads, W windows, n patches of a window, N patches of the grid.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from foci.record.dense import DenseWeights, RightOperand, build_group_membership, pool_matrix_rows
from foci.weights.checks import check_dense_limit, check_k, check_over, check_picture_size
from foci.weights.grouping import assign_groups
from foci.weights.indexing import parse_axis_index, parse_leading_index, split_index
from foci.weights.summary import Top


class WindowWeights(RightOperand):
    """The weights within windows as a matrix (..., N, N) that is zero elsewhere; only the windows are held.

    >>> windows = torch.rand(1, 2, 4, 4, 4).softmax(-1)                       # four windows of 2 x 2 in a 4 x 4 grid
    >>> positions = torch.arange(16).view(2, 2, 2, 2).transpose(1, 2).reshape(4, 4)
    >>> weights = WindowWeights(windows, positions, 16)
    >>> weights.shape, weights[0, 1, 5].nonzero().flatten().tolist()
    ((1, 2, 16, 16), [0, 1, 4, 5])

    Args:
        windows: the weights of each window, (..., W, n, n).
        positions: the patch of the grid at each position of a window, (W, n); -1 for padding.
        length: the number of patches N.
    """

    def __init__(self, windows: Tensor, positions: Tensor, length: int) -> None:
        self.windows, self.positions, self.length = windows, positions, length
        count, size = positions.shape
        # For each patch its position among those of all windows.
        self.places = torch.full((length + 1,), -1, dtype=torch.long)
        self.places[positions.flatten()] = torch.arange(count * size)
        self.places = self.places[:length]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.windows.shape[:-3], self.length, self.length)

    @property
    def nbytes(self) -> int:
        return self.windows.nbytes + self.positions.nbytes

    @property
    def device(self) -> torch.device:
        return self.windows.device

    @property
    def dtype(self) -> torch.dtype:
        return self.windows.dtype

    def select_heads(self, index: int) -> WindowWeights:
        """One head, without a head axis."""
        return WindowWeights(self.windows[:, index], self.positions, self.length)

    def with_head_axis(self) -> WindowWeights:
        """One head, as weights of one head."""
        return WindowWeights(self.windows.unsqueeze(1), self.positions, self.length)

    def __getitem__(self, index: Any) -> WindowWeights | Tensor:
        lead, matrix = split_index(index, self.shape)
        selected = tuple(parse_leading_index(item, size) for item, size in zip(lead, self.shape, strict=False))
        part = WindowWeights(self.windows[selected], self.positions, self.length)
        if not matrix:
            return part
        rows, columns = (
            parse_axis_index(item, self.length, name, torch.device("cpu"))
            for item, name in zip(matrix, ("query", "key"), strict=True)
        )
        if rows.is_list and columns.is_list:
            raise IndexError(f"only one of the query and key indices must be a list, got {matrix!r}")
        entries = part._rows(rows.index)[..., columns.index.to(self.device)]
        removed = [axis for axis, each in ((-2, rows), (-1, columns)) if each.dropped]
        return entries.squeeze(removed)

    def _rows(self, queries: Tensor) -> Tensor:
        """(..., R, N): the rows of some patches."""
        size = self.positions.shape[1]
        places = self.places[queries]
        rows = self.windows.flatten(-3, -2)[..., places.to(self.device), :]
        # Padding among the keys goes to a column that is cut off.
        keys = self.positions[places // size]
        keys = torch.where(keys < 0, self.length, keys).to(self.device)
        found = rows.new_zeros(*rows.shape[:-1], self.length + 1)
        return found.scatter(-1, keys.expand(rows.shape), rows)[..., : self.length]

    def _gather(self, x: Tensor) -> Tensor:
        """(..., N, M) -> (..., W, n, M): the values of the patches of each window; 0 for padding."""
        values = x[..., self.positions.clamp(min=0).to(x.device), :]
        return values * (self.positions >= 0).to(x)[..., None]

    def _collect(self, x: Tensor) -> Tensor:
        """(..., W, n) -> (..., N): values of windows at their places in the grid."""
        return x.flatten(-2)[..., self.places.to(x.device)]

    def __matmul__(self, x: Tensor) -> Tensor:
        column = x.unsqueeze(-1) if x.dim() == 1 else x
        product = self.windows.to(x.dtype) @ self._gather(column)
        found = product.flatten(-3, -2)[..., self.places.to(x.device), :]
        return found.squeeze(-1) if x.dim() == 1 else found

    def __rmatmul__(self, x: Tensor) -> Tensor:
        rows = x.unsqueeze(0) if x.dim() == 1 else x
        product = self.windows.to(x.dtype).mT @ self._gather(rows.mT)
        found = product.flatten(-3, -2)[..., self.places.to(x.device), :].mT
        return found.squeeze(-2) if x.dim() == 1 else found

    def mean(self, over: str) -> WindowWeights:
        check_over(over)
        return WindowWeights(self.windows.mean(-4), self.positions, self.length)

    def entropy(self) -> Tensor:
        nats: Tensor = torch.special.entr(self.windows)
        return self._collect(nats.sum(-1))

    def received(self, queries: Any = None, per: str = "query_head") -> Tensor:
        if per != "query_head":
            raise ValueError(f"per must be 'query_head' for attention within windows, got {per!r}")
        counted = torch.ones(self.length) if queries is None else torch.zeros(self.length)
        counted[slice(None) if queries is None else queries] = 1
        return self.__rmatmul__(counted.to(self.windows))

    def distance(self) -> Tensor:
        apart = (self.positions[:, None] - self.positions[..., None]).abs() * (self.positions >= 0)[:, None]
        return self._collect((self.windows * apart.to(self.device)).sum(-1))

    def top(self, k: int) -> Top:
        check_k(k, self.length)
        inside = self.windows * (self.positions >= 0)[:, None].to(self.windows)
        found = DenseWeights(inside).top(min(k, self.positions.shape[1]))
        numbers = torch.arange(len(self.positions), device=self.device)[:, None, None]
        patches = self.positions.to(self.device)[numbers, found.keys.clamp(min=0)]
        patches = torch.where(found.keys < 0, -1, patches)
        missing = k - found.keys.shape[-1]
        parts = []
        for values, fill in ((found.values, 0), (patches, -1)):
            placed = values.flatten(-3, -2)[..., self.places.to(self.device), :]
            parts.append(torch.nn.functional.pad(placed, (0, missing), value=fill))
        return Top(parts[0], parts[1])

    def picture(self, rows: int, columns: int, reduce: str = "mean") -> Tensor:
        check_picture_size(rows, columns, reduce, self.length, self.length)
        edges = [row * self.length // rows for row in range(rows + 1)]
        strips = []
        for low, high in pairwise(edges):
            strip = pool_matrix_rows(self._rows(torch.arange(low, high)), 1, reduce)
            strips.append(pool_matrix_rows(strip.mT, columns, reduce).mT)
        return torch.cat(strips, -2)

    def grouped(self, query_groups: Any, key_groups: Any) -> Tensor:
        rows = build_group_membership(*assign_groups(query_groups, self.length, "query_groups", self.device))
        columns = build_group_membership(*assign_groups(key_groups, self.length, "key_groups", self.device))
        share = rows.to(self.windows) / rows.sum(-1, keepdim=True)
        return share @ (self @ columns.to(self.windows).mT)

    def dense(self, limit: int = 2**30) -> Tensor:
        check_dense_limit(self.shape, self.dtype, limit)
        return self._rows(torch.arange(self.length))

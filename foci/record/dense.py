"""DenseWeights: a dense attention matrix with the methods of `Weights`.

B batch, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foci.weights.checks import check_k, check_over, check_picture_size
from foci.weights.grouping import assign_groups
from foci.weights.summary import Top

# The largest number of matrix entries read at a time.
MAX_STRIP_ENTRIES = 1 << 22


class RightOperand:
    """A matrix with `__matmul__` and `__rmatmul__` that may also stand right of a tensor: `x @ matrix`."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Dispatches the matrix products of PyTorch."""
        if function is torch.Tensor.__rmatmul__:
            return args[1].__matmul__(args[0])
        left, right = args
        is_left = isinstance(left, cls)
        return left.__matmul__(right) if is_left else right.__rmatmul__(left)


class DenseWeights:
    """A dense matrix (..., Tq, Tk) with the methods of `Weights`.

    >>> matrix = torch.rand(2, 4, 6, 6).softmax(-1)
    >>> DenseWeights(matrix).entropy().shape, DenseWeights(matrix).top(3).keys.shape
    (torch.Size([2, 4, 6]), torch.Size([2, 4, 6, 3]))

    Args:
        matrix: (..., Tq, Tk) of any float dtype.
        positions: the positions of the queries among the keys, (Tq,); None: the last query at the last key.
    """

    def __init__(self, matrix: Tensor, positions: Tensor | None = None) -> None:
        self.matrix = matrix
        queries, keys = matrix.shape[-2:]
        default = torch.arange(queries) + (keys - queries)
        self.positions = (default if positions is None else positions).to(matrix.device)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.matrix.shape)

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    @property
    def _as_float32(self) -> Tensor:
        return self.matrix.to(torch.promote_types(self.matrix.dtype, torch.float32))

    def __getitem__(self, index: Any) -> Tensor:
        return self.matrix[index]

    def __matmul__(self, x: Tensor) -> Tensor:
        return self._as_float32.to(x.dtype) @ x

    def __rmatmul__(self, x: Tensor) -> Tensor:
        is_vector = x.dim() == 1
        product = (x.unsqueeze(0) if is_vector else x) @ self._as_float32.to(x.dtype)
        return product.squeeze(-2) if is_vector else product

    def mean(self, over: str) -> DenseWeights:
        check_over(over)
        return DenseWeights(self._as_float32.mean(-3), self.positions)

    def entropy(self) -> Tensor:
        nats: Tensor = torch.special.entr(self._as_float32)
        return nats.sum(-1)

    def received(self, queries: Any = None, per: str = "query_head") -> Tensor:
        if per != "query_head":
            raise ValueError(
                f"per must be 'query_head' for a dense matrix, which does not say which heads share keys, got {per!r}"
            )
        return self._as_float32.sum(-2) if queries is None else self._as_float32[..., queries, :].sum(-2)

    def distance(self) -> Tensor:
        keys = torch.arange(self.shape[-1], device=self.matrix.device)
        return (self._as_float32 * (keys - self.positions[:, None]).abs()).sum(-1)

    def top(self, k: int) -> Top:
        check_k(k, self.shape[-1])
        # A stable sort: of equal weights the lower key comes first.
        values, keys = self._as_float32.sort(dim=-1, descending=True, stable=True)
        values, keys = values[..., :k], keys[..., :k]
        return Top(values, torch.where(values > 0, keys, -1))

    def picture(self, rows: int, columns: int, reduce: str = "mean") -> Tensor:
        check_picture_size(rows, columns, reduce, *self.shape[-2:])
        return pool_matrix_rows(pool_matrix_rows(self._as_float32, rows, reduce).mT, columns, reduce).mT

    def grouped(self, query_groups: Any, key_groups: Any) -> Tensor:
        queries, keys = self.shape[-2:]
        rows = build_group_membership(*assign_groups(query_groups, queries, "query_groups", self.matrix.device))
        columns = build_group_membership(*assign_groups(key_groups, keys, "key_groups", self.matrix.device))
        matrix = self._as_float32
        rows, columns = rows.to(matrix.dtype), columns.to(matrix.dtype)
        return (rows / rows.sum(-1, keepdim=True)) @ matrix @ columns.mT


def pool_matrix_rows(matrix: Tensor, count: int, reduce: str) -> Tensor:
    """(..., T, N) -> (..., count, N): mean or maximum of runs of rows with edges floor(r T / count)."""
    length = matrix.shape[-2]
    runs = [matrix[..., r * length // count : (r + 1) * length // count, :] for r in range(count)]
    return torch.stack([run.mean(-2) if reduce == "mean" else run.amax(-2) for run in runs], dim=-2)


def build_group_membership(ids: Tensor, count: int) -> Tensor:
    """Bool (groups, T): which token belongs to which group."""
    return ids == torch.arange(count, device=ids.device)[:, None]

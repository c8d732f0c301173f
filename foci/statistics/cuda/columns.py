"""Columns of the attention matrix on a GPU, of plain calls without a log-sum-exp: one launch, for little host time.

B batch, H heads, Tq queries, Tk keys, D width, C columns.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from foci.arguments import KERNEL_DTYPES
from foci.gpu.arguments import INTERPRETER_TILES, next_power_of_two, stride_arguments
from foci.gpu.launcher import MAX_CACHED_PLANS, LaunchPlan, build_kernel_launch
from foci.runtime.device import has_triton
from foci.runtime.tensor_cache import get_or_make
from foci.statistics.cuda import arguments
from foci.statistics.cuda.arguments import MAX_WIDTH
from foci.statistics.cuda.launches import statistics_dot_precision


def supports(q: Tensor, k: Tensor) -> bool:
    """Whether the kernel takes these queries and keys: (B, H, Tq, D) and (B, H, Tk, D), with contiguous features."""
    return (
        arguments.is_on_gpu(q)
        and q.device == k.device
        and q.shape[:2] == k.shape[:2]
        and q.shape[3] == k.shape[3]
        and q.dtype == k.dtype
        and q.dtype in KERNEL_DTYPES
        and 0 < q.shape[3] <= MAX_WIDTH
        and q.stride(3) == k.stride(3) == 1
        and min(q.numel(), k.numel()) > 0
        and has_triton()
    )


class ColumnsLaunch:
    """The launch for one kind of call, for any tensors of the same layout.

    Args:
        q, k: the tensors of the first call.
        rows: the sequences of the batch whose weights are computed.
        keys: the columns.
        dtype: of the result.
    """

    def __init__(self, q: Tensor, k: Tensor, rows: range, keys: range, dtype: torch.dtype) -> None:
        from foci.kernels.statistics.columns import compute_columns

        heads, queries, width = q.shape[1:]
        self.shape, self.dtype, self.device = (len(rows), heads, queries, len(keys)), dtype, q.device
        # Fewer rows where they are wide: the tiles of a program must fit into registers and shared memory.
        wide = next_power_of_two(width)
        most = max(16, min(64, 2**14 // (wide * q.element_size()))) if q.is_cuda else INTERPRETER_TILES.queries
        scalars = {
            "heads": heads, "Tq": queries, "Tk": k.shape[2], "D": width, "first_batch": rows.start,
            "first_key": keys.start, "C": len(keys), "scale": width**-0.5,
            **stride_arguments("q", q, "query"), **stride_arguments("k", k, "key"),
            "BM": most, "BN": min(most, next_power_of_two(k.shape[2])), "BC": min(most, next_power_of_two(len(keys))),
            "BD": wide, "PRECISION": statistics_dot_precision(q),
        }  # fmt: skip
        grid = (len(rows) * heads * -(-queries // most),)
        launch = build_kernel_launch(compute_columns, grid, scalars, num_warps=4, num_stages=2)
        self.plan = LaunchPlan({}, q.device, [launch])

    def run(self, q: Tensor, k: Tensor) -> Tensor:
        """The columns (sequences, H, Tq, C)."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        # The compiled launch of `LaunchPlan.replay`, without a dict of addresses and a workspace.
        if self.plan.compiled_launches and torch.cuda.current_device() == self.device.index:
            ((compiled, _, scalars),) = self.plan.compiled_launches
            addresses = q.data_ptr(), k.data_ptr()
            if (addresses[0] | addresses[1]) % 16 == 0:
                compiled(*addresses, out.data_ptr(), *scalars)
                return out
        self.plan({"q": q, "k": k, "out": out})
        return out


COLUMNS_LAUNCHES: dict[Hashable, ColumnsLaunch] = {}


def compute_columns(q: Tensor, k: Tensor, rows: range, keys: range, dtype: torch.dtype) -> Tensor | None:
    """The weights of all queries (B, H, Tq, D) of consecutive sequences on consecutive keys: (sequences, H, Tq, C).

    None where the kernel does not support the call.
    """
    key = q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device, rows, keys, dtype
    launch = COLUMNS_LAUNCHES.get(key)
    if launch is None:
        if not supports(q, k):
            return None
        launch = get_or_make(COLUMNS_LAUNCHES, MAX_CACHED_PLANS, key, lambda: ColumnsLaunch(q, k, rows, keys, dtype))
    return launch.run(q, k)

"""What all of our kernels take: tensors in the layout that they read, the scalars that follow from it, and tile sizes.

B batch, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Tiling(NamedTuple):
    """The tile sizes and launch options of one kernel."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # maximum per thread, so that more programs share a multiprocessor

    def sizes(self) -> dict[str, Any]:
        return {"BM": self.queries, "BN": self.keys}

    def options(self) -> dict[str, Any]:
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages} | limit


# Small, because the interpreter also spends time on padding.
INTERPRETER_TILES = Tiling(16, 16, 4, 1)


def layout_key(x: Tensor | None) -> Hashable:
    """What the scalar arguments of a kernel depend on: shape, strides and dtype."""
    return None if x is None else (x.shape, x.stride(), x.dtype)


def with_contiguous_rows(x: Tensor) -> Tensor:
    """x, copied if the stride of its last dimension is not 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def make_contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if x is None else x.contiguous() for x in tensors)


def view_as_bytes(dense: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """A dense mask, broadcast to (B, H, Tq, Tk), as the kernels read it."""
    return None if dense is None else dense.expand(*q.shape[:3], k.shape[2]).view(torch.uint8)


def batch_stride(x: Tensor | None) -> int:
    """The stride of the batch dimension; 0 where the whole batch shares one entry or x is None."""
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)


def stride_arguments(name: str, x: Tensor, row: str = "row") -> dict[str, int]:
    return {f"{name}_batch": x.stride(0), f"{name}_head": x.stride(1), f"{name}_{row}": x.stride(2)}


def mask_arguments(
    key_ranges: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None, dense: Tensor | None
) -> dict[str, Any]:
    """The strides of a mask's tensors, and which of them there are; `dense` comes from `view_as_bytes`."""
    strides = (0, 0, 0, 0) if dense is None else dense.stride()
    return {
        "key_ranges_batch": batch_stride(key_ranges), "query_ids_batch": batch_stride(query_ids),
        "key_ids_batch": batch_stride(key_ids),
        "dense_batch": strides[0], "dense_head": strides[1], "dense_query": strides[2], "dense_key": strides[3],
        "RANGES": 0 if key_ranges is None else key_ranges.shape[1],
        "IDS": query_ids is not None, "DENSE": dense is not None,
    }  # fmt: skip


def next_power_of_two(n: int, minimum: int = 16) -> int:
    """The next power of two, which tile sizes must be; matrix products need at least 16."""
    return max(minimum, 1 << (n - 1).bit_length())

"""Exact entries of the attention matrix on a GPU: some rows of it by one launch.

B batch, H query heads, G key/value heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from foci.arguments import Call
from foci.biases import ALiBi
from foci.gpu.arguments import batch_stride, make_contiguous, view_as_bytes, with_contiguous_rows
from foci.gpu.mask_inputs import build_kernel_masks
from foci.gpu.self_check import address_failure
from foci.runtime.tracing import disable_autocast, is_traced
from foci.scores import Dot
from foci.statistics import cuda

# More rows than this are computed by matrix products.
MAX_ROWS = 16
# Columns of a program; features that it multiplies at a time.
BLOCK_COLUMNS, BLOCK_FEATURES = 64, 64
# Larger numbers would be other kernel arguments: int64.
MAX_INT32 = 2**31 - 1

COMPILED_KERNELS: dict[Hashable, Any] = {}


def is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def refuses(call: Call, rows: int) -> bool:
    """Whether `compute_rows` does not support these rows of the call."""
    return (
        rows > MAX_ROWS
        or type(call.score) is not Dot
        or call.needs_grad
        or is_traced(call.q)
        or not isinstance(call.bias, ALiBi | None)
        or bool(cuda.refuses(call))
    )


@disable_autocast
def compute_rows(
    call: Call, lse: Tensor, batches: range, heads: range, queries: range, keys: range, shape: tuple[int, ...]
) -> Tensor:
    """The weights of consecutive sequences and heads, and of evenly spaced queries and keys, as float32 of this shape.

    Only the kind of call is compiled: other lengths, layouts and indices run the same kernel.
    """
    out = torch.empty(shape, dtype=torch.float32, device=call.q.device)
    if out.numel() == 0:
        return out
    score, masks, slopes = call.score, build_kernel_masks(call), None
    assert isinstance(score, Dot)
    if isinstance(call.bias, ALiBi):
        assert call.bias.slopes is not None
        slopes = call.bias.slopes if call.head_ids is None else call.bias.slopes[call.head_ids]
    q, k, lse = map(with_contiguous_rows, (call.q, call.k, lse))
    key_ranges, query_ids, key_ids, slopes = make_contiguous(masks.key_ranges, masks.query_ids, masks.key_ids, slopes)
    dense = view_as_bytes(masks.dense, q, k)
    numbers = (
        call.group, q.shape[2], k.shape[2], q.shape[3], *q.stride()[:3], *k.stride()[:3], *lse.stride()[:2],
        batch_stride(key_ranges), batch_stride(query_ids), batch_stride(key_ids),
        *((0, 0, 0, 0) if dense is None else dense.stride()),
        score.factor(q.shape[3]), float(score.softcap or 0.0),
        batches.start, heads.start, len(heads), queries.start, queries.step, keys.start, keys.step,
        len(queries), len(keys),
    )  # fmt: skip
    kind = (
        masks.causal, 0 if key_ranges is None else key_ranges.shape[1], query_ids is not None, dense is not None,
        score.softcap is not None, slopes is not None, BLOCK_COLUMNS, BLOCK_FEATURES,
    )  # fmt: skip
    grid = len(batches) * len(heads) * len(queries), -(-len(keys) // BLOCK_COLUMNS), 1
    optional = (key_ranges, query_ids, key_ids, dense, slopes)
    launch_on_device(grid, [q, k, lse, *(lse if x is None else x for x in optional), out], numbers, kind)
    return out


def launch_on_device(
    grid: tuple[int, int, int], tensors: list[Tensor], numbers: tuple[Any, ...], kind: tuple[Any, ...]
) -> None:
    device = tensors[0].device
    if device.type == "cpu" or torch.cuda.current_device() == device.index:
        launch(grid, tensors, numbers, kind)
        return
    with torch.cuda.device(device):
        launch(grid, tensors, numbers, kind)


def launch(grid: tuple[int, int, int], tensors: list[Tensor], numbers: tuple[Any, ...], kind: tuple[Any, ...]) -> None:
    """Runs the compiled kernel with new addresses and numbers, or compiles it first."""
    from foci.kernels.statistics.entries import compute_entries

    addresses = [x.data_ptr() for x in tensors]
    replayable = all(address % 16 == 0 for address in addresses) and max(numbers) <= MAX_INT32
    q, _, lse, _, query_ids, key_ids, _, slopes, _ = tensors
    key = kind, q.device, q.dtype, lse.dtype, query_ids.dtype, key_ids.dtype, slopes.dtype
    compiled = COMPILED_KERNELS.get(key)
    if compiled is not None and replayable:
        compiled[grid](*addresses, *numbers, *kind)
        return
    compiled = compute_entries[grid](*tensors, *numbers, *kind, num_warps=4)
    # The interpreter compiles nothing.
    if compiled is not None and replayable and address_failure(tensors[0].device.index or 0) is None:
        COMPILED_KERNELS[key] = compiled

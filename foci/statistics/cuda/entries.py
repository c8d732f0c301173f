"""Exact entries of the attention matrix on a GPU: some rows of it by one launch.

B batch, H query heads, G key/value heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.arguments import Call
from foci.biases import ALiBi
from foci.gpu.arguments import batch_stride, make_contiguous, view_as_bytes, with_contiguous_rows
from foci.gpu.compiled_launch import bind_launch
from foci.gpu.launcher import MAX_CACHED_PLANS
from foci.gpu.self_check import address_failure
from foci.masks.kernel_inputs import build_kernel_masks
from foci.runtime.tracing import disable_autocast, is_traced
from foci.scores import Dot
from foci.statistics import cuda
from foci.statistics.cuda.arguments import describe_plain_call

# More rows than this are computed by matrix products.
MAX_ROWS = 16
# Columns of a program; features that it multiplies at a time.
BLOCK_COLUMNS, BLOCK_FEATURES = 64, 64
# Larger numbers would be other kernel arguments: int64.
MAX_INT32 = 2**31 - 1

COMPILED_KERNELS: dict[Hashable, Any] = {}


class RowLaunch(NamedTuple):
    """The compiled launch for one row of a plain call: `layout` are the numbers before the indices."""

    launch: Callable[..., None]
    layout: tuple[Any, ...]
    kind: tuple[Any, ...]


# By the layout of a plain call.
ROW_LAUNCHES: dict[Hashable, RowLaunch] = {}


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


def compute_row(call: Call, lse: Tensor, batch: int, head: int, query: int) -> Tensor | None:
    """One row, (Tk,), of a plain call of a known layout after a few comparisons; None leaves it to `compute_rows`."""
    layout = describe_plain_call(call, lse)
    known = None if layout is None else ROW_LAUNCHES.get(layout)
    if known is None or call.needs_grad:
        return None
    q, k, keys = call.q, call.k, call.k.shape[2]
    if q.is_cuda and torch.cuda.current_device() != q.device.index:
        return None
    row = torch.empty(keys, dtype=torch.float32, device=q.device)
    at_lse, addresses = lse.data_ptr(), (q.data_ptr(), k.data_ptr(), row.data_ptr())
    if (addresses[0] | addresses[1] | addresses[2] | at_lse) % 16:
        return None
    # The log-sum-exp stands for tensors that the call lacks: they are never read.
    known.launch(
        *addresses[:2], *[at_lse] * 6, addresses[2], *known.layout, batch, head, 1, query, 1, 0, 1, 1, keys, *known.kind
    )
    return row


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
    layout = (
        call.group, q.shape[2], k.shape[2], q.shape[3], *q.stride()[:3], *k.stride()[:3], *lse.stride()[:2],
        batch_stride(key_ranges), batch_stride(query_ids), batch_stride(key_ids),
        *((0, 0, 0, 0) if dense is None else dense.stride()),
        score.factor(q.shape[3]), float(score.softcap or 0.0),
    )  # fmt: skip
    indices = batches.start, heads.start, len(heads), queries.start, queries.step, keys.start, keys.step
    kind = (
        masks.causal, 0 if key_ranges is None else key_ranges.shape[1], query_ids is not None, dense is not None,
        score.softcap is not None, slopes is not None, BLOCK_COLUMNS, BLOCK_FEATURES,
    )  # fmt: skip
    grid = len(batches) * len(heads) * len(queries), -(-len(keys) // BLOCK_COLUMNS), 1
    optional = (key_ranges, query_ids, key_ids, dense, slopes)
    tensors = [q, k, lse, *(lse if x is None else x for x in optional), out]
    launch_on_device(grid, tensors, (*layout, *indices, len(queries), len(keys)), kind)
    if grid[0] == 1 and q is call.q and k is call.k and all(x is None for x in optional):
        remember_row(call, tensors, layout, kind)
    return out


def remember_row(call: Call, tensors: list[Tensor], layout: tuple[Any, ...], kind: tuple[Any, ...]) -> None:
    """Keeps the launch for rows of calls like this one, if the kernel is compiled for addresses."""
    described = describe_plain_call(call, tensors[2])
    compiled = COMPILED_KERNELS.get(compiled_key(tensors, kind))
    if described is None or described in ROW_LAUNCHES or compiled is None or max(layout) > MAX_INT32:
        return
    if len(ROW_LAUNCHES) >= MAX_CACHED_PLANS:
        ROW_LAUNCHES.clear()
    grid = 1, -(-call.k.shape[2] // BLOCK_COLUMNS), 1
    ROW_LAUNCHES[described] = RowLaunch(bind_launch(compiled, grid, call.q.device), layout, kind)


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
    key = compiled_key(tensors, kind)
    compiled = COMPILED_KERNELS.get(key)
    if compiled is not None and replayable:
        compiled[grid](*addresses, *numbers, *kind)
        return
    compiled = compute_entries[grid](*tensors, *numbers, *kind, num_warps=4)
    # The interpreter compiles nothing.
    if compiled is not None and replayable and address_failure(tensors[0].device.index or 0) is None:
        COMPILED_KERNELS[key] = compiled


def compiled_key(tensors: list[Tensor], kind: tuple[Any, ...]) -> Hashable:
    """What the kernel is compiled for."""
    q, _, lse, _, query_ids, key_ids, _, slopes, _ = tensors
    return kind, q.device, q.dtype, lse.dtype, query_ids.dtype, key_ids.dtype, slopes.dtype

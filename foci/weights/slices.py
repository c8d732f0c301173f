"""Computes exact entries of the attention matrix, for some queries and some keys.

B batch, H heads, R chosen queries, C chosen keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.arguments import Call
from foci.backends import reference
from foci.backends.strips import recompute_in_backward, strip_budget
from foci.biases import DenseBias
from foci.masks.kinds import Causal
from foci.masks.tile import Tile
from foci.runtime.tracing import disable_autocast, is_capturing_cuda_graph, is_traced
from foci.scores import Dot
from foci.statistics.cuda import arguments
from foci.statistics.cuda import columns as cuda_columns
from foci.statistics.streaming import finite_lse

# Without gradients only the result is kept, so that this many strips are computed at a time.
STRIPS_PER_STEP = 16

# Queries whose entries are computed at a time.
DIAGONAL_BLOCK = 128

# A larger log-sum-exp has too few digits left for the differences between the logits of a row.
MAX_PRECISE_LSE = 1e4


@disable_autocast
def compute_entries(call: Call, lse: Tensor, rows: Tensor, columns: Tensor, averaged: bool) -> Tensor:
    """(B, H, R, C), recomputed from q, k and the log-sum-exp; differentiable if gradients are enabled."""
    shape = (call.q.shape[0], 1 if averaged else call.q.shape[1], rows.numel(), columns.numel())
    if 0 in shape:
        return call.q.new_zeros(shape, dtype=call.softmax_dtype)
    if call.needs_grad:
        some = rows.split(count_rows_per_step(call, call.k.shape[2], 1))
        return torch.cat(
            [recompute_in_backward(call, entries_from_full_rows, call, part, columns, averaged) for part in some], dim=2
        )
    entries = call.q.new_empty(shape, dtype=call.softmax_dtype)
    start = 0
    for part in rows.split(count_rows_per_step(call, columns.numel(), STRIPS_PER_STEP)):
        entries[:, :, start : start + part.numel()] = entries_from_lse(call, lse, part, columns, averaged)
        start += part.numel()
    return entries


def compute_diagonal(call: Call, lse: Tensor, offset: int, averaged: bool) -> Tensor:
    """(B, H, Tq): the entries whose key stands `offset` after its query, 0 where there is none; in blocks."""
    if call.positions is not None:
        return compute_diagonal_of_positions(call, lse, offset, averaged)
    queries, keys = call.q.shape[2], call.k.shape[2]
    shift = keys - queries + offset
    start = min(max(-shift, 0), queries)
    stop = max(min(queries, keys - shift), start)
    indices = torch.arange(start, stop, device=call.q.device)
    parts = [
        compute_entries(call, lse, rows, rows + shift, averaged).diagonal(dim1=-2, dim2=-1)
        for rows in indices.split(DIAGONAL_BLOCK)
    ]
    return F.pad(torch.cat(parts, -1), (start, queries - stop))


def compute_diagonal_of_positions(call: Call, lse: Tensor, offset: int, averaged: bool) -> Tensor:
    """The same with positions of the caller's own; where several keys stand there, their sum."""
    assert call.positions is not None
    query_positions, key_positions = call.positions
    columns = torch.arange(call.k.shape[2], device=call.q.device)
    parts = []
    for rows in torch.arange(call.q.shape[2], device=call.q.device).split(DIAGONAL_BLOCK):
        there = key_positions[:, None] == query_positions[:, rows, None] + offset
        parts.append((compute_entries(call, lse, rows, columns, averaged) * there[:, None]).sum(-1))
    return torch.cat(parts, -1)


def has_plain_rows(call: Call) -> bool:
    """Whether `compute_row` supports the call: a dot product on a CPU, without a bias, a mask other than `causal`, or a
    gradient.
    """
    mask = call.mask
    return (
        type(call.score) is Dot
        and call.score.softcap is None
        and call.bias is None
        and (mask is None or (type(mask) is Causal and call.positions is None))
        and call.q.is_cpu
        and not call.needs_grad
        and not call.is_transformed
        and not is_traced(call.q)
    )


@disable_autocast
def compute_row(call: Call, lse: Tensor, batch: int, head: int, query: int) -> Tensor:
    """One row of the matrix, (Tk,), of a call that `has_plain_rows`; a tenth of the operations of `compute_entries`."""
    assert isinstance(call.score, Dot)
    dtype, keys, shift = call.softmax_dtype, call.k.shape[2], lse[batch, head, query].item()
    seen = keys
    if isinstance(call.mask, Causal):
        offset = keys - call.q.shape[2] if call.mask.offset is None else call.mask.offset
        seen = min(max(query + offset + 1, 0), keys)
    row = call.q.new_zeros(keys, dtype=dtype)
    if seen:
        q, k = call.q[batch, head, query].to(dtype), call.k[batch, head // call.group, :seen].to(dtype)
        torch.mv(k, q, out=row[:seen]).mul_(call.score.factor(q.shape[0])).sub_(shift).exp_()
    return row


def has_plain_columns(call: Call, keys: int) -> bool:
    """Whether `compute_columns` supports the call: a dot product without a mask, a bias or a gradient, of which `keys`
    columns are computed in one piece.
    """
    return (
        type(call.score) is Dot
        and call.score.softcap is None
        and call.bias is None
        and call.mask is None
        and not call.needs_grad
        and not call.is_transformed
        and not is_traced(call.q)
        and count_rows_per_step(call, max(keys, 1), STRIPS_PER_STEP) >= call.q.shape[2]
    )


@disable_autocast
def compute_columns(call: Call, lse: Tensor, keys: slice) -> Tensor:
    """The columns of some keys, (B, H, Tq, C), of a call that `has_plain_columns`; in a few operations."""
    assert isinstance(call.score, Dot)
    dtype = call.softmax_dtype
    k = (
        call.k[:, :, keys].to(dtype).repeat_interleave(call.group, 1)
        if call.group > 1
        else call.k[:, :, keys].to(dtype)
    )
    factor = call.score.factor(call.q.shape[-1])
    return (call.q.to(dtype) @ k.mT).mul_(factor).sub_(finite_lse(lse).unsqueeze(-1)).exp_()


def compute_columns_of_short_rows(
    q: Tensor, k: Tensor, keys: slice | list[int], rows: slice | None, dtype: torch.dtype
) -> Tensor:
    """The columns of some keys, (rows, H, Tq, C), of a plain dot product with few keys: from whole rows.

    There is no log-sum-exp, so the model's own call can compute the output. Neither autocast nor gradients apply.

    Args:
        q, k: (B, H, Tq, D) and (B, H, Tk, D).
        keys: the columns.
        rows: the sequences of the batch whose weights are computed; None: all.
        dtype: of the result.
    """
    if isinstance(keys, slice) and arguments.is_on_gpu(q):
        sequences = range(q.shape[0]) if rows is None else range(rows.start, rows.stop)
        found = cuda_columns.compute_columns(q, k, sequences, range(keys.start, keys.stop), dtype)
        if found is not None:
            return found
    if rows is not None:
        q, k = q[rows], k[rows]
    product_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        # Of one sequence, whose heads lie in one tensor, these are views if no conversion is needed.
        queries, all_keys = q.to(product_dtype).flatten(0, 1), k.to(product_dtype).flatten(0, 1)
        # The scale is part of the product, and rounds nothing before it.
        logits = torch.baddbmm(queries.new_empty(1), queries, all_keys.mT, beta=0, alpha=q.shape[-1] ** -0.5)
        # A softmax would be handed to foci.watch.
        weights: Tensor = logits.log_softmax(-1)[..., keys].exp().unflatten(0, q.shape[:2]).to(dtype)
    return weights


def count_rows_per_step(call: Call, width: int, strips: int) -> int:
    return max(strip_budget(call)[0] * strips // (call.q.shape[0] * call.q.shape[1] * width), 1)


def entries_from_lse(call: Call, lse: Tensor, rows: Tensor, columns: Tensor, averaged: bool) -> Tensor:
    lse = finite_lse(lse[:, :, rows])
    if isinstance(call.bias, DenseBias) and has_imprecise_lse(lse):
        # A bias such as -1e9 was used as a mask: normalising the full row is exact where the log-sum-exp is not.
        return entries_from_full_rows(call, rows, columns, averaged)
    logits = reference.compute_logits(call, call.q[:, :, rows], call.k[:, :, columns], tile_at(call, rows, columns))
    weights = logits.sub_(lse.unsqueeze(-1)).exp_()
    return weights.mean(1, keepdim=True) if averaged else weights


def has_imprecise_lse(lse: Tensor) -> bool:
    """Whether a log-sum-exp is too large to be precise, or cannot be read."""
    return is_traced(lse) or is_capturing_cuda_graph(lse) or bool((lse.abs() > MAX_PRECISE_LSE).any())


def entries_from_full_rows(call: Call, rows: Tensor, columns: Tensor, averaged: bool) -> Tensor:
    """Entries normalised by their own rows, inside the graph: a detached log-sum-exp would give wrong gradients."""
    all_keys = torch.arange(call.k.shape[2], device=call.k.device)
    logits = reference.compute_logits(call, call.q[:, :, rows], call.k, tile_at(call, rows, all_keys))
    weights, row_lse = reference.softmax_with_lse(logits)
    if call.sink is not None:
        weights = weights * torch.sigmoid(finite_lse(row_lse) - call.sink.to(row_lse.dtype).view(1, -1, 1)).unsqueeze(
            -1
        )
    weights = weights[..., columns]
    return weights.mean(1, keepdim=True) if averaged else weights


def tile_at(call: Call, rows: Tensor, columns: Tensor) -> Tile:
    """The tile of some rows and columns, which need not be contiguous."""
    full = call.full_tile()
    return Tile(
        full.batch,
        full.head,
        full.query[:, :, rows],
        full.key[..., columns],
        full.query_position[:, :, rows],
        full.key_position[..., columns],
    )

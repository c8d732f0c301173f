"""Which blocks of the matrix a mask leaves empty, full or partial: a kernel skips empty blocks and evaluates the mask
only in partial ones.

A table has an entry for each block of 128 queries and 128 keys. `some` may be True too often and `every` too seldom:
this costs time but stays correct, because the mask itself decides in partial blocks.

Bm and Hm are 1 or the batch size and heads, nq and nk the numbers of blocks, Tq queries, Tk keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.arguments import Call
from foci.masks.base import Complement, Intersection, Mask, Union
from foci.masks.kinds import Documents
from foci.masks.range_algebra import KeyRanges

BLOCK_SIZE = 128

# Entries of the matrix that are evaluated at a time where a mask has to be evaluated entry by entry.
MAX_ENTRIES_PER_LOOKUP = 2**26


class BlockTables(NamedTuple):
    """Blocks with some visible entries and blocks with only visible entries; both broadcast to (Bm, Hm, nq, nk)."""

    some: Tensor
    every: Tensor


class BlockList(NamedTuple):
    """The marked blocks of each row of a table: how many there are, and all blocks of the row, marked ones first."""

    counts: Tensor  # (Bm, Hm, nq) int32
    order: Tensor  # (Bm, Hm, nq, nk) int32


@dataclass(frozen=True, slots=True)
class BlockLists:
    """The blocks to visit: by rows of blocks for the forward, in `columns` by columns of blocks for the backward."""

    partial: BlockList
    full: BlockList
    columns: BlockLists | None = None


def build_block_lists(call: Call) -> BlockLists:
    """Lists the visible blocks of the call's mask; by columns too where a backward will follow."""
    assert call.mask is not None
    queries, keys = call.q.shape[2], call.k.shape[2]
    some, every = build_tables(call.mask, call)
    rows, columns = (torch.arange(count_mask_blocks(length), device=call.q.device) for length in (queries, keys))
    # A block that extends over the edge is never full, so that the mask is evaluated there.
    full = every & (rows < queries // BLOCK_SIZE).unsqueeze(-1) & (columns < keys // BLOCK_SIZE)
    partial, full = torch.broadcast_tensors(some & ~full, full)
    transposed = BlockLists(list_blocks(partial.mT), list_blocks(full.mT)) if call.needs_grad else None
    return BlockLists(list_blocks(partial), list_blocks(full), transposed)


def count_mask_blocks(length: int) -> int:
    return -(-length // BLOCK_SIZE)


def list_blocks(table: Tensor) -> BlockList:
    # Kernels read rows of a list as contiguous; argsort keeps the strides of its input, also transposed ones.
    table = table.to(torch.int32).contiguous()
    order = torch.argsort(table, dim=-1, descending=True, stable=True)
    return BlockList(table.sum(-1, dtype=torch.int32), order.to(torch.int32))


def build_tables(mask: Mask, call: Call) -> BlockTables:
    """Builds the tables of a mask from those of its parts."""
    if isinstance(mask, Intersection):
        left, right = build_tables(mask.left, call), build_tables(mask.right, call)
        return BlockTables(left.some & right.some, left.every & right.every)
    if isinstance(mask, Union):
        left, right = build_tables(mask.left, call), build_tables(mask.right, call)
        return BlockTables(left.some | right.some, left.every | right.every)
    if isinstance(mask, Complement):
        inner = build_tables(mask.mask, call)
        return BlockTables(~inner.every, ~inner.some)
    if isinstance(mask, Documents):
        return tables_from_documents(mask, call)
    ranges = mask.key_ranges(call.sizes, call.positions is not None)
    return (
        tables_from_ranges(ranges, call)
        if ranges.exact and len(ranges.ranges) == 1
        else tables_from_entries(mask, call)
    )


def tables_from_ranges(ranges: KeyRanges, call: Call) -> BlockTables:
    """A block has visible entries where the key range of one of its rows reaches it; full where all cover it."""
    if call.batch_ids is not None:
        ranges = ranges.select_batches(call.batch_ids)
    device, keys = call.q.device, call.k.shape[2]
    low, high = (split_into_blocks(ends) for ends in torch.broadcast_tensors(*ranges.ranges[0]))  # (Bm, nq, 128)
    seen = low < high
    start, stop = torch.where(seen, low, keys).amin(-1), torch.where(seen, high, 0).amax(-1)
    first = torch.arange(count_mask_blocks(keys), device=device) * BLOCK_SIZE
    last = (first + BLOCK_SIZE).clamp(max=keys)
    some = (start.unsqueeze(-1) < last) & (stop.unsqueeze(-1) > first)
    every = (low.amax(-1, keepdim=True) <= first) & (high.amin(-1, keepdim=True) >= last)
    return BlockTables(some.unsqueeze(1), every.unsqueeze(1))


def tables_from_documents(mask: Documents, call: Call) -> BlockTables:
    """A block may have visible entries where the id ranges overlap; full where both sides hold one and the same id."""
    assert mask.key_ids is not None, "fit() sets the keys' ids"
    queries, keys = (split_into_blocks(select_sequences(ids, call)) for ids in (mask.query_ids, mask.key_ids))
    (low, high), (first, last) = ((ids.amin(-1), ids.amax(-1)) for ids in (queries, keys))
    low, high, first, last = low[:, None, :, None], high[:, None, :, None], first[:, None, None], last[:, None, None]
    return BlockTables((first <= high) & (low <= last), (low == last) & (high == first) & (low == high))


def select_sequences(ids: Tensor, call: Call) -> Tensor:
    return ids if ids.shape[0] == 1 or call.batch_ids is None else ids[call.batch_ids]


def split_into_blocks(values: Tensor) -> Tensor:
    """(Bm, T) -> (Bm, n, 128); the last value fills the last block, which changes no minimum and no maximum."""
    length = values.shape[-1]
    index = torch.arange(count_mask_blocks(length) * BLOCK_SIZE, device=values.device).clamp(max=length - 1)
    return values[:, index].view(values.shape[0], -1, BLOCK_SIZE)


def tables_from_entries(mask: Mask, call: Call) -> BlockTables:
    """Evaluates the mask at every entry, some rows at a time: for functions, bool tensors and given positions."""
    queries, keys = call.q.shape[2], call.k.shape[2]
    corner = mask.visible(call.tile(slice(0, 1), slice(0, 1)))
    pairs = torch.broadcast_shapes(corner.shape, (1, 1, 1, 1))[:2].numel()
    step = max(MAX_ENTRIES_PER_LOOKUP // (pairs * keys * BLOCK_SIZE), 1) * BLOCK_SIZE
    strips = [slice(start, min(start + step, queries)) for start in range(0, queries, step)]
    tables = [tables_of_rows(mask, call, rows) for rows in strips]
    return BlockTables(torch.cat([some for some, _ in tables], dim=2), torch.cat([every for _, every in tables], dim=2))


def tables_of_rows(mask: Mask, call: Call, rows: slice) -> BlockTables:
    keys, height = call.k.shape[2], rows.stop - rows.start
    visible = mask.visible(call.tile(rows, slice(0, keys)))
    visible = visible.broadcast_to(torch.broadcast_shapes(visible.shape, (1, 1, height, keys)))
    shape = (*visible.shape[:2], count_mask_blocks(height), BLOCK_SIZE, count_mask_blocks(keys), BLOCK_SIZE)
    edges = (0, -keys % BLOCK_SIZE, 0, -height % BLOCK_SIZE)
    some = F.pad(visible, edges, value=False).view(shape).any(dim=5).any(dim=3)
    every = F.pad(visible, edges, value=True).view(shape).all(dim=5).all(dim=3)
    return BlockTables(some, every)

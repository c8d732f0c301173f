"""Block lists of masks: no visible block is missing, and they are exact for common masks."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

import foci
from foci.arguments import Call, prepare_call
from foci.backends.flex import block_masks
from foci.backends.flex.block_masks import (
    BLOCK_SIZE,
    BlockTables,
    build_block_lists,
    build_tables,
    count_mask_blocks,
    list_blocks,
)
from foci.masks.base import Mask
from foci.scores import Dot

BATCH, HEADS = 2, 3
SHAPES = [(300, 300), (130, 513), (513, 130), (1, 400), (256, 384)]


def call_of(mask: Mask | Tensor, queries: int, keys: int, positions: tuple[Tensor, Tensor] | None = None) -> Call:
    q, k = torch.zeros(BATCH, HEADS, queries, 1), torch.zeros(BATCH, HEADS, keys, 1)
    return prepare_call(q, k, k, Dot(), mask, None, None, positions, 0.0, False)


def true_tables(call: Call) -> BlockTables:
    """The tables from every entry of the matrix."""
    assert call.mask is not None
    queries, keys = call.q.shape[2], call.k.shape[2]
    visible = call.mask.visible(call.full_tile()).broadcast_to(call.q.shape[0], HEADS, queries, keys)
    some = torch.zeros(*visible.shape[:2], count_mask_blocks(queries), count_mask_blocks(keys), dtype=torch.bool)
    every = some.clone()
    for i in range(count_mask_blocks(queries)):
        for j in range(count_mask_blocks(keys)):
            block = visible[:, :, i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE, j * BLOCK_SIZE : (j + 1) * BLOCK_SIZE].flatten(
                2
            )
            some[:, :, i, j], every[:, :, i, j] = block.any(-1), block.all(-1)
    return BlockTables(some, every)


def ids(length: int) -> Tensor:
    """Documents of 90 tokens, and of 70 in the second sequence."""
    return torch.stack([torch.arange(length) // 90, torch.arange(length) // 70])


MASKS = {
    "causal": lambda tq, tk: foci.causal,
    "causal_at": lambda tq, tk: foci.causal.at(17),
    "window": lambda tq, tk: foci.window(40),
    "wide": lambda tq, tk: foci.window(300, 200),
    "prefix": lambda tq, tk: foci.causal | foci.prefix(150),
    "prefix_window": lambda tq, tk: (foci.causal & foci.window(60)) | foci.prefix(30),
    "opposite": lambda tq, tk: ~foci.causal,
    "padding": lambda tq, tk: foci.padding([tk, tk // 3]),
    "left_padding": lambda tq, tk: foci.padding([0, tk // 3], side="left") & foci.causal,
    "documents": lambda tq, tk: foci.documents(ids(tq), ids(tk)),
    "other_documents": lambda tq, tk: ~foci.documents(ids(tq), ids(tk)) & foci.causal,
    "scattered": lambda tq, tk: foci.documents(torch.arange(tq) % 3, torch.arange(tk) // 100),
    "entries": lambda tq, tk: torch.rand(BATCH, 1, tq, tk, generator=torch.Generator().manual_seed(0)) > 0.9995,
    "row": lambda tq, tk: torch.arange(tk) % 200 < 140,
    "heads": lambda tq, tk: foci.mask_function(lambda b, h, q, k: (q - k) // 100 == h),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_no_visible_block_is_missing(name: str, shape: tuple[int, int]) -> None:
    call = call_of(MASKS[name](*shape), *shape)
    assert call.mask is not None
    found, true = build_tables(call.mask, call), true_tables(call)
    assert bool((found.some | ~true.some).all()), "a block with visible entries is marked empty"
    assert bool((~found.every | true.every).all()), "a partial block is marked full"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["causal", "causal_at", "window", "wide", "padding", "opposite", "row", "heads"])
def test_tables_of_common_masks_are_exact(name: str, shape: tuple[int, int]) -> None:
    call = call_of(MASKS[name](*shape), *shape)
    assert call.mask is not None
    for found, true in zip(build_tables(call.mask, call), true_tables(call), strict=True):
        assert torch.equal(found.broadcast_to(true.shape), true)


@pytest.mark.parametrize("name", ["causal", "window"])
def test_tables_with_given_positions_are_exact(name: str) -> None:
    positions = (torch.randperm(600)[:300], torch.arange(400).flip(0))
    call = call_of(MASKS[name](300, 400), 300, 400, positions)
    assert call.mask is not None
    for found, true in zip(build_tables(call.mask, call), true_tables(call), strict=True):
        assert torch.equal(found.broadcast_to(true.shape), true)


def test_entries_are_evaluated_a_few_rows_at_a_time() -> None:
    call = call_of(MASKS["heads"](513, 400), 513, 400)
    assert call.mask is not None
    whole = build_tables(call.mask, call)
    with (
        mock.patch.object(block_masks, "MAX_ENTRIES_PER_LOOKUP", 1),
        mock.patch.object(block_masks, "tables_of_rows", wraps=block_masks.tables_of_rows) as strips,
    ):
        parts = build_tables(call.mask, call)
    assert strips.call_count == count_mask_blocks(513)
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))


@pytest.mark.parametrize("name", ["padding", "documents", "entries", "heads"])
def test_a_part_of_the_batch_has_its_own_tables(name: str) -> None:
    part = call_of(MASKS[name](300, 300), 300, 300).select(slice(1, 2), slice(0, HEADS))
    assert part.mask is not None
    found, true = build_tables(part.mask, part), true_tables(part)
    assert bool((found.some | ~true.some).all())
    assert bool((~found.every | true.every).all())


def test_causal_blocks_are_partial_on_the_diagonal_and_full_below() -> None:
    blocks = build_block_lists(call_of(foci.causal, 512, 512))
    assert blocks.partial.counts.flatten().tolist() == [1, 1, 1, 1]
    assert blocks.partial.order[0, 0, :, 0].tolist() == [0, 1, 2, 3]
    assert blocks.full.counts.flatten().tolist() == [0, 1, 2, 3]
    assert blocks.full.order[0, 0, 3, :3].tolist() == [0, 1, 2]
    assert blocks.columns is None


def test_a_block_over_the_edge_is_never_full() -> None:
    blocks = build_block_lists(call_of(foci.window(None, None), 200, 300))
    assert blocks.full.counts.flatten().tolist() == [2, 0]
    assert blocks.partial.counts.flatten().tolist() == [1, 3]


def test_a_backward_has_block_lists_by_columns() -> None:
    call = call_of(foci.causal, 384, 384)
    call.q.requires_grad_()
    columns = build_block_lists(call).columns
    assert columns is not None
    assert columns.full.counts.flatten().tolist() == [2, 1, 0]
    assert columns.full.order[0, 0, 0, :2].tolist() == [1, 2]


def test_blocks_of_different_documents_are_skipped() -> None:
    blocks = build_block_lists(call_of(foci.documents(torch.arange(1024) // 256), 1024, 1024))
    assert blocks.full.counts.flatten().tolist() == [2] * 8
    assert blocks.partial.counts.flatten().tolist() == [0] * 8


def test_tables_of_long_sequences_need_no_matrix() -> None:
    call = call_of(foci.causal & foci.window(1000), 1, 1)
    long = 131072
    q = torch.zeros(1, 1, 1, 1).expand(1, 1, long, 1)
    blocks = build_block_lists(prepare_call(q, q, q, Dot(), call.mask, None, None, None, 0.0, False))
    assert blocks.partial.order.shape == (1, 1, 1024, 1024)
    assert int((blocks.partial.counts + blocks.full.counts).max()) <= 1000 // BLOCK_SIZE + 2


def test_block_lists_are_contiguous_for_transposed_tables() -> None:
    """Kernels read rows of a list as contiguous: transposed ones gave wrong gradients of keys and values."""
    table = torch.rand(1, 1, 5, 3) > 0.5
    assert list_blocks(table.mT).order.is_contiguous()
    assert list_blocks(table.mT).counts.is_contiguous()

"""The picture of a matrix: blocks that begin at floor(r T / rows), pooled from any strips and pieces."""

from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from foci.statistics import picture
from tests import matrices

CPU = torch.device("cpu")


@pytest.mark.parametrize(("blocks", "length"), [(1, 1), (1, 9), (3, 10), (7, 10), (10, 10), (256, 1000), (4, 16)])
def test_every_index_lies_in_the_block_between_its_edges(blocks: int, length: int) -> None:
    edges = picture.block_edges(blocks, length, CPU).tolist()
    assert edges == [block * length // blocks for block in range(blocks + 1)]
    for block, (start, stop) in enumerate(pairwise(edges)):
        assert stop > start
        assert {picture.block_index(index, blocks, length) for index in range(start, stop)} == {block}


def cuts(length: int, seed: int) -> list[slice]:
    """Splits the length into a few slices."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(0, length + 1, (3,), generator=generator).tolist()
    return [slice(start, stop) for start, stop in pairwise(sorted({0, length, *places})) if stop > start]


@settings(max_examples=150, deadline=None)
@given(
    queries=st.integers(1, 40),
    keys=st.integers(1, 40),
    share=st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)),
    reduce=st.sampled_from(["mean", "max"]),
    seed=st.integers(0, 1000),
)
def test_strips_and_pieces_give_the_whole_picture(
    queries: int, keys: int, share: tuple[float, float], reduce: str, seed: int
) -> None:
    rows, columns = max(int(queries * share[0]), 1), max(int(keys * share[1]), 1)
    w = matrices.randn(2, queries, keys, seed=seed).abs()
    pooled_matrix = torch.zeros(2, rows, columns, dtype=torch.float64)
    for strip in cuts(queries, seed):
        for piece in cuts(keys, seed + 1):
            first_row, pooled_rows = picture.pool_rows(w[:, strip, piece], strip.start, rows, queries, reduce)
            first, pooled = picture.pool_columns(pooled_rows, piece.start, columns, keys, reduce)
            picture.add_to_picture(pooled_matrix, pooled, first_row, first, reduce)
    if reduce == "mean":
        pooled_matrix /= picture.block_areas(rows, columns, queries, keys, CPU)
    torch.testing.assert_close(pooled_matrix, matrices.picture(w, rows, columns, reduce), atol=1e-12, rtol=1e-12)


def test_areas_are_the_entries_of_the_blocks() -> None:
    areas = picture.block_areas(3, 4, 10, 7, CPU)
    assert areas.sum() == 70
    assert areas[0].tolist() == [3, 6, 6, 6]

"""Merging the partial results of programs."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from foci.gpu.launcher import LaunchPlan
from foci.statistics.cuda.launches import PictureMerge, build_merge_launch
from foci.statistics.cuda.tiling import PictureCells
from tests.kernels.statistics_cases import DEVICE
from tests.kernels.statistics_cases import nan_in_fresh_memory as nan_in_fresh_memory

PAIRS = 3


def joined(
    given: dict[str, Tensor], columns=None, cells: PictureMerge | None = None, chosen=0, logits=0
) -> dict[str, Tensor]:
    launching = build_merge_launch(PAIRS, columns, cells, chosen, logits)
    shapes = {}
    if columns:
        shapes["received"] = (PAIRS, columns[1])
    if cells:
        shapes["picture"] = (PAIRS, *cells[:2])
    if logits:
        shapes["largest_logit"] = (PAIRS,)
    results = {name: torch.empty(shape, device=DEVICE) for name, shape in shapes.items()}
    if chosen:
        results["top_keys"] = torch.empty(chosen, dtype=torch.int64, device=DEVICE)
    LaunchPlan(
        {}, torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE), [launching.to_kernel_launch()]
    )(given | results | {"lse": torch.zeros(1, device=DEVICE)})
    return results


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@pytest.mark.parametrize("slots", [2, 8, 13])
@pytest.mark.parametrize("keys", [5, 512, 1030])
def test_received_weights_are_summed(slots: int, keys: int) -> None:
    columns = numbers(PAIRS, slots, keys)
    torch.testing.assert_close(joined({"columns": columns}, (slots, keys))["received"], columns.sum(1))


def cells_of(weights: Tensor, picture: PictureMerge) -> Tensor:
    """The sums that a tile pass writes for these weights (PAIRS, queries, keys), in memory full of NaN."""
    rows, columns, layout, queries, keys, tile_queries = picture
    if layout.cut:
        return cut_cells_of(weights, picture)
    cells = torch.full((PAIRS, layout.lines, columns * layout.across), torch.nan, device=DEVICE)
    for r in range(rows):
        span = range(r * queries // rows, (r + 1) * queries // rows)
        for tile in range(span.start // tile_queries, (span.stop - 1) // tile_queries + 1):
            line = r * layout.row_step + tile * layout.tile_step
            here = weights[:, max(span.start, tile * tile_queries) : min(span.stop, (tile + 1) * tile_queries)].sum(1)
            for c in range(columns):
                parts = here[:, c * keys // columns : (c + 1) * keys // columns].tensor_split(layout.across, -1)
                cells[:, line, c * layout.across : (c + 1) * layout.across] = torch.stack(
                    [part.sum(-1) for part in parts], -1
                )
    return cells


def cut_cells_of(weights: Tensor, picture: PictureMerge) -> Tensor:
    """The sums of strips of queries and of 16 keys, in two parts where a column starts among these."""
    rows, columns, layout, queries, keys, _ = picture
    cells = torch.full((PAIRS, layout.lines, layout.cut), torch.nan, device=DEVICE)
    strips, starts = rows * layout.row_step, [c * keys // columns for c in range(1, columns)]
    for strip in range(strips):
        here = weights[:, strip * queries // strips : (strip + 1) * queries // strips].sum(1)
        for group in range(layout.cut // 2):
            stop = next((start for start in starts if 16 * group < start < 16 * group + 16), 16 * group + 16)
            cells[:, strip, 2 * group] = here[:, 16 * group : stop].sum(-1)
            cells[:, strip, 2 * group + 1] = here[:, stop : 16 * group + 16].sum(-1)
    return cells


PICTURES = [
    # Cells of several tiles, tiles of several cells, and cells that do not align with tiles.
    PictureMerge(7, 30, PictureCells(21, 2, 0, 1), 21 * 16, 60, 16),
    PictureMerge(12, 30, PictureCells(12, 1, 1, 0), 48, 60, 16),
    PictureMerge(11, 13, PictureCells(11 + 7, 1), 100, 90, 16),
    PictureMerge(3, 13, PictureCells(3 + 7, 4), 100, 90, 16),
    # Cells that start at any query and any key, in strips of the kernel for Hopper.
    PictureMerge(5, 7, PictureCells(8, 1, row_step=1, tile_step=0, cell_queries=32, cut=16), 151, 127, 128),
    PictureMerge(3, 5, PictureCells(8, 1, row_step=2, tile_step=0, cell_queries=32, cut=32), 187, 250, 64),
]


def pooled(weights: Tensor, picture: PictureMerge) -> Tensor:
    rows, columns, _, queries, keys, _ = picture
    lines = [
        [weights[:, r * queries // rows : (r + 1) * queries // rows, c * keys // columns : (c + 1) * keys // columns]
         .mean((1, 2)) for c in range(columns)]
        for r in range(rows)
    ]  # fmt: skip
    return torch.stack([torch.stack(line, -1) for line in lines], -2)


@pytest.mark.parametrize("picture", PICTURES)
def test_picture_cells_are_merged(picture: PictureMerge) -> None:
    weights = numbers(PAIRS, picture.queries, picture.keys)
    got = joined({"cells": cells_of(weights, picture)}, cells=picture)
    torch.testing.assert_close(got["picture"], pooled(weights, picture))


@pytest.mark.parametrize("each", [1, 17, 512, 5000])
def test_largest_logit_of_each_pair(each: int) -> None:
    logits = numbers(PAIRS, each)
    logits[1, each // 2] = torch.nan
    logits[2] = -torch.inf
    got = joined({"logits": logits}, logits=each)["largest_logit"]
    torch.testing.assert_close(got, logits.amax(1), equal_nan=True)


@pytest.mark.parametrize("size", [3, 512, 1030])
def test_top_keys_become_int64(size: int) -> None:
    chosen = torch.arange(-1, size - 1, dtype=torch.int32, device=DEVICE)
    assert torch.equal(joined({"chosen": chosen}, chosen=size)["top_keys"], chosen.long())


def test_all_results_in_one_launch() -> None:
    picture = PICTURES[2]._replace(keys=600, columns=40)
    weights, columns, logits = numbers(PAIRS, picture.queries, 600), numbers(PAIRS, 5, 600), numbers(PAIRS, 70)
    chosen = torch.arange(777, dtype=torch.int32, device=DEVICE)
    given = {"columns": columns, "cells": cells_of(weights, picture), "chosen": chosen, "logits": logits}
    got = joined(given, (5, 600), picture, 777, 70)
    assert torch.equal(got["top_keys"], chosen.long())
    torch.testing.assert_close(got["received"], columns.sum(1))
    torch.testing.assert_close(got["picture"], pooled(weights, picture))
    torch.testing.assert_close(got["largest_logit"], logits.amax(1))


def test_nan_propagates_to_the_picture() -> None:
    picture = PictureMerge(2, 4, PictureCells(4, 2, 0, 1), 32, 8, 8)
    cells = numbers(PAIRS, 4, 8)
    cells[0, 1, 3] = torch.nan
    assert joined({"cells": cells}, cells=picture)["picture"].isnan().nonzero().tolist() == [[0, 0, 1]]

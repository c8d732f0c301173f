"""Merging the partial results of programs."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from foci.gpu.launcher import LaunchPlan
from foci.statistics.cuda.launches import build_merge_launch
from tests.kernels.statistics_cases import DEVICE
from tests.kernels.statistics_cases import nan_in_fresh_memory as nan_in_fresh_memory

PAIRS = 3


def joined(given: dict[str, Tensor], columns=None, cells=None, chosen=0, logits=0) -> dict[str, Tensor]:
    launching = build_merge_launch(PAIRS, columns, cells, chosen, logits)
    shapes = {}
    if columns:
        shapes["received"] = (PAIRS, columns[1])
    if cells:
        shapes["picture"] = (PAIRS, *cells[:2])
    if logits:
        shapes["largest"] = (PAIRS,)
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


@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize(("down", "across"), [(1, 2), (3, 1), (9, 4)])
def test_picture_cells_are_merged(down: int, across: int, reduce: str) -> None:
    """Cells of a mean are already scaled, so they are summed."""
    rows, columns = 7, 30
    cells = numbers(PAIRS, rows * down, columns * across)
    blocks = cells.view(PAIRS, rows, down, columns, across)
    expected = blocks.sum((2, 4)) if reduce == "mean" else blocks.amax((2, 4))
    got = joined({"cells": cells}, cells=(rows, columns, down, across, reduce))
    torch.testing.assert_close(got["picture"], expected)


@pytest.mark.parametrize("each", [1, 17, 512, 5000])
def test_largest_logit_of_each_pair(each: int) -> None:
    logits = numbers(PAIRS, each)
    logits[1, each // 2] = torch.nan
    logits[2] = -torch.inf
    got = joined({"logits": logits}, logits=each)["largest"]
    torch.testing.assert_close(got, logits.amax(1), equal_nan=True)


@pytest.mark.parametrize("size", [3, 512, 1030])
def test_top_keys_become_int64(size: int) -> None:
    chosen = torch.arange(-1, size - 1, dtype=torch.int32, device=DEVICE)
    assert torch.equal(joined({"chosen": chosen}, chosen=size)["top_keys"], chosen.long())


def test_all_results_in_one_launch() -> None:
    columns, cells, logits = numbers(PAIRS, 5, 600), numbers(PAIRS, 20, 64), numbers(PAIRS, 70)
    chosen = torch.arange(777, dtype=torch.int32, device=DEVICE)
    given = {"columns": columns, "cells": cells, "chosen": chosen, "logits": logits}
    got = joined(given, (5, 600), (10, 32, 2, 2, "max"), 777, 70)
    assert torch.equal(got["top_keys"], chosen.long())
    torch.testing.assert_close(got["received"], columns.sum(1))
    torch.testing.assert_close(got["picture"], cells.view(PAIRS, 10, 2, 32, 2).amax((2, 4)))
    torch.testing.assert_close(got["largest"], logits.amax(1))


def test_nan_propagates_to_the_picture() -> None:
    cells = numbers(PAIRS, 4, 8)
    cells[0, 1, 3] = torch.nan
    for reduce in ("mean", "max"):
        picture = joined({"cells": cells}, cells=(2, 4, 2, 2, reduce))["picture"]
        assert picture.isnan().nonzero().tolist() == [[0, 0, 1]]

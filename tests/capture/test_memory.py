"""Watching takes memory that is linear in the length: nothing of the size of the matrix is built."""

from typing import Any

import pytest
import torch

import foci
from tests.allocation import LargestTensor
from tests.capture.models import FusedAttention, Stack
from tests.tensors import randn

LENGTH = 2048


class OneHead(FusedAttention):
    def __init__(self) -> None:
        super().__init__(16, 2)


@pytest.mark.parametrize(
    "options",
    [{}, {"keep": foci.Keep(top=4, picture=32, shares=True)}, {"queries": "last"}],
    ids=["lazy", "kept", "rows"],
)
def test_watching(options: dict[str, Any]) -> None:
    model, x = Stack(2, OneHead), randn(1, LENGTH, 16)
    with torch.no_grad(), foci.watch(model, **options) as seen, LargestTensor() as memory:
        model(x, is_causal=True)
    assert memory.largest < LENGTH**2 / 4
    assert seen.nbytes < LENGTH**2
    if "keep" in options:
        # The statistics of two layers and what one layer takes while it runs: the layers' queries and keys do not stay.
        assert seen.nbytes < 2 * 1.3 * options["keep"].nbytes(1, 2, LENGTH, LENGTH)


def test_rollout() -> None:
    model, x = Stack(3, OneHead), randn(1, LENGTH, 16)
    with torch.no_grad(), foci.watch(model) as seen:
        model(x, is_causal=True)
    with LargestTensor() as memory:
        found = seen.rollout(-1)
        by_values = seen.rollout(-1, values=True)
    assert float(found.sum()) == pytest.approx(1.0, rel=1e-4)
    assert float(by_values.sum()) == pytest.approx(1.0, rel=1e-4)
    assert memory.largest < LENGTH**2 / 4


def test_the_checker_sees_a_dense_matrix() -> None:
    model, x = Stack(1, OneHead), randn(1, LENGTH, 16)
    with torch.no_grad(), foci.watch(model) as seen:
        model(x, is_causal=True)
    with LargestTensor() as memory:
        seen["L0"].dense()
    assert memory.largest >= LENGTH**2

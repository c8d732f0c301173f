"""Watching takes memory linear in the length: no dense matrix is built."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import foci
from tests.allocation import LargestTensor
from tests.capture.models import FusedAttention, Stack
from tests.tensors import randn

LENGTH = 2048


class OneHead(FusedAttention):
    def __init__(self) -> None:
        super().__init__(16, 2)


class Followed(FusedAttention):
    """Tracks which of the queries, keys and values that it made are still allocated."""

    made: list[StorageWeakRef]

    def split(self, x: Tensor) -> Tensor:
        found = super().split(x)
        self.made = [*self.__dict__.get("made", []), StorageWeakRef(found.untyped_storage())]
        return found

    @property
    def alive(self) -> int:
        return sum(not made.expired() for made in self.made)


@contextmanager
def no_search_for_cycles() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alive(model: Stack) -> list[int]:
    return [block.alive for block in model.blocks if isinstance(block, Followed)]


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
    assert memory.largest <= LENGTH**2 / 4


def test_the_memory_checker_detects_a_dense_matrix() -> None:
    model, x = Stack(1, OneHead), randn(1, LENGTH, 16)
    with torch.no_grad(), foci.watch(model) as seen:
        model(x, is_causal=True)
    with LargestTensor() as memory:
        seen["L0"].dense()
    assert memory.largest >= LENGTH**2


def test_statistics_hold_no_queries_and_keys() -> None:
    model, x = Stack(3, Followed), randn(1, 40, 16)
    with no_search_for_cycles(), torch.no_grad(), foci.watch(model, keep=foci.Keep(top=4, picture=8)) as seen:
        model(x, is_causal=True)
        assert alive(model) == [0, 0, 0]
    assert seen["L2"].top(4).keys.shape == (1, 4, 40, 4)


def test_deleting_a_record_frees_its_tensors() -> None:
    model, x = Stack(3, Followed), randn(1, 40, 16)
    with no_search_for_cycles():
        with torch.no_grad(), foci.watch(model) as seen:
            model(x, is_causal=True)
        assert alive(model) == [1, 1, 1]
        del seen
        assert alive(model) == [0, 0, 0]

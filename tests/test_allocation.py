"""The counter of memory counts: it must not miss what it is there to find."""

import torch
from torch.utils.checkpoint import checkpoint

from tests.allocation import LargestTensor


def test_the_largest_tensor_is_found_even_when_it_is_gone() -> None:
    with LargestTensor() as seen:
        torch.ones(100, 100).sum()
        torch.ones(7)
    assert seen.largest == 100 * 100


def test_views_count_as_no_memory() -> None:
    x = torch.ones(4)
    with LargestTensor() as seen:
        x.expand(1000, 4)
        x.view(2, 2)
    assert (seen.largest, seen.peak) == (0, 0)


def test_the_peak_counts_what_lives_at_one_time() -> None:
    with LargestTensor() as seen:
        for _ in range(10):
            torch.ones(1000)
        one_by_one = seen.peak
        kept = [torch.ones(1000) for _ in range(10)]
    assert 4000 <= one_by_one <= 8000
    assert 40_000 <= seen.peak <= 48_000
    assert len(kept) == 10


def test_what_a_graph_keeps_is_counted() -> None:
    def many(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = x.exp()
        return x

    x = torch.zeros(1000, requires_grad=True)
    with LargestTensor() as plain:
        many(x).sum().backward()
    with LargestTensor() as forgetful:
        assert checkpoint(many, x, use_reentrant=False).sum() is not None
    assert plain.peak >= 40_000
    assert forgetful.peak <= 12_000

import time
from collections.abc import Iterator

import pytest
import torch

from foci.inputs.padding import LENGTH_MULTIPLE, group_by_size
from foci.training.batches import derive_seed, group_by_length, prefetch, seeded_generator

SIZES = [3, 50, 7, 8, 9, 17, 50, 2, 31, 12, 5, 5, 5, 40, 1] * 4


@pytest.mark.parametrize("parts", [1, 2, 6])
def test_every_example_is_in_one_batch_within_the_budget(parts: int) -> None:
    batches = group_by_length(SIZES, 64, parts, seeded_generator(1))
    assert sorted(i for batch in batches for i in batch) == list(range(len(SIZES)))
    for batch in batches:
        longest = -(-max(SIZES[i] for i in batch) // 8) * 8
        assert all(longest * len(batch[part::parts]) <= 64 for part in range(parts))


def test_examples_of_similar_length_share_a_batch() -> None:
    batches = group_by_length(SIZES, 64, 1, seeded_generator(1))
    padding = sum(max(SIZES[i] for i in batch) * len(batch) for batch in batches) / sum(SIZES)
    assert padding < 1.3


def test_the_order_depends_only_on_the_seed() -> None:
    assert group_by_length(SIZES, 64, 1, seeded_generator(1, 2)) == group_by_length(
        SIZES, 64, 1, seeded_generator(1, 2)
    )
    assert group_by_length(SIZES, 64, 1, seeded_generator(1, 2)) != group_by_length(
        SIZES, 64, 1, seeded_generator(1, 3)
    )
    assert derive_seed(1, "epoch", 2) == 3924597110019656317
    assert [len(batch) for batch in group_by_size([5, 50, 5], 64, LENGTH_MULTIPLE)] == [1, 2]


def test_prefetch_yields_the_same_items_and_raises_errors() -> None:
    def items() -> Iterator[int]:
        yield from range(5)
        raise ValueError("broken")

    found = prefetch(items(), 2)
    assert [next(found) for _ in range(5)] == list(range(5))
    with pytest.raises(ValueError, match="broken"):
        next(found)


def test_the_prefetch_thread_ends_on_close() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(10**6):
            made.append(number)
            yield number

    found = prefetch(items(), 2)
    next(found)
    found.close()
    time.sleep(0.05)
    before = len(made)
    time.sleep(0.05)
    assert len(made) == before < 10


def test_generators_are_independent() -> None:
    draws = {float(torch.rand((), generator=seeded_generator(1, "batch", n))) for n in range(50)}
    assert len(draws) == 50

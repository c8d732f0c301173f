"""Runs of keys against brute force: their algebra, their strips, and what each kind of mask says of itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import foci
from foci.masks.base import Mask
from foci.masks.range_algebra import KeyRanges
from foci.masks.tile import CallSizes, Tile

few = settings(max_examples=150, deadline=None, derandomize=True, database=None)
CPU = torch.device("cpu")


def call_sizes(batch: int, queries: int, keys: int) -> CallSizes:
    return CallSizes((batch,), 2, queries, keys, CPU)


def covered(spans: KeyRanges) -> Tensor:
    """(Bm, Tq, Tk): the keys inside the runs."""
    key = torch.arange(spans.keys)
    seen = torch.zeros(1, 1, spans.keys, dtype=torch.bool)
    for low, high in spans.ranges:
        seen = seen | ((key >= low[..., None]) & (key < high[..., None]))
    return seen


@st.composite
def runs(draw: st.DrawFn, queries: int, keys: int) -> KeyRanges:
    """One run per query, of one or of two sequences; some of them empty, with any ends, and some not exact."""
    batch = draw(st.integers(1, 2))
    ends = st.lists(st.integers(0, keys), min_size=batch * queries, max_size=batch * queries)
    low, high = (torch.tensor(draw(ends), dtype=torch.int64).view(batch, queries) for _ in range(2))
    return KeyRanges.single(low, high, call_sizes(batch, queries, keys), exact=draw(st.booleans()))


@st.composite
def trees(draw: st.DrawFn) -> tuple[KeyRanges, Tensor]:
    """Runs joined at random, and what the same joins make of the keys that are seen."""
    queries, keys = draw(st.integers(1, 5)), draw(st.integers(1, 8))

    def leaf() -> tuple[KeyRanges, Tensor]:
        spans = draw(runs(queries, keys))
        # Where the runs are not exact, any of what they hold is seen.
        seen = covered(spans).expand(2, -1, -1)
        return spans, seen if spans.exact else seen & (torch.arange(keys) % 2 == draw(st.integers(0, 1)))

    spans, seen = leaf()
    for join in draw(st.lists(st.sampled_from(["and", "or", "not"]), max_size=4)):
        if join == "not":
            spans, seen = ~spans, ~seen
            continue
        other, other_seen = leaf()
        spans, seen = (spans & other, seen & other_seen) if join == "and" else (spans | other, seen | other_seen)
    return spans, seen


def check_holds(spans: KeyRanges, seen: Tensor) -> None:
    """Nothing is seen outside of the runs, and where they are exact everything inside."""
    inside = covered(spans).expand_as(seen)
    assert bool((inside | ~seen).all())
    assert torch.equal(inside, seen) or not spans.exact
    if len(spans.ranges) == 2:
        (_, end), (start, _) = spans.ranges
        assert bool(((end <= start) | (spans.ranges[0][0] >= end) | (start >= spans.ranges[1][1])).all())


@few
@given(trees())
def test_combined_ranges_contain_all_visible_keys(tree: tuple[KeyRanges, Tensor]) -> None:
    spans, seen = tree
    assert len(spans.ranges) <= 2
    check_holds(spans, seen)
    check_holds(spans.hull(), seen)


@few
@given(trees(), st.integers(1, 6))
def test_segments_contain_visible_keys_and_mark_full_ones(tree: tuple[KeyRanges, Tensor], rows: int) -> None:
    spans, seen = tree
    segments = spans.segments(rows)
    assert len(segments) == -(-seen.shape[1] // rows)
    for index, strip in enumerate(segments):
        part = seen[:, index * rows : (index + 1) * rows]
        visited = torch.zeros(spans.keys, dtype=torch.bool)
        for segment in strip:
            assert 0 <= segment.start <= segment.full_start <= segment.full_stop <= segment.stop <= spans.keys
            assert not bool(visited[segment.start : segment.stop].any()), "no key is visited twice"
            visited[segment.start : segment.stop] = True
            assert bool(part[:, :, segment.full_start : segment.full_stop].all())
        assert bool((visited | ~part.flatten(0, 1).any(0)).all())


def test_exact_ranges_stay_exact_when_two_are_combined() -> None:
    sizes = call_sizes(1, 3, 10)
    low = KeyRanges.single(torch.tensor([0, 1, 2]), torch.tensor([3, 3, 3]), sizes)
    high = KeyRanges.single(torch.tensor([5, 3, 9]), torch.tensor([7, 9, 9]), sizes)
    both = low | high
    assert both.exact
    assert covered(both).int().tolist()[0] == [
        [1, 1, 1, 0, 0, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 1, 1, 1, 1, 1, 0],
        [0, 0, 1, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert (~low).exact
    assert (~low & high).exact
    assert not (both | low).exact
    assert not (~both).exact


def test_ranges_as_a_tensor_for_kernels() -> None:
    sizes = call_sizes(2, 3, 10)
    one = KeyRanges.single(torch.tensor([0, 1, 2]), torch.tensor([[3, 3, 3], [4, 4, 4]]), sizes)
    two = one | KeyRanges.single(torch.tensor([6, 6, 6]), torch.tensor([8, 9, 10]), sizes)
    tensor = two.to_tensor(CPU)
    assert (tensor.shape, tensor.dtype) == ((2, 2, 2, 3), torch.int32)
    assert tensor.is_contiguous()
    assert tensor[1].tolist() == [[[0, 1, 2], [4, 4, 4]], [[6, 6, 6], [8, 9, 10]]]
    assert two.select_batches(torch.tensor([1])).to_tensor(CPU).tolist() == tensor[1:].tolist()


MASKS: list[Mask] = [
    *(foci.causal, foci.causal.at(-2), foci.causal.at(3), foci.window(2), foci.window(0, 3), foci.window(None, 1)),
    *(foci.window(None, None), foci.window(3, None), foci.prefix(0), foci.prefix(3), foci.prefix(99)),
    *(foci.padding([2, 0]), foci.padding([1, 3], side="left")),
    foci.mask_function(lambda b, h, q, k: (q + k + b) % 2 == 0),
]


def documents(queries: int, keys: int, rows: tuple[int, int]) -> Mask:
    """Documents that are scattered, with ids for each sequence or one row for all."""
    places = [torch.arange(n) * 3 % 4 + torch.arange(m).view(-1, 1) for n, m in zip((queries, keys), rows, strict=True)]
    query_ids, key_ids = (ids[0] if ids.shape[0] == 1 else ids for ids in places)
    return foci.documents(query_ids, key_ids)


@few
@given(st.data())
def test_key_ranges_of_a_mask_contain_its_visible_keys(data: st.DataObject) -> None:
    queries, keys = data.draw(st.integers(1, 6)), data.draw(st.integers(3, 8))
    rows = st.tuples(st.integers(1, 2), st.integers(1, 2))
    leaves = st.one_of(st.sampled_from(MASKS), st.builds(lambda rows: documents(queries, keys, rows), rows))
    mask = data.draw(leaves)
    for join in data.draw(st.lists(st.sampled_from(["and", "or", "not"]), max_size=3)):
        mask = ~mask if join == "not" else mask & data.draw(leaves) if join == "and" else mask | data.draw(leaves)
    sizes = call_sizes(2, queries, keys)
    fitted = mask.fit(sizes)
    batch, query, key = torch.arange(2).view(2, 1, 1, 1), torch.arange(queries).view(-1, 1), torch.arange(keys)
    where = Tile(batch, torch.zeros(1, 1, 1, 1, dtype=torch.int64), query, key, query + keys - queries, key)
    seen = fitted.visible(where).expand(2, 1, queries, keys)[:, 0]
    check_holds(fitted.key_ranges(sizes, has_positions=False), seen)
    # Other positions may show anything of what depends on them.
    moved = Tile(where.batch, where.head, query, key, query * 2 - 3, (key * 5) % 7)
    check_holds(fitted.key_ranges(sizes, has_positions=True), fitted.visible(moved).expand(2, 1, queries, keys)[:, 0])


@pytest.mark.parametrize(
    "mask", [mask for mask in MASKS if not isinstance(mask, foci.masks.kinds.MaskFunction)], ids=repr
)
def test_structured_masks_have_exact_ranges(mask: Mask) -> None:
    sizes = call_sizes(2, 5, 7)
    assert mask.fit(sizes).key_ranges(sizes, has_positions=False).exact

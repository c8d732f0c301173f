"""The cache against a list of tokens, and cached decoding against attention over the whole sequence."""

import copy
import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import foci
import foci.cache
from foci.cache import Cache, Changes
from foci.masks.base import Mask


def tokens(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Keys (B, 1, T, 2) and values (B, 1, T, 3) that carry the number of their token."""
    numbers = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), 1, -1, 1)
    return numbers.repeat(1, 1, 1, 2), numbers.repeat(1, 1, 1, 3) + 0.5


def counted(start: int, count: int) -> tuple[Tensor, Tensor]:
    return tokens([list(range(start, start + count))])


def seen(cache: Cache, keys: Tensor, count: int, window: int | None) -> list[list[list[tuple[int, int]]]]:
    """Per row and new query: the (position, number) of each key that `causal & window(window - 1)` shows."""
    positions = cache.positions(count)
    if positions is None:
        length = keys.shape[-2]
        positions = torch.arange(length - count, length), torch.arange(length)
    queries, places = (each.tolist() for each in positions)
    reach = cache.length if window is None else window
    return [
        [
            sorted((p, int(n)) for p, n in zip(places, row[0, :, 0].tolist(), strict=True) if q - reach < p <= q)
            for q in queries
        ]
        for row in keys
    ]


class Plain:
    """The same as a cache, with lists: what has been seen, and how much of it fell out at the old end."""

    def __init__(self, slots: int | None, window: int | None) -> None:
        self.rows: list[list[int]] = [[], []]
        self.slots, self.window = slots, window
        self.gone = 0

    @property
    def length(self) -> int:
        return len(self.rows[0])

    def append(self, count: int, number: int) -> list[list[int]]:
        new = [[number + row * count + i for i in range(count)] for row in range(len(self.rows))]
        self.rows = [row + more for row, more in zip(self.rows, new, strict=True)]
        if self.slots is not None:
            self.gone = max(self.gone, self.length - self.slots)
        return new

    def may_crop(self, length: int) -> bool:
        return self.gone == 0 or self.gone <= length - (self.window or 0) + 1

    def seen(self, count: int) -> list[list[list[tuple[int, int]]]]:
        reach = self.length if self.window is None else self.window
        queries = range(self.length - count, self.length)
        return [[[(p, row[p]) for p in range(max(0, q - reach + 1), q + 1)] for q in queries] for row in self.rows]


sizes = st.one_of(
    st.just((None, None)),
    st.tuples(st.none(), st.integers(1, 6)),
    st.integers(1, 6).flatmap(lambda window: st.tuples(st.integers(window, window + 5), st.just(window))),
)
steps = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 9)),
    st.tuples(st.just("append"), st.just(1)),
    st.tuples(st.just("crop"), st.integers(0, 6)),
    st.tuples(st.just("reorder"), st.lists(st.integers(0, 99), min_size=1, max_size=3)),
)


@settings(max_examples=150, deadline=None)
@given(sizes, st.lists(steps, max_size=16))
def test_the_cache_equals_a_list_of_tokens(
    size: tuple[int | None, int | None], work: list[tuple[str, int | list[int]]]
) -> None:
    capacity, window = size
    cache, plain, number, cropped = Cache(capacity=capacity, window=window), Plain(capacity or window, window), 0, 0
    for step, amount in work:
        if step == "append":
            assert isinstance(amount, int)
            assert cache.next_positions(amount).tolist() == list(range(plain.length, plain.length + amount))
            keys, values = cache.append(*tokens(plain.append(amount, number)))
            number += amount * len(plain.rows)
            assert seen(cache, keys, amount, window) == plain.seen(amount)
            torch.testing.assert_close(values, keys[..., :1].repeat(1, 1, 1, 3) + 0.5, rtol=0, atol=0)
        elif step == "crop":
            assert isinstance(amount, int)
            length = max(0, plain.length - amount)
            if plain.may_crop(length):
                cropped += plain.length - length
                cache.crop(length)
                plain.rows = [row[:length] for row in plain.rows]
            else:
                with pytest.raises(ValueError, match=f"got {length}"):
                    cache.crop(length)
        elif cache.keys is not None:
            assert isinstance(amount, list)
            index = [each % len(plain.rows) for each in amount]
            cache.reorder(torch.tensor(index))
            plain.rows = [plain.rows[each] for each in index]
        assert (cache.length, len(cache)) == (plain.length, plain.length - plain.gone)
        assert (cache.changes.evicted, cache.changes.cropped) == (plain.gone, cropped)


def test_the_example_in_the_docstring_runs() -> None:
    result = doctest.testmod(foci.cache, extraglobs={"foci": foci, "torch": torch})
    assert (result.failed, result.attempted > 3) == (0, True)


def storage(tensor: Tensor | None) -> int:
    assert tensor is not None
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("options", [{"capacity": 40}, {"window": 6}, {"window": 6, "capacity": 9}])
def test_a_step_copies_nothing(options: dict[str, int]) -> None:
    cache = Cache(**options)
    cache.append(*counted(0, 5))
    homes = storage(cache.keys), storage(cache.values)
    for start in range(5, 35):
        keys, values = cache.append(*counted(start, 1))
        assert (storage(keys), storage(values)) == homes
        assert keys.data_ptr() == cache.keys.data_ptr()


def test_spare_slots_let_a_step_of_several_tokens_copy_nothing() -> None:
    roomy, tight = Cache(window=4, capacity=6), Cache(window=4, capacity=5)
    for cache, stays in ((roomy, True), (tight, False)):
        cache.append(*counted(0, 4))
        keys, _ = cache.append(*counted(4, 3))
        assert (storage(keys) == storage(cache.keys)) is stays
        assert seen(cache, keys, 3, 4) == [[[(p, p) for p in range(q - 3, q + 1)] for q in (4, 5, 6)]]


def test_growth_is_geometric() -> None:
    cache, homes = Cache(), []
    for start in range(2000):
        keys, _ = cache.append(*counted(start, 1))
        # Kept alive, so that no later buffer can take its address.
        if not homes or storage(homes[-1]) != storage(keys):
            homes.append(keys)
    assert keys[0, 0, :, 0].tolist() == list(range(2000))
    assert len(homes) <= 10
    assert cache.nbytes <= 1.5 * 2000 * (2 + 3) * 8


def test_a_ring_takes_the_memory_of_its_window_whatever_the_prompt() -> None:
    cache = Cache(window=4)
    keys, values = cache.append(*counted(0, 100))
    assert (keys.shape, values.shape) == ((1, 1, 100, 2), (1, 1, 100, 3))
    assert cache.positions(100) is None
    assert (len(cache), cache.length, cache.nbytes) == (4, 100, 4 * (2 + 3) * 8)
    assert sorted(cache.keys[0, 0, :, 0].tolist()) == [96, 97, 98, 99]


def test_ring_positions_are_those_of_the_slots() -> None:
    cache = Cache(window=4)
    cache.append(*counted(0, 4))
    assert cache.positions(1) is None
    keys, _ = cache.append(*counted(4, 1))
    queries, places = cache.positions(1)
    assert queries.tolist() == [4]
    assert places.tolist() == keys[0, 0, :, 0].tolist() == [4, 1, 2, 3]


def test_a_long_step_is_joined_in_order_and_only_then() -> None:
    cache = Cache(window=4)
    cache.append(*counted(0, 6))
    keys, _ = cache.append(*counted(6, 3))
    queries, places = cache.positions(3)
    # The query at 6 looks back to 3; older keys are not handed out.
    assert places.tolist() == keys[0, 0, :, 0].tolist() == [3, 4, 5, 6, 7, 8]
    assert queries.tolist() == [6, 7, 8]
    keys, _ = cache.append(*counted(9, 1))
    assert cache.positions(1)[1].tolist() == keys[0, 0, :, 0].tolist() == [8, 9, 6, 7]


def test_cropped_slots_of_a_full_ring_stay_ahead_of_every_query() -> None:
    cache = Cache(window=2, capacity=4)
    cache.append(*counted(0, 7))
    cache.crop(5)
    keys, _ = cache.append(*counted(50, 1))
    queries, places = cache.positions(1)
    assert (queries.tolist(), places.tolist()) == ([5], [4, 5, 6, 3])
    assert keys[0, 0, :, 0].tolist() == [4, 50, 6, 3]
    with pytest.raises(ValueError, match="length must be >= 4, because older tokens of the window were overwritten"):
        cache.crop(3)


def test_changes_count_operations() -> None:
    cache = Cache(window=4, capacity=6)
    cache.append(*counted(0, 6))
    assert cache.changes == Changes()
    cache.crop(6)
    assert cache.changes == Changes()
    cache.crop(5)
    cache.append(*counted(5, 3))
    cache.reorder(torch.tensor([0]))
    assert cache.changes == Changes(evicted=2, cropped=1, reordered=1)
    cache.reset()
    assert cache.changes == Changes(evicted=2, cropped=1, reordered=1, resets=1)


def test_reset_frees_and_crop_keeps() -> None:
    cache = Cache(capacity=8)
    cache.append(*counted(0, 3))
    cache.crop(0)
    assert (len(cache), cache.length, cache.nbytes) == (0, 0, 8 * 5 * 8)
    cache.reset()
    assert (len(cache), cache.nbytes, cache.keys, cache.values) == (0, 0, None, None)
    keys, _ = cache.append(torch.ones(2, 7), torch.ones(2, 1))
    assert keys.shape == (2, 7)


def test_an_empty_cache_is_true() -> None:
    assert Cache()
    assert len(Cache()) == 0
    assert Cache().positions(0) is None
    assert repr(Cache(window=4)) == "Cache(empty, capacity=None, window=4)"


def test_a_copy_is_independent() -> None:
    cache = Cache()
    cache.append(*counted(0, 3))
    branch = copy.deepcopy(cache)
    branch.append(*counted(7, 1))
    keys, _ = cache.append(*counted(3, 1))
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 3]
    assert branch.keys[0, 0, :, 0].tolist() == [0, 1, 2, 7]


def test_the_version_of_a_view_changes_with_its_content() -> None:
    cache = Cache(window=4)
    first, _ = cache.append(*counted(0, 3))
    version = first._version
    cache.append(*counted(3, 1))
    assert (first._version, first[0, 0, :, 0].tolist()) == (version, [0, 1, 2])
    cache.append(*counted(4, 1))
    assert (first._version > version, first[0, 0, :, 0].tolist()) == (True, [4, 1, 2])

    cache = Cache()
    first, _ = cache.append(*counted(0, 3))
    version = first._version
    cache.crop(2)
    cache.append(*counted(9, 1))
    assert (first._version > version, first[0, 0, :, 0].tolist()) == (True, [0, 1, 9])


def test_inference_mode_and_plain_mode_share_a_cache() -> None:
    cache = Cache(window=4)
    with torch.inference_mode():
        keys, _ = cache.append(*counted(0, 3))
        cache.reorder(torch.tensor([0]))
    cache.append(*counted(3, 3))
    with torch.inference_mode():
        keys, _ = cache.append(*counted(6, 1))
    assert not keys.is_inference()
    assert sorted(keys[0, 0, :, 0].tolist()) == [3, 4, 5, 6]


def test_nothing_is_read_from_the_device() -> None:
    # A meta tensor has no values: reading one would raise.
    cache = Cache(window=4, capacity=6)
    for count in (3, 1, 9, 2, 1):
        keys, values = (torch.empty(2, 3, count, 8, device="meta") for _ in range(2))
        cache.append(keys, values)
        positions = cache.positions(count)
        assert positions is None or all(each.device.type == "meta" for each in positions)
    assert cache.next_positions(2).device.type == "meta"
    cache.crop(cache.length - 2)
    cache.reorder(torch.empty(5, dtype=torch.int64, device="meta"))
    assert cache.keys.shape == (5, 3, 6, 8)


def test_gradients_are_refused_and_no_grad_is_not() -> None:
    keys, values = counted(0, 9)
    keys.requires_grad_()
    cache = Cache(window=4)
    with pytest.raises(RuntimeError, match=r"must not require grad.*torch.no_grad"):
        cache.append(keys, values)
    with torch.no_grad():
        got, _ = cache.append(keys, values)
    assert not got.requires_grad
    assert not cache.keys.requires_grad


def test_other_shapes_dtypes_and_devices_are_refused() -> None:
    cache = Cache()
    keys, values = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 4, 5)
    with pytest.raises(ValueError, match=r"values must be \(2, 3, 4, any width\).*, got \(2, 3, 1, 5\)"):
        cache.append(keys, values[:, :, :1])
    with pytest.raises(ValueError, match=r"of torch.float32 on cpu like the keys, got .* of torch.float64 on cpu"):
        cache.append(keys, values.double())
    with pytest.raises(ValueError, match=r"keys must be \(..., T, D\) and values \(..., T, E\), got \(8,\) and \(5,\)"):
        cache.append(keys[0, 0, 0], values[0, 0, 0])
    cache.append(keys, values)
    with pytest.raises(ValueError, match=r"keys must be \(2, 3, \*, 8\) .* as in the first append, got \(1, 3, 4, 8\)"):
        cache.append(keys[:1], values[:1])
    with pytest.raises(ValueError, match=r"values must be \(2, 3, \*, 5\) .*, got \(2, 3, 4, 8\)"):
        cache.append(keys, keys)
    with pytest.raises(ValueError, match=r"torch.float32 on cpu, as in the first append, got .* torch.float64"):
        cache.append(keys.double(), values.double())
    with pytest.raises(ValueError, match=r"on cpu, as in the first append, got .* on meta"):
        cache.append(keys.to("meta"), values.to("meta"))
    assert (cache.length, cache.keys.shape) == (4, (2, 3, 4, 8))


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="capacity must be an int >= 1 or None, got 0"):
        Cache(capacity=0)
    for wrong in ("5", 2.5, True):
        with pytest.raises(ValueError, match=f"window must be an int >= 1 or None, got {wrong!r}"):
            Cache(window=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="capacity must be >= window = 8, got 4"):
        Cache(capacity=4, window=8)
    cache = Cache(capacity=4)
    cache.append(*counted(0, 3))
    with pytest.raises(ValueError, match="at most capacity = 4 tokens, got 2 more after 3"):
        cache.append(*counted(3, 2))
    with pytest.raises(ValueError, match="length must be from 0 to 3, got 4"):
        cache.crop(4)
    with pytest.raises(ValueError, match="count must be from 0 to 3, got 4"):
        cache.positions(4)
    with pytest.raises(IndexError, match=r"index must be from 0 to 0, got \[1\]"):
        cache.reorder(torch.tensor([1]))
    with pytest.raises(ValueError, match=r"index must be an int32 or int64 tensor .*, got \(1,\) of torch.float32"):
        cache.reorder(torch.tensor([0.0]))
    flat = Cache()
    flat.append(torch.ones(2, 7), torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"keys with a batch .*, got \(\*, 7\)"):
        flat.reorder(torch.tensor([0]))


def sequence(length: int, rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of four heads, keys and values of two: (B, 4, T, 8), (B, 2, T, 8), (B, 2, T, 5)."""
    generator = torch.Generator().manual_seed(length)
    shapes = ((rows, 4, length, 8), (rows, 2, length, 8), (rows, 2, length, 5))
    q, k, v = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return q, k, v


def look_back(window: int | None) -> Mask:
    return foci.causal if window is None else foci.causal & foci.window(window - 1)


@pytest.mark.parametrize("steps", [[1] * 13, [6] + [1] * 7, [3, 4, 2, 1, 3], [13]])
@pytest.mark.parametrize(("capacity", "window"), [(None, None), (13, None), (None, 5), (8, 5), (None, 1), (None, 20)])
def test_cached_decoding_equals_the_whole_sequence(steps: list[int], capacity: int | None, window: int | None) -> None:
    q, k, v = sequence(13)
    cache, parts = Cache(capacity=capacity, window=window), []
    for start, count in zip([sum(steps[:i]) for i in range(len(steps))], steps, strict=True):
        new = slice(start, start + count)
        place = cache.next_positions(count)
        keys, values = cache.append(foci.rotary(k[:, :, new], place), v[:, :, new])
        turned = foci.rotary(q[:, :, new], place)
        parts.append(foci.attention(turned, keys, values, mask=look_back(window), positions=cache.positions(count)))
    whole = foci.attention(foci.rotary(q), foci.rotary(k), v, mask=look_back(window))
    torch.testing.assert_close(torch.cat(parts, dim=-2), whole)


def test_a_full_ring_of_its_window_needs_no_mask_for_one_token() -> None:
    q, k, v = sequence(13)
    cache = Cache(window=5)
    for t in range(13):
        keys, values = cache.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
    whole = foci.attention(q, k, v, mask=look_back(5))
    torch.testing.assert_close(foci.attention(q[:, :, -1:], keys, values), whole[:, :, -1:])


@pytest.mark.parametrize(("capacity", "window"), [(None, None), (9, 5)])
def test_cropped_drafts_do_not_change_later_steps(capacity: int | None, window: int | None) -> None:
    q, k, v = sequence(16)
    cache = Cache(capacity=capacity, window=window)
    cache.append(k[:, :, :9], v[:, :, :9])
    parts = []
    for start in (9, 11, 13):
        cache.append(torch.full((2, 2, 4, 8), 99.0, dtype=torch.float64), torch.full((2, 2, 4, 5), 99.0).double())
        cache.crop(start)
        new = slice(start, start + 2)
        keys, values = cache.append(k[:, :, new], v[:, :, new])
        parts.append(foci.attention(q[:, :, new], keys, values, mask=look_back(window), positions=cache.positions(2)))
    whole = foci.attention(q, k, v, mask=look_back(window))
    torch.testing.assert_close(torch.cat(parts, dim=-2), whole[:, :, 9:15])


@pytest.mark.parametrize("window", [None, 5])
def test_a_reordered_beam_continues_its_new_row(window: int | None) -> None:
    q, k, v = sequence(12, rows=3)
    index = torch.tensor([2, 0, 0, 1])
    cache = Cache(window=window)
    cache.append(k[:, :, :11], v[:, :, :11])
    cache.reorder(index)
    q, k, v = q[index], k[index], v[index]
    keys, values = cache.append(k[:, :, 11:], v[:, :, 11:])
    out = foci.attention(q[:, :, 11:], keys, values, mask=look_back(window), positions=cache.positions(1))
    torch.testing.assert_close(out, foci.attention(q, k, v, mask=look_back(window))[:, :, 11:])

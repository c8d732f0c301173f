"""Kept statistics equal those of the matrix; statistics that were not kept are refused."""

import pytest
import torch

import foci
from foci.record.kept import KeptStatistics, compute_key_shares
from tests.tensors import qkv


def weights(queries: int = 12, keys: int = 12) -> foci.Weights:
    return foci.attention(*qkv(queries, keys), mask=foci.causal, return_weights=True)[1]


def kept(keep: foci.Keep, queries: int = 12, keys: int = 12) -> tuple[KeptStatistics, foci.Weights]:
    lazy = weights(queries, keys)
    return KeptStatistics(keep.compute(lazy), lazy.shape), lazy


def test_kept_statistics_equal_those_of_weights() -> None:
    found, lazy = kept(foci.Keep(top=4, picture=6, largest_logit=True))
    for name in ("entropy", "received", "distance", "sink_mass", "largest_logit"):
        torch.testing.assert_close(getattr(found, name)(), getattr(lazy, name)())
    torch.testing.assert_close(found.lse, lazy.lse)
    for k in (1, 4):
        torch.testing.assert_close(found.top(k).values, lazy.top(k).values)
        assert torch.equal(found.top(k).keys, lazy.top(k).keys)
    for sizes in ((6, 6), (3, 2), (1, 6)):
        torch.testing.assert_close(found.picture(*sizes), lazy.picture(*sizes))
    assert len(found) == len(list(found)) == 9


def test_sink_mass_is_computed_only_with_sinks() -> None:
    keep, inputs = foci.Keep(top=2, picture=4), qkv(12, 12)
    with_sinks = foci.attention(*inputs, sink=torch.randn(4), return_weights=True)[1]
    found = KeptStatistics(keep.compute(with_sinks), with_sinks.shape)
    torch.testing.assert_close(found.sink_mass(), with_sinks.sink_mass())
    assert found.sink_mass().min() > 0
    without = keep.compute(weights())
    assert "sink_mass" not in without
    zeros = KeptStatistics(without, (2, 4, 12, 12)).head(1).sink_mass()
    assert zeros.shape == (2, 12)
    assert not zeros.any()


@pytest.mark.parametrize("queries", [0, 12])
def test_top_keys_are_kept_as_int32(queries: int) -> None:
    lazy = weights(queries)
    assert foci.Keep(top=3).compute(lazy)["top_keys"].dtype == torch.int32
    assert "top_keys" not in foci.Keep(top=0).compute(lazy)
    assert lazy.top(3).keys.dtype == torch.int64


@pytest.mark.parametrize(("queries", "keys"), [(13, 13), (5, 13), (11, 7)])
def test_a_coarser_picture_weights_its_blocks(queries: int, keys: int) -> None:
    found, lazy = kept(foci.Keep(top=0, picture=4), queries, keys)
    torch.testing.assert_close(found.picture(2, 1), lazy.picture(2, 1))


@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (5, 13), (11, 7), (1, 1)])
def test_shares_of_the_key_before_and_of_the_first(queries: int, keys: int) -> None:
    lazy = weights(queries, keys)
    dense, found = lazy.dense(), compute_key_shares(lazy, lazy.received())
    torch.testing.assert_close(found["first"], dense[..., 0])
    before = torch.arange(queries) + keys - queries - 1
    expected = torch.stack(
        [dense[..., i, j] if j >= 0 else torch.zeros(2, 4) for i, j in enumerate(before.tolist())], -1
    )
    torch.testing.assert_close(found["previous"], expected)


def test_statistics_that_were_not_kept_are_refused() -> None:
    found, _ = kept(foci.Keep(top=2, picture=4))
    for ask, message in (
        (lambda: found.top(3), r"k must be at most 2, the recorded number of keys, got 3: use keep=foci.Keep\(top=3\)"),
        (lambda: found.picture(3, 4), "rows must divide 4, because a picture of 4 x 4 was recorded, got 3"),
        (lambda: found.picture(4, 4, "max"), "reduce must be 'mean' for kept statistics, got 'max'"),
        (
            lambda: found.received([1]),
            r"queries must be None and per 'query_head' for kept statistics, got \[1\] and 'query_head'",
        ),
        (lambda: found["previous"], "'previous' was not recorded; available: entropy"),
    ):
        with pytest.raises(ValueError, match=message):
            ask()
    without, _ = kept(foci.Keep(top=0, picture=0))
    with pytest.raises(ValueError, match="'top' was not recorded; available: entropy"):
        without.top(1)


@pytest.mark.parametrize(
    "keep", [foci.Keep(top=4, picture=6), foci.Keep(top=99, picture=99, largest_logit=True, shares=True)]
)
def test_the_estimated_size_is_exact(keep: foci.Keep) -> None:
    found, lazy = kept(keep, 5, 13)
    assert keep.nbytes(*lazy.shape) == sum(tensor.nbytes for tensor in found.values())


@pytest.mark.parametrize("options", [{"top": -1}, {"picture": 2.0}, {"top": True}])
def test_invalid_numbers_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be an int of at least 0"):
        foci.Keep(**options)

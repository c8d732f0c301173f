"""What is kept in place of a matrix is what the matrix says, and what was not kept is refused."""

import pytest
import torch

import foci
from foci.record.kept import KeptStatistics, compute_key_shares
from tests.tensors import qkv


def weights(queries: int = 12, keys: int = 12) -> foci.Weights:
    return foci.attention(*qkv(queries, keys), mask=foci.causal, return_weights=True)[1]


def kept(keep: foci.Keep, queries: int = 12, keys: int = 12) -> tuple[KeptStatistics, foci.Weights]:
    lazy = weights(queries, keys)
    return KeptStatistics(keep.of(lazy), lazy.shape), lazy


def test_everything_is_what_the_weights_say() -> None:
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


def test_the_mass_of_sinks_is_computed_only_where_there_are_some() -> None:
    keep, inputs = foci.Keep(top=2, picture=4), qkv(12, 12)
    with_sinks = foci.attention(*inputs, sink=torch.randn(4), return_weights=True)[1]
    found = KeptStatistics(keep.of(with_sinks), with_sinks.shape)
    torch.testing.assert_close(found.sink_mass(), with_sinks.sink_mass())
    assert found.sink_mass().min() > 0
    without = keep.of(weights())
    assert "sink_mass" not in without
    zeros = KeptStatistics(without, (2, 4, 12, 12)).head(1).sink_mass()
    assert zeros.shape == (2, 12)
    assert not zeros.any()


@pytest.mark.parametrize("queries", [0, 12])
def test_kept_keys_are_half_as_long_as_indices(queries: int) -> None:
    lazy = weights(queries)
    assert foci.Keep(top=3).of(lazy)["top_keys"].dtype == torch.int32
    assert "top_keys" not in foci.Keep(top=0).of(lazy)
    assert lazy.top(3).keys.dtype == torch.int64


@pytest.mark.parametrize(("queries", "keys"), [(13, 13), (5, 13), (11, 7)])
def test_a_coarser_picture_weighs_its_blocks(queries: int, keys: int) -> None:
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


def test_what_was_not_kept_is_refused_with_what_to_do() -> None:
    found, _ = kept(foci.Keep(top=2, picture=4))
    for ask, message in (
        (lambda: found.top(3), r"top\(3\) was asked, but 2 were kept: watch with keep=foci.Keep\(top=3\)"),
        (lambda: found.picture(3, 4), "4 x 4 was kept: ask for rows that divide 4"),
        (lambda: found.picture(4, 4, "max"), "a picture of means was kept"),
        (lambda: found.received([1]), "kept for all queries"),
        (lambda: found["previous"], "previous was asked, but only entropy"),
    ):
        with pytest.raises(ValueError, match=message):
            ask()
    without, _ = kept(foci.Keep(top=0, picture=0))
    with pytest.raises(ValueError, match=r"top\(1\) was asked, but 0 were kept"):
        without.top(1)


@pytest.mark.parametrize(
    "keep", [foci.Keep(top=4, picture=6), foci.Keep(top=99, picture=99, largest_logit=True, shares=True)]
)
def test_the_estimate_is_what_is_kept(keep: foci.Keep) -> None:
    found, lazy = kept(keep, 5, 13)
    assert keep.nbytes(*lazy.shape) == sum(tensor.nbytes for tensor in found.values())


@pytest.mark.parametrize("options", [{"top": -1}, {"picture": 2.0}, {"top": True}])
def test_numbers_are_checked(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a whole number, 0 or more"):
        foci.Keep(**options)

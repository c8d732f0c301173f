"""Statistics strip by strip: the same for any strip size, and without a matrix in memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import foci
from foci.backends import strips
from tests import matrices
from tests.allocation import LargestTensor
from tests.matrices import CASES, assert_close, lazy, small_strips, truth

SIZES = {"a row at a time": 1, "a few rows": 300, "a few heads": 2000}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", SIZES)
def test_statistics_do_not_depend_on_the_strip_size(case: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_strips(monkeypatch, SIZES[size])
    weights, true = lazy(CASES[case]()), truth(CASES[case]())
    queries, keys = true.shape[-2:]
    k, rows, columns = min(3, keys), min(4, queries), min(5, keys)
    summary = weights.summary(top=k, picture=0)
    assert summary.top is not None
    assert_close(summary.entropy, matrices.entropy(true), torch.float64, 4)
    assert_close(summary.received, true.sum(-2), torch.float64, 10)
    assert_close(summary.distance, matrices.distance(true, CASES[case]()), torch.float64, 40)
    assert_close(summary.top.values, matrices.top(true, k)[0], torch.float64)
    assert torch.equal(summary.top.keys, matrices.top(true, k)[1])
    assert_close(weights.picture(rows, columns), matrices.picture(true, rows, columns, "mean"), torch.float64)
    assert_close(weights.picture(rows, columns, "max"), matrices.picture(true, rows, columns, "max"), torch.float64)
    groups = matrices.halves(queries), matrices.halves(keys)
    assert_close(weights.grouped(*groups), matrices.grouped(true, *groups), torch.float64, 4)
    x = matrices.randn(queries, 2)
    assert_close(weights.T @ x, true.mT @ x, torch.float64, 4)


@pytest.mark.parametrize("case", ["grouped heads, empty rows", "sink and bias, empty rows", "positions", "additive"])
@pytest.mark.parametrize("size", SIZES)
def test_the_mean_over_heads_does_not_depend_on_the_strip_size(
    case: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_strips(monkeypatch, SIZES[size])
    weights, true = lazy(CASES[case]()).mean("heads"), truth(CASES[case]()).mean(1)
    assert_close(weights.entropy(), matrices.entropy(true), torch.float64, 4)
    assert_close(weights.received(), true.sum(-2), torch.float64, 4)
    assert_close(weights.picture(3, 3), matrices.picture(true, 3, 3, "mean"), torch.float64)
    assert_close(weights.grouped([(0, 4)], [(2, 9)]), matrices.grouped(true, [(0, 4)], [(2, 9)]), torch.float64, 4)
    assert torch.equal(weights.top(4).keys, matrices.top(true, 4)[1])


def test_small_strips_give_many_parts_and_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above rely on this: a small budget gives many parts and many strips."""
    call = lazy(CASES["causal"]()).call
    whole = [(place, len(list(strips.split_into_strips(part)))) for place, part in strips.split_into_parts(call)]
    assert len(whole) == 1
    assert whole[0][1] == 1
    small_strips(monkeypatch, 1)
    small = [(place, len(list(strips.split_into_strips(part)))) for place, part in strips.split_into_parts(call)]
    assert len(small) >= 2
    assert min(strips for _, strips in small) == matrices.TQ


N = 256
QUESTIONS: dict[str, Callable[[foci.Weights], Any]] = {
    "summary": lambda w: w.summary(picture=64),
    "largest picture": lambda w: w.picture(60, 64, "max"),
    "received by some": lambda w: w.received(queries=slice(3, 9)),
    "grouped": lambda w: w.grouped([(0, 100), (100, 200)], [(0, 100)]),
    "W @ x": lambda w: w @ torch.ones(N, 4, dtype=w.dtype),
    "W.T @ x": lambda w: w.T @ torch.ones(N, 4, dtype=w.dtype),
    "a row": lambda w: w[..., 5, :],
    "a column": lambda w: w[..., 5],
    "a part": lambda w: w[0, 1].entropy(),
    "top of the mean": lambda w: w.mean("heads").top(8),
    "to": lambda w: w.to("cpu").nbytes,
}
LONG: dict[str, Callable[[], dict[str, Any]]] = {
    "causal": lambda: {"mask": foci.causal, "sink": torch.zeros(4)},
    "documents": lambda: {"mask": foci.documents(torch.arange(N) // 100) & foci.causal, "bias": foci.ALiBi()},
    "shaw": lambda: {"bias": foci.Relative(torch.ones(9, 8)), "mask": foci.window(50, 60) | foci.prefix(9)},
    "positions": lambda: {"positions": (torch.arange(N).flip(0), None), "mask": foci.causal},
    "additive": lambda: {"score": foci.Additive(torch.ones(8)), "mask": foci.window(3)},
}


# Statistics in float64 are always computed strip by strip.
@pytest.mark.parametrize(("call", "dtype"), [*((call, torch.float64) for call in LONG), ("causal", torch.float32)])
def test_no_statistic_allocates_a_matrix(call: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    small_strips(monkeypatch, 2**12)
    x = torch.randn(1, 4, N, 8, generator=torch.Generator().manual_seed(0))
    with LargestTensor() as attending:
        weights = lazy(matrices.in_dtype({"query": x, "key": x[:, :2], "value": x[:, :2]} | LONG[call](), dtype))
    seen = {"the call": attending.largest}
    for name, question in QUESTIONS.items():
        with LargestTensor() as asked:
            question(weights)
        seen[name] = asked.largest
    one_head = N * N
    assert {name: entries for name, entries in seen.items() if entries > one_head // 4} == {}


def test_the_allocation_check_detects_a_dense_matrix() -> None:
    x = torch.randn(1, 4, N, 8)
    weights = lazy({"query": x, "key": x, "value": x})
    with LargestTensor() as seen:
        weights.dense()
    assert seen.largest == 4 * N * N


@pytest.mark.parametrize("keys", [1000, 40_000])
def test_distances_far_from_the_first_key_are_exact(keys: int) -> None:
    arguments = {
        "query": torch.zeros(1, 2, 8, 4),
        "key": torch.zeros(1, 2, keys, 4),
        "value": torch.zeros(1, 2, keys, 4),
    }
    arguments |= {"mask": foci.causal, "bias": foci.ALiBi(torch.tensor([2.0, 0.5]))}
    distance = lazy(arguments).distance()
    near = torch.arange(200, dtype=torch.float64)
    for head, slope in enumerate((2.0, 0.5)):
        w = torch.exp(-slope * near)
        expected = float((w * near).sum() / w.sum())
        torch.testing.assert_close(
            distance[0, head].double(), torch.full((8,), expected, dtype=torch.float64), rtol=1e-5, atol=1e-6
        )


def test_distances_between_large_positions_are_exact() -> None:
    places = torch.tensor([2**26 + 1, 2**26 + 4])
    x = torch.zeros(1, 1, 2, 4)
    weights = lazy({"query": x, "key": x, "value": x, "positions": (places, places + 5)})
    assert weights.distance().tolist() == [[[6.5, 3.5]]]


def test_entropy_is_never_negative() -> None:
    x = torch.randn(1, 2, 64, 8, generator=torch.Generator().manual_seed(0)) * 20
    for weights in (
        lazy({"query": x, "key": x, "value": x}),
        lazy({"query": x, "key": x[:, :, :1], "value": x[:, :, :1]}),
    ):
        assert float(weights.entropy().min()) >= 0.0
        assert float(weights.summary().entropy.min()) >= 0.0

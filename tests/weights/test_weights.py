"""Every question to the lazy matrix, for every kind of call, against the dense matrix in float64."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from tests import matrices
from tests.matrices import CASES, DTYPES, assert_close, both, lazy, truth

CASE = pytest.mark.parametrize("case", CASES)
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def test_the_truth_is_the_softmax_of_the_definition() -> None:
    """softmax(where(mask, q·k / √d + bias, -inf), with the sink as one more column), written out once."""
    arguments = matrices.qkv() | {
        "mask": matrices.holes(),
        "bias": matrices.randn(matrices.TQ, 1),
        "sink": matrices.sink(),
    }
    logits = arguments["query"] @ arguments["key"].mT / math.sqrt(matrices.D) + arguments["bias"]
    logits = torch.where(arguments["mask"], logits, -torch.inf)
    column = arguments["sink"].view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    expected = torch.cat([logits, column], dim=-1).softmax(-1)[..., :-1]
    torch.testing.assert_close(truth(arguments), expected, atol=1e-14, rtol=1e-12)


@CASE
@DTYPE
def test_dense_is_the_whole_matrix(case: str, dtype: torch.dtype) -> None:
    weights, true = both(case, dtype)
    assert weights.shape == tuple(true.shape)
    assert_close(weights.dense(), true, dtype)


@CASE
@DTYPE
def test_statistics_per_query(case: str, dtype: torch.dtype) -> None:
    weights, true = both(case, dtype)
    assert_close(weights.entropy(), matrices.entropy(true), dtype, 4)
    assert_close(weights.distance(), matrices.distance(true, CASES[case]()), dtype, 20)


@CASE
@DTYPE
@pytest.mark.parametrize("offset", [0, -1, 3, 100])
def test_the_diagonal(case: str, dtype: torch.dtype, offset: int) -> None:
    weights, true = both(case, dtype)
    assert_close(weights.diagonal(offset), matrices.diagonal(true, CASES[case](), offset), dtype)


def test_the_diagonal_in_blocks_has_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foci.weights.slices.DIAGONAL_BLOCK", 3)
    q, k, v = (torch.randn(1, 2, length, 4, dtype=torch.float64, requires_grad=True) for length in (5, 8, 8))

    def diagonal(q: Tensor, k: Tensor) -> Tensor:
        weights = foci.attention(q, k, v, mask=foci.causal, return_weights=True)[1]
        assert isinstance(weights, foci.Weights)
        return weights.diagonal(-2)

    assert torch.autograd.gradcheck(diagonal, (q, k))


@pytest.mark.parametrize("offset", [1.0, True, "1", None])
def test_an_offset_must_be_an_int(offset: Any) -> None:
    with pytest.raises(TypeError, match="offset must be an int, got "):
        both("plain")[0].diagonal(offset)


@CASE
@DTYPE
def test_received_attention_per_key(case: str, dtype: torch.dtype) -> None:
    weights, true = both(case, dtype)
    assert_close(weights.received(), true.sum(-2), dtype, 10)


@CASE
@DTYPE
def test_the_heaviest_keys(case: str, dtype: torch.dtype) -> None:
    weights, true = both(case, dtype)
    for k in {1, min(3, true.shape[-1]), true.shape[-1]}:
        found, (values, keys) = weights.top(k), matrices.top(true, k)
        assert_close(found.values, values, dtype)
        # Weights that differ by less than the tolerance may change places; their keys must weigh what was found.
        assert torch.equal(found.keys >= 0, keys >= 0)
        assert torch.equal(found.keys.sort(-1).values, keys.sort(-1).values) or k < true.shape[-1]
        at_keys = true.gather(-1, found.keys.clamp(min=0)).masked_fill(found.keys < 0, 0.0)
        assert_close(found.values, at_keys, dtype)
        assert dtype != torch.float64 or torch.equal(found.keys, keys)


@CASE
@DTYPE
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_pictures(case: str, dtype: torch.dtype, reduce: str) -> None:
    weights, true = both(case, dtype)
    queries, keys = true.shape[-2:]
    for rows, columns in {(1, 1), (min(3, queries), min(5, keys)), (queries, keys), (1, keys), (queries, 1)}:
        picture = weights.picture(rows, columns, reduce)
        assert_close(picture, matrices.picture(true, rows, columns, reduce), dtype)


@CASE
@DTYPE
def test_mass_between_groups(case: str, dtype: torch.dtype) -> None:
    weights, true = both(case, dtype)
    rows, columns = matrices.halves(true.shape[-2]), matrices.halves(true.shape[-1])
    assert_close(weights.grouped(rows, columns), matrices.grouped(true, rows, columns), dtype, 10)


@CASE
@DTYPE
def test_logits_and_sinks(case: str, dtype: torch.dtype) -> None:
    weights, true = both(case, dtype)
    exact = lazy(matrices.in_dtype(CASES[case](), torch.float64), "reference").lse
    seen = exact > -torch.inf
    half = dtype in {torch.float16, torch.bfloat16}
    assert torch.equal(weights.lse > -torch.inf, seen)
    if not half:
        assert_close(weights.lse, exact, dtype, 4)
        logits = torch.where(true > 0, true.log() + exact.masked_fill(~seen, 0.0).unsqueeze(-1), -torch.inf)
        assert_close(weights.largest_logit(), logits.amax((-2, -1)), dtype, 20)
    mass = 1 - true.sum(-1) if weights.call.sink is not None else torch.zeros_like(true[..., 0])
    assert_close(weights.sink_mass(), mass, dtype, 4)


@CASE
def test_the_summary_is_every_statistic(case: str) -> None:
    weights, true = both(case)
    k, size = min(8, true.shape[-1]), (min(4, true.shape[-2]), min(4, true.shape[-1]))
    summary = weights.summary(picture=4)
    expected = {
        "entropy": weights.entropy(),
        "received": weights.received(),
        "distance": weights.distance(),
        "lse": weights.lse,
        "sink_mass": weights.sink_mass(),
        "largest_logit": weights.largest_logit(),
        "picture": weights.picture(*size),
    }
    for name, tensor in expected.items():
        torch.testing.assert_close(getattr(summary, name), tensor, atol=1e-5, rtol=1e-5)
    assert summary.top is not None
    assert torch.equal(summary.top.keys, weights.top(k).keys)


def test_a_summary_leaves_out_statistics_that_are_not_requested() -> None:
    weights = both("causal")[0]
    summary = weights.summary(top=0, picture=0, largest_logit=False, distance=False)
    assert summary.top is summary.picture is summary.largest_logit is summary.distance is None
    assert torch.equal(summary.entropy, weights.summary().entropy)


@pytest.mark.parametrize("case", [name for name in CASES if name.endswith("empty rows")])
@DTYPE
def test_fully_masked_rows_give_zeros(case: str, dtype: torch.dtype) -> None:
    weights, true = both(case, dtype)
    empty = true.sum(-1) == 0
    assert bool(empty.any())
    assert not weights.dense()[empty].any()
    assert not weights.entropy()[empty].any()
    assert not weights.distance()[empty].any()
    assert not weights.top(2).values[empty].any()
    assert bool((weights.top(2).keys[empty] == -1).all())
    unseen = -torch.inf if weights.call.sink is None else matrices.sink().to(dtype).to(weights.dtype).view(1, -1, 1)
    assert bool((weights.lse == unseen)[empty].all())


MEANS = [name for name, make in CASES.items() if make()["query"].dim() > 3]


@pytest.mark.parametrize("case", MEANS)
def test_the_mean_over_heads_supports_all_methods(case: str) -> None:
    arguments = CASES[case]()
    weights, true = both(case)[0].mean("heads"), both(case)[1].mean(-3)
    queries, keys = true.shape[-2:]
    assert weights.shape == tuple(true.shape)
    assert_close(weights.dense(), true, torch.float32)
    assert_close(weights[..., queries // 2, :], true[..., queries // 2, :], torch.float32)
    assert_close(weights.entropy(), matrices.entropy(true), torch.float32, 4)
    assert_close(weights.distance(), matrices.distance(true.unsqueeze(-3), arguments).squeeze(-2), torch.float32, 20)
    assert_close(weights.received(), true.sum(-2), torch.float32, 4)
    assert_close(weights.top(1).values, matrices.top(true, 1)[0], torch.float32)
    assert torch.equal(weights.top(keys).keys >= 0, matrices.top(true, keys)[1] >= 0)
    assert_close(weights.picture(1, keys), matrices.picture(true, 1, keys, "mean"), torch.float32)
    groups = matrices.halves(queries), matrices.halves(keys)
    assert_close(weights.grouped(*groups), matrices.grouped(true, *groups), torch.float32, 4)
    x = matrices.randn(keys, 3).float()
    assert_close(weights @ x, true @ x.double(), torch.float32, 4)
    assert_close(weights.T @ x[:1].expand(queries, 3), true.mT @ x[:1].expand(queries, 3).double(), torch.float32, 4)


@pytest.mark.parametrize("name", ["lse", "largest_logit", "sink_mass", "summary"])
def test_per_head_statistics_are_refused_after_the_mean(name: str) -> None:
    mean = both("plain")[0].mean("heads")
    with pytest.raises(ValueError, match=rf"{name} is per head: compute it before mean\('heads'\)"):
        getattr(mean, name)()


LARGE: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": foci.causal},
    "window": {"mask": foci.window(40, 3), "sink": matrices.sink()},
    "padding": {"mask": foci.padding([170, 31], side="left") & foci.causal},
    "documents": {"mask": foci.documents(torch.arange(150) // 40, torch.arange(170) // 40)},
    "slopes": {"mask": foci.causal | foci.prefix(20), "bias": foci.ALiBi()},
    "positions": {"mask": foci.causal, "positions": (torch.arange(150).flip(0), torch.arange(170) // 2)},
    "softcap": {"score": foci.Dot(softcap=2.0), "mask": foci.causal.at(-5)},
}


@pytest.mark.parametrize("case", LARGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_matrices_use_the_fast_statistics(case: str, dtype: torch.dtype) -> None:
    """Large enough for the kernels that compute statistics of large inputs."""
    arguments = matrices.in_dtype(matrices.qkv(150, 170, kv_heads=2) | LARGE[case], dtype)
    summary, true = lazy(arguments).summary(top=5, picture=13), truth(arguments)
    assert summary.top is not None
    assert summary.picture is not None
    assert_close(summary.entropy, matrices.entropy(true), dtype, 8)
    assert_close(summary.received, true.sum(-2), dtype, 40)
    assert_close(summary.distance, matrices.distance(true, arguments), dtype, 400)
    assert_close(summary.picture, matrices.picture(true, 13, 13, "mean"), dtype)
    assert_close(summary.top.values, matrices.top(true, 5)[0], dtype)
    at_keys = true.gather(-1, summary.top.keys.clamp(min=0)).masked_fill(summary.top.keys < 0, 0.0)
    assert_close(summary.top.values, at_keys, dtype)


@pytest.mark.parametrize("keys", [17, 600])
def test_ties_go_to_the_lower_key(keys: int) -> None:
    arguments = matrices.in_dtype(matrices.qkv(keys, keys), torch.float32)
    arguments["query"] = torch.zeros_like(arguments["query"])
    found = lazy(arguments | {"mask": foci.causal}).top(6)
    expected = torch.arange(6).expand(keys, 6)
    seen = expected <= torch.arange(keys).unsqueeze(-1)
    assert bool((found.keys == expected.where(seen, -1)).all())
    values = seen / torch.arange(1, keys + 1).unsqueeze(-1)
    torch.testing.assert_close(found.values, values.expand_as(found.values), atol=1e-6, rtol=1e-5)


def test_a_sink_of_minus_infinity_takes_no_attention() -> None:
    arguments = CASES["causal, empty rows"]() | {"sink": torch.full((matrices.H,), -torch.inf, dtype=torch.float64)}
    weights, true = lazy(arguments), truth(CASES["causal, empty rows"]())
    assert not weights.sink_mass().any()
    assert_close(weights.dense(), true, torch.float64)
    assert_close(weights.entropy(), matrices.entropy(true), torch.float64)


def test_received_by_some_queries() -> None:
    weights, true = both("causal")
    for queries in (slice(2, 5), slice(None, None, 3), [0, -1], 4, torch.tensor([1, 2])):
        chosen = true[..., queries, :].sum(-2) if not isinstance(queries, int) else true[..., queries, :]
        assert_close(weights.received(queries=queries), chosen, torch.float32, 4)
    assert not weights.received(queries=[]).any()


@pytest.mark.parametrize("case", ["plain", "grouped heads", "one key head"])
def test_received_by_heads_that_share_keys(case: str) -> None:
    weights, true = both(case)
    kv_heads = CASES[case]()["key"].shape[1]
    shared = true.sum(-2).unflatten(1, (kv_heads, -1)).sum(2)
    assert_close(weights.received(per="kv_head"), shared, torch.float32, 4)
    assert_close(weights[1].received(per="kv_head"), shared[1], torch.float32, 4)
    # Heads 1, 2 and 3 of two groups: one head of the first, both of the second.
    some = [true[:, [h for h in (1, 2, 3) if h * kv_heads // 4 == g]].sum((1, 2)) for g in range(kv_heads)]
    expected = torch.stack([sums for sums in some if sums.any()], dim=1)
    assert_close(weights[:, 1:4].received(per="kv_head"), expected, torch.float32, 4)


@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, -1e9, -1e30])
@pytest.mark.parametrize("sink", [None, torch.tensor([-1.0, 0.0, 0.5, 1.0])])
def test_rows_masked_with_a_large_number_still_sum_to_one(value: float, sink: torch.Tensor | None) -> None:
    """Unlike a row of -inf, one of -1e9 has visible keys, whose number is lost in the rounding of the log-sum-exp."""
    bias = torch.zeros(matrices.B, 1, matrices.TQ, matrices.TK)
    bias[0, :, 3:] = value
    bias[1, :, :, 5:] = value
    weights = lazy(matrices.in_dtype(matrices.qkv(), torch.float32) | {"bias": bias, "sink": sink})
    ones = 1 - weights.sink_mass()
    dense = weights.dense()
    torch.testing.assert_close(dense.sum(-1), ones, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights.received().sum(-1), ones.sum(-1), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(weights.entropy(), matrices.entropy(dense), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights[..., 4:6, ::2], dense[..., 4:6, ::2])
    assert not dense[1, :, :, 5:].any()


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize(
    "extra", [{}, {"mask": foci.causal}, {"sink": matrices.sink()}], ids=["plain", "causal", "sink"]
)
def test_a_matrix_without_queries_or_keys(queries: int, keys: int, extra: dict[str, Any]) -> None:
    weights = lazy(matrices.qkv(queries, keys) | extra)
    lead = (matrices.B, matrices.H)
    summary = weights.summary()
    assert weights.dense().shape == (*lead, queries, keys)
    assert summary.entropy.shape == summary.distance.shape == weights.lse.shape == (*lead, queries)
    assert weights.received(queries=slice(0, 1)).shape == summary.received.shape == (*lead, keys)
    assert not summary.received.any()
    assert bool((weights.largest_logit() == -torch.inf).all())
    assert (weights @ torch.ones(keys, 3).double()).shape == (*lead, queries, 3)
    assert not (weights.T @ torch.ones(queries, 3).double()).any()
    assert weights.mean("heads").entropy().shape == (matrices.B, queries)


@pytest.mark.parametrize("lead", [(0, 4), (2, 0)])
def test_a_call_without_sequences_or_heads(lead: tuple[int, int]) -> None:
    x = torch.zeros(*lead, 5, 6)
    weights = foci.attention(x, x, x, return_weights=True)[1]
    assert weights.summary().picture.shape == weights.dense().shape == (*lead, 5, 5)
    assert (weights.T @ torch.ones(5, 3)).shape == (*lead, 5, 3)


def test_dense_above_the_limit_is_refused_with_its_size() -> None:
    weights, true = both("plain")
    size = true.numel() * 4
    assert weights.dense(limit=size).shape == true.shape
    with pytest.raises(
        ValueError, match=rf"\(2, 4, 11, 17\) takes {size:,} bytes, above the limit of {size - 1:,} bytes"
    ):
        weights.dense(limit=size - 1)
    x = torch.zeros(1, 8, 2**14, 1)
    big = foci.attention(x[:, :, :2], x, x, return_weights=True)[1]
    long = foci.Weights(replace(big.call, q=x), big.tensors.lse, (1,), True)
    with pytest.raises(ValueError, match=r"takes 8\.00 GiB, above the limit of 1\.00 GiB: use slices"):
        long.dense()


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "no keys at all": (lambda w: w.top(0), ValueError, "k must be an int from 1 to the 17 keys, got 0"),
    "more than the keys": (lambda w: w.top(18), ValueError, "from 1 to the 17 keys, got 18"),
    "not a number": (lambda w: w.top(2.0), ValueError, "got 2.0"),
    "true": (lambda w: w.top(True), ValueError, "got True"),
    "a picture without rows": (
        lambda w: w.picture(0, 1),
        ValueError,
        "from 1 to the 11 queries and columns from 1 to the 17 keys, got 0 x 1",
    ),
    "a picture of more rows": (lambda w: w.picture(12, 1), ValueError, "got 12 x 1"),
    "a picture of more columns": (lambda w: w.picture(1, 18), ValueError, "got 1 x 18"),
    "another reduction": (lambda w: w.picture(1, 1, "sum"), ValueError, "reduce must be 'mean' or 'max', got 'sum'"),
    "another per": (lambda w: w.received(per="head"), ValueError, "per must be 'query_head' or 'kv_head', got 'head'"),
    "no heads to add": (
        lambda w: w[0, 0].received(per="kv_head"),
        ValueError,
        r"\(..., H, Tq, Tk\), for per='kv_head', got \(11",
    ),
    "a query out of range": (lambda w: w.received(queries=[11]), IndexError, r"from -11 to 10, got \[11\]"),
    "another mean": (lambda w: w.mean("queries"), ValueError, "over must be 'heads', got 'queries'"),
    "no heads": (lambda w: w[:, 0].mean("heads"), ValueError, r"\(..., H, Tq, Tk\), for .*, got \(2, 11, 17\)"),
    "less than nothing": (lambda w: w.summary(top=-1), ValueError, "top must be an int >= 0, got -1"),
    "half a picture": (lambda w: w.summary(picture=1.5), ValueError, "picture must be an int >= 0, got 1.5"),
    "no groups": (lambda w: w.grouped([], [(0, 1)]), ValueError, "query_groups must have at least one group"),
    "overlap": (
        lambda w: w.grouped([(0, 1)], [(0, 3), (2, 4)]),
        ValueError,
        r"key_groups must not overlap, got \(2, 4\)",
    ),
    "another function": (
        lambda w: torch.softmax(w, -1),
        TypeError,
        "arguments of softmax must be tensors, got lazy Weights",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_of_methods_are_refused(case: str) -> None:
    ask, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        ask(both("plain")[0])


def test_weights_move_to_a_device_with_all_tensors() -> None:
    weights = lazy(CASES["deep"]()).to("cpu")
    assert weights.device == torch.device("cpu")
    assert_close(weights.dense(), truth(CASES["deep"]()), torch.float64)
    moved = lazy(CASES["sink and bias, empty rows"]()).to("meta")
    held = [moved.call.q, moved.call.k, moved.call.sink, moved.call.bias.entries, moved.tensors.lse]
    assert [tensor.device.type for tensor in held] == ["meta"] * 5
    assert moved.call.sizes.device.type == "meta"


def test_repr_of_weights() -> None:
    weights = lazy(matrices.in_dtype(CASES["causal"](), torch.float32))
    size = 4 * 2 * 4 * (11 * 6 + 17 * 6 + 11)
    assert repr(weights) == f"Weights(2, 4, 11, 17), causal, float32 on cpu, holds {size:,} bytes"
    assert repr(weights.mean("heads")).startswith("Weights(2, 11, 17), causal, mean over heads, float32")
    assert repr(weights.T).startswith("Transposed Weights(2, 4, 11, 17)")
    assert weights.T.shape == (2, 4, 17, 11)

"""Fast additive scores on a CPU, in C and in blocks: equal to the formula in float64, also far from 0; gradients."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

import foci
from foci.backends import additive_cpu, strips
from foci.backends.additive_cpu import FastAdditive, with_fast_additive
from foci.runtime import native
from foci.scores import Additive
from tests.allocation import LargestTensor
from tests.tensors import qkv, randn

EPS = torch.finfo(torch.float32).eps
MISSING = additive_cpu.missing_c_library()

# Batch, heads, key/value heads, queries, keys, width: odd and small ones, and more than a vector or a block holds.
SHAPES = [
    (2, 4, 2, 13, 37, 7),
    (1, 2, 2, 9, 40, 64),
    (1, 1, 1, 70, 1, 33),
    (2, 3, 1, 1, 50, 24),
    (1, 2, 1, 3, 17, 1),
    (1, 1, 1, 5, 1100, 16),
]

# Scale of queries and keys, and a shift that is added to queries and subtracted from keys.
SIZES = {"usual": (1.0, 0.0), "small": (0.1, 0.0), "opposite": (0.5, 20.0), "beyond": (0.5, 200.0)}


@pytest.fixture(autouse=True)
def _nan_in_fresh_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["compiled", "in blocks", "in small blocks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the scores are computed."""
    if request.param == "compiled":
        if MISSING is not None:
            pytest.skip(f"no compiled library: {MISSING}")
        return "compiled"
    monkeypatch.setattr(additive_cpu, "missing_c_library", lambda: "switched off")
    if request.param == "in small blocks":
        monkeypatch.setattr(additive_cpu, "TERMS_PER_BLOCK", 1024)
        monkeypatch.setattr(additive_cpu, "ROWS_PER_BLOCK", 4)
    return str(request.param)


def tensors(shape: tuple[int, ...], size: str = "usual") -> list[Tensor]:
    batch, heads, key_heads, queries, keys, width = shape
    scale, shift = SIZES[size]
    q = randn(batch, heads, queries, width) * scale + shift
    k = randn(batch, key_heads, keys, width, seed=1) * scale - shift
    return [q, k, randn(heads, width, seed=2)]


def formula(q: Tensor, k: Tensor, weight: Tensor) -> Tensor:
    return Additive(weight).raw(q, k)


def solved(function: object, given: list[Tensor], slopes: Tensor) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    scores = function(*leaves)  # type: ignore[operator]
    return [scores.detach(), *torch.autograd.grad(scores, leaves, slopes.to(scores.dtype))]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores_and_gradients_equal_the_formula(way: str, shape: tuple[int, ...], size: str) -> None:
    given = tensors(shape, size)
    slopes = randn(*shape[:2], shape[3], shape[4], seed=3)
    found = solved(lambda q, k, w: FastAdditive(w).raw(q, k), given, slopes)
    true = solved(formula, [tensor.double() for tensor in given], slopes)
    # A few eps times Σ|w|: the rounding error of a sum of rounded tanh.
    most = 3 * EPS * float(given[2].abs().sum(-1).max())
    torch.testing.assert_close(found[0].double(), true[0], atol=most, rtol=4 * EPS)
    for name, one, other in zip(("queries", "keys", "weight"), found[1:], true[1:], strict=True):
        # Gradients are sums over all keys, all queries or both.
        scale = 1 + float(other.abs().max()) if name != "weight" else float(slopes.abs().sum((0, 2, 3)).max())
        torch.testing.assert_close(one.double(), other, atol=16 * EPS * scale, rtol=0)


@pytest.mark.parametrize(("a", "b"), [(50.0, -49.5), (200.0, -199.5), (43.0, -43.0), (1e30, 0.0), (-1e30, 1.0)])
@pytest.mark.parametrize("queries", [1, 6])
def test_large_inputs_of_opposite_sign(way: str, a: float, b: float, queries: int) -> None:
    q, k, weight = torch.full((1, 1, queries, 3), a), torch.full((1, 1, 20, 3), b), randn(1, 3)
    slopes = torch.ones(1, 1, queries, 20)
    found = solved(lambda q, k, w: FastAdditive(w).raw(q, k), [q, k, weight], slopes)
    true = solved(formula, [q.double(), k.double(), weight.double()], slopes)
    for one, other in zip(found, true, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-6, rtol=4e-6)


def test_an_outlier_does_not_affect_other_scores(way: str) -> None:
    q, k, weight = tensors(SHAPES[1])
    q[0, 0, 3, 5], k[0, 1, 7, 2] = 90.0, -120.0
    scores = FastAdditive(weight).raw(q, k).double()
    torch.testing.assert_close(scores, formula(q.double(), k.double(), weight.double()), atol=3e-5, rtol=0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_propagate(way: str, value: float) -> None:
    q, k, weight = tensors(SHAPES[1])
    q[0, 1, 2, 3] = value
    scores, exact = FastAdditive(weight).raw(q, k), formula(q, k, weight)
    assert torch.equal(scores.isnan(), exact.isnan())
    torch.testing.assert_close(scores, exact, equal_nan=True, atol=3e-5, rtol=0)


def test_double_backward(way: str) -> None:
    def twice(function: object, given: list[Tensor]) -> tuple[Tensor, ...]:
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        scores = function(*leaves)  # type: ignore[operator]
        (first,) = torch.autograd.grad(scores.square().sum(), leaves[0], create_graph=True)
        return torch.autograd.grad(first.square().sum(), leaves)

    given = tensors(SHAPES[0])
    found = twice(lambda q, k, w: FastAdditive(w).raw(q, k), given)
    true = twice(formula, [tensor.double() for tensor in given])
    for one, other in zip(found, true, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4 * float(other.abs().max()), rtol=0)


def test_scores_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    if MISSING is not None:
        pytest.skip(f"no compiled library: {MISSING}")
    given = tensors((1, 1, 1, 150, 1100, 20))
    slopes = randn(1, 1, 150, 1100)
    alone = solved(lambda q, k, w: FastAdditive(w).raw(q, k), given, slopes)
    monkeypatch.setattr(native, "count_threads", lambda work, least: 3)
    several = solved(lambda q, k, w: FastAdditive(w).raw(q, k), given, slopes)
    assert torch.equal(alone[0], several[0])
    for one, other in zip(alone[1:], several[1:], strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_additive_calls_on_a_cpu_use_it(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    weight = randn(8, seed=4, dtype=dtype)
    with mock.patch.object(FastAdditive, "raw", autospec=True, side_effect=FastAdditive.raw) as raw:
        found = foci.attention(q, k, v, score=foci.Additive(weight), mask=foci.causal)
    assert raw.call_count == 1
    true = foci.attention(q.double(), k.double(), v.double(), score=foci.Additive(weight.double()), mask=foci.causal)
    torch.testing.assert_close(found.double(), true, atol=8 * torch.finfo(dtype).eps, rtol=0)


def test_torch_func_and_compile_use_the_formula() -> None:
    q, k, v = qkv()
    score = foci.Additive(randn(8, seed=4))
    with mock.patch.object(FastAdditive, "raw", side_effect=AssertionError):
        torch.func.grad(lambda q: foci.attention(q, k, v, score=score).sum())(q)
        torch.compile(lambda q: foci.attention(q, k, v, score=score), backend="aot_eager", fullgraph=True)(q)
        foci.attention(q.double(), k.double(), v.double(), score=foci.Additive(randn(8).double()))
        assert (
            with_fast_additive(
                foci.arguments.prepare_call(q, k, v, foci.Dot(), None, None, None, None, 0.0, False)
            ).score
            == foci.Dot()
        )


def test_weights_and_statistics_use_it(way: str) -> None:
    q, k, v = qkv(70, 90)
    options = {"score": foci.Additive(randn(4, 8, seed=4)), "sink": randn(4), "mask": foci.window(30)}
    _, found = foci.attention(q, k, v, return_weights=True, **options)
    with mock.patch.object(strips, "with_fast_additive", lambda call: call):
        _, plain = foci.attention(q, k, v, return_weights=True, **options)
        expected = plain.summary(top=4, picture=16)
    summary = found.summary(top=4, picture=16)
    for name in ("entropy", "received", "picture", "distance", "largest_logit"):
        torch.testing.assert_close(getattr(summary, name), getattr(expected, name), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(found.lse, plain.lse)
    torch.testing.assert_close(found.sink_mass(), plain.sink_mass())


def test_memory_is_linear_in_the_length(way: str) -> None:
    """Forward and backward allocate no n x n x d tensor, and no n x n tensor beyond a strip."""
    q, k, v = (randn(1, 1, 240, 16, seed=seed).requires_grad_() for seed in range(3))
    with mock.patch.object(strips, "MAX_CPU_STRIP_ENTRIES", 2**12), LargestTensor() as seen:
        foci.attention(q, k, v, score=foci.Additive(randn(16))).sum().backward()
    inputs, strip, block = (
        240 * 16,
        2**12 * torch.get_num_threads(),
        0 if way == "compiled" else additive_cpu.TERMS_PER_BLOCK,
    )
    assert seen.largest <= max(2 * inputs, strip, block)

"""The backward of additive attention for very few queries, such as those of a recurrent decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from foci.gpu.additive import decode, launch, two_pass_backward
from foci.gpu.additive.arguments import AdditiveOptions
from tests.checker import answers
from tests.kernels.test_additive import DEVICE, NO_OPTIONS, additive_problem, judge, problem_of, randn, sizes

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SEED = torch.tensor(20_260_101, device=DEVICE)


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Receives an entry for each call of the decode backward."""
    seen: list[Tensor] = []
    true = decode.decode_backward

    def counted(d_out: Tensor, *rest: Any) -> Any:
        seen.append(d_out)
        return true(d_out, *rest)

    monkeypatch.setattr(decode, "decode_backward", counted)
    return seen


@pytest.mark.parametrize(
    ("shape", "mask", "dtype", "headed", "sink"),
    [
        (sizes(1, 40), "none", F32, False, False),
        (sizes(4, 37, 9, 4, 2), "causal", F32, True, True),
        (sizes(3, 33, 24), "two_sided", F16, False, False),
        (sizes(4, 3), "causal", F32, False, True),
        (sizes(2, 15, value_width=21), "documents", F32, False, False),
        (sizes(2, 13, value_width=3), "scattered", BF16, False, False),
        (sizes(3, 20, layout="transposed"), "prefix", F32, False, False),
        (sizes(3, 13), "outside", F32, False, False),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
def test_forward_and_backward_equal_the_reference(
    shape: Any, mask: str, dtype: torch.dtype, headed: bool, sink: bool, taken: list[Tensor]
) -> None:
    judge(problem_of(shape, mask, dtype, headed, sink))
    assert taken


@pytest.mark.parametrize(("query", "key"), [(17.0, -17.0), (200.0, -199.5)])
def test_inputs_of_all_magnitudes(query: float, key: float) -> None:
    q, k = 0.5 * randn(1, 1, 2, 17) + query, 0.5 * randn(1, 1, 19, 17, seed=2) + key
    judge(additive_problem(q, k, randn(17, seed=3)))


def test_gradients_are_deterministic() -> None:
    problem = problem_of(sizes(3, 40, heads=2), "causal")
    one, other = (answers(problem, "triton", device=DEVICE) for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def difference(
    queries: int, keys: int, width: int, values: int, group: int, terms: AdditiveOptions, dtype: torch.dtype
) -> float:
    """Against the two passes, on memory that holds NaN before it is written.

    Each has the log-sum-exp of its own forward: what a logit lost on one way is not what it lost on the other.
    """
    shapes = [(2, 2 * group, queries, width), (2, 2, keys, width), (2, 2, keys, values), (2 * group, width)]
    q, k, v, w = (randn(*shape, seed=seed).to(DEVICE, dtype) for seed, shape in enumerate(shapes))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        d_out = randn(2, 2 * group, queries, values, seed=8).to(q)
        found = launch.backward(d_out, None, q, k, v, w, *launch.forward(q, k, v, w, terms), terms)
        tiling = launch.choose_forward_tiling(queries, 4 * group, values, dtype, q.device)
        tiled = launch.forward(q, k, v, w, terms, tiling)
        expected = two_pass_backward.backward_in_two_passes(d_out, None, q, k, v, w, *tiled, terms)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
    return max(
        float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(
    "terms",
    [pytest.param(NO_OPTIONS, marks=pytest.mark.slow), NO_OPTIONS._replace(seed=SEED, dropout=0.3)],
)
def test_backward_equals_the_two_pass_backward(terms: AdditiveOptions) -> None:
    assert difference(2, 37, 9, 5, 2, terms, F32) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize(
    ("queries", "keys", "width", "values", "group"),
    [(1, 4096, 256, 256, 1), (4, 1000, 64, 64, 2), (3, 777, 512, 40, 1), (2, 300, 20, 512, 3)],
)
def test_large_inputs_equal_the_two_pass_backward(
    queries: int, keys: int, width: int, values: int, group: int, dtype: torch.dtype
) -> None:
    # In float32 the rounding error of a logit matters, up to eps Σ|w|: 5e-5 at a width of 512.
    rounding = 8 * torch.finfo(dtype).eps if dtype != F32 else max(2e-5, torch.finfo(F32).eps * 0.8 * width)
    assert difference(queries, keys, width, values, group, NO_OPTIONS, dtype) < rounding

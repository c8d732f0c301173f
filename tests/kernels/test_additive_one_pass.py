"""The one-pass backward of additive attention: as exact as two passes, and used unless deterministic mode is on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import foci
from foci.gpu.additive import launch, one_pass_backward, two_pass_backward
from foci.gpu.additive.arguments import AdditiveOptions, AdditiveTiling
from tests.kernels.test_additive import DEVICE, NO_OPTIONS, additive_problem, judge, problem_of, randn, sizes

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SEED = torch.tensor(20_260_101, device=DEVICE)


@pytest.fixture
def one_pass(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Receives an entry for each call of the one-pass backward."""
    taken: list[Tensor] = []
    true = one_pass_backward.backward_in_one_pass

    def counted(d_out: Tensor, *rest: Any) -> Any:
        taken.append(d_out)
        return true(d_out, *rest)

    monkeypatch.setattr(one_pass_backward, "backward_in_one_pass", counted)
    return taken


@pytest.mark.parametrize(
    ("shape", "mask", "dtype", "headed", "sink"),
    [
        (sizes(18, 20), "none", F32, False, False),
        (sizes(17, 17, 16, 2), "causal", BF16, True, False),
        (sizes(5, 20, 9, 4, 2), "causal", F32, True, True),
        (sizes(19, 33, 24), "two_sided", F16, False, False),
        (sizes(9, 4), "causal", F32, False, True),
        (sizes(7, 15, value_width=21), "documents", F32, False, False),
        (sizes(7, 13, value_width=3), "scattered", BF16, False, False),
        (sizes(20, 37, layout="transposed"), "prefix", F32, False, False),
        (sizes(13, 13), "outside", F32, False, False),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
def test_backward_equals_the_reference(
    shape: Any, mask: str, dtype: torch.dtype, headed: bool, sink: bool, one_pass: list[Tensor]
) -> None:
    judge(problem_of(shape, mask, dtype, headed, sink))
    assert one_pass


@pytest.mark.parametrize(
    ("spread", "query", "key"), [(1.0, 5.0, 5.0), (0.3, 17.0, -17.0), (0.5, 50.0, -49.5), (0.5, 200.0, -199.5)]
)
@pytest.mark.usefixtures("one_pass")
def test_inputs_of_all_magnitudes(spread: float, query: float, key: float) -> None:
    q, k = spread * randn(1, 1, 18, 17) + query, spread * randn(1, 1, 19, 17, seed=2) + key
    judge(additive_problem(q, k, randn(17, seed=3)))


def test_zero_weights_have_gradients(one_pass: list[Tensor]) -> None:
    weight = torch.zeros(12, dtype=torch.float64)
    weight[5], weight[7] = 2.0, 1e-14
    judge(additive_problem(randn(1, 1, 6, 12), randn(1, 1, 7, 12, seed=1), weight))
    assert one_pass


def difference(
    queries: int,
    keys: int,
    width: int,
    values: int,
    group: int,
    terms: AdditiveOptions,
    tiling: AdditiveTiling | None,
    dtype: torch.dtype,
) -> float:
    """One pass against two, on memory filled with NaN."""
    n = 2 if DEVICE == "cuda" else 1
    shapes = [(n, n * group, queries, width), (n, n, keys, width), (n, n, keys, values), (n * group, width)]
    q, k, v, w = (randn(*shape, seed=seed).to(DEVICE, dtype) for seed, shape in enumerate(shapes))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        out, lse = launch.forward(q, k, v, w, terms)
        d_out, d_lse = randn(*out.shape, seed=8).to(out), randn(*lse.shape, seed=9).to(lse)
        d_lse = d_lse.masked_fill(lse.isneginf(), 0)
        given = (d_out, d_lse, q, k, v, w, out, lse, terms)
        expected, found = (
            two_pass_backward.backward_in_two_passes(*given),
            one_pass_backward.backward_in_one_pass(*given, tiling),
        )
    finally:
        torch.use_deterministic_algorithms(False)
    for one, two in zip(found, expected, strict=True):
        assert one.shape == two.shape
        assert one.dtype == two.dtype
    return max(
        float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(
    ("queries", "keys", "width", "values", "group", "terms"),
    [
        (17, 20, 7, 5, 2, NO_OPTIONS),
        (9, 18, 40, 16, 1, NO_OPTIONS._replace(causal=True)),
        (18, 20, 16, 70, 1, NO_OPTIONS._replace(seed=SEED, dropout=0.3)),
    ],
)
def test_backward_equals_the_two_pass_backward(
    queries: int, keys: int, width: int, values: int, group: int, terms: AdditiveOptions
) -> None:
    assert difference(queries, keys, width, values, group, terms, None, F32) < 1e-5


def test_split_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_pass_backward, "count_multiprocessors", lambda device: 8)
    assert difference(34, 10, 9, 5, 1, NO_OPTIONS, None, F32) < 1e-5


def test_feature_padding_is_minimal() -> None:
    found = {
        width: one_pass_backward.feature_loop_arguments(width, 64, AdditiveTiling())
        for width in (7, 16, 20, 40, 64, 80, 100, 512)
    }
    assert {width: sizes["DW"] for width, sizes in found.items()} == {
        7: 16, 16: 16, 20: 32, 40: 64, 64: 64, 80: 96, 100: 128, 512: 512
    }  # fmt: skip
    assert all(sizes["JT"] * sizes["DT"] == 128 for sizes in found.values())


def test_deterministic_mode_uses_two_passes(one_pass: list[Tensor]) -> None:
    x = torch.randn(1, 1, 17, 8, device=DEVICE, requires_grad=True)
    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            foci.attention(x, x, x, score=foci.Additive(x[0, 0, 0]), backend="triton").sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert len(one_pass) == 1


def test_no_other_gradients_are_added_in_any_order() -> None:
    """The statistics add cells in a fixed order, and list queries in any."""
    kernels = Path(launch.__file__).parents[2] / "kernels"
    adding = {path.relative_to(kernels).as_posix() for path in kernels.rglob("*.py") if "atomic_" in path.read_text()}
    statistics = {f"statistics/{name}.py" for name in ("tiles", "sums_hopper", "topk")}
    assert adding - statistics == {"additive/one_pass_backward.py"}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize(
    ("queries", "keys", "width", "values", "group", "terms", "tiling"),
    [
        (257, 300, 64, 64, 2, NO_OPTIONS, None),
        (513, 513, 80, 96, 1, NO_OPTIONS._replace(causal=True), None),
        (128, 200, 512, 512, 1, NO_OPTIONS, None),
        (300, 100, 16, 128, 1, NO_OPTIONS._replace(seed=SEED, dropout=0.3), None),
        (300, 190, 64, 64, 1, NO_OPTIONS, AdditiveTiling(chunk=4, registers=168, programs=3)),
    ],
)
def test_large_inputs_equal_the_two_pass_backward(
    queries: int,
    keys: int,
    width: int,
    values: int,
    group: int,
    terms: AdditiveOptions,
    tiling: AdditiveTiling | None,
    dtype: torch.dtype,
) -> None:
    rounding = 8 * torch.finfo(dtype).eps if dtype != F32 else 2e-5
    assert difference(queries, keys, width, values, group, terms, tiling, dtype) < rounding


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["none", "causal", "documents"])
def test_large_inputs_equal_the_reference(mask: str, one_pass: list[Tensor]) -> None:
    judge(problem_of(sizes(200, 200, 64, 2), mask, BF16, headed=True))
    assert one_pass


@pytest.mark.parametrize("values", [16, 32])
def test_dense_mask_in_float32(values: int) -> None:
    """The case in which the compiler uses most shared memory."""
    n = 200 if DEVICE == "cuda" else 20
    shapes = [(1, 2, n, 24), (1, 2, n, 24), (1, 2, n, values), (24,)]
    leaves = [randn(*shape, seed=seed).to(DEVICE, F32).requires_grad_() for seed, shape in enumerate(shapes)]
    mask = (randn(1, 2, n, n, seed=5) < 1).to(DEVICE)
    found = []
    for dtype, backend in ((F32, "triton"), (torch.float64, "reference")):
        q, k, v, w = (x.detach().to(dtype).requires_grad_() for x in leaves)
        out = foci.attention(q, k, v, score=foci.Additive(w), mask=mask, backend=backend)
        found.append(torch.autograd.grad(out.sin().sum(), (q, k, v, w)))
    for one, true in zip(*found, strict=True):
        assert float((one.double() - true).norm() / true.norm()) < 2e-5

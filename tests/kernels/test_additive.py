"""Additive attention kernels against the reference in float64; in Triton's interpreter if there is no GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import foci
from foci.arguments import Call, prepare_call
from foci.backends import reference
from foci.gpu import additive
from foci.gpu.additive import arguments, launch
from foci.gpu.additive.arguments import AdditiveOptions, AdditiveTiling
from foci.gpu.launcher import LaunchPlan
from tests.checker import Problem, Tensors, answers, check, eager_errors, truth, worst
from tests.contract.cells import MASKS, Sizes, input_shapes, laid_out

# Exponentials overflow on purpose; only the interpreter warns.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NO_OPTIONS = AdditiveOptions(None, None, None, None, None, False, 0.0)


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fill uninitialized memory with NaN, so that entries a kernel does not write are noticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def judge(problem: Problem, lse: bool = True) -> Tensors:
    """The common tolerance, with a floor of a few eps times Σ|w|: the rounding error of a logit whose terms cancel."""
    true = truth(problem, lse=lse)
    lost = 2 * torch.finfo(torch.float32).eps * float(problem.tensors["weight"].abs().sum())
    eager = eager_errors(problem, true)
    eager = {name: error.abs() + lost * worst(true[name]) for name, error in eager.items()}
    found = answers(problem, "triton", device=DEVICE, lse=lse)
    check(found, true, eager, problem.dtype)
    return found


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem_of(
    sizes: Sizes, mask: str = "none", dtype: torch.dtype = torch.float32, headed: bool = False, sink: bool = False
) -> Problem:
    shapes = input_shapes(sizes, sizes.width)
    heads = sizes.heads or 1
    shapes["weight"] = (heads, sizes.width) if headed else (sizes.width,)
    if sink:
        shapes["sink"] = (heads,)
    tensors = {name: randn(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}

    def arguments(leaves: Tensors) -> dict[str, Any]:
        inputs = {name: laid_out(leaves[name], sizes.layout) for name in ("query", "key", "value")}
        given = MASKS[mask](sizes)
        given = given.to(DEVICE) if isinstance(given, Tensor) and leaves["query"].is_cuda else given
        return inputs | {"score": foci.Additive(leaves["weight"]), "mask": given, "sink": leaves.get("sink")}

    return Problem(tensors, arguments, dtype)


def sizes(queries: int, keys: int, width: int = 7, heads: int = 1, key_heads: int = 1, **more: Any) -> Sizes:
    return Sizes((1,), heads, key_heads, queries, keys, width, **more)


F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("shape", "mask", "dtype", "headed", "sink"),
    [
        (sizes(18, 20), "none", F32, False, False),
        (sizes(17, 17, 16, 2), "causal", BF16, True, False),
        (sizes(5, 20, 9, 2), "causal", F32, True, True),
        (sizes(19, 33, 24), "two_sided", F16, False, False),
        (sizes(9, 21), "padding", F32, False, False),
        (sizes(9, 4), "causal", F32, False, True),
        (sizes(9, 5), "entries", F32, False, False),
        (sizes(1, 1), "none", F32, False, False),
        (sizes(7, 15, value_width=21), "documents", F32, False, False),
        (sizes(7, 13, value_width=3), "scattered", BF16, False, False),
        (sizes(6, 13, layout="every_other"), "left_padding", F32, False, False),
        (sizes(20, 37, layout="transposed"), "prefix", F32, False, False),
        (sizes(13, 13), "outside", F32, False, False),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
def test_forward_and_backward_equal_the_reference(
    shape: Sizes, mask: str, dtype: torch.dtype, headed: bool, sink: bool
) -> None:
    judge(problem_of(shape, mask, dtype, headed, sink))


def test_wide_values_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(additive, "MAX_ADDITIVE_WIDTH", 8)
    judge(problem_of(sizes(7, 15, value_width=21), "causal", F32, False, True))


WEIGHTS = {
    "part of a wider one": lambda w: w[:4, :7],
    "every other head": lambda w: w[::2, :7],
    "one for all": lambda w: w[0, :7].expand(4, 7),
    "transposed": lambda w: w[:7, :4].mT,
}


@pytest.mark.parametrize("queries", [2, 6])
@pytest.mark.parametrize("part", WEIGHTS)
def test_non_contiguous_weights(part: str, queries: int) -> None:
    problem = problem_of(sizes(queries, 9, heads=4, key_heads=2))
    tensors = problem.tensors | {"weight": randn(8, 10, seed=7)}

    def arguments(leaves: Tensors) -> dict[str, Any]:
        return problem.arguments(leaves) | {"score": foci.Additive(WEIGHTS[part](leaves["weight"]))}

    judge(Problem(tensors, arguments, F32))


@pytest.mark.parametrize("queries", [2, 6])
def test_double_backward_is_refused(queries: int) -> None:
    x = randn(1, 1, queries, 7).float().to(DEVICE).requires_grad_()
    out = foci.attention(x, x, x, score=foci.Additive(x[0, 0, 0].detach()), backend="triton")
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="backend must be 'blocked' or 'reference' for gradients of gradients"):
        torch.autograd.grad(first.square().sum() + x.sum(), x)


def additive_problem(query: Tensor, key: Tensor, weight: Tensor, mask: Any = None) -> Problem:
    tensors = {"query": query, "key": key, "value": randn(*key.shape[:-1], 5, seed=9), "weight": weight}

    def arguments(leaves: Tensors) -> dict[str, Any]:
        inputs = {name: leaves[name] for name in ("query", "key", "value")}
        return inputs | {"score": foci.Additive(leaves["weight"]), "mask": mask}

    return Problem(tensors, arguments, torch.float32)


@pytest.mark.parametrize(
    ("spread", "query", "key"),
    [(0.1, 0.0, 0.0), (1.0, 0.0, 0.0), (1.0, 5.0, 5.0), (0.3, 17.0, -17.0), (0.5, 50.0, -49.5), (0.5, 200.0, -199.5)],
)
def test_inputs_of_all_magnitudes(spread: float, query: float, key: float) -> None:
    q, k = spread * randn(1, 1, 18, 17) + query, spread * randn(1, 1, 19, 17, seed=2) + key
    judge(additive_problem(q, k, randn(17, seed=3)))


def prepared(x: Tensor, w: Tensor) -> dict[str, Tensor]:
    """The results of `prepare_exponentials`, where queries and keys are the same."""
    tiling = arguments.INTERPRETER_TILING
    sizes = arguments.exponentials_workspace(x, x, w, tiling)
    found = {name: torch.empty(size, device=x.device) for name, size in sizes.items()}
    scalars = arguments.additive_scalars(x, x, x, w, NO_OPTIONS) | arguments.tile_arguments(x, x, tiling)
    plan = LaunchPlan({}, x.device, [arguments.exponentials_launch(x, x, tiling, scalars)])
    plan({"q": x, "k": x, "weight": w} | found)
    return found


def test_each_summation_method_is_used() -> None:
    """Reciprocals shared by four, by two, or the direct sum, depending on the magnitude of the inputs."""
    w = torch.ones(8, device=DEVICE)
    for size, four, two, far in ((1.0, True, True, False), (6.0, False, True, False), (50.0, False, False, True)):
        x = torch.full((1, 1, 16, 8), size, device=DEVICE)
        found = prepared(x, w)
        exponents = ((found["q_max"] + found["k_max"]).clamp(min=0) + found["sizes"])[:8]
        assert bool((exponents.view(-1, 4).sum(1) <= 124).all()) == four
        assert bool((exponents.view(-1, 2).sum(1) <= 124).all()) == two
        assert bool(found["q_magnitude"][0] > 120) == far


def test_zero_weights() -> None:
    weight = torch.zeros(12, dtype=torch.float64)
    judge(additive_problem(randn(1, 1, 6, 12), randn(1, 1, 7, 12, seed=1), weight))
    weight[5], weight[7] = 2.0, 1e-14
    judge(additive_problem(randn(1, 1, 6, 12), randn(1, 1, 7, 12, seed=1), weight))


@pytest.mark.parametrize("most", [4, 2])
def test_all_tilings_agree(most: int) -> None:
    made = (randn(1, 2, 33, 20), randn(1, 1, 33, 20, seed=1), randn(1, 1, 33, 6), randn(2, 20))
    q, k, v, w = (x.to(DEVICE, torch.float32) for x in made)
    expected = reference.run(prepare_call(q, k, v, foci.Additive(w), None, None, None, None, 0.0, True))
    for tiling in (
        AdditiveTiling(queries=32, keys=16, max_shared=most),
        AdditiveTiling(queries=16, keys=32, chunk=4, max_shared=most),
    ):
        out, lse = launch.forward(q, k, v, w, NO_OPTIONS, tiling)
        torch.testing.assert_close(out, expected[0], atol=3e-6, rtol=0)
        torch.testing.assert_close(lse * math.log(2), expected[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("queries", "pairs", "value_width", "dtype", "expected"),
    [
        (128, 64, 256, torch.bfloat16, AdditiveTiling(keys=128, warps=8)),
        (512, 16, 256, torch.float16, AdditiveTiling(keys=128, warps=8)),
        (128, 16, 256, torch.bfloat16, AdditiveTiling(queries=32)),
        (512, 16, 256, torch.float32, AdditiveTiling(queries=32)),
        (1024, 32, 256, torch.float32, AdditiveTiling(warps=8, query_threads=16)),
        (1024, 32, 64, torch.bfloat16, AdditiveTiling()),
        (512, 16, 64, torch.bfloat16, AdditiveTiling(queries=32)),
        (20, 500, 256, torch.bfloat16, AdditiveTiling(queries=32)),
        (16, 500, 64, torch.bfloat16, AdditiveTiling(queries=16)),
        (128, 64, 512, torch.bfloat16, AdditiveTiling(queries=32, warps=8, query_threads=16)),
    ],
)
def test_forward_tiling(
    queries: int,
    pairs: int,
    value_width: int,
    dtype: torch.dtype,
    expected: AdditiveTiling,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "count_multiprocessors", lambda device: 132)
    assert launch.choose_forward_tiling(queries, pairs, value_width, dtype, torch.device("cuda", 0)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [70, 2])
def test_replayed_calls_equal_the_reference(queries: int) -> None:
    """The first call of a shape goes through Triton, later ones pass addresses."""
    for seed in range(4):
        q, k = randn(2, 2, queries, 48, seed=seed), randn(2, 1, 90, 48, seed=10 + seed)
        judge(additive_problem(q, k, randn(48, seed=20 + seed), foci.causal))


def seeded(dropout: float, requires_grad: bool, queries: int) -> Call:
    q, k, v, w = (
        x.float() for x in (randn(1, 2, queries, 9), randn(1, 1, 18, 9, seed=1), randn(1, 1, 18, 6), randn(9))
    )
    leaves = [x.to(DEVICE).requires_grad_(requires_grad) for x in (q, k, v, w)]
    call = prepare_call(*leaves[:3], foci.Additive(leaves[3]), foci.causal, None, None, None, dropout, True)
    call.seed = torch.tensor(20_260_101, device=DEVICE)
    return call


@pytest.mark.parametrize("queries", [17, 2])
def test_dropout_equals_the_reference(queries: int) -> None:
    found = []
    for run in (reference.run, additive.run):
        call = seeded(0.4, True, queries)
        out, lse = run(call)
        slopes = [randn(*x.shape).to(x) for x in (out, lse)]
        slopes[1] = slopes[1].masked_fill(lse.isneginf(), 0)
        tensors = [call.q, call.k, call.v, *call.score.tensors().values()]
        found.append([out, lse, *torch.autograd.grad([out, lse], tensors, slopes)])
    for expected, received in zip(*found, strict=True):
        torch.testing.assert_close(received, expected, atol=2e-5, rtol=1e-5)


def test_split_keys_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (arguments, launch):
        monkeypatch.setattr(module, "count_multiprocessors", lambda device: 64)
    for queries in (1, 7):
        q, k = randn(1, 1, queries, 16), randn(1, 1, 70, 16, seed=1)
        judge(additive_problem(q, k, randn(16, seed=2), foci.causal & foci.window(60)))


def test_deterministic_gradients_are_equal() -> None:
    torch.use_deterministic_algorithms(True)
    problem = problem_of(sizes(9, 20, heads=2), "causal")
    one, other = (answers(problem, "triton", device=DEVICE) for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bias": foci.ALiBi()}, "an additive score together with a bias"),
        ({"mask": foci.mask_function(lambda b, h, i, j: i != j)}, "not a union of at most two key ranges"),
    ],
)
def test_unsupported_calls_are_refused(change: dict[str, Any], reason: str) -> None:
    x = torch.zeros(1, 2, 4, 8, device=DEVICE)
    with pytest.raises(ValueError, match=reason):
        foci.attention(x, x, x, score=foci.Additive(x[0, 0, 0]), backend="triton", **change)
    wide = torch.zeros(1, 1, 2, 513, device=DEVICE)
    with pytest.raises(ValueError, match="the kernels support widths up to 512, got 513"):
        foci.attention(wide, wide, wide, score=foci.Additive(wide[0, 0, 0]), backend="triton")

"""Calls on which a kernel of PyTorch fails on a GPU: another kernel or backend runs them, with the right result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import foci
from foci.arguments import Call, prepare_call
from foci.backends import BACKEND_NAMES, BACKENDS, flex
from foci.backends.sdpa import cuda
from foci.scores import Dot
from tests.checker import Problem, Tensors, answers, check, eager_errors, taken_off, truth
from tests.tensors import randn

# PyTorch's compiler uses deprecated functions itself.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

MODULES = dict(zip(BACKEND_NAMES, BACKENDS, strict=True))


def call_of(q: Tensor, k: Tensor, **arguments: Any) -> Call:
    given = {"score": Dot(), "mask": None, "bias": None, "sink": None, "positions": None, "dropout": 0.0} | arguments
    return prepare_call(q, k, k, needs_lse=False, **given)


def problem_of(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, arguments: Callable[[Tensors], dict[str, Any]]
) -> Problem:
    tensors = {name: randn(*shape, seed=seed, dtype=torch.float64) for seed, (name, shape) in enumerate(shapes.items())}
    inputs = ("query", "key", "value")
    return Problem(
        tensors,
        lambda leaves: {name: leaves[name] for name in inputs} | arguments(leaves),
        dtype,
        frozenset(shapes.keys() - set(inputs)),
    )


def check_on_gpu(problem: Problem, expected: tuple[str, ...], backend: str | None = None, lse: bool = False) -> None:
    """Runs the problem, checks which backend did, and compares output and gradients with the truth."""
    plan = foci.plan(**problem.arguments(problem.leaves(problem.dtype, "cuda")), backend=backend, return_weights=lse)
    assert plan.chosen in expected
    module = MODULES[plan.chosen]
    with mock.patch.object(module, "run", wraps=module.run) as run:
        found = answers(problem, plan.chosen, device="cuda", lse=lse)
    assert run.call_count == 1
    true = truth(problem, lse=lse)
    # With one key the exact gradient of the query is 0.
    cancelled = [taken_off(true, problem.dtype)] if problem.tensors["key"].shape[-2] == 1 else []
    for results in (found, answers(problem, backend, device="cuda", lse=lse)):
        check(results, true, eager_errors(problem, true, "cuda"), problem.dtype, cancelled)


@pytest.mark.parametrize(("queries", "keys", "kernel"), [(1, 1, "flash"), (1, 2, "cudnn"), (2, 1, "cudnn")])
def test_one_query_and_one_key_do_not_use_cudnn(
    queries: int, keys: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "is_hopper_or_later", lambda index: True)
    monkeypatch.setattr(cuda, "has_cudnn", lambda: True)
    q, k = (torch.zeros(2, 4, length, 64, dtype=torch.bfloat16) for length in (queries, keys))
    assert cuda.choose_kernel(call_of(q, k), "unmasked", False) == kernel
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *arguments: cuda.SDPBackend.CUDNN_ATTENTION.value)
    assert cuda.is_default_kernel_fastest(q, k, k, False) == (kernel == "cudnn")


@pytest.mark.parametrize(("learned", "kernel"), [(True, "flash"), (False, "cudnn")])
def test_deterministic_mode_takes_no_gradients_of_cudnn(
    learned: bool, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "is_hopper_or_later", lambda index: True)
    monkeypatch.setattr(cuda, "has_cudnn", lambda: True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    q = torch.zeros(2, 4, 8, 64, dtype=torch.bfloat16, requires_grad=learned)
    assert cuda.choose_kernel(call_of(q, q), "unmasked", False) == kernel


@pytest.mark.gpu
def test_gradients_in_deterministic_mode_are_equal_on_a_gpu() -> None:
    q = torch.randn(4, 8, 2048, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(5):
            out, _ = foci.attention(q, q, q, mask=foci.causal, return_weights=True)
            runs.append(torch.autograd.grad(out.float().square().sum(), q)[0])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(runs[0], other) for other in runs[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [None, foci.causal])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_on_a_gpu_one_query_and_one_key(mask: foci.Mask | None, lse: bool, dtype: torch.dtype) -> None:
    shapes = {"query": (2, 4, 1, 64), "key": (2, 4, 1, 64), "value": (2, 4, 1, 64)}
    check_on_gpu(problem_of(shapes, dtype, lambda leaves: {"mask": mask}), ("sdpa",), lse=lse)


# Views of a tensor (2, 4, 40, 64): strides or a first entry that are not multiples of 16 bytes, and two that are.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "aligned": lambda entries: entries,
    "batch stride": lambda entries: entries.flatten().as_strided((2, 4, 32, 48), (2050, 48, 48, 1)),
    "head stride": lambda entries: entries.flatten().as_strided((2, 4, 32, 48), (4608, 1153, 64, 1)),
    "row stride": lambda entries: entries.flatten().as_strided((2, 4, 32, 48), (4608, 1152, 51, 1)),
    "first entry": lambda entries: entries[:, :, :32, 3:51],
    "odd length": lambda entries: entries[:, :, :32, :47],
    "transposed": lambda entries: entries.transpose(2, 3)[:, :, :32, :40],
    "one row": lambda entries: entries[:, :1, :1, 1:],
    "expanded": lambda entries: entries[:, :, :, :1].expand(2, 4, 40, 50),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_masks_are_copied_if_their_rows_are_not_aligned(name: str, dtype: torch.dtype) -> None:
    mask = VIEWS[name](randn(2, 4, 40, 64, dtype=dtype))
    call = call_of(torch.zeros(2, 4, max(mask.shape[2], 2), 8), torch.zeros(2, 4, mask.shape[3], 8))
    expanded = cuda.expand_mask(mask, call)
    assert torch.equal(expanded, mask.expand(expanded.shape))
    assert cuda.is_aligned(expanded)
    assert (expanded.data_ptr() == mask.data_ptr()) == (name in {"aligned", "odd length"})


@pytest.mark.gpu
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu_a_bias_that_is_not_aligned(name: str, dtype: torch.dtype) -> None:
    bias = VIEWS[name](torch.empty(2, 4, 40, 64))
    queries, keys = max(bias.shape[2], 32), bias.shape[3]
    shapes = {"query": (2, 4, queries, 64), "key": (2, 4, keys, 64), "value": (2, 4, keys, 64)}
    shapes["entries"] = (2, 4, 40, 64)
    problem = problem_of(shapes, dtype, lambda leaves: {"bias": VIEWS[name](leaves["entries"])})
    check_on_gpu(problem, ("sdpa", "triton"))
    check_on_gpu(problem, ("sdpa",), backend="sdpa", lse=True)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [None, foci.causal, foci.padding([100, 30])])
@pytest.mark.parametrize("backend", [None, "flex"])
def test_on_a_gpu_a_softcap_at_several_lengths(mask: foci.Mask | None, backend: str | None) -> None:
    for length in (128, 200, 333):
        shapes = {"query": (2, 4, length, 64), "key": (2, 4, length, 64), "value": (2, 4, length, 64)}
        problem = problem_of(shapes, torch.bfloat16, lambda leaves: {"score": foci.Dot(softcap=20.0), "mask": mask})
        check_on_gpu(problem, ("triton",) if backend is None else (backend,), backend=backend)


def test_flex_refuses_a_bias_of_another_dtype_with_gradients() -> None:
    q, bias = torch.zeros(1, 2, 16, 64, dtype=torch.bfloat16), torch.zeros(16, 16)
    reason = "a bias of another dtype than torch.bfloat16 does not compile with gradients"
    assert reason not in flex.bias_refusals(call_of(q, q, bias=bias))
    assert reason in flex.bias_refusals(call_of(q.requires_grad_(), q, bias=bias))
    assert reason not in flex.bias_refusals(call_of(q, q, bias=bias.bfloat16()))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [32, 64, 128])
def test_on_a_gpu_a_float32_bias_beside_bfloat16_with_gradients(width: int) -> None:
    q, k, v = (randn(2, 4, 200, width, seed=seed, dtype=torch.bfloat16).cuda().requires_grad_() for seed in range(3))
    bias = randn(4, 200, 200, seed=3).cuda()
    assert foci.plan(q, k, v, bias=bias).chosen in {"triton", "blocked"}
    out = foci.attention(q, k, v, bias=bias)
    true = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = foci.attention(*true, bias=bias.double(), backend="reference")
    slope = randn(*out.shape, seed=9).cuda()
    found = torch.autograd.grad(out, (q, k, v), slope.bfloat16())
    wanted = torch.autograd.grad(expected, true, slope.double())
    for x, y in zip((out, *found), (expected, *wanted), strict=True):
        assert (x.double() - y).norm() / y.norm() < 0.01


def test_flex_refuses_positions_inside_a_larger_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    q, reason = torch.zeros(1, 2, 16, 64), "given positions do not compile inside a larger graph"
    places = torch.arange(16).flip(0)
    call = call_of(q, q, mask=foci.causal, positions=(places, places))
    assert reason not in flex.call_refusals(call)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert reason in flex.call_refusals(call)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [foci.causal, foci.causal & foci.window(60)])
def test_on_a_gpu_positions_compile(mask: foci.Mask) -> None:
    torch._dynamo.reset()
    q = randn(2, 4, 200, 64, dtype=torch.bfloat16).cuda().requires_grad_()
    places = torch.randperm(200, generator=torch.Generator().manual_seed(0)).cuda()

    def attend(x: Tensor, p: Tensor) -> Tensor:
        return foci.attention(x, x, x, mask=mask, positions=(p, p))

    with mock.patch.object(flex, "run") as run:
        out = torch.compile(attend, fullgraph=True)(q, places)
    assert run.call_count == 0
    expected = foci.attention(*[q.detach().double()] * 3, mask=mask, positions=(places, places), backend="reference")
    assert (out.double() - expected).norm() / expected.norm() < 0.01
    assert torch.autograd.grad(out.float().square().sum(), q)[0].isfinite().all()

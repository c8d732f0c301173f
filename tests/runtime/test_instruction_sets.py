"""The C kernels, compiled for each instruction set that this CPU has, equal the reference in float64."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

import foci
import foci.nn
from foci import statistics
from foci.arguments import Call, prepare_call
from foci.backends import reference
from foci.decoding.cpu_steps import CpuSteps
from foci.decoding.step_c import rank_tokens
from foci.decoding.steps import PreparedPrompt
from foci.runtime import native
from foci.weights import dense_attention_c
from tests.tensors import randn

MISSING = native.why_unavailable("attention")
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"no compiled library: {MISSING}")

# What the compiled code can be run on: ATEN_CPU_CAPABILITY=avx2 hides AVX-512 from these tests, too.
AVAILABLE = {"AVX512": ("AVX512", "AVX2"), "AVX2": ("AVX2",)}.get(torch.backends.cpu.get_cpu_capability(), ())


@pytest.fixture(params=list(native.CPU_FLAGS), autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param not in AVAILABLE:
        pytest.skip(f"this CPU has no {request.param}, or PyTorch is set not to use it")
    native.open_library.cache_clear()
    with mock.patch.object(torch.backends.cpu, "get_cpu_capability", return_value=request.param):
        yield request.param
    native.open_library.cache_clear()


def inputs(dtype: torch.dtype) -> list[Tensor]:
    return [randn(2, 2, 70, 24, seed=seed).to(dtype).requires_grad_() for seed in range(3)]


def call_of(dtype: torch.dtype) -> Call:
    q, k, v = inputs(dtype)
    return prepare_call(q, k, v, foci.Dot(), foci.causal, None, None, None, 0.0, True)


def test_a_library_is_compiled_for_each_set(instruction_set: str) -> None:
    for name in ("additive", "attention", "decoding"):
        assert native.load_library(name).lanes() == {"AVX512": 16, "AVX2": 8}[instruction_set]


@pytest.mark.parametrize(("library", "backend"), [("attention", "cpu_c"), ("additive", "blocked")])
def test_attention_and_its_gradients(library: str, backend: str) -> None:
    weight = randn(24, seed=9)
    found, true = (
        outputs(dtype, foci.Additive(weight.to(dtype)) if library == "additive" else foci.Dot(), name)
        for dtype, name in ((torch.float32, backend), (torch.float64, "reference"))
    )
    for x, y in zip(found, true, strict=True):
        torch.testing.assert_close(x.double(), y, atol=3e-6 * float(y.detach().abs().max()), rtol=0)


def outputs(dtype: torch.dtype, score: foci.Score, backend: str) -> list[Tensor]:
    tensors = inputs(dtype)
    out = foci.attention(*tensors, score=score, mask=foci.causal, backend=backend)
    return [out, *torch.autograd.grad(out.square().sum(), tensors)]


def test_statistics() -> None:
    results = []
    for dtype in (torch.float32, torch.float64):
        _, weights = foci.attention(*inputs(dtype), mask=foci.causal, return_weights=True)
        if dtype == torch.float32:
            assert "compiled C" in statistics.describe_statistics_backend(weights.tensors.call)
        summary = weights.summary(top=3, picture=8)
        results.append([summary.entropy, summary.received, summary.picture, summary.top.values])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x.double(), y, atol=1e-5, rtol=1e-5)


def test_the_dense_matrix() -> None:
    call, exact = call_of(torch.float32), call_of(torch.float64)
    assert dense_attention_c.supports_call(call)
    out, matrix = dense_attention_c.compute_with_matrix_c(call, False)
    weights, _ = reference.softmax_with_lse(reference.compute_logits(exact, exact.q, exact.k, exact.full_tile()))
    torch.testing.assert_close(matrix.double(), weights, atol=3e-6, rtol=0)
    torch.testing.assert_close(out.double(), weights @ exact.v, atol=3e-6, rtol=0)


def test_decoding_steps() -> None:
    torch.manual_seed(0)
    model = foci.nn.Decoder.from_name("tiny", vocabulary=50, width=64, heads=4)
    tokens = torch.randint(50, (5, 7))
    with torch.no_grad():
        steps = CpuSteps(model.eval(), PreparedPrompt(tokens[:, :4], None, None))
        steps.prefill()
        logits = [steps.advance(column) for column in tokens[:, 4:].unbind(1)][-1]
        expected = model.double()(tokens).logits[:, -1]
    torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=0)
    logs, ranked = rank_tokens(logits, 6)
    true = expected.log_softmax(-1).topk(6)
    assert torch.equal(ranked, true.indices)
    torch.testing.assert_close(logs.double(), true.values, atol=1e-5, rtol=0)

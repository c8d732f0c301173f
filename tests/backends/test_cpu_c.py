"""Attention in compiled C: equal to the reference in float64 at sizes with many tiles, blocks, threads and parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import foci
from foci.arguments import Call, prepare_call
from foci.backends import cpu_c
from foci.runtime import native
from tests.allocation import LargestTensor
from tests.tensors import randn

MISSING = native.why_unavailable("attention")
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"no compiled library: {MISSING}")

# Batch, heads, key/value heads, queries, keys, width, value width.
SHAPES = [
    (1, 2, 2, 300, 300, 64, 64),
    (2, 4, 2, 37, 61, 7, 5),
    (1, 3, 1, 130, 257, 33, 40),
    (2, 2, 2, 5, 3, 16, 96),
    (1, 1, 1, 1, 700, 48, 32),
    (1, 2, 1, 16, 500, 64, 64),
]


@pytest.fixture(autouse=True)
def _nan_in_fresh_memory() -> Iterator[None]:
    """Entries that the kernel does not write are NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    batch, heads, kv_heads, queries, keys, width, value_width = shape
    sizes = ((heads, queries, width), (kv_heads, keys, width), (kv_heads, keys, value_width))
    return [randn(batch, *size, seed=seed).to(dtype).requires_grad_() for seed, size in enumerate(sizes)]


def masks(shape: tuple[int, ...]) -> dict[str, Any]:
    batch, _, _, queries, keys, *_ = shape
    ids = torch.arange(queries) * 5 // queries, torch.arange(keys) * 5 // keys
    return {
        "none": None,
        "causal": foci.causal,
        "window": foci.causal & foci.window(20),
        "two ranges": foci.causal & (foci.window(5) | foci.prefix(2)),
        "an empty sequence": foci.padding([keys // 2, 0][:batch]),
        "documents": foci.causal & foci.documents(*ids),
        "scattered documents": foci.documents(ids[0] % 3, torch.arange(keys) % 2),
        "entries": foci.causal & (torch.rand(queries, keys, generator=torch.Generator().manual_seed(1)) < 0.5),
    }


def results(tensors: list[Tensor], mask: Any, backend: str) -> list[Tensor]:
    """Output, log-sum-exp and gradients."""
    out, weights = foci.attention(*tensors, mask=mask, backend=backend, return_weights=True)
    lse = torch.where(weights.lse.isneginf(), 0.0, weights.lse)
    slopes = [randn(*x.shape, seed=7).to(x.dtype) for x in (out, lse)]
    gradients = torch.autograd.grad([out, lse], tensors, slopes)
    return [x.detach().double() for x in (out, lse, *gradients)]


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("name", masks(SHAPES[0]))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(shape: tuple[int, ...], name: str) -> None:
    mask = masks(shape)[name]
    found, true = (
        results(inputs(shape, dtype), mask, backend)
        for dtype, backend in ((torch.float32, "cpu_c"), (torch.float64, "reference"))
    )
    for x, y in zip(found, true, strict=True):
        torch.testing.assert_close(x, y, atol=3e-6 * float(y.abs().max() + 1), rtol=0)


def test_equal_calls_give_equal_gradients_in_any_number_of_parts() -> None:
    """Threads take parts in any order."""
    tensors, before = inputs((1, 3, 1, 200, 900, 64, 64), torch.float32), torch.get_num_threads()
    torch.set_num_threads(2)
    assert cpu_c.choose_part_count(call_of(*tensors)) > 1
    first, *others = (results(tensors, foci.causal, "cpu_c") for _ in range(5))
    torch.set_num_threads(before)
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


def call_of(q: Tensor, k: Tensor, v: Tensor) -> Call:
    return prepare_call(q, k, v, foci.Dot(), None, None, None, None, 0.0, False)


@pytest.mark.parametrize("mask", [None, foci.causal, foci.causal & foci.window(30)], ids=str)
def test_large_calls_run_it_by_default(mask: Any) -> None:
    q = torch.zeros(1, 8, 128, 64)
    assert foci.plan(q, q, q, mask=mask).chosen == "cpu_c"


def test_small_calls_and_single_queries_stay_with_pytorch() -> None:
    q, k = torch.zeros(1, 8, 64, 64), torch.zeros(1, 8, 4096, 64)
    assert foci.plan(q, q, q, mask=foci.causal).chosen == "sdpa"
    assert foci.plan(q[:, :, :1], k, k).chosen == "sdpa"


def test_the_plain_call_runs_it() -> None:
    """`foci.attention(q, k, v)` has a shortcut to PyTorch's kernel, which large calls do not take."""
    q = torch.randn(1, 8, 128, 64)
    with mock.patch.object(cpu_c, "run", wraps=cpu_c.run) as run:
        foci.attention(q, q, q)
        foci.attention(q[:, :, :9], q[:, :, :9], q[:, :, :9])
    assert run.call_count == 1


def test_padding_is_never_read() -> None:
    q, k, v = (randn(2, 2, 150, 64, seed=seed) for seed in range(3))
    mask = foci.padding([100, 70])
    clean = foci.attention(q, k, v, mask=mask, backend="cpu_c")
    for x in (k, v):
        x[0, :, 100:] = x[1, :, 70:] = torch.nan
    assert torch.equal(foci.attention(q, k, v, mask=mask, backend="cpu_c"), clean)


def test_nan_in_a_visible_key_reaches_the_queries_that_see_it() -> None:
    q, k, v = (randn(1, 1, 150, 64, seed=seed) for seed in range(3))
    k[0, 0, 100, 3] = torch.nan
    rows = foci.attention(q, k, v, mask=foci.causal, backend="cpu_c")[0, 0].isnan().any(-1)
    assert rows.tolist() == [False] * 100 + [True] * 50


def test_no_matrix_is_allocated() -> None:
    q, k, v = inputs((1, 2, 2, 2048, 2048, 16, 16), torch.float32)
    with LargestTensor() as seen:
        foci.attention(q, k, v, mask=foci.causal & foci.window(99)).sum().backward()
    assert seen.largest <= 2 * 2048 * 16


def test_gradients_of_gradients_equal_the_reference() -> None:
    found, true = (
        second_gradients(inputs((1, 2, 1, 20, 30, 8, 8), dtype), backend)
        for dtype, backend in ((torch.float32, "cpu_c"), (torch.float64, "reference"))
    )
    for x, y in zip(found, true, strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=1e-4)


def second_gradients(tensors: list[Tensor], backend: str) -> tuple[Tensor, ...]:
    out = foci.attention(*tensors, mask=foci.causal, backend=backend)
    gradients = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
    return torch.autograd.grad(sum((x.square().sum() for x in gradients), out.new_zeros(())), tensors)

"""Attention and its whole matrix in compiled C: equal to the reference in float64, for everything that it serves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from foci.arguments import Call, prepare_call
from foci.runtime import native
from foci.weights import dense_attention, dense_attention_c
from foci.weights.dense_attention import attention_with_matrix, compute_traceable
from tests.tensors import qkv, randn

MISSING = native.why_unavailable("dense_attention")
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"nothing is compiled here: {MISSING}")

# Batch, heads, key/value heads, queries, keys, width, value width: odd, less than a vector, more than a panel or block.
SHAPES = [(2, 4, 2, 37, 61, 7, 5), (1, 3, 1, 130, 257, 33, 40), (2, 2, 2, 5, 3, 16, 64), (1, 1, 1, 1, 700, 48, 96)]


@pytest.fixture(autouse=True)
def _nan_in_fresh_memory() -> Iterator[None]:
    """What the kernel forgets to write is NaN, not whatever was there before."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def tensors(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    batch, heads, kv_heads, queries, keys, width, value_width = shape
    sizes = ((heads, queries, width), (kv_heads, keys, width), (kv_heads, keys, value_width))
    return [randn(batch, *size, seed=seed).to(dtype) for seed, size in enumerate(sizes)]


def some(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5


def options(shape: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    batch, heads, _, queries, keys, *_ = shape
    hiding = randn(queries, keys).masked_fill(some(queries, keys), -torch.inf)
    return {
        "nothing": {},
        "causal": {"mask": foci.causal},
        "two runs": {"mask": foci.causal & (foci.window(5) | foci.prefix(2))},
        "an empty sequence": {"mask": foci.padding([keys // 2, 0][:batch] if batch > 1 else [keys // 2])},
        "documents": {"mask": foci.documents(torch.arange(queries) % 3, torch.arange(keys) % 2)},
        "entries": {"mask": some(batch, heads, queries, keys)},
        "a column": {"mask": some(queries, 1)},
        "a row": {"mask": some(batch, 1, 1, keys)},
        "bias": {"bias": randn(batch, heads, queries, keys)},
        "a bias for all": {"bias": randn(1, keys)},
        "a bias per query": {"bias": randn(heads, queries, 1)},
        "a bias that hides": {"bias": hiding},
        "both": {"bias": randn(heads, queries, keys), "mask": foci.causal},
    }


def call_of(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Tensor | None = None, dropout: float = 0) -> Call:
    bias = None if bias is None else bias.to(q.dtype)
    return prepare_call(q, k, v, foci.Dot(), mask, bias, None, None, dropout, False)


@pytest.mark.parametrize("average", [True, False], ids=["averaged", "per head"])
@pytest.mark.parametrize("name", options(SHAPES[0]))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(shape: tuple[int, ...], name: str, average: bool) -> None:
    given = options(shape)[name]
    call = call_of(*tensors(shape), **given)
    assert dense_attention_c.supports_call(call)
    exact = compute_traceable(call_of(*tensors(shape, torch.float64), **given), average)
    for found, true in zip(dense_attention_c.compute_with_matrix_c(call, average), exact, strict=True):
        torch.testing.assert_close(found.double(), true, atol=3e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    q, k, v = tensors(SHAPES[0], dtype)
    out, weights = dense_attention_c.compute_with_matrix_c(call_of(q, k, v), False)
    exact = compute_traceable(call_of(q.double(), k.double(), v.double()), False)
    assert (out.dtype, weights.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(out.double(), exact[0], atol=0.02, rtol=0)
    torch.testing.assert_close(weights.double(), exact[1], atol=1e-6, rtol=0)


def test_views_need_no_copy() -> None:
    q, k, v = randn(2, 70, 3, 4, 32).permute(2, 0, 3, 1, 4)
    exact = compute_traceable(call_of(q.double(), k.double(), v.double()), True)
    every_other = [x.repeat_interleave(2, dim=-1)[..., ::2] for x in (q, k, v)]
    for given in ((q, k, v), every_other):
        for found, true in zip(dense_attention_c.compute_with_matrix_c(call_of(*given), True), exact, strict=True):
            torch.testing.assert_close(found.double(), true, atol=3e-6, rtol=0)


def test_threads_and_small_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(*tensors(SHAPES[1]), mask=foci.causal)
    once = dense_attention_c.compute_with_matrix_c(call, True)
    monkeypatch.setattr(native, "count_threads", lambda work, least: 3)
    monkeypatch.setattr(dense_attention_c, "BLOCK_ENTRIES", 1)
    for one, other in zip(once, dense_attention_c.compute_with_matrix_c(call, True), strict=True):
        assert torch.equal(one, other)


def test_nan_propagates() -> None:
    q, k, v = tensors(SHAPES[0])
    q[0, 1, 3, 2] = torch.nan
    out, weights = dense_attention_c.compute_with_matrix_c(call_of(q, k, v), False)
    assert bool(out[0, 1, 3].isnan().all() & weights[0, 1, 3].isnan().all())
    assert int(weights.isnan().any(-1).sum()) == 1


REFUSED: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.5},
    "a bias that no float tells from a hidden one": {"bias": torch.full((61,), torch.finfo(torch.float32).min)},
    "a mask without key ranges": {"mask": foci.mask_function(lambda b, h, i, j: (i + j) % 3 > 0)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_calls_are_computed_in_strips(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_attention_c, "compute_with_matrix_c", None)
    given = REFUSED[name]
    assert not dense_attention_c.supports_call(call_of(*tensors(SHAPES[0]), **given))
    assert attention_with_matrix(*tensors(SHAPES[0]), **given)[1].shape == (2, 4, 37, 61)


def test_float64_is_not_supported() -> None:
    assert not dense_attention_c.supports_call(call_of(*tensors(SHAPES[0], torch.float64)))


def test_a_bias_of_the_lowest_float_hides_nothing_from_a_row_that_sees_nothing_else() -> None:
    """What many write for "hidden" is a number: a row of it is a softmax of equals."""
    q, k, v = qkv()
    bias = torch.zeros(6, 6)
    bias[2] = torch.finfo(torch.float32).min
    _, weights = attention_with_matrix(q, k, v, bias=bias)
    torch.testing.assert_close(weights[:, :, 2].sum(-1), torch.ones(2, 4))


def test_without_a_compiler_strips_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(SHAPES[0])
    with_compiler = attention_with_matrix(q, k, v, average=True)
    monkeypatch.setattr(native, "why_unavailable", lambda name: "no C compiler was found")
    monkeypatch.setattr(dense_attention, "compute_in_strips", found := Counted(dense_attention.compute_in_strips))
    for one, other in zip(attention_with_matrix(q, k, v, average=True), with_compiler, strict=True):
        torch.testing.assert_close(one, other)
    assert found.calls == 1


class Counted:
    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        return self.function(*arguments)

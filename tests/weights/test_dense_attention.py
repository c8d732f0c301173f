"""Attention and its whole matrix at once: equal to the call and to its lazy weights, in values and in derivatives."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import foci
from foci.backends import strips
from foci.weights.dense_attention import attention_with_matrix
from tests.tensors import qkv, randn

MASKS: dict[str, Any] = {
    "none": None,
    "causal": foci.causal,
    "window": foci.causal & foci.window(1),
    "documents": foci.documents([0, 0, 1, 1, 1, 2]),
    "two runs": foci.causal & (foci.window(1) | foci.prefix(1)),
    "entries": torch.tensor([True, False, True, True, False, False]).expand(6, 6),
    "a row that sees nothing": (torch.arange(6) != 2).view(6, 1).expand(6, 6),
}


def expected(q: Tensor, k: Tensor, v: Tensor, average: bool, **options: Any) -> tuple[Tensor, Tensor]:
    out, weights = foci.attention(q, k, v, return_weights=True, backend="reference", **options)
    return out, (weights.mean("heads") if average else weights).dense()


@pytest.mark.parametrize("entries", [2**18, 24], ids=["one strip", "many strips"])
@pytest.mark.parametrize("average", [True, False], ids=["averaged", "per head"])
@pytest.mark.parametrize("mask", MASKS)
def test_equals_the_call_and_its_lazy_weights(mask: str, average: bool, entries: int) -> None:
    q, k, v = qkv(dtype=torch.float64)
    with mock.patch.object(strips, "MAX_CPU_STRIP_ENTRIES", entries):
        found = attention_with_matrix(q, k, v, mask=MASKS[mask], average=average)
    for one, other in zip(found, expected(q, k, v, average, mask=MASKS[mask]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize("average", [True, False], ids=["averaged", "per head"])
def test_a_bias_may_mask_and_hold_large_numbers(average: bool) -> None:
    q, k, v = qkv(dtype=torch.float64)
    bias = randn(2, 1, 6, 6, dtype=torch.float64).masked_fill(randn(2, 1, 6, 6, seed=1) > 0.5, -torch.inf)
    bias[0, 0, 1] = -1e9
    found = attention_with_matrix(q, k, v, bias=bias, average=average)
    for one, other in zip(found, expected(q, k, v, average, bias=bias), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_half_precision_gives_weights_in_float32() -> None:
    q, k, v = qkv(dtype=torch.bfloat16)
    out, matrix = attention_with_matrix(q, k, v)
    assert (out.dtype, matrix.dtype) == (torch.bfloat16, torch.float32)
    exact = expected(q.float(), k.float(), v.float(), average=False)
    torch.testing.assert_close(matrix, exact[1], atol=0.02, rtol=0)


@pytest.mark.parametrize("average", [True, False], ids=["averaged", "per head"])
@pytest.mark.parametrize("through", ["out", "matrix", "both"])
def test_derivatives(through: str, average: bool) -> None:
    q, k, v = qkv(dtype=torch.float64)
    tensors = [x[:1, :heads, :3, :2].clone().requires_grad_() for x, heads in ((q, 2), (k, 1), (v, 1))]
    bias = randn(3, 3, dtype=torch.float64).requires_grad_()

    def run(*given: Tensor) -> Any:
        found = attention_with_matrix(*given[:3], bias=given[3], mask=foci.causal, average=average)
        return {"out": found[0], "matrix": found[1], "both": found}[through]

    assert torch.autograd.gradcheck(run, (*tensors, bias))
    assert torch.autograd.gradgradcheck(run, (*tensors, bias))


def test_a_backward_without_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    out, matrix = attention_with_matrix(q, k, v.detach())
    (out.sum() * 0 + q.sum() + matrix.detach().sum()).backward()
    assert torch.equal(q.grad, torch.ones_like(q))


def test_dropout_acts_on_the_output_alone_and_again_in_the_backward() -> None:
    torch.manual_seed(0)
    q, k, _ = qkv()
    eye = torch.eye(6).expand(2, 2, 6, 6).contiguous().requires_grad_()
    dropped, matrix = attention_with_matrix(q, k, eye, dropout=0.5)
    torch.testing.assert_close(matrix, attention_with_matrix(q, k, eye)[1])
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 2 * matrix[kept])
    assert 0.3 < float(kept.float().mean()) < 0.7
    # With the unit vectors as values, the gradient of a value is the column of what was not dropped.
    (grad,) = torch.autograd.grad(dropped.sum(), eye)
    torch.testing.assert_close(grad[..., 0], dropped.detach().view(2, 2, 2, 6, 6).sum((2, 3)))


def test_no_keys_and_no_queries() -> None:
    q, k, v = qkv()
    out, matrix = attention_with_matrix(q, k[:, :, :0], v[:, :, :0])
    assert torch.equal(out, torch.zeros_like(q))
    assert matrix.shape == (2, 4, 6, 0)
    assert attention_with_matrix(q[:, :, :0], k, v, average=True)[1].shape == (2, 0, 6)


def test_inputs_without_heads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"query must be \(B, H, T, D\), got \(3, 4\)"):
        attention_with_matrix(*[torch.zeros(3, 4)] * 3)

"""W x, x W and Wᵀ x without the matrix."""

from typing import Any

import numpy as np
import pytest
import torch

import foci
from tests import matrices
from tests.matrices import CASES, DTYPES, assert_close, both, lazy, truth

CASE = pytest.mark.parametrize("case", CASES)
# A product comes back in the dtype of x, so in half precision it is rounded once more.
ROUNDED = {torch.float16: 5.0, torch.bfloat16: 20.0}


@CASE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_with_a_matrix_of_every_head(case: str, dtype: torch.dtype) -> None:
    weights, true = both(case, dtype)
    lead, (queries, keys) = true.shape[:-2], true.shape[-2:]
    x, y = matrices.randn(*lead, keys, 3).to(dtype), matrices.randn(*lead, queries, 3).to(dtype)
    for found, expected in [
        (weights @ x, true @ x.double()),
        (weights.T @ y, true.mT @ y.double()),
        (y.mT @ weights, y.mT.double() @ true),
        (x.mT @ weights.T, x.mT.double() @ true.mT),
    ]:
        assert found.dtype == dtype
        assert_close(found.to(torch.promote_types(dtype, torch.float32)), expected, dtype, 4 * ROUNDED.get(dtype, 1.0))


@CASE
def test_products_with_vectors_and_shared_matrices(case: str) -> None:
    weights, true = both(case, torch.float64)
    queries, keys = true.shape[-2:]
    x, y = matrices.randn(keys, 3), matrices.randn(queries, 3)
    assert_close(weights @ x, true @ x, torch.float64, 4)
    assert_close(weights @ x[:, 0], true @ x[:, 0], torch.float64, 4)
    assert_close(weights.T @ y, true.mT @ y, torch.float64, 4)
    assert_close(weights.T @ y[:, 0], true.mT @ y[:, 0], torch.float64, 4)
    assert_close(y[:, 0] @ weights, y[:, 0] @ true, torch.float64, 4)
    assert_close(x[:, 0] @ weights.T, x[:, 0] @ true.mT, torch.float64, 4)
    assert_close(torch.matmul(weights, x), true @ x, torch.float64, 4)
    assert_close(torch.matmul(y.mT, weights), y.mT @ true, torch.float64, 4)
    assert_close(torch.matmul(x.mT, weights.T), x.mT @ true.mT, torch.float64, 4)
    assert_close(y.mT.matmul(weights), y.mT @ true, torch.float64, 4)


@pytest.mark.parametrize("lead", [(4,), (1,), (2, 1), (1, 4), (2, 4)])
def test_leading_axes_are_expanded(lead: tuple[int, ...]) -> None:
    weights, true = both("causal", torch.float64)
    x, y = matrices.randn(*lead, 17, 3), matrices.randn(*lead, 11, 3)
    assert_close(weights @ x, true @ x, torch.float64, 4)
    assert_close(weights.T @ y, true.mT @ y, torch.float64, 4)


@pytest.mark.parametrize("case", ["plain", "grouped heads", "one key head", "causal", "relative", "deep"])
def test_the_product_with_the_values_is_attention(case: str) -> None:
    arguments = CASES[case]()
    if case == "relative":
        arguments["bias"] = foci.Relative(arguments["bias"].keys)
    inputs = [arguments.pop(name) for name in ("query", "key", "value")]
    out, weights = foci.attention(*inputs, **arguments, return_weights=True)
    torch.testing.assert_close(weights @ inputs[2], out, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_wider_x_is_not_rounded(dtype: torch.dtype) -> None:
    arguments = matrices.in_dtype(CASES["sink and bias, empty rows"](), dtype)
    weights, true = lazy(arguments), truth(arguments)
    x, y = matrices.randn(17, 3).float(), matrices.randn(11, 3).float()
    assert_close(weights @ x, true @ x.double(), dtype, 4)
    assert_close(weights.T @ y, true.mT @ y.double(), dtype, 4)
    assert (weights @ x.double()).dtype == torch.float64
    assert (weights.mean("heads").T @ y.half()).dtype == torch.float16


@pytest.mark.parametrize("case", ["sink and bias, empty rows", "grouped heads", "additive", "one matrix"])
def test_gradients_reach_x(case: str) -> None:
    weights, true = both(case, torch.float64)
    x, y = (matrices.randn(n, 2).requires_grad_() for n in (true.shape[-1], true.shape[-2]))
    slope, other = torch.ones_like(true @ x), torch.ones_like(true.mT @ y)
    found = torch.autograd.grad((weights @ x).sum() + (y.mT @ weights).sum(), [x, y])
    expected = torch.autograd.grad([true @ x, true.mT @ y], [x, y], [slope, other])
    for one, another in zip(found, expected, strict=True):
        torch.testing.assert_close(one, another, atol=1e-10, rtol=1e-10)


def test_rollout_without_a_matrix_of_a_layer() -> None:
    """The flow through two layers: (W₂ W₁)ᵀ x from products with vectors."""
    first, second = (lazy(CASES[case]()).mean("heads") for case in ("square causal", "prefix"))
    true = truth(CASES["prefix"]()).mean(1) @ truth(CASES["square causal"]()).mean(1)
    x = matrices.randn(17)
    assert_close(first.T @ (second.T @ x).unsqueeze(-1), (true.mT @ x).unsqueeze(-1), torch.float64, 4)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "too few rows": (
        lambda w: w @ torch.ones(16, 2),
        ValueError,
        r"x must have shape \(17,\) or \(..., 17, E\) in W @ x, got",
    ),
    "a short vector": (lambda w: w @ torch.ones(16), ValueError, r"\(17,\) or \(..., 17, E\) in W @ x, got \(16,\)"),
    "a number": (lambda w: w @ torch.tensor(1.0), ValueError, r"\(17,\) or \(..., 17, E\) in W @ x, got \(\)"),
    "keys for queries": (
        lambda w: w.T @ torch.ones(17, 2),
        ValueError,
        r"x must have .*, 11, E\) in W.T @ x, got \(17, 2\)",
    ),
    "from the left": (lambda w: torch.ones(2, 17) @ w, ValueError, r"x must have .* E, 11\) in x @ W, got \(2, 17\)"),
    "left of the other": (
        lambda w: torch.ones(2, 11) @ w.T,
        ValueError,
        r"x must have .* E, 17\) in x @ W.T, got \(2, 11\)",
    ),
    "other heads": (
        lambda w: w @ torch.ones(3, 17, 2),
        ValueError,
        r"leading axes that expand to \(2, 4\) in W @ x, got \(3, 17, 2\)",
    ),
    "more axes": (
        lambda w: w @ torch.ones(5, 1, 1, 17, 2),
        ValueError,
        r"expand to \(2, 4\) in W @ x, got \(5, 1, 1, 17, 2\)",
    ),
    "whole numbers": (
        lambda w: w @ torch.ones(17, dtype=torch.int64),
        TypeError,
        "x must be a float tensor in W @ x, got a torch.int64",
    ),
    "an array": (lambda w: w @ np.ones(17), TypeError, "x must be a float tensor in W @ x, got ndarray"),
    "itself": (lambda w: w @ w.T, TypeError, "x must be a float tensor in W @ x, got Transposed"),
    "elsewhere": (
        lambda w: w @ torch.ones(17, device="meta"),
        ValueError,
        "x must be on cpu like the weights .*, got meta",
    ),
    "mm": (lambda w: torch.mm(w, torch.ones(17, 2)), TypeError, "arguments of mm must be tensors, got lazy Weights"),
    "an out": (
        lambda w: torch.matmul(w, torch.ones(17), out=torch.ones(1)),
        TypeError,
        "arguments of matmul must be tensors",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_operands_that_do_not_fit_are_refused(case: str) -> None:
    ask, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        ask(lazy(matrices.qkv()))

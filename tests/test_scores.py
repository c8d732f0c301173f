"""Each score against its formula, written out entry by entry."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import foci
from foci.scores import Score, normalize
from tests.tensors import qkv, randn

WEIGHT, HEADED_WEIGHT = randn(8, seed=5, dtype=torch.float64), randn(4, 8, seed=6, dtype=torch.float64)
MATRIX, HEADED_MATRIX = randn(8, 8, seed=7, dtype=torch.float64), randn(4, 8, 8, seed=8, dtype=torch.float64)
SCALES = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)


def cosine(q: Tensor, k: Tensor) -> Tensor:
    return q @ k / (q.norm() * k.norm())


# A score, and the logit of query q and key k in head h as its definition writes it.
FORMULAS = {
    "dot": (foci.Dot(), lambda q, k, h: q @ k / math.sqrt(8)),
    "plain dot": (foci.Dot(scale=1.0), lambda q, k, h: q @ k),
    "by width": (foci.Dot(scale=1 / 8), lambda q, k, h: q @ k / 8),
    "softcap": (foci.Dot(softcap=3.0), lambda q, k, h: 3 * torch.tanh(q @ k / math.sqrt(8) / 3)),
    "additive": (foci.Additive(WEIGHT), lambda q, k, h: WEIGHT @ torch.tanh(q + k)),
    "additive heads": (foci.Additive(HEADED_WEIGHT), lambda q, k, h: HEADED_WEIGHT[h] @ torch.tanh(q + k)),
    "general": (foci.General(MATRIX), lambda q, k, h: q @ MATRIX @ k),
    "general heads": (foci.General(HEADED_MATRIX), lambda q, k, h: q @ HEADED_MATRIX[h] @ k),
    "cosine": (foci.Cosine(7.0), lambda q, k, h: 7 * cosine(q, k)),
    "cosine heads": (foci.Cosine(SCALES), lambda q, k, h: SCALES[h] * cosine(q, k)),
    "cosine learned": (foci.Cosine(SCALES[3]), lambda q, k, h: 4 * cosine(q, k)),
}


def logits(score: Score, q: Tensor, k: Tensor) -> Tensor:
    return score.finish(score.raw(q, k), q.shape[-1])


@pytest.mark.parametrize("name", FORMULAS)
def test_a_score_is_its_formula(name: str) -> None:
    score, formula = FORMULAS[name]
    q, k, _ = qkv(3, 5, torch.float64)
    found = logits(score, q, k)
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in found.shape)).tolist():
        # Four query heads share two key/value heads.
        torch.testing.assert_close(found[b, h, i, j], formula(q[b, h, i], k[b, h // 2, j], h))


@pytest.mark.parametrize("name", FORMULAS)
def test_a_score_is_what_the_call_uses(name: str) -> None:
    score, _ = FORMULAS[name]
    q, k, v = qkv(3, 5, torch.float64)
    _, weights = foci.attention(q, k, v, score=score, return_weights=True)
    torch.testing.assert_close(weights.dense(), torch.softmax(logits(score, q, k), dim=-1))


@pytest.mark.parametrize("name", FORMULAS)
def test_the_dot_product_form_gives_the_same_score(name: str) -> None:
    score, _ = FORMULAS[name]
    q, k, _ = qkv(3, 5, torch.float64)
    dressed = score.as_dot(q, k)
    if dressed is None:
        assert isinstance(score, foci.Additive)
        return
    other_q, other_k, dot = dressed
    torch.testing.assert_close(logits(dot, other_q, other_k), logits(score, q, k))


@pytest.mark.parametrize("name", FORMULAS)
def test_selected_heads_of_a_score(name: str) -> None:
    score, _ = FORMULAS[name]
    q, k, _ = qkv(3, 5, torch.float64)
    torch.testing.assert_close(logits(score.select_heads(slice(2, 4)), q[:, 2:], k[:, 1:]), logits(score, q, k)[:, 2:])


def test_a_general_score_takes_two_widths() -> None:
    q, k, v = randn(1, 2, 3, 4), randn(1, 2, 5, 6), randn(1, 2, 5, 7)
    matrix = randn(2, 4, 6)
    expected = torch.softmax(q @ matrix @ k.mT, dim=-1) @ v
    torch.testing.assert_close(foci.attention(q, k, v, score=foci.General(matrix)), expected)


@pytest.mark.parametrize("backend", ["sdpa", "blocked", "reference"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_vector_of_zeros_has_cosine_zero_and_a_finite_gradient(backend: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    q[0, 0, 0], k[0, 0, 2] = 0, 0
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = foci.attention(*leaves, score=foci.Cosine(5.0), backend=backend)
    # A query that is the same for every key looks at all of them alike.
    torch.testing.assert_close(out[0, 0, 0], v[0, 0].mean(0), atol=2e-3, rtol=0)
    out.sum().backward()
    assert all(bool((leaf.grad.abs() < 100).all()) for leaf in leaves)


def test_unit_vectors_of_extreme_lengths() -> None:
    for dtype, size in ((torch.float16, 6e4), (torch.float32, 1e15), (torch.float32, 1e-15)):
        x = torch.tensor([[3.0, 4.0]]) / 5 * size
        torch.testing.assert_close(normalize(x.to(dtype)).float(), torch.tensor([[0.6, 0.8]]), atol=1e-3, rtol=0)


@pytest.mark.parametrize("backend", ["blocked", "reference"])
def test_additive_scores_of_far_apart_terms_are_exact(backend: str) -> None:
    """Large queries and keys of opposite signs cancel inside tanh: nothing may overflow on the way."""
    for far, near in ((50.0, -49.5), (1e4, -1e4 + 0.5), (-300.0, 299.5), (18.0, -17.5)):
        q, k = torch.full((1, 1, 1, 4), far), torch.tensor([near, -near, 0.0]).view(1, 1, 3, 1).expand(1, 1, 3, 4)
        _, weights = foci.attention(q, k, k, score=foci.Additive(torch.ones(4)), backend=backend, return_weights=True)
        terms = 4 * torch.tanh(q[0, 0, 0, 0].double() + k[0, 0, :, 0].double())
        torch.testing.assert_close(weights.lse[0, 0, 0], torch.logsumexp(terms, 0).float())


def test_a_saturated_softcap_is_flat() -> None:
    q = torch.full((1, 1, 1, 4), 100.0, requires_grad=True)
    k = torch.tensor([1.0, -1.0]).view(1, 1, 2, 1).expand(1, 1, 2, 4) * 100
    _, weights = foci.attention(q, k, k, score=foci.Dot(softcap=2.0), return_weights=True)
    torch.testing.assert_close(weights.dense().flatten(), torch.softmax(torch.tensor([2.0, -2.0]), 0))
    weights.lse.sum().backward()
    assert bool((q.grad == 0).all())


@pytest.mark.parametrize("scale", [-1.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masked_keys_stay_masked_at_any_scale(dtype: torch.dtype, scale: float) -> None:
    """PyTorch's fused kernels return NaN: they multiply -inf by the scale."""
    q, k, v = (x.to(dtype) for x in qkv())
    score, mask = foci.Dot(scale=scale), foci.causal
    expected = foci.attention(q.double(), k.double(), v.double(), score=score, mask=mask, backend="reference")
    found = foci.attention(q, k, v, score=score, mask=mask)
    torch.testing.assert_close(found.double(), expected, atol=0.02, rtol=0.02)
    with pytest.raises(ValueError, match=f"the fused kernels need a positive scale, got {scale}"):
        foci.attention(q, k, v, score=score, mask=mask, backend="sdpa")

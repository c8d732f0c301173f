"""Scores, masks and biases that the caller defines by extending foci's classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from foci.masks.tile import Tile
from foci.statistics import describe_statistics_backend
from tests.tensors import randn

B, H, T, D = 2, 4, 64, 8


class Distance(foci.Score):
    """-|q - k| / 2."""

    def raw(self, q: Tensor, k: Tensor) -> Tensor:
        return -torch.cdist(q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)) / 2


@dataclass(frozen=True)
class LearnedDistance(foci.Score):
    rate: Tensor

    def raw(self, q: Tensor, k: Tensor) -> Tensor:
        return -torch.cdist(q, k) * self.rate

    def tensors(self) -> dict[str, Tensor]:
        return {"rate": self.rate}


class Clamped(foci.Dot):
    """A dot product with another last step, which the fused kernels do not know."""

    def finish(self, raw: Tensor, width: int) -> Tensor:
        return raw.clamp(-1, 1)


class Weighted(foci.Additive):
    """An additive score with another comparison, which the kernels of additive scores do not know."""

    def raw(self, q: Tensor, k: Tensor) -> Tensor:
        return -torch.cdist(q * self.weight, k * self.weight)


class EveryOther(foci.Mask):
    def visible(self, tile: Tile) -> Tensor:
        return (tile.query_position - tile.key_position) % 2 == 0


class Slope(foci.Bias):
    def term(self, tile: Tile) -> Tensor:
        return -(tile.query_position - tile.key_position).abs() / 10


SCORES = {
    "distance": Distance(),
    "clamped": Clamped(),
    "weighted": Weighted(randn(D)),
    "learned": LearnedDistance(randn(1)),
}
CALLS: dict[str, dict[str, Any]] = {
    **{name: {"score": score} for name, score in SCORES.items()},
    "distance, causal": {"score": Distance(), "mask": foci.causal},
    "distance, padding": {"score": Distance(), "mask": foci.padding([T, 9])},
    "distance, dense": {"score": Distance(), "mask": torch.arange(T) % 3 != 1},
    "distance, ALiBi": {"score": Distance(), "bias": foci.ALiBi()},
    "mask": {"mask": EveryOther()},
    "mask, causal": {"mask": EveryOther() & foci.causal},
    "bias": {"bias": Slope()},
    "all": {"score": Distance(), "mask": EveryOther(), "bias": Slope(), "sink": torch.zeros(H)},
}


def inputs() -> list[Tensor]:
    return [randn(B, H, T, D, seed=seed).requires_grad_() for seed in range(3)]


@pytest.mark.parametrize("name", CALLS)
def test_output_and_gradients_equal_the_reference(name: str) -> None:
    found, expected = [], []
    for results, backend in ((found, None), (expected, "reference")):
        tensors = inputs()
        out = foci.attention(*tensors, **CALLS[name], backend=backend)
        results += [out, *torch.autograd.grad(out.sum(), tensors)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CALLS)
def test_statistics_equal_those_of_the_matrix(name: str) -> None:
    q, k, v = (tensor.detach() for tensor in inputs())
    out, weights = foci.attention(q, k, v, **CALLS[name], return_weights=True)
    matrix = weights.dense()
    torch.testing.assert_close(matrix @ v, out, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(weights.received(), matrix.sum(-2), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(weights.entropy(), torch.special.entr(matrix).sum(-1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(weights[0, 1, 5], matrix[0, 1, 5], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", SCORES)
def test_kernels_refuse_scores_that_they_do_not_know(name: str) -> None:
    q, k, v = (tensor.detach() for tensor in inputs())
    plan = foci.plan(q, k, v, score=SCORES[name])
    assert plan.chosen == "blocked"
    kind = type(SCORES[name]).__name__
    for backend in ("sdpa", "cpu_c", "triton", "flex"):
        assert any(f"the score {kind} is not a dot product" in reason for reason in plan.refusals[backend])
    _, weights = foci.attention(q, k, v, score=SCORES[name], return_weights=True)
    said = describe_statistics_backend(weights.tensors.call)
    assert said.startswith("strip by strip")
    assert said.count(f"the score {kind} is not a dot product") == 2


def test_a_dot_product_of_other_vectors_runs_in_the_fused_kernels() -> None:
    class Halved(foci.Dot):
        def raw(self, q: Tensor, k: Tensor) -> Tensor:
            return super().raw(q / 2, k)

        def as_dot(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, foci.Dot]:
            return q / 2, k, foci.Dot()

    q, k, v = (tensor.detach() for tensor in inputs())
    assert "sdpa" not in foci.plan(q, k, v, score=Halved()).refusals
    torch.testing.assert_close(foci.attention(q, k, v, score=Halved()), foci.attention(q / 2, k, v))


def test_a_mask_is_named_by_its_class() -> None:
    assert repr(EveryOther() & foci.causal) == "EveryOther() & causal"

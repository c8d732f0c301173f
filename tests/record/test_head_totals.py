"""Totals of heads: equal to sums over the dense matrix, and mergeable over calls."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from foci.record.head_totals import (
    HEAD_STATISTICS,
    HISTOGRAM_EDGES,
    TOTAL_COLUMNS,
    compute_head_totals,
    head_histograms,
    head_statistics,
    merge_head_totals,
)
from tests.tensors import randn

B, H, T, D = 2, 3, 40, 8

LEFT_PADDED = foci.padding(torch.tensor([T, 33]), "left")
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "no mask": dict,
    "causal": lambda: {"mask": foci.causal},
    "right padding": lambda: {"mask": foci.causal & foci.padding(torch.tensor([T, 31]))},
    "left padding": lambda: {"mask": foci.causal & LEFT_PADDED},
    "documents": lambda: {"mask": foci.causal & foci.documents(torch.arange(T) // 16)},
    "dense": lambda: {"mask": torch.ones(B, 1, T, T).tril().bool()},
    "sink": lambda: {"mask": foci.causal & LEFT_PADDED, "sink": randn(H, seed=7)},
    "window": lambda: {"mask": foci.causal & foci.window(4), "bias": foci.ALiBi()},
}


def weights_of(size: float = 3.0, **options: Any) -> foci.Weights:
    q, k, v = (randn(B, H, T, D, seed=seed) for seed in (1, 2, 3))
    return foci.attention(size * q, k, v, return_weights=True, **options)[1]


def expected_statistics(weights: foci.Weights) -> dict[str, Tensor]:
    """The statistics of each head from the dense matrix, by their definitions."""
    matrix = weights.dense().double()
    counted = matrix.sum(-1) > 0
    single = (matrix > 0).sum(-1) == 1

    def mean(values: Tensor) -> Tensor:
        return (values * counted).sum((0, 2)) / counted.sum((0, 2))

    positions = torch.arange(T, dtype=torch.float64)
    entropy = torch.special.entr(matrix).sum(-1)
    first = (matrix.sum((1, 2)) > 0).int().argmax(-1)
    logits = torch.where(matrix > 0, matrix.log() + weights.lse.double().unsqueeze(-1), -torch.inf)
    return {
        "largest_logit": logits.amax((0, 2, 3)),
        "entropy": mean(entropy),
        "least_entropy": torch.where(counted & ~single, entropy, torch.inf).amin((0, 2)),
        "heaviest": mean(matrix.amax(-1)),
        "first_token": mean(torch.stack([matrix[b, :, :, key] for b, key in enumerate(first)])),
        "sink_mass": mean(1 - matrix.sum(-1)) if weights.call.sink is not None else torch.zeros(H),
        "distance": mean((matrix * (positions - positions.view(-1, 1)).abs()).sum(-1)),
    }


@pytest.mark.parametrize("case", OPTIONS)
def test_statistics_equal_those_of_the_matrix(case: str) -> None:
    weights = weights_of(**OPTIONS[case]())
    found = head_statistics(compute_head_totals(weights, tuple(HEAD_STATISTICS)))
    assert list(found) == list(HEAD_STATISTICS)
    for name, expected in expected_statistics(weights).items():
        torch.testing.assert_close(found[name], expected.double(), atol=2e-5, rtol=2e-5, msg=f"{name} of {case}")


@pytest.mark.parametrize("case", ["causal", "left padding", "sink"])
def test_histograms_count_the_queries_of_each_bin(case: str) -> None:
    weights = weights_of(**OPTIONS[case]())
    matrix = weights.dense()
    counted = matrix.sum(-1) > 0
    found = head_histograms(compute_head_totals(weights, tuple(HEAD_STATISTICS)))
    for name, values in (
        ("entropy", weights.entropy()),
        ("heaviest", matrix.amax(-1)),
        ("distance", weights.distance()),
    ):
        edges = torch.tensor([*HISTOGRAM_EDGES[name], torch.inf])
        for head in range(H):
            in_head = values[:, head][counted[:, head]].clamp(min=0)
            expected = [int(((in_head >= low) & (in_head < high)).sum()) for low, high in pairwise(edges)]
            assert found[name][head].tolist() == expected


def test_totals_of_parts_merge_to_those_of_the_whole() -> None:
    weights = weights_of(mask=foci.causal)
    whole = compute_head_totals(weights, tuple(HEAD_STATISTICS))
    parts = torch.stack([compute_head_totals(weights[b : b + 1], tuple(HEAD_STATISTICS)) for b in range(B)])
    assert whole.shape == (H, TOTAL_COLUMNS)
    # Small matrices are computed by other code than large ones.
    torch.testing.assert_close(merge_head_totals(parts), whole, rtol=1e-5, atol=1e-5)
    assert torch.equal(head_histograms(merge_head_totals(parts))["entropy"], head_histograms(whole)["entropy"])


@pytest.mark.parametrize("name", HEAD_STATISTICS)
def test_one_statistic_alone_is_the_same(name: str) -> None:
    weights = weights_of(mask=foci.causal)
    everything = head_statistics(compute_head_totals(weights, tuple(HEAD_STATISTICS)))
    torch.testing.assert_close(head_statistics(compute_head_totals(weights, (name,)))[name], everything[name])


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_logits_that_are_not_finite_are_reported(value: float) -> None:
    q, k, v = (randn(B, H, T, D, seed=seed) for seed in (1, 2, 3))
    q[1, 2, 5] = value
    _, weights = foci.attention(q, k, v, mask=foci.causal, return_weights=True)
    found = head_statistics(compute_head_totals(weights, tuple(HEAD_STATISTICS)))
    assert found["largest_logit"].isnan().tolist() == [False, False, True]
    assert found["entropy"].isfinite().all()


def test_fully_masked_heads_have_no_statistics() -> None:
    weights = weights_of(mask=torch.zeros(T, T, dtype=torch.bool))
    found = head_statistics(compute_head_totals(weights, tuple(HEAD_STATISTICS)))
    assert all(values.isnan().all() for values in found.values())

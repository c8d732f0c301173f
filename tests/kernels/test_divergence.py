"""The divergence kernels against dense matrices in float64: in Triton's interpreter, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from foci.arguments import Call
from foci.masks.kernel_inputs import KernelMasks
from foci.statistics.cuda import divergence as kernels
from foci.statistics.divergence import compare_in_strips
from tests.tensors import randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MASKS: dict[str, Any] = {
    "none": None,
    "causal": foci.causal,
    "window": foci.causal & foci.window(5),
    # On the device already: copies of a list are not told to be the same.
    "padding": foci.padding(torch.tensor([9, 0], device=DEVICE)),
    "documents": foci.documents(torch.tensor([0] * 7 + [1] * 11 + [2] * 5, device=DEVICE)),
}


def sides(
    dtype: torch.dtype, device: str, heads: int, kv_heads: int, width: int, queries: int = 23, keys: int = 23
) -> tuple[Tensor, Tensor]:
    """Queries and keys of two sequences, with lengths that fill no tile."""
    q, k = randn(2, heads, queries, width, seed=heads), randn(2, kv_heads, keys, width, seed=width)
    return q.to(device, dtype), k.to(device, dtype)


def attend(q: Tensor, k: Tensor, **arguments: Any) -> foci.Weights:
    return foci.attention(q, k, k, return_weights=True, **arguments)[1]


def by_kernels(teacher: Call, student: Call, averaged: bool, lse: Any = (None, None)) -> tuple[Tensor, ...]:
    def compute_again(q: Tensor, k: Tensor) -> Tensor:
        return compare_in_strips(teacher, replace(student, q=q, k=k), (averaged, False), None)[0]

    return kernels.compute_divergence(teacher, student, averaged, lse, compute_again)


def check(teacher: Any, student: Any, averaged: bool, dtype: torch.dtype, **arguments: Any) -> None:
    """The kernels, and the strips in float64 of the same numbers."""
    student = [x.requires_grad_() for x in student]
    true_student = [x.detach().double().requires_grad_() for x in student]
    true_teacher = [x.double() for x in teacher]
    weights = [attend(*side, **arguments) for side in (teacher, student, true_teacher, true_student)]
    calls = [each.call for each in weights]
    assert kernels.refuses_kind(calls[0], calls[1], (averaged, False), None) == []
    found, counted, hidden = by_kernels(calls[0], calls[1], averaged)
    true, true_counted, _ = compare_in_strips(calls[2], calls[3], (averaged, False), None)
    given = by_kernels(calls[0], calls[1], averaged, (weights[0].tensors.lse, weights[1].tensors.lse))[0]
    torch.testing.assert_close(given, found, rtol=1e-4, atol=1e-5)
    assert torch.equal(counted, true_counted)
    assert not hidden.any()
    slopes = randn(*true.shape, seed=5).to(true)
    gradients = torch.autograd.grad(found, student, slopes.to(found))
    truths = torch.autograd.grad(true, true_student, slopes)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), true, rtol=tolerance, atol=tolerance)
    for gradient, truth in zip(gradients, truths, strict=True):
        assert gradient.dtype == dtype
        assert (gradient.double() - truth).abs().max() <= tolerance * truth.abs().max()


@pytest.mark.parametrize("mask", MASKS)
def test_an_indexer_learns_from_the_mean_of_grouped_heads(mask: str) -> None:
    teacher, student = sides(torch.float32, DEVICE, 4, 2, 20), sides(torch.float32, DEVICE, 1, 1, 8)
    check(teacher, student, True, torch.float32, mask=MASKS[mask])


def test_a_student_with_as_many_heads_that_share_keys() -> None:
    teacher, student = sides(torch.float32, DEVICE, 4, 4, 16), sides(torch.float32, DEVICE, 4, 2, 24)
    check(teacher, student, False, torch.float32, score=foci.Dot(softcap=1.5), mask=foci.causal)


def test_more_keys_than_queries_in_half_precision() -> None:
    teacher = sides(torch.float16, DEVICE, 3, 1, 16, queries=5, keys=33)
    student = sides(torch.float16, DEVICE, 1, 1, 16, queries=5, keys=33)
    check(teacher, student, True, torch.float16, mask=foci.causal)


def test_programs_share_the_blocks_of_a_short_sequence() -> None:
    teacher, student = sides(torch.float32, DEVICE, 4, 2, 20, 600, 600), sides(torch.float32, DEVICE, 1, 1, 8, 600, 600)
    calls = attend(*teacher, mask=foci.causal).call, attend(*student, mask=foci.causal).call
    both = [kernels.count_parts(*map(kernels.as_side, calls), axis) for axis in (kernels.QUERY_AXIS, kernels.KEY_AXIS)]
    assert all(parts > 1 for parts, _ in both)


def test_a_batch_of_many_short_sequences_fits_the_grid() -> None:
    """CUDA allows 65,535 programs in each dimension but the first."""
    q = torch.zeros(1, 1, 1, 1, device=DEVICE).expand(3000, 32, 20, 16)
    side, masks = kernels.Side(q, q, 1.0, None), KernelMasks()
    for plan in (
        kernels.plan_lse(side, masks),
        kernels.plan_forward(side, side, masks, False, True),
        kernels.plan_keys(side, side, masks, False),
    ):
        (launch,) = plan.launches
        assert max(launch.grid[1:], default=1) < 2**16 < launch.grid[0]


@pytest.mark.gpu
@pytest.mark.parametrize("length", [511, 2048, 4100])
def test_long_sequences_in_half_precision(length: int) -> None:
    teacher = sides(torch.bfloat16, "cuda", 4, 2, 128, length, length)
    student = sides(torch.bfloat16, "cuda", 1, 1, 64, length, length)
    check(teacher, student, True, torch.bfloat16, mask=foci.causal)


def test_what_the_kernels_refuse() -> None:
    teacher, student = sides(torch.float32, "cpu", 4, 2, 8), sides(torch.float32, "cpu", 1, 1, 8)
    plain, indexer = attend(*teacher).call, attend(*student).call
    learning = attend(teacher[0].clone().requires_grad_(), teacher[1]).call
    for first, second, averaged, keys, reason in (
        (plain, indexer, False, None, "as many heads"),
        (plain, indexer, True, torch.zeros(23, 1), "given keys"),
        (learning, indexer, True, None, "must not need gradients"),
        (attend(*teacher, mask=foci.causal).call, indexer, True, None, "same mask"),
        (attend(*teacher, sink=torch.zeros(4)).call, indexer, True, None, "bias, sink or positions"),
    ):
        assert any(reason in each for each in kernels.refuses_kind(first, second, (averaged, False), keys)), reason


def test_gradients_can_be_differentiated_again() -> None:
    teacher, student = sides(torch.float32, DEVICE, 2, 2, 8), sides(torch.float32, DEVICE, 1, 1, 8)
    leaves = [x.requires_grad_() for x in student]
    calls = attend(*teacher, mask=foci.causal).call, attend(*leaves, mask=foci.causal).call
    twice = []
    for function in (
        lambda: by_kernels(*calls, True),
        lambda: compare_in_strips(*calls, (True, False), None),
    ):
        (first,) = torch.autograd.grad(function()[0].sum(), leaves[:1], create_graph=True)
        twice.append(torch.autograd.grad(first.square().sum(), leaves))
    torch.testing.assert_close(*twice)

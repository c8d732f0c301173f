"""A part of a call, some of its sequences and heads, keeps their biases and masks in every backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import foci
from foci.arguments import Call, prepare_call
from foci.backends import reference, triton
from foci.biases import Bias
from foci.gpu import attention
from foci.runtime import native
from foci.scores import Dot
from foci.statistics import Request, cpu_c, cuda, streaming
from tests.tensors import randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WANTED = Request(entropy=True, received=True)
B, H, T = 3, 4, 24


def per_head(kind: str) -> Bias | None:
    if kind == "alibi":
        return foci.ALiBi(torch.tensor([0.9, 0.1, 0.5, 0.02]))
    if kind == "relative":
        return foci.Relative(randn(H, 9, 16, seed=4))
    return foci.Buckets(randn(8, H, seed=4) * 2, bidirectional=True, max_distance=12) if kind == "buckets" else None


def seen_per_head() -> Tensor:
    return randn(B, H, T, T, seed=5) > -0.5


def call_of(
    bias: Bias | None, mask: foci.Mask | Tensor | None = None, device: str = "cpu", score: foci.Score | None = None
) -> Call:
    q, k, v = (randn(B, H, T, 16, seed=seed).to(device) for seed in range(3))
    return prepare_call(q, k, v, score or Dot(), mask, bias, None, None, 0.0, True)


PARTS = [(slice(0, B), slice(1, H)), (slice(1, B), slice(3, H)), (slice(0, B, 2), slice(1, H, 2))]


@pytest.mark.skipif(native.why_unavailable("statistics") is not None, reason="no compiled library")
@pytest.mark.parametrize("kind", ["none", "alibi", "buckets"])
@pytest.mark.parametrize("place", PARTS)
def test_statistics_in_c(kind: str, place: tuple[slice, slice], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_c, "MIN_QUERIES", 0)
    monkeypatch.setattr(cpu_c, "MIN_ENTRIES", 0)
    part = call_of(per_head(kind), foci.causal).select(*place)
    assert cpu_c.refuses(part, WANTED) == []
    _, lse = reference.run(part)
    assert lse is not None
    same(cpu_c.compute_statistics(part, lse, WANTED), streaming.compute_statistics(part, lse, WANTED))


@pytest.mark.parametrize(
    ("kind", "masked"),
    [("none", False), ("none", True), ("alibi", False), ("buckets", True), ("relative", False), ("additive", True)],
)
@pytest.mark.parametrize("place", PARTS)
def test_statistics_by_gpu_kernels(kind: str, masked: bool, place: tuple[slice, slice]) -> None:
    pytest.importorskip("triton")
    from foci.statistics.cuda.plan import launch_statistics
    from tests.kernels.statistics_cases import SMALL

    score = foci.Additive(randn(H, 16, seed=6)) if kind == "additive" else None
    mask = seen_per_head() if masked else foci.causal
    part = call_of(per_head(kind), mask, DEVICE, score).select(*place)
    _, lse = reference.run(part)
    assert lse is not None
    found = launch_statistics(lse=lse.contiguous(), **cuda.statistics_arguments(part), request=WANTED, config=SMALL)
    same(found, streaming.compute_statistics(part, lse, WANTED))


@pytest.mark.parametrize("budget", [1, 2 * 4 * 9 * 24, 5 * 4 * 9 * 24])
def test_statistics_of_relative_vectors_in_parts(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One head, two heads and one sequence at a time."""
    pytest.importorskip("triton")
    from foci.gpu.attention import row_table

    call = call_of(per_head("relative"), foci.causal, DEVICE)
    _, lse = reference.run(call)
    assert lse is not None
    whole = cuda.compute_statistics(call, lse, WANTED)
    same(whole, streaming.compute_statistics(call, lse, WANTED))
    monkeypatch.setattr(row_table, "MAX_ROW_TABLE_BYTES", budget)
    assert len(cuda.split_by_row_table(call)) == {1: 12, 2: 6, 5: 3}[max(budget // (4 * 9 * 24), 1)]
    same(cuda.compute_statistics(call, lse, WANTED), whole)


@pytest.mark.parametrize("kind", ["alibi", "buckets"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("place", PARTS)
def test_attention_with_a_distance_bias(kind: str, masked: bool, place: tuple[slice, slice]) -> None:
    pytest.importorskip("triton")
    part = call_of(per_head(kind), seen_per_head() if masked else foci.causal, DEVICE).select(*place)
    assert attention.refuses(part) == []
    for found, expected in zip(triton.run(part), reference.run(part), strict=True):
        assert found is not None
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.to(found[name].dtype), atol=2e-5, rtol=0)

"""The R-Drop loss: the kernel, run by the Triton interpreter without a GPU, against plain operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foci.tasks import rdrop
from foci.tasks.rdrop import RDropFunction, compute_rdrop_loss, symmetric_kl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IGNORED = 0


def problem(dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 5, 37, generator=generator).mul(3).to(device, dtype)
    targets = torch.randint(37, (3, 5), generator=generator)
    targets[0, 2:], targets[2] = IGNORED, IGNORED
    return logits, targets.to(device)


def plain(logits: Tensor, targets: Tensor, smoothing: float, strength: float) -> Tensor:
    """Computes the loss by its definition, in float64."""
    shares = logits.double().log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    for b, t in (targets != IGNORED).nonzero().tolist():
        both = shares[b, t], shares[b + len(targets), t]
        for own, other in (both, both[::-1]):
            total = total - ((1 - smoothing) * own[targets[b, t]] + smoothing * own.mean()) / 2
            total = total + strength / 4 * (own.exp() * (own - other)).sum()
    return total


@pytest.mark.parametrize(("smoothing", "strength"), [(0.0, 0.0), (0.1, 0.0), (0.1, 5.0)])
def test_plain_operations_equal_the_definition(smoothing: float, strength: float) -> None:
    logits, targets = problem(torch.float32)
    found = compute_rdrop_loss(logits, targets, ignore=IGNORED, smoothing=smoothing, agreement=strength)
    torch.testing.assert_close(found.double(), plain(logits, targets, smoothing, strength))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("smoothing", "strength"), [(0.0, 0.0), (0.1, 5.0)])
def test_the_kernel_equals_the_definition_and_its_gradient(
    dtype: torch.dtype, smoothing: float, strength: float
) -> None:
    pytest.importorskip("triton")
    logits, targets = problem(dtype, DEVICE)
    logits.requires_grad_()
    found = RDropFunction.apply(logits, targets, IGNORED, smoothing, strength / 4)  # type: ignore[no-untyped-call]
    (3.0 * found).backward()
    exact = logits.detach().double().requires_grad_()
    expected = plain(exact, targets, smoothing, strength)
    (3.0 * expected).backward()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    assert logits.grad is not None
    assert exact.grad is not None
    within = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=within, atol=within)


@pytest.mark.gpu
def test_cuda_uses_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = problem(torch.float32, "cuda")
    options = {"ignore": IGNORED, "smoothing": 0.1, "agreement": 5.0}
    by_kernel = compute_rdrop_loss(logits, targets, **options)  # type: ignore[arg-type]
    monkeypatch.setattr(rdrop, "symmetric_kl", None)
    torch.testing.assert_close(by_kernel, compute_rdrop_loss(logits, targets, **options))  # type: ignore[arg-type]
    torch.testing.assert_close(by_kernel.double(), plain(logits, targets, 0.1, 5.0))


def test_symmetric_kl_is_the_divergence_both_ways() -> None:
    generator = torch.Generator().manual_seed(1)
    first, second = torch.randn(2, 2, 3, 5, generator=generator)
    counts = torch.tensor([[True, True, False], [True, False, False]])
    p, q = first.softmax(-1), second.softmax(-1)
    both = (p * (p / q).log() + q * (q / p).log()).sum(-1)
    torch.testing.assert_close(symmetric_kl(first, second, counts), both[counts].sum())

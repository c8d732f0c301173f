"""The chunked token loss equals PyTorch's cross-entropy, in value and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foci.nn.token_loss import token_loss
from tests.nn.same import assert_same


def build_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    targets = torch.randint(11, (3, 7))
    targets[0, :3] = targets[2, 5:] = -100
    return (
        torch.randn(3, 7, 8, dtype=dtype, requires_grad=True),
        torch.randn(11, 8, dtype=dtype, requires_grad=True),
        targets,
    )


@pytest.mark.parametrize("chunk", [1, 4, 21, 100])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_equals_pytorch(chunk: int, smoothing: float) -> None:
    states, weight, targets = build_inputs()
    expected = F.cross_entropy((states @ weight.mT).mT, targets, label_smoothing=smoothing)
    found = token_loss(states, weight, targets, smoothing=smoothing, chunk=chunk)
    assert_same(found, expected)
    wanted = torch.autograd.grad(3.0 * expected, (states, weight))
    for one, other in zip(torch.autograd.grad(3.0 * found, (states, weight)), wanted, strict=True):
        assert_same(one, other)


def test_gradients_equal_finite_differences() -> None:
    states, weight, targets = build_inputs(torch.float64)
    torch.autograd.gradcheck(lambda s, w: token_loss(s, w, targets, smoothing=0.2, chunk=5), (states, weight))


def test_ignored_targets() -> None:
    states, weight, targets = build_inputs()
    loss = token_loss(states, weight, torch.full_like(targets, 5), ignore=5)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert states.grad is not None
    assert not bool(states.grad.any())
    changed = states.detach().clone()
    changed[0, :3] = 1e4
    assert_same(token_loss(changed, weight.detach(), targets), token_loss(states, weight, targets).detach())


def test_no_gradient_is_computed_when_none_is_needed() -> None:
    states, weight, targets = build_inputs()
    with torch.no_grad():
        assert not token_loss(states, weight, targets).requires_grad
    assert_same(token_loss(states.detach(), weight.detach(), targets), token_loss(states, weight, targets).detach())


def test_in_bfloat16_and_under_autocast() -> None:
    states, weight, targets = build_inputs()
    expected = token_loss(states, weight, targets)
    half = token_loss(states.to(torch.bfloat16), weight.to(torch.bfloat16), targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = token_loss(states, weight, targets)
    cast.backward()
    for loss in (half, cast):
        assert loss.dtype == torch.float32
        assert abs(float((loss - expected).detach())) < 0.02
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    (wanted,) = torch.autograd.grad(expected, weight)
    assert float((weight.grad - wanted).norm() / wanted.norm()) < 0.01


def test_a_token_among_many_keeps_its_gradient_in_float16() -> None:
    """Shares of 1/4096 and probabilities of 1/1000 underflow in float16 unless the loss is scaled."""
    torch.manual_seed(0)
    states = (0.1 * torch.randn(4096, 8)).half().requires_grad_()
    weight, targets = (0.1 * torch.randn(1000, 8)).half().requires_grad_(), torch.randint(1000, (4096,))
    (token_loss(states, weight, targets) * 2.0**16).backward()
    exact = [t.detach().double().requires_grad_() for t in (states, weight)]
    token_loss(exact[0], exact[1], targets).backward()
    for one, other in zip((states, weight), exact, strict=True):
        assert one.grad is not None and other.grad is not None  # noqa: PT018
        assert float((one.grad.double() / 2.0**16 - other.grad).norm() / other.grad.norm()) < 0.01


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_compiles_into_one_graph() -> None:
    states, weight, targets = build_inputs()
    torch._dynamo.reset()
    fast = torch.compile(token_loss, backend="aot_eager", fullgraph=True)
    expected, found = token_loss(states, weight, targets, chunk=8), fast(states, weight, targets, chunk=8)
    assert_same(found, expected)
    assert_same(torch.autograd.grad(found, weight)[0], torch.autograd.grad(expected, weight)[0])


def test_wrong_shapes_are_refused() -> None:
    states, weight, targets = build_inputs()
    with pytest.raises(ValueError, match=r"got \(3, 7, 8\), \(11, 8\), \(7,\)"):
        token_loss(states, weight, targets[0])
    with pytest.raises(ValueError, match=r"smoothing must be at least 0 and below 1, got 1.0"):
        token_loss(states, weight, targets, smoothing=1.0)

"""Equal but for float32 rounding, which grows with the size of the numbers and with what they pass through."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def assert_same(found: Tensor | None, expected: Tensor | None, name: str = "output", slack: float = 32.0) -> None:
    """`slack` roundings of the largest number, at most."""
    assert (found is None) == (expected is None), f"{name}: expected {expected is not None}, got {found is not None}"
    if found is None or expected is None:
        return
    assert found.shape == expected.shape, f"{name}: expected {tuple(expected.shape)}, but got {tuple(found.shape)}"
    assert bool(found.isfinite().all()), f"{name}: not finite"
    if not found.numel():
        return
    found, expected = found.detach(), expected.detach()
    most = slack * torch.finfo(torch.float32).eps * max(float(expected.abs().max()), 1.0)
    worst = float((found - expected).abs().max())
    assert worst <= most, f"{name}: off by {worst:.3g}, where {most:.3g} is allowed"


def gradients(output: Tensor, tensors: Iterable[Tensor]) -> list[Tensor | None]:
    """What reaches each tensor from a fixed gradient of the output."""
    slope = torch.randn(output.shape, generator=torch.Generator().manual_seed(output.numel()))
    return list(torch.autograd.grad(output, list(tensors), slope, allow_unused=True))


def assert_same_gradients(
    found: Tensor,
    expected: Tensor,
    ours: nn.Module,
    theirs: nn.Module,
    turned: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    slack: float = 64.0,
) -> None:
    """The gradients of every parameter; `turned` says what theirs, by name, are in our module."""
    own = dict(ours.named_parameters())
    other = dict(theirs.named_parameters())
    expected_by_name = dict(zip(other, gradients(expected, other.values()), strict=True))
    wanted = turned({name: grad for name, grad in expected_by_name.items() if grad is not None})
    given = dict(zip(own, gradients(found, own.values()), strict=True))
    assert wanted.keys() == {name for name, grad in given.items() if grad is not None}
    for name, grad in wanted.items():
        assert_same(given[name], grad, name, slack)

"""Assertions of equality up to float32 rounding, which grows with the magnitude of the values."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def assert_same(found: Tensor | None, expected: Tensor | None, name: str = "output", slack: float = 32.0) -> None:
    """Assert equality up to `slack` float32 roundings of the largest value."""
    assert (found is None) == (expected is None), f"{name}: expected {expected is not None}, got {found is not None}"
    if found is None or expected is None:
        return
    assert found.shape == expected.shape, f"{name}: expected {tuple(expected.shape)}, got {tuple(found.shape)}"
    assert bool(found.isfinite().all()), f"{name}: not finite"
    if not found.numel():
        return
    found, expected = found.detach(), expected.detach()
    allowed = slack * torch.finfo(torch.float32).eps * max(float(expected.abs().max()), 1.0)
    worst = float((found - expected).abs().max())
    assert worst <= allowed, f"{name}: off by {worst:.3g}, allowed {allowed:.3g}"


def gradients(output: Tensor, tensors: Iterable[Tensor]) -> list[Tensor | None]:
    """The gradient of each tensor for a fixed gradient of the output."""
    d_output = torch.randn(output.shape, generator=torch.Generator().manual_seed(output.numel()))
    return list(torch.autograd.grad(output, list(tensors), d_output, allow_unused=True))


def assert_same_gradients(
    found: Tensor,
    expected: Tensor,
    ours: nn.Module,
    theirs: nn.Module,
    rename: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    slack: float = 64.0,
) -> None:
    """Compare the gradients of every parameter; `rename` maps the gradients of `theirs` to the names of `ours`."""
    own = dict(ours.named_parameters())
    other = dict(theirs.named_parameters())
    expected_by_name = dict(zip(other, gradients(expected, other.values()), strict=True))
    wanted = rename({name: grad for name, grad in expected_by_name.items() if grad is not None})
    given = dict(zip(own, gradients(found, own.values()), strict=True))
    assert wanted.keys() == {name for name, grad in given.items() if grad is not None}
    for name, grad in wanted.items():
        assert_same(given[name], grad, name, slack)

"""Dropout: its rate, its mean, and the same entries in every backend, tiling and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import foci
from foci.backends import strips
from tests.tensors import qkv, randn


def kept_entries(share: float, length: int = 64, heads: int = 4, backend: str | None = None, seed: int = 3) -> Tensor:
    """(2, H, T, T): uniform weights after dropout, times T; 1 on average."""
    zeros, values = torch.zeros(2, heads, length, 4), torch.eye(length).expand(2, heads, -1, -1)
    torch.manual_seed(seed)
    return foci.attention(zeros, zeros, values, dropout=share, backend=backend) * length


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_dropout_has_the_right_rate_and_mean(share: float) -> None:
    left = kept_entries(share)
    assert left.unique().numel() == 2
    torch.testing.assert_close(left.max(), torch.tensor(1 / (1 - share)))
    # Five standard deviations; for every row and column too.
    deviation = (share * (1 - share)) ** 0.5
    for kept in ((left > 0).double().mean(dims) for dims in ((0, 1, 2, 3), (0, 1, 2), (0, 1, 3), (2, 3))):
        assert bool(((kept - (1 - share)).abs() < 5 * deviation * (kept.numel() / left.numel()) ** 0.5).all())


def test_dropout_differs_between_entries_heads_sequences_and_calls() -> None:
    left = kept_entries(0.5) > 0
    agreeing = {
        "sequences": left[0] == left[1],
        "heads": left[:, 0] == left[:, 1],
        "queries": left[:, :, :-1] == left[:, :, 1:],
        "keys": left[..., :-1] == left[..., 1:],
        "across": left == left.mT,
        "calls": left == (kept_entries(0.5, seed=4) > 0),
    }
    for name, same in agreeing.items():
        assert abs(float(same.double().mean()) - 0.5) < 0.03, name


@pytest.mark.parametrize("mask", [None, foci.causal & foci.window(3)], ids=["all", "window"])
def test_dropout_is_the_same_in_every_backend_and_tiling(
    mask: foci.Mask | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = [tensor.requires_grad_() for tensor in qkv(9, 9, torch.float64)]
    sink = torch.zeros(4, dtype=torch.float64)

    def found(backend: str) -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        out = foci.attention(*leaves, mask=mask, sink=sink, dropout=0.3, backend=backend)
        return (out, *torch.autograd.grad(out.square().sum(), leaves))

    expected = found("reference")
    torch.testing.assert_close(found("blocked"), expected)
    monkeypatch.setattr(strips, "MAX_CPU_STRIP_ENTRIES", 32)
    torch.testing.assert_close(found("blocked"), expected)
    assert not torch.allclose(expected[0], foci.attention(*leaves, mask=mask, sink=sink))


def test_gradients_under_dropout() -> None:
    def dropped(*leaves: Tensor) -> Tensor:
        torch.manual_seed(7)
        return foci.attention(*leaves, dropout=0.4, bias=foci.Relative(leaves[1][0, 0, :3], leaves[2][0, 0, :3]))

    q, k, v = (randn(1, 2, 4, 3, seed=seed, dtype=torch.float64).requires_grad_() for seed in range(3))
    assert torch.autograd.gradcheck(dropped, (q, k, v))


def test_weights_are_those_before_dropout() -> None:
    q, k, v = qkv()
    out, weights = foci.attention(q, k, v, dropout=0.5, return_weights=True)
    _, whole = foci.attention(q, k, v, return_weights=True)
    torch.testing.assert_close(weights.dense(), whole.dense())
    torch.testing.assert_close(weights.lse, whole.lse)
    assert not torch.allclose(out, weights @ v)

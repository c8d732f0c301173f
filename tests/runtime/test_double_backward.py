"""Gradients, and those of gradients, where query, key and value are one tensor or made from each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import foci
from foci.runtime.double_backward import forbid_double_backward, make_distinct_views
from foci.weights.dense_attention import attention_with_matrix

RELATED: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "one tensor": lambda x: (x, x, x),
    "key and value are one": lambda x: (x.sin(), x, x),
    "made from each other": lambda x: (x, 2 * x, x + 1),
}
MADE: dict[str, Callable[..., Tensor]] = {
    "blocked": lambda *qkv: foci.attention(*qkv, backend="blocked"),
    "blocked, additive": lambda *qkv: foci.attention(*qkv, score=additive(qkv[0]), backend="blocked"),
    "the matrix": lambda *qkv: torch.cat(attention_with_matrix(*qkv), dim=-1),
}
TRUE: dict[str, Callable[..., Tensor]] = {
    "blocked": lambda *qkv: foci.attention(*qkv, backend="reference"),
    "blocked, additive": lambda *qkv: foci.attention(*qkv, score=additive(qkv[0]), backend="reference"),
    "the matrix": lambda q, k, v: torch.cat([(w := (q @ k.mT / 2).softmax(-1)) @ v, w], dim=-1),
}


def additive(q: Tensor) -> foci.Additive:
    return foci.Additive(torch.linspace(-1, 2, 4, dtype=q.dtype))


def start() -> Tensor:
    return torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize("graph", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("related", RELATED)
def test_each_tensor_gets_its_own_gradient(related: str, made: str, graph: bool) -> None:
    found = []
    for function, dtype in ((MADE[made], torch.float32), (TRUE[made], torch.float64)):
        x = start()
        loss = function(*RELATED[related](x.to(dtype))).sin().sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=graph)
        found.append([first, *(torch.autograd.grad(first.square().sum(), x) if graph else ())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_tensors_without_gradient_are_not_copied() -> None:
    x, fixed = start(), torch.ones(2)
    alias, same, nothing = make_distinct_views(x, fixed, None)
    assert alias is not x
    assert (same, nothing) == (fixed, None)


def test_missing_double_backward_is_refused() -> None:
    x = start()
    with torch.no_grad():
        assert forbid_double_backward([x, None], x) == (x, None)
    (gradient,) = forbid_double_backward([torch.ones_like(x)], x)
    assert torch.equal(gradient.detach(), torch.ones_like(x))
    for ask in (lambda: torch.autograd.grad((gradient + x).sum(), x, retain_graph=True), (gradient + x).sum().backward):
        with pytest.raises(RuntimeError, match=r"backend must be 'blocked' or 'reference' .* got 'triton'"):
            ask()

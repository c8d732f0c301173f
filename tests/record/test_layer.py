"""Layers give the same statistics from lazy weights, a dense matrix or kept statistics."""

from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from foci.record.kept import KeptStatistics
from foci.record.layer import Layer
from foci.weights.summary import Top
from tests.tensors import qkv

QUESTIONS: dict[str, Any] = {
    "entropy": lambda x: x.entropy(),
    "received": lambda x: x.received(),
    "distance": lambda x: x.distance(),
    "top": lambda x: x.top(3),
    "picture": lambda x: x.picture(3, 3),
    "largest_logit": lambda x: x.largest_logit(),
    "sink_mass": lambda x: x.sink_mass(),
    "lse": lambda x: x.lse,
    "grouped": lambda x: x.grouped([(0, 4)], [(0, 2), (2, 6)]),
    "entries": lambda x: x[..., 2, :],
    "products": lambda x: x @ torch.ones(6, 2),
}


def weights() -> foci.Weights:
    return foci.attention(*qkv(), mask=foci.causal, return_weights=True)[1]


def layers() -> dict[str, Layer]:
    lazy, norms = weights(), qkv()[2].norm(dim=-1)
    kept = KeptStatistics(foci.Keep(top=3, picture=6, largest_logit=True, shares=True).compute(lazy), lazy.shape)
    behind: dict[str, Any] = {"weights": lazy, "kept": kept, "matrix": lazy.dense()}
    return {name: Layer("a.b", kv_heads=2, value_norms=norms, **{name: thing}) for name, thing in behind.items()}


def flat(answer: Tensor | Top) -> Tensor:
    return torch.cat([answer.values, answer.keys.float()], -1) if isinstance(answer, tuple) else answer


@pytest.mark.parametrize("kind", ["weights", "kept", "matrix"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_available_statistics_equal_those_of_weights(kind: str, question: str) -> None:
    layer, lazy = layers()[kind], weights()
    ask = QUESTIONS[question]
    if question not in layer.available:
        with pytest.raises(ValueError, match=question):
            ask(layer)
        return
    torch.testing.assert_close(flat(ask(layer)), flat(ask(lazy)), atol=1e-6, rtol=1e-6)
    head, single = layer.head(2), lazy[:, 2]
    assert head.available == layer.available
    assert (head.shape, head.sizes) == ((2, 6, 6), (2, 1, 6, 6))
    torch.testing.assert_close(flat(ask(head)), flat(ask(single)), atol=1e-6, rtol=1e-6)


def test_available_statistics_of_each_kind() -> None:
    can = {kind: layer.available for kind, layer in layers().items()}
    assert can["weights"] > can["matrix"]
    assert can["weights"] > can["kept"]
    assert can["weights"] - can["matrix"] == {"lse", "sink_mass", "largest_logit"}
    assert can["weights"] - can["kept"] == {"entries", "columns", "lines", "products", "grouped"}


def test_names_and_sizes() -> None:
    for kind, layer in layers().items():
        assert layer.shape == (2, 4, 6, 6)
        assert layer.heads == (0, 1, 2, 3)
        assert layer.label == "L0"
        assert layer.head(3).label == "L0H3"
        assert (layer.max_picture_size, layer.max_top) == ((6, 6), 3 if kind == "kept" else 6)
        assert layer.nbytes > 0
        assert layer.positions.tolist() == list(range(6))
        assert layer.head(3).head(3).label == "L0H3"
        with pytest.raises(KeyError, match="must be one of H0, H1, H2, H3, got H4"):
            layer.head(4)
    some = Layer("x", "cross", 2, heads=(1, 5), matrix=torch.rand(1, 2, 3, 3))
    assert some.head(5).label == "cross.L2H5"
    assert torch.equal(some.head(5).dense(), some.matrix[:, 1])  # type: ignore[index]


def test_rows_and_values() -> None:
    lazy, norms = weights().dense(), qkv()[2].norm(dim=-1)
    for kind in ("weights", "matrix"):
        layer = layers()[kind]
        torch.testing.assert_close(layer.row(1, 3, 4), lazy[1, 3, 4])
        torch.testing.assert_close(layer.row(1, 3, 4, values=True), lazy[1, 3, 4] * norms[1, 1])
        torch.testing.assert_close(layer.head(3).row(1, 4, values=True), lazy[1, 3, 4] * norms[1, 1])
        torch.testing.assert_close(layer.head(2).norms(), norms[:, 1])
        with pytest.raises(TypeError, match=r"row\(batch, head, query\), got 2"):
            layer.row(1, 3)
    assert torch.equal(layers()["kept"].norms(), norms.repeat_interleave(2, 1))
    with pytest.raises(ValueError, match="the values of L0 were not recorded"):
        Layer("x", matrix=lazy).norms()


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_heads_that_share_values(kv_heads: int) -> None:
    norms = torch.arange(kv_heads).view(1, -1, 1).expand(1, -1, 4).float()
    layer = Layer("x", matrix=torch.rand(1, 6, 4, 4), kv_heads=kv_heads, value_norms=norms)
    shared = [head * kv_heads // 6 for head in range(6)]
    assert layer.norms()[0, :, 0].tolist() == shared
    assert [float(layer.head(head).norms()[0, 0]) for head in range(6)] == shared


def test_products_from_the_left() -> None:
    x, lazy = torch.rand(2, 6), weights().dense()
    for kind in ("weights", "matrix"):
        torch.testing.assert_close(x @ layers()[kind], x @ lazy)
        torch.testing.assert_close(torch.matmul(x, layers()[kind]), x @ lazy)
        torch.testing.assert_close(layers()[kind].mean("heads") @ x.mT, lazy.mean(1) @ x.mT)
        torch.testing.assert_close(layers()[kind].dense(), lazy)
    with pytest.raises(TypeError, match="exp must be called with tensors, got a Layer"):
        torch.exp(layers()["weights"])  # type: ignore[call-overload]


def test_gradients_reach_through_a_layer() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    _, lazy = foci.attention(q, k, v, return_weights=True)
    Layer("x", weights=lazy).entropy().sum().backward()
    assert q.grad is not None
    assert q.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of weights, kept, matrix and steps"),
        ({"matrix": torch.rand(2, 2)}, r"the shape \(B, H, Tq, Tk\), got \(2, 2\)"),
        ({"matrix": torch.rand(1, 2, 3, 3), "heads": (1,)}, r"heads must have 2 numbers, got \(1,\)"),
        ({"matrix": torch.rand(1, 2, 3, 3), "rows": (1,)}, "rows must have 3 numbers, got 1"),
    ],
)
def test_an_inconsistent_layer_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layer("x", **options)


@pytest.mark.parametrize("kind", ["weights", "kept", "matrix"])
def test_shape_is_that_of_the_dense_matrix(kind: str) -> None:
    layer = layers()[kind]
    for part in (layer, layer.head(2), layer.head(2).with_head_axis()):
        assert part.shape == (*part.entropy().shape, 6)
        if kind != "kept":
            assert part.shape == part.dense().shape
    assert layer.head(2).with_head_axis().heads == (2,)
    torch.testing.assert_close(layer.head(2).with_head_axis().entropy()[:, 0], layer.entropy()[:, 2])

"""The attention module equals `foci.attention` on projected inputs: self- and cross-attention, with a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from foci.nn import AdditiveScore, Attention, BucketTable, CosineScore, GeneralScore, RelativeTable, Rotary
from tests.nn.same import assert_same
from tests.tensors import randn

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"kv_heads": 2},
    "one key head, wide": {"kv_heads": 1, "head_width": 6},
    "rotary": {"rotary": Rotary()},
    "rotary, grouped": {"rotary": Rotary(100.0, interleaved=True), "kv_heads": 2},
    "additive": {"score": "additive"},
    "general": {"score": "general"},
    "cosine": {"score": "cosine"},
    "softcap": {"score": foci.Dot(softcap=2.0)},
    "alibi": {"bias": "alibi"},
    "buckets": {"bias": "buckets"},
    "relative": {"bias": "relative"},
    "own table": {"bias": RelativeTable(4, clip=2, values=False)},
    "no biases": {"biases": False},
}


def build_attention(kind: str) -> Attention:
    """A module in which every parameter affects the output."""
    torch.manual_seed(0)
    module = Attention(16, 4, **KINDS[kind])
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=seed) * 0.5)
    return module


def by_hand(module: Attention, x: Tensor, context: Tensor, own: bool, mask: foci.Mask | None) -> Tensor:
    """Three projections, one call, one projection."""
    wide, narrow = module.heads * module.head_width, module.kv_heads * module.head_width
    found = []
    for source, rows in ((x, (0, wide)), (context, (wide, wide + narrow)), (context, (wide + narrow, None))):
        bias = None if module.project.bias is None else module.project.bias[slice(*rows)]
        y = torch.nn.functional.linear(source, module.project.weight[slice(*rows)], bias)
        found.append(torch.stack(y.split(module.head_width, dim=-1), dim=1))
    q, k, v = found
    if own and module.rotary is not None:
        q, k = module.rotary(q), module.rotary(k)
    score = module.score() if isinstance(module.score, torch.nn.Module) else module.score
    bias = module.bias() if isinstance(module.bias, torch.nn.Module) else module.bias
    out = foci.attention(q, k, v, score=score, bias=bias if own else None, mask=mask, backend="reference")
    return module.output(torch.cat(out.unbind(1), dim=-1))


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_call_on_projected_inputs(kind: str) -> None:
    module, x, context = build_attention(kind), randn(2, 6, 16), randn(2, 5, 16, seed=1)
    assert_same(module(x), by_hand(module, x, x, True, None))
    assert_same(module(x, mask=foci.causal), by_hand(module, x, x, True, foci.causal))
    assert_same(module(x, context), by_hand(module, x, context, False, None))


@pytest.mark.parametrize("kind", KINDS)
def test_returned_weights_match_the_output(kind: str) -> None:
    module, x = build_attention(kind), randn(2, 6, 16)
    out, weights = module(x, mask=foci.causal, return_weights=True)
    assert_same(out, module(x, mask=foci.causal))
    assert weights.shape == (2, 4, 6, 6)
    torch.testing.assert_close(weights.dense().sum(-1), torch.ones(2, 4, 6))
    assert not weights.dense().triu(1).any()


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_gets_a_gradient(kind: str) -> None:
    module, x = build_attention(kind), randn(2, 6, 16)
    module(x).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_gives_the_same_as_all_at_once(kind: str) -> None:
    module, x = build_attention(kind), randn(2, 6, 16)
    cache = foci.Cache()
    with torch.no_grad():
        steps = [module(part, mask=foci.causal, cache=cache) for part in x.split([3, 1, 2], dim=1)]
        assert_same(torch.cat(steps, dim=1), module(x, mask=foci.causal))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 5, 16), (3, 0, 16)])
def test_empty_inputs_give_empty_outputs(kind: str, shape: tuple[int, ...]) -> None:
    """The last part of a batch split over processes may be empty."""
    x = torch.zeros(shape, requires_grad=True)
    out = build_attention(kind)(x)
    assert out.shape == shape
    assert torch.autograd.grad(out.sum(), x)[0].shape == shape


def test_a_context_is_projected_once() -> None:
    module, x, context = build_attention("grouped"), randn(2, 6, 16), randn(2, 5, 16, seed=1)
    cache = foci.Cache()
    with torch.no_grad():
        steps = [module(part, context, cache=cache) for part in x.split(2, dim=1)]
        assert cache.length == 5
        assert_same(torch.cat(steps, dim=1), module(x, context))
        assert_same(module(x, context * 0, cache=cache), module(x, context))


def test_positions_rotate_queries_and_keys() -> None:
    module, x = build_attention("rotary"), randn(2, 6, 16)
    assert_same(module(x, positions=torch.arange(6) + 100), module(x), slack=256)
    assert not torch.allclose(module(x, positions=torch.arange(6) * 2), module(x), atol=1e-3)


def test_dropout_is_active_only_in_training() -> None:
    torch.manual_seed(0)
    module, x = Attention(16, 4, dropout=0.5), randn(2, 6, 16)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


def test_learned_scores_are_initialized_as_documented() -> None:
    torch.manual_seed(0)
    q, k, v = (randn(1, 2, 6, 8, seed=seed) for seed in range(3))
    torch.testing.assert_close(foci.attention(q, k, v, score=GeneralScore(2, 8)()), foci.attention(q, k, v))
    assert isinstance(CosineScore(2, 8)(), foci.Cosine)
    assert tuple(AdditiveScore(2, 8)().weight.shape) == (2, 8)


def test_a_shared_table_is_one_parameter() -> None:
    table = BucketTable(4)
    layers = torch.nn.ModuleList(Attention(16, 4, bias=table) for _ in range(3))
    assert sum(parameter is table.table for parameter in layers.parameters()) == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"width": 15}, ValueError, "width must be a multiple of heads .*, got width=15, heads=4"),
        ({"kv_heads": 3}, ValueError, "heads must be a multiple of kv_heads, got heads=4, kv_heads=3"),
        ({"score": "dott"}, ValueError, "score must be 'dot', 'additive', 'general', 'cosine', got 'dott'"),
        ({"bias": "shaw"}, ValueError, "bias must be 'alibi', 'buckets', 'relative' or None, got 'shaw'"),
        ({"score": foci.Additive(torch.zeros(4))}, TypeError, "score must be a name, a foci score without tensors"),
        ({"bias": torch.zeros(3)}, TypeError, "bias must be a name, a foci bias without tensors"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Attention(**({"width": 16, "heads": 4} | options))


def test_wrong_inputs_are_refused() -> None:
    module = build_attention("plain")
    with pytest.raises(ValueError, match=r"x must have shape \(B, T, 16\), got \(2, 16\)"):
        module(torch.zeros(2, 16))
    with pytest.raises(ValueError, match=r"context must have shape \(B, T, 16\), got \(2, 3, 8\)"):
        module(torch.zeros(2, 3, 16), torch.zeros(2, 3, 8))


def test_arguments_of_other_libraries_are_translated() -> None:
    layer, x = foci.nn.Attention(8, 2), torch.randn(1, 4, 8)
    with pytest.raises(
        TypeError, match=r"the options of forward must be among mask, .*, got is_causal: use mask=foci\.c"
    ):
        layer(x, is_causal=True)
    with pytest.raises(TypeError, match=r"the positional arguments must be x and context, got 3"):
        layer(x, x, x)

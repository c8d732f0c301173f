"""The block: residuals, norms, feed-forward, dropout and stochastic depth."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import foci
from foci.nn import Block, BlockConfig
from tests.nn.same import assert_same
from tests.tensors import randn

FUNCTIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "silu": F.silu,
}


def build_block(cross: bool = False, **changes: Any) -> Block:
    torch.manual_seed(0)
    block = Block(BlockConfig(width=16, heads=4, hidden=12, **changes), cross=cross)
    with torch.no_grad():
        for seed, parameter in enumerate(block.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=seed) * 0.4)
    return block


def feed_forward_by_hand(block: Block, x: Tensor, activation: str) -> Tensor:
    inner = block.feed_forward.inner(x)
    if activation == "swiglu":
        inner = F.silu(inner[..., :12]) * inner[..., 12:]
    else:
        inner = FUNCTIONS[activation](inner)
    return block.feed_forward.outer(inner)


@pytest.mark.parametrize(
    ("norm", "norm_first", "activation"),
    list(itertools.product(("layer", "rms"), (True, False), (*FUNCTIONS, "swiglu"))),
)
def test_equals_its_formula(norm: str, norm_first: bool, activation: str) -> None:
    block = build_block(cross=True, norm=norm, norm_first=norm_first, activation=activation)
    x, memory = randn(2, 6, 16), randn(2, 5, 16, seed=1)
    expected = x
    parts = [
        (block.attention_norm, lambda y: block.attention(y, mask=foci.causal)),
        (block.cross_norm, lambda y: block.cross(y, memory)),
        (block.feed_forward_norm, lambda y: feed_forward_by_hand(block, y, activation)),
    ]
    for each, part in parts:
        expected = expected + part(each(expected)) if norm_first else each(expected + part(expected))
    assert_same(block(x, memory, mask=foci.causal), expected)


def test_the_norms_are_pytorchs() -> None:
    block = build_block(norm="rms", eps=0.25)
    assert isinstance(block.attention_norm, nn.RMSNorm)
    assert block.attention_norm.eps == 0.25
    plain = build_block(biases=False)
    assert isinstance(plain.feed_forward_norm, nn.LayerNorm)
    assert not [name for name, _ in plain.named_parameters() if name.endswith("bias")]


def test_weights_of_both_attentions() -> None:
    block, x, memory = build_block(cross=True), randn(2, 6, 16), randn(2, 5, 16, seed=1)
    out, weights = block(x, memory, return_weights=True)
    assert_same(out, block(x, memory))
    assert {name: each.shape for name, each in weights.items()} == {"own": (2, 4, 6, 6), "cross": (2, 4, 6, 5)}


def test_memory_is_required_with_cross_attention_and_refused_without() -> None:
    x = randn(2, 6, 16)
    with pytest.raises(ValueError, match=r"memory must be .* for a block with cross=True, got None"):
        build_block(cross=True)(x)
    with pytest.raises(ValueError, match="memory must be None for a block with cross=False, got"):
        build_block()(x, x)


def test_dropout_is_active_only_in_training() -> None:
    block, x = build_block(dropout=0.5), randn(2, 6, 16)
    assert not torch.equal(block(x), block(x))
    assert torch.equal(block.eval()(x), block(x))


def test_stochastic_depth_skips_whole_sequences_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    block = Block(BlockConfig(width=16, heads=4), depth_dropout=0.25)
    for parameter in block.feed_forward.parameters():
        nn.init.zeros_(parameter)
    x = randn(1, 6, 16).expand(4000, -1, -1)
    added = block(x).detach() - x
    exact = block.eval()(x[:1]).detach() - x[:1]
    skipped = (added == 0).all(-1).all(-1)
    assert 0.22 < float(skipped.float().mean()) < 0.28
    torch.testing.assert_close(added[~skipped], (exact / 0.75).expand(int((~skipped).sum()), -1, -1), atol=1e-5, rtol=0)

"""Cross-attention is told from self-attention by the inputs of the attention module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import foci

WIDTH, HEADS = 16, 2


class Attention(nn.Module):
    """Self-attention, or cross-attention if it is given a context; as in a UNet, with a norm inside."""

    def __init__(self, context_width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, WIDTH) for width in (WIDTH, context_width, context_width))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        context = x if context is None else context
        projected = self.to_q(x), self.to_k(context), self.to_v(context)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in projected)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn1, self.attn2 = Attention(), Attention(8)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = x + self.attn1(x)
        return x + self.attn2(x, context)


class UNet(nn.Module):
    """Its middle runs before `up`, but is registered after it."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.mid = Block(), Block(), Block()

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = self.mid(self.down(x, context)[:, ::4], context)
        return self.up(x.repeat_interleave(4, 1), context)


def record(model: nn.Module, *inputs: Any, **options: Any) -> foci.Record:
    with torch.no_grad():
        expected = model.eval()(*inputs, **options)
        with foci.watch(model) as seen:
            out = model(*inputs, **options)
    torch.testing.assert_close(out, expected)
    return seen


def sequences(seen: foci.Record) -> list[tuple[str, str, str]]:
    return [(layer.label, layer.queries, layer.keys) for layer in seen.layers.values()]


@pytest.mark.parametrize("length", [6, 64], ids=["shorter", "as long as the queries"])
def test_a_unet_keeps_its_order_and_has_a_context(length: int) -> None:
    seen = record(UNet(), torch.randn(1, 64, WIDTH), torch.randn(1, length, 8))
    assert sequences(seen) == [
        ("L0", "input", "input"),
        ("cross.L0", "input", "context"),
        ("L1", "input", "input"),
        ("cross.L1", "input", "context"),
        ("L2", "input", "input"),
        ("cross.L2", "input", "context"),
    ]
    scores = seen.scores()
    for score in ("distance", "previous_token"):
        assert scores[score].isnan().all(1).tolist() == [False, True] * 3
    assert not scores["entropy"].isnan().any()
    assert bool(seen["cross.L0"].distance().isnan().all())
    seen.label([f" w{i}" for i in range(length)], name="context")
    assert seen.labels_of(seen["cross.L1"])[1].texts[0][1] == " w1"
    with pytest.raises(ValueError, match=r"name must be a sequence of the record \('context', 'input'\), got 'prompt'"):
        seen.label(["a"], name="prompt")


X = torch.randn(2, 10, WIDTH)
KEYS = {
    "the same tensor": (X, "input"),
    "computed twice": (X.clone(), "input"),
    "a cache of inputs": (torch.cat([torch.randn(2, 3, WIDTH), X], 1), "input"),
    "foreign": (torch.randn(2, 4, WIDTH), "context"),
    "foreign and as long": (torch.randn(2, 10, WIDTH), "context"),
}


@pytest.mark.parametrize("needs_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("case", KEYS)
def test_multihead_attention(case: str, batch_first: bool, needs_weights: bool) -> None:
    key, expected = KEYS[case]
    query, key = (
        (X, key) if batch_first else (X.transpose(0, 1), X.transpose(0, 1) if key is X else key.transpose(0, 1))
    )
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
    seen = record(module, query, key, key, need_weights=needs_weights)
    assert sequences(seen) == [("L0", "input", expected)]
    assert bool(seen.scores()["distance"].isnan().all() if "distance" in seen.scores() else True) == (
        expected == "context"
    )


class Positioned(Attention):
    """Self-attention with a second input of the same length: positions that are projected, too."""

    def __init__(self) -> None:
        super().__init__()
        self.to_p = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, where: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + self.to_p(where)


def test_a_second_input_that_is_not_attended_to_is_no_context() -> None:
    assert sequences(record(Positioned(), X, torch.randn(2, 10, WIDTH))) == [("L0", "input", "input")]


class Cached(nn.Module):
    """Decoding with a cache: the queries are new, the keys are all so far."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleList([CachedAttention(), CachedAttention()])

    def forward(self, x: Tensor, caches: list[list[Tensor]]) -> Tensor:
        for attention, cache in zip(self.attn, caches, strict=True):
            x = x + attention(x, cache[0] if cache else None, cache)
        return x


class CachedAttention(Attention):
    def forward(self, x: Tensor, previous: Tensor | None, cache: list[Tensor]) -> Tensor:  # type: ignore[override]
        everything = x if previous is None else torch.cat([previous, x], 1)
        cache[:] = [everything]
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in (self.to_q(x), self.to_k(everything), self.to_v(everything))
        )
        return F.scaled_dot_product_attention(q, k, v, is_causal=previous is None).transpose(1, 2).flatten(2)


def test_cached_decoding_stays_self_attention() -> None:
    model, caches = Cached().eval(), [[], []]
    with foci.watch(model) as seen, torch.no_grad():
        for step in (X[:, :4], X[:, 4:5], X[:, 5:6]):
            model(step, caches)
    assert sequences(seen) == [("L0", "input", "input"), ("L1", "input", "input")]
    assert seen["L0"].shape == (2, HEADS, 6, 6)


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Wrapped(nn.Module):
    """The attention call is in an inner module that is given projected queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.q, self.kv = Core(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        k, v = self.kv(memory).chunk(2, -1)
        return self.core(self.q(x), k, v)


@pytest.mark.parametrize(("length", "expected"), [(4, "context"), (10, "context")])
def test_the_enclosing_module_tells_for_projected_inputs(length: int, expected: str) -> None:
    assert [layer[2] for layer in sequences(record(Wrapped(), X, torch.randn(2, length, WIDTH)))] == [expected]
    same = record(Wrapped(), X, X)
    assert [layer[2] for layer in sequences(same)] == ["input"]


def test_contexts_of_several_lengths_have_names_of_their_own() -> None:
    model = nn.ModuleList([Attention(), Attention(), Attention()])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor, text: Tensor, image: Tensor) -> Tensor:
            return self.layers[2](self.layers[1](self.layers[0](x, text), image), text)

    seen = record(Model(), X, torch.randn(2, 3, WIDTH), torch.randn(2, 5, WIDTH))
    assert [layer[2] for layer in sequences(seen)] == ["context", "context#2", "context"]


def test_pooling_with_learned_queries_reads_the_labelled_sequence() -> None:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.probe = nn.Embedding(9, WIDTH), nn.Parameter(torch.randn(1, 1, WIDTH))
            self.own, self.attention = Attention(), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, ids: Tensor) -> Tensor:
            states = self.own(self.embedding(ids))
            return self.attention(self.probe.expand(len(ids), -1, -1), states, states)[0]

    seen = record(Pool(), torch.arange(8).view(1, 8))
    assert sequences(seen) == [("L0", "input", "input"), ("cross.L0", "queries", "input")]
    assert seen.labels_of(seen["cross.L0"])[1].texts == (tuple("01234567"),)


def test_a_generation_with_cross_attention_joins_its_steps() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BartConfig(
        vocab_size=30,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=32,
    )
    model = transformers.BartForConditionalGeneration(config).eval()
    with foci.watch(model) as seen, torch.no_grad():
        model.generate(torch.arange(3, 8).view(1, 5), max_new_tokens=4, min_new_tokens=4, num_beams=1)
    assert sequences(seen) == [
        ("encoder.L0", "source", "source"),
        ("decoder.L0", "target", "target"),
        ("cross.L0", "target", "source"),
    ]
    assert seen["cross.L0"].shape[2:] == (4, 5)

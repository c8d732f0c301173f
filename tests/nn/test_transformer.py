"""Encoder, Decoder and EncoderDecoder: padding, packing, caches, compilation, bfloat16, checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foci.nn import Attention, Decoder, Encoder, EncoderDecoder, EncoderDecoderConfig, TransformerConfig
from tests.cases import mark_most_slow
from tests.nn.same import assert_same
from tests.tensors import randn

# PyTorch itself causes this warning when it traces an autograd function.
pytestmark = pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")

VOCABULARY = 30
KINDS: dict[str, dict[str, Any]] = {
    "learned": {},
    "sinusoidal, post-norm": {"positions": "sinusoidal", "scale_embedding": True, "norm_first": False},
    "rotary, grouped, swiglu": {
        "positions": None,
        "rotary": 10000.0,
        "kv_heads": 2,
        "norm": "rms",
        "activation": "swiglu",
        "biases": False,
    },
    "alibi": {"positions": None, "bias": "alibi", "activation": "relu"},
    "buckets": {"positions": None, "bias": "buckets", "activation": "gelu_tanh"},
    "relative": {"positions": None, "bias": "relative", "activation": "silu"},
    "additive": {"score": "additive", "embedding_norm": True},
    "general": {"score": "general", "final_norm": False},
    "cosine": {"score": "cosine", "head_width": 6},
}
LENGTHS = torch.tensor([7, 4])
RIGHT = torch.arange(7) < LENGTHS[:, None]
SEQUENCES = [torch.arange(7) * 3 % VOCABULARY, torch.arange(4) * 7 % VOCABULARY + 1]
PADDED = torch.stack([SEQUENCES[0], torch.cat([SEQUENCES[1], torch.zeros(3, dtype=torch.int64)])])
PACKED = torch.cat(SEQUENCES).unsqueeze(0)
DOCUMENTS = torch.tensor([5] * 7 + [2] * 4)


def config(kind: str, **changes: Any) -> TransformerConfig:
    sizes = {"vocabulary": VOCABULARY, "width": 16, "heads": 4, "layers": 2, "hidden": 24, "max_length": 16}
    return TransformerConfig(**(sizes | {"head": "tied"} | KINDS[kind] | changes))


def randomize(model: Any) -> Any:
    """Weights large enough for attention not to be uniform."""
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=seed) * 0.5 + (0.5 if parameter.dim() == 1 else 0.0))
    return model.eval()


def build_stack(name: str, kind: str, **changes: Any) -> Any:
    return randomize({"encoder": Encoder, "decoder": Decoder}[name](config(kind, **changes)))


def build_encoder_decoder(kind: str, **changes: Any) -> EncoderDecoder:
    each = config(kind, **changes)
    return randomize(EncoderDecoder(EncoderDecoderConfig(each, each.replace(layers=1), shared=True)))


ALL_STACKS = pytest.mark.parametrize("name", ["encoder", "decoder"])
ALL_KINDS = pytest.mark.parametrize("kind", KINDS)


@ALL_STACKS
@ALL_KINDS
def test_padded_equals_unpadded(name: str, kind: str) -> None:
    model = build_stack(name, kind)
    alone = [model(each.unsqueeze(0)).logits[0] for each in SEQUENCES]
    left = torch.stack([PADDED[0], PADDED[1].roll(3)])
    for tokens, padding, real in (
        (PADDED, LENGTHS, RIGHT),
        (PADDED, RIGHT, RIGHT),
        (left, RIGHT.flip(1), RIGHT.flip(1)),
    ):
        found = model(tokens, padding=padding).logits
        for row, each in enumerate(alone):
            assert_same(found[row][real[row]], each, slack=256)
        assert bool(found.isfinite().all())


@ALL_STACKS
@ALL_KINDS
def test_packed_equals_unpacked(name: str, kind: str) -> None:
    model = build_stack(name, kind)
    for documents in (DOCUMENTS, DOCUMENTS.unsqueeze(0)):
        found = model(PACKED, documents=documents).logits[0]
        for part, each in zip(found.split([7, 4]), SEQUENCES, strict=True):
            assert_same(part, model(each.unsqueeze(0)).logits[0], slack=256)


@ALL_KINDS
def test_padded_and_packed_pairs_equal_single_pairs(kind: str) -> None:
    model = build_encoder_decoder(kind)
    targets = [SEQUENCES[1], SEQUENCES[0][:5]]
    alone = [model(s.unsqueeze(0), t.unsqueeze(0)).logits[0] for s, t in zip(SEQUENCES, targets, strict=True)]
    target = torch.stack([torch.cat([targets[0], torch.zeros(1, dtype=torch.int64)]), targets[1]])
    for padding in (LENGTHS, RIGHT):
        found = model(PADDED, target, source_padding=padding, target_padding=torch.tensor([4, 5])).logits
        assert_same(found[0, :4], alone[0], slack=256)
        assert_same(found[1], alone[1], slack=256)
    packed = model(
        PACKED,
        torch.cat(targets).unsqueeze(0),
        source_documents=DOCUMENTS,
        target_documents=torch.tensor([5] * 4 + [2] * 5),
    ).logits[0]
    assert_same(packed, torch.cat(alone), slack=256)


@ALL_KINDS
def test_cached_equals_uncached(kind: str) -> None:
    model = build_stack("decoder", kind)
    caches = model.caches(capacity=7)
    with torch.no_grad():
        expected = model(PADDED).logits
        steps = [model(part, caches=caches).logits for part in PADDED.split([3, 1, 2, 1], dim=1)]
    assert caches.length == 7
    assert_same(torch.cat(steps, dim=1), expected, slack=256)


def test_only_last_computes_the_logits_of_the_last_token() -> None:
    model = build_stack("decoder", "learned")
    with torch.no_grad():
        expected, found = model(PADDED), model(PADDED, caches=model.caches(), only_last=True)
    assert found.logits.shape == (2, 1, VOCABULARY)
    assert_same(found.logits, expected.logits[:, -1:])
    assert found.states.shape == expected.states.shape


@pytest.mark.parametrize("token", [-1, VOCABULARY])
@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_tokens_outside_the_vocabulary_are_refused(name: str, token: int) -> None:
    tokens = PADDED.clone()
    tokens[1, 2] = token
    lowest, highest = min(token, 0), max(token, int(PADDED.max()))
    expected = f"tokens must be numbers from 0 to 29, as the vocabulary has 30, got {lowest} to {highest}"
    with pytest.raises(ValueError, match=expected):
        build_stack(name, "learned")(tokens)


def test_segments_outside_the_table_are_refused() -> None:
    with pytest.raises(ValueError, match="segments must be numbers from 0 to 1, as the config has 2"):
        build_stack("encoder", "learned", segments=2)(PADDED, segments=PADDED)


@pytest.mark.parametrize("kind", mark_most_slow(["learned", "additive", "relative"], 3))
def test_a_compiled_graph_returns_weights(kind: str) -> None:
    torch.compiler.reset()
    model = randomize(EncoderDecoder(EncoderDecoderConfig(config(kind, head=None), config(kind))))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    options: dict[str, Any] = {"source_padding": LENGTHS, "return_weights": True}
    found, expected = (m(PADDED, PADDED[:, :5], **options).weights for m in (compiled, model))
    assert list(found) == list(expected)
    for name, weights in found.items():
        torch.testing.assert_close(weights.dense(), expected[name].dense())
        torch.testing.assert_close(weights.entropy(), expected[name].entropy())


@ALL_KINDS
def test_cached_prompts_of_unequal_length_equal_single_prompts(kind: str) -> None:
    model = build_stack("decoder", kind)
    prompts = PADDED[:, :5].clone()
    prompts[1] = torch.cat([torch.zeros(3, dtype=torch.int64), PADDED[1, :2]])
    real = torch.arange(5) >= torch.tensor([[0], [3]])
    caches = model.caches()
    with torch.no_grad():
        steps = [model(prompts, padding=real, caches=caches).logits]
        steps += [
            model(torch.stack([PADDED[0, 5 + i], PADDED[1, 2 + i]]).view(2, 1), caches=caches).logits for i in (0, 1)
        ]
        found = torch.cat(steps, dim=1)
        assert_same(found[0], model(PADDED[:1]).logits[0], slack=256)
        assert_same(found[1, 3:], model(PADDED[1:, :4]).logits[0], slack=256)


@ALL_KINDS
def test_cached_encoder_decoder_equals_uncached(kind: str) -> None:
    model = build_encoder_decoder(kind)
    with torch.no_grad():
        expected = model(PADDED, PADDED, source_padding=LENGTHS).logits
        memory, caches = model.encode(PADDED, padding=LENGTHS), model.caches()
        steps = [model.decode(part, memory, caches=caches).logits for part in PADDED.split([2, 1, 4], dim=1)]
    assert_same(torch.cat(steps, dim=1), expected, slack=256)


def test_caches_are_cropped_and_reordered() -> None:
    model = build_encoder_decoder("rotary, grouped, swiglu")
    with torch.no_grad():
        memory, caches = model.encode(PADDED, padding=LENGTHS), model.caches()
        model.decode(PADDED[:, :4], memory, caches=caches)
        caches.crop(2)
        index = torch.tensor([1, 1, 0])
        caches.reorder(index)
        found = model.decode(PADDED[index, 2:5], memory.select_rows(index), caches=caches).logits
        expected = model(PADDED[index], PADDED[index, :5], source_padding=LENGTHS[index]).logits[:, 2:]
    assert_same(found, expected, slack=256)


def test_reordering_caches_reorders_the_padding() -> None:
    model = build_stack("decoder", "learned")
    real = torch.arange(7) >= torch.tensor([[0], [3]])
    index = torch.tensor([1, 0, 1])
    with torch.no_grad():
        caches = model.caches()
        model(PADDED, padding=real, caches=caches)
        caches.reorder(index)
        found = model(PADDED[index, :1], caches=caches).logits
        other = model.caches()
        model(PADDED[index], padding=real[index], caches=other)
        assert_same(found, model(PADDED[index, :1], caches=other).logits)


def test_invalid_padding_is_refused_with_caches() -> None:
    model = build_stack("decoder", "learned")
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"padding must be bool \(B, T\), on the left, .* got torch.int64 \(2,\)"):
            model(PADDED, padding=LENGTHS, caches=model.caches())
        with pytest.raises(ValueError, match=r"on the left, given once .* after 0 tokens"):
            model(PADDED, padding=RIGHT, caches=model.caches())
        with pytest.raises(ValueError, match="documents must be None with caches"):
            model(PACKED, documents=DOCUMENTS, caches=model.caches())
        caches = model.caches()
        model(PADDED, padding=RIGHT.flip(1), caches=caches)
        with pytest.raises(ValueError, match="after 7 tokens"):
            model(PADDED[:, :1], padding=RIGHT[:, :1], caches=caches)


@ALL_KINDS
def test_weights_of_every_layer_by_name(kind: str) -> None:
    model = build_encoder_decoder(kind)
    out = model(PADDED, PADDED[:, :5], source_padding=LENGTHS, return_weights=True)
    assert_same(out.logits, model(PADDED, PADDED[:, :5], source_padding=LENGTHS).logits, slack=64)
    expected = {"encoder.L0": (7, 7), "encoder.L1": (7, 7), "decoder.L0": (5, 5), "cross.L0": (5, 7)}
    assert {name: each.shape[-2:] for name, each in out.weights.items()} == expected
    assert list(model.attentions()) == list(out.weights)
    for name in ("encoder.L1", "cross.L0"):
        assert not out.weights[name].dense()[1, :, :, 4:].any()
        torch.testing.assert_close(out.weights[name].dense().sum(-1), torch.ones(out.weights[name].shape[:-1]))
    assert not out.weights["decoder.L0"].dense().triu(1).any()


def test_attentions_names_match_weights_names() -> None:
    model, seen = build_stack("decoder", "learned"), {}
    for name, module in model.attentions().items():
        assert isinstance(module, Attention)
        module.register_forward_hook(lambda _, __, found, name=name: seen.update({name: found[1]}))
    out = model(PADDED, padding=LENGTHS, return_weights=True)
    assert list(out.weights) == ["L0", "L1"]
    assert seen == out.weights
    # With return_weights, padding is masked even where the fast path relies on causal alone.
    assert not out.weights["L1"].dense()[1, :, :, 4:].any()


@ALL_KINDS
def test_trains_in_bfloat16(kind: str) -> None:
    torch.manual_seed(0)
    each = config(kind, dropout=0.1, attention_dropout=0.1, depth_dropout=0.2)
    model = EncoderDecoder(EncoderDecoderConfig(each, each)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for _ in range(12):
        logits = model(PADDED, PADDED[:, :-1], source_padding=LENGTHS, target_padding=LENGTHS - 1).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), PADDED[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert losses[-1] < losses[0] - 0.3


COMPILED = [
    kind if kind in {"learned", "rotary, grouped, swiglu"} else pytest.param(kind, marks=pytest.mark.slow)
    for kind in KINDS
]


@pytest.mark.parametrize("kind", COMPILED)
def test_compiles_as_one_graph(kind: str) -> None:
    torch.compiler.reset()
    model = build_encoder_decoder(kind, layers=1, dropout=0.1).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    found = compiled(PADDED, PADDED[:, :5], source_padding=LENGTHS, target_padding=LENGTHS - 2).logits
    torch.manual_seed(0)
    assert_same(found, model(PADDED, PADDED[:, :5], source_padding=LENGTHS, target_padding=LENGTHS - 2).logits)
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_training_compiles_as_one_graph(kind: str) -> None:
    torch.compiler.reset()
    model = build_encoder_decoder(kind, layers=1).train().to("cuda", torch.bfloat16)
    tokens = PADDED.cuda()
    found = torch.compile(model, fullgraph=True)(tokens, tokens[:, :5]).logits
    expected = model(tokens, tokens[:, :5]).logits
    assert float((found - expected).abs().mean()) < 0.02 * float(expected.abs().mean())
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(("name", "kind"), [("encoder", "alibi"), ("decoder", "rotary, grouped, swiglu")])
def test_padded_and_packed_stacks_compile_as_one_graph(name: str, kind: str) -> None:
    torch.compiler.reset()
    model = build_stack(name, kind, layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for tokens, options in ((PADDED, {"padding": RIGHT.flip(1)}), (PACKED, {"documents": DOCUMENTS})):
            assert_same(compiled(tokens, **options).logits, model(tokens, **options).logits)


@pytest.mark.parametrize("kind", ["learned", "rotary, grouped, swiglu", "buckets"])
def test_checkpointing_does_not_change_the_results(kind: str) -> None:
    found = []
    for checkpoint in (False, True):
        model = build_encoder_decoder(kind, checkpoint=checkpoint).train()
        calls = []
        model.decoder.blocks[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        logits = model(PADDED, PADDED[:, :5], source_padding=LENGTHS).logits
        found.append([logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))])
        assert len(calls) == 1 + checkpoint
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)


def test_checkpointing_repeats_the_same_dropout() -> None:
    model = build_encoder_decoder(
        "learned", checkpoint=True, dropout=0.5, attention_dropout=0.5, depth_dropout=0.5
    ).train()
    torch.manual_seed(0)
    x = model.encoder(PADDED).states
    grads = torch.autograd.grad(x.sum(), model.encoder.blocks[0].attention.project.weight)
    plain = build_encoder_decoder("learned", dropout=0.5, attention_dropout=0.5, depth_dropout=0.5).train()
    torch.manual_seed(0)
    y = plain.encoder(PADDED).states
    assert torch.equal(x, y)
    assert torch.equal(grads[0], *torch.autograd.grad(y.sum(), plain.encoder.blocks[0].attention.project.weight))


def test_embeddings_are_tied_and_shared() -> None:
    model = build_encoder_decoder("learned")
    assert model.decoder.embedding.tokens is model.encoder.embedding.tokens
    names = [name for name, _ in model.named_parameters()]
    assert [name for name in names if "tokens" in name or "head" in name] == ["encoder.embedding.tokens.weight"]
    out = model(PADDED, PADDED)
    torch.testing.assert_close(out.logits, out.states @ model.encoder.embedding.tokens.weight.mT)
    apart = build_stack("decoder", "learned", head="linear", head_bias=True)
    logits = apart(PADDED).states @ apart.head.weight.mT + apart.head.bias
    torch.testing.assert_close(apart(PADDED).logits, logits)


def test_without_a_vocabulary_inputs_and_outputs_are_vectors() -> None:
    model = build_stack("encoder", "learned", vocabulary=None)
    x = randn(2, 7, 16)
    out = model(x, padding=LENGTHS)
    assert out.logits is None
    assert out.states.shape == x.shape
    with pytest.raises(ValueError, match=r"tokens must be vectors \(B, T, 16\) .*, got torch.int64 \(2, 7\)"):
        model(PADDED)
    with pytest.raises(ValueError, match=r"tokens must be integers \(B, T\), got torch.float32 \(2, 7, 16\)"):
        build_stack("encoder", "learned")(x)
    with pytest.raises(ValueError, match=r"tokens must be integers \(B, T\), got list"):
        build_stack("decoder", "learned")([1, 2])


def test_segments() -> None:
    model = build_stack("encoder", "learned", segments=2)
    assert_same(model(PADDED).states, model(PADDED, segments=torch.zeros_like(PADDED)).states)
    assert not torch.equal(model(PADDED).states, model(PADDED, segments=torch.ones_like(PADDED)).states)
    with pytest.raises(ValueError, match="segments must be None for a config with segments=0"):
        build_stack("encoder", "learned")(PADDED, segments=PADDED)


def test_a_longer_sequence_than_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="the sequence must have at most 16 positions, got 17"):
        build_stack("decoder", "learned")(torch.zeros(1, 17, dtype=torch.int64))


def test_stochastic_depth_grows_with_the_layer() -> None:
    model = Encoder(config("learned", layers=3, depth_dropout=0.4))
    assert [round(block.depth_dropout, 6) for block in model.blocks] == [0.0, 0.2, 0.4]


def test_a_new_model_is_close_to_uniform() -> None:
    """The first loss of a language model should be that of a uniform guess: ln(vocabulary)."""
    torch.manual_seed(0)
    for kind in KINDS:
        logits = Decoder(config(kind, vocabulary=500, width=64, layers=4, hidden=None))(PADDED).logits
        assert logits is not None
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), PADDED[:, 1:].flatten())
        assert abs(float(loss.detach()) - 6.21) < 1.0, kind


def test_the_decoder_is_causal() -> None:
    for kind in KINDS:
        model = build_stack("decoder", kind)
        changed = PADDED.clone()
        changed[:, 4:] = 3
        assert torch.equal(model(PADDED).logits[:, :4], model(changed).logits[:, :4]), kind


def test_a_loss_on_the_weights_has_gradients() -> None:
    model = build_stack("encoder", "learned").train()
    entropy: Tensor = model(PADDED, return_weights=True).weights["L1"].entropy().mean()
    entropy.backward()
    assert bool(model.blocks[0].attention.project.weight.grad.any())

"""Small models of `transformers` converted to foci give the same logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import foci.nn
from tests.nn.same import assert_same
from tests.tensors import randn

transformers = pytest.importorskip("transformers")

VOCABULARY = 60
TOKENS = torch.arange(3, 17).reshape(2, 7) * 5 % VOCABULARY
# The second sequence has two tokens of padding, on the right and on the left.
RIGHT = torch.arange(7) < torch.tensor([[7], [5]])
LEFT = RIGHT.flip(1)


def build_model(kind: str, config: Any) -> Any:
    """A model whose weights all differ from 0 and 1, including the norms."""
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=seed) * 0.4 + (0.5 if parameter.dim() == 1 else 0.0))
        for name, buffer in model.named_buffers():
            if name == "final_logits_bias":
                buffer.copy_(randn(*buffer.shape))
    return model


def bert_config(**changes: Any) -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    return transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=20, **sizes, **changes)


def gpt2_config(**changes: Any) -> Any:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 20, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2Config(vocab_size=VOCABULARY, **(sizes | changes))


def llama_config(**changes: Any) -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    return transformers.LlamaConfig(vocab_size=VOCABULARY, **(sizes | {"num_key_value_heads": 2} | changes))


def marian_config(**changes: Any) -> Any:
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 24, "decoder_ffn_dim": 20}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 2, "max_position_embeddings": 20}
    ends = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1, "forced_eos_token_id": 1}
    return transformers.MarianConfig(vocab_size=VOCABULARY, **sizes, **heads, **ends, **changes)


@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_new"])
def test_bert(activation: str) -> None:
    theirs = build_model("BertForMaskedLM", bert_config(hidden_act=activation))
    ours = foci.nn.from_huggingface(theirs)
    segments = (torch.arange(7) > 2).long().expand(2, 7)
    with torch.no_grad():
        assert_same(ours(TOKENS).logits, theirs(TOKENS).logits, slack=64)
        expected = theirs(TOKENS, attention_mask=RIGHT.long(), token_type_ids=segments).logits
        for padding in (RIGHT, RIGHT.sum(1)):
            assert_same(ours(TOKENS, padding=padding, segments=segments).logits[RIGHT], expected[RIGHT], slack=64)


def test_bert_without_a_head_gives_states() -> None:
    theirs = build_model("BertModel", bert_config())
    ours = foci.nn.from_huggingface(theirs)
    with torch.no_grad():
        out = ours(TOKENS)
        assert out.logits is None
        assert_same(out.states, theirs(TOKENS).last_hidden_state, slack=64)


CAUSAL = {
    "GPT-2": ("GPT2LMHeadModel", gpt2_config()),
    "GPT-2, untied, its own hidden width": ("GPT2LMHeadModel", gpt2_config(tie_word_embeddings=False, n_inner=20)),
    "Llama": ("LlamaForCausalLM", llama_config()),
    "Llama, tied": ("LlamaForCausalLM", llama_config(tie_word_embeddings=True)),
    "Llama, wide heads and biases": ("LlamaForCausalLM", llama_config(head_dim=8, attention_bias=True)),
    "Llama, another base": (
        "LlamaForCausalLM",
        llama_config(rope_parameters={"rope_type": "default", "rope_theta": 500.0}, mlp_bias=True),
    ),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_models(name: str) -> None:
    theirs = build_model(*CAUSAL[name])
    ours = foci.nn.from_huggingface(theirs)
    assert all(parameter.is_contiguous() for parameter in ours.parameters())
    with torch.no_grad():
        assert_same(ours(TOKENS).logits, theirs(TOKENS).logits, slack=64)
        expected = theirs(TOKENS, attention_mask=RIGHT.long()).logits
        assert_same(ours(TOKENS, padding=RIGHT.sum(1)).logits[RIGHT], expected[RIGHT], slack=64)
        positions = (LEFT.long().cumsum(1) - 1).clamp(min=0)
        expected = theirs(TOKENS, attention_mask=LEFT.long(), position_ids=positions).logits
        assert_same(ours(TOKENS, padding=LEFT).logits[LEFT], expected[LEFT], slack=64)


@pytest.mark.parametrize(("kind", "config"), [("GPT2Model", gpt2_config()), ("LlamaModel", llama_config())])
def test_bare_models_give_states(kind: str, config: Any) -> None:
    theirs = build_model(kind, config)
    ours = foci.nn.from_huggingface(theirs)
    with torch.no_grad():
        out = ours(TOKENS)
        assert out.logits is None
        assert_same(out.states, theirs(TOKENS).last_hidden_state, slack=64)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_marian(shared: bool, scaled: bool) -> None:
    apart = {} if shared else {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 50}
    theirs = build_model("MarianMTModel", marian_config(scale_embedding=scaled, activation_function="swish", **apart))
    ours = foci.nn.from_huggingface(theirs)
    target = TOKENS[:, :4] % 50

    def expected(**options: Tensor) -> Tensor:
        return theirs(TOKENS, decoder_input_ids=target, **options).logits

    with torch.no_grad():
        assert_same(ours(TOKENS, target).logits, expected(), slack=64)
        found = ours(TOKENS, target, source_padding=RIGHT.sum(1)).logits
        assert_same(found, expected(attention_mask=RIGHT.long()), slack=64)


def test_weights_equal_those_of_eager_attention() -> None:
    config = marian_config()
    config._attn_implementation = "eager"
    theirs = build_model("MarianMTModel", config)
    with torch.no_grad():
        eager = theirs(TOKENS, decoder_input_ids=TOKENS[:, :4], output_attentions=True)
        out = foci.nn.from_huggingface(theirs)(TOKENS, TOKENS[:, :4], return_weights=True)
    kinds = {"encoder": eager.encoder_attentions, "decoder": eager.decoder_attentions, "cross": eager.cross_attentions}
    expected = {f"{kind}.L{i}": each for kind, layers in kinds.items() for i, each in enumerate(layers)}
    assert out.weights.keys() == expected.keys()
    for name, each in expected.items():
        assert_same(out.weights[name].dense(), each, name, slack=64)


def test_dtype_and_mode_are_kept() -> None:
    theirs = build_model("GPT2LMHeadModel", gpt2_config()).bfloat16()
    ours = foci.nn.from_huggingface(theirs)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    assert not ours.training
    assert foci.nn.from_huggingface(theirs.train()).training


def test_unsupported_models_are_refused() -> None:
    with pytest.raises(TypeError, match=r"model must be one of BertModel, .*, got GPT2DoubleHeadsModel"):
        foci.nn.from_huggingface(transformers.GPT2DoubleHeadsModel(gpt2_config()))
    with pytest.raises(
        ValueError, match="scale_attn_by_inverse_layer_idx must be False to convert the model, got True"
    ):
        foci.nn.from_huggingface(transformers.GPT2LMHeadModel(gpt2_config(scale_attn_by_inverse_layer_idx=True)))
    scaled = llama_config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(ValueError, match="rope_parameters must be the default ones"):
        foci.nn.from_huggingface(transformers.LlamaForCausalLM(scaled))
    with pytest.raises(ValueError, match=r"activation must be one of gelu, .*, got 'quick_gelu'"):
        foci.nn.from_huggingface(transformers.BertModel(bert_config(hidden_act="quick_gelu")))

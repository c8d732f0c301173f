"""Converts models of `transformers` to models of foci with the same weights and the same logits.

Each converter builds a foci config and maps every tensor of the source to a tensor of the foci model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foci.nn.config import Activation, EncoderDecoderConfig, TransformerConfig
from foci.nn.from_torch import TensorMapping
from foci.nn.positions import LearnedPositions
from foci.nn.transformer import Decoder, Encoder, EncoderDecoder

# Activation names of transformers -> names of foci.
HUGGINGFACE_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def from_huggingface(model: Any) -> Encoder | Decoder | EncoderDecoder:
    """Convert a loaded BERT, GPT-2, Llama or Marian model of `transformers` to a foci model with the same logits.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2)).eval()
    >>> foci.nn.from_huggingface(model)(torch.tensor([[1, 2, 3]]), return_weights=True).weights["L1"].shape
    (1, 2, 3, 3)

    Supported are BertModel, BertForMaskedLM, GPT2Model, GPT2LMHeadModel, LlamaModel, LlamaForCausalLM and
    MarianMTModel; the first of each pair returns states without logits.
    """
    name = type(model).__name__
    if name not in CONVERTERS:
        raise TypeError(f"model must be one of {', '.join(CONVERTERS)}, got {name}")
    converted: Encoder | Decoder | EncoderDecoder = CONVERTERS[name](model, model.config)
    return converted.train(model.training)


def convert_bert(model: Any, config: Any) -> Encoder:
    check_options(config, is_decoder=False, add_cross_attention=False)
    has_head = hasattr(model, "cls")
    encoder = Encoder(
        TransformerConfig(
            vocabulary=config.vocab_size,
            width=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            hidden=config.intermediate_size,
            activation=convert_activation(config.hidden_act),
            norm_first=False,
            eps=config.layer_norm_eps,
            max_length=config.max_position_embeddings,
            segments=config.type_vocab_size,
            embedding_norm=True,
            final_norm=False,
            head="masked" if has_head else None,
            dropout=config.hidden_dropout_prob,
            attention_dropout=config.attention_probs_dropout_prob,
        )
    )
    mapping = TensorMapping(model.state_dict(), "bert.")
    mapping.map_part("embedding.tokens", "embeddings.word_embeddings")
    mapping.map_part("embedding.segments", "embeddings.token_type_embeddings")
    mapping.map_part("embedding.norm", "embeddings.LayerNorm")
    mapping.map_tensor("embedding.positions.table", "embeddings.position_embeddings.weight")
    for i in range(config.num_hidden_layers):
        old, new = f"encoder.layer.{i}", f"blocks.{i}"
        mapping.map_part(f"{new}.attention.project", *(f"{old}.attention.self.{x}" for x in ("query", "key", "value")))
        mapping.map_part(f"{new}.attention.output", f"{old}.attention.output.dense")
        mapping.map_part(f"{new}.attention_norm", f"{old}.attention.output.LayerNorm")
        mapping.map_part(f"{new}.feed_forward.inner", f"{old}.intermediate.dense")
        mapping.map_part(f"{new}.feed_forward.outer", f"{old}.output.dense")
        mapping.map_part(f"{new}.feed_forward_norm", f"{old}.output.LayerNorm")
    if has_head:
        mapping.map_part("head.transform", "cls.predictions.transform.dense")
        mapping.map_part("head.norm", "cls.predictions.transform.LayerNorm")
        mapping.map_tensor("head.bias", "cls.predictions.bias")
    mapping.ignore("pooler.", "cls.predictions.decoder.", "embeddings.position_ids", "embeddings.token_type_ids")
    return mapping.load_into(encoder)


def convert_gpt2(model: Any, config: Any) -> Decoder:
    check_options(config, add_cross_attention=False, scale_attn_by_inverse_layer_idx=False, scale_attn_weights=True)
    head = choose_head(model, config)
    decoder = Decoder(
        TransformerConfig(
            vocabulary=config.vocab_size,
            width=config.n_embd,
            layers=config.n_layer,
            heads=config.n_head,
            hidden=config.n_inner,
            activation=convert_activation(config.activation_function),
            eps=config.layer_norm_epsilon,
            max_length=config.n_positions,
            head=head,
            dropout=config.resid_pdrop,
            attention_dropout=config.attn_pdrop,
        )
    )
    mapping = TensorMapping(model.state_dict(), "transformer.")
    mapping.map_part("embedding.tokens", "wte")
    mapping.map_tensor("embedding.positions.table", "wpe.weight")
    for i in range(config.n_layer):
        old, new = f"h.{i}", f"blocks.{i}"
        mapping.map_part(f"{new}.attention_norm", f"{old}.ln_1")
        mapping.map_part(f"{new}.attention.project", f"{old}.attn.c_attn", transpose=True)
        mapping.map_part(f"{new}.attention.output", f"{old}.attn.c_proj", transpose=True)
        mapping.map_part(f"{new}.feed_forward_norm", f"{old}.ln_2")
        mapping.map_part(f"{new}.feed_forward.inner", f"{old}.mlp.c_fc", transpose=True)
        mapping.map_part(f"{new}.feed_forward.outer", f"{old}.mlp.c_proj", transpose=True)
    mapping.map_part("norm", "ln_f")
    map_head(mapping, head)
    return mapping.load_into(decoder)


def convert_llama(model: Any, config: Any) -> Decoder:
    check_options(config, hidden_act="silu")
    rope = config.rope_parameters
    if rope.get("rope_type") != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"rope_parameters must be the default ones, over the whole head width, got {rope}")
    head = choose_head(model, config)
    decoder = Decoder(
        TransformerConfig(
            vocabulary=config.vocab_size,
            width=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_width=config.head_dim,
            hidden=config.intermediate_size,
            activation="swiglu",
            norm="rms",
            eps=config.rms_norm_eps,
            biases=config.attention_bias or config.mlp_bias,
            rotary=float(rope["rope_theta"]),
            positions=None,
            head=head,
            attention_dropout=config.attention_dropout,
        )
    )
    mapping = TensorMapping(model.state_dict(), "model.")
    mapping.map_part("embedding.tokens", "embed_tokens")
    for i in range(config.num_hidden_layers):
        old, new = f"layers.{i}", f"blocks.{i}"
        mapping.map_part(f"{new}.attention_norm", f"{old}.input_layernorm")
        mapping.map_part(f"{new}.attention.project", *(f"{old}.self_attn.{x}_proj" for x in "qkv"))
        mapping.map_part(f"{new}.attention.output", f"{old}.self_attn.o_proj")
        mapping.map_part(f"{new}.feed_forward_norm", f"{old}.post_attention_layernorm")
        mapping.map_part(f"{new}.feed_forward.inner", f"{old}.mlp.gate_proj", f"{old}.mlp.up_proj")
        mapping.map_part(f"{new}.feed_forward.outer", f"{old}.mlp.down_proj")
    mapping.map_part("norm", "norm")
    map_head(mapping, head)
    return mapping.load_into(decoder)


def convert_marian(model: Any, config: Any) -> EncoderDecoder:
    check_options(config, is_encoder_decoder=True)
    shared, head = config.share_encoder_decoder_embeddings, choose_head(model, config)
    encoder = build_marian_config(config, "encoder", config.vocab_size)
    decoder = build_marian_config(config, "decoder", config.vocab_size if shared else config.decoder_vocab_size)
    converted = EncoderDecoder(EncoderDecoderConfig(encoder, decoder.replace(head=head, head_bias=True), shared))
    mapping = TensorMapping(model.state_dict(), "model.")
    for stack in ("encoder", "decoder"):
        map_marian_stack(mapping, stack, len(getattr(converted, stack).blocks), shared and stack == "decoder")
    mapping.map_tensor("decoder.head.bias", "final_logits_bias")
    mapping.mapped["decoder.head.bias"] = mapping.mapped[
        "decoder.head.bias"
    ].flatten()  # Marian stores it as (1, vocabulary)
    if head == "linear":
        mapping.map_part("decoder.head", "lm_head")
    mapping.ignore("shared.", "decoder.embed_tokens.", "lm_head.")
    converted = mapping.load_into(converted)
    for part in (converted.encoder, converted.decoder):
        # Marian's position tables are fixed sines and cosines, in an order that differs from SinusoidalPositions.
        assert isinstance(part.embedding.positions, LearnedPositions)
        part.embedding.positions.table.requires_grad_(False)
    return converted


def build_marian_config(config: Any, stack: str, vocabulary: int) -> TransformerConfig:
    return TransformerConfig(
        vocabulary=vocabulary,
        width=config.d_model,
        layers=getattr(config, f"{stack}_layers"),
        heads=getattr(config, f"{stack}_attention_heads"),
        hidden=getattr(config, f"{stack}_ffn_dim"),
        activation=convert_activation(config.activation_function),
        norm_first=False,
        max_length=config.max_position_embeddings,
        scale_embedding=config.scale_embedding,
        final_norm=False,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
    )


def map_marian_stack(mapping: TensorMapping, stack: str, layers: int, shared: bool) -> None:
    if not shared:
        mapping.map_part(f"{stack}.embedding.tokens", f"{stack}.embed_tokens")
    mapping.map_tensor(f"{stack}.embedding.positions.table", f"{stack}.embed_positions.weight")
    for i in range(layers):
        old, new = f"{stack}.layers.{i}", f"{stack}.blocks.{i}"
        kinds = {"self_attn": "attention"} | ({"encoder_attn": "cross"} if stack == "decoder" else {})
        for source, target in kinds.items():
            mapping.map_part(f"{new}.{target}.project", *(f"{old}.{source}.{x}_proj" for x in "qkv"))
            mapping.map_part(f"{new}.{target}.output", f"{old}.{source}.out_proj")
            mapping.map_part(f"{new}.{target}_norm", f"{old}.{source}_layer_norm")
        mapping.map_part(f"{new}.feed_forward.inner", f"{old}.fc1")
        mapping.map_part(f"{new}.feed_forward.outer", f"{old}.fc2")
        mapping.map_part(f"{new}.feed_forward_norm", f"{old}.final_layer_norm")


def convert_activation(name: str) -> Activation:
    if name not in HUGGINGFACE_ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(HUGGINGFACE_ACTIVATIONS)}, got {name!r}")
    return HUGGINGFACE_ACTIVATIONS[name]


def choose_head(model: Any, config: Any) -> Any:
    """The value of `TransformerConfig.head`: None for a bare model, tied if the output layer is the embedding."""
    if not hasattr(model, "lm_head"):
        return None
    return "tied" if config.tie_word_embeddings else "linear"


def map_head(mapping: TensorMapping, head: str | None) -> None:
    if head == "linear":
        mapping.map_part("head", "lm_head")
    mapping.ignore("lm_head.")


def check_options(config: Any, **expected: Any) -> None:
    """Refuse options that change what the model computes and that foci does not support."""
    for name, value in expected.items():
        if getattr(config, name, value) != value:
            raise ValueError(f"{name} must be {value!r} to convert the model, got {getattr(config, name)!r}")


CONVERTERS: dict[str, Callable[[Any, Any], Encoder | Decoder | EncoderDecoder]] = {
    "BertModel": convert_bert,
    "BertForMaskedLM": convert_bert,
    "GPT2Model": convert_gpt2,
    "GPT2LMHeadModel": convert_gpt2,
    "LlamaModel": convert_llama,
    "LlamaForCausalLM": convert_llama,
    "MarianMTModel": convert_marian,
}

"""Models of `transformers` as models of foci: the same weights, the same logits.

A model is a config, and where each of its tensors goes. Every tensor must find its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foci.nn.config import Activation, EncoderDecoderConfig, TransformerConfig
from foci.nn.from_torch import TensorMapping
from foci.nn.positions import LearnedPositions
from foci.nn.transformer import Decoder, Encoder, EncoderDecoder

# Their names of activations, and ours.
HUGGINGFACE_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def from_huggingface(model: Any) -> Encoder | Decoder | EncoderDecoder:
    """A loaded BERT, GPT-2, Llama or Marian of `transformers` as a model of foci with the same logits.

        model = transformers.AutoModelForCausalLM.from_pretrained("gpt2")
        foci.nn.from_huggingface(model)(tokens, return_weights=True).weights["L5"]

    Taken are BertModel, BertForMaskedLM, GPT2Model, GPT2LMHeadModel, LlamaModel, LlamaForCausalLM and MarianMTModel;
    the first of each pair gives states without logits.
    """
    name = type(model).__name__
    if name not in CONVERTERS:
        raise TypeError(f"from_huggingface takes one of {', '.join(CONVERTERS)}, but got {name}")
    made: Encoder | Decoder | EncoderDecoder = CONVERTERS[name](model, model.config)
    return made.train(model.training)


def convert_bert(model: Any, config: Any) -> Encoder:
    check_options(config, is_decoder=False, add_cross_attention=False)
    headed = hasattr(model, "cls")
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
            head="masked" if headed else None,
            dropout=config.hidden_dropout_prob,
            attention_dropout=config.attention_probs_dropout_prob,
        )
    )
    moving = TensorMapping(model.state_dict(), "bert.")
    moving.take("embedding.tokens", "embeddings.word_embeddings")
    moving.take("embedding.segments", "embeddings.token_type_embeddings")
    moving.take("embedding.norm", "embeddings.LayerNorm")
    moving.take_one("embedding.positions.table", "embeddings.position_embeddings.weight")
    for i in range(config.num_hidden_layers):
        old, new = f"encoder.layer.{i}", f"blocks.{i}"
        moving.take(f"{new}.attention.project", *(f"{old}.attention.self.{x}" for x in ("query", "key", "value")))
        moving.take(f"{new}.attention.output", f"{old}.attention.output.dense")
        moving.take(f"{new}.attention_norm", f"{old}.attention.output.LayerNorm")
        moving.take(f"{new}.feed_forward.inner", f"{old}.intermediate.dense")
        moving.take(f"{new}.feed_forward.outer", f"{old}.output.dense")
        moving.take(f"{new}.feed_forward_norm", f"{old}.output.LayerNorm")
    if headed:
        moving.take("head.transform", "cls.predictions.transform.dense")
        moving.take("head.norm", "cls.predictions.transform.LayerNorm")
        moving.take_one("head.bias", "cls.predictions.bias")
    moving.leave("pooler.", "cls.predictions.decoder.", "embeddings.position_ids", "embeddings.token_type_ids")
    return moving.into(encoder)


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
    moving = TensorMapping(model.state_dict(), "transformer.")
    moving.take("embedding.tokens", "wte")
    moving.take_one("embedding.positions.table", "wpe.weight")
    for i in range(config.n_layer):
        old, new = f"h.{i}", f"blocks.{i}"
        moving.take(f"{new}.attention_norm", f"{old}.ln_1")
        moving.take(f"{new}.attention.project", f"{old}.attn.c_attn", turned=True)
        moving.take(f"{new}.attention.output", f"{old}.attn.c_proj", turned=True)
        moving.take(f"{new}.feed_forward_norm", f"{old}.ln_2")
        moving.take(f"{new}.feed_forward.inner", f"{old}.mlp.c_fc", turned=True)
        moving.take(f"{new}.feed_forward.outer", f"{old}.mlp.c_proj", turned=True)
    moving.take("norm", "ln_f")
    map_head(moving, head)
    return moving.into(decoder)


def convert_llama(model: Any, config: Any) -> Decoder:
    check_options(config, hidden_act="silu")
    rope = config.rope_parameters
    if rope.get("rope_type") != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"rotary positions must be the default ones, over the whole head, but got {rope}")
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
    moving = TensorMapping(model.state_dict(), "model.")
    moving.take("embedding.tokens", "embed_tokens")
    for i in range(config.num_hidden_layers):
        old, new = f"layers.{i}", f"blocks.{i}"
        moving.take(f"{new}.attention_norm", f"{old}.input_layernorm")
        moving.take(f"{new}.attention.project", *(f"{old}.self_attn.{x}_proj" for x in "qkv"))
        moving.take(f"{new}.attention.output", f"{old}.self_attn.o_proj")
        moving.take(f"{new}.feed_forward_norm", f"{old}.post_attention_layernorm")
        moving.take(f"{new}.feed_forward.inner", f"{old}.mlp.gate_proj", f"{old}.mlp.up_proj")
        moving.take(f"{new}.feed_forward.outer", f"{old}.mlp.down_proj")
    moving.take("norm", "norm")
    map_head(moving, head)
    return moving.into(decoder)


def convert_marian(model: Any, config: Any) -> EncoderDecoder:
    check_options(config, is_encoder_decoder=True)
    shared, head = config.share_encoder_decoder_embeddings, choose_head(model, config)
    encoder = build_marian_config(config, "encoder", config.vocab_size)
    decoder = build_marian_config(config, "decoder", config.vocab_size if shared else config.decoder_vocab_size)
    both = EncoderDecoder(EncoderDecoderConfig(encoder, decoder.changed(head=head, head_bias=True), shared))
    moving = TensorMapping(model.state_dict(), "model.")
    for stack in ("encoder", "decoder"):
        map_marian_stack(moving, stack, len(getattr(both, stack).blocks), shared and stack == "decoder")
    moving.take_one("decoder.head.bias", "final_logits_bias")
    moving.found["decoder.head.bias"] = moving.found["decoder.head.bias"].flatten()  # theirs is (1, vocabulary)
    if head == "linear":
        moving.take("decoder.head", "lm_head")
    moving.leave("shared.", "decoder.embed_tokens.", "lm_head.")
    both = moving.into(both)
    for part in (both.encoder, both.decoder):
        # They are sines and cosines, in an order of their own, and were never learned.
        assert isinstance(part.embedding.positions, LearnedPositions)
        part.embedding.positions.table.requires_grad_(False)
    return both


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


def map_marian_stack(moving: TensorMapping, stack: str, layers: int, shared: bool) -> None:
    if not shared:
        moving.take(f"{stack}.embedding.tokens", f"{stack}.embed_tokens")
    moving.take_one(f"{stack}.embedding.positions.table", f"{stack}.embed_positions.weight")
    for i in range(layers):
        old, new = f"{stack}.layers.{i}", f"{stack}.blocks.{i}"
        kinds = {"self_attn": "attention"} | ({"encoder_attn": "cross"} if stack == "decoder" else {})
        for theirs, ours in kinds.items():
            moving.take(f"{new}.{ours}.project", *(f"{old}.{theirs}.{x}_proj" for x in "qkv"))
            moving.take(f"{new}.{ours}.output", f"{old}.{theirs}.out_proj")
            moving.take(f"{new}.{ours}_norm", f"{old}.{theirs}_layer_norm")
        moving.take(f"{new}.feed_forward.inner", f"{old}.fc1")
        moving.take(f"{new}.feed_forward.outer", f"{old}.fc2")
        moving.take(f"{new}.feed_forward_norm", f"{old}.final_layer_norm")


def convert_activation(name: str) -> Activation:
    if name not in HUGGINGFACE_ACTIVATIONS:
        raise ValueError(f"the activation must be one of {', '.join(HUGGINGFACE_ACTIVATIONS)}, but got {name!r}")
    return HUGGINGFACE_ACTIVATIONS[name]


def choose_head(model: Any, config: Any) -> Any:
    """The head of the config: none for a bare model, tied where the output layer is the embedding."""
    if not hasattr(model, "lm_head"):
        return None
    return "tied" if config.tie_word_embeddings else "linear"


def map_head(moving: TensorMapping, head: str | None) -> None:
    if head == "linear":
        moving.take("head", "lm_head")
    moving.leave("lm_head.")


def check_options(config: Any, **expected: Any) -> None:
    """Refuses options that would change what the model computes."""
    for name, value in expected.items():
        if getattr(config, name, value) != value:
            raise ValueError(f"{name} must be {value!r} for foci's model, but got {getattr(config, name)!r}")


CONVERTERS: dict[str, Callable[[Any, Any], Encoder | Decoder | EncoderDecoder]] = {
    "BertModel": convert_bert,
    "BertForMaskedLM": convert_bert,
    "GPT2Model": convert_gpt2,
    "GPT2LMHeadModel": convert_gpt2,
    "LlamaModel": convert_llama,
    "LlamaForCausalLM": convert_llama,
    "MarianMTModel": convert_marian,
}

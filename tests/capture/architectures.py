"""Small transformers models of many architectures, made from configs: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 60
TOKENS = torch.arange(3, 17).reshape(2, 7) * 5 % 50 + 3
TARGET = TOKENS[:, 1:6]
# The second sequence has two tokens of padding, on the right and on the left.
RIGHT = torch.arange(7) < torch.tensor([[7], [5]])
LEFT = RIGHT.flip(1)

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
GROUPED = SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 40, "pad_token_id": 0, "head_dim": 4}
BART = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
T5 = {
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 6,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
}
IMAGE = {"image_size": 8, "patch_size": 4, "num_channels": 3}
WAVE = SIZES | {
    "conv_dim": (8, 8),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "layer",
    "do_stable_layer_norm": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "apply_spec_augment": False,
}


@dataclass(frozen=True)
class Architecture:
    """A kind of model: its class and config in transformers, and what goes in."""

    kind: str
    model: str
    config: str
    sizes: dict[str, Any]
    inputs: Callable[[], dict[str, Tensor]]
    # Whether the input is padded text.
    pads: bool = False
    sub_configs: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)


def text() -> dict[str, Tensor]:
    return {"input_ids": TOKENS.clone()}


def pairs() -> dict[str, Tensor]:
    return {"input_ids": TOKENS.clone(), "decoder_input_ids": TARGET.clone()}


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def image() -> dict[str, Tensor]:
    return {"pixel_values": noise(2, 3, 8, 8)}


def wave() -> dict[str, Tensor]:
    return {"input_values": noise(2, 160)}


def encoder(model: str, config: str, **sizes: Any) -> Architecture:
    given = SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": 40, "pad_token_id": 0}
    return Architecture("encoder", model, config, given | sizes, text, pads=True)


def decoder(model: str, config: str, **sizes: Any) -> Architecture:
    given = GROUPED | {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    return Architecture("decoder", model, config, given | sizes, text, pads=True)


def translator(model: str, config: str, **sizes: Any) -> Architecture:
    return Architecture("encoder-decoder", model, config, {"vocab_size": VOCABULARY} | sizes, pairs, pads=True)


def vision(model: str, config: str, inputs: Callable[[], dict[str, Tensor]] = image, **sizes: Any) -> Architecture:
    return Architecture("vision", model, config, SIZES | IMAGE | sizes, inputs)


def speech(model: str, config: str, inputs: Callable[[], dict[str, Tensor]] = wave, **sizes: Any) -> Architecture:
    return Architecture("speech", model, config, sizes, inputs)


GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 40, "n_inner": 24}
ARCHITECTURES: dict[str, Architecture] = {
    "bert": encoder("BertForMaskedLM", "BertConfig"),
    "albert": encoder("AlbertModel", "AlbertConfig", embedding_size=8),
    "distilbert": encoder("DistilBertModel", "DistilBertConfig", dim=16, n_layers=2, n_heads=4, hidden_dim=24),
    "modernbert": encoder(
        "ModernBertModel",
        "ModernBertConfig",
        local_attention=4,
        global_attn_every_n_layers=2,
        cls_token_id=1,
        sep_token_id=2,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "eurobert": encoder("EuroBertModel", "EuroBertConfig", num_key_value_heads=2, bos_token_id=1, eos_token_id=2),
    "esm": encoder("EsmModel", "EsmConfig", position_embedding_type="rotary", mask_token_id=59),
    "mobilebert": encoder(
        "MobileBertModel",
        "MobileBertConfig",
        embedding_size=16,
        intra_bottleneck_size=16,
        true_hidden_size=16,
        key_query_shared_bottleneck=True,
        num_feedforward_networks=1,
    ),
    "data2vec-text": encoder("Data2VecTextModel", "Data2VecTextConfig"),
    "gpt2": decoder("GPT2LMHeadModel", "GPT2Config", **GPT2),
    "gpt-bigcode": decoder("GPTBigCodeForCausalLM", "GPTBigCodeConfig", **GPT2),
    "gpt-neox": decoder("GPTNeoXForCausalLM", "GPTNeoXConfig"),
    "opt": decoder("OPTForCausalLM", "OPTConfig", ffn_dim=24, word_embed_proj_dim=16),
    "biogpt": decoder("BioGptForCausalLM", "BioGptConfig"),
    "llama": decoder("LlamaForCausalLM", "LlamaConfig"),
    "mistral": decoder("MistralForCausalLM", "MistralConfig", sliding_window=3),
    "qwen3": decoder("Qwen3ForCausalLM", "Qwen3Config"),
    "phi": decoder("PhiForCausalLM", "PhiConfig"),
    "gemma2": decoder("Gemma2ForCausalLM", "Gemma2Config", sliding_window=3, attn_logit_softcapping=2.0),
    "gemma3": decoder(
        "Gemma3ForCausalLM", "Gemma3TextConfig", sliding_window=3, num_hidden_layers=3, sliding_window_pattern=2
    ),
    "gpt-oss": decoder(
        "GptOssForCausalLM", "GptOssConfig", sliding_window=3, num_local_experts=2, num_experts_per_tok=1
    ),
    "deepseek-v3": decoder(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        num_key_value_heads=4,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=6,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        first_k_dense_replace=2,
    ),
    "deepseek-v3.2": decoder(
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        num_key_value_heads=4,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=6,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        first_k_dense_replace=2,
        index_n_heads=2,
        index_head_dim=8,
        index_topk=3,
    ),
    "llama4": decoder(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        attention_chunk_size=3,
        intermediate_size_mlp=24,
        num_local_experts=2,
        num_experts_per_tok=1,
    ),
    "olmo2": decoder("Olmo2ForCausalLM", "Olmo2Config"),
    "cohere": decoder("CohereForCausalLM", "CohereConfig"),
    "bart": translator("BartForConditionalGeneration", "BartConfig", **BART),
    "marian": translator("MarianMTModel", "MarianConfig", **BART),
    "m2m-100": translator("M2M100ForConditionalGeneration", "M2M100Config", **BART),
    "t5": translator("T5ForConditionalGeneration", "T5Config", **T5),
    "umt5": translator("UMT5ForConditionalGeneration", "UMT5Config", **T5),
    "switch": translator(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        **T5,
        num_sparse_encoder_layers=0,
        num_sparse_decoder_layers=0,
    ),
    "t5gemma": Architecture(
        "encoder-decoder",
        "T5GemmaForConditionalGeneration",
        "T5GemmaConfig",
        {"vocab_size": VOCABULARY, "pad_token_id": 0},
        pairs,
        pads=True,
        sub_configs={
            "encoder": ("T5GemmaModuleConfig", GROUPED | {"vocab_size": VOCABULARY, "sliding_window": 3}),
            "decoder": (
                "T5GemmaModuleConfig",
                GROUPED | {"vocab_size": VOCABULARY, "sliding_window": 3, "is_decoder": True},
            ),
        },
    ),
    "vit": vision("ViTModel", "ViTConfig"),
    "dinov2": vision("Dinov2Model", "Dinov2Config", mlp_ratio=2),
    "dinov3": vision("DINOv3ViTModel", "DINOv3ViTConfig", num_register_tokens=2),
    "videomae": vision(
        "VideoMAEModel",
        "VideoMAEConfig",
        lambda: {"pixel_values": noise(2, 2, 3, 8, 8)},
        num_frames=2,
        tubelet_size=1,
    ),
    "segformer": vision(
        "SegformerModel",
        "SegformerConfig",
        lambda: {"pixel_values": noise(2, 3, 32, 32)},
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        num_attention_heads=[2, 4],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
    ),
    "pixtral-vision": vision("PixtralVisionModel", "PixtralVisionConfig", head_dim=4),
    "swin": Architecture(
        "vision",
        "SwinModel",
        "SwinConfig",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4},
        lambda: {"pixel_values": noise(2, 3, 16, 16)},
    ),
    "yolos": vision("YolosModel", "YolosConfig", image_size=[8, 8], num_detection_tokens=3),
    "whisper": speech(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        lambda: {"input_features": noise(2, 8, 20), "decoder_input_ids": TARGET.clone()},
        **(
            BART | {"vocab_size": VOCABULARY, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 40}
        ),
    ),
    "wav2vec2": speech("Wav2Vec2Model", "Wav2Vec2Config", **WAVE),
    "data2vec-audio": speech("Data2VecAudioModel", "Data2VecAudioConfig", **(WAVE | {"conv_pos_kernel_size": 3})),
    "speech-to-text": speech(
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        lambda: {"input_features": noise(2, 20, 8), "decoder_input_ids": TARGET.clone()},
        **(
            BART
            | {
                "vocab_size": VOCABULARY,
                "input_feat_per_channel": 8,
                "input_channels": 1,
                "conv_channels": 8,
                "max_source_positions": 40,
                "max_target_positions": 40,
            }
        ),
    ),
    "audio-spectrogram": speech(
        "ASTModel",
        "ASTConfig",
        lambda: {"input_values": noise(2, 24, 16)},
        **SIZES,
        patch_size=8,
        max_length=24,
        num_mel_bins=16,
        frequency_stride=8,
        time_stride=8,
    ),
    "moonshine": speech(
        "MoonshineForConditionalGeneration",
        "MoonshineConfig",
        lambda: {"input_values": noise(2, 1600), "decoder_input_ids": TARGET.clone()},
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        encoder_num_key_value_heads=4,
        decoder_num_key_value_heads=4,
        max_position_embeddings=40,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    ),
    "wav2vec2-conformer": speech(
        "Wav2Vec2ConformerModel",
        "Wav2Vec2ConformerConfig",
        **WAVE,
        position_embeddings_type="rotary",
        conv_depthwise_kernel_size=3,
    ),
}
TOWER = SIZES | IMAGE | {"projection_dim": 8}
WORDS = SIZES | {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 40,
    "projection_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LANGUAGE = GROUPED | {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
IMAGE_TOKEN = 58


def captioned(places: int) -> Callable[[], dict[str, Tensor]]:
    def inputs() -> dict[str, Tensor]:
        ids = torch.cat([torch.full((2, places), IMAGE_TOKEN), TOKENS], 1)
        return {"input_ids": ids, "pixel_values": noise(2, 3, 8, 8)}

    return inputs


def prefixed() -> dict[str, Tensor]:
    """Four image tokens and two text tokens that attend to each other, then causal text."""
    inputs = captioned(4)()
    return inputs | {"token_type_ids": (torch.arange(11) > 5).long().expand(2, 11)}


def both() -> dict[str, Tensor]:
    return text() | image()


def patches() -> dict[str, Tensor]:
    """One image of 4 x 4 patches for each sequence, two frames each, merged two by two."""
    ids = torch.cat([torch.full((2, 1), 56), torch.full((2, 4), IMAGE_TOKEN), TOKENS], 1)
    return {
        "input_ids": ids,
        "pixel_values": noise(32, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).long(),
    }


def vision_language(
    model: str,
    config: str,
    inputs: Callable[[], dict[str, Tensor]],
    sub_configs: dict[str, tuple[str, dict[str, Any]]],
    **sizes: Any,
) -> Architecture:
    return Architecture("vision-language", model, config, sizes, inputs, sub_configs=sub_configs)


ARCHITECTURES |= {
    "clip": vision_language(
        "CLIPModel",
        "CLIPConfig",
        both,
        {"text_config": ("CLIPTextConfig", WORDS), "vision_config": ("CLIPVisionConfig", TOWER)},
        projection_dim=8,
    ),
    "siglip": vision_language(
        "SiglipModel",
        "SiglipConfig",
        both,
        {"text_config": ("SiglipTextConfig", WORDS), "vision_config": ("SiglipVisionConfig", TOWER)},
    ),
    "llava": vision_language(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        captioned(4),
        {"text_config": ("LlamaConfig", LANGUAGE), "vision_config": ("CLIPVisionConfig", TOWER)},
        image_token_id=IMAGE_TOKEN,
    ),
    "paligemma": vision_language(
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        prefixed,
        {
            "text_config": ("GemmaConfig", LANGUAGE),
            "vision_config": ("SiglipVisionConfig", TOWER | {"projection_dim": 16}),
        },
        image_token_id=IMAGE_TOKEN,
        projection_dim=16,
    ),
    "qwen2-vl": vision_language(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        patches,
        {
            "text_config": (
                "Qwen2VLTextConfig",
                LANGUAGE | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}},
            ),
            "vision_config": (
                "Qwen2VLVisionConfig",
                {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4},
            ),
        },
        image_token_id=IMAGE_TOKEN,
        vision_start_token_id=56,
        vision_end_token_id=57,
        video_token_id=59,
    ),
    "idefics3": vision_language(
        "Idefics3ForConditionalGeneration",
        "Idefics3Config",
        lambda: captioned(1)() | {"pixel_values": noise(2, 1, 3, 8, 8)},
        {"text_config": ("LlamaConfig", LANGUAGE), "vision_config": ("Idefics3VisionConfig", TOWER)},
        image_token_id=IMAGE_TOKEN,
        scale_factor=2,
    ),
}


def made(architecture: Architecture, **changes: Any) -> Any:
    """The model with weights that make its attention far from uniform."""
    import transformers

    def configured(name: str, sizes: dict[str, Any]) -> Any:
        return getattr(transformers, name)(**sizes)

    subs = {name: configured(*sub) for name, sub in architecture.sub_configs.items()}
    config = configured(architecture.config, architecture.sizes | subs | changes)
    model = getattr(transformers, architecture.model)(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            wide = parameter.dim() > 1
            values = torch.randn(parameter.shape, generator=generator) * (0.3 if wide else 0.1)
            parameter.copy_(values + (0.0 if wide else 0.7))
    return model


OWN_ATTENTION = {
    "bloom": decoder("BloomForCausalLM", "BloomConfig", n_layer=2, n_head=4),
    "mpt": Architecture(
        "decoder",
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": VOCABULARY, "d_model": 16, "n_layers": 2, "n_heads": 4, "max_seq_len": 40},
        text,
    ),
    "deberta-v2": encoder("DebertaV2Model", "DebertaV2Config", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "falcon": Architecture(
        "decoder",
        "FalconForCausalLM",
        "FalconConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2},
        text,
    ),
    "gptj": decoder("GPTJForCausalLM", "GPTJConfig", **GPT2, rotary_dim=4),
    "gpt-neo": decoder(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
    ),
}

# Some of their attention goes through the interface, some does not: vision and text, decoder and encoder.
PARTLY_OWN = {
    "bigbird-pegasus": translator(
        "BigBirdPegasusForConditionalGeneration", "BigBirdPegasusConfig", **BART, attention_type="original_full"
    ),
    "git": vision_language(
        "GitForCausalLM",
        "GitConfig",
        both,
        {"vision_config": ("GitVisionConfig", TOWER)},
        **SIZES,
        vocab_size=VOCABULARY,
        max_position_embeddings=40,
    ),
}


def main_output(out: Any) -> Tensor:
    """The logits, or the states of a model without a head."""
    found = next(out[name] for name in ("logits", "logits_per_image", "last_hidden_state") if name in out)
    assert isinstance(found, Tensor)
    return found


def run(model: Any, kind: str, inputs: dict[str, Any], rows: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of some rows, and the gradients that a fixed slope gives the parameters."""
    model.set_attn_implementation(kind)
    model.zero_grad()
    out = main_output(model(**inputs))
    out = out if rows is None else out[rows]
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    (out * slope).sum().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def matrices(out: Any) -> dict[str, Tensor]:
    """The attention matrices of an output of transformers, by the name of their field and index."""
    found = {}
    for name, given in out.items():
        if hasattr(given, "items"):
            found |= {f"{name}.{place}": matrix for place, matrix in matrices(given).items()}
        elif "attentions" in name and given is not None:
            found |= {f"{name}.{i}": matrix for i, matrix in enumerate(given) if matrix is not None}
    return found

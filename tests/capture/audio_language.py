"""Tiny models of transformers that read text and sound, with random weights, and inputs with a recording for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

AUDIO, IMAGE, VIDEO = 90, 91, 92
TEXT: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Encoders of Whisper's kind name their sizes in two ways.
WHISPER: dict[str, Any] = {
    "num_mel_bins": 8,
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "max_source_positions": 20,
}
ENCODER: dict[str, Any] = {
    "num_mel_bins": 8,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_source_positions": 20,
}
VISION: dict[str, Any] = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


@dataclass
class Case:
    """A model, the number of audio tokens of its recording of 0.4 s, and the seconds of each."""

    build: Callable[[Any], nn.Module]
    tokens: int
    seconds: float
    encode: Callable[[], dict[str, Tensor]]
    # For each sequence of states that its audio tower attends to, their number and the seconds of each.
    states: list[tuple[int, float]] = field(default_factory=list)

    def inputs(self) -> dict[str, Tensor]:
        """Two words, the recording, and three words."""
        ids = torch.tensor([[5, 6, *[AUDIO] * self.tokens, 7, 8, 9]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **self.encode()}


def encode_masked(name: str) -> Callable[[], dict[str, Tensor]]:
    """Features (1, mel bands, 40 frames of 10 ms) and a mask of this name."""
    return lambda: {"input_features": noise(1, 8, 40), name: torch.ones(1, 40, dtype=torch.long)}


def build_qwen2_audio(tf: Any) -> nn.Module:
    return tf.Qwen2AudioForConditionalGeneration(
        tf.Qwen2AudioConfig(
            audio_config=tf.Qwen2AudioEncoderConfig(**WHISPER),
            text_config=tf.Qwen2Config(**TEXT),
            audio_token_index=AUDIO,
        )
    )


def build_qwen2_5_omni(tf: Any) -> nn.Module:
    from transformers.models.qwen2_5_omni import configuration_qwen2_5_omni as configs

    return tf.Qwen2_5OmniThinkerForConditionalGeneration(
        configs.Qwen2_5OmniThinkerConfig(
            audio_config=WHISPER | {"output_dim": 32, "n_window": 10},
            vision_config=VISION | {"intermediate_size": 32, "out_hidden_size": 32, "fullatt_block_indexes": [0]},
            text_config=TEXT | {"rope_parameters": MROPE},
            audio_token_index=AUDIO,
            image_token_index=IMAGE,
            video_token_index=VIDEO,
            vision_start_token_id=93,
        )
    )


def build_qwen3_omni(tf: Any) -> nn.Module:
    from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe as configs

    return tf.Qwen3OmniMoeThinkerForConditionalGeneration(
        configs.Qwen3OmniMoeThinkerConfig(
            audio_config=WHISPER | {"output_dim": 32, "n_window": 50, "downsample_hidden_size": 8},
            vision_config=VISION
            | {
                "intermediate_size": 32,
                "out_hidden_size": 32,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            text_config=TEXT
            | {"rope_parameters": MROPE, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
            audio_token_id=AUDIO,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=93,
        )
    )


def build_voxtral(tf: Any) -> nn.Module:
    return tf.VoxtralForConditionalGeneration(
        tf.VoxtralConfig(
            audio_config=tf.VoxtralEncoderConfig(**ENCODER | {"intermediate_size": 128}),
            text_config=tf.LlamaConfig(**TEXT),
            audio_token_id=AUDIO,
        )
    )


def build_audio_flamingo(tf: Any) -> nn.Module:
    return tf.AudioFlamingo3ForConditionalGeneration(
        tf.AudioFlamingo3Config(
            audio_config=tf.AudioFlamingo3EncoderConfig(**ENCODER),
            text_config=tf.Qwen2Config(**TEXT),
            audio_token_id=AUDIO,
        )
    )


def build_music_flamingo(tf: Any) -> nn.Module:
    return tf.MusicFlamingoForConditionalGeneration(
        tf.MusicFlamingoConfig(
            audio_config=tf.AudioFlamingo3EncoderConfig(**ENCODER),
            text_config=tf.Qwen2Config(**TEXT),
            audio_token_id=AUDIO,
            audio_bos_token_id=80,
            audio_eos_token_id=81,
        )
    )


def build_glm_asr(tf: Any) -> nn.Module:
    encoder = {**ENCODER, "intermediate_size": 128, "max_position_embeddings": 20}
    encoder.pop("max_source_positions")
    return tf.GlmAsrForConditionalGeneration(
        tf.GlmAsrConfig(
            audio_config=tf.GlmAsrEncoderConfig(**encoder), text_config=tf.LlamaConfig(**TEXT), audio_token_id=AUDIO
        )
    )


def build_granite(tf: Any) -> nn.Module:
    encoder = {
        "input_dim": 16,
        "num_layers": 2,
        "hidden_dim": 32,
        "num_heads": 2,
        "dim_head": 16,
        "output_dim": 8,
        "context_size": 10,
        "max_pos_emb": 16,
    }
    projector = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "encoder_hidden_size": 32,
    }
    return tf.GraniteSpeechForConditionalGeneration(
        tf.GraniteSpeechConfig(
            text_config=tf.GraniteConfig(**TEXT),
            encoder_config=tf.GraniteSpeechEncoderConfig(**encoder),
            projector_config=tf.Blip2QFormerConfig(**projector),
            audio_token_index=AUDIO,
            has_lora_adapter=False,
        )
    )


def build_qwen3_asr(tf: Any) -> nn.Module:
    return tf.Qwen3ASRForConditionalGeneration(
        tf.Qwen3ASRConfig(
            audio_config=tf.Qwen3ASREncoderConfig(
                **{k: v for k, v in WHISPER.items() if k != "max_source_positions"},
                output_dim=32,
                downsample_hidden_size=8,
            ),
            text_config=tf.Qwen3Config(**TEXT),
            audio_token_id=AUDIO,
        )
    )


def build_gemma3n(tf: Any) -> nn.Module:
    audio = {
        "hidden_size": 32,
        "input_feat_size": 8,
        "conf_num_attention_heads": 2,
        "conf_num_hidden_layers": 1,
        "conf_attention_chunk_size": 6,
        "conf_attention_context_left": 4,
        "conf_attention_context_right": 0,
        "conf_reduction_factor": 4,
        "conf_conv_kernel_size": 3,
        "sscp_conv_channel_size": [8, 4],
        "vocab_offset": 104,
        "vocab_size": 4,
    }
    text = TEXT | {
        "vocab_size": 108,
        "intermediate_size": [32, 32],
        "vocab_size_per_layer_input": 100,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"],
    }
    config = tf.Gemma3nConfig(
        audio_config=audio,
        text_config=text,
        vision_config={"hidden_size": 32, "vocab_offset": 100, "vocab_size": 4},
        audio_token_id=AUDIO,
        image_token_id=IMAGE,
        audio_soft_tokens_per_image=6,
    )
    # The tower for images is one of timm, which need not be installed.
    make = tf.AutoModel.from_config
    with patch.object(
        tf.AutoModel, "from_config", lambda part: nn.Identity() if "vision" in part.model_type else make(part)
    ):
        return tf.Gemma3nForConditionalGeneration(config)


def build_gemma4(tf: Any) -> nn.Module:
    audio = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "subsampling_conv_channels": [8, 4],
        "conv_kernel_size": 3,
        "output_proj_dims": 32,
    }
    text = TEXT | {
        "vocab_size_per_layer_input": 100,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 16,
    }
    return tf.Gemma4ForConditionalGeneration(
        tf.Gemma4Config(
            audio_config=audio,
            text_config=text,
            vision_config=None,
            audio_token_id=AUDIO,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
        )
    )


def encode_rows(*shape: int) -> Callable[[], dict[str, Tensor]]:
    """Features (1, frames of 10 ms, mel bands) and their mask."""
    return lambda: {"input_features": noise(*shape), "input_features_mask": torch.ones(shape[:2], dtype=torch.bool)}


def encode_padded() -> dict[str, Tensor]:
    """Features of 1 s, of which 0.4 s are heard."""
    return {"input_features": noise(1, 8, 100), "input_features_mask": (torch.arange(100) < 40).long()[None]}


def encode_granite() -> dict[str, Tensor]:
    """Features of 20 ms with two columns each, and a mask of the tokens that they become."""
    return {"input_features": noise(1, 20, 16), "input_features_mask": torch.ones(1, 6, dtype=torch.bool)}


CASES = {
    "qwen2_audio": Case(build_qwen2_audio, 10, 0.04, encode_masked("feature_attention_mask"), [(20, 0.02)]),
    "qwen2_5_omni": Case(build_qwen2_5_omni, 10, 0.04, encode_masked("feature_attention_mask"), [(10, 0.02)] * 2),
    "qwen3_omni": Case(build_qwen3_omni, 5, 1 / 13, encode_masked("feature_attention_mask"), [(5, 1 / 13)]),
    "qwen3_asr": Case(build_qwen3_asr, 5, 1 / 13, encode_padded, [(5, 1 / 13)]),
    "voxtral": Case(build_voxtral, 5, 0.08, lambda: {"input_features": noise(1, 8, 40)}, [(20, 0.02)]),
    "audioflamingo3": Case(build_audio_flamingo, 10, 0.04, encode_masked("input_features_mask"), [(20, 0.02)]),
    "musicflamingo": Case(build_music_flamingo, 10, 0.04, encode_masked("input_features_mask"), [(20, 0.02)]),
    "glmasr": Case(build_glm_asr, 5, 0.08, encode_masked("input_features_mask"), [(20, 0.02)]),
    "gemma3n": Case(build_gemma3n, 6, 0.16, encode_rows(1, 40, 8)),
    "gemma4": Case(build_gemma4, 10, 0.04, encode_rows(1, 40, 8)),
    "granite_speech": Case(build_granite, 6, 0.1, encode_granite),
}

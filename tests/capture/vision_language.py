"""Tiny vision-language models of transformers with random weights, and inputs with images for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

IMAGE, VIDEO = 90, 91
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
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


@dataclass
class Case:
    """A model, its inputs, and the grids of its image: (rows, columns) of each segment of patches."""

    build: Callable[[Any], nn.Module]
    ids: list[int]
    grids: list[tuple[int, int]]
    # The shape of the picture that the marked pixels are in, and where they are, as parts of height and width.
    picture: tuple[int, int] = (16, 16)
    mark: tuple[float, float] = (0.3, 0.6)
    # Whether the model must be told which tokens are images.
    needs_types: bool = False
    # From a picture (3, height, width) to the inputs of the model.
    encode: Callable[[Tensor], dict[str, Any]] = field(default=lambda picture: {"pixel_values": picture[None]})

    def inputs(self, picture: Tensor) -> dict[str, Any]:
        """The inputs of the model with this picture."""
        ids = torch.tensor([self.ids])
        types = {"mm_token_type_ids": (ids == IMAGE).long()} if self.needs_types else {}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **types, **self.encode(picture)}

    def draw(self, marked: bool = False) -> Tensor:
        """A picture (3, height, width) that is brighter to the lower right; marked, with a bright spot."""
        height, width = self.picture
        picture = (torch.linspace(-1, 1, height)[:, None] + torch.linspace(-1, 1, width)).expand(3, -1, -1).clone()
        row, column = self.spot
        if marked:
            picture[:, row : row + 2, column : column + 2] += 2
        return picture

    @property
    def spot(self) -> tuple[int, int]:
        """The pixel at the top left of the spot of 2 x 2 pixels, inside a patch of 4 x 4."""
        row, column = (int(part * size) // 4 * 4 + 1 for part, size in zip(self.mark, self.picture, strict=True))
        return row, column


def build_llava(tf: Any) -> nn.Module:
    vision, text = tf.CLIPVisionConfig(**VISION), tf.LlamaConfig(**TEXT)
    return tf.LlavaForConditionalGeneration(
        tf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1)
    )


def build_llava_next(tf: Any) -> nn.Module:
    vision, text = tf.CLIPVisionConfig(**VISION), tf.LlamaConfig(**TEXT)
    return tf.LlavaNextForConditionalGeneration(
        tf.LlavaNextConfig(
            vision_config=vision,
            text_config=text,
            image_token_index=IMAGE,
            vision_feature_layer=-1,
            image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
        )
    )


def encode_llava_next(picture: Tensor) -> dict[str, Any]:
    """A picture of 24 x 32 pixels: padded to 32 x 32, four tiles; the first tile is the whole picture."""
    whole = nn.functional.interpolate(picture[None], (16, 16), mode="area")
    padded = nn.functional.pad(picture, (0, 0, 4, 4))
    tiles = padded.unfold(1, 16, 16).unfold(2, 16, 16).permute(1, 2, 0, 3, 4).flatten(0, 1)
    return {"pixel_values": torch.cat([whole, tiles])[None], "image_sizes": torch.tensor([[24, 32]])}


def build_qwen2_vl(tf: Any) -> nn.Module:
    text = TEXT | {"rope_parameters": MROPE}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 1}
    return tf.Qwen2VLForConditionalGeneration(
        tf.Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO)
    )


def build_qwen2_5_vl(tf: Any) -> nn.Module:
    text = TEXT | {"rope_parameters": MROPE}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 32,
        "out_hidden_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    return tf.Qwen2_5_VLForConditionalGeneration(
        tf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO)
    )


def build_qwen3_vl(tf: Any) -> nn.Module:
    text = TEXT | {"rope_parameters": MROPE}
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "out_hidden_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    return tf.Qwen3VLForConditionalGeneration(
        tf.Qwen3VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO)
    )


def to_merged_patches(frames: Tensor) -> Tensor:
    """(time, 2, 3, height, width) -> the patches of 4 x 4 pixels that Qwen2-VL reads, in squares of 2 x 2 patches."""
    time, _, _, height, width = frames.shape
    parts = frames.reshape(time, 2, 3, height // 8, 2, 4, width // 8, 2, 4)
    return parts.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(time * height * width // 16, -1)


def encode_qwen(picture: Tensor) -> dict[str, Any]:
    sizes = [[1, picture.shape[1] // 4, picture.shape[2] // 4]]
    patches = to_merged_patches(picture[None, None].expand(1, 2, -1, -1, -1))
    return {"pixel_values": patches, "image_grid_thw": torch.tensor(sizes)}


def build_internvl(tf: Any) -> nn.Module:
    sizes = {"image_size": [16, 16], "patch_size": [4, 4]}
    vision, text = tf.InternVLVisionConfig(**VISION | sizes), tf.Qwen2Config(**TEXT)
    return tf.InternVLForConditionalGeneration(
        tf.InternVLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, vision_feature_layer=-1)
    )


def cut_into_tiles(picture: Tensor) -> Tensor:
    """Tiles of 16 x 16 pixels, row by row, and the whole picture as the last one: (n, 3, 16, 16)."""
    tiles = picture.unfold(1, 16, 16).unfold(2, 16, 16).permute(1, 2, 0, 3, 4).flatten(0, 1)
    whole = nn.functional.interpolate(picture[None], (16, 16), mode="bilinear", antialias=True)
    return torch.cat([tiles, whole])


def build_paligemma(tf: Any) -> nn.Module:
    vision, text = tf.SiglipVisionConfig(**VISION, vision_use_head=False), tf.GemmaConfig(**TEXT)
    return tf.PaliGemmaForConditionalGeneration(
        tf.PaliGemmaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, projection_dim=32)
    )


def build_idefics3(tf: Any) -> nn.Module:
    vision, text = tf.Idefics3VisionConfig(**VISION), tf.LlamaConfig(**TEXT)
    return tf.Idefics3ForConditionalGeneration(
        tf.Idefics3Config(vision_config=vision, text_config=text, image_token_id=IMAGE, scale_factor=2)
    )


def build_smolvlm(tf: Any) -> nn.Module:
    vision, text = tf.SmolVLMVisionConfig(**VISION), tf.LlamaConfig(**TEXT)
    return tf.SmolVLMForConditionalGeneration(
        tf.SmolVLMConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, scale_factor=2)
    )


def build_gemma3(tf: Any) -> nn.Module:
    vision = tf.SiglipVisionConfig(**VISION, vision_use_head=False)
    text = tf.Gemma3TextConfig(**TEXT, sliding_window=64, query_pre_attn_scalar=16)
    model = tf.Gemma3ForConditionalGeneration(
        tf.Gemma3Config(vision_config=vision, text_config=text, image_token_index=IMAGE, mm_tokens_per_image=4)
    )
    # Untrained, it is zero.
    nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    return model


def build_llama4(tf: Any) -> nn.Module:
    vision = tf.Llama4VisionConfig(
        **VISION | {"intermediate_size": 128},
        projector_input_dim=32,
        projector_output_dim=32,
        vision_output_dim=32,
        pixel_shuffle_ratio=0.5,
    )
    text = tf.Llama4TextConfig(
        **TEXT, num_local_experts=2, num_experts_per_tok=1, intermediate_size_mlp=32, attention_chunk_size=64
    )
    return tf.Llama4ForConditionalGeneration(
        tf.Llama4Config(vision_config=vision, text_config=text, image_token_index=IMAGE, boi_token_index=80)
    )


# Two rows of three tiles, then the whole image; each tile after a token of its own, as Idefics3 and Llama 4 have it.
SEPARATED = [1, 5, *(x for i in range(6) for x in (80 + i, *[IMAGE] * 4)), 86, *[IMAGE] * 4, 7, 8]
TILE_GRIDS = [(2, 2)] * 7

CASES = {
    "llava": Case(build_llava, [1, 5, *[IMAGE] * 16, 7, 8], [(4, 4)]),
    "llava-next": Case(
        build_llava_next, [1, *[IMAGE] * (16 + 6 * 9), 7, 8], [(4, 4), (6, 8)], (24, 32), encode=encode_llava_next
    ),
    "qwen2-vl": Case(
        build_qwen2_vl, [1, 5, *[IMAGE] * 6, 7, 8], [(2, 3)], (16, 24), needs_types=True, encode=encode_qwen
    ),
    "qwen2.5-vl": Case(
        build_qwen2_5_vl, [1, 5, *[IMAGE] * 12, 7, 8], [(3, 4)], (24, 32), needs_types=True, encode=encode_qwen
    ),
    "qwen3-vl": Case(
        build_qwen3_vl, [1, 5, *[IMAGE] * 6, 7, 8], [(2, 3)], (16, 24), needs_types=True, encode=encode_qwen
    ),
    "internvl": Case(
        build_internvl,
        [1, 5, *[IMAGE] * 28, 7, 8],
        TILE_GRIDS,
        (32, 48),
        encode=lambda picture: {"pixel_values": cut_into_tiles(picture)},
    ),
    # Without token types, its eager attention is causal and the others are not.
    "paligemma": Case(
        build_paligemma,
        [*[IMAGE] * 16, 1, 7, 8],
        [(4, 4)],
        encode=lambda picture: {"pixel_values": picture[None], "token_type_ids": torch.zeros(1, 19, dtype=torch.long)},
    ),
    "idefics3": Case(
        build_idefics3,
        SEPARATED,
        TILE_GRIDS,
        (32, 48),
        encode=lambda picture: {"pixel_values": cut_into_tiles(picture)[None]},
    ),
    "smolvlm": Case(
        build_smolvlm,
        SEPARATED,
        TILE_GRIDS,
        (32, 48),
        encode=lambda picture: {"pixel_values": cut_into_tiles(picture)[None]},
    ),
    "gemma3": Case(build_gemma3, [1, 5, *[IMAGE] * 4, 7, 8], [(2, 2)]),
    "llama4": Case(
        build_llama4,
        SEPARATED,
        TILE_GRIDS,
        (32, 48),
        encode=lambda picture: {"pixel_values": cut_into_tiles(picture)},
    ),
}

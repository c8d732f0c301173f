"""Tiny random denoisers and pipelines of diffusers, made from their configs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

TEXT = 6
ROPE = {"axes_dims_rope": (4, 6, 6)}
UNET: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "sample_size": 8,
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 2,
    "norm_num_groups": 4,
}


@dataclass
class Case:
    """A denoiser, its latents and text, the grids of its layers, and where the text lies in joint attention."""

    model: Callable[[], nn.Module]
    latents: tuple[int, ...]
    grid: str
    width: int
    run: Callable[[Any, Tensor, Tensor], Any]
    joint: str = ""

    def latent_patch(self, row: int, column: int) -> tuple[Any, ...]:
        """The index of one patch in the latents."""
        if len(self.latents) == 3:
            frames, rows, columns = self.sizes
            return (0, (frames - 1) * rows * columns + row * columns + column)
        patch = self.latents[-1] // self.sizes[2]
        at = (slice(row * patch, (row + 1) * patch), slice(column * patch, (column + 1) * patch))
        if len(self.latents) == 4:
            return (0, slice(None), *at)
        return (
            (0, -1, slice(None), *at)
            if self.grid == "video 3x2x3" and self.joint == "first"
            else (0, slice(None), -1, *at)
        )

    @property
    def sizes(self) -> tuple[int, int, int]:
        numbers = [int(part) for part in self.grid.split(" ")[1].split("x")]
        frames, rows, columns = [1] * (3 - len(numbers)) + numbers
        return frames, rows, columns


def steps_of(value: float) -> Tensor:
    return torch.tensor([value])


def run_flux(model: Any, latents: Tensor, text: Tensor) -> Any:
    ids = torch.stack([torch.zeros(6), torch.arange(6) // 3, torch.arange(6) % 3], -1)
    return model(latents, text, torch.ones(1, 16), steps_of(0.5), ids, torch.zeros(TEXT, 3))


def run_hunyuan(model: Any, latents: Tensor, text: Tensor) -> Any:
    return model(latents, steps_of(1), text, torch.ones(1, TEXT), torch.ones(1, 16))


def run_ltx(model: Any, latents: Tensor, text: Tensor) -> Any:
    return model(latents, text, steps_of(1), torch.ones(1, TEXT), num_frames=3, height=2, width=3)


def run_qwen(model: Any, latents: Tensor, text: Tensor) -> Any:
    return model(latents, text, torch.ones(1, TEXT).bool(), steps_of(0.5), img_shapes=[[(1, 2, 3)]])


def run_unet_xl(model: Any, latents: Tensor, text: Tensor) -> Any:
    added = {"text_embeds": torch.ones(1, 16), "time_ids": torch.ones(1, 6)}
    return model(latents, 1, text, added_cond_kwargs=added)


def build(name: str, **config: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import diffusers

        torch.manual_seed(0)
        model: nn.Module = getattr(diffusers, name)(**config).eval()
        for parameter_name, parameter in model.named_parameters():
            # Large queries, so that attention is not uniform; adaptive norms start at zero.
            if "to_q" in parameter_name and parameter.dim() > 1:
                parameter.data.mul_(4)
            elif parameter.abs().max() == 0:
                nn.init.normal_(parameter, std=0.1)
        return model

    return make


SMALL: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16}
XL: dict[str, Any] = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 40,
    "use_linear_projection": True,
}
PIXART: dict[str, Any] = {"cross_attention_dim": 32, "caption_channels": 16, "sample_size": 8, "num_layers": 2}
CASES = {
    "UNet": Case(build("UNet2DConditionModel", **UNET), (1, 4, 8, 6), "image 8x6", 16, lambda m, x, t: m(x, 1, t)),
    "SDXL": Case(build("UNet2DConditionModel", **UNET, **XL), (1, 4, 8, 6), "image 8x6", 16, run_unet_xl),
    "SD3": Case(
        build(
            "SD3Transformer2DModel",
            **SMALL,
            num_layers=2,
            joint_attention_dim=16,
            caption_projection_dim=32,
            pooled_projection_dim=16,
            in_channels=4,
            out_channels=4,
            pos_embed_max_size=8,
            sample_size=8,
        ),
        (1, 4, 4, 6),
        "image 2x3",
        16,
        lambda m, x, t: m(x, t, torch.ones(1, 16), steps_of(1)),
        "last",
    ),
    "Flux": Case(
        build(
            "FluxTransformer2DModel",
            **SMALL,
            **ROPE,
            num_layers=1,
            num_single_layers=1,
            joint_attention_dim=16,
            pooled_projection_dim=16,
            in_channels=4,
        ),
        (1, 6, 4),
        "image 2x3",
        16,
        run_flux,
        "first",
    ),
    "PixArt": Case(
        build("PixArtTransformer2DModel", **SMALL, **PIXART, norm_num_groups=4),
        (1, 4, 4, 6),
        "image 2x3",
        16,
        lambda m, x, t: m(x, t, steps_of(1), added_cond_kwargs={"resolution": None, "aspect_ratio": None}),
    ),
    "Sana": Case(
        build(
            "SanaTransformer2DModel",
            **SMALL,
            num_layers=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=16,
            in_channels=4,
            out_channels=4,
            sample_size=8,
        ),
        (1, 4, 2, 3),
        "image 2x3",
        16,
        lambda m, x, t: m(x, t, steps_of(1)),
    ),
    "CogVideoX": Case(
        build(
            "CogVideoXTransformer3DModel",
            **SMALL,
            in_channels=4,
            out_channels=4,
            time_embed_dim=8,
            text_embed_dim=16,
            num_layers=2,
            sample_width=6,
            sample_height=4,
            sample_frames=9,
            max_text_seq_length=TEXT,
        ),
        (1, 3, 4, 4, 6),
        "video 3x2x3",
        16,
        lambda m, x, t: m(x, t, steps_of(1)),
        "first",
    ),
    "Wan": Case(
        build(
            "WanTransformer3DModel",
            **SMALL,
            in_channels=4,
            out_channels=4,
            text_dim=16,
            freq_dim=16,
            ffn_dim=32,
            num_layers=2,
        ),
        (1, 4, 3, 4, 6),
        "video 3x2x3",
        16,
        lambda m, x, t: m(x, steps_of(1), t),
    ),
    "LTX": Case(
        build(
            "LTXVideoTransformer3DModel",
            **SMALL,
            in_channels=4,
            out_channels=4,
            cross_attention_dim=32,
            num_layers=2,
            caption_channels=16,
        ),
        (1, 18, 4),
        "video 3x2x3",
        16,
        run_ltx,
    ),
    "HunyuanVideo": Case(
        build(
            "HunyuanVideoTransformer3DModel",
            **SMALL,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            text_embed_dim=16,
            pooled_projection_dim=16,
            guidance_embeds=False,
            rope_axes_dim=(4, 6, 6),
        ),
        (1, 4, 3, 4, 6),
        "video 3x2x3",
        16,
        run_hunyuan,
        "last",
    ),
    "QwenImage": Case(
        build(
            "QwenImageTransformer2DModel",
            **SMALL,
            **ROPE,
            num_layers=2,
            joint_attention_dim=16,
            in_channels=4,
            out_channels=4,
        ),
        (1, 6, 4),
        "image 2x3",
        16,
        run_qwen,
        "first",
    ),
}


WORDS = ["<s>", "<pad>", "</s>", "a", "red", "shoe", "on", "the", "table", "blurry"]


def make_tokenizer(length: int = 8) -> Any:
    """A tokenizer of whole words, which puts `</s>` behind them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=length
    )


def make_clip(with_projection: bool = False) -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        projection_dim=8,
        eos_token_id=2,
        pad_token_id=1,
        bos_token_id=0,
    )
    return (CLIPTextModelWithProjection if with_projection else CLIPTextModel)(config).eval()


def make_t5(multilingual: bool = False) -> nn.Module:
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": len(WORDS), "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1}
    sizes |= {"num_heads": 2, "pad_token_id": 1, "eos_token_id": 2}
    if multilingual:
        return UMT5EncoderModel(UMT5Config(**sizes)).eval()
    return T5EncoderModel(T5Config(**sizes)).eval()


def make_gemma() -> nn.Module:
    from transformers import Gemma2Config, Gemma2Model

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=1,
        eos_token_id=2,
        bos_token_id=0,
    )
    return Gemma2Model(config).eval()


def make_vae(channels: int = 4) -> nn.Module:
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=(4, 4),
        norm_num_groups=2,
        latent_channels=channels,
        sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        shift_factor=0.0,
        scaling_factor=1.0,
    ).eval()


def make_pipeline(family: str) -> Any:
    """A pipeline of tiny random models."""
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    flow, steps = diffusers.FlowMatchEulerDiscreteScheduler, diffusers.DDIMScheduler
    nothing = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    if family == "SD":
        unet = build("UNet2DConditionModel", **UNET | {"cross_attention_dim": 8})()
        parts = {"vae": make_vae(), "text_encoder": make_clip(), "tokenizer": make_tokenizer(), "unet": unet}
        return quiet(
            diffusers.StableDiffusionPipeline(**parts, scheduler=steps(steps_offset=1, clip_sample=False), **nothing)
        )
    if family == "SDXL":
        unet = build("UNet2DConditionModel", **UNET, **XL | {"projection_class_embeddings_input_dim": 32})()
        parts = {"vae": make_vae(), "text_encoder": make_clip(), "tokenizer": make_tokenizer(), "unet": unet}
        parts |= {"text_encoder_2": make_clip(True), "tokenizer_2": make_tokenizer()}
        return quiet(
            diffusers.StableDiffusionXLPipeline(
                **parts, scheduler=steps(steps_offset=1, clip_sample=False), add_watermarker=False
            )
        )
    if family == "SD3":
        parts = {"transformer": CASES["SD3"].model(), "vae": make_vae(), "text_encoder_3": make_t5()}
        parts |= {"text_encoder": make_clip(True), "text_encoder_2": make_clip(True), "tokenizer": make_tokenizer()}
        parts |= {"tokenizer_2": make_tokenizer(), "tokenizer_3": make_tokenizer(), "scheduler": flow()}
        return quiet(diffusers.StableDiffusion3Pipeline(**parts))
    if family == "Flux":
        sizes: dict[str, Any] = {**SMALL, **ROPE, "num_layers": 1, "num_single_layers": 1, "in_channels": 16}
        transformer = build("FluxTransformer2DModel", **sizes, joint_attention_dim=16, pooled_projection_dim=8)()
        parts = {"transformer": transformer, "vae": make_vae(), "scheduler": flow()}
        parts |= {"text_encoder": make_clip(), "text_encoder_2": make_t5()}
        return quiet(diffusers.FluxPipeline(**parts, tokenizer=make_tokenizer(), tokenizer_2=make_tokenizer()))
    if family == "PixArt":
        parts = {
            "transformer": CASES["PixArt"].model(),
            "vae": make_vae(),
            "scheduler": steps(steps_offset=1, clip_sample=False),
        }
        return quiet(diffusers.PixArtSigmaPipeline(**parts, text_encoder=make_t5(), tokenizer=make_tokenizer()))
    if family == "Wan":
        vae = diffusers.AutoencoderKLWan(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        )
        parts = {"transformer": CASES["Wan"].model(), "vae": vae.eval(), "scheduler": flow()}
        return quiet(diffusers.WanPipeline(**parts, text_encoder=make_t5(True), tokenizer=make_tokenizer()))
    assert family == "CogVideoX"
    vae = diffusers.AutoencoderKLCogVideoX(
        block_out_channels=(4, 4, 4, 4),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        temporal_compression_ratio=4,
    )
    parts = {"transformer": CASES["CogVideoX"].model(), "vae": vae.eval(), "text_encoder": make_t5()}
    parts |= {"tokenizer": make_tokenizer(), "scheduler": diffusers.CogVideoXDDIMScheduler()}
    return quiet(diffusers.CogVideoXPipeline(**parts))


def quiet(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline

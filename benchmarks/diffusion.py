"""The cost of watching a diffusion pipeline: 50 denoising steps, with the maps of every word of the prompt kept.

The UNet has the sizes of Stable Diffusion XL (2.6 billion parameters, 140 attention layers, 128 x 128 latents), with
random weights; its text encoders have one layer each, and nothing is decoded. The pipeline is guided: the UNet reads a
batch of two, the negative prompt and the prompt of 9 words, which are 11 of 77 tokens with the first and the last one.
Contestants: the plain run; `foci.watch` with `foci.Keep(keys="text")`, which keeps the exact weights of all patches,
heads, layers and steps on the tokens of the prompt; and an attention processor that knows which half and which tokens
these are, computes the softmax itself and copies the same numbers. On a CPU the UNet has the same 140 layers, of 2 to 8
heads and 16 x 16 latents: what it costs there is mostly the time of Python.

The gate: these numbers equal those of the attention processor, and the output that of the plain run.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from gates import GateError
from table import Options, Table, dtype_name, parse_options
from timing import format_error, free_memory, log
from torch import Tensor

import foci

COLUMNS = (
    "case",
    "steps",
    "dtype",
    "contestant",
    "ms",
    "spread",
    "rounds",
    "times",
    "mib",
    "times_mib",
    "kept",
    "note",
)
ROUNDS, ALLOWED = 3, 2e-2
PROMPT = "a photo of a red shoe on a wooden table"
WORDS, POSITIONS = len(PROMPT.split()) + 2, 77
COMMON: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "addition_embed_type": "text_time",
    "use_linear_projection": True,
}
LEVELS: dict[str, Any] = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
}
SDXL: dict[str, Any] = (
    COMMON
    | LEVELS
    | {
        "sample_size": 128,
        "block_out_channels": (320, 640, 1280),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 1280 + 6 * 256,
    }
)
SMALL: dict[str, Any] = (
    COMMON
    | LEVELS
    | {
        "sample_size": 16,
        "block_out_channels": (32, 64, 128),
        "attention_head_dim": (2, 4, 8),
        "cross_attention_dim": 64,
        "norm_num_groups": 8,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 40 + 6 * 8,
    }
)
TINY: dict[str, Any] = COMMON | {
    "sample_size": 16,
    "block_out_channels": (32, 64),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": 2,
    "cross_attention_dim": 64,
    "norm_num_groups": 8,
    "layers_per_block": 1,
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 40 + 6 * 8,
}
# The widths of the two text encoders, by the sum that the UNet reads.
TEXT_WIDTHS = {2048: (768, 1280), 64: (24, 40)}


class StoringProcessor:
    """An attention processor of diffusers that computes the softmax itself and copies the prompt's weights on words."""

    def __init__(self, stored: list[Tensor]) -> None:
        self.stored = stored

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **unused: Any
    ) -> Tensor:
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        batch, width = hidden_states.shape[0], attn.to_q.out_features // attn.heads
        q, k, v = (
            linear(x).view(batch, -1, attn.heads, width).transpose(1, 2)
            for linear, x in ((attn.to_q, hidden_states), (attn.to_k, context), (attn.to_v, context))
        )
        if encoder_hidden_states is None:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            weights = (q @ k.mT * width**-0.5).float().softmax(-1)
            self.stored.append(weights[batch // 2 :, ..., :WORDS].to(half_or_single(q.dtype)).cpu())
            out = weights.to(v.dtype) @ v
        joined = out.transpose(1, 2).flatten(2)
        projected: Tensor = attn.to_out[0](joined)
        return projected


def main() -> int:
    """Run the benchmark; the exit status is 1 if foci failed a gate."""
    options = parse_options("diffusion", __doc__ or "", (torch.float32,))
    table = Table(options.device, COLUMNS, options.path)
    for dtype in options.dtypes:
        case, config, steps = choose_case(options)
        about = {"case": case, "steps": steps, "dtype": dtype_name(dtype)}
        try:
            measure(build(config, options.device, dtype), about, options, table)
        except GateError as error:
            table.add(**about, contestant="foci watched", times=None, note=f"GATE FAILED: {error}")
        except Exception as error:  # noqa: BLE001 - the table says what failed
            table.add(**about, contestant="foci watched", times=None, note=format_error(error))
    table.print_table("milliseconds", ("case", "dtype"), "ms", {"times": ("foci watched", "times")})
    table.print_failures()
    table.print_footer()
    return int(table.has_failed_gate())


def choose_case(options: Options) -> tuple[str, dict[str, Any], int]:
    """The name of the case, the config of the UNet, and the steps."""
    if options.quick:
        return "unet, tiny", TINY, 3
    if options.device.type == "cpu":
        return "unet of sdxl's layers, small", SMALL, 25
    return "unet of sdxl", SDXL, 50


def build(config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """A pipeline of Stable Diffusion XL, with large queries in its UNet, so that its attention is not uniform."""
    import diffusers
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            unet = diffusers.UNet2DConditionModel(**config).eval()
            first, second = (text_config(width) for width in TEXT_WIDTHS[config["cross_attention_dim"]])
            encoders = CLIPTextModel(first).eval(), CLIPTextModelWithProjection(second).eval()
            vae = diffusers.AutoencoderKL(block_out_channels=(4,) * 4, norm_num_groups=2, **VAE_BLOCKS).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    for name, parameter in unet.named_parameters():
        if "to_q.weight" in name:
            parameter.data.mul_(4)
    scheduler = diffusers.DDIMScheduler(steps_offset=1, clip_sample=False)
    pipeline = diffusers.StableDiffusionXLPipeline(
        vae, *encoders, make_tokenizer(), make_tokenizer(), unet, scheduler, add_watermarker=False
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


VAE_BLOCKS = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}


def text_config(width: int) -> Any:
    from transformers import CLIPTextConfig

    return CLIPTextConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
        projection_dim=width,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
    )


def make_tokenizer() -> Any:
    """A tokenizer of whole words, which pads to the length of CLIP."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "<pad>", "</s>", *dict.fromkeys(PROMPT.split())]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=POSITIONS
    )


def half_or_single(dtype: torch.dtype) -> torch.dtype:
    return torch.float16 if dtype.itemsize == 2 else torch.float32


def denoise(pipe: Any, steps: int) -> Tensor:
    latents: Tensor = pipe(
        PROMPT,
        num_inference_steps=steps,
        guidance_scale=5.0,
        height=pipe.unet.config.sample_size * pipe.vae_scale_factor,
        width=pipe.unet.config.sample_size * pipe.vae_scale_factor,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    ).images
    return latents


def watch(pipe: Any, steps: int) -> tuple[Tensor, foci.Record]:
    with foci.watch(pipe, keep=foci.Keep(keys="text"), limit=2**35) as seen:
        out = denoise(pipe, steps)
    return out, seen


def store(pipe: Any, steps: int) -> tuple[Tensor, list[Tensor]]:
    stored: list[Tensor] = []
    before = dict(pipe.unet.attn_processors)
    pipe.unet.set_attn_processor(StoringProcessor(stored))
    try:
        return denoise(pipe, steps), stored
    finally:
        pipe.unet.set_attn_processor(before)


def check(pipe: Any) -> None:
    """Compare two steps with the plain run, and the maps with those of the attention processor."""
    plain, (watched, seen), (_, stored) = denoise(pipe, 2), watch(pipe, 2), store(pipe, 2)
    check_error("output", watched, plain)
    layers = list(seen.layers.values())
    if len(stored) != 2 * len(layers):
        raise GateError(f"{len(layers)} layers were recorded in 2 steps, not {len(stored)} matrices")
    for number, matrix in enumerate(stored):
        layer = layers[number % len(layers)]
        check_error(layer.name, layer.at(number // len(layers)).columns(range(WORDS)), matrix)


def check_error(name: str, found: Tensor, truth: Tensor) -> None:
    error = float((found.float().cpu() - truth.float().cpu()).abs().mean() / truth.float().abs().mean().cpu())
    # Written this way, NaN fails.
    if not error <= ALLOWED:
        raise GateError(f"{name} is off by {error:.2e} on average, allowed {ALLOWED:.2e}")


def measure(pipe: Any, about: dict[str, Any], options: Options, table: Table) -> None:
    """Run all contestants in turns and add a row for each; memory is the peak of a run, the weights included."""
    check(pipe)
    log("gates passed")
    runs: dict[str, Callable[[], Any]] = {
        "plain": lambda: denoise(pipe, about["steps"]),
        "foci watched": lambda: watch(pipe, about["steps"]),
        "attention processor": lambda: store(pipe, about["steps"]),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    peaks, kept = dict.fromkeys(runs, 0.0), dict.fromkeys(runs, 0.0)
    for number in range(1 if options.quick else ROUNDS):
        # A round takes long: the time limit, too, ends the rounds.
        if number and options.out_of_time:
            break
        for name, run in runs.items():
            free_memory()
            elapsed, peak, kept[name] = run_once(run, options.device)
            times[name].append(elapsed)
            peaks[name] = max(peaks[name], peak)
            log(f"  round {number}: {name:<20} {elapsed:9.0f} ms {peak:8.0f} MiB, {kept[name]:8.0f} MiB on the host")
    base = statistics.median(times["plain"])
    for name in runs:
        ms = statistics.median(times[name])
        spread = max(times[name]) - min(times[name])
        ratio = peaks[name] / peaks["plain"] if peaks["plain"] else None
        table.add(
            **about,
            contestant=name,
            ms=ms,
            spread=spread,
            rounds=len(times[name]),
            times=ms / base,
            mib=peaks[name],
            times_mib=ratio,
            kept=kept[name],
        )


def run_once(run: Callable[[], Any], device: torch.device) -> tuple[float, float, float]:
    """Milliseconds from an idle device to an idle device, the peak of its memory, and what was kept, in MiB."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    elapsed = (time.perf_counter() - start) * 1e3
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else 0.0
    kept = result[1] if isinstance(result, tuple) else None
    size = sum(t.nbytes for t in kept) if isinstance(kept, list) else getattr(kept, "nbytes", 0)
    return elapsed, peak, size / 2**20


if __name__ == "__main__":
    sys.exit(main())

"""The cost of watching a diffusion model: 50 denoising steps of a UNet, with the maps of every word kept.

The UNet of diffusers has the sizes of Stable Diffusion XL (2.6 billion parameters, 140 attention layers, 128 x 128
latents, guided: a batch of two), with random weights. Contestants: the plain run; `foci.watch` with
`foci.Keep(keys="text")`, which keeps the exact weights of all patches, heads, layers and steps on the 12 tokens of a
prompt; and the usual attention processor, which computes the softmax itself and copies the same numbers.

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
WORDS, POSITIONS, ROUNDS, ALLOWED = 12, 77, 3, 2e-2
SDXL: dict[str, Any] = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
}
TINY: dict[str, Any] = {
    "sample_size": 16,
    "block_out_channels": (32, 64),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": 2,
    "cross_attention_dim": 32,
    "norm_num_groups": 8,
    "layers_per_block": 1,
}


class StoringProcessor:
    """An attention processor of diffusers that computes the softmax itself and copies the weights on the words."""

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
            self.stored.append(weights[..., :WORDS].to(torch.float16).cpu())
            out = weights.to(v.dtype) @ v
        joined = out.transpose(1, 2).flatten(2)
        projected: Tensor = attn.to_out[0](joined)
        return projected


def main() -> int:
    """Run the benchmark; the exit status is 1 if foci failed a gate."""
    options = parse_options("diffusion", __doc__ or "", (torch.bfloat16,))
    table = Table(options.device, COLUMNS, options.path)
    for dtype in options.dtypes:
        case, steps = ("unet, tiny", 3) if options.quick else ("unet of sdxl", 50)
        about = {"case": case, "steps": steps, "dtype": dtype_name(dtype)}
        try:
            unet = build(options, dtype)
            measure(unet, inputs(unet), about, options, table)
        except GateError as error:
            table.add(**about, contestant="foci watched", times=None, note=f"GATE FAILED: {error}")
        except Exception as error:  # noqa: BLE001 - the table says what failed
            table.add(**about, contestant="foci watched", times=None, note=format_error(error))
    table.print_table("milliseconds", ("case", "dtype"), "ms", {"times": ("foci watched", "times")})
    table.print_failures()
    table.print_footer()
    return int(table.has_failed_gate())


def build(options: Options, dtype: torch.dtype) -> Any:
    """The UNet, with large queries, so that its attention is not uniform."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(options.device):
            unet = UNet2DConditionModel(in_channels=4, out_channels=4, **(TINY if options.quick else SDXL)).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    for name, parameter in unet.named_parameters():
        if "to_q.weight" in name:
            parameter.data.mul_(4)
    return unet


def inputs(unet: Any) -> tuple[Tensor, Tensor]:
    side = unet.config.sample_size
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 4, side, side, generator=generator).to(unet.device, unet.dtype)
    return latents, torch.randn(2, POSITIONS, unet.config.cross_attention_dim, generator=generator).to(latents)


@torch.no_grad()
def denoise(unet: Any, given: tuple[Tensor, Tensor], steps: int) -> Tensor:
    latents, text = given
    for step in range(steps):
        latents = 0.9 * latents - 0.1 * unet(latents, steps - step, text).sample
    return latents


def watch(unet: Any, given: tuple[Tensor, Tensor], steps: int) -> tuple[Tensor, foci.Record]:
    words = [f" word{number}" if number < WORDS else "" for number in range(POSITIONS)]
    labels = {"context": foci.Labels.tokens([words] * 2)}
    with foci.watch(unet, keep=foci.Keep(keys="text"), labels=labels, limit=2**35) as seen:
        out = denoise(unet, given, steps)
    return out, seen


def store(unet: Any, given: tuple[Tensor, Tensor], steps: int) -> tuple[Tensor, list[Tensor]]:
    stored: list[Tensor] = []
    before = dict(unet.attn_processors)
    unet.set_attn_processor(StoringProcessor(stored))
    try:
        return denoise(unet, given, steps), stored
    finally:
        unet.set_attn_processor(before)


def check(unet: Any, given: tuple[Tensor, Tensor]) -> None:
    """Compare one step with the plain run, and the maps with those of the attention processor."""
    plain, (watched, seen), (_, stored) = denoise(unet, given, 1), watch(unet, given, 1), store(unet, given, 1)
    check_error("output", watched, plain)
    if len(stored) != len(seen.layers):
        raise GateError(f"{len(seen.layers)} layers were recorded, not {len(stored)}")
    for layer, matrix in zip(seen.layers.values(), stored, strict=True):
        check_error(layer.name, layer.columns(range(WORDS)), matrix)


def check_error(name: str, found: Tensor, truth: Tensor) -> None:
    error = float((found.float().cpu() - truth.float().cpu()).abs().mean() / truth.float().abs().mean().cpu())
    # Written this way, NaN fails.
    if not error <= ALLOWED:
        raise GateError(f"{name} is off by {error:.2e} on average, allowed {ALLOWED:.2e}")


def measure(unet: Any, given: tuple[Tensor, Tensor], about: dict[str, Any], options: Options, table: Table) -> None:
    """Run all contestants in turns and add a row for each; memory is the peak of a run, the weights included."""
    check(unet, given)
    log("gates passed")
    runs: dict[str, Callable[[], Any]] = {
        "plain": lambda: denoise(unet, given, about["steps"]),
        "foci watched": lambda: watch(unet, given, about["steps"]),
        "attention processor": lambda: store(unet, given, about["steps"]),
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

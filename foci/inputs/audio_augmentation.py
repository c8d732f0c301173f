"""Random changes of samples and spectrograms that keep what is said: data augmentation for speech.

All randomness comes from the given generator, so a run can be repeated.

N samples, F frames, M bands.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.inputs.audio import resample


def sample_uniform(low: float, high: float, generator: torch.Generator | None = None) -> float:
    """Uniform sample in [low, high)."""
    return low + (high - low) * torch.rand((), generator=generator).item()


def sample_bool(probability: float, generator: torch.Generator | None = None) -> bool:
    """Returns True with the given probability."""
    return torch.rand((), generator=generator).item() < probability


def change_speed(samples: Tensor, limit: float, generator: torch.Generator | None = None) -> Tensor:
    """Plays the sound faster or slower by up to a factor of `1 + limit`; speed and pitch change together."""
    log_limit = math.log1p(limit)
    return resample(samples, math.exp(sample_uniform(-log_limit, log_limit, generator))) if limit else samples


def add_noise(samples: Tensor, decibels: tuple[float, float], generator: torch.Generator | None = None) -> Tensor:
    """Adds white or pink noise, quieter than the sound by a number of decibels from the given range."""
    noise = torch.randn(len(samples), generator=generator)
    if sample_bool(0.5, generator):
        noise = to_pink_noise(noise)
    attenuation = float(10.0 ** (-sample_uniform(*decibels, generator) / 20.0))
    level = samples.square().mean().sqrt() / noise.square().mean().sqrt().clamp(min=1e-9)
    return samples + noise * level * attenuation


def to_pink_noise(white: Tensor) -> Tensor:
    """Filters white noise to pink noise: equal energy in every octave."""
    spectrum = torch.fft.rfft(white)
    pink: Tensor = torch.fft.irfft(spectrum / torch.arange(1, len(spectrum) + 1).sqrt(), len(white))
    return pink


def pad_or_trim(samples: Tensor, limit: int, generator: torch.Generator | None = None) -> Tensor:
    """Adds or cuts up to `limit` samples of silence at either end."""
    before, after = (round(sample_uniform(-limit, limit, generator)) for _ in range(2))
    # At most an eighth of the sound at either end, so that speech is not cut.
    cut = len(samples) // 8
    return F.pad(samples, (max(before, -cut), max(after, -cut)))


def stretch_time(frames: Tensor, limit: float, generator: torch.Generator | None = None) -> Tensor:
    """Stretches or squeezes frames in time by up to a factor of `1 + limit`, at the same pitch: (F, M) -> (F', M)."""
    log_limit = math.log1p(limit)
    return change_duration(frames, math.exp(sample_uniform(-log_limit, log_limit, generator)))


def change_duration(frames: Tensor, factor: float) -> Tensor:
    """Makes frames so many times as long, at the same pitch: (F, M) -> (F', M).

    >>> change_duration(torch.zeros(60, 48), 1.2).shape
    torch.Size([72, 48])
    """
    count = max(round(len(frames) * factor), 1)
    if count == len(frames):
        return frames
    return F.interpolate(frames.mT[None], size=count, mode="linear", align_corners=False)[0].mT


def warp_bands(frames: Tensor, limit: float, generator: torch.Generator | None = None) -> Tensor:
    """Warps the bands as another vocal tract length would (VTLP), by up to `limit` of their index: (F, M)."""
    bands = frames.shape[1]
    log_limit = math.log1p(limit)
    source = torch.arange(bands, dtype=frames.dtype) * math.exp(sample_uniform(-log_limit, log_limit, generator))
    low = source.floor().clamp(max=bands - 1)
    fraction = (source - low).clamp(max=1.0)
    first, second = low.long(), (low.long() + 1).clamp(max=bands - 1)
    return frames[:, first] * (1.0 - fraction) + frames[:, second] * fraction


def tilt_spectrum(frames: Tensor, limit: float, generator: torch.Generator | None = None) -> Tensor:
    """Adds a random smooth curve over the bands, up to `limit` high, as another microphone would."""
    knots = (torch.rand(1, 1, 4, generator=generator) * 2.0 - 1.0) * limit
    return frames + F.interpolate(knots, size=frames.shape[1], mode="linear", align_corners=True)[0, 0]


def spec_augment(
    frames: Tensor,
    *,
    times: int = 2,
    longest: int = 20,
    share: float = 0.2,
    bands: int = 2,
    widest: int = 10,
    generator: torch.Generator | None = None,
) -> Tensor:
    """SpecAugment: replaces random spans of time and bands with the mean: (F, M) -> (F, M).

    Args:
        times: number of masked time spans.
        longest: maximum frames of each time span.
        share: maximum fraction of all frames in each time span.
        bands: number of masked band ranges.
        widest: maximum bands of each range.
    """
    out, mean = frames.clone(), frames.mean()
    for axis, count, limit in ((0, times, min(longest, int(share * len(frames)))), (1, bands, widest)):
        for _ in range(count):
            length = int(sample_uniform(0, min(limit, frames.shape[axis]) + 1, generator))
            first = int(sample_uniform(0, frames.shape[axis] - length + 1, generator))
            out.narrow(axis, min(first, frames.shape[axis] - length), length).fill_(mean)
    return out

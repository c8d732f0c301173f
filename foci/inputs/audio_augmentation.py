"""Changes that leave what is said as it was: what training data is varied with, so that little of it goes a long way.

Every choice is drawn from the generator that is given, so a run can be repeated.

N samples, F frames, M bands.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.inputs.audio import resampled


def between(low: float, high: float, generator: torch.Generator | None = None) -> float:
    """A number between two, all alike."""
    return low + (high - low) * torch.rand((), generator=generator).item()


def chance(share: float, generator: torch.Generator | None = None) -> bool:
    """True so often."""
    return torch.rand((), generator=generator).item() < share


def faster(samples: Tensor, most: float, generator: torch.Generator | None = None) -> Tensor:
    """Played faster or slower by up to a factor of `1 + most`: speed and pitch change together."""
    side = math.log1p(most)
    return resampled(samples, math.exp(between(-side, side, generator))) if most else samples


def noisy(samples: Tensor, decibels: tuple[float, float], generator: torch.Generator | None = None) -> Tensor:
    """With noise that is so many decibels quieter than the sound: white, or falling with the frequency."""
    white = torch.randn(len(samples), generator=generator)
    if chance(0.5, generator):
        white = falling(white)
    quieter = float(10.0 ** (-between(*decibels, generator) / 20.0))
    loud = samples.square().mean().sqrt() / white.square().mean().sqrt().clamp(min=1e-9)
    return samples + white * loud * quieter


def falling(white: Tensor) -> Tensor:
    """Pink noise: equal energy in every octave."""
    spectrum = torch.fft.rfft(white)
    pink: Tensor = torch.fft.irfft(spectrum / torch.arange(1, len(spectrum) + 1).sqrt(), len(white))
    return pink


def shifted(samples: Tensor, most: int, generator: torch.Generator | None = None) -> Tensor:
    """With up to so many samples of silence before and after, or as many cut away."""
    before, after = (round(between(-most, most, generator)) for _ in range(2))
    # Never the half of a short sound: that would cut what is said.
    cut = len(samples) // 8
    return F.pad(samples, (max(before, -cut), max(after, -cut)))


def slower(frames: Tensor, most: float, generator: torch.Generator | None = None) -> Tensor:
    """Frames stretched or squeezed in time by up to a factor of `1 + most`, at the same pitch: (F, M) -> (F', M)."""
    side = math.log1p(most)
    count = max(round(len(frames) * math.exp(between(-side, side, generator))), 1)
    if count == len(frames):
        return frames
    return F.interpolate(frames.mT[None], size=count, mode="linear", align_corners=False)[0].mT


def another_voice(frames: Tensor, most: float, generator: torch.Generator | None = None) -> Tensor:
    """Bands moved up or down as a longer or shorter throat moves them, by up to `most` of their place: (F, M)."""
    bands = frames.shape[1]
    side = math.log1p(most)
    places = torch.arange(bands, dtype=frames.dtype) * math.exp(between(-side, side, generator))
    low = places.floor().clamp(max=bands - 1)
    share = (places - low).clamp(max=1.0)
    first, second = low.long(), (low.long() + 1).clamp(max=bands - 1)
    return frames[:, first] * (1.0 - share) + frames[:, second] * share


def tilted(frames: Tensor, most: float, generator: torch.Generator | None = None) -> Tensor:
    """Another microphone: a smooth curve over the bands is added, up to `most` high."""
    knots = (torch.rand(1, 1, 4, generator=generator) * 2.0 - 1.0) * most
    return frames + F.interpolate(knots, size=frames.shape[1], mode="linear", align_corners=True)[0, 0]


def masked(
    frames: Tensor,
    *,
    times: int = 2,
    longest: int = 20,
    share: float = 0.2,
    bands: int = 2,
    widest: int = 10,
    generator: torch.Generator | None = None,
) -> Tensor:
    """SpecAugment: some stretches of time and some bands are covered by the mean: (F, M) -> (F, M).

    Args:
        times: how many stretches of time are covered.
        longest: how many frames each of them has at most.
        share: of all frames, how much each of them covers at most.
        bands: how many groups of bands are covered.
        widest: how many bands each of them has at most.
    """
    out, mean = frames.clone(), frames.mean()
    for axis, count, limit in ((0, times, min(longest, int(share * len(frames)))), (1, bands, widest)):
        for _ in range(count):
            length = int(between(0, min(limit, frames.shape[axis]) + 1, generator))
            first = int(between(0, frames.shape[axis] - length + 1, generator))
            out.narrow(axis, min(first, frames.shape[axis] - length), length).fill_(mean)
    return out

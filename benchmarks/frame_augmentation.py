"""Random changes of a batch of log-mel bands, on any device: another speaker, room, microphone and noise.

`foci.inputs.audio_augmentation` changes one recording at a time on a CPU; here a batch takes a few dozen operations, so
that a GPU can train small models on thousands of new variants per second.

B recordings, F frames, M bands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.inputs.audio import ENERGY_FLOOR, hertz_to_mel, mel_to_hertz, smooth_bands
from foci.tasks.speech_features import SpeechSettings

FLOOR = math.log(ENERGY_FLOOR)
# Longer recordings are cut.
MAX_FRAMES = 144


@dataclass(frozen=True)
class Changes:
    """How strong the changes are."""

    stretch: float = 0.35  # maximum change of duration, as a logarithm
    bend: float = 0.12  # maximum change of the rate within a recording
    tract: float = 0.18  # maximum change of the length of the vocal tract, as a logarithm
    formants: float = 0.06  # standard deviation of the change of each part of the spectrum, as a logarithm
    contrast: float = 0.2  # maximum change of the dynamic range, as a logarithm
    flatten: float = 0.3  # probability that a part of the mean spectrum is removed
    tilt: float = 1.5  # maximum change between the lowest and the highest band, in nats
    curve: float = 0.8  # standard deviation of a random curve over the bands, in nats
    cutoff: float = 0.15  # probability that low or high frequencies are cut
    reverberation: float = 0.3  # probability of reverberation
    noise: float = 0.6  # probability of noise
    loudest: float = 3.0  # minimum nats of noise below the sound
    quietest: float = 12.0  # maximum nats of noise below the sound
    babble: float = 0.1  # probability of another recording in the background
    silence: int = 50  # maximum frames of silence at either end
    cut: int = 6  # maximum frames that are cut at either end
    masks: float = 0.7  # probability of a mask over time, and of one over bands


def augment_batch(frames: Tensor, lengths: Tensor, changes: Changes, settings: SpeechSettings) -> tuple[Tensor, Tensor]:
    """Log-mel bands (B, F, M) and their lengths -> features of random variants, normalized but not divided by std."""
    frames, lengths = warp(frames, lengths, changes, settings)
    real = (torch.arange(frames.shape[1], device=frames.device) < lengths[:, None])[..., None]
    frames = change_spectrum(frames, real, changes)
    if changes.reverberation:
        frames = torch.where(sample_mask(frames, changes.reverberation), reverberate(frames), frames)
    frames = add_noises(frames, real, changes)
    features = normalize_batch(frames, lengths, settings)
    return mask_spans(features, lengths, changes) * real, lengths


def sample(like: Tensor, low: float, high: float, *sizes: int) -> Tensor:
    """Uniform samples in [low, high) for each recording, with axes appended to match (B, F, M)."""
    shape = (len(like), *sizes) if sizes else (len(like), 1, 1)
    return torch.empty(shape, device=like.device).uniform_(low, high)


def sample_mask(like: Tensor, probability: float) -> Tensor:
    return torch.rand(len(like), 1, 1, device=like.device) < probability


def sample_curve(like: Tensor, knots: int) -> Tensor:
    """A random curve over the bands of each recording, with a standard deviation of one at the knots: (B, 1, M)."""
    values = torch.randn(len(like), 1, knots, device=like.device)
    return F.interpolate(values, size=like.shape[2], mode="linear", align_corners=True)


def warp(frames: Tensor, lengths: Tensor, changes: Changes, settings: SpeechSettings) -> tuple[Tensor, Tensor]:
    """Another duration, rate and vocal tract, and silence before and after, in one interpolation."""
    count, bands = len(frames), frames.shape[2]
    spoken = lengths * sample(frames, -changes.stretch, changes.stretch, 1)[:, 0].exp()
    # Half of the recordings stay nearly as tight as they are.
    widest = changes.silence * (torch.rand(count, 2, device=frames.device) < 0.5) + changes.cut
    ends = sample(frames, 0, 1, 2) * widest - changes.cut
    ends = torch.maximum(ends, -0.12 * spoken[:, None])
    total = (spoken + ends.sum(1)).round().clamp(6, MAX_FRAMES)
    size = 8 * math.ceil(float(total.max()) / 8)
    time = (torch.arange(size, device=frames.device) - ends[:, :1]) / spoken[:, None]  # 0 to 1 within the recording
    bend = sample(frames, -changes.bend, changes.bend, 2)
    inside = time.clamp(0, 1)
    bent = inside + bend[:, :1] * (math.pi * inside).sin() + bend[:, 1:] / 2 * (2 * math.pi * inside).sin()
    rows = bent.clamp(0, 1) * (lengths[:, None] - 1)
    columns = warp_band_places(frames, changes, settings)
    grid = torch.stack(
        [
            (columns / (bands - 1) * 2 - 1)[:, None].expand(-1, size, -1),
            (rows / (frames.shape[1] - 1) * 2 - 1)[:, :, None].expand(-1, -1, bands),
        ],
        -1,
    )
    moved = F.grid_sample(frames[:, None], grid, mode="bilinear", padding_mode="border", align_corners=True)[:, 0]
    silent = ((time < 0) | (time > 1))[..., None]
    return torch.where(silent, FLOOR, moved), total.long()


def warp_band_places(frames: Tensor, changes: Changes, settings: SpeechSettings) -> Tensor:
    """Where each band comes from, as an index of the bands: (B, M)."""
    count, bands = len(frames), frames.shape[2]
    low, high = float(hertz_to_mel(settings.lowest)), float(hertz_to_mel(settings.rate / 2))
    places = low + (high - low) * (torch.arange(bands, device=frames.device) + 1.0) / (bands + 1)
    factor = sample(frames, -changes.tract, changes.tract, 1) + changes.formants * sample_curve(frames, 5)[:, 0]
    hertz = mel_to_hertz(places)[None] * factor.exp()
    mel = 2595.0 * (1.0 + hertz / 700.0).log10()
    return ((mel - low) / (high - low) * (bands + 1) - 1.0).clamp(0, bands - 1).view(count, bands)


def change_spectrum(frames: Tensor, real: Tensor, changes: Changes) -> Tensor:
    """Another dynamic range and another frequency response."""
    top = frames.masked_fill(~real, -math.inf).amax((1, 2), keepdim=True)
    frames = top + (frames - top) * sample(frames, -changes.contrast, changes.contrast).exp()
    mean = frames.mul(real).sum(1, keepdim=True) / real.sum(1, keepdim=True)
    share = sample(frames, 0.0, 1.0) * sample_mask(frames, changes.flatten)
    frames = frames - share * (mean - mean.mean(2, keepdim=True))
    places = torch.linspace(-0.5, 0.5, frames.shape[2], device=frames.device)
    frames = frames + sample(frames, -changes.tilt, changes.tilt) * places
    frames = frames + changes.curve * sample_curve(frames, 6)
    below = F.relu(sample(frames, -0.5, -0.3) - places) * sample_mask(frames, changes.cutoff)
    above = F.relu(places - sample(frames, 0.35, 0.5)) * sample_mask(frames, changes.cutoff)
    return frames - 25.0 * (below + above)


def reverberate(frames: Tensor) -> Tensor:
    """Adds an echo of each frame that decays exponentially over the next ones."""
    places = torch.arange(frames.shape[1], device=frames.device)
    distance = (places[:, None] - places).float()
    decay = sample(frames, 2.0, 15.0)
    share = sample(frames, 0.02, 0.3) / decay
    echo = torch.where(distance >= 0, share * (-distance.clamp(min=0) / decay).exp(), 0.0)
    return (frames.exp() + echo @ frames.exp()).log()


def add_noises(frames: Tensor, real: Tensor, changes: Changes) -> Tensor:
    """Adds noise with a random spectrum, and for some another recording."""
    level = frames.exp().mul(real).sum((1, 2), keepdim=True) / (real.sum((1, 2), keepdim=True) * frames.shape[2])
    level = level.clamp(min=ENERGY_FLOOR).log()
    if changes.babble:
        other = torch.randperm(len(frames), device=frames.device)
        background = frames[other] - level[other] + level - sample(frames, 2.5, 9.0)
        background = background.masked_fill(~sample_mask(frames, changes.babble), FLOOR)
        frames = torch.logaddexp(frames, background)
    noise = level - sample(frames, changes.loudest, changes.quietest) + sample_curve(frames, 6)
    slope = sample(frames, -1.5, 1.5) * torch.linspace(-1, 1, frames.shape[2], device=frames.device)
    noise = (noise + slope + 0.4 * torch.randn_like(frames)).masked_fill(~sample_mask(frames, changes.noise), FLOOR)
    return torch.logaddexp(frames, noise)


def normalize_batch(frames: Tensor, lengths: Tensor, settings: SpeechSettings) -> Tensor:
    """What `compute_features` does to one recording, for a batch; without deltas."""
    real = (torch.arange(frames.shape[1], device=frames.device) < lengths[:, None])[..., None]
    frames = frames.clamp(min=FLOOR)
    if settings.dynamic_range:
        top = frames.masked_fill(~real, -math.inf).amax((1, 2), keepdim=True)
        frames = torch.maximum(frames, top - settings.dynamic_range)
    if settings.cosines:
        frames = smooth_bands(frames, settings.cosines)
    mean = frames.mul(real).sum(1, keepdim=True) / lengths[:, None, None]
    mean = mean.mean(2, keepdim=True) if settings.colour else mean
    return (frames - mean) * real


def mask_spans(features: Tensor, lengths: Tensor, changes: Changes) -> Tensor:
    """SpecAugment: for some recordings a span of time or of bands is zero."""
    for axis, sizes, longest in ((1, lengths, 10.0), (2, torch.full_like(lengths, features.shape[2]), 10.0)):
        limit = (0.2 * sizes).clamp(max=longest)[:, None]
        width = torch.rand(len(features), 1, device=features.device) * limit
        first = torch.rand(len(features), 1, device=features.device) * (sizes[:, None] - width)
        places = torch.arange(features.shape[axis], device=features.device)
        span = (places >= first) & (places < first + width)
        span = span & (torch.rand(len(features), 1, device=features.device) < changes.masks)
        features = features.masked_fill(span[:, :, None] if axis == 1 else span[:, None, :], 0.0)
    return features


def break_words(frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Words that are none any more: backwards, a short piece, or the second half before the first."""
    count, size = frames.shape[:2]
    device = frames.device
    kind = torch.randint(3, (count, 1), device=device)
    start = torch.rand(count, 1, device=device)
    share = 0.12 + 0.2 * torch.rand(count, 1, device=device)
    lengths = torch.where(kind[:, 0] == 1, (lengths * share[:, 0]).round().clamp(min=6).long(), lengths)
    places = torch.arange(size, device=device)
    backwards = lengths[:, None] - 1 - places
    piece = places + start * (lengths[:, None] / share - lengths[:, None])
    halves = (places + (0.3 + 0.4 * start) * lengths[:, None]) % lengths[:, None]
    rows = torch.where(kind == 0, backwards.float(), torch.where(kind == 1, piece, halves.float()))
    rows = rows.long().clamp(0, size - 1)
    return frames.gather(1, rows[..., None].expand_as(frames)), lengths

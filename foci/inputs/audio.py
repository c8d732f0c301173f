"""Sound into frames: wav files into samples, samples into a log-mel spectrogram, in plain torch.

N samples, F frames, M mel bands.
"""

from __future__ import annotations

import math
import os
import sys
import wave
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foci.inputs.files import found_at

# About 60 dB below speech of the usual loudness: what is quieter is silence.
FLOOR = 1e-6
# Zero crossings of the resampling kernel on either side: more of them cut sharper.
CROSSINGS = 12
# Places between two samples that are told apart: finer ones differ by less than the kernel lets through anyway.
PHASES = 1024
# Outputs that are resampled at a time, which bounds the memory of long recordings.
PIECE = 1 << 16


def read_sound(path: str | os.PathLike[str], rate: int | None = None) -> tuple[Tensor, int]:
    """The samples (N,) of a sound file in -1 to 1, channels averaged, and how many there are per second.

    soundfile reads it where that is installed (wav, flac, ogg, ...), else the standard library (wav files with PCM).

    Args:
        path: the file.
        rate: samples per second that are wanted; None: as they are in the file.
    """
    name = os.fspath(path)
    if not Path(name).is_file():
        raise FileNotFoundError(f"{name} should be a sound file, but there is {found_at(Path(name))}")
    channels, found = read_channels(name)
    if len(channels) == 0:
        raise ValueError(f"{name} should be a sound file, but it holds no samples")
    samples = channels.mean(1)
    if not bool(samples.isfinite().all()):
        raise ValueError(f"{name} should hold finite samples, but some are infinite or not numbers")
    if rate is None or rate == found:
        return samples, found
    return resampled(samples, found / rate), rate


def read_channels(name: str) -> tuple[Tensor, int]:
    """Samples (N, channels) and their rate; what is no sound is refused with the reader's own reason."""
    try:
        import soundfile
    except ImportError:
        return read_pcm(name)
    try:
        data, rate = soundfile.read(name, dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, RuntimeError) as error:
        raise ValueError(f"{name} should be a sound file, but soundfile cannot read it: {reason(error)}") from error
    return torch.from_numpy(data), int(rate)


def reason(error: Any) -> str:
    return str(getattr(error, "error_string", error)).strip().rstrip(".")


def read_pcm(name: str) -> tuple[Tensor, int]:
    """A wav file with whole numbers, by the standard library: samples (N, channels) and their rate."""
    try:
        with wave.open(name, "rb") as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            content = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        hint = "; pip install 'foci[tasks]' brings soundfile, which reads more kinds"
        raise ValueError(f"{name} should be a wav file with PCM, but it cannot be read: {error}{hint}") from error
    whole = len(content) - len(content) % (width * channels)
    return from_pcm(content[:whole], width).view(-1, channels), rate


def from_pcm(content: bytes, width: int) -> Tensor:
    """Little-endian whole numbers of so many bytes as floats in -1 to 1; those of one byte have no sign."""
    taken = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, width)
    if width == 1:
        return (taken[:, 0].float() - 128.0) / 128.0
    if sys.byteorder == "big":
        taken = taken.flip(1)
    wide = torch.zeros(len(taken), 4, dtype=torch.uint8)
    wide[:, 4 - width :] = taken
    return wide.view(torch.int32)[:, 0].double().div_(2.0**31).float()


def resampled(samples: Tensor, factor: float) -> Tensor:
    """The sound played `factor` times as fast: (N,) -> (N / factor,), by a windowed sinc that lets no alias through.

    >>> resampled(torch.ones(8000), 8000 / 16000).shape             # from 8 to 16 kHz
    torch.Size([16000])
    """
    if not 0.01 <= factor <= 100.0:
        raise ValueError(f"a sound is resampled by a factor between 0.01 and 100, but got {factor!r}")
    count = max(round(len(samples) / factor), 1)
    kernel = sinc_kernel(min(1.0, 1.0 / factor)).to(samples)
    half = kernel.shape[1] // 2
    windows = torch.nn.functional.pad(samples, (half - 1, half + math.ceil(factor) + 1)).unfold(0, 2 * half, 1)
    pieces = []
    for first in range(0, count, PIECE):
        places = torch.arange(first, min(first + PIECE, count), dtype=torch.float64) * factor
        nearest = places.floor()
        phase = ((places - nearest) * PHASES).round().long()
        pieces.append((windows[nearest.long().clamp(max=len(windows) - 1)] * kernel[phase]).sum(1))
    return torch.cat(pieces)


@lru_cache(maxsize=16)
def sinc_kernel(cutoff: float) -> Tensor:
    """A low-pass filter at the samples around a place: (PHASES + 1, taps), a row for each place between two samples."""
    half = math.ceil(CROSSINGS / cutoff)
    away = torch.arange(PHASES + 1)[:, None] / PHASES - torch.arange(1 - half, half + 1)
    return cutoff * torch.sinc(cutoff * away) * torch.cos(math.pi / 2 / half * away).square()


def log_mel(
    samples: Tensor,
    rate: int,
    *,
    bands: int = 80,
    window: float = 0.025,
    hop: float = 0.010,
    lowest: float = 20.0,
    highest: float | None = None,
) -> Tensor:
    """The logarithm of the energy in mel bands, frame by frame: samples (N,) or (B, N) -> (F, M) or (B, F, M).

    >>> log_mel(torch.randn(16000), 16000).shape                     # a second of 16 kHz: frames of 10 ms and 80 bands
    torch.Size([101, 80])

    Frame f is centred on sample f · hop; before and after the sound there is silence.

    Args:
        samples: in -1 to 1.
        rate: samples per second.
        bands: how many mel bands there are.
        window: seconds that a frame looks at, under a Hann window.
        hop: seconds from one frame to the next.
        lowest, highest: where the bands begin and end, in Hz; None: at half of the rate.
    """
    size, step = round(window * rate), round(hop * rate)
    if samples.dim() not in {1, 2} or samples.shape[-1] == 0 or not samples.is_floating_point():
        raise ValueError(f"samples must be floats (N,) or (B, N), but got {samples.dtype} {tuple(samples.shape)}")
    if size < 2 or step < 1:
        raise ValueError(f"a window and a hop must take samples at {rate} Hz, but got {window} and {hop} seconds")
    # Twice the window: bins finer than the narrowest band.
    bins = 2 ** math.ceil(math.log2(2 * size))
    hann = torch.hann_window(size, dtype=samples.dtype, device=samples.device)
    spectrum = torch.stft(
        samples, bins, step, size, hann, center=True, pad_mode="constant", normalized=False, return_complex=True
    )
    filters = mel_filters(rate, bins, bands, lowest, rate / 2 if highest is None else highest)
    energy = filters.to(samples) @ spectrum.abs().square()
    return energy.clamp(min=FLOOR).log().mT


@lru_cache(maxsize=16)
def mel_filters(rate: int, size: int, bands: int, lowest: float, highest: float) -> Tensor:
    """Triangles of height 1, evenly spaced in mel: (M, size / 2 + 1), what each bin gives to each band."""
    if not 0 <= lowest < highest <= rate / 2:
        raise ValueError(f"bands must lie between 0 and {rate / 2} Hz, but got {lowest} to {highest}")
    edges = from_mel(torch.linspace(float(to_mel(lowest)), float(to_mel(highest)), bands + 2, dtype=torch.float64))
    bins = torch.arange(size // 2 + 1, dtype=torch.float64) * rate / size
    left, middle, right = (edges[i : i + bands, None] for i in range(3))
    filters = torch.minimum((bins - left) / (middle - left), (right - bins) / (right - middle)).clamp(min=0.0)
    if bool((filters.sum(1) == 0).any()):
        raise ValueError(f"every band must hold a bin of {rate / size:.1f} Hz, but {bands} bands are too narrow for it")
    return filters.float()


def to_mel(hertz: float | Tensor) -> Tensor:
    """2595 log10(1 + f / 700): steps that sound alike."""
    return 2595.0 * torch.log10(1.0 + torch.as_tensor(hertz, dtype=torch.float64) / 700.0)


def from_mel(mel: Tensor) -> Tensor:
    return 700.0 * (10.0 ** (mel / 2595.0) - 1.0)


def with_deltas(frames: Tensor) -> Tensor:
    """Frames with their slopes and the slopes of these: (F, M) -> (F, 3 M), each over five frames."""
    first = slope(frames)
    return torch.cat([frames, first, slope(first)], dim=-1)


def slope(frames: Tensor) -> Tensor:
    padded = torch.cat([frames[:1].expand(2, -1), frames, frames[-1:].expand(2, -1)])
    one, two = padded[3:-1] - padded[1:-3], padded[4:] - padded[:-4]
    return (one + 2.0 * two) / 10.0


def levelled(samples: Tensor, level: float = 0.1) -> Tensor:
    """The sound at one loudness: its root mean square is `level`; silence stays silence."""
    return samples * (level / samples.square().mean().sqrt().clamp(min=1e-5))

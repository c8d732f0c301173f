"""Reads audio files into samples, and turns samples into log-mel spectrograms, in plain torch.

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

from foci.inputs.files import describe_path, detect_format
from foci.runtime.limits import MAX_SAMPLES, MAX_SECONDS

# About 60 dB below speech of normal loudness; anything quieter counts as silence.
ENERGY_FLOOR = 1e-6
# Zero crossings of the resampling kernel on either side: more of them give a sharper cutoff.
ZERO_CROSSINGS = 12
# Positions between two samples with their own kernel: finer steps change less than the kernel's own error.
KERNEL_PHASES = 1024
# Kernel values used at a time, which bounds the memory for long recordings.
RESAMPLE_CHUNK = 1 << 21
# Values decoded at a time, of all channels.
DECODED_VALUES = 1 << 20
MIN_SAMPLE_RATE, MAX_SAMPLE_RATE = 1_000, 768_000
SOUND_FORMATS = ("WAV", "FLAC", "OGG")
# What libsndfile returns for a stream of unknown length.
UNKNOWN_LENGTH = 2**63 - 1


def read_audio(path: str | os.PathLike[str], rate: int | None = None) -> tuple[Tensor, int]:
    """Reads the samples (N,) of an audio file in -1 to 1, channels averaged, and the sample rate.

    Reads WAV, FLAC and OGG with soundfile, or PCM WAV with the standard library if soundfile is not installed. The
    length is limited by FOCI_MAX_SECONDS and FOCI_MAX_SAMPLES.

    Args:
        path: the file.
        rate: sample rate to convert to; None: that of the file.
    """
    name = os.fspath(path)
    if not Path(name).is_file():
        raise FileNotFoundError(f"{name} must be an audio file, got {describe_path(Path(name))}")
    detect_format(name, SOUND_FORMATS)
    samples, file_rate = read_samples(name)
    if len(samples) == 0:
        raise ValueError(f"{name} must be an audio file with samples, got none")
    if not bool(samples.isfinite().all()):
        raise ValueError(f"{name} must hold finite samples, got NaN or infinity")
    if rate is None or rate == file_rate:
        return samples, file_rate
    return resample(samples, file_rate / rate), rate


def read_samples(name: str) -> tuple[Tensor, int]:
    """Reads the mean of the channels (N,) and the sample rate; errors carry the reader's own message."""
    try:
        import soundfile
    except ImportError:
        return read_pcm(name)
    try:
        with soundfile.SoundFile(name) as file:
            if file.frames == UNKNOWN_LENGTH:
                raise ValueError(f"{name} must state its length, got a stream of unknown length")
            check_length(name, file.frames, file.samplerate)
            return read_blocks(name, file), int(file.samplerate)
    except (soundfile.LibsndfileError, RuntimeError) as error:
        raise ValueError(
            f"{name} must be an intact WAV, FLAC or OGG file, but soundfile cannot read it: {soundfile_message(error)}"
        ) from error


def read_blocks(name: str, file: Any) -> Tensor:
    """Decodes the samples (N,) of an open file block by block, because the length in its header may be wrong."""
    blocks, count = [torch.zeros(0)], 0
    while len(block := file.read(max(DECODED_VALUES // file.channels, 1), dtype="float32", always_2d=True)):
        count += len(block)
        check_length(name, count, file.samplerate)
        blocks.append(torch.from_numpy(block).mean(1))
    return torch.cat(blocks)


def check_length(name: str, samples: int, rate: int) -> None:
    """Refuses a recording that is too long, before it is decoded or resampled."""
    if not MIN_SAMPLE_RATE <= rate <= MAX_SAMPLE_RATE:
        accepted = f"{MIN_SAMPLE_RATE:,} to {MAX_SAMPLE_RATE:,} Hz"
        raise ValueError(f"{name} must have a sample rate of {accepted}, got {rate:,}")
    MAX_SECONDS.check(name, math.ceil(samples / rate))
    MAX_SAMPLES.check(name, samples)


def soundfile_message(error: Any) -> str:
    return str(getattr(error, "error_string", error)).strip().rstrip(".")


def read_pcm(name: str) -> tuple[Tensor, int]:
    """Reads an integer PCM WAV file with the standard library: the mean of the channels (N,) and the sample rate."""
    try:
        with wave.open(name, "rb") as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            if width > 4:
                raise wave.Error(f"a sample must have at most 4 bytes, got {width}")
            check_length(name, file.getnframes(), rate)
            content = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        hint = "; pip install 'foci[tasks]' installs soundfile, which reads more formats"
        raise ValueError(f"{name} must be a PCM WAV file, but it cannot be read: {error}{hint}") from error
    whole = len(content) - len(content) % (width * channels)
    return decode_pcm(content[:whole], width).view(-1, channels).mean(1), rate


def decode_pcm(content: bytes, width: int) -> Tensor:
    """Converts little-endian integers of `width` bytes to floats in -1 to 1; one-byte samples are unsigned."""
    if not content:
        return torch.zeros(0)
    raw = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, width)
    if width == 1:
        return (raw[:, 0].float() - 128.0) / 128.0
    if sys.byteorder == "big":
        raw = raw.flip(1)
    wide = torch.zeros(len(raw), 4, dtype=torch.uint8)
    wide[:, 4 - width :] = raw
    return wide.view(torch.int32)[:, 0].double().div_(2.0**31).float()


def resample(samples: Tensor, factor: float) -> Tensor:
    """Resamples by an anti-aliasing windowed sinc, so that it plays `factor` times as fast: (N,) -> (N / factor,).

    >>> resample(torch.ones(8000), 8000 / 16000).shape             # from 8 to 16 kHz
    torch.Size([16000])
    """
    if not 0.01 <= factor <= 100.0:
        raise ValueError(f"factor must be between 0.01 and 100, got {factor!r}")
    count = max(round(len(samples) / factor), 1)
    kernel = sinc_kernel(min(1.0, 1.0 / factor)).to(samples)
    half = kernel.shape[1] // 2
    windows = torch.nn.functional.pad(samples, (half - 1, half + math.ceil(factor) + 1)).unfold(0, 2 * half, 1)
    chunks, length = [], max(RESAMPLE_CHUNK // (2 * half), 1)
    for first in range(0, count, length):
        positions = torch.arange(first, min(first + length, count), dtype=torch.float64) * factor
        left = positions.floor()
        phase = ((positions - left) * KERNEL_PHASES).round().long()
        chunks.append((windows[left.long().clamp(max=len(windows) - 1)] * kernel[phase]).sum(1))
    return torch.cat(chunks)


@lru_cache(maxsize=16)
def sinc_kernel(cutoff: float) -> Tensor:
    """Builds a low-pass filter: (KERNEL_PHASES + 1, taps), one row per position between two samples."""
    half = math.ceil(ZERO_CROSSINGS / cutoff)
    distance = torch.arange(KERNEL_PHASES + 1)[:, None] / KERNEL_PHASES - torch.arange(1 - half, half + 1)
    return cutoff * torch.sinc(cutoff * distance) * torch.cos(math.pi / 2 / half * distance).square()


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
    """Computes the log energy in mel bands per frame: samples (N,) or (B, N) -> (F, M) or (B, F, M).

    >>> log_mel(torch.randn(16000), 16000).shape                     # a second of 16 kHz: frames of 10 ms and 80 bands
    torch.Size([101, 80])

    Frame f is centered on sample f · hop; the sound is padded with silence.

    Args:
        samples: in -1 to 1.
        rate: samples per second.
        bands: number of mel bands.
        window: length of the Hann window, in seconds.
        hop: seconds from one frame to the next.
        lowest, highest: frequency range of the bands, in Hz; None: half the sample rate.
    """
    size, step = round(window * rate), round(hop * rate)
    if samples.dim() not in {1, 2} or samples.shape[-1] == 0 or not samples.is_floating_point():
        raise ValueError(f"samples must be floats (N,) or (B, N), got {samples.dtype} {tuple(samples.shape)}")
    if size < 2 or step < 1:
        raise ValueError(f"window and hop must span samples at {rate} Hz, got {window} and {hop} seconds")
    # At least twice the window, so that the bins are finer than the narrowest band.
    bins = 2 ** math.ceil(math.log2(2 * size))
    hann = torch.hann_window(size, dtype=samples.dtype, device=samples.device)
    spectrum = torch.stft(
        samples, bins, step, size, hann, center=True, pad_mode="constant", normalized=False, return_complex=True
    )
    filters = mel_filters(rate, bins, bands, lowest, rate / 2 if highest is None else highest)
    energy = filters.to(samples) @ spectrum.abs().square()
    return energy.clamp(min=ENERGY_FLOOR).log().mT


@lru_cache(maxsize=16)
def mel_filters(rate: int, size: int, bands: int, lowest: float, highest: float) -> Tensor:
    """Builds triangular filters of height 1, evenly spaced in mel: (M, size / 2 + 1), bin weights per band."""
    if not 0 <= lowest < highest <= rate / 2:
        raise ValueError(f"lowest and highest must be between 0 and {rate / 2} Hz, got {lowest} and {highest}")
    edges = mel_to_hertz(
        torch.linspace(float(hertz_to_mel(lowest)), float(hertz_to_mel(highest)), bands + 2, dtype=torch.float64)
    )
    bins = torch.arange(size // 2 + 1, dtype=torch.float64) * rate / size
    left, middle, right = (edges[i : i + bands, None] for i in range(3))
    filters = torch.minimum((bins - left) / (middle - left), (right - bins) / (right - middle)).clamp(min=0.0)
    if bool((filters.sum(1) == 0).any()):
        raise ValueError(f"bands must be few enough that each holds a bin of {rate / size:.1f} Hz, got {bands}")
    return filters.float()


def hertz_to_mel(hertz: float | Tensor) -> Tensor:
    """Converts Hz to mel, the scale of perceived pitch: 2595 log10(1 + f / 700)."""
    return 2595.0 * torch.log10(1.0 + torch.as_tensor(hertz, dtype=torch.float64) / 700.0)


def mel_to_hertz(mel: Tensor) -> Tensor:
    return 700.0 * (10.0 ** (mel / 2595.0) - 1.0)


def add_deltas(frames: Tensor) -> Tensor:
    """Appends first and second derivatives over time: (F, M) -> (F, 3 M), each over five frames."""
    first = compute_deltas(frames)
    return torch.cat([frames, first, compute_deltas(first)], dim=-1)


def smooth_bands(frames: Tensor, count: int) -> Tensor:
    """Keeps the first `count` cosines of each frame's bands, as cepstra do: formants stay, harmonics go; (..., F, M).

    >>> smooth_bands(torch.randn(20, 48), 12).shape
    torch.Size([20, 48])
    """
    cosines = cosine_basis(frames.shape[-1], count).to(frames)
    return frames @ cosines @ cosines.mT


@lru_cache(maxsize=16)
def cosine_basis(bands: int, count: int) -> Tensor:
    """Builds the first cosines of the DCT-II, each of length 1: (bands, count)."""
    places = (torch.arange(bands, dtype=torch.float64) + 0.5) / bands
    waves = torch.cos(math.pi * places[:, None] * torch.arange(min(count, bands)))
    basis: Tensor = waves / waves.norm(dim=0)
    return basis.float()


def compute_deltas(frames: Tensor) -> Tensor:
    padded = torch.cat([frames[:1].expand(2, -1), frames, frames[-1:].expand(2, -1)])
    one, two = padded[3:-1] - padded[1:-3], padded[4:] - padded[:-4]
    return (one + 2.0 * two) / 10.0


def normalize_loudness(samples: Tensor, level: float = 0.1) -> Tensor:
    """Scales the sound to a root mean square of `level`; silence stays silence."""
    return samples * (level / samples.square().mean().sqrt().clamp(min=1e-5))

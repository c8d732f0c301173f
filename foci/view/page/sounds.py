"""Encodes the recordings of a record for the page: samples to play, and a spectrogram to look at.

Of a recording among tokens whose samples are not known, there is the spectrogram that the model read.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foci.record.labels import Labels
from foci.view.page.arrays import PackedArrays

MAX_ROWS, MAX_COLUMNS = 64, 400
# The length of a window, in seconds, and its smallest and largest number of samples.
WINDOW = 0.025
WINDOW_SAMPLES = (128, 2048)
# The quietest that is drawn, in decibels below the loudest.
RANGE = 60.0


def add_sounds(arrays: PackedArrays, number: int, labels: Labels, max_sequences: int) -> bool:
    """Add the recordings of labels: samples (sequences, N) and spectrograms (sequences, rows, columns).

    Returns whether there are any.
    """
    if labels.sounds is not None and labels.rate is not None:
        sounds = labels.sounds[:max_sequences].cpu()
        arrays.add(f"sound.{number}", sounds.int() & 0xFFFF, "u2")
        spectrograms = [compute_spectrogram(samples, labels.rate) for samples in sounds]
    else:
        spectrograms = join_pictures(labels, min(max_sequences, labels.batch))
    if spectrograms:
        arrays.add(f"spectrogram.{number}", torch.stack(spectrograms), "u1")
    return bool(spectrograms)


def join_pictures(labels: Labels, sequences: int) -> list[Tensor]:
    """Join the spectrograms that a model read in each sequence: uint8 (rows, columns), the lowest sounds first."""
    parts = [each for each in labels.segments if each.kind == "frames" and each.sequence < sequences]
    if not parts or find_frame_seconds(labels) is None or any(each.picture is None for each in parts):
        return []
    size = MAX_ROWS, min(MAX_COLUMNS, max(labels.pictures[each.picture or 0].shape[1] for each in parts) * len(parts))
    joined = []
    for sequence in range(sequences):
        pictures = [labels.pictures[each.picture or 0] for each in parts if each.sequence == sequence]
        bands = [stretch(each[..., 0].flip(0).float(), MAX_ROWS, each.shape[1]) for each in pictures]
        grey = torch.cat(bands, 1) if bands else torch.zeros(1, 1)
        joined.append(stretch(grey, *size).round().to(torch.uint8))
    return joined


def stretch(picture: Tensor, rows: int, columns: int) -> Tensor:
    return torch.nn.functional.interpolate(picture[None, None], (rows, columns), mode="area")[0, 0]


def find_frame_seconds(labels: Labels) -> float | None:
    """Find the seconds of a frame, which segments among tokens may have; None if they are not known or differ."""
    known = {each.seconds for each in labels.segments if each.kind == "frames"}
    return labels.seconds if labels.seconds is not None or len(known) != 1 else known.pop()


def compute_spectrogram(samples: Tensor, rate: int) -> Tensor:
    """Compute the loudness over time: int16 samples (N,) -> uint8 (rows, columns).

    >>> compute_spectrogram(torch.randint(-9, 9, (16000,), dtype=torch.int16), 16000).shape
    torch.Size([64, 126])

    Rows are frequencies from 0 to half the rate, the lowest first. 255 is the loudest, and 0 is 60 decibels below it.
    """
    if samples.numel() == 0:
        return torch.zeros(MAX_ROWS, 1, dtype=torch.uint8)
    smallest, largest = WINDOW_SAMPLES
    size = min(max(2 ** round(math.log2(max(rate * WINDOW, 1))), smallest), largest)
    window = torch.hann_window(size)
    spectrum = torch.stft(samples.float(), size, size // 4, size, window, pad_mode="constant", return_complex=True)
    # The first bin is the mean, which is not heard.
    power = spectrum[1:].abs().square()
    small = torch.nn.functional.adaptive_avg_pool2d(power[None], (MAX_ROWS, min(MAX_COLUMNS, power.shape[1])))[0]
    decibels = 10 * (small / small.max().clamp(min=1.0)).clamp(min=1e-12).log10()
    return (255 * (1 + decibels / RANGE)).clamp(min=0).round().to(torch.uint8)

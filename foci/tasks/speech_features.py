"""Turns recordings into the feature frames of a speech model, with augmentation in training.

F frames, M numbers per frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from foci.inputs import audio_augmentation
from foci.inputs.audio import add_deltas, log_mel, normalize_loudness, read_audio, smooth_bands
from foci.inputs.files import describe_path
from foci.inputs.text import TokenizerKind
from foci.nn.config import HALVINGS_LIMIT, LAYERS_LIMIT, WIDTH_LIMIT
from foci.tasks.task import LENGTH_LIMIT, TaskSettings

# The loudness of a recording is measured in windows of 20 milliseconds.
WINDOWS_PER_SECOND = 50
# A pause is quieter than this share of the loudest window, for at least this long.
PAUSE_LOUDNESS, PAUSE_SECONDS = 0.05, 0.25
# What is kept of the pauses around a part.
PART_MARGIN_SECONDS = 0.1


@dataclass(frozen=True)
class SpeechSettings(TaskSettings):
    """Settings of speech recognition: the [task] section of a run's TOML."""

    size: Literal["tiny", "small", "base"] = "small"  # model size; the next settings override single values
    width: int | None = None  # model width
    layers: int | None = None  # encoder blocks
    decoder_layers: int | None = None  # decoder blocks; 0: CTC only
    heads: int | None = None  # attention heads
    hidden: int | None = None  # width inside the feed-forward
    halvings: int | None = None  # how often the frame rate is halved before attention
    local: int | None = None  # convolution blocks before attention
    reach: int | None = None  # kernel size of these blocks, an odd number
    dropout: float | None = None  # dropout rate
    attention_dropout: float | None = None  # dropout rate of the attention weights
    depth_dropout: float | None = None  # stochastic depth: how often the last layer is skipped in training
    tokenizer: TokenizerKind = "characters"  # characters, words or byte-pair encoding (bpe)
    vocabulary: int = 500  # maximum vocabulary size, for bpe and words
    rate: int = 16_000  # sample rate that recordings are converted to
    bands: int = 80  # mel bands per frame
    lowest: float = 20.0  # lowest frequency of the bands in Hz
    cosines: int = 0  # smooth the bands of a frame to so many cosines, which hides the pitch of the voice; 0: do not
    dynamic_range: float = 0.0  # raise energies to this many nats below the loudest of a recording; 0: do not
    hop: float = 0.010  # seconds from one frame to the next
    colour: bool = False  # keep the mean spectrum of a recording, which carries much of a single short word
    deltas: bool = False  # append first and second derivatives over time
    ctc: float = 0.3  # weight of CTC in the loss and in rescoring; the decoder has the rest
    smoothing: float = 0.1  # label smoothing, in training
    beam: int = 4  # beam width
    min_tokens: int = 1  # shorter answers are used only if there is no other candidate
    max_tokens: int = 200  # maximum tokens of an answer
    answers: str = ""  # the only words to answer with, separated by spaces; other words are declined
    decline: float = 1.0  # with answers: decline a sound if the other words are so many times as likely, or more
    tempo: float = 0.0  # with answers: a sound is also read so much faster and slower, and its scores are averaged
    speed: float = 0.1  # maximum relative change of speed, in training
    noise: float = 0.3  # probability that noise is added, in training
    quietest: float = 40.0  # maximum decibels of noise below the sound
    loudest: float = 10.0  # minimum decibels of noise below the sound
    shift: float = 0.0  # maximum seconds of silence added or cut at either end, in training
    voice: float = 0.0  # maximum relative warp of the bands, as by another vocal tract, in training
    tilt: float = 0.0  # maximum change of band energy in nats, as by another microphone, in training
    stretch: float = 0.0  # maximum relative change of duration at the same pitch, in training
    join: float = 0.0  # probability that another recording of the batch is appended, in training
    time_masks: int = 2  # masked time spans (SpecAugment), in training
    longest_mask: int = 40  # maximum frames of a time span
    band_masks: int = 2  # masked band ranges (SpecAugment), in training
    widest_mask: int = 15  # maximum bands of a range

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range(0, LAYERS_LIMIT, "decoder_layers", "local")
        self.check_range(0, HALVINGS_LIMIT, "halvings")
        self.check_range(1, WIDTH_LIMIT, "reach", "bands")
        self.check_range(1000, 1_000_000, "rate")
        self.check_range(0, 500, "lowest")
        self.check_range(0, WIDTH_LIMIT, "cosines")
        self.check_range(0, 100, "dynamic_range")
        self.check_range(0.001, 10, "hop")
        self.check_range(1, LENGTH_LIMIT, "max_tokens")
        self.check_range(0, LENGTH_LIMIT, "min_tokens", "time_masks", "longest_mask", "band_masks", "widest_mask")
        self.check_range(-200, 200, "quietest", "loudest")
        self.check_range(0, 100, "shift", "tilt")
        self.check_range(0.001, 1000, "decline")
        self.check_fractions("ctc", "noise", "join")
        self.check_fractions("dropout", "attention_dropout", "depth_dropout", "smoothing", include_one=False)
        self.check_fractions("speed", "voice", "stretch", "tempo", include_one=False)


def load_recording(path: str, rate: int) -> Tensor:
    """Loads the samples (N,) of an audio file, or precomputed frames (F, M) from a .npy file."""
    if not path.endswith(".npy"):
        return normalize_loudness(read_audio(path, rate)[0])
    try:
        import numpy
    except ImportError as error:
        raise ImportError(f"reading {path} needs numpy: pip install numpy") from error
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} must be a file of frames, got {describe_path(Path(path))}")
    try:
        # A mapped file is never larger than it claims; the copy is writable and independent of the file.
        frames = torch.from_numpy(numpy.array(numpy.load(path, mmap_mode="r", allow_pickle=False))).float()
    except Exception as error:
        # A damaged header makes numpy raise errors of its parser and its tokenizer.
        raise ValueError(f"{path} must hold frames as floats (F, M), but it cannot be read: {error}") from error
    if frames.dim() != 2 or frames.numel() == 0 or not bool(frames.isfinite().all()):
        raise ValueError(
            f"{path} must hold finite frames (F, M), got the shape {tuple(frames.shape)} or NaN or infinity"
        )
    return frames


def find_sound_parts(samples: Tensor, rate: int) -> list[slice]:
    """Finds the loud parts of a recording (N,) that are separated by pauses, each with a short margin.

    >>> tone = torch.sin(torch.arange(4000) / 4)
    >>> find_sound_parts(torch.cat([tone, torch.zeros(4000), tone]), 8000)
    [slice(0, 4800, None), slice(7200, 12000, None)]
    """
    step = max(rate // WINDOWS_PER_SECOND, 1)
    windows = samples.float()[: len(samples) // step * step].view(-1, step)
    loudness = windows.square().mean(1).sqrt()
    loud = (loudness > PAUSE_LOUDNESS * loudness.max()).nonzero().flatten() if len(loudness) else loudness
    ends = (loud.diff() > PAUSE_SECONDS * WINDOWS_PER_SECOND).nonzero().flatten() + 1
    margin = round(PART_MARGIN_SECONDS * rate)
    return [
        slice(max(int(part[0]) * step - margin, 0), min((int(part[-1]) + 1) * step + margin, len(samples)))
        for part in loud.tensor_split(ends.tolist())
        if len(part)
    ]


def compute_features(recording: Tensor, settings: SpeechSettings) -> Tensor:
    """Computes zero-mean frames (F, M) from samples (N,) or frames; per band, unless `colour` keeps the spectrum."""
    frames = recording if recording.dim() == 2 else compute_log_mel(recording, settings)
    if settings.dynamic_range:
        frames = frames.clamp(min=float(frames.max()) - settings.dynamic_range)
    if settings.cosines:
        frames = smooth_bands(frames, settings.cosines)
    frames = frames - (frames.mean() if settings.colour else frames.mean(0))
    return add_deltas(frames) if settings.deltas else frames


def compute_log_mel(samples: Tensor, settings: SpeechSettings) -> Tensor:
    return log_mel(samples, settings.rate, bands=settings.bands, hop=settings.hop, lowest=settings.lowest)


def augment_features(recording: Tensor, settings: SpeechSettings, generator: torch.Generator) -> Tensor:
    """Computes frames (F, M) with random changes of speaker, room and microphone."""
    frames = recording
    if recording.dim() == 1:
        samples = augment_samples(recording, settings, generator)
        frames = compute_log_mel(samples, settings)
    if settings.stretch:
        frames = audio_augmentation.stretch_time(frames, settings.stretch, generator)
    if settings.voice:
        frames = audio_augmentation.warp_bands(frames, settings.voice, generator)
    if settings.tilt:
        frames = audio_augmentation.tilt_spectrum(frames, settings.tilt, generator)
    return audio_augmentation.spec_augment(
        compute_features(frames, settings),
        times=settings.time_masks,
        longest=settings.longest_mask,
        bands=settings.band_masks,
        widest=settings.widest_mask,
        generator=generator,
    )


def augment_samples(samples: Tensor, settings: SpeechSettings, generator: torch.Generator) -> Tensor:
    """Changes speed, adds noise, and adds or cuts silence: (N,) -> (N',)."""
    samples = audio_augmentation.change_speed(samples, settings.speed, generator)
    if audio_augmentation.sample_bool(settings.noise, generator):
        samples = audio_augmentation.add_noise(samples, (settings.loudest, settings.quietest), generator)
    if settings.shift:
        samples = audio_augmentation.pad_or_trim(samples, round(settings.shift * settings.rate), generator)
    return normalize_loudness(samples)


def measure_feature_std(all_frames: Sequence[Tensor]) -> Tensor:
    """Computes the standard deviation of each feature over all frames: (M,)."""
    return torch.cat(list(all_frames)).std(0).clamp(min=1e-3)


def join_recordings(
    frames: Sequence[Tensor], texts: Sequence[list[int]], share: float, generator: torch.Generator
) -> tuple[list[Tensor], list[list[int]]]:
    """Appends another recording and its text to a random fraction of the recordings."""
    others = torch.randperm(len(frames), generator=generator).tolist()
    chosen = (torch.rand(len(frames), generator=generator) < share).tolist()
    appended = [[other] if yes else [] for other, yes in zip(others, chosen, strict=True)]
    longer = [torch.cat([own, *(frames[i] for i in more)]) for own, more in zip(frames, appended, strict=True)]
    return longer, [
        [*own, *(token for i in more for token in texts[i])] for own, more in zip(texts, appended, strict=True)
    ]

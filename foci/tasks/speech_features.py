"""Recordings into frames: what a speech model hears, and how it is varied while training.

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
from foci.inputs.audio import levelled, log_mel, read_sound, with_deltas
from foci.inputs.files import found_at
from foci.inputs.text import TokenizerKind
from foci.nn.config import Config


@dataclass(frozen=True)
class SpeechSettings(Config):
    """What recordings become, how they are varied, and what writes them down: [task] in a run's TOML."""

    section = "task"

    size: Literal["tiny", "small", "base"] = "small"  # of the model; what follows changes single numbers of it
    width: int | None = None  # of the states
    layers: int | None = None  # how many blocks listen
    decoder_layers: int | None = None  # how many blocks write; 0: CTC alone
    heads: int | None = None  # of each attention
    hidden: int | None = None  # the width inside the feed-forward
    halvings: int | None = None  # how often two frames become one before attention
    local: int | None = None  # how many blocks of convolution read before attention does
    reach: int | None = None  # how many states each of these looks at, an odd number
    dropout: float | None = None  # the share dropped while training
    attention_dropout: float | None = None  # the share of attention weights dropped while training
    depth_dropout: float | None = None  # how often the last layer is skipped while training
    tokenizer: TokenizerKind = "characters"  # what is written: characters, words or pieces of words (bpe)
    vocabulary: int = 500  # how many tokens there are at most, for bpe and words
    rate: int = 16_000  # samples per second that recordings are brought to
    bands: int = 80  # mel bands of a frame
    hop: float = 0.010  # seconds from one frame to the next
    colour: bool = False  # whether a recording keeps its mean spectrum: of one short word that is most of what is said
    deltas: bool = False  # whether a frame also says how it changes
    ctc: float = 0.3  # the share of CTC in the loss and in the choice between answers; the rest is the decoder's
    smoothing: float = 0.1  # the share of each target that is spread over all tokens, while training
    beam: int = 4  # how many answers grow side by side
    min_tokens: int = 1  # shorter answers are taken only where no other is proposed: no text to learn from is empty
    max_tokens: int = 200  # the longest answer
    speed: float = 0.1  # recordings are played faster or slower by up to this share, while training
    noise: float = 0.3  # how often noise is added, while training
    quietest: float = 40.0  # decibels that noise is below the sound at most
    loudest: float = 10.0  # decibels that noise is below the sound at least
    shift: float = 0.0  # seconds of silence that are added or cut at either end at most, while training
    voice: float = 0.0  # bands are moved by up to this share of their place, as another throat does, while training
    tilt: float = 0.0  # bands are louder or quieter by up to so many nats, as another microphone does, while training
    stretch: float = 0.0  # frames are stretched in time by up to this share at the same pitch, while training
    join: float = 0.0  # how often another recording of the batch follows, while training: no sentence is known by heart
    time_masks: int = 2  # how many stretches of time are covered, while training
    longest_mask: int = 40  # how many frames each of them has at most
    band_masks: int = 2  # how many groups of bands are covered, while training
    widest_mask: int = 15  # how many bands each of them has at most

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "width", "layers", "heads", "hidden", "vocabulary", "rate", "bands", "beam", "max_tokens")
        self.at_least(0, "decoder_layers", "halvings", "local", "min_tokens", "shift", "tilt")
        self.at_least(0, "time_masks", "longest_mask", "band_masks", "widest_mask")
        self.shares("ctc", "noise", "join")
        self.shares("dropout", "attention_dropout", "depth_dropout", "smoothing", whole=False)
        self.shares("speed", "voice", "stretch", whole=False)


def heard(path: str, rate: int) -> Tensor:
    """Samples (N,) of a sound file, or frames (F, M) that were made elsewhere and saved as .npy."""
    if not path.endswith(".npy"):
        return levelled(read_sound(path, rate)[0])
    try:
        import numpy
    except ImportError as error:
        raise ImportError(f"{path} needs numpy to be read: pip install numpy") from error
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} should hold frames, but there is {found_at(Path(path))}")
    try:
        frames = torch.from_numpy(numpy.load(path, allow_pickle=False)).float()
    except (ValueError, TypeError, EOFError) as error:
        raise ValueError(f"{path} should hold frames as floats (F, M), but it cannot be read: {error}") from error
    if frames.dim() != 2 or frames.numel() == 0 or not bool(frames.isfinite().all()):
        raise ValueError(f"{path} should hold finite frames (F, M), but it holds {tuple(frames.shape)}")
    return frames


def frames_of(given: Tensor, settings: SpeechSettings) -> Tensor:
    """Samples (N,) or ready-made frames as frames (F, M) of mean 0: of each band, where no microphone has a colour."""
    frames = log_mel(given, settings.rate, bands=settings.bands, hop=settings.hop) if given.dim() == 1 else given
    frames = frames - (frames.mean() if settings.colour else frames.mean(0))
    return with_deltas(frames) if settings.deltas else frames


def varied_frames(given: Tensor, settings: SpeechSettings, generator: torch.Generator) -> Tensor:
    """The same, said by somebody else somewhere else: (F, M)."""
    if given.dim() == 1:
        given = varied_sound(given, settings, generator)
        given = log_mel(given, settings.rate, bands=settings.bands, hop=settings.hop)
    if settings.stretch:
        given = audio_augmentation.slower(given, settings.stretch, generator)
    if settings.voice:
        given = audio_augmentation.another_voice(given, settings.voice, generator)
    if settings.tilt:
        given = audio_augmentation.tilted(given, settings.tilt, generator)
    return audio_augmentation.masked(
        frames_of(given, settings),
        times=settings.time_masks,
        longest=settings.longest_mask,
        bands=settings.band_masks,
        widest=settings.widest_mask,
        generator=generator,
    )


def varied_sound(samples: Tensor, settings: SpeechSettings, generator: torch.Generator) -> Tensor:
    """Another speed, noise, and silence around: (N,) -> (N',)."""
    samples = audio_augmentation.faster(samples, settings.speed, generator)
    if audio_augmentation.chance(settings.noise, generator):
        samples = audio_augmentation.noisy(samples, (settings.loudest, settings.quietest), generator)
    if settings.shift:
        samples = audio_augmentation.shifted(samples, round(settings.shift * settings.rate), generator)
    return levelled(samples)


def spread(all_frames: Sequence[Tensor]) -> Tensor:
    """How far each number of a frame is from its mean, over all frames: (M,)."""
    return torch.cat(list(all_frames)).std(0).clamp(min=1e-3)


def joined(
    frames: Sequence[Tensor], texts: Sequence[list[int]], share: float, generator: torch.Generator
) -> tuple[list[Tensor], list[list[int]]]:
    """So many of the recordings are followed by another one, and their texts by its text."""
    others = torch.randperm(len(frames), generator=generator).tolist()
    chosen = (torch.rand(len(frames), generator=generator) < share).tolist()
    follows = [[other] if yes else [] for other, yes in zip(others, chosen, strict=True)]
    longer = [torch.cat([own, *(frames[i] for i in more)]) for own, more in zip(frames, follows, strict=True)]
    return longer, [
        [*own, *(token for i in more for token in texts[i])] for own, more in zip(texts, follows, strict=True)
    ]

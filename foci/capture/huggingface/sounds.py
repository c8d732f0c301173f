"""Finds the frames of sound among the tokens that a model of transformers reads, and the times of its audio encoder.

The processor of such a model puts one audio token into the text for each frame that the language model gets, so that
neighboring audio tokens are a recording. The models differ in how much of the recording a frame hears.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.record.labels import Segment
from foci.record.pictures import scale_to_bytes

SAMPLES_PER_SECOND = 16000
# The columns of a spectrogram that a model reads.
FEATURES_PER_SECOND = 100
# The seconds of an audio token of a model, by its type.
TOKEN_SECONDS = {
    "audioflamingo3": 0.04,
    "gemma3n": 0.16,
    "gemma4": 0.04,
    "glmasr": 0.08,
    "granite_speech": 0.1,
    "musicflamingo": 0.04,
    "qwen2_audio": 0.04,
    "qwen2_5_omni_thinker": 0.04,
    # 13 tokens of each second.
    "qwen3_asr": 1 / 13,
    "qwen3_omni_moe_thinker": 1 / 13,
    "voxtral": 0.08,
}
# The seconds of a state of an audio encoder, by its type. Of others, the strides of the convolutions tell it.
STATE_SECONDS = {
    "audioflamingo3_encoder": 0.02,
    "gemma3n_audio": 0.04,
    "gemma4_audio": 0.04,
    "glmasr_encoder": 0.02,
    "granite_speech_encoder": 0.02,
    "moonshine": 0.024,
    "parakeet_encoder": 0.08,
    "qwen2_audio_encoder": 0.02,
    "qwen2_5_omni_audio_encoder": 0.02,
    "qwen3_asr_encoder": 1 / 13,
    "qwen3_omni_moe_audio_encoder": 1 / 13,
    "speech_to_text": 0.04,
    "voxtral_encoder": 0.02,
    "wav2vec2-bert": 0.02,
    "whisper": 0.02,
}
FEATURES = ("input_features",)
FEATURE_MASKS = ("feature_attention_mask", "input_features_mask")
# The largest number of bands and of columns of a kept spectrogram.
MAX_BANDS, MAX_COLUMNS = 64, 400


def find_sound_segments(config: Any, ids: Tensor, inputs: dict[str, Any]) -> tuple[list[Segment], list[Tensor]]:
    """The frames of sound among the token ids (B, T), and for each the part of the spectrogram that the model reads."""
    number = getattr(config, "audio_token_id", None)
    runs = find_runs((ids == number).nonzero().tolist()) if isinstance(number, int) else []
    # A model that replaces one token by a whole recording has other positions than tokens.
    if all(stop - start == 1 for _, start, stop in runs):
        return [], []
    seconds = TOKEN_SECONDS.get(config.model_type)
    segments: list[Segment] = []
    lengths: list[int] = []
    for row, start, stop in runs:
        if not segments or not continues_recording(config, ids[row], row, start, segments[-1]):
            lengths.append(0)
        place = Segment("frames", row, start, columns=stop - start, image=len(lengths) - 1, seconds=seconds)
        segments.append(replace(place, frame=lengths[-1] or None))
        lengths[-1] += stop - start
    if seconds is None:
        return segments, []
    spectrograms = split_features(inputs, [n * seconds * FEATURES_PER_SECOND for n in lengths])
    if not spectrograms:
        return segments, []
    pictures = [cut_spectrogram(spectrograms[each.image], each) for each in segments]
    return [replace(each, picture=i) for i, each in enumerate(segments)], pictures


def find_runs(positions: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """Neighboring positions (sequence, position) as (sequence, start, stop).

    >>> find_runs([[0, 2], [0, 3], [0, 7], [1, 0]])
    [(0, 2, 4), (0, 7, 8), (1, 0, 1)]
    """
    starts = [n for n, (row, at) in enumerate(positions) if n == 0 or list(positions[n - 1]) != [row, at - 1]]
    stops = [*starts[1:], len(positions)]
    return [
        (positions[start][0], positions[start][1], positions[stop - 1][1] + 1)
        for start, stop in zip(starts, stops, strict=True)
    ]


def continues_recording(config: Any, ids: Tensor, row: int, start: int, last: Segment) -> bool:
    """Whether only frames of a video lie between two runs of audio tokens: the sound of a video is among its frames."""
    video = getattr(config, "video_token_id", None)
    between = ids[last.stop : start]
    return row == last.sequence and isinstance(video, int) and bool((between == video).all())


def split_features(inputs: dict[str, Any], lengths: Sequence[float]) -> list[Tensor]:
    """The spectrogram (bands, columns) of each recording, given their columns; [] if they are laid out otherwise."""
    rows = list(read_features(inputs))
    if len(rows) == len(lengths):
        return rows
    # A long recording is cut into rows.
    found = []
    for length in lengths:
        part: list[Tensor] = []
        while rows and sum(each.shape[1] for each in part) < 0.99 * length:
            part.append(rows.pop(0))
        if not part:
            return []
        found.append(torch.cat(part, 1))
    return found if not rows else []


def read_features(inputs: dict[str, Any]) -> Iterator[Tensor]:
    """The features that a model reads, as (bands, columns) without padding."""
    features = next((inputs[name] for name in FEATURES if isinstance(inputs.get(name), Tensor)), None)
    mask = next((inputs[name] for name in FEATURE_MASKS if isinstance(inputs.get(name), Tensor)), None)
    if features is None or features.dim() != 3:
        return
    if mask is not None and mask.shape[1] == features.shape[1]:
        features = features.transpose(1, 2)
    if mask is not None and mask.shape != (features.shape[0], features.shape[2]):
        return
    for i, row in enumerate(features.detach().float().cpu()):
        yield row if mask is None else row[:, mask[i].bool().cpu()]


def cut_spectrogram(spectrogram: Tensor, segment: Segment) -> Tensor:
    """The part that a segment hears, as a picture (bands, columns, 3) with low sounds at the bottom."""
    assert segment.seconds is not None
    columns = segment.seconds * FEATURES_PER_SECOND
    start, stop = (round(n * columns) for n in (segment.frame or 0, (segment.frame or 0) + segment.columns))
    part = spectrogram[:, start:stop]
    part = F.pad(part, (0, stop - start - part.shape[1]), value=float(spectrogram.min()))
    size = min(MAX_BANDS, part.shape[0]), min(MAX_COLUMNS, part.shape[1])
    grey = scale_to_bytes(F.adaptive_avg_pool2d(part[None], size)[0].flip(0))
    return grey.unsqueeze(-1).expand(-1, -1, 3).contiguous()


def find_state_seconds(config: Any) -> float | None:
    """The seconds of a state of an audio encoder; None if they are not known."""
    known = STATE_SECONDS.get(config.model_type)
    strides = getattr(config, "conv_stride", None)
    if known is not None or not isinstance(strides, list | tuple):
        return known
    return math.prod(strides) * getattr(config, "squeeze_factor", 1) / SAMPLES_PER_SECOND

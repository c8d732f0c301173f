"""Test the digit model that ships: digits of six speakers and eight accents, letters, words and other sounds.

    python benchmarks/datasets.py fsdd --data DATA --out plain/fsdd
    python benchmarks/check_digits.py --data plain

Prints how many of each kind are right and how many are declined. The digits, letters, words and sentences of espeak-ng
need that program; nothing of it is used in the training.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from made_sounds import RATE, Sounds

from foci.models import MODELS_DIRECTORY
from foci.nn.speech import SpeechEncoder
from foci.tasks.class_prediction import ClassPrediction
from foci.tasks.model_file import load_trained_model
from foci.tasks.speech import Speech
from foci.tasks.speech_features import compute_features, load_recording

TESTED = 200  # sounds of each kind
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LETTERS = "abcdefghijklmnpqrstuvwxyz"  # "o" is a digit
WORDS = (
    *("hello", "house", "water", "computer", "yellow", "morning", "banana", "window", "table", "doctor"),
    *("monday", "thank you", "please", "stop", "music", "garden", "river", "paper", "green", "yesterday"),
)
SENTENCES = (
    "Where is the train station?",
    "The weather is lovely today.",
    "Please close the door behind you.",
    "My brother lives near the river.",
    "Could you repeat that more slowly?",
    "She bought bread and a bottle of milk.",
    "The meeting was moved to Thursday.",
    "Nobody knew the answer.",
)
VOICES = ("en-gb", "en-us", "en-gb-scotland", "en-029")
ALL_VOICES = (*VOICES, "en-gb-x-rp", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-us-nyc")
PITCHES = (30, 45, 60, 75)


def speak(texts: Iterable[str], voice: str, pitch: int = 50) -> list[Tensor]:
    """The texts as espeak-ng says them at its default speed."""
    sounds = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "spoken.wav")
        for text in texts:
            subprocess.run(["espeak-ng", "-v", voice, "-p", str(pitch), "-w", str(path), text], check=True)
            sounds.append(load_recording(str(path), RATE))
    return sounds


def list_sounds(digits: Sequence[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    """Sounds that are to be declined, by kind."""
    yield "digital silence", [torch.zeros(length) for length in range(800, 16_000, 800)]
    made = Sounds(digits, seed=3)
    for kind, make in (made.learned() | made.changed() | made.others()).items():
        yield kind, made.make([make], TESTED)
    if shutil.which("espeak-ng"):
        for kind, texts in (("letters", LETTERS), ("words", WORDS), ("sentences", SENTENCES)):
            yield f"espeak-ng, {kind}", [each for voice in VOICES for each in speak(texts, voice)]


@torch.no_grad()
def judge(task: Speech, model: SpeechEncoder, sound: Tensor) -> ClassPrediction:
    features = (compute_features(sound, task.settings) / task.std)[: task.max_size]
    return task.judge(model, features, task.transcribe(model, [features])[0])


def main() -> None:
    """Print a line for each kind of sound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with fsdd")
    parser.add_argument("--model", type=Path, default=MODELS_DIRECTORY / "speech", help="the folder of the model")
    options = parser.parse_args()
    trained = load_trained_model(options.model)
    task, model = cast("Speech", trained.task), cast("SpeechEncoder", trained.model)

    def report(name: str, texts: Sequence[str], sounds: Sequence[Tensor]) -> None:
        found = [judge(task, model, each) for each in sounds]
        right = sum(each.label == text for each, text in zip(found, texts, strict=True))
        answered = sum(each.label == text and not each.declined for each, text in zip(found, texts, strict=True))
        declined = sum(each.declined for each in found)
        wrong = Counter(f"{text}: {each.label}" for text, each in zip(texts, found, strict=True) if text != each.label)
        print(
            f"{name}: {right} of {len(sounds)} right, {answered} and not declined, {declined} declined; "
            + ", ".join(f"{pair} {count}" for pair, count in wrong.most_common(6)),
            flush=True,
        )

    folder = options.data / "fsdd"
    for part in ("dev", "test"):
        examples = Speech.read([folder / f"{part}.tsv"], task.settings)
        report(
            f"fsdd, {part}", [each.text for each in examples], [load_recording(each.path, RATE) for each in examples]
        )
    if shutil.which("espeak-ng"):
        for voice in ALL_VOICES:
            spoken = [each for pitch in PITCHES for each in speak(DIGITS, voice, pitch)]
            report(f"espeak-ng, {voice}", DIGITS * len(PITCHES), spoken)
    train = [load_recording(each.path, RATE) for each in Speech.read([folder / "train.tsv"], task.settings)]
    for name, sounds in list_sounds(train):
        declined = sum(judge(task, model, each).declined for each in sounds)
        print(f"{name}: {100 * declined / len(sounds):.1f}% of {len(sounds)} declined", flush=True)


if __name__ == "__main__":
    main()

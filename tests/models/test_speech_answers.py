"""What the pretrained digit model answers and declines."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foci.cli.samples import SEVEN, synthesize
from foci.models.pretrained import pretrained
from tests.inputs.test_audio import write_wav


def made_sounds() -> dict[str, Tensor]:
    time = torch.arange(6000) / 8000
    notes = [torch.sin(2 * math.pi * pitch * time[:2000]) for pitch in (262, 330, 392)]
    return {
        "silence": torch.zeros(6000),
        "noise": 0.3 * torch.randn(6000, generator=torch.Generator().manual_seed(0)).clamp(-3, 3),
        "tone": 0.5 * torch.sin(2 * math.pi * 440 * time),
        "melody": 0.5 * torch.cat(notes),
    }


@pytest.mark.parametrize("name", made_sounds())
def test_speech_declines_sounds_that_are_no_digits(name: str, tmp_path: Path) -> None:
    path = write_wav(tmp_path / f"{name}.wav", made_sounds()[name], 8000)
    assert re.fullmatch(r"not one of my classes \(the nearest is \w+\)", pretrained("speech")(path))


def test_each_part_of_a_recording_is_answered_or_declined(tmp_path: Path) -> None:
    """A word, a melody and the same word, with pauses between them."""
    model, seven = pretrained("speech"), torch.tensor(synthesize(SEVEN))
    pause, melody = torch.zeros(4000), made_sounds()["melody"]
    one = write_wav(tmp_path / "one.wav", seven, 8000)
    three = write_wav(tmp_path / "three.wav", torch.cat([seven, pause, melody, pause, seven]), 8000)
    answers = model([one, three])
    assert re.fullmatch(r"seven \(\d+%\)", answers[0])
    parts = answers[1].split(", ")
    # A synthetic word with silence around it may be declined, but its nearest word is right.
    assert len(parts) == 3
    assert "seven" in parts[0]
    assert parts[1].startswith("not one of my classes")
    assert re.fullmatch(r"seven \(\d+%\)", parts[2])
    assert model.show(three).answer == answers[1]
    # The text for the error rates has the nearest words.
    with torch.no_grad():
        words = model.task.decode(model.model, [model.task.parse_input(str(three))])[0].split()
    assert (len(words), words[0], words[2]) == (3, "seven", "seven")

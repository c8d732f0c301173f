import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foci.cli.samples import SEVEN, synthesize
from foci.models.pretrained import pretrained
from foci.tasks.rejection import REJECTION_FILE, Rejection
from foci.tasks.speech import Speech
from foci.tasks.vision import Vision
from tests.inputs.test_audio import write_wav


def test_a_threshold_declines_the_share_of_known_inputs() -> None:
    torch.manual_seed(0)
    known, others = torch.randn(300, 8), torch.randn(300, 8) + 3.0
    rejection = Rejection.fit(known, others, hidden=4)
    for lost in (0.0, 0.01, 0.1):
        assert int(rejection.with_threshold(known, lost).declines(known).sum()) == round(300 * lost)
    assert float(rejection.with_threshold(known, 0.02).declines(torch.randn(300, 8) + 3.0).float().mean()) > 0.95


def test_it_is_stored_with_the_task() -> None:
    torch.manual_seed(0)
    features = torch.randn(50, 4)
    rejection = Rejection.fit(features, features + 2.0, hidden=3).with_threshold(features, 0.1)
    loaded = Rejection.from_files({REJECTION_FILE: rejection.to_json()})
    assert loaded is not None
    assert torch.allclose(loaded.scores(features), rejection.scores(features), atol=1e-3)
    assert loaded.threshold == rejection.threshold
    assert Rejection.from_files({}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output": [1.0]}, "must have one output for each row and for the bias, got 1 and 1"),
        ({"hidden": [["a"]]}, "hidden must be a list of finite numbers"),
        ({"hidden": 3}, "must have one output for each row"),
        ({"threshold": None}, "threshold must be a list of finite numbers"),
        ({"more": 1}, "rejection.json must be an object with hidden, output, threshold"),
    ],
)
def test_a_damaged_file_is_refused(change: dict[str, object], message: str) -> None:
    content = {"hidden": [[0.0, 1.0]], "output": [0.0, 1.0], "threshold": 0.0}
    with pytest.raises(ValueError, match=re.escape(message)):
        Rejection.from_files({REJECTION_FILE: json.dumps(content | change)})


def test_vision_declines_blank_images_and_noise() -> None:
    model = pretrained("vision")
    assert isinstance(model.task, Vision)
    torch.manual_seed(0)
    noise = torch.randn(4, 1, 28, 28)
    blank = torch.linspace(-0.8, 2.0, 4).view(4, 1, 1, 1).expand(4, 1, 28, 28)
    with torch.no_grad():
        assert bool(model.task.classify(model.model, torch.cat([noise, blank]))[1].all())


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


def test_speech_without_a_rejection_answers_with_the_text(tmp_path: Path) -> None:
    model = pretrained("speech")
    assert isinstance(model.task, Speech)
    assert Rejection.from_files(model.task.learned_state()) is not None
    model.task.rejection = None
    assert REJECTION_FILE not in model.task.learned_state()
    assert model(write_wav(tmp_path / "seven.wav", torch.tensor(synthesize(SEVEN)), 8000)) == "seven"

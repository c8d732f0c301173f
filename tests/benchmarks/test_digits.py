"""The training of the digit model: words are cut from sentences, and the vocabulary is reduced to ten digits."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from foci.inputs.audio import ENERGY_FLOOR
from foci.inputs.text import train_tokenizer
from foci.tasks.speech import Speech
from foci.tasks.speech_features import SpeechSettings

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The scripts as modules; `datasets` must be ours, not the package of that name."""
    found = {}
    for name in ("datasets", "an4_words", "train_digits"):
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        found[name] = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, found[name])
        spec.loader.exec_module(found[name])
    return found


def test_words_are_found_in_sentences(scripts: dict[str, ModuleType]) -> None:
    """Each phone is a vector of its own; sentences have silence at both ends and between some words."""
    torch.manual_seed(0)
    lexicon = {"ab": [["A", "B"]], "c": [["C", "D"], ["D"]]}
    sounds = {"SIL": torch.zeros(13), **{phone: 4 * torch.randn(13) for phone in "ABCD"}}
    for phone in "ABCD":
        sounds[phone][0] = 10.0
    cepstra, texts, borders = [], [], []
    for number in range(12):
        words = [["ab", "c", "ab"], ["c", "ab"]][number % 2]
        frames, own = [sounds["SIL"]] * 15, []
        for word in words:
            phones = lexicon[word][number % 3 == 0 and word == "c"]
            start = len(frames)
            frames += [sounds[phone] for phone in phones for _ in range(9 + number % 3)]
            own.append((start, len(frames)))
            frames += [sounds["SIL"]] * (12 * (number % 2))
        frames += [sounds["SIL"]] * 15
        cepstra.append(torch.stack(frames) + 0.3 * torch.randn(len(frames), 13))
        texts.append(words)
        borders.append(own)
    found = scripts["an4_words"].find_words(cepstra, texts, lexicon)
    margin = scripts["an4_words"].MARGIN
    for parts, own in zip(found, borders, strict=True):
        assert len(parts) == len(own)
        for part, (start, stop) in zip(parts, own, strict=True):
            assert start - margin - 2 <= part.start <= start + 2
            assert stop - 2 <= part.stop <= stop + margin + 2


def test_cepstra_of_a_word_become_bands_of_the_digit_model(scripts: dict[str, ModuleType]) -> None:
    an4 = scripts["an4_words"]
    bands = an4.to_bands(torch.randn(30, 13))
    assert bands.shape == (30, 48)
    assert float(bands.exp().sum(1).mean()) == pytest.approx(an4.LEVEL, rel=0.01)
    assert float(an4.to_bands(torch.cat([torch.full((1, 13), -300.0), torch.ones(9, 13)])).min()) == pytest.approx(
        math.log(ENERGY_FLOOR)
    )
    assert an4.read_lexicon("A  AH\nA(2)  EY\n") == {"a": [["AH"], ["EY"]]}


def test_only_the_digits_stay_in_the_vocabulary(scripts: dict[str, ModuleType]) -> None:
    torch.manual_seed(0)
    train_digits = scripts["train_digits"]
    settings = SpeechSettings(size="tiny", width=32, layers=1, hidden=32, tokenizer="words", bands=16)
    words = ["b", "enter", *reversed(train_digits.DIGITS), "seven"]
    task = Speech(settings, train_tokenizer("words", words, 100), [1.0] * 16)
    model = task.model().eval()
    smaller, reduced = train_digits.keep_digits(task, model)
    frames = torch.randn(1, 40, 16)
    with torch.no_grad():
        whole, kept = model(frames).ctc, reduced(frames).ctc
    for word in train_digits.DIGITS:
        before, after = task.tokenizer.encode(word), smaller.tokenizer.encode(word)
        assert torch.allclose(whole[..., before[0]], kept[..., after[0]], atol=1e-5)
        assert smaller.tokenizer.decode(after) == word
    assert kept.shape[2] == whole.shape[2] - 2
    assert torch.allclose(whole[..., 0], kept[..., 0], atol=1e-5)

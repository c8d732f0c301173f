"""The training of the digit model: words are cut from sentences or made, changed at random, and learned."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import math
import random
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import torch

from foci.inputs.audio import ENERGY_FLOOR
from foci.inputs.text import train_tokenizer
from foci.tasks.model_file import load_trained_model
from foci.tasks.speech import Speech
from foci.tasks.speech_features import SpeechSettings, compute_features

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The scripts as modules; `datasets` must be ours, not the package of that name."""
    found = {}
    for name in ("datasets", "an4_words", "frame_augmentation", "made_sounds", "made_words", "train_digits"):
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


def test_made_sounds_are_sounds(scripts: dict[str, ModuleType]) -> None:
    recordings = [torch.randn(length).mul(0.1) for length in (3000, 5000)]
    sounds = scripts["made_sounds"].Sounds(recordings, seed=1)
    kinds = sounds.learned() | sounds.changed() | sounds.others()
    assert len(kinds) == 7 + 5 + 9
    for sound in sounds.make(kinds.values(), 2):
        assert sound.dim() == 1
        assert len(sound) > 500
        assert sound.isfinite().all()


def test_batches_are_sorted_by_length_and_lose_nothing(scripts: dict[str, ModuleType]) -> None:
    train_digits = scripts["train_digits"]
    torch.manual_seed(0)
    settings = SpeechSettings(size="tiny", tokenizer="words", rate=8000, bands=16)
    words = {name: [train_digits.Word(torch.randn(30, 16), "a", "", "train")] for name in train_digits.SHARES}
    task = Speech(settings, train_tokenizer("words", ["a", "none"], 100), [1.0] * 16)
    pool = train_digits.Pool(words, task, torch.device("cpu"))
    count = train_digits.SORTED_BATCHES
    batches = [batch for _, batch in zip(range(count), pool.stream(20, train_digits.Changes()), strict=False)]
    ranges = sorted((int(each["lengths"].min()), int(each["lengths"].max())) for each in batches)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(ranges))
    for batch in batches:
        assert 0 <= batch["frames"].shape[1] - int(batch["lengths"].max()) < 8
        assert {len(each) for each in batch.values()} == {20}


@pytest.mark.parametrize("colour", [True, False])
def test_features_of_a_batch_are_those_of_single_recordings(scripts: dict[str, ModuleType], colour: bool) -> None:
    torch.manual_seed(0)
    settings = SpeechSettings(bands=24, lowest=100.0, rate=8000, cosines=8, dynamic_range=5.0, colour=colour)
    frames, lengths = 4.0 * torch.randn(3, 20, 24), torch.tensor([20, 7, 1])
    features = scripts["frame_augmentation"].normalize_batch(frames, lengths, settings)
    for own, row, length in zip(features, frames, lengths.tolist(), strict=True):
        assert torch.allclose(own[:length], compute_features(row[:length], settings), atol=1e-5)
        assert not bool(own[length:].any())


def test_no_changes_keep_the_features(scripts: dict[str, ModuleType]) -> None:
    augmentation = scripts["frame_augmentation"]
    torch.manual_seed(0)
    settings = SpeechSettings(bands=24, lowest=100.0, rate=8000, dynamic_range=5.0, colour=True)
    none = augmentation.Changes(*[0] * len(fields(augmentation.Changes)))
    # The same in every frame, because the time of a recording is read between its frames.
    frames, lengths = torch.arange(24.0).expand(2, 16, 24), torch.tensor([16, 9])
    features, same = augmentation.augment_batch(frames, lengths, none, settings)
    assert same.tolist() == [16, 9]
    assert torch.allclose(features, augmentation.normalize_batch(frames, lengths, settings), atol=1e-4)


def test_changed_batches_are_finite_and_differ(scripts: dict[str, ModuleType]) -> None:
    augmentation = scripts["frame_augmentation"]
    torch.manual_seed(0)
    settings = SpeechSettings(bands=24, lowest=100.0, rate=8000, cosines=8, dynamic_range=9.0, colour=True)
    frames, lengths = torch.randn(16, 140, 24) - 5.0, torch.randint(3, 140, (16,))
    frames[0] = augmentation.FLOOR
    first, shorter = augmentation.augment_batch(frames, lengths, augmentation.Changes(), settings)
    second, _ = augmentation.augment_batch(frames, lengths, augmentation.Changes(), settings)
    assert first.isfinite().all()
    assert first.shape[1] <= augmentation.MAX_FRAMES
    assert int(shorter.min()) >= 6
    width = min(first.shape[1], second.shape[1])
    assert not torch.allclose(first[:, :width], second[:, :width])


def test_broken_words_are_made_of_their_frames(scripts: dict[str, ModuleType]) -> None:
    torch.manual_seed(0)
    frames = torch.arange(30.0)[None, :, None].expand(64, 30, 2)
    lengths = torch.full((64,), 30)
    broken, shorter = scripts["frame_augmentation"].break_words(frames, lengths)
    kinds = set()
    for own, length in zip(broken, shorter.tolist(), strict=True):
        row = own[:length, 0].tolist()
        kinds.add("short" if length < 30 else "backwards" if row[0] > row[1] else "halves")
        assert row != list(range(30))
        assert set(row) <= set(range(30))
    assert kinds == {"short", "backwards", "halves"}


def test_words_are_made_from_phones(scripts: dict[str, ModuleType]) -> None:
    made = scripts["made_words"]
    words = made.choose_words(300, 0.5, random.Random(0))
    digits = {way for ways in made.DIGIT_PHONES.values() for way in ways}
    for word, phones in words:
        assert (" ".join(phones) in digits) == (word in made.DIGIT_PHONES)
        assert set(phones) <= set(made.PHONES)
    spoken = made.make_words([phones for _, phones in words], 24, 100.0, 4000.0, seed=1)
    assert len(spoken) == 300
    assert all(each.shape[1] == 24 and each.isfinite().all() for each in spoken)
    # The vowel of "e" has its first resonance at 280 Hz and none near 1000 Hz; that of "four" has one at 850 Hz.
    places = made.mel_to_hertz(torch.linspace(150, 2146, 26, dtype=torch.float64))[1:-1]
    near = int((places - 1000).abs().argmin())
    low, back = (made.make_words([[vowel]] * 50, 24, 100.0, 4000.0, seed=1) for vowel in ("IY", "AO"))
    share = [torch.cat([each[:, near] - each.amax(1) for each in rows]).mean() for rows in (low, back)]
    assert share[0] < share[1] - 1.0


def test_attention_of_the_training_is_that_of_the_model(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    settings = SpeechSettings(size="tiny", width=32, layers=2, hidden=32, tokenizer="words", bands=16)
    task = Speech(settings, train_tokenizer("words", ["a", "b"], 100), [1.0] * 16)
    model = task.model().eval()
    frames, lengths, target = torch.randn(3, 40, 16), torch.tensor([40, 9, 23]), torch.randint(4, (3, 2))
    expected = model(frames, target, padding=lengths)
    calls: list[object] = []
    attend = scripts["train_digits"].attend
    monkeypatch.setattr(
        scripts["train_digits"],
        "attend",
        lambda *args, **options: calls.append(options["mask"]) or attend(*args, **options),
    )
    with scripts["train_digits"].use_torch_attention():
        out = model(frames, target, padding=lengths)
    assert len(calls) == 2 + 2
    assert torch.allclose(out.logits, expected.logits, atol=1e-5)
    for own, states, length in zip(out.ctc, expected.ctc, expected.lengths.tolist(), strict=True):
        assert torch.allclose(own[:length], states[:length], atol=1e-5)
    assert torch.equal(model(frames, target, padding=lengths).logits, expected.logits)


def test_a_model_is_trained_from_packed_words(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed, read again, and trained for a second without a speaker."""
    train_digits = scripts["train_digits"]
    torch.manual_seed(0)
    sources = [("jackson", "train"), ("theo", "train"), ("an4", "train"), ("an4", "test"), ("sounds", "train")]
    words = [
        train_digits.Word(torch.randn(20, 48), text, source, part)
        for source, part in sources
        for text in (
            ["none"] if source == "sounds" else ["b", *train_digits.DIGITS] if source == "an4" else train_digits.DIGITS
        )
    ]
    monkeypatch.setattr(train_digits, "read_words", lambda folder, *_: words if folder.name == "fsdd" else [])
    monkeypatch.setattr(train_digits, "make_sounds", lambda _: [])
    monkeypatch.setattr(train_digits, "MADE_WORDS", 60)
    monkeypatch.setattr(train_digits, "FEWEST", 1)
    packed = tmp_path / "words.pt.xz"
    settings = SpeechSettings(rate=8000, bands=48, lowest=180.0)
    train_digits.pack(tmp_path, packed, settings)
    again = train_digits.unpack(packed)
    assert [each[1:] for each in again] == [each[1:] for each in words]
    assert all((a.frames - b.frames).abs().max() <= 0.051 for a, b in zip(again, words, strict=True))
    out = tmp_path / "theo"
    out.mkdir()
    arguments = ["one", "--words", str(packed), "--out", str(out), "--without", "theo", "--set", "train.steps=3"]
    changes = ["--set", "task.width=16", "--set", "task.hidden=16", "--set", "task.layers=1"]
    monkeypatch.setattr(sys, "argv", ["train_digits.py", *arguments, "--batch", "32", "--device", "cpu", *changes])
    train_digits.main()
    results = json.loads((out / "results.json").read_text())
    assert {name: result["of"] for name, result in results.items()} == {
        "theo": 10,
        "an4 digits": 10,
        "an4 letters": 1,
        "an4 words": 0,
    }
    task, _, about = load_trained_model(out)
    assert about["without"] == "theo"
    assert [task.tokenizer.decode([token]) for token in task.answers] == list(train_digits.DIGITS)
    assert train_digits.OTHER in [task.tokenizer.decode([token]) for token in task.others]

"""Spectrograms of the page: frequencies, times, loudness and sizes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foci.record.record import Record
from foci.view.page import document
from foci.view.page.sounds import compute_spectrogram, join_pictures
from tests.view import records
from tests.view.pages import decode_array, read_payload


def test_a_tone_lies_at_its_frequency_and_time() -> None:
    time = torch.arange(8000) / 8000
    samples = ((2 * torch.pi * 1000 * time).sin() * 20_000 * (time > 0.5)).to(torch.int16)
    picture = compute_spectrogram(samples, 8000)
    assert (picture.shape, picture.dtype) == ((64, 126), torch.uint8)
    assert int(picture[:, 100].argmax()) in {15, 16}
    assert int(picture.max()) == 255
    assert int(picture[:, :58].max()) == 0


@pytest.mark.parametrize("length", [0, 1, 100, 400_000])
@pytest.mark.parametrize("rate", [1, 16_000, 192_000])
def test_the_size_is_bounded_and_silence_is_black(length: int, rate: int) -> None:
    picture = compute_spectrogram(torch.zeros(length, dtype=torch.int16), rate)
    assert picture.shape[0] == 64
    assert 1 <= picture.shape[1] <= 400
    assert int(picture.max()) == 0


def test_frames_among_tokens_have_their_recording() -> None:
    record = records.words_and_sound()
    header, arrays = read_payload(document.render_html(record))
    (found,) = header["labels"]
    assert (found["sound"], found["seconds"], found["frames"]) == (8000, 0.1, [[*range(5, 13)]])
    assert found["texts"][0][5:7] == ["0.00s", "0.10s"]
    assert decode_array(header, arrays, "spectrogram.0").shape[:2] == (1, 64)
    # Samples without frames have no place in the text.
    labels = replace(record.labels["input"], segments=())
    alone = Record(record.layers, {"input": labels}, model="AudioLanguage")
    assert read_payload(document.render_html(alone))[0]["labels"][0]["sound"] is None


def test_the_spectrogram_that_a_model_read_is_shown_without_its_recording() -> None:
    header, arrays = read_payload(document.render_html(records.words_and_spectrograms()))
    (found,) = header["labels"]
    assert (found["spectrogram"], found["sound"], found["seconds"]) == (True, None, 0.1)
    assert found["frames"] == [[*range(5, 13)]]
    (picture,) = decode_array(header, arrays, "spectrogram.0")
    assert picture.shape == (64, 80)
    # The lowest band comes first.
    assert picture[0, :40].tolist() == picture[-1, 40:].tolist() == [255] * 40
    assert int(picture[0, 40:].max()) == int(picture[-1, :40].max()) == 0


def test_a_spectrogram_of_one_of_two_sequences() -> None:
    labels = records.words_and_spectrograms().labels["input"]
    both = replace(labels, texts=labels.texts * 2, words=None)
    first, second = join_pictures(both, 2)
    assert first.shape == second.shape
    assert int(first.max()) == 255
    assert int(second.max()) == 0
    # Without times, nothing says where a frame lies.
    bare = replace(labels, segments=tuple(replace(each, seconds=None) for each in labels.segments))
    assert join_pictures(bare, 1) == []


def test_frames_among_tokens_are_saved(tmp_path: Path) -> None:
    record = records.words_and_sound()
    record.save(tmp_path / "x.foci")
    loaded, made = Record.load(tmp_path / "x.foci").labels["input"], record.labels["input"]
    assert loaded.sounds is not None
    assert made.sounds is not None
    assert torch.equal(loaded.sounds, made.sounds)
    assert (loaded.rate, loaded.seconds, loaded.segments) == (made.rate, made.seconds, made.segments)


def test_the_page_begins_with_a_word_that_attends_to_the_recording() -> None:
    record = records.words_and_sound()
    header, _ = read_payload(document.render_html(record))
    assert header["initial"]["head"] in {"L0", "L1"}
    assert record.labels["input"].texts[0][header["initial"]["query"]] in {" low", " high"}

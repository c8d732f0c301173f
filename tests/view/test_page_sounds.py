"""Spectrograms of the page: frequencies, times, loudness and sizes."""

import pytest
import torch

from foci.view.page.sounds import compute_spectrogram


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

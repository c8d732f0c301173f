"""Sound: read from files, resampled, and as a log-mel spectrogram that equals the formula."""

from __future__ import annotations

import math
import struct
import wave
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foci.inputs import audio


def tone(frequency: float, rate: int, seconds: float = 0.5, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.sin(2 * math.pi * frequency * torch.arange(round(rate * seconds), dtype=dtype) / rate)


def write_wav(path: Path, samples: Tensor, rate: int, width: int = 2, channels: int = 1) -> Path:
    """Samples in -1 to 1 as PCM of so many bytes."""
    whole = (samples.double().clamp(-1, 1) * (2 ** (8 * width - 1) - 1)).round().long().tolist()
    if width == 1:
        content = bytes(value + 128 for value in whole)
    else:
        content = b"".join(struct.pack("<i", value << (32 - 8 * width))[4 - width :] for value in whole)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(content)
    return path


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_a_wav_file_gives_its_samples_with_and_without_soundfile(width: int, tmp_path: Path) -> None:
    samples = 0.8 * tone(440, 8000)
    path = write_wav(tmp_path / "tone.wav", samples, 8000, width)
    plain, rate = audio.read_pcm(str(path))
    assert rate == 8000
    assert plain.shape == (4000,)
    assert (plain - samples).abs().max() < 2.0 ** (2 - 8 * width) + 1e-6
    pytest.importorskip("soundfile")
    assert torch.allclose(audio.read_audio(path)[0], plain, atol=1e-7)


def test_channels_are_averaged_and_a_rate_is_kept(tmp_path: Path) -> None:
    both = torch.stack([torch.full((100,), 0.5), torch.full((100,), -0.25)], dim=1)
    path = write_wav(tmp_path / "two.wav", both.flatten(), 8000, channels=2)
    samples, rate = audio.read_audio(path)
    assert rate == 8000
    assert torch.allclose(samples, torch.full((100,), 0.125), atol=1e-4)
    assert audio.read_audio(path, 16000)[0].shape == (200,)


def test_invalid_audio_files_give_clear_errors(tmp_path: Path) -> None:
    path = tmp_path / "text.wav"
    path.write_text("not a sound")
    with pytest.raises(ValueError, match=r"text.wav must be a WAV, FLAC or OGG file, got a text file"):
        audio.read_audio(path)
    (tmp_path / "cut.wav").write_bytes(b"RIFF\x00\x00\x00\x00WAVEfmt ")
    with pytest.raises(ValueError, match=r"cut.wav must be an intact WAV, FLAC or OGG file, but soundfile cannot"):
        audio.read_audio(tmp_path / "cut.wav")
    with pytest.raises(ValueError, match=r"text.wav must be a PCM WAV file, but it cannot be read: .+soundfile"):
        audio.read_pcm(str(path))
    with pytest.raises(FileNotFoundError, match=r"missing.wav must be an audio file, got no such file"):
        audio.read_audio(tmp_path / "missing.wav")
    with pytest.raises(ValueError, match="must be an audio file with samples, got none"):
        audio.read_audio(write_wav(tmp_path / "empty.wav", torch.zeros(0), 8000))


@pytest.mark.parametrize(
    ("start", "format_name"),
    [(b"\x93NUMPY\x01\x00", "NumPy"), (b"ID3\x04", "MP3"), (b"\x89PNG\r\n\x1a\n", "PNG"), (b"RIFF0000WEBP", "WebP")],
)
def test_other_formats_are_refused_by_content(start: bytes, format_name: str, tmp_path: Path) -> None:
    path = tmp_path / "sound.wav"
    path.write_bytes(start + bytes(100))
    with pytest.raises(
        ValueError, match=f"sound.wav must be a WAV, FLAC or OGG file, got a file in {format_name} format"
    ):
        audio.read_audio(path)


@pytest.mark.parametrize("suffix", [".flac", ".ogg", ".wav"])
def test_long_recordings_are_refused_before_they_are_decoded(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soundfile = pytest.importorskip("soundfile")
    path = tmp_path / f"silence{suffix}"
    with soundfile.SoundFile(path, "w", 8000, 1) as file:
        for _ in range(700):
            file.write(torch.zeros(8000).numpy())
    message = r"must have at most 600 seconds of sound, got 700: set FOCI_MAX_SECONDS=700 to read it"
    monkeypatch.setattr(audio, "read_blocks", lambda *_: pytest.fail("decoded"))
    with pytest.raises(ValueError, match=message):
        audio.read_audio(path)
    if suffix == ".wav":
        monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
        with pytest.raises(ValueError, match=message):
            audio.read_audio(path)
    monkeypatch.undo()
    monkeypatch.setenv("FOCI_MAX_SECONDS", "700")
    assert len(audio.read_audio(path)[0]) == 5_600_000


def test_a_flac_stream_of_unknown_length_is_refused(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    path = tmp_path / "stream.flac"
    soundfile.write(path, tone(440, 8000).numpy(), 8000)
    content = bytearray(path.read_bytes())
    # The 36 bits of the number of samples.
    content[21] &= 0xF0
    content[22:26] = bytes(4)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"stream.flac must state its length, got a stream of unknown length"):
        audio.read_audio(path)


@pytest.mark.parametrize("has_soundfile", [True, False])
def test_unusual_sample_rates_are_refused(has_soundfile: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_soundfile:
        monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    path = write_wav(tmp_path / "slow.wav", torch.zeros(1000), 160)
    with pytest.raises(ValueError, match=r"must have a sample rate of 1,000 to 768,000 Hz, got 160"):
        audio.read_audio(path, 16000)


def test_without_soundfile_the_standard_library_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    path = write_wav(tmp_path / "tone.wav", tone(440, 8000), 8000)
    assert audio.read_audio(path)[0].shape == (4000,)


@pytest.mark.parametrize(("before", "after"), [(8000, 16000), (16000, 8000), (44100, 16000), (8000, 7300)])
def test_a_resampled_tone_is_the_same_tone(before: int, after: int) -> None:
    found = audio.resample(tone(440, before), before / after)
    wanted = tone(440, after)
    assert abs(len(found) - len(wanted)) <= 1
    inner = slice(200, min(len(found), len(wanted)) - 200)
    assert (found[inner] - wanted[inner]).abs().max() < 2e-3


def test_resampling_does_not_alias() -> None:
    assert audio.resample(tone(3500, 8000), 2.0)[100:-100].abs().max() < 0.01
    assert audio.resample(tone(1000, 8000), 2.0)[100:-100].abs().max() > 0.99


def test_long_sounds_are_resampled_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    whole = audio.resample(samples, 1.37)
    monkeypatch.setattr(audio, "RESAMPLE_CHUNK", 64)
    assert torch.allclose(audio.resample(samples, 1.37), whole, atol=1e-6)


def test_mel_has_known_values() -> None:
    assert float(audio.hertz_to_mel(0.0)) == 0.0
    assert float(audio.hertz_to_mel(1000.0)) == pytest.approx(999.9855, abs=1e-3)
    assert float(audio.hertz_to_mel(4000.0)) == pytest.approx(2146.06, abs=1e-2)
    assert torch.allclose(
        audio.mel_to_hertz(audio.hertz_to_mel(torch.tensor([50.0, 700.0]))), torch.tensor([50.0, 700.0]).double()
    )


def test_filters_are_triangles_that_share_every_bin() -> None:
    filters = audio.mel_filters(8000, 512, 24, 0.0, 4000.0)
    assert filters.shape == (24, 257)
    assert bool((filters >= 0).all())
    middles = audio.mel_to_hertz(torch.linspace(0, float(audio.hertz_to_mel(4000.0)), 26, dtype=torch.float64)[1:-1])
    assert (filters.argmax(1) * 8000 / 512 - middles).abs().max() <= 8000 / 512
    # Between the first and the last middle, neighbors add up to one.
    inner = filters.sum(0)[int(middles[0] / 15.6) + 1 : int(middles[-1] / 15.7)]
    assert torch.allclose(inner, torch.ones_like(inner), atol=1e-5)


def test_the_spectrogram_equals_the_formula() -> None:
    rate, bands = 8000, 20
    samples = torch.randn(1600, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = audio.log_mel(samples, rate, bands=bands)
    size, step, bins = 200, 80, 512
    window = 0.5 - 0.5 * torch.cos(2 * math.pi * torch.arange(size, dtype=torch.float64) / size)
    filters = audio.mel_filters(rate, bins, bands, 20.0, 4000.0).double()
    padded = torch.nn.functional.pad(samples, (size // 2, size // 2))
    assert found.shape == (21, bands)
    for frame in (0, 7, 20):
        piece = padded[frame * step : frame * step + size] * window
        angles = 2 * math.pi * torch.outer(torch.arange(bins // 2 + 1), torch.arange(size)).double() / bins
        power = (torch.cos(angles) @ piece) ** 2 + (torch.sin(angles) @ piece) ** 2
        assert torch.allclose(found[frame], (filters @ power).clamp(min=audio.ENERGY_FLOOR).log(), atol=1e-8)


def test_a_tone_lies_in_its_band_and_silence_at_the_floor() -> None:
    frames = audio.log_mel(tone(1000, 16000), 16000, bands=40)
    edges = audio.mel_to_hertz(
        torch.linspace(float(audio.hertz_to_mel(20.0)), float(audio.hertz_to_mel(8000.0)), 42).double()
    )
    band = int(frames[10].argmax())
    assert edges[band] < 1000 < edges[band + 2]
    assert torch.equal(
        audio.log_mel(torch.zeros(1600), 16000, bands=4), torch.full((11, 4), math.log(audio.ENERGY_FLOOR))
    )


def test_a_batch_equals_single_calls() -> None:
    both = torch.randn(2, 800, generator=torch.Generator().manual_seed(1))
    found = audio.log_mel(both, 8000, bands=16)
    assert torch.allclose(found[1], audio.log_mel(both[1], 8000, bands=16), atol=1e-5)


def test_invalid_spectrogram_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"samples must be floats \(N,\) or \(B, N\), got torch.int64 \(3,\)"):
        audio.log_mel(torch.tensor([1, 2, 3]), 8000)
    with pytest.raises(ValueError, match=r"bands must be few enough .*, got 300"):
        audio.log_mel(torch.zeros(100), 8000, bands=300)
    with pytest.raises(ValueError, match=r"lowest and highest must be between 0 and 4000.0 Hz, got 20.0 and 5000"):
        audio.log_mel(torch.zeros(100), 8000, bands=8, highest=5000)
    with pytest.raises(ValueError, match=r"factor must be between 0.01 and 100, got 0"):
        audio.resample(torch.zeros(10), 0)


def test_deltas_are_slopes() -> None:
    frames = (torch.arange(20.0) ** 2)[:, None]
    found = audio.add_deltas(frames)
    assert found.shape == (20, 3)
    # Of t² the slope is 2 t, and the slope of that is 2.
    assert torch.allclose(found[5:15, 1], 2 * torch.arange(5.0, 15.0))
    assert torch.allclose(found[5:15, 2], torch.full((10,), 2.0))


def test_smooth_bands_are_a_few_cosines() -> None:
    places = (torch.arange(24) + 0.5) / 24
    slow, fast = (torch.cos(math.pi * count * places).expand(3, 24) for count in (4, 9))
    assert torch.allclose(audio.smooth_bands(2.0 + slow + fast, 6), 2.0 + slow, atol=1e-5)
    frames = torch.randn(3, 24)
    assert torch.allclose(audio.smooth_bands(frames, 24), frames, atol=1e-5)
    assert torch.allclose(audio.smooth_bands(frames, 100), frames, atol=1e-5)
    batch = torch.stack([frames, 2.0 * frames])
    assert torch.allclose(audio.smooth_bands(batch, 6)[1], audio.smooth_bands(2.0 * frames, 6), atol=1e-5)


def test_loudness_is_normalized() -> None:
    sound = tone(300, 8000)
    assert torch.allclose(audio.normalize_loudness(0.01 * sound), audio.normalize_loudness(sound), atol=1e-6)
    assert audio.normalize_loudness(sound).square().mean().sqrt() == pytest.approx(0.1, abs=1e-4)
    assert not bool(audio.normalize_loudness(torch.zeros(10)).any())

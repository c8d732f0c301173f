"""Make sounds that are no words: silence, noise, tones, music, and recordings that are changed until they are none.

The digit model is trained with some kinds, and tested with others, too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from foci.inputs.audio import normalize_loudness

RATE = 8000
SCALE = (0, 2, 4, 5, 7, 9, 11, 12, 14)  # the notes of a melody, in semitones


class Sounds:
    """Makes sounds (N,) that are no words; `recordings` are the words that are changed."""

    def __init__(self, recordings: Sequence[Tensor], seed: int) -> None:
        self.recordings, self.random = recordings, random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def make(self, kinds: Iterable[Callable[[], Tensor]], count: int) -> list[Tensor]:
        """So many sounds of each kind."""
        return [normalize_loudness(kind()) for kind in kinds for _ in range(count)]

    def learned(self) -> dict[str, Callable[[], Tensor]]:
        """The kinds that the model is trained with."""
        kinds = (self.silence, self.noise, self.tone, self.clicks, self.melody, self.glides, self.bursts)
        return {kind.__name__: kind for kind in kinds}

    def changed(self) -> dict[str, Callable[[], Tensor]]:
        """Kinds that are made of recordings of words; the training breaks words in similar ways."""
        kinds = (self.reversed, self.shuffled, self.halves, self.mixture, self.snippet)
        return {kind.__name__: kind for kind in kinds}

    def others(self) -> dict[str, Callable[[], Tensor]]:
        """Kinds that the model has never heard."""
        steady = (self.chirp, self.beats, self.band_noise, self.hum)
        kinds = (*steady, self.chord, self.drum_loop, self.bells, self.string, self.rain)
        return {kind.__name__.replace("_", " "): kind for kind in kinds}

    def length(self) -> int:
        return self.random.randint(1500, 9000)

    def coloured(self, length: int) -> Tensor:
        """Noise from white to brown, with a standard deviation of one."""
        power = self.random.choice((0.0, 0.0, 0.25, 0.5, 1.0))
        spectrum = torch.fft.rfft(torch.randn(length, generator=self.generator))
        noise = torch.fft.irfft(spectrum / torch.arange(1, length // 2 + 2) ** power, length)
        return noise / noise.std()

    def envelope(self, length: int) -> Tensor:
        time = torch.linspace(0, 1, length)
        rise, fall = self.random.uniform(0.01, 0.3), self.random.uniform(0.05, 0.6)
        return (time / rise).clamp(max=1) * ((1 - time) / fall).clamp(max=1)

    def harmonics(self, length: int, pitch: float) -> Tensor:
        """Up to eight harmonics, some with vibrato or a glide."""
        own, time = self.random, torch.arange(length) / RATE
        count, ratio = own.randint(1, 8), own.uniform(0.2, 1.0)
        vibrato, glide = (own.choice((0.0, 0.0, own.uniform(low, high))) for low, high in ((0, 0.03), (-0.6, 0.6)))
        phase = 2 * math.pi * pitch * time + vibrato * pitch / 5 * torch.sin(10 * math.pi * time)
        phase = phase * (1 + glide * time / 2 / time[-1].clamp(min=1e-3))
        loud = [ratio**i * torch.sin((i + 1) * phase) for i in range(count) if pitch * (i + 1) < 3800]
        return torch.stack(loud).sum(0)

    def silence(self) -> Tensor:
        return self.coloured(self.length()) * 1e-3

    def noise(self) -> Tensor:
        noise = self.coloured(self.length())
        return noise * self.envelope(len(noise)) if self.random.random() < 0.5 else noise

    def tone(self) -> Tensor:
        length = self.length()
        tone = self.harmonics(length, self.random.uniform(80, 2500)) * self.envelope(length)
        return tone + self.coloured(length) * self.random.choice((0.0, 0.01, 0.1))

    def clicks(self) -> Tensor:
        length = self.random.randint(2000, 8000)
        sound = self.coloured(length) * 0.01
        for _ in range(self.random.randint(1, 8)):
            first, decay = self.random.randint(0, length - 200), self.random.uniform(5, 60)
            sound[first : first + 200] += self.coloured(200) * torch.exp(-torch.arange(200) / decay)
        return sound

    def melody(self) -> Tensor:
        own, notes = self.random, []
        for _ in range(own.randint(2, 6)):
            length = own.randint(800, 3000)
            voices = [self.harmonics(length, 220 * 2 ** (own.choice(SCALE) / 12)) for _ in range(own.choice((1, 1, 3)))]
            notes.append(torch.stack(voices).sum(0) * self.envelope(length))
        return torch.cat(notes)

    def rhythm(self, length: int) -> Tensor:
        """A loudness that is constant, or repeats as pulses or decaying beats."""
        own, period = self.random, self.random.randint(400, 5000)
        phase = torch.arange(length) % period / period
        pulses, decay = (phase < own.uniform(0.2, 0.9)).float(), torch.exp(-own.uniform(1, 15) * phase)
        return own.choice((torch.ones(length), pulses, decay)) * own.choice((torch.ones(length), self.envelope(length)))

    def glides(self) -> Tensor:
        """One to three tones whose pitch moves between random values."""
        length, tones = self.length(), []
        for _ in range(self.random.randint(1, 3)):
            points = [math.log(80) + self.random.random() * math.log(45) for _ in range(self.random.randint(1, 5))]
            pitch = interpolate(torch.tensor(points), length).exp()
            phase = 2 * math.pi * pitch.cumsum(0) / RATE
            count, ratio = self.random.randint(1, 5), self.random.uniform(0.1, 0.8)
            tones += [ratio**i * torch.sin((i + 1) * phase) * (pitch * (i + 1) < 3900) for i in range(count)]
        return torch.stack(tones).sum(0) * self.rhythm(length)

    def bursts(self) -> Tensor:
        """Noise with a random spectrum."""
        length = self.length()
        spectrum = torch.fft.rfft(torch.randn(length, generator=self.generator))
        loudness = torch.randn(self.random.randint(2, 12), generator=self.generator) * self.random.uniform(1, 4)
        return torch.fft.irfft(spectrum * interpolate(loudness, len(spectrum)).exp(), length) * self.rhythm(length)

    def recording(self) -> Tensor:
        return self.random.choice(self.recordings)

    def reversed(self) -> Tensor:
        return self.recording().flip(0)

    def shuffled(self) -> Tensor:
        pieces = list(self.recording().split(self.random.choice((400, 600, 800, 1200))))
        self.random.shuffle(pieces)
        return torch.cat(pieces)

    def halves(self) -> Tensor:
        """The end of one digit and the beginning of another."""
        first, second, share = self.recording(), self.recording(), self.random.uniform(0.3, 0.7)
        return torch.cat([first[int(len(first) * share) :], second[: int(len(second) * share)]])

    def mixture(self) -> Tensor:
        """Three digits at once."""
        three = [self.recording() for _ in range(3)]
        return torch.nn.utils.rnn.pad_sequence(three, batch_first=True).sum(0)

    def snippet(self) -> Tensor:
        whole = self.recording()
        length = min(self.random.randint(600, max(601, len(whole) // 3)), len(whole))
        first = self.random.randint(0, len(whole) - length)
        return whole[first : first + length]

    def chirp(self) -> Tensor:
        time = torch.arange(self.length()) / RATE
        low, high = sorted(self.random.uniform(100, 3500) for _ in range(2))
        sweep = 2 * math.pi * (low * time + (high - low) * time.square() / 2 / time[-1])
        return torch.sin(sweep) if self.random.random() < 0.5 else torch.sin(sweep).flip(0)

    def beats(self) -> Tensor:
        """Short bursts of a tone in a steady rhythm, as of a telephone."""
        time = torch.arange(self.length()) / RATE
        tone = torch.sin(2 * math.pi * self.random.uniform(300, 1500) * time)
        return tone * (torch.sin(2 * math.pi * self.random.uniform(2, 12) * time) > 0)

    def chord(self) -> Tensor:
        """Three or four notes of a decaying string."""
        length, root = self.length(), self.random.uniform(110, 440)
        steps = self.random.choice(((0, 4, 7), (0, 3, 7), (0, 4, 7, 10), (0, 3, 7, 12)))
        time = torch.arange(length) / RATE
        notes = [self.pluck(time, root * 2 ** (step / 12)) for step in steps]
        return torch.stack(notes).sum(0)

    def pluck(self, time: Tensor, pitch: float) -> Tensor:
        parts = [torch.sin(2 * math.pi * i * pitch * time) * torch.exp(-2 * i * time) / i for i in range(1, 7)]
        return torch.stack(parts).sum(0)

    def band_noise(self) -> Tensor:
        """White noise between two frequencies."""
        length = self.length()
        spectrum = torch.fft.rfft(torch.randn(length, generator=self.generator))
        frequency = torch.linspace(0, RATE / 2, len(spectrum))
        middle, width = self.random.uniform(300, 3500), self.random.uniform(50, 1500)
        return torch.fft.irfft(spectrum * ((frequency - middle).abs() < width / 2), length)

    def drum_loop(self) -> Tensor:
        """A falling low tone and bursts of noise, in turns."""
        step, hits = self.random.randint(1000, 2500), []
        time = torch.arange(step) / RATE
        for hit in range(self.random.randint(2, 5)):
            kick = torch.sin(2 * math.pi * 60 * torch.exp(-8 * time) * time * 3) * torch.exp(-15 * time)
            snare = torch.randn(step, generator=self.generator) * torch.exp(-30 * time)
            hits.append(kick if hit % 2 == 0 else snare)
        return torch.cat(hits)

    def bells(self) -> Tensor:
        """Partials that are no multiples of the pitch."""
        time, pitch = torch.arange(self.length()) / RATE, self.random.uniform(200, 900)
        ratios = (0.56, 0.92, 1.19, 1.71, 2.0, 2.74, 3.0, 3.76)
        partials = [torch.sin(2 * math.pi * pitch * r * time) * torch.exp(-(1 + r) * time) for r in ratios]
        return torch.stack(partials).sum(0)

    def string(self) -> Tensor:
        """A plucked string: a period of noise that is smoothed again and again."""
        period = torch.randn(self.random.randint(12, 80), generator=self.generator)
        periods = []
        for _ in range(self.length() // len(period)):
            periods.append(period)
            period = (period + period.roll(1)) / 2
        return torch.cat(periods)

    def rain(self) -> Tensor:
        """Many short drops of random loudness."""
        length = self.length()
        drops = (torch.rand(length, generator=self.generator) < self.random.uniform(0.002, 0.05)).float()
        drops = drops * torch.rand(length, generator=self.generator)
        drop = torch.randn(40, generator=self.generator) * torch.exp(-torch.arange(40) / 8)
        return torch.nn.functional.conv1d(drops[None, None], drop[None, None], padding=20)[0, 0]

    def hum(self) -> Tensor:
        """Mains hum with a little noise."""
        time, pitch = torch.arange(self.length()) / RATE, self.random.choice((50, 60))
        hum = torch.stack([torch.sin(2 * math.pi * pitch * i * time) / i for i in range(1, 9)]).sum(0)
        return hum + 0.05 * torch.randn(len(time), generator=self.generator)


def interpolate(points: Tensor, length: int) -> Tensor:
    """So many values on the lines between points at equal distances."""
    return torch.nn.functional.interpolate(points[None, None], length, mode="linear", align_corners=True)[0, 0]

"""Make words from their phones: the spectral envelopes of a source and the resonances of a vocal tract.

Every word gets a speaker of its own: length of the vocal tract, vowels, rate and voice. The values are those of
textbooks of phonetics. The result is smooth log-mel bands: the scale is that of `foci.inputs.audio.log_mel`, but the
harmonics of the voice are missing.

B words, F frames, M bands, P parts of phones, R resonances.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.inputs.audio import hertz_to_mel, mel_to_hertz

# A part of a phone: seconds, three resonances in Hz, the loudness in nats of the voice, of the breath through the
# resonances and of the friction, and the frequency and width of the friction in Hz.
OFF = -12.0
VOWELS = {
    "IY": (280, 2250, 2950),
    "IH": (400, 1950, 2550),
    "E": (450, 2000, 2600),
    "EH": (550, 1800, 2500),
    "AE": (680, 1700, 2450),
    "A": (720, 1300, 2500),
    "AA": (730, 1100, 2450),
    "AO": (570, 850, 2400),
    "O": (480, 880, 2350),
    "UH": (450, 1050, 2250),
    "UW": (310, 950, 2250),
    "UX": (310, 1650, 2300),
    "AH": (620, 1200, 2450),
    "AX": (500, 1450, 2450),
    "ER": (480, 1350, 1700),
}
GLIDES = {"W": (300, 650, 2200), "L": (360, 1050, 2800), "R": (330, 1150, 1550), "Y": (270, 2250, 3000)}
NASALS = {"M": (270, 1000, 2200), "N": (270, 1500, 2450), "NG": (270, 2100, 2500)}
DIPHTHONGS = {"EY": ("E", "IY"), "AY": ("A", "IH"), "OY": ("AO", "IH"), "AW": ("A", "UH"), "OW": ("O", "UH")}
# Resonances that the tongue or the lips lead to, and the friction there: loudness, frequency, width.
FRICTION = {
    "S": ((320, 1700, 2600), (0.5, 4600, 1100)),
    "SH": ((320, 1850, 2500), (0.5, 2900, 900)),
    "F": ((340, 1100, 2200), (-2.5, 3800, 3000)),
    "TH": ((340, 1400, 2500), (-2.5, 4200, 2500)),
}
VOICED = {"Z": "S", "ZH": "SH", "V": "F", "DH": "TH"}
STOPS = {
    "P": ((350, 900, 2200), (-1.5, 900, 1500)),
    "T": ((350, 1750, 2650), (0.0, 3900, 1300)),
    "K": ((350, 2000, 2300), (-0.5, 2000, 700)),
}
VOICED_STOPS = {"B": "P", "D": "T", "G": "K"}
PHONES = (*VOWELS, *GLIDES, *NASALS, *DIPHTHONGS, *FRICTION, *VOICED, *STOPS, *VOICED_STOPS, "HH", "CH", "JH")

# The digits in the accents of English, after J. C. Wells, Accents of English (1982).
DIGIT_PHONES = {
    "zero": ("Z IH R OW", "Z IY R OW", "Z IH R O", "Z IY AX R OW", "Z IH R AH UH", "Z IY R AX UH"),
    "one": ("W AH N", "W AO N", "W UH N", "W A N"),
    "two": ("T UW", "T UX", "T UX UW", "T IH UW", "T UH", "T AX UW", "T AX UX"),
    "three": ("TH R IY", "TH R IY", "T R IY", "F R IY", "TH R IH IY", "TH R AX IY"),
    "four": ("F AO", "F AO R", "F OW R", "F O R", "F O", "F O AX", "F AO AX"),
    "five": ("F AY V", "F AY V", "F OY V", "F AA IH V", "F AH IY V", "F AY F"),
    "six": ("S IH K S", "S IH K S", "S IY K S", "S E K S"),
    "seven": ("S EH V AX N", "S EH V AX N", "S EH V N", "S E V AX N", "S EH V IH N", "S EH B M", "Z EH V AX N"),
    "eight": ("EY T", "EY T", "E T", "EH IY T", "AE IY T", "E E T", "EY D", "AH IY T", "A IH T"),
    "nine": ("N AY N", "N AY N", "N OY N", "N AA IH N", "N AH IY N", "N A N"),
}
LETTER_PHONES = {
    "a": "EY",
    "b": "B IY",
    "c": "S IY",
    "d": "D IY",
    "e": "IY",
    "f": "EH F",
    "g": "JH IY",
    "h": "EY CH",
    "i": "AY",
    "j": "JH EY",
    "k": "K EY",
    "l": "EH L",
    "m": "EH M",
    "n": "EH N",
    "p": "P IY",
    "q": "K Y UW",
    "r": "AA R",
    "s": "EH S",
    "t": "T IY",
    "u": "Y UW",
    "v": "V IY",
    "w": "D AH B AX L Y UW",
    "x": "EH K S",
    "y": "W AY",
    "z": "Z IY",
}
OTHER = "none"

PARTS = {
    **{name: ((0.13, *formants, 0.0, OFF, OFF, 3000, 1000),) for name, formants in VOWELS.items()},
    **{name: ((0.07, *formants, -0.8, OFF, OFF, 3000, 1000),) for name, formants in GLIDES.items()},
    **{name: ((0.08, *formants, -1.2, OFF, OFF, 3000, 1000),) for name, formants in NASALS.items()},
    **{
        name: tuple((0.09, *VOWELS[part], 0.0, OFF, OFF, 3000, 1000) for part in parts)
        for name, parts in DIPHTHONGS.items()
    },
    **{name: ((0.11, *formants, OFF, -5.0, *noise),) for name, (formants, noise) in FRICTION.items()},
    **{
        name: ((0.07, *FRICTION[other][0], -2.0, OFF, FRICTION[other][1][0] - 1.2, *FRICTION[other][1][1:]),)
        for name, other in VOICED.items()
    },
    **{
        name: (
            (0.06, *formants, OFF, OFF, OFF, *noise[1:]),
            (0.015, *formants, OFF, -3.0, *noise),
            (0.03, *formants, OFF, -2.5, noise[0] - 2.5, *noise[1:]),
        )
        for name, (formants, noise) in STOPS.items()
    },
    **{
        name: (
            (0.05, *STOPS[other][0], -4.0, OFF, OFF, *STOPS[other][1][1:]),
            (0.012, *STOPS[other][0], -2.0, OFF, STOPS[other][1][0] - 0.7, *STOPS[other][1][1:]),
        )
        for name, other in VOICED_STOPS.items()
    },
    "HH": ((0.06, 500, 1450, 2450, OFF, -1.5, OFF, 3000, 1000),),
    "CH": ((0.05, 320, 1850, 2500, OFF, OFF, OFF, 2900, 900), (0.08, 320, 1850, 2500, OFF, -5.0, 0.5, 2900, 900)),
    "JH": ((0.04, 320, 1850, 2500, -4.0, OFF, OFF, 2900, 900), (0.05, 320, 1850, 2500, -2.0, OFF, 0.0, 2900, 900)),
}


def choose_words(count: int, digits: float, rng: random.Random) -> list[tuple[str, list[str]]]:
    """So many words with their phones: digits, letters, and random phones as `OTHER`."""
    known = {tuple(each.split()) for ways in DIGIT_PHONES.values() for each in ways}
    known |= {tuple(each.split()) for each in LETTER_PHONES.values()}
    words: list[tuple[str, list[str]]] = []
    while len(words) < count:
        kind = rng.random()
        if kind < digits:
            word = rng.choice(list(DIGIT_PHONES))
            phones = rng.choice(DIGIT_PHONES[word]).split()
        elif kind < digits + 0.5 * (1.0 - digits):
            word = rng.choice(list(LETTER_PHONES))
            phones = LETTER_PHONES[word].split()
        else:
            word, phones = OTHER, rng.choices(PHONES, k=rng.randint(1, 7))
            if tuple(phones) in known:
                continue
        words.append((word, phones))
    return words


def make_words(words: Sequence[Sequence[str]], bands: int, lowest: float, highest: float, seed: int) -> list[Tensor]:
    """Log-mel bands (F, M) of each word, given as phones, by a speaker of its own; 100 frames per second."""
    torch.manual_seed(seed)
    targets = [torch.tensor([part for phone in phones for part in PARTS[phone]]) for phones in words]
    rows = []
    for first in range(0, len(targets), 500):
        rows += make_batch(targets[first : first + 500], bands, lowest, highest)
    return rows


def make_batch(targets: Sequence[Tensor], bands: int, lowest: float, highest: float) -> list[Tensor]:
    count, size = len(targets), max(map(len, targets))
    parts = torch.stack([torch.cat([each, each[-1:].expand(size - len(each), -1)]) for each in targets])  # (B, P, 9)
    real = torch.tensor([[i < len(each) for i in range(size)] for each in targets])
    rate = (0.35 * torch.randn(count, 1)).exp()
    seconds = parts[..., 0] * rate * (0.25 * torch.randn(count, size)).exp() * real
    ends = (100.0 * seconds).cumsum(1)
    frames = ends[:, -1].round().long().clamp(8, 140)
    places = torch.arange(int(frames.max()))
    owner = (places[None, :, None] >= ends[:, None]).sum(-1).clamp(max=size - 1)  # (B, F)
    controls = vary_speaker(parts[..., 1:])
    tracks = controls.gather(1, owner[..., None].expand(-1, -1, controls.shape[2]))  # (B, F, 8)
    tracks = torch.cat([smooth(tracks[..., :3].log(), 7).exp(), smooth(tracks[..., 3:], 3)], -1)
    edges = torch.linspace(float(hertz_to_mel(lowest)), float(hertz_to_mel(highest)), bands + 2, dtype=torch.float64)
    hertz = mel_to_hertz(edges).float()
    energies = compute_energies(tracks, hertz[1:-1])
    energies = energies + ((hertz[2:] - hertz[:-2]) / 100.0).log()
    return [each[:length] for each, length in zip(energies, frames.tolist(), strict=True)]


def vary_speaker(controls: Tensor) -> Tensor:
    """Another vocal tract, other vowels and another voice for each word: (B, P, 8)."""
    count, size = controls.shape[:2]
    formants, rest = controls[..., :3], controls[..., 3:]
    tract = torch.empty(count, 1, 1).uniform_(math.log(0.88), math.log(1.3))
    own = 0.05 * torch.randn(count, 1, 3) + 0.06 * torch.randn(count, size, 3)
    middle = torch.tensor([500.0, 1450.0, 2450.0]).log()
    reduction = 0.25 * torch.rand(count, 1, 1)
    formants = (formants.log() * (1.0 - reduction) + middle * reduction + own + tract).exp()
    loudness = rest[..., :3] + 0.5 * torch.randn(count, size, 3) + 0.7 * torch.randn(count, 1, 3)
    friction = rest[..., 3:] * (0.1 * torch.randn(count, 1, 2) + 0.5 * tract).exp()
    return torch.cat([formants, 2.0 * loudness, friction], -1)


def smooth(tracks: Tensor, width: int) -> Tensor:
    """The moving average over so many frames, twice: (B, F, C)."""
    x = tracks.mT
    for _ in range(2):
        x = F.avg_pool1d(F.pad(x, (width // 2, width // 2), mode="replicate"), width, 1)
    return x.mT


def compute_energies(tracks: Tensor, hertz: Tensor) -> Tensor:
    """The log energy at each frequency: (B, F, 8) and (M,) -> (B, F, M)."""
    count = len(tracks)
    fourth = 3500.0 * torch.empty(count, 1, 1).uniform_(0.9, 1.3).expand(-1, tracks.shape[1], -1)
    resonances = torch.cat([tracks[..., :3], fourth], -1)
    widths = torch.tensor([80.0, 110.0, 160.0, 250.0]) * (0.4 * torch.randn(count, 1, 4)).exp()
    gain = torch.zeros(*tracks.shape[:2], len(hertz))
    for index in range(4):
        centre, width = resonances[..., index, None], widths[..., index, None]
        gain += 2.0 * centre.square().log()
        gain -= ((centre.square() - hertz.square()).square() + (width * hertz).square()).log()
    octaves = (hertz / 500.0).log2()
    # The voice falls by 3 to 12 decibels per octave, radiation included; breath is flat.
    slope = torch.empty(count, 1, 1).uniform_(0.7, 2.8)
    voice = tracks[..., 3:4] + gain - slope * octaves
    breath = tracks[..., 4:5] + gain - 3.0
    friction = tracks[..., 5:6] + 2.0 - ((hertz - tracks[..., 6:7]) / tracks[..., 7:8]).square()
    return torch.logsumexp(torch.stack([voice, breath, friction, torch.full_like(voice, -10.0)]), 0)

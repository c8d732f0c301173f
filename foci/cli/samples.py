"""`foci samples`: write small data files to try the other commands with; all of them are generated."""

from __future__ import annotations

import argparse
import math
import random
import struct
import wave
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from foci.cli.output import print_status

EXAMPLES = """\
examples:
  foci samples samples
"""

ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
# Numbers below NUMBER_LIMIT, as pairs for training and for testing.
NUMBER_LIMIT, TRAIN_PAIRS, TEST_PAIRS = 100_000, 2000, 200
REVIEWS = 500
SUBJECTS = ("film", "story", "book", "music", "dinner", "service", "hotel", "game", "phone", "show")
PRAISE = ("wonderful", "a joy", "brilliant", "worth every minute", "great fun", "moving", "perfect", "delightful")
BLAME = ("dull", "a waste of time", "terrible", "far too long", "broken", "a mess", "disappointing", "boring")
OPENINGS = ("", "After a week, ", "I went with my sister: ", "To be honest, ", "For the price, ", "Once again ")
SENTENCE_ENDINGS = (
    "",
    " from start to finish",
    ", and the weather was fine",
    ", my brother says",
    " on a rainy Sunday",
)
# The picture has this height and width in pixels.
PICTURE_SIZE = 140
# A sleeve, from the shoulder around to the armpit; x is the distance from the middle, y grows downwards.
SLEEVE = ((0.25, -0.9), (0.98, -0.45), (0.85, -0.1), (0.5, -0.4))
SAMPLE_RATE = 8000
# The word "seven" as sounds: seconds, loudness, share of noise, and the resonances of the mouth in Hz.
SEVEN = (
    (0.13, 0.25, 1.0, (3200, 3600)),
    (0.13, 1.0, 0.0, (550, 1750, 2500)),
    (0.06, 0.35, 0.2, (300, 1100, 2300)),
    (0.09, 0.8, 0.0, (500, 1450, 2450)),
    (0.13, 0.4, 0.0, (250, 1300, 2300)),
)


def add(commands: Any) -> None:
    """Add the command and its options."""
    parser = commands.add_parser("samples", help="write small data files to try the commands with", epilog=EXAMPLES)
    parser.add_argument("directory", type=Path, help="where to write them; it is created")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the files; refuse to overwrite any."""
    writers = sample_writers()
    if options.directory.exists() and not options.directory.is_dir():
        raise ValueError(f"directory must be a directory, got the file {options.directory}")
    for name in writers:
        if (options.directory / name).exists():
            raise ValueError(f"directory must not hold {name} yet, got {options.directory}: choose another directory")
    options.directory.mkdir(parents=True, exist_ok=True)
    for name, (write, meaning) in writers.items():
        write(options.directory / name)
        print_status("samples", f"{options.directory / name}: {meaning}")
    return 0


def sample_writers() -> dict[str, tuple[Callable[[Path], None], str]]:
    """The files by name: a function that writes each, and what it holds."""
    pairs = number_pairs(TRAIN_PAIRS + TEST_PAIRS)
    train, test = pairs[:TRAIN_PAIRS], pairs[TRAIN_PAIRS:]
    return {
        "pairs.tsv": (
            lambda path: write_pairs_table(path, ("source", "target"), train),
            "numbers in words and in digits",
        ),
        "test.tsv": (
            lambda path: write_pairs_table(path, ("source", "target"), test),
            "other numbers, to evaluate with",
        ),
        "reviews.tsv": (lambda path: write_pairs_table(path, ("text", "label"), reviews(REVIEWS)), "short reviews"),
        "shirt.png": (lambda path: write_png(path, [*shirt_rows()]), "a drawing of a shirt"),
        "seven.wav": (lambda path: write_wav(path, synthesize(SEVEN)), "a synthetic voice that says seven"),
    }


def number_pairs(count: int) -> list[tuple[str, str]]:
    """Different numbers in words, and their digits.

    >>> number_pairs(1)
    [('seventeen thousand six hundred eleven', '1 7 6 1 1')]
    """
    return [(spell_number(each), " ".join(str(each))) for each in random.Random(1).sample(range(NUMBER_LIMIT), count)]


def spell_number(number: int) -> str:
    """A number in English words.

    >>> spell_number(40_312)
    'forty thousand three hundred twelve'
    """
    if number < len(ONES):
        return ONES[number]
    if number < 100:
        first, rest = TENS[number // 10], number % 10
    elif number < 1000:
        first, rest = f"{ONES[number // 100]} hundred", number % 100
    else:
        first, rest = f"{spell_number(number // 1000)} thousand", number % 1000
    return f"{first} {spell_number(rest)}" if rest else first


def reviews(count: int) -> list[tuple[str, str]]:
    """Sentences of random parts, of which one decides the label."""
    chance = random.Random(1)
    rows = []
    for number in range(count):
        words, label = (PRAISE, "positive") if number % 2 else (BLAME, "negative")
        middle = f"the {chance.choice(SUBJECTS)} was {chance.choice(words)}"
        text = f"{chance.choice(OPENINGS)}{middle}{chance.choice(SENTENCE_ENDINGS)}."
        rows.append((text[0].upper() + text[1:], label))
    return rows


def write_pairs_table(path: Path, columns: tuple[str, str], rows: list[tuple[str, str]]) -> None:
    path.write_text("".join("\t".join(row) + "\n" for row in (columns, *rows)), encoding="utf-8")


def shirt_rows() -> Iterator[bytes]:
    """The rows of a grey picture: a light shirt on black."""
    for row in range(PICTURE_SIZE):
        y = (row + 0.5) / PICTURE_SIZE * 2 - 1
        places = [(column + 0.5) / PICTURE_SIZE * 2 - 1 for column in range(PICTURE_SIZE)]
        yield bytes(200 if is_shirt(abs(x), y) else 0 for x in places)


def is_shirt(x: float, y: float) -> bool:
    """Whether a point, x from the middle and y from the top (-1) to the bottom (1), lies on the shirt."""
    in_neckline = (x / 0.22) ** 2 + ((y + 0.9) / 0.14) ** 2 < 1
    in_body = x < 0.55 + 0.05 * max(-y, 0) and -0.9 < y < 0.95
    edges = zip(SLEEVE, (*SLEEVE[1:], SLEEVE[0]), strict=True)
    in_sleeve = all((bx - ax) * (y - ay) - (by - ay) * (x - ax) > 0 for (ax, ay), (bx, by) in edges)
    return (in_body or in_sleeve) and not in_neckline


def write_png(path: Path, rows: list[bytes]) -> None:
    """Write a grey picture of 8 bits."""
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 0, 0, 0, 0)
    # Each row begins with its filter, 0: none.
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    chunks = [(b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")]
    parts = [struct.pack(">I", len(data)) + kind + data for kind, data in chunks]
    sums = [struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(part + total for part, total in zip(parts, sums, strict=True)))


def synthesize(sounds: tuple[tuple[float, float, float, tuple[int, ...]], ...]) -> list[float]:
    """Samples of sounds one after the other: noise and pulses of a voice, shaped by resonances."""
    chance = random.Random(1)
    samples: list[float] = []
    for seconds, loudness, noise, resonances in sounds:
        count = round(seconds * SAMPLE_RATE)
        source = [noise * chance.gauss(0, 1) + (1 - noise) * 4 * (index % 66 == 0) for index in range(count)]
        filtered = [sum(values) for values in zip(*(resonate(source, each) for each in resonances), strict=True)]
        peak = max(map(abs, filtered))
        # Each sound fades in and out.
        samples += [
            loudness * value / peak * math.sin(math.pi * (index + 1) / (count + 1)) ** 0.5
            for index, value in enumerate(filtered)
        ]
    return samples


def resonate(source: list[float], frequency: int, width: int = 90) -> list[float]:
    """The sound after a resonance at a frequency, in Hz."""
    radius = math.exp(-math.pi * width / SAMPLE_RATE)
    turn = 2 * radius * math.cos(2 * math.pi * frequency / SAMPLE_RATE)
    before, last = 0.0, 0.0
    out = []
    for value in source:
        before, last = last, value + turn * last - radius**2 * before
        out.append(last)
    return out


def write_wav(path: Path, samples: list[float]) -> None:
    """Write a mono recording of 16 bits."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(b"".join(struct.pack("<h", round(30_000 * value)) for value in samples))

"""Describes a path for error messages, and detects the format of a file by its first bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

# What the accepted files begin with, and those that are often mistaken for them.
FILE_STARTS = {
    "WAV": rb"(RIFF|RIFX|RF64)....WAVE",
    "FLAC": rb"fLaC",
    "OGG": rb"OggS",
    "PNG": rb"\x89PNG\r\n\x1a\n",
    "JPEG": rb"\xff\xd8\xff",
    "WebP": rb"RIFF....WEBP",
    "GIF": rb"GIF8[79]a",
    "BMP": rb"BM",
    "TIFF": rb"II\*\0|MM\0\*|II\+\0|MM\0\+",
    "PGM": rb"P5\s",
    "PPM": rb"P6\s",
    "MP3": rb"ID3|\xff[\xf2-\xfb]",
    "NumPy": rb"\x93NUMPY",
    "DDS": rb"DDS ",
    "Photoshop": rb"8BPS",
    "PDF": rb"%PDF",
    "ZIP": rb"PK\x03\x04",
    "gzip": rb"\x1f\x8b",
    "SVG": rb"(<\?xml|<svg)",
}
MAGIC_BYTES = 16


def describe_path(path: Path) -> str:
    """Describes what is at a path that is not a file: the end of "... must be a file, got ...".

    >>> describe_path(Path("nowhere.png"))
    'no such file'
    """
    return "a directory" if path.is_dir() else "something else" if path.exists() else "no such file"


def detect_format(path: str, accepted: Sequence[str]) -> str:
    """Returns the format of a file by its first bytes; raises ValueError if it is not among the accepted ones."""
    with Path(path).open("rb") as file:
        start = file.read(MAGIC_BYTES)
    found = find_format(start)
    if found is not None and found in accepted:
        return found
    got = f"a file in {found} format" if found else describe_start(start)
    raise ValueError(f"{path} must be a {', '.join(accepted[:-1])} or {accepted[-1]} file, got {got}")


def find_format(start: bytes) -> str | None:
    """Returns the format of a file by its first bytes, None for text and for unknown formats."""
    return next((name for name, pattern in FILE_STARTS.items() if re.match(pattern, start, re.DOTALL)), None)


def describe_start(start: bytes) -> str:
    r"""Describes a file of an unknown format by its first bytes.

    >>> describe_start(b"Hello, Jane"), describe_start(b"\x00\x01"), describe_start(b"")
    ('a text file', 'a file in another format', 'an empty file')
    """
    if not start:
        return "an empty file"
    is_text = start.isascii() and all(chr(byte).isprintable() or byte in b"\t\r\n" for byte in start)
    return "a text file" if is_text else "a file in another format"

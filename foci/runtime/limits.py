"""Limits on what a file may expand to, checked before it is expanded. Environment variables raise them."""

from __future__ import annotations

import os
from typing import NamedTuple


class Limit(NamedTuple):
    """The largest number that a file may claim; the environment variable `variable` replaces the default.

    >>> Limit("FOCI_MAX_PIXELS", 100, "pixels").check("big.png", 2000)
    Traceback (most recent call last):
    ValueError: big.png must have at most 100 pixels, got 2,000: set FOCI_MAX_PIXELS=2000 to read it
    """

    variable: str
    default: int
    unit: str

    @property
    def value(self) -> int:
        """The limit that applies."""
        text = os.environ.get(self.variable, "").strip()
        if not text:
            return self.default
        if not text.isascii() or not text.isdigit():
            raise ValueError(f"{self.variable} must be a number of {self.unit}, got {text!r}")
        return int(text)

    def check(self, name: str | os.PathLike[str], count: int) -> None:
        """Raises ValueError if the count is above the limit; `name` is what has it, mostly a path."""
        if count > self.value:
            raise self.exceeded(name, f"{count:,}", str(count))

    def exceeded(self, name: str | os.PathLike[str], got: str, enough: str = "...") -> ValueError:
        """The error for a file above the limit; `enough` is a value of the variable that would accept it."""
        advice = f"set {self.variable}={enough} to read it"
        return ValueError(f"{os.fspath(name)} must have at most {self.value:,} {self.unit}, got {got}: {advice}")


# Photographs of 61 megapixels pass; the pixels are expanded to 4 bytes each.
MAX_PIXELS = Limit("FOCI_MAX_PIXELS", 2**26, "pixels")
# The features of 10 minutes take about 500 MB.
MAX_SECONDS = Limit("FOCI_MAX_SECONDS", 600, "seconds of sound")
MAX_SAMPLES = Limit("FOCI_MAX_SAMPLES", 2**26, "samples")
MAX_LINE_BYTES = Limit("FOCI_MAX_LINE_BYTES", 2**24, "bytes in a line")
MAX_TEXT_BYTES = Limit("FOCI_MAX_TEXT_BYTES", 2**28, "bytes of text")
# Text rarely shrinks to less than a thirtieth. Files that expand to a few megabytes are always read.
MAX_EXPANSION = Limit("FOCI_MAX_EXPANSION", 100, "bytes of text per compressed byte")
# A tensor without entries takes no bytes of a file, whatever its other sizes are.
MAX_EMPTY_SIZE = Limit("FOCI_MAX_EMPTY_SIZE", 2**20, "positions, heads and sequences in an empty tensor")
MAX_CONFIG_BYTES = Limit("FOCI_MAX_CONFIG_BYTES", 2**20, "bytes")
# tomllib takes time and memory quadratic in the number of parts.
MAX_KEY_PARTS = Limit("FOCI_MAX_KEY_PARTS", 16, "parts in a key")
# The tokenizer of a model with a million tokens passes; parsed, a text takes up to twenty times its length.
MAX_JSON_CHARACTERS = Limit("FOCI_MAX_JSON_CHARACTERS", 2**25, "characters of JSON")

"""Colours of attention: one ramp for terminals and plots, even in lightness, so that it reads without colour vision."""

import os
from typing import TextIO

from foci.runtime.console import takes_color

Color = tuple[int, int, int]

# How many bits of colour a terminal takes.
NONE, PALETTE, TRUE = 0, 8, 24

# From nothing to all, for a white ground; for a dark one the same colours from the other end.
ON_WHITE: tuple[Color, ...] = (
    (255, 255, 255),
    (254, 228, 190),
    (253, 174, 120),
    (240, 106, 92),
    (196, 60, 117),
    (125, 36, 130),
    (62, 15, 115),
    (20, 11, 52),
)
ON_BLACK: tuple[Color, ...] = (
    (20, 16, 34),
    (46, 17, 92),
    (101, 26, 128),
    (157, 46, 127),
    (211, 67, 110),
    (245, 112, 92),
    (254, 176, 120),
    (252, 236, 174),
)

# The steps of each channel in the cube of the 256-colour palette.
CUBE = (0, 95, 135, 175, 215, 255)


def depth(stream: TextIO) -> int:
    """The bits of colour that a stream takes: 24 where COLORTERM says so, else 8; 0 for pipes and NO_COLOR."""
    if not takes_color(stream):
        return NONE
    return TRUE if os.environ.get("COLORTERM", "").lower() in ("truecolor", "24bit") else PALETTE


def on_white() -> bool:
    """Whether the terminal says that its ground is light: COLORFGBG ends with the number of a light colour."""
    return os.environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")


def mixed(ramp: tuple[Color, ...], fraction: float) -> Color:
    """The colour at a fraction of the way along a ramp.

    >>> mixed(((0, 0, 0), (100, 200, 40)), 0.5)
    (50, 100, 20)
    """
    place = min(max(fraction, 0.0), 1.0) * (len(ramp) - 1)
    step = min(int(place), len(ramp) - 2)
    red, green, blue = (
        round(low + (high - low) * (place - step)) for low, high in zip(ramp[step], ramp[step + 1], strict=True)
    )
    return red, green, blue


def lightness(color: Color) -> float:
    """From 0, black, to 1, white, as an eye weighs the three."""
    return (0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2]) / 255


def palette(color: Color) -> int:
    """The nearest number of the 256-colour palette.

    >>> palette((255, 0, 0)), palette((128, 128, 128))
    (196, 244)
    """
    cube = [min(range(6), key=lambda step: abs(CUBE[step] - part)) for part in color]
    grey = min(max(round((sum(color) / 3 - 8) / 10), 0), 23)
    as_cube: Color = (CUBE[cube[0]], CUBE[cube[1]], CUBE[cube[2]])
    as_grey: Color = (8 + 10 * grey,) * 3
    if apart(as_grey, color) < apart(as_cube, color):
        return 232 + grey
    return 16 + 36 * cube[0] + 6 * cube[1] + cube[2]


def apart(one: Color, other: Color) -> int:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))


def codes(color: Color, bits: int, *, ground: bool) -> str:
    """The ANSI codes of a colour, for the letters or for the ground behind them."""
    place = 48 if ground else 38
    if bits == TRUE:
        return f"{place};2;{color[0]};{color[1]};{color[2]}"
    return f"{place};5;{palette(color)}"


def ink(color: Color) -> Color:
    """The colour of letters that read on a ground."""
    return (16, 14, 24) if lightness(color) > 0.5 else (238, 236, 232)

"""Color ramps for attention weights, shared by terminals and plots; lightness is monotonic, so they read in grey."""

import os
from typing import TextIO

from foci.runtime.console import supports_color

Color = tuple[int, int, int]

# Color depths of a terminal in bits.
NO_COLOR, PALETTE_COLOR, TRUE_COLOR = 0, 8, 24

# From weight 0 to weight 1, on a light and on a dark background.
LIGHT_RAMP: tuple[Color, ...] = (
    (255, 255, 255),
    (254, 228, 190),
    (253, 174, 120),
    (240, 106, 92),
    (196, 60, 117),
    (125, 36, 130),
    (62, 15, 115),
    (20, 11, 52),
)
DARK_RAMP: tuple[Color, ...] = (
    (20, 16, 34),
    (46, 17, 92),
    (101, 26, 128),
    (157, 46, 127),
    (211, 67, 110),
    (245, 112, 92),
    (254, 176, 120),
    (252, 236, 174),
)

# The levels of each channel in the color cube of the 256-color palette.
CUBE_LEVELS = (0, 95, 135, 175, 215, 255)


def detect_color_depth(stream: TextIO) -> int:
    """Return the color depth of a stream: 24 bits if COLORTERM says so, else 8; 0 for pipes and NO_COLOR."""
    if not supports_color(stream):
        return NO_COLOR
    return TRUE_COLOR if os.environ.get("COLORTERM", "").lower() in ("truecolor", "24bit") else PALETTE_COLOR


def has_light_background() -> bool:
    """Whether the terminal reports a light background: COLORFGBG ends with the number of a light color."""
    return os.environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")


def interpolate_color(ramp: tuple[Color, ...], fraction: float) -> Color:
    """Return the color at a fraction of a ramp.

    >>> interpolate_color(((0, 0, 0), (100, 200, 40)), 0.5)
    (50, 100, 20)
    """
    place = min(max(fraction, 0.0), 1.0) * (len(ramp) - 1)
    step = min(int(place), len(ramp) - 2)
    red, green, blue = (
        round(low + (high - low) * (place - step)) for low, high in zip(ramp[step], ramp[step + 1], strict=True)
    )
    return red, green, blue


def compute_lightness(color: Color) -> float:
    """Compute the perceived lightness, from 0 (black) to 1 (white)."""
    return (0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2]) / 255


def nearest_palette_index(color: Color) -> int:
    """Return the index of the nearest color in the 256-color palette.

    >>> nearest_palette_index((255, 0, 0)), nearest_palette_index((128, 128, 128))
    (196, 244)
    """
    cube = [min(range(6), key=lambda step: abs(CUBE_LEVELS[step] - part)) for part in color]
    grey = min(max(round((sum(color) / 3 - 8) / 10), 0), 23)
    as_cube: Color = (CUBE_LEVELS[cube[0]], CUBE_LEVELS[cube[1]], CUBE_LEVELS[cube[2]])
    as_grey: Color = (8 + 10 * grey,) * 3
    if squared_color_distance(as_grey, color) < squared_color_distance(as_cube, color):
        return 232 + grey
    return 16 + 36 * cube[0] + 6 * cube[1] + cube[2]


def squared_color_distance(one: Color, other: Color) -> int:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))


def ansi_color_codes(color: Color, bits: int, *, background: bool) -> str:
    """Return the ANSI codes that set a color of the text or of its background."""
    target = 48 if background else 38
    if bits == TRUE_COLOR:
        return f"{target};2;{color[0]};{color[1]};{color[2]}"
    return f"{target};5;{nearest_palette_index(color)}"


def contrasting_text_color(background: Color) -> Color:
    """Return a dark or a light text color, whichever is readable on a background."""
    return (16, 14, 24) if compute_lightness(background) > 0.5 else (238, 236, 232)

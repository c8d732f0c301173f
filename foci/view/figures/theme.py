"""Fonts, colors, ticks and titles that all figures share."""

from __future__ import annotations

import re
import textwrap
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from foci.runtime.console import clip_text
from foci.runtime.printable import format_code_point, make_printable
from foci.view.colors import LIGHT_RAMP, Color

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap

# The first installed family that has a character draws it.
FONT_FAMILIES = (
    "DejaVu Sans",
    "Noto Sans",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "Hiragino Sans",
    "PingFang SC",
    "Apple SD Gothic Neo",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "Noto Sans Arabic",
    "Noto Sans Hebrew",
    "Noto Sans Devanagari",
    "Nirmala UI",
    "Noto Sans Thai",
    "Noto Emoji",
    "Segoe UI Emoji",
    "Apple Symbols",
    "Arial Unicode MS",
)
# Drawn for a character that no installed font has.
MISSING_GLYPH = "□"
MAX_LABEL_CHARACTERS = 18
MAX_NOTE_COLUMNS = 80
# The symbols of control characters (␀ to ␟), which most fonts lack.
CONTROL_PICTURES = re.compile("[\u2400-\u241f]")
TEXT_COLOR, MUTED_COLOR, ACCENT_COLOR = "#1d1b26", "#6d6a75", "#0072b2"
# The side in inches of a cell with a number and of one without, and of an axis that is too long for cells.
NUMBERED_CELL_SIDE, PLAIN_CELL_SIDE, LONG_AXIS_SIDE = 0.26, 0.17, 4.0
# The axes have room for the label of the color bar and for the title.
MIN_AXES_HEIGHT, MIN_AXES_WIDTH = 1.7, 1.2
# The multiple of a uniform weight that has the last color.
FULL_COLOR_FACTOR = 3
NAN_COLOR = "#b9b6bd"
# Colors of lines that are distinct with every kind of color vision (Okabe and Ito).
STACK_COLORS = ("#7d2482", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00")


def import_pyplot() -> Any:
    """Import matplotlib.pyplot, or say how to install it."""
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ImportError("figures need matplotlib, which is not installed: pip install 'foci[view]'") from error
    return plt


@contextmanager
def use_figure_style() -> Iterator[None]:
    """Use matplotlib settings for print: text stays text in PDF and SVG, lines are thin, the background is white."""
    plt = import_pyplot()
    settings = {
        "font.family": list_installed_fonts(),
        "font.size": 8,
        "axes.titlesize": 9,
        "axes.labelsize": 8,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.edgecolor": MUTED_COLOR,
        "axes.labelcolor": MUTED_COLOR,
        "axes.linewidth": 0.6,
        "text.color": TEXT_COLOR,
        "xtick.color": TEXT_COLOR,
        "ytick.color": TEXT_COLOR,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "figure.facecolor": "white",
        "axes.facecolor": "white",
        "figure.dpi": 150,
        "pdf.fonttype": 42,
        "ps.fonttype": 42,
        "svg.fonttype": "none",
        "svg.hashsalt": "foci",
    }
    with plt.rc_context(settings):
        yield


@cache
def list_installed_fonts() -> list[str]:
    from matplotlib import font_manager

    there = {font.name for font in font_manager.fontManager.ttflist}
    return [name for name in FONT_FAMILIES if name in there]


@cache
def list_drawable_characters() -> frozenset[int]:
    """List the characters that an installed font of FONT_FAMILIES has."""
    from matplotlib import font_manager, ft2font

    characters: set[int] = set()
    for family in list_installed_fonts():
        characters |= set(ft2font.FT2Font(font_manager.findfont(family)).get_charmap())
    return frozenset(characters)


def format_labels(labels: Iterable[str]) -> list[str]:
    """Shorten labels for a figure; a character that no font has is replaced by □, and a warning names it."""
    known = list_drawable_characters()
    short = [
        clip_text(
            CONTROL_PICTURES.sub(lambda sign: format_code_point(chr(ord(sign[0]) - 0x2400)), label),
            MAX_LABEL_CHARACTERS,
        )
        for label in labels
    ]
    absent = dict.fromkeys(c for label in short for c in label if ord(c) not in known)
    if absent:
        some = "".join(list(absent)[:8])
        message = f"no installed font has {some}: drawn as {MISSING_GLYPH}; install one such as Noto Sans CJK"
        warnings.warn(message, stacklevel=2)
    boxes = str.maketrans({c: "" if unicodedata.combining(c) else MISSING_GLYPH for c in absent})
    return [label.translate(boxes) for label in short]


def disable_math_text(text: Any) -> None:
    """Disable math text: a token with two $ is not a formula."""
    text.set_parse_math(False)


def fit_axes_size(across: float, down: float) -> tuple[float, float]:
    """Return the width and height of the axes in inches, from those that their cells need."""
    return max(across, MIN_AXES_WIDTH), max(down, MIN_AXES_HEIGHT)


def set_word_ticks(ax: Axes, along: Sequence[str], down: Sequence[str]) -> None:
    """Write the words of both axes; those above the columns are rotated if they are long or many."""
    set_axis_words(ax.xaxis, along)
    set_axis_words(ax.yaxis, down)
    ax.xaxis.tick_top()


def set_axis_words(axis: Any, names: Sequence[str]) -> None:
    """Write a word at each position of an axis."""
    words = format_labels(names)
    turned = axis.axis_name == "x" and (max(map(len, words), default=0) > 3 or len(words) > 24)
    axis.set_ticks(range(len(words)), words, **({"rotation": 60, "ha": "left"} if turned else {}))
    for text in axis.get_ticklabels():
        disable_math_text(text)
        if turned:
            text.set_rotation_mode("anchor")


def set_long_axis_ticks(axis: Any, names: Sequence[str] | None, seconds: float | None) -> None:
    """Write words if there are any, else positions at whole numbers; audio frames are written in seconds."""
    if names is not None:
        set_axis_words(axis, names)
    elif seconds is None:
        axis.set_major_locator(create_integer_locator())
    else:
        axis.set_major_locator(create_time_locator(seconds))
        axis.set_major_formatter(lambda frame, _: f"{frame * seconds:g} s")


def create_time_locator(seconds: float) -> Any:
    """Create a locator of ticks at round times; `seconds` is the duration of a frame."""
    from matplotlib.ticker import MaxNLocator

    class Times(MaxNLocator):
        def tick_values(self, vmin: float, vmax: float) -> Any:
            return [time / seconds for time in super().tick_values(vmin * seconds, vmax * seconds)]

    return Times(nbins=8)


def create_colormap(ramp: Sequence[Color] = LIGHT_RAMP) -> Colormap:
    """Create a colormap from white (weight 0) to dark, the ramp of light terminals; NaN is grey."""
    from matplotlib.colors import LinearSegmentedColormap

    colormap: Colormap = LinearSegmentedColormap.from_list("foci", [tuple(c / 255 for c in color) for color in ramp])
    return colormap.with_extremes(bad=NAN_COLOR)


def find_full_color_weight(values: Tensor, keys: int) -> float:
    """Return the weight of the last color: the largest finite one, but so much that uniform attention stays pale."""
    largest = float(values[values.isfinite()].max()) if bool(values.isfinite().any()) else 0.0
    return max(largest, min(1.0, FULL_COLOR_FACTOR / keys))


def get_axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """Return the given axes, or those of a new figure of this size in inches."""
    if ax is not None:
        return ax
    new: Axes = import_pyplot().subplots(figsize=size, layout="constrained")[1]
    return new


def set_title(ax: Axes, text: str) -> None:
    disable_math_text(
        ax.set_title(format_labels([text])[0] if len(text) <= MAX_LABEL_CHARACTERS else text, color=TEXT_COLOR)
    )


def add_notes(ax: Axes, notes: Sequence[str]) -> None:
    """Write the notes of a record below its figure, such as that the input was cut."""
    lines = [line for note in notes for line in textwrap.wrap(make_printable(f"Note: {note}."), MAX_NOTE_COLUMNS)]
    if lines:
        text = "\n".join(lines)
        disable_math_text(ax.figure.text(0, -0.02, text, va="top", fontsize=6, color=MUTED_COLOR))


def add_colorbar(ax: Axes, image: Any, label: str) -> None:
    """Add a color bar as high as the axes."""
    inch = ax.figure.dpi / ax.get_window_extent().width
    place = ax.inset_axes((1 + 0.1 * inch, 0, 0.12 * inch, 1))
    bar = ax.figure.colorbar(image, cax=place, format=lambda weight, _: f"{100 * weight:g}%")
    bar.set_label(label)
    bar.outline.set_visible(False)


def create_sqrt_norm(most: float) -> Any:
    """Create a norm that maps a weight to its square root, from 0 to the largest weight."""
    from matplotlib.colors import PowerNorm

    return PowerNorm(0.5, vmin=0, vmax=most)


def create_integer_locator(most: int | None = None) -> Any:
    """Create a locator of ticks at integers, at most so many: there is no layer 1.5."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator("auto" if most is None else most, integer=True)


def create_cell_frame(corner: tuple[float, float], color: str) -> Any:
    """Create a frame around one cell."""
    from matplotlib.patches import Rectangle

    return Rectangle(corner, 1, 1, fill=False, edgecolor=color, linewidth=1.5)

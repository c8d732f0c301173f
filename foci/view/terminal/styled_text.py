"""A page of terminal lines that shows attention weights by background color, or by shade characters without color."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from foci.runtime.console import TextPage, clip_text, cut_to_width, pad_text, text_width
from foci.runtime.printable import isolate_direction, split_clusters
from foci.view.colors import (
    DARK_RAMP,
    LIGHT_RAMP,
    NO_COLOR,
    Color,
    ansi_color_codes,
    contrasting_text_color,
    detect_color_depth,
    has_light_background,
    interpolate_color,
)

MIN_PAGE_WIDTH, MAX_PAGE_WIDTH = 24, 120
SHADES = " ░▒▓█"
# The smallest weight of each shade but the first.
SHADE_THRESHOLDS = (0.04, 0.10, 0.20, 0.40)
# Smaller weights are not tinted.
MIN_TINTED_WEIGHT = 0.005


@dataclass
class TerminalPage(TextPage):
    """A text page with the terminal's color depth in bits, and whether its background is light."""

    bits: int = NO_COLOR
    light: bool = False

    @classmethod
    def for_stream(cls, stream: TextIO | None = None, width: int | None = None) -> TerminalPage:
        """Create a page with the colors of a stream, and the width of the terminal unless one is given."""
        width = width or shutil.get_terminal_size().columns
        bits = detect_color_depth(stream or sys.stdout)
        width = min(max(width, MIN_PAGE_WIDTH), MAX_PAGE_WIDTH)
        return cls(width, bits != NO_COLOR, bits=bits, light=has_light_background())

    def heading(self, title: str) -> None:
        """Write a blank line and a title, wrapped to the page."""
        self.line()
        self.lines += [self.paint(line.strip(), "1;36") for line in self.wrap(title)]

    def note(self, text: str) -> None:
        """Write a remark in a faint color, wrapped to the page."""
        for line in self.wrap(text):
            self.line(self.faint(line.strip()))

    def wrap(self, text: str) -> list[str]:
        """Wrap a text to the page without writing it."""
        page = TextPage(self.width)
        page.wrapped([clip_text(word, self.room) for word in text.split(" ")])
        return page.lines

    def shade(self, weight: float) -> str:
        """Return the shade character of a weight."""
        return SHADES[sum(weight >= least for least in SHADE_THRESHOLDS)]

    def weight_color(self, weight: float) -> Color:
        """Return the color of a weight; the square root separates small weights, of which there are many."""
        return interpolate_color(LIGHT_RAMP if self.light else DARK_RAMP, max(weight, 0.0) ** 0.5)

    def tint(self, text: str, weight: float) -> str:
        """Return the text on the background color of a weight."""
        if not self.color or weight < MIN_TINTED_WEIGHT:
            return text
        color = self.weight_color(weight)
        background = ansi_color_codes(color, self.bits, background=True)
        return self.paint(
            text, f"{background};{ansi_color_codes(contrasting_text_color(color), self.bits, background=False)}"
        )

    def shaded(self, fraction: float, width: int) -> str:
        """Return a cell with a percentage, or only its shade if the cell is too narrow."""
        if width >= 4 and not self.color:
            return super().shaded(fraction, width)
        percent = f"{round(100 * fraction):>{width - 1}} " if width >= 4 else " " * width
        return self.tint(percent, max(fraction, MIN_TINTED_WEIGHT)) if self.color else self.shade(fraction) * width

    def render_blocks(self, values: Sequence[Sequence[float]], columns: int = 1) -> list[str]:
        """Render values from 0 to 1: two rows per line in half blocks, or one shade character per value.

        `columns` is the width of a value; from 2 on, each row has its own line.
        """
        if not self.color or columns > 1:
            return ["".join(self.render_cell(value, columns) for value in row) for row in values]
        colors = [[self.weight_color(value) for value in row] for row in values]
        return [
            self.render_half_blocks(colors[i], colors[i + 1] if i + 1 < len(colors) else None)
            for i in range(0, len(colors), 2)
        ]

    def render_cell(self, value: float, columns: int, *, even: bool = False) -> str:
        """Render one value from 0 to 1; `even` spaces colors and shades evenly, for values that are not weights."""
        if not self.color:
            return (SHADES[min(int(5 * value), 4)] if even else self.shade(value)) * columns
        color = self.weight_color(value**2 if even else value)
        return self.paint(" " * columns, ansi_color_codes(color, self.bits, background=True))

    def render_half_blocks(self, upper: Sequence[Color], lower: Sequence[Color] | None) -> str:
        """Render two rows of colors in one line: ▀ has the text color above and the background color below."""
        if lower is None:
            return "".join(self.paint("▀", ansi_color_codes(color, self.bits, background=False)) for color in upper)
        return "".join(
            self.paint(
                "▀",
                f"{ansi_color_codes(a, self.bits, background=False)};{ansi_color_codes(b, self.bits, background=True)}",
            )
            for a, b in zip(upper, lower, strict=True)
        )

    def cell(self, text: str, width: int) -> str:
        """Return the beginning of a column label above a cell, left-to-right or right-to-left."""
        beginning = pad_text(isolate_direction(cut_to_width(text, width - 1)), width - 1, right=True)
        return beginning + " " if self.color else " " + beginning

    def label(self, text: str, width: int, *, right: bool = False) -> str:
        """Return a word in exactly `width` columns, left-to-right or right-to-left."""
        text = clip_text(text, width)
        return pad_text(isolate_direction(text), width, right=right)

    def vertical_words(self, texts: Sequence[str], width: int, max_height: int = 8) -> list[str]:
        """Return lines in which words are written downwards, each above a column of `width`: labels of narrow cells."""
        columns = [split_clusters(clip_text(text, max_height)) for text in texts]
        height = max(map(len, columns))
        columns = [[""] * (height - len(column)) + column for column in columns]
        return ["".join(pad_text(isolate_direction(column[i]), width) for column in columns) for i in range(height)]


def measure_widest(texts: Sequence[str], most: int) -> int:
    """Return the width of the widest text, at most `most`."""
    return min(max(map(text_width, texts), default=1), most)

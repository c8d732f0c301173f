"""A page for attention: words, cells and pictures whose shade says how much; characters say it where colour cannot."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from foci.runtime.console import Page, clip, pad, start, text_width
from foci.runtime.printable import clusters, isolated
from foci.view.colors import NONE, ON_BLACK, ON_WHITE, Color, codes, depth, ink, mixed, on_white

NARROWEST, WIDEST = 24, 120
SHADES = " ░▒▓█"
# From which share on a word is shaded, without colour.
STEPS = (0.04, 0.10, 0.20, 0.40)
# A share below this is left without a tint.
FAINTEST = 0.005


@dataclass
class Sheet(Page):
    """A page that knows how many bits of colour its terminal takes, and whether its ground is light."""

    bits: int = NONE
    light: bool = False

    @classmethod
    def fitting(cls, stream: TextIO | None = None, width: int | None = None) -> Sheet:
        """A sheet for a stream: its colours, and the width of the terminal unless one is given."""
        width = width or shutil.get_terminal_size().columns
        bits = depth(stream or sys.stdout)
        return cls(min(max(width, NARROWEST), WIDEST), bits != NONE, bits=bits, light=on_white())

    def heading(self, title: str) -> None:
        """A blank line and a title, on as many lines as it needs."""
        self.line()
        self.lines += [self.paint(line.strip(), "1;36") for line in self.broken(title)]

    def note(self, text: str) -> None:
        """A quiet remark, on as many lines as it needs."""
        for line in self.broken(text):
            self.line(self.faint(line.strip()))

    def broken(self, text: str) -> list[str]:
        """A text in lines of this sheet, not yet written."""
        page = Page(self.width)
        page.wrapped([clip(word, self.room) for word in text.split(" ")])
        return page.lines

    def shade(self, fraction: float) -> str:
        """The character of a share."""
        return SHADES[sum(fraction >= least for least in STEPS)]

    def color_of(self, fraction: float) -> Color:
        """The colour of a share; the root spreads the small ones, of which there are many."""
        return mixed(ON_WHITE if self.light else ON_BLACK, max(fraction, 0.0) ** 0.5)

    def tint(self, text: str, fraction: float) -> str:
        """The text on the colour of its share."""
        if not self.color or fraction < FAINTEST:
            return text
        color = self.color_of(fraction)
        return self.paint(text, f"{codes(color, self.bits, ground=True)};{codes(ink(color), self.bits, ground=False)}")

    def shaded(self, fraction: float, width: int) -> str:
        """A cell with its percentage; too narrow for one, only its shade."""
        if width >= 4 and not self.color:
            return super().shaded(fraction, width)
        percent = f"{round(100 * fraction):>{width - 1}} " if width >= 4 else " " * width
        return self.tint(percent, max(fraction, FAINTEST)) if self.color else self.shade(fraction) * width

    def blocks(self, values: Sequence[Sequence[float]], columns: int = 1) -> list[str]:
        """A picture of numbers from 0 to 1: two of its rows in a line of half blocks, or a shade for each number.

        `columns` is how wide a number is drawn; from 2 on, each row has a line of its own.
        """
        if not self.color or columns > 1:
            return ["".join(self.patch(value, columns) for value in row) for row in values]
        colors = [[self.color_of(value) for value in row] for row in values]
        return [
            self.halves(colors[i], colors[i + 1] if i + 1 < len(colors) else None) for i in range(0, len(colors), 2)
        ]

    def patch(self, value: float, columns: int, *, even: bool = False) -> str:
        """A place of a picture; `even` gives every step from 0 to 1 the same room, for what is no share."""
        if not self.color:
            return (SHADES[min(int(5 * value), 4)] if even else self.shade(value)) * columns
        return self.paint(" " * columns, codes(self.color_of(value**2 if even else value), self.bits, ground=True))

    def halves(self, upper: Sequence[Color], lower: Sequence[Color] | None) -> str:
        """Two rows of colours in one line: ▀ has its letters' colour above and its ground below."""
        if lower is None:
            return "".join(self.paint("▀", codes(color, self.bits, ground=False)) for color in upper)
        return "".join(
            self.paint("▀", f"{codes(a, self.bits, ground=False)};{codes(b, self.bits, ground=True)}")
            for a, b in zip(upper, lower, strict=True)
        )

    def cell(self, text: str, width: int) -> str:
        """The beginning of a word over a cell, whichever way it is written."""
        beginning = pad(isolated(start(text, width - 1)), width - 1, right=True)
        return beginning + " " if self.color else " " + beginning

    def label(self, text: str, width: int, *, right: bool = False) -> str:
        """A word in exactly `width` columns, whichever way it is written."""
        text = clip(text, width)
        return pad(isolated(text), width, right=right)

    def upright(self, texts: Sequence[str], width: int, most: int = 8) -> list[str]:
        """Words written downwards, each over a column of `width`: a header for narrow cells."""
        columns = [clusters(clip(text, most)) for text in texts]
        height = max(map(len, columns))
        columns = [[""] * (height - len(column)) + column for column in columns]
        return ["".join(pad(isolated(column[i]), width) for column in columns) for i in range(height)]


def widest(texts: Sequence[str], most: int) -> int:
    """The columns that the widest of some texts takes, at most so many."""
    return min(max(map(text_width, texts), default=1), most)

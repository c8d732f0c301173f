"""Text for a terminal: how wide things are, which colours it takes, and a page that is written line by line."""

import os
import re
import shutil
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TextIO

MIN_COLUMNS, MAX_COLUMNS = 60, 120

# From dark to bright, as numbers of the 256-colour palette; dark text on the bright half.
COLOR_RAMP = (234, 17, 54, 91, 132, 168, 209, 215, 228)
FIRST_BRIGHT_LEVEL = 5

ANSI_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def format_count(number: int, noun: str) -> str:
    """A number and what it counts.

    >>> count(1, "error"), count(2000, "update")
    ('1 error', '2,000 updates')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def terminal_columns() -> int:
    """The width to write for: the terminal's (or COLUMNS), kept between 60 and 120."""
    return min(max(shutil.get_terminal_size().columns, MIN_COLUMNS), MAX_COLUMNS)


def supports_color(stream: TextIO) -> bool:
    """Colour goes to a terminal, unless NO_COLOR is set (https://no-color.org) or the terminal is dumb."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def character_width(character: str) -> int:
    """Columns that a character takes: 0 for a mark on the one before, 2 for a wide one (漢), 1 for the others."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def text_width(text: str) -> int:
    """Columns that a text takes; colours take none.

    >>> text_width("Jane"), text_width("漢字")
    (4, 4)
    """
    return sum(map(character_width, ANSI_STYLE.sub("", text)))


def cut_to_width(text: str, width: int) -> str:
    """As much of the beginning of a text as `width` columns hold.

    >>> start("craving", 4)
    'crav'
    """
    taken = 0
    for end, character in enumerate(text):
        taken += character_width(character)
        if taken > width:
            return text[:end]
    return text


def clip_text(text: str, width: int) -> str:
    """The text in at most `width` columns; what does not fit is cut off and marked with `…`.

    >>> clip("craving", 5)
    'crav…'
    """
    return text if text_width(text) <= width else cut_to_width(text, width - 1) + "…"


def pad_text(text: str, width: int, *, right: bool = False) -> str:
    """The text in exactly `width` columns, to the left or to the right of them."""
    text = clip_text(text, width)
    space = " " * (width - text_width(text))
    return space + text if right else text + space


@dataclass
class TextPage:
    """Lines for a terminal of one width, with colour or without."""

    width: int = 80
    color: bool = False
    lines: list[str] = field(default_factory=list)

    @property
    def margin(self) -> int:
        """Spaces before each line: few where the terminal is narrow."""
        return 1 if self.width < 72 else 3

    @property
    def room(self) -> int:
        """Columns that a line has beside its margin."""
        return self.width - self.margin

    def paint(self, text: str, codes: str) -> str:
        """The text in an ANSI style, where the page has colour."""
        return f"\x1b[{codes}m{text}\x1b[0m" if self.color else text

    def bold(self, text: str) -> str:
        """The text in bold."""
        return self.paint(text, "1")

    def faint(self, text: str) -> str:
        """The text in a quiet colour."""
        return self.paint(text, "2")

    def accent(self, text: str) -> str:
        """The text in the colour that marks the word in focus."""
        return self.paint(text, "1;33")

    def line(self, text: str = "") -> None:
        """One line, as it is."""
        self.lines.append((" " * self.margin + text).rstrip())

    def heading(self, title: str) -> None:
        """A blank line and a title."""
        self.line()
        self.lines.append(self.paint(title, "1;36"))

    def prose(self, text: str) -> None:
        """A paragraph, wrapped to the page."""
        self.wrapped(text.split(), width=96)

    def wrapped(self, parts: Iterable[str], between: str = " ", width: int = MAX_COLUMNS, hang: int = 0) -> None:
        """Parts that belong on one line, on as many as they need, all but the first moved in by `hang`.

        No part is broken.
        """
        first, *others = parts
        line, width = first, min(self.room, width)
        for part in others:
            if text_width(line + between + part + between.rstrip()) > width:
                self.line(line + between.rstrip())
                line = " " * hang + part
            else:
                line += between + part
        self.line(line)

    def bar(self, fraction: float, width: int) -> str:
        """A horizontal bar, exact to an eighth of a column."""
        eighths = round(min(max(fraction, 0.0), 1.0) * width * 8)
        return self.paint("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip(), "38;5;209")

    def cell(self, text: str, width: int) -> str:
        """The beginning of a text in a cell of `width` columns, above or below the numbers of shaded cells."""
        beginning = pad_text(cut_to_width(text, width - 1), width - 1, right=True)
        return beginning + " " if self.color else " " + beginning

    def shaded(self, fraction: float, width: int) -> str:
        """A cell of `width` columns that holds a percentage: on a colour of the ramp, or behind a shade of grey."""
        percent = round(100 * fraction)
        if self.color:
            level = round(min(max(fraction, 0.0), 1.0) ** 0.5 * (len(COLOR_RAMP) - 1))
            ink = 232 if level >= FIRST_BRIGHT_LEVEL else 252
            return self.paint(f"{percent:>{width - 1}} ", f"48;5;{COLOR_RAMP[level]};38;5;{ink}")
        digits = 3 if width > 4 or percent > 99 else 2
        shade = " ░▒▓█"[sum(fraction >= least for least in (0.04, 0.10, 0.20, 0.40))]
        return " " + shade * (width - 1 - digits) + f"{percent:>{digits}}"

    def __str__(self) -> str:
        return "\n".join(self.lines)

"""Text for a terminal: widths in columns, color support, and a page that is written line by line."""

import os
import re
import shutil
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TextIO

MIN_COLUMNS, MAX_COLUMNS = 60, 120

# From dark to bright, in the 256-color palette; text is dark on the bright levels.
COLOR_RAMP = (234, 17, 54, 91, 132, 168, 209, 215, 228)
FIRST_BRIGHT_LEVEL = 5

ANSI_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def format_count(number: int, noun: str) -> str:
    """A number with its noun in singular or plural.

    >>> format_count(1, "error"), format_count(2000, "update")
    ('1 error', '2,000 updates')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def terminal_columns() -> int:
    """The width of the terminal (or COLUMNS), limited to 60 to 120."""
    return min(max(shutil.get_terminal_size().columns, MIN_COLUMNS), MAX_COLUMNS)


def supports_color(stream: TextIO) -> bool:
    """Whether to write color: to a terminal that is not dumb, unless NO_COLOR is set (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def character_width(character: str) -> int:
    """Columns of a character: 0 for a combining mark, 2 for a wide character (漢), 1 for the others."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def text_width(text: str) -> int:
    """Columns of a text; color codes take none.

    >>> text_width("Jane"), text_width("漢字")
    (4, 4)
    """
    return sum(map(character_width, ANSI_STYLE.sub("", text)))


def cut_to_width(text: str, width: int) -> str:
    """The beginning of a text that fits in `width` columns.

    >>> cut_to_width("craving", 4)
    'crav'
    """
    used = 0
    for end, character in enumerate(text):
        used += character_width(character)
        if used > width:
            return text[:end]
    return text


def clip_text(text: str, width: int) -> str:
    """The text in at most `width` columns; a text that is cut ends in `…`.

    >>> clip_text("craving", 5)
    'crav…'
    """
    return text if text_width(text) <= width else cut_to_width(text, width - 1) + "…"


def pad_text(text: str, width: int, *, right: bool = False) -> str:
    """The text in exactly `width` columns, aligned left or right."""
    text = clip_text(text, width)
    space = " " * (width - text_width(text))
    return space + text if right else text + space


@dataclass
class TextPage:
    """Lines for a terminal of one width, with color or without."""

    width: int = 80
    color: bool = False
    lines: list[str] = field(default_factory=list)

    @property
    def margin(self) -> int:
        """Spaces before each line: fewer in a narrow terminal."""
        return 1 if self.width < 72 else 3

    @property
    def room(self) -> int:
        """Columns of a line without its margin."""
        return self.width - self.margin

    def paint(self, text: str, codes: str) -> str:
        """The text in an ANSI style, if the page has color."""
        return f"\x1b[{codes}m{text}\x1b[0m" if self.color else text

    def bold(self, text: str) -> str:
        """The text in bold."""
        return self.paint(text, "1")

    def faint(self, text: str) -> str:
        """The text in a faint color."""
        return self.paint(text, "2")

    def accent(self, text: str) -> str:
        """The text in the color that marks the word in focus."""
        return self.paint(text, "1;33")

    def line(self, text: str = "") -> None:
        """Adds one line without wrapping."""
        self.lines.append((" " * self.margin + text).rstrip())

    def heading(self, title: str) -> None:
        """Adds a blank line and a title."""
        self.line()
        self.lines.append(self.paint(title, "1;36"))

    def prose(self, text: str) -> None:
        """Adds a paragraph, wrapped to the page."""
        self.wrapped(text.split(), width=96)

    def wrapped(self, parts: Iterable[str], between: str = " ", width: int = MAX_COLUMNS, hang: int = 0) -> None:
        """Adds parts on as many lines as they need, all but the first line indented by `hang`; no part is split."""
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
        """A horizontal bar with a resolution of an eighth of a column."""
        eighths = round(min(max(fraction, 0.0), 1.0) * width * 8)
        return self.paint("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip(), "38;5;209")

    def cell(self, text: str, width: int) -> str:
        """The beginning of a text in a cell of `width` columns, aligned with the numbers of shaded cells."""
        beginning = pad_text(cut_to_width(text, width - 1), width - 1, right=True)
        return beginning + " " if self.color else " " + beginning

    def shaded(self, fraction: float, width: int) -> str:
        """A percentage in a cell of `width` columns, on a color of the ramp or after a shade of grey."""
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

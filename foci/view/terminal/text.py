"""The running text, tinted by where one word looks, and its strongest links with their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foci.runtime.console import clip, text_width
from foci.runtime.printable import isolated
from foci.view.selection import Unit
from foci.view.terminal.styled_text import Sheet, widest

MOST_LINES = 12
MOST_LINKS = 8
# Of a long text, lines without any word of this share are left out.
LEAST = 0.01


@dataclass(frozen=True)
class Piece:
    """A word as it stands in a line: its share of the attention, and whether it is the one that looks."""

    text: str
    share: float
    focus: bool = False
    spaced: bool = True
    breaks: bool = False

    @property
    def width(self) -> int:
        return text_width(self.text) + self.spaced


def pieces(shown: Sequence[Unit], shares: Sequence[float], focus: int | None, plain: bool) -> list[Piece]:
    """The words of a text; without colour the one that looks stands between marks."""
    return [
        Piece(f"»{unit.text}«" if plain and i == focus else unit.text, share, i == focus, unit.spaced, unit.breaks)
        for i, (unit, share) in enumerate(zip(shown, shares, strict=True))
    ]


def in_lines(text: Sequence[Piece], room: int) -> list[list[Piece]]:
    """The text in lines of at most `room` columns; a word wider than that is cut."""
    lines: list[list[Piece]] = [[]]
    taken = 0
    for piece in text:
        if lines[-1] and (piece.breaks or taken + piece.width > room):
            lines.append([])
            taken = 0
        if not lines[-1]:
            piece = Piece(clip(piece.text, room), piece.share, piece.focus, False)
        lines[-1].append(piece)
        taken += piece.width
    return lines


def write_text(sheet: Sheet, shown: Sequence[Unit], shares: Sequence[float], focus: int | None) -> None:
    """The text, tinted; of a long one only the lines in which something is seen."""
    lines = in_lines(pieces(shown, shares, focus, plain=not sheet.color), sheet.room)
    kept = set(range(len(lines))) if len(lines) <= MOST_LINES else telling_lines(lines)
    skipped = 0
    for i, line in enumerate(lines):
        if i in kept:
            write_skipped(sheet, skipped)
            write_line(sheet, line)
        skipped = 0 if i in kept else skipped + 1
    write_skipped(sheet, skipped)


def telling_lines(lines: list[list[Piece]]) -> set[int]:
    """The line of the word that looks, and those with the heaviest words."""
    heaviest = [max(piece.share for piece in line) for line in lines]
    order = sorted((i for i, share in enumerate(heaviest) if share >= LEAST), key=lambda i: -heaviest[i])
    focus = [i for i, line in enumerate(lines) if any(piece.focus for piece in line)]
    return {*focus[:1], *order[: MOST_LINES - 1]}


def write_skipped(sheet: Sheet, lines: int) -> None:
    if lines:
        sheet.line(sheet.faint(f"⋮ {lines:,} line{'s' if lines > 1 else ''} more"))


def write_line(sheet: Sheet, line: list[Piece]) -> None:
    """A line of words; without colour a second one under it shades them."""
    if sheet.color:
        sheet.line("".join(" " * piece.spaced + painted(sheet, piece) for piece in line))
        return
    sheet.line("".join(" " * piece.spaced + isolated(piece.text) for piece in line))
    under = "".join(" " * piece.spaced + sheet.shade(piece.share) * text_width(piece.text) for piece in line)
    if under.strip():
        sheet.line(under)


def painted(sheet: Sheet, piece: Piece) -> str:
    return sheet.tint(sheet.paint(piece.text, "1;4") if piece.focus else piece.text, piece.share)


def write_links(sheet: Sheet, shown: Sequence[Unit], shares: Sequence[float], exact: bool) -> None:
    """The heaviest words with their shares, and what is left for the others; a learned sink is no word."""
    order = sorted(range(len(shares)), key=lambda j: -shares[j])
    top = [j for j in order[:MOST_LINKS] if shares[j] > 0]
    links = [(named(shown, j), shares[j]) for j in top]
    rest, others, gone = len(shares) - len(top), sum(shares[j] for j in order[len(top) :]), 1 - sum(shares)
    # Of kept statistics only the heaviest keys are known: what is missing belongs to the others.
    below = [(f"{rest:,} other{'' if rest == 1 else 's'}", others if exact else gone)] if rest else []
    below += [("a sink", gone)] if exact and gone >= LEAST else []
    label = widest([name for name, _ in links + below], max(8, sheet.room // 2 - 8))
    for name, share in links:
        bar = sheet.bar(share, max(sheet.room - label - 10, 1))
        sheet.line(f"{sheet.label(name, label)}  {percent(share)}  {bar}")
    for name, share in below:
        sheet.line(sheet.faint(f"{sheet.label(name, label)}  {percent(share)}"))


def percent(share: float) -> str:
    """A share in six columns; what is there is not shown as nothing."""
    return " <0.1%" if 0 < share < 0.0005 else f"{share:6.1%}"


def named(shown: Sequence[Unit], place: int) -> str:
    """A word, with which of its kind it is where there are several: "the#2"."""
    text = shown[place].text
    same = [i for i, unit in enumerate(shown) if unit.text == text]
    return text if len(same) == 1 else f"{text}#{same.index(place) + 1}"

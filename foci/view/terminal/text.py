"""Writes the running text, tinted by the attention weights of one query, and the largest weights as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foci.runtime.console import clip_text, text_width
from foci.runtime.printable import isolate_direction
from foci.view.terminal.styled_text import TerminalPage, measure_widest
from foci.view.units import TextUnit

MAX_TEXT_LINES = 12
MAX_LISTED_KEYS = 8
# Lines of a long text are left out if no weight reaches this value.
MIN_SHOWN_WEIGHT = 0.01


@dataclass(frozen=True)
class TintedWord:
    """A word of a line: its attention weight, and whether it is the query."""

    text: str
    weight: float
    is_query: bool = False
    space_before: bool = True
    newline_before: bool = False

    @property
    def width(self) -> int:
        return text_width(self.text) + self.space_before


def tint_words(units: Sequence[TextUnit], weights: Sequence[float], query: int | None, plain: bool) -> list[TintedWord]:
    """Pair the words of a text with their weights; without color the query is marked as »query«."""
    return [
        TintedWord(
            f"»{unit.text}«" if plain and i == query else unit.text,
            weight,
            i == query,
            unit.space_before,
            unit.newline_before,
        )
        for i, (unit, weight) in enumerate(zip(units, weights, strict=True))
    ]


def wrap_words(words: Sequence[TintedWord], room: int) -> list[list[TintedWord]]:
    """Wrap a text to lines of at most `room` columns; a wider word is cut."""
    lines: list[list[TintedWord]] = [[]]
    width = 0
    for word in words:
        if lines[-1] and (word.newline_before or width + word.width > room):
            lines.append([])
            width = 0
        if not lines[-1]:
            word = TintedWord(clip_text(word.text, room), word.weight, word.is_query, False)
        lines[-1].append(word)
        width += word.width
    return lines


def write_tinted_text(
    page: TerminalPage, units: Sequence[TextUnit], weights: Sequence[float], query: int | None
) -> None:
    """Write the tinted text; of a long one only the lines with the query or with large weights."""
    lines = wrap_words(tint_words(units, weights, query, plain=not page.color), page.room)
    selected = set(range(len(lines))) if len(lines) <= MAX_TEXT_LINES else select_lines(lines)
    skipped = 0
    for i, line in enumerate(lines):
        if i in selected:
            write_skipped_count(page, skipped)
            write_tinted_line(page, line)
        skipped = 0 if i in selected else skipped + 1
    write_skipped_count(page, skipped)


def select_lines(lines: list[list[TintedWord]]) -> set[int]:
    """Select the line of the query, and those with the largest weights."""
    largest = [max(word.weight for word in line) for line in lines]
    order = sorted((i for i, weight in enumerate(largest) if weight >= MIN_SHOWN_WEIGHT), key=lambda i: -largest[i])
    query = [i for i, line in enumerate(lines) if any(word.is_query for word in line)]
    return {*query[:1], *order[: MAX_TEXT_LINES - 1]}


def write_skipped_count(page: TerminalPage, lines: int) -> None:
    if lines:
        page.line(page.faint(f"⋮ {lines:,} more line{'s' if lines > 1 else ''}"))


def write_tinted_line(page: TerminalPage, line: list[TintedWord]) -> None:
    """Write a line of words; without color a line of shades follows."""
    if page.color:
        page.line("".join(" " * word.space_before + paint_word(page, word) for word in line))
        return
    page.line("".join(" " * word.space_before + isolate_direction(word.text) for word in line))
    shades = "".join(" " * word.space_before + page.shade(word.weight) * text_width(word.text) for word in line)
    if shades.strip():
        page.line(shades)


def paint_word(page: TerminalPage, word: TintedWord) -> str:
    return page.tint(page.paint(word.text, "1;4") if word.is_query else word.text, word.weight)


def write_listed_keys(
    page: TerminalPage, units: Sequence[TextUnit], weights: Sequence[float], has_entries: bool, padding: float = 0.0
) -> None:
    """Write the keys with the largest weights, the sum of the others, and the weight on no key (a learned sink).

    A model that does not mask its padding, such as a diffusion model, attends to it.
    """
    order = sorted(range(len(weights)), key=lambda j: -weights[j])
    top = [j for j in order[:MAX_LISTED_KEYS] if weights[j] > 0]
    listed = [(name_occurrence(units, j), weights[j]) for j in top]
    rest, others = len(weights) - len(top), sum(weights[j] for j in order[len(top) :])
    missing = 1 - sum(weights) - padding
    # Without entries only the top keys are known: the missing weight belongs to the others.
    below = [(f"{rest:,} other{'' if rest == 1 else 's'}", others if has_entries else missing)] if rest else []
    below += [("on padding", padding)] if padding >= MIN_SHOWN_WEIGHT else []
    below += [("on no key", missing)] if has_entries and missing >= MIN_SHOWN_WEIGHT else []
    label = measure_widest([name for name, _ in listed + below], max(8, page.room // 2 - 8))
    for name, weight in listed:
        bar = page.bar(weight, max(page.room - label - 10, 1))
        page.line(f"{page.label(name, label)}  {format_weight(weight)}  {bar}")
    for name, weight in below:
        page.line(page.faint(f"{page.label(name, label)}  {format_weight(weight)}"))


def format_weight(weight: float) -> str:
    """Format a weight as a percentage of six columns; a small weight is not shown as 0."""
    return " <0.1%" if 0 < weight < 0.0005 else f"{weight:6.1%}"


def name_occurrence(units: Sequence[TextUnit], index: int) -> str:
    """Return a word, with its occurrence if it occurs several times: "the#2"."""
    text = units[index].text
    same = [i for i, unit in enumerate(units) if unit.text == text]
    return text if len(same) == 1 else f"{text}#{same.index(index) + 1}"

"""The attention matrix in a terminal: percentages for a short text, shades for a longer one, a map for a long one."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan

from foci.view.selection import Unit
from foci.view.terminal.styled_text import Sheet, widest

WIDEST_LABEL, NARROWEST_LABEL = 12, 5
NUMBER, WIDEST_NUMBER, SHADE = 4, 8, 2
MOST_ROWS = 48
MAP_ROWS = 40


def cell_width(room: int, columns: int) -> int:
    """How wide a cell can be: 4 to 8 columns with a number in it, 2 with a shade only, 0 where not even that fits."""
    fits = room // columns
    return min(fits, WIDEST_NUMBER) if fits >= NUMBER else SHADE * (fits >= SHADE)


def fits(sheet: Sheet, queries: Sequence[Unit], keys: Sequence[Unit]) -> bool:
    """Whether every word can have a row and a column."""
    label = label_width(sheet, queries, len(keys))
    return len(queries) <= MOST_ROWS and cell_width(sheet.room - label, len(keys)) > 0


def label_width(sheet: Sheet, queries: Sequence[Unit], columns: int) -> int:
    """The columns before the cells: the words of the rows, cut where the cells need the room."""
    wanted = widest([unit.text for unit in queries], WIDEST_LABEL) + 1
    cell = NUMBER if NUMBER * columns <= sheet.room - NARROWEST_LABEL else SHADE
    return min(wanted, max(sheet.room - cell * columns, NARROWEST_LABEL))


def write(
    sheet: Sheet, queries: Sequence[Unit], keys: Sequence[Unit], shares: Sequence[Sequence[float]], focus: int | None
) -> None:
    """A row for each word that looks, a column for each that is looked at."""
    label = label_width(sheet, queries, len(keys))
    longest = widest([unit.text for unit in keys], WIDEST_NUMBER - 1) + 1
    cell = cell_width(sheet.room - label, len(keys))
    cell = min(cell, max(longest, NUMBER)) if cell >= NUMBER else cell
    sheet.prose(f"A row looks, a column is looked at{'; in percent' if cell >= NUMBER else ''}.")
    write_header(sheet, keys, label, cell)
    for i, (unit, row) in enumerate(zip(queries, shares, strict=True)):
        name = sheet.label(unit.text, label - 1) + " "
        # Sums along the row carry what is no number on, so none of it is shown.
        told = row if all(map(isfinite, row)) else [nan] * len(row)
        sheet.line((sheet.accent(name) if i == focus else name) + "".join(shown(sheet, share, cell) for share in told))


def shown(sheet: Sheet, share: float, cell: int) -> str:
    """A share in its cell; what is no number is a question."""
    return (
        sheet.shaded(share, cell)
        if isfinite(share)
        else sheet.faint("?".rjust(cell - 1) + " " if sheet.color else "?".rjust(cell))
    )


def write_header(sheet: Sheet, keys: Sequence[Unit], label: int, cell: int) -> None:
    texts = [unit.text for unit in keys]
    if cell >= NUMBER:
        sheet.line(" " * label + "".join(sheet.cell(text, cell) for text in texts))
        return
    for line in sheet.upright(texts, cell):
        sheet.line(" " * label + line)


def map_size(sheet: Sheet, finest: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of a map: as fine as the sheet has room, and not finer than what can be asked."""
    rows, columns = min(finest[0], MAP_ROWS), min(finest[1], sheet.room)
    # Without half blocks a line holds one row, which is twice as high as wide.
    return (rows if sheet.color else min(rows, MAP_ROWS // 2)), columns


def write_map(sheet: Sheet, picture: Sequence[Sequence[float]]) -> None:
    """A picture of a long matrix, brightened to its largest number."""
    largest = max(map(max, picture)) or 1.0
    for line in sheet.blocks([[value / largest for value in row] for row in picture]):
        sheet.line(line)

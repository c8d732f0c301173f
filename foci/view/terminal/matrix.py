"""Writes the attention matrix: percentages for a short text, shades for a longer one, a map for a long one."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan

from foci.view.terminal.styled_text import TerminalPage, measure_widest
from foci.view.units import TextUnit

MAX_LABEL_WIDTH, MIN_LABEL_WIDTH = 12, 5
MIN_NUMBER_WIDTH, MAX_NUMBER_WIDTH, SHADE_WIDTH = 4, 8, 2
MAX_MATRIX_ROWS = 48
MAX_MAP_ROWS = 40


def fit_cell_width(room: int, columns: int) -> int:
    """Return the width of a cell: 4 to 8 columns with a number, 2 with a shade only, 0 if not even that fits."""
    width = room // columns
    return min(width, MAX_NUMBER_WIDTH) if width >= MIN_NUMBER_WIDTH else SHADE_WIDTH * (width >= SHADE_WIDTH)


def fits_as_cells(page: TerminalPage, queries: Sequence[TextUnit], keys: Sequence[TextUnit]) -> bool:
    """Whether every query has a row and every key a column."""
    label = fit_label_width(page, queries, len(keys))
    return len(queries) <= MAX_MATRIX_ROWS and fit_cell_width(page.room - label, len(keys)) > 0


def fit_label_width(page: TerminalPage, queries: Sequence[TextUnit], columns: int) -> int:
    """Return the width of the row labels; they are cut if the cells need the room."""
    wanted = measure_widest([unit.text for unit in queries], MAX_LABEL_WIDTH) + 1
    cell = MIN_NUMBER_WIDTH if MIN_NUMBER_WIDTH * columns <= page.room - MIN_LABEL_WIDTH else SHADE_WIDTH
    return min(wanted, max(page.room - cell * columns, MIN_LABEL_WIDTH))


def write_matrix_cells(
    page: TerminalPage,
    queries: Sequence[TextUnit],
    keys: Sequence[TextUnit],
    weights: Sequence[Sequence[float]],
    focus: int | None,
) -> None:
    """Write a row for each query and a column for each key; the row `focus` is marked."""
    label = fit_label_width(page, queries, len(keys))
    longest = measure_widest([unit.text for unit in keys], MAX_NUMBER_WIDTH - 1) + 1
    cell = fit_cell_width(page.room - label, len(keys))
    cell = min(cell, max(longest, MIN_NUMBER_WIDTH)) if cell >= MIN_NUMBER_WIDTH else cell
    page.prose(f"Rows are queries, columns are keys{'; in percent' if cell >= MIN_NUMBER_WIDTH else ''}.")
    write_column_labels(page, keys, label, cell)
    for i, (unit, row) in enumerate(zip(queries, weights, strict=True)):
        name = page.label(unit.text, label - 1) + " "
        # One NaN makes the whole row unusable: its weights do not sum to 1.
        values = row if all(map(isfinite, row)) else [nan] * len(row)
        page.line((page.accent(name) if i == focus else name) + "".join(format_cell(page, w, cell) for w in values))


def format_cell(page: TerminalPage, weight: float, cell: int) -> str:
    """Format a weight as a cell; NaN is a question mark."""
    return (
        page.shaded(weight, cell)
        if isfinite(weight)
        else page.faint("?".rjust(cell - 1) + " " if page.color else "?".rjust(cell))
    )


def write_column_labels(page: TerminalPage, keys: Sequence[TextUnit], label: int, cell: int) -> None:
    texts = [unit.text for unit in keys]
    if cell >= MIN_NUMBER_WIDTH:
        page.line(" " * label + "".join(page.cell(text, cell) for text in texts))
        return
    for line in page.vertical_words(texts, cell):
        page.line(" " * label + line)


def fit_map_size(page: TerminalPage, finest: tuple[int, int]) -> tuple[int, int]:
    """Return the rows and columns of a map: as many as the page has room for, at most `finest`."""
    rows, columns = min(finest[0], MAX_MAP_ROWS), min(finest[1], page.room)
    # Without half blocks a line holds one row.
    return (rows if page.color else min(rows, MAX_MAP_ROWS // 2)), columns


def write_map(page: TerminalPage, picture: Sequence[Sequence[float]]) -> None:
    """Write a picture of a long matrix, relative to its largest value."""
    largest = max(map(max, picture)) or 1.0
    for line in page.render_blocks([[value / largest for value in row] for row in picture]):
        page.line(line)

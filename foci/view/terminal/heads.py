"""All heads at a glance: a small table of layers and heads for each thing that heads are told apart by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from foci.record.record import Record
from foci.runtime.console import pad
from foci.view.selection import LONG, name_of
from foci.view.terminal.styled_text import Sheet, widest

MEASURES = ("entropy", "sink share", "distance", "previous token", "induction")
# What is no share of the attention is drawn relative to its largest.
RELATIVE = ("entropy", "distance")
LEAST = 0.05
GAP = 3
MOST_LAYERS = 48


@dataclass(frozen=True)
class Panel:
    """One measure of every head: a row per layer, NaN for heads that were not measured."""

    title: str
    values: list[list[float]]
    most: str

    @property
    def largest(self) -> float:
        known = [value for row in self.values for value in row if not math.isnan(value)]
        return (max(known, default=1.0) or 1.0) if self.title in RELATIVE else 1.0

    def width(self, cell: int, room: int) -> int:
        """Its columns: those of its heads, or of what is written over and under them, as far as there is room."""
        return min(max(cell * max(map(len, self.values)), len(self.title), len(self.most)), room)

    def parts(self, heads: int) -> list[Panel]:
        """Itself, or some heads after the others where there are more than a line holds."""
        count = max(map(len, self.values))
        if count <= heads:
            return [self]
        starts = range(0, count, heads)
        return [
            replace(self, title=f"{self.title} H{i}+", values=[row[i : i + heads] for row in self.values])
            for i in starts
        ]


def panels(record: Record) -> list[Panel]:
    """The measures that the record can tell, each with the head that stands out."""
    scores = record.scores()
    found = []
    for title in (name for name in MEASURES if name in scores):
        # Infinite weights measure nothing.
        values = [[float(v) if v.isfinite() else math.nan for v in row] for row in scores[title]]
        # A table of next to nothing would only take room.
        if any(value >= LEAST for row in values for value in row):
            rows = [values[number] for number in by_stack(record)]
            found.append(Panel(title, rows, outstanding(record, title, values)))
    return found


def by_stack(record: Record) -> list[int]:
    """The numbers of the layers, those of one stack together: a decoder's own are run in turns with those across."""
    stacks = [layer.stack for layer in record.layers.values()]
    return sorted(range(len(stacks)), key=lambda number: stacks.index(stacks[number]))


def outstanding(record: Record, title: str, values: Sequence[Sequence[float]]) -> str:
    """The head with the largest number, of entropy the one with the least: "max L2H3 92%"."""
    named = [
        (value, name_of(record, layer, head))
        for layer, row in zip(record.layers.values(), values, strict=True)
        for head, value in zip(layer.heads, row, strict=False)
        if not math.isnan(value)
    ]
    least = title == "entropy"
    value, name = min(named) if least else max(named, key=lambda pair: pair[0])
    number = f"{value:.0%}" if title not in RELATIVE else f"{value:.1f}" if value < 10 else f"{value:.0f}"
    return f"{'min' if least else 'max'} {name} {number}"


def write(sheet: Sheet, record: Record) -> None:
    """The panels side by side, as many as fit, and the rest under them; a single head has nothing to be told from."""
    if len(record.heads) == 1:
        return
    if any(layer.kept is None and max(layer.shape[2:]) > LONG for layer in record.layers.values()):
        sheet.note("Measures of all heads take a while for a text of this length: record.scores() has them.")
        return
    layers = list(record.layers.values())
    names = [name_of(record, layers[number]) for number in by_stack(record)][:MOST_LAYERS]
    label = widest(names, 16) + 1
    room = sheet.room - label
    shown = [part for panel in panels(record) for part in panel.parts(room)]
    if not shown:
        return
    sheet.heading("Heads")
    sheet.prose("A row is a layer, a column a head; under each table the head that stands out.")
    cell = widest_cell(shown, room)
    for some in in_rows(shown, cell, room):
        write_some(sheet, some, names, label, cell)


def widest_cell(shown: Sequence[Panel], room: int) -> int:
    """The most columns for a head that cost no further line."""
    most = max(len(row) for panel in shown for row in panel.values)
    fewest = len(in_rows(shown, 1, room))
    return max(c for c in (1, 2, 3, 4) if c == 1 or (c * most <= room and len(in_rows(shown, c, room)) == fewest))


def in_rows(shown: Sequence[Panel], cell: int, room: int) -> list[list[Panel]]:
    rows: list[list[Panel]] = [[]]
    for panel in shown:
        if rows[-1] and sum(one.width(cell, room) + GAP for one in rows[-1]) + panel.width(cell, room) > room:
            rows.append([])
        rows[-1].append(panel)
    return rows


def write_some(sheet: Sheet, some: Sequence[Panel], names: Sequence[str], label: int, cell: int) -> None:
    """Panels that stand side by side: their titles, a line per layer, and who stands out."""
    widths = [panel.width(cell, sheet.room - label) for panel in some]
    pairs = list(zip(some, widths, strict=True))
    gap = " " * GAP
    sheet.line(" " * label + gap.join(sheet.bold(pad(panel.title, width)) for panel, width in pairs))
    for i, name in enumerate(names):
        tables = [table_row(sheet, panel, panel.values[i], cell, width) for panel, width in pairs]
        sheet.line(sheet.label(name, label) + gap.join(tables))
    sheet.line(" " * label + gap.join(sheet.faint(pad(panel.most, width)) for panel, width in pairs))


def table_row(sheet: Sheet, panel: Panel, row: Sequence[float], cell: int, width: int) -> str:
    """A head after the other; those that were not measured stay empty."""
    drawn = [" " * cell if math.isnan(value) else sheet.patch(value / panel.largest, cell, even=True) for value in row]
    return "".join(drawn) + " " * (width - cell * len(row))

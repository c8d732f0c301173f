"""Writes a table of layers and heads for each head metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from foci.record.record import Record
from foci.runtime.console import pad_text
from foci.view.selection import MAX_SCANNED_LENGTH, printable_name
from foci.view.terminal.styled_text import TerminalPage, measure_widest

SHOWN_METRICS = ("entropy", "first_token", "sink_mass", "distance", "previous_token", "induction")
# Metrics without an upper bound of 1 are drawn relative to their largest value.
RELATIVE_METRICS = ("entropy", "distance")
MIN_SHOWN_METRIC = 0.05
PANEL_GAP = 3
MAX_LAYERS = 48


@dataclass(frozen=True)
class MetricPanel:
    """One metric of every head: a row per layer, NaN for heads without a value; `extreme` names the extreme head."""

    title: str
    values: list[list[float]]
    extreme: str

    @property
    def largest(self) -> float:
        known = [value for row in self.values for value in row if not math.isnan(value)]
        return (max(known, default=1.0) or 1.0) if self.title in RELATIVE_METRICS else 1.0

    def width(self, cell: int, room: int) -> int:
        """Its columns: those of its heads, its title or its caption, at most `room`."""
        return min(max(cell * max(map(len, self.values)), len(self.title), len(self.extreme)), room)

    def split(self, heads: int) -> list[MetricPanel]:
        """Split it into panels of at most this many heads."""
        count = max(map(len, self.values))
        if count <= heads:
            return [self]
        starts = range(0, count, heads)
        return [
            replace(self, title=f"{self.title} H{i}+", values=[row[i : i + heads] for row in self.values])
            for i in starts
        ]


def build_metric_panels(record: Record) -> list[MetricPanel]:
    """Build a panel for each metric that the record has."""
    scores = record.scores()
    panels = []
    for title in (name for name in SHOWN_METRICS if name in scores):
        # Infinite weights have no metric.
        values = [[float(v) if v.isfinite() else math.nan for v in row] for row in scores[title]]
        # A table of values near 0 would only take room.
        if any(value >= MIN_SHOWN_METRIC for row in values for value in row):
            rows = [values[number] for number in order_layers_by_stack(record)]
            panels.append(MetricPanel(title, rows, describe_extreme_head(record, title, values)))
    return panels


def order_layers_by_stack(record: Record) -> list[int]:
    """Return the layer numbers, one stack after the other: self- and cross-attention of a decoder alternate."""
    stacks = [layer.stack for layer in record.layers.values()]
    return sorted(range(len(stacks)), key=lambda number: stacks.index(stacks[number]))


def describe_extreme_head(record: Record, title: str, values: Sequence[Sequence[float]]) -> str:
    """Describe the head with the largest value, for entropy the smallest: "max L2H3 92%"."""
    heads = [
        (value, printable_name(record, layer, head))
        for layer, row in zip(record.layers.values(), values, strict=True)
        for head, value in zip(layer.heads, row, strict=False)
        if not math.isnan(value)
    ]
    smallest = title == "entropy"
    value, name = min(heads) if smallest else max(heads, key=lambda pair: pair[0])
    number = f"{value:.0%}" if title not in RELATIVE_METRICS else f"{value:.1f}" if value < 10 else f"{value:.0f}"
    return f"{'min' if smallest else 'max'} {name} {number}"


def write_head_metrics(page: TerminalPage, record: Record) -> None:
    """Write the panels side by side, as many as fit in a row; a record of a single head has no table."""
    if len(record.heads) == 1:
        return
    if any(layer.kept is None and max(layer.shape[2:]) > MAX_SCANNED_LENGTH for layer in record.layers.values()):
        page.note("Head metrics are slow for a text of this length: call record.scores() for them.")
        return
    layers = list(record.layers.values())
    names = [printable_name(record, layers[number]) for number in order_layers_by_stack(record)][:MAX_LAYERS]
    if len(layers) > MAX_LAYERS:
        page.note(f"The first {MAX_LAYERS} of {len(layers)} layers are listed: call record.scores() for all.")
    label = measure_widest(names, 16) + 1
    room = page.room - label
    panels = [part for panel in build_metric_panels(record) for part in panel.split(room)]
    if not panels:
        return
    page.heading("Heads")
    page.prose("Rows are layers, columns are heads; below each table its extreme head.")
    cell = fit_head_width(panels, room)
    for row in arrange_panels(panels, cell, room):
        write_panel_row(page, row, names, label, cell)


def fit_head_width(panels: Sequence[MetricPanel], room: int) -> int:
    """Return the widest cell, up to 4 columns, that does not need more rows of panels."""
    heads = max(len(row) for panel in panels for row in panel.values)
    fewest = len(arrange_panels(panels, 1, room))
    return max(
        c for c in (1, 2, 3, 4) if c == 1 or (c * heads <= room and len(arrange_panels(panels, c, room)) == fewest)
    )


def arrange_panels(panels: Sequence[MetricPanel], cell: int, room: int) -> list[list[MetricPanel]]:
    rows: list[list[MetricPanel]] = [[]]
    for panel in panels:
        if rows[-1] and sum(one.width(cell, room) + PANEL_GAP for one in rows[-1]) + panel.width(cell, room) > room:
            rows.append([])
        rows[-1].append(panel)
    return rows


def write_panel_row(
    page: TerminalPage, panels: Sequence[MetricPanel], names: Sequence[str], label: int, cell: int
) -> None:
    """Write panels side by side: their titles, a line per layer, and the extreme heads."""
    widths = [panel.width(cell, page.room - label) for panel in panels]
    pairs = list(zip(panels, widths, strict=True))
    gap = " " * PANEL_GAP
    titles = [pad_text(panel.title.replace("_", " "), width) for panel, width in pairs]
    page.line(" " * label + gap.join(map(page.bold, titles)))
    for i, name in enumerate(names):
        tables = [format_panel_line(page, panel, panel.values[i], cell, width) for panel, width in pairs]
        page.line(page.label(name, label) + gap.join(tables))
    page.line(" " * label + gap.join(page.faint(pad_text(panel.extreme, width)) for panel, width in pairs))


def format_panel_line(page: TerminalPage, panel: MetricPanel, row: Sequence[float], cell: int, width: int) -> str:
    """Format the heads of a layer; heads without a value are blank."""
    cells = [
        " " * cell if math.isnan(value) else page.render_cell(value / panel.largest, cell, even=True) for value in row
    ]
    return "".join(cells) + " " * (width - cell * len(row))

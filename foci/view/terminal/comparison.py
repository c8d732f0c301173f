"""Prints a Comparison: the heads that changed most, and the attention of one word in both records."""

from __future__ import annotations

import sys
from typing import TextIO

import torch
from torch import Tensor

from foci.record.compare import Aligned, Comparison, LayerPair
from foci.runtime.console import format_count
from foci.runtime.printable import make_printable
from foci.view.terminal.styled_text import TerminalPage, measure_widest
from foci.view.terminal.text import format_weight, write_tinted_text
from foci.view.units import find_unit, list_layer_units, list_units, truncate_text

MAX_LISTED_HEADS = 8
MAX_LISTED_KEYS = 8
# Rows that are searched for the one that changed most.
MAX_SEARCHED_ROWS = 512


def show_comparison(
    comparison: Comparison,
    word: str | int | None = None,
    head: str | None = None,
    *,
    width: int | None = None,
    file: TextIO | None = None,
) -> None:
    """Print a comparison: with colors to a terminal, as plain text elsewhere."""
    stream = file or sys.stdout
    page = TerminalPage.for_stream(stream, width)
    print(render_comparison(comparison, word, head, page), file=stream)


def render_comparison(
    comparison: Comparison, word: str | int | None = None, head: str | None = None, page: TerminalPage | None = None
) -> TerminalPage:
    """Render what `show_comparison` prints."""
    page = page or TerminalPage()
    changes = comparison.changes()
    chosen = head or next(iter(changes))
    pair, _ = comparison.pair(chosen)
    first, second = (make_printable(truncate_text(name)) for name in comparison.names)
    page.lines.append(page.bold(f"{first} and {second}"))
    page.prose(
        f"{format_count(len(comparison.pairs), 'layer')}, {format_count(len(comparison.heads), 'head')} compared"
    )
    write_changes(page, changes)
    write_word(page, comparison, pair, chosen, word)
    return page


def write_changes(page: TerminalPage, changes: dict[str, float]) -> None:
    """Write how much each head changed, most first."""
    page.heading("Heads that changed most")
    listed = list(changes.items())[:MAX_LISTED_HEADS]
    label = measure_widest([name for name, _ in listed], max(8, page.room // 2 - 8))
    for name, change in listed:
        bar = page.bar(change, max(page.room - label - 10, 1))
        page.line(f"{page.label(make_printable(name), label)}  {format_weight(change)}  {bar}")
    page.note("The mean total variation distance of the rows: 0% the same weights, 100% no key in common.")


def write_word(page: TerminalPage, comparison: Comparison, pair: LayerPair, head: str, word: str | int | None) -> None:
    """Write the attention of one word in both records, and the keys whose weights differ most."""
    queries, keys = comparison.align(pair.name)
    name, numbers = find_rows(comparison, pair, head, queries, word)
    a, b = (rows.mean(0).nan_to_num() for rows in comparison.rows(head, numbers))
    mean = "" if head in pair.heads else ", the mean of its heads"
    page.heading(f"Attention of “{make_printable(name)}” in {make_printable(head)}{mean}")
    for side, (record, layer, weights) in enumerate(
        ((comparison.first, pair.first, a), (comparison.second, pair.second, b))
    ):
        labels = record.labels_of(layer)[1]
        units = list_units(labels, comparison.batch, by_token=True)
        places = {key[side]: n for n, key in enumerate(keys) if key[side] is not None}
        marked = None
        if layer.queries == layer.keys and queries[numbers[0]][side] is not None:
            position = int(layer.positions[queries[numbers[0]][side]])
            marked = next((i for i, unit in enumerate(units) if unit.start <= position < unit.stop), None)
        page.line(page.faint(make_printable(truncate_text(comparison.names[side]))))
        write_tinted_text(
            page, units, [sum(float(weights[places[p]]) for p in unit.positions) for unit in units], marked
        )
    write_differences(page, comparison, head, a, b)


def find_rows(
    comparison: Comparison, pair: LayerPair, head: str, queries: list[Aligned], word: str | int | None
) -> tuple[str, list[int]]:
    """Find the rows of a word that both texts have, or the row that changed most."""
    both = {first: n for n, (first, second) in enumerate(queries) if first is not None and second is not None}
    units = list_layer_units(comparison.first, pair.first, comparison.batch)[0]
    if word is None:
        numbers = list(both.values())[-MAX_SEARCHED_ROWS:]
        a, b = comparison.rows(head, numbers)
        best = numbers[int((a - b).abs().sum(1).nan_to_num().argmax())]
        wanted = queries[best][0]
        unit = next(unit for unit in units if unit.start <= wanted < unit.stop)  # type: ignore[operator]
    else:
        unit = units[find_unit(units, word, {})]
    rows = [both[position] for position in unit.positions if position in both]
    if not rows:
        raise ValueError(f"word must be one that both texts have, got {word!r}")
    return unit.text, rows


def write_differences(page: TerminalPage, comparison: Comparison, head: str, a: Tensor, b: Tensor) -> None:
    """Write the keys whose weights differ most."""
    texts = [make_printable(text.strip()) or "␣" for text in comparison.texts(head)[1]]
    order = torch.argsort((b - a).abs(), descending=True, stable=True).tolist()[:MAX_LISTED_KEYS]
    order = [n for n in order if abs(float(b[n] - a[n])) >= 0.0005]
    page.line()
    if not order:
        page.note("Its weights are the same.")
        return
    label = measure_widest([texts[n] for n in order], max(8, page.room - 32))
    names = [page.label(make_printable(truncate_text(name)), 8, right=True) for name in comparison.names]
    page.line(page.faint(f"{page.label('', label)} {names[0]} {names[1]}  difference"))
    for n in order:
        values = f"{float(a[n]):>8.1%} {float(b[n]):>8.1%}  {100 * float(b[n] - a[n]):>+8.1f}"
        page.line(f"{page.label(texts[n], label)} {values}")

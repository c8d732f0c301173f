"""Prints a Comparison: the heads that changed most, and the attention of one word in both records."""

from __future__ import annotations

import sys
from typing import TextIO

import torch
from torch import Tensor

from foci.record.compare import Comparison, LayerPair
from foci.record.patch_layout import lay_out
from foci.runtime.console import format_count
from foci.runtime.printable import make_printable
from foci.view.terminal.patches import get_picture, write_word_map
from foci.view.terminal.styled_text import TerminalPage, measure_widest
from foci.view.terminal.text import MAX_LISTED_KEYS, format_weight, write_tinted_text
from foci.view.units import find_unit, list_layer_units, list_units, truncate_text

MAX_LISTED_HEADS = 8


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
    """Write the attention of one word in both records, and the keys whose weights differ most.

    Where images attend to text, it is the attention of the patches to the word.
    """
    axis = int(comparison.is_read_by_image(head))
    name, numbers = find_word(comparison, pair, head, word, axis)
    weights = [read_weights(comparison, head, each, side, axis) for side, each in enumerate(numbers)]
    mean = "" if head in pair.heads else ", the mean of its heads"
    what = "to" if axis else "of"
    page.heading(f"Attention {what} “{make_printable(name)}” in {make_printable(head)}{mean}")
    for side, of_side in enumerate(weights):
        page.line(page.faint(make_printable(truncate_text(comparison.names[side]))))
        write_side(page, comparison, pair, side, axis, numbers[side], of_side)
    write_differences(page, comparison, head, axis, *weights)


def read_weights(comparison: Comparison, head: str, numbers: list[int], side: int, axis: int) -> Tensor:
    """Read the mean of some aligned rows of a record, or of some columns."""
    if not axis:
        return comparison.rows(head, numbers)[side].mean(0).nan_to_num()
    rows = comparison.rows(head, range(len(comparison.align(head)[0])))[side]
    return rows[:, numbers].mean(1).nan_to_num()


def write_side(
    page: TerminalPage,
    comparison: Comparison,
    pair: LayerPair,
    side: int,
    axis: int,
    numbers: list[int],
    weights: Tensor,
) -> None:
    """Write the weights of one record: its text, and its images."""
    record, layer = ((comparison.first, pair.first), (comparison.second, pair.second))[side]
    labels, aligned = record.labels_of(layer)[1 - axis], comparison.align(pair.name)
    places = {both[side]: n for n, both in enumerate(aligned[1 - axis]) if both[side] is not None}
    patches = {*labels.split_kinds(comparison.batch).get("image", ())}
    units = [unit for unit in list_units(labels, comparison.batch, by_token=True) if unit.start not in patches]
    if units:
        marked, chosen = None, aligned[0][numbers[0]][side]
        if layer.queries == layer.keys and chosen is not None:
            position = int(layer.positions[chosen])
            marked = next((i for i, unit in enumerate(units) if unit.start <= position < unit.stop), None)
        found = [sum(float(weights[places[p]]) for p in unit.positions) for unit in units]
        write_tinted_text(page, units, found, marked)
    of_positions = torch.zeros(len(labels))
    of_positions[list(places)] = weights[list(places.values())]
    for segments in labels.grids(comparison.batch):
        write_word_map(page, lay_out(of_positions, segments), get_picture(labels, segments, comparison.batch))


def find_word(
    comparison: Comparison, pair: LayerPair, head: str, word: str | int | None, axis: int
) -> tuple[str, tuple[list[int], list[int]]]:
    """Find a word among the queries or keys, by default the one that changed most: its aligned numbers in each text.

    A word that stands at different places in both texts has different numbers.
    """
    aligned = comparison.align(pair.name)[axis]
    units = list_layer_units(comparison.first, pair.first, comparison.batch)[axis]
    if word is None:
        chosen = comparison.find_most_changed(head)[0]
        unit = next(unit for unit in units if unit.start <= chosen < unit.stop)  # type: ignore[operator]
    else:
        unit = units[find_unit(units, word, {})]
    both = [n for n, (i, j) in enumerate(aligned) if i in unit.positions and j is not None]
    if both:
        return unit.text, (both, both)
    others = list_layer_units(comparison.second, pair.second, comparison.batch)[axis]
    other = next((each for each in others if isinstance(word, str) and each.text.strip() == unit.text.strip()), None)
    if other is None:
        raise ValueError(f"word must be one that both texts have, got {word!r}")
    first = [n for n, (i, _) in enumerate(aligned) if i in unit.positions]
    return unit.text, (first, [n for n, (_, j) in enumerate(aligned) if j in other.positions])


def write_differences(page: TerminalPage, comparison: Comparison, head: str, axis: int, a: Tensor, b: Tensor) -> None:
    """Write the keys whose weights differ most, or the patches that attend to a word."""
    texts = [make_printable(text.strip()) or "␣" for text in comparison.texts(head)[1 - axis]]
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

"""Prints a Record: its heads, the attention of one query, the matrix of a short text, the patches of an image."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import TextIO

from torch import Tensor

from foci.record.image_maps import is_patch_name, shows_image_to_text, shows_text_to_image
from foci.record.labels import Labels
from foci.record.layer import Layer
from foci.record.record import Record
from foci.runtime.console import clip_text, format_count
from foci.runtime.printable import isolate_direction, make_printable
from foci.view.selection import (
    SelectedHead,
    compute_unit_weights,
    find_clearest_unit,
    find_nonfinite_rows,
    read_picture,
    select_default_head,
    select_head,
    select_layer_mean,
    select_source_head,
    select_word_of_image,
)
from foci.view.terminal import heads, matrix, patches, text
from foci.view.terminal.styled_text import TerminalPage
from foci.view.units import TextUnit, find_unit, list_layer_units, list_other_units, truncate_text

# A map of more entries takes too long to compute unless it was kept.
MAX_MAP_ENTRIES = 2**32
MAX_UNSEEN_LINES = 12


def show_record(
    record: Record,
    word: str | int | None = None,
    head: str | int | None = None,
    layer: int | None = None,
    *,
    batch: int = 0,
    by_token: bool = False,
    width: int | None = None,
    file: TextIO | None = None,
) -> None:
    """Print a record: with colors to a terminal, as plain text elsewhere.

    Args:
        word: the query word, or its index; "the#2" is the second "the". None: one that attends to a distant word. A
            word of a text with images is drawn on these too.
        head: "L5H3", "cross.L0H2", "L5" (the mean of its heads), or a number together with `layer`.
        batch: which sequence.
        by_token: show single tokens instead of words.
        width: columns; None: those of the terminal.
    """
    stream = file or sys.stdout
    page = TerminalPage.for_stream(stream, width)
    print(render_record(record, word, head, layer, batch=batch, by_token=by_token, page=page), file=stream)


def render_record(
    record: Record,
    word: str | int | None = None,
    head: str | int | None = None,
    layer: int | None = None,
    *,
    batch: int = 0,
    by_token: bool = False,
    page: TerminalPage | None = None,
) -> TerminalPage:
    """Render what `show_record` prints: also where a word lies on the images of its text."""
    page = page or TerminalPage()
    is_named = head is not None or layer is not None
    selection = select_head(record, head, layer) if is_named else select_default_head(record, batch)
    word = name_word_of_image(record, selection, batch) if word is None else word
    layers = [selection.layer] if is_named else list(record.layers.values())
    reading = [each for each in layers if shows_text_to_image(record, each, batch)]
    drawing = [each for each in layers if shows_image_to_text(record, each, batch)]
    is_drawn = isinstance(word, str) and bool(reading or drawing) and not is_patch_name(word)
    if is_drawn and reading and not any(each is selection.layer for each in reading):
        # The default may be a layer of the vision tower, which has no words.
        selection = select_layer_mean(record, reading[-1])
    write_title(page, record)
    if not is_named:
        heads.write_head_metrics(page, record)
        source = select_source_head(record, selection, batch)
        if source is not None:
            write_attention(page, record, source, None, batch, by_token)
    if is_drawn:
        labels = record.labels_of(reading[0])[1] if reading else record.labels_of(drawing[0])[0]
        patches.write_word_maps(page, record, selection if is_named else None, labels, str(word), batch)
    has_grid = record.labels_of(selection.layer)[1].grid is not None
    # Where the words are keys only, as in a diffusion model, or the keys are an image, the map is all there is.
    if is_drawn and (has_grid or not reading):
        return page
    if has_grid:
        patches.write_patches(page, record, selection, word, batch)
    else:
        write_attention(page, record, selection, word, batch, by_token)
    return page


def name_word_of_image(record: Record, selection: SelectedHead, batch: int) -> str | None:
    """Name the word that is drawn on an image that attends to a text; None for other layers."""
    position = select_word_of_image(record, selection, batch)
    units = list_layer_units(record, selection.layer, batch)[1] if position is not None else []
    return next((unit.text for unit in units if position in unit.positions), None)


def write_title(page: TerminalPage, record: Record) -> None:
    """Write the model, its layers and heads, its answer, notes, and the modules without recorded attention."""
    page.lines.append(page.bold(clip_text(make_printable(truncate_text(record.model)) or "Attention", page.width)))
    page.prose(", ".join(describe_contents(record)))
    if record.answer:
        page.wrapped(["answer:", *make_printable(truncate_text(record.answer)).split(" ")], hang=2)
    for note in record.notes:
        page.wrapped(["note:", *make_printable(truncate_text(note)).split()], hang=2)
    for reason in record.unseen[:MAX_UNSEEN_LINES]:
        page.wrapped(["not recorded:", *make_printable(truncate_text(reason)).split()], hang=2)
    if len(record.unseen) > MAX_UNSEEN_LINES:
        page.prose(f"not recorded: {len(record.unseen) - MAX_UNSEEN_LINES:,} more")


def describe_contents(record: Record) -> list[str]:
    """Describe the stacks and the sequences of a record: "2 layers of 4 heads", "7 tokens"."""
    stacks: dict[str, list[Layer]] = {}
    for layer in record.layers.values():
        stacks.setdefault(layer.stack, []).append(layer)
    parts = []
    for stack, layers in stacks.items():
        size = f"{format_count(len(layers), 'layer')} of {format_count(len(layers[0].heads), 'head')}"
        parts.append(f"{make_printable(truncate_text(stack))} {size}".lstrip())
    several = len(record.labels) > 1
    return parts + [
        f"{describe_length(labels)} ({make_printable(truncate_text(name))})" if several else describe_length(labels)
        for name, labels in record.labels.items()
    ]


def describe_length(labels: Labels) -> str:
    if labels.grid is not None:
        return f"{labels.grid[0]} × {labels.grid[1]} patches"
    return format_count(len(labels), labels.kind.removesuffix("s"))


def write_attention(
    page: TerminalPage, record: Record, selection: SelectedHead, word: str | int | None, batch: int, by_token: bool
) -> None:
    """Write the attention of one query in the running text, its top keys, and the matrix."""
    layer = selection.layer
    queries, keys = list_layer_units(record, layer, batch, by_token)
    if word is None:
        query = find_clearest_unit(record, selection, batch, queries)
    else:
        query = find_unit(queries, word, list_other_units(record, layer, batch, by_token))
    is_self = layer.queries == layer.keys
    page.heading(f"Attention of {quote_unit(queries[query])} in {describe_selection(selection)}")
    note_nonfinite_rows(page, selection, batch)
    weights = compute_unit_weights(selection, batch, [queries[query]], keys)[0]
    row = zero_nonfinite(weights).tolist()
    if not is_self:
        text.write_tinted_text(page, queries, [0.0] * len(queries), query)
        page.line(page.faint("↓ attends to"))
    text.write_tinted_text(page, keys, row, query if is_self else None)
    page.line()
    if weights.isfinite().all():
        text.write_listed_keys(
            page, keys, row, selection.has_entries, weigh_padding(selection, batch, queries[query], keys)
        )
    else:
        page.note(f"The weights of {quote_unit(queries[query])} are NaN or infinite.")
    write_matrix_or_map(page, selection, batch, queries, keys, query)


def weigh_padding(selection: SelectedHead, batch: int, query: TextUnit, keys: Sequence[TextUnit]) -> float:
    """Weigh the padding behind the last key, which has no text."""
    length, end = selection.layer.shape[3], keys[-1].stop if keys else 0
    if end == length:
        return 0.0
    return float(compute_unit_weights(selection, batch, [query], [TextUnit("", end, length)]))


def write_matrix_or_map(
    page: TerminalPage,
    selection: SelectedHead,
    batch: int,
    queries: Sequence[TextUnit],
    keys: Sequence[TextUnit],
    query: int,
) -> None:
    """Write all weights: as cells if they fit, else as a map."""
    if matrix.fits_as_cells(page, queries, keys):
        page.heading(f"All of {describe_selection(selection)}")
        matrix.write_matrix_cells(
            page, queries, keys, compute_unit_weights(selection, batch, queries, keys).tolist(), query
        )
    elif selection.layer.kept is None and prod(selection.layer.shape[1:]) > MAX_MAP_ENTRIES:
        page.note(f"No map of {selection.layer.shape[3]:,} positions: record with keep=foci.Keep() for one.")
    elif "picture" in selection.layer.available:
        page.heading(f"All of {describe_selection(selection)}")
        page.prose("Queries from top to bottom, keys from left to right.")
        blocks = read_picture(selection, batch, *matrix.fit_map_size(page, selection.layer.max_picture_size))
        matrix.write_map(page, zero_nonfinite(blocks).tolist())


def note_nonfinite_rows(page: TerminalPage, selection: SelectedHead, batch: int) -> None:
    """Note how many rows have NaN or infinite weights, if any."""
    missing = find_nonfinite_rows(selection, batch)
    if missing.any():
        verb = "has" if int(missing.sum()) == 1 else "have"
        page.note(
            f"{int(missing.sum()):,} of {format_count(len(missing), 'row')} of {selection.name} {verb} NaN or infinite"
            " weights, which are not drawn or counted."
        )


def zero_nonfinite(weights: Tensor) -> Tensor:
    """Replace NaN and infinite weights by 0, which is drawn as blank."""
    return weights.nan_to_num(0.0, 0.0, 0.0)


def describe_selection(selection: SelectedHead) -> str:
    return selection.name if selection.head is not None else f"{selection.name}, the mean of its heads"


def quote_unit(unit: TextUnit) -> str:
    return f"“{isolate_direction(clip_text(unit.text, 24))}”"

"""A Record in the terminal: its heads, where a word looks, the matrix of a short text, an image's patches."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import TextIO

from torch import Tensor

from foci.record.labels import Labels
from foci.record.layer import Layer
from foci.record.record import Record
from foci.runtime.console import clip, count
from foci.runtime.printable import isolated, printable
from foci.view.opening import clearest
from foci.view.selection import (
    Choice,
    Unit,
    choose,
    find,
    picture,
    reading_of,
    shares,
    shortened,
    sides,
    telling,
    unknown,
)
from foci.view.terminal import heads, matrix, patches, text
from foci.view.terminal.styled_text import Sheet

# Above so many entries a picture that was not kept takes too long to draw.
MOST_ENTRIES = 2**32
MOST_UNSEEN = 12


def show(
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
    """Prints a record: to a terminal in its colours, elsewhere in plain characters.

    Args:
        word: the word to follow, or its place; "the#2" is the second "the". None: one that looks far and clearly.
        head: "L5H3", "cross.L0H2", "L5" (the mean of its heads), or a number beside `layer`.
        batch: which sequence.
        by_token: tokens one by one instead of whole words.
        width: columns; None: those of the terminal.
    """
    stream = file or sys.stdout
    print(
        render(record, word, head, layer, batch=batch, by_token=by_token, sheet=Sheet.fitting(stream, width)),
        file=stream,
    )


def render(
    record: Record,
    word: str | int | None = None,
    head: str | int | None = None,
    layer: int | None = None,
    *,
    batch: int = 0,
    by_token: bool = False,
    sheet: Sheet | None = None,
) -> Sheet:
    """What `show` prints, as a sheet of lines."""
    sheet = sheet or Sheet()
    asked = head is not None or layer is not None
    choice = choose(record, head, layer) if asked else telling(record, batch)
    write_title(sheet, record)
    if not asked:
        heads.write(sheet, record)
        read = reading_of(record, choice, batch)
        if read is not None:
            write_text(sheet, record, read, None, batch, by_token)
    if record.labels_of(choice.layer)[1].grid is not None:
        patches.write(sheet, record, choice, word, batch)
    else:
        write_text(sheet, record, choice, word, batch, by_token)
    return sheet


def write_title(sheet: Sheet, record: Record) -> None:
    """Which model, how many heads, and what could not be seen."""
    sheet.lines.append(sheet.bold(clip(printable(shortened(record.model)) or "Attention", sheet.width)))
    sheet.prose(", ".join(described(record)))
    if record.answer:
        sheet.wrapped(["answer:", *printable(shortened(record.answer)).split(" ")], hang=2)
    for note in record.notes:
        sheet.wrapped(["note:", *printable(shortened(note)).split()], hang=2)
    for reason in record.unseen[:MOST_UNSEEN]:
        sheet.wrapped(["not seen:", *printable(shortened(reason)).split()], hang=2)
    if len(record.unseen) > MOST_UNSEEN:
        sheet.prose(f"not seen: {len(record.unseen) - MOST_UNSEEN:,} more")


def described(record: Record) -> list[str]:
    """The stacks of a record and what stands in its sequences, each in a few words."""
    stacks: dict[str, list[Layer]] = {}
    for layer in record.layers.values():
        stacks.setdefault(layer.stack, []).append(layer)
    parts = [
        f"{printable(shortened(stack))} {count(len(layers), 'layer')} of {count(len(layers[0].heads), 'head')}".lstrip()
        for stack, layers in stacks.items()
    ]
    several = len(record.labels) > 1
    return parts + [
        f"{counted(labels)} ({printable(shortened(name))})" if several else counted(labels)
        for name, labels in record.labels.items()
    ]


def counted(labels: Labels) -> str:
    if labels.grid is not None:
        return f"{labels.grid[0]} × {labels.grid[1]} patches"
    return count(len(labels), labels.kind.removesuffix("s"))


def write_text(
    sheet: Sheet, record: Record, choice: Choice, word: str | int | None, batch: int, by_token: bool
) -> None:
    """One word's attention in the running text, its links, and the matrix."""
    layer = choice.layer
    queries, keys = sides(record, layer, batch, by_token)
    focus = find(queries, word) if word is not None else clearest(record, choice, batch, queries)
    same = layer.queries == layer.keys
    sheet.heading(f"Where {quoted(queries[focus])} looks in {in_words(choice)}")
    write_unknown(sheet, choice, batch)
    found = shares(choice, batch, [queries[focus]], keys)[0]
    row = drawn(found).tolist()
    if not same:
        text.write_text(sheet, queries, [0.0] * len(queries), focus)
        sheet.line(sheet.faint("↓ looks at"))
    text.write_text(sheet, keys, row, focus if same else None)
    sheet.line()
    if found.isfinite().all():
        text.write_links(sheet, keys, row, choice.exact)
    else:
        sheet.note(f"Where {quoted(queries[focus])} looks cannot be told: its weights are NaN or infinite.")
    write_matrix(sheet, choice, batch, queries, keys, focus)


def write_matrix(
    sheet: Sheet, choice: Choice, batch: int, queries: Sequence[Unit], keys: Sequence[Unit], focus: int
) -> None:
    """All words at once: cells where they fit, else a map."""
    if matrix.fits(sheet, queries, keys):
        sheet.heading(f"All of {in_words(choice)}")
        matrix.write(sheet, queries, keys, shares(choice, batch, queries, keys).tolist(), focus)
    elif choice.layer.kept is None and prod(choice.layer.shape[1:]) > MOST_ENTRIES:
        sheet.note(f"No map of {choice.layer.shape[3]:,} positions: watch with keep=foci.Keep() for one.")
    elif "picture" in choice.layer.can:
        sheet.heading(f"All of {in_words(choice)}")
        sheet.prose("From top to bottom who looks, from left to right who is looked at.")
        blocks = picture(choice, batch, *matrix.map_size(sheet, choice.layer.finest))
        matrix.write_map(sheet, drawn(blocks).tolist())


def write_unknown(sheet: Sheet, choice: Choice, batch: int) -> None:
    """How many rows have no numbers, where some have not."""
    missing = unknown(choice, batch)
    if missing.any():
        verb = "has" if int(missing.sum()) == 1 else "have"
        sheet.note(
            f"{int(missing.sum()):,} of {count(len(missing), 'row')} of {choice.name} {verb} weights that are NaN or"
            " infinite: nothing is drawn or counted there."
        )


def drawn(found: Tensor) -> Tensor:
    """Shares as they are drawn: what is no number, of which `write_unknown` speaks, stays empty."""
    return found.nan_to_num(0.0, 0.0, 0.0)


def in_words(choice: Choice) -> str:
    return choice.name if choice.head is not None else f"{choice.name}, the mean of its heads"


def quoted(unit: Unit) -> str:
    return f"“{isolated(clip(unit.text, 24))}”"

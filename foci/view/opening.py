"""Where every view of a record begins, so that terminal, figure and page show the same unless they are asked otherwise.

The head is that of `foci.view.selection.telling`; here is the word, or the patch, that looks.
"""

from __future__ import annotations

from collections.abc import Sequence

from foci.record.record import Record
from foci.view.selection import Choice, Unit, far, quickly_asked, sides
from foci.view.terminal.patches import looking


def first_query(record: Record, choice: Choice, batch: int = 0) -> int:
    """The position that looks: of patches the class token or the middle one, of a word its last, which knows it all."""
    labels = record.labels_of(choice.layer)[0]
    if labels.kind == "patches" and labels.grid is not None:
        return looking(labels, None)[0]
    queries = sides(record, choice.layer, batch)[0]
    return queries[clearest(record, choice, batch, queries)].stop - 1


def clearest(record: Record, choice: Choice, batch: int, queries: Sequence[Unit]) -> int:
    """The word that looks most clearly at another one that is not its neighbour; of a very long text the last."""
    layer = choice.layer if choice.head is None else choice.layer.head(choice.head)
    if not quickly_asked(layer):
        return len(queries) - 1
    place = int(far(record, layer, batch).mean(0).argmax())
    return next((i for i, unit in enumerate(queries) if unit.start <= place < unit.stop), 0)

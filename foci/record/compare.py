"""Compares two records: the attention of the same heads, with positions aligned by their tokens.

H heads, Tq queries, Tk keys; Uq and Uk positions of both texts together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor

from foci.record.labels import Labels
from foci.record.layer import Layer
from foci.record.record import Record
from foci.runtime.checks import PICTURE_SUFFIXES, parse_suffix

# Rows that are compared in each layer, evenly spaced, and the most positions of a difference.
MAX_COMPARED_ROWS = 512
MAX_DIFFERENCE_LENGTH = 2048
MAX_LISTED_LAYERS = 6

# The same position in both texts; None where a text does not have it.
Aligned = tuple[int | None, int | None]


@dataclass(frozen=True)
class LayerPair:
    """A layer of each record, with the same number of heads.

    Args:
        name: the short name in the first record, or of both if they differ.
        first, second: the layers.
        heads: the name of each pair of heads.
    """

    name: str
    first: Layer
    second: Layer
    heads: tuple[str, ...]


class Comparison:
    """Two records side by side; made by `foci.compare`.

    >>> before = foci.Record.from_tensors([torch.eye(3).view(1, 1, 3, 3)], tokens=["a", " red", " shoe"])
    >>> after = foci.Record.from_tensors([torch.eye(4).view(1, 1, 4, 4)], tokens=["a", " big", " red", " shoe"])
    >>> comparison = foci.compare(before, after)
    >>> comparison
    Comparison of a and b: 1 layer, 1 head
    >>> comparison.align("L0")[0]                                     # (position in a, position in b)
    [(0, 0), (None, 1), (1, 2), (2, 3)]
    >>> comparison.changes()
    {'L0H0': 0.0}

    Args:
        first, second: the records.
        names: what they are called.
        pairs: the layers that are compared.
    """

    def __init__(
        self, first: Record, second: Record, names: tuple[str, str], pairs: Sequence[LayerPair], batch: int = 0
    ) -> None:
        self.first, self.second, self.names = first, second, names
        self.pairs, self.batch = list(pairs), batch

    @property
    def heads(self) -> list[str]:
        """The names of the heads that are compared."""
        return [head for pair in self.pairs for head in pair.heads]

    def pair(self, name: str) -> tuple[LayerPair, int | None]:
        """The pair of layers of a name, "L5" or "L5H3", and the index of the head; None: the mean of the heads."""
        for pair in self.pairs:
            if name == pair.name:
                return pair, 0 if len(pair.heads) == 1 else None
            if name in pair.heads:
                return pair, pair.heads.index(name)
        known = ", ".join(pair.name for pair in self.pairs[:MAX_LISTED_LAYERS])
        raise ValueError(f"head must be a layer ({known}) or a head such as {self.heads[0]}, got {name!r}")

    def align(self, name: str) -> tuple[list[Aligned], list[Aligned]]:
        """The positions of both texts together, along queries and keys: pairs, with None where a text has none."""
        pair, _ = self.pair(name)
        queries, keys = zip(self.first.labels_of(pair.first), self.second.labels_of(pair.second), strict=True)
        return align_labels(*queries, self.batch), align_labels(*keys, self.batch)

    @torch.no_grad()
    def changes(self) -> dict[str, float]:
        """How much each head changed, most first: the mean total variation distance of its rows.

        0: the same weights; 1: no key in common. Of rows that both texts have; weight on keys that only one of them
        has counts as changed. Of a long text 512 rows are compared.
        """
        found: dict[str, float] = {}
        for pair in self.pairs:
            queries, keys = self.align(pair.name)
            found |= dict(zip(pair.heads, measure_changes(pair, queries, keys, self.batch), strict=True))
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @torch.no_grad()
    def matrices(self, head: str) -> tuple[Tensor, Tensor]:
        """The weights of both records on the positions of both texts together: (Uq, Uk) each.

        Rows that a text does not have are NaN, keys that it does not have have the weight 0.
        """
        queries, keys = self.align(head)
        if max(len(queries), len(keys)) > MAX_DIFFERENCE_LENGTH:
            raise ValueError(
                f"head must have at most {MAX_DIFFERENCE_LENGTH:,} positions for a matrix, got"
                f" {max(len(queries), len(keys)):,}: read single rows with rows()"
            )
        return self.rows(head, range(len(queries)))

    def difference(self, head: str) -> Tensor:
        """The weights of the second record minus those of the first: (Uq, Uk), as `matrices` returns them.

        >>> matrices = [torch.eye(2).view(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.5)]
        >>> a, b = (foci.Record.from_tensors([each], tokens=["a", "b"]) for each in matrices)
        >>> foci.compare(a, b).difference("L0H0")
        tensor([[-0.5000,  0.5000],
                [ 0.5000, -0.5000]])
        """
        first, second = self.matrices(head)
        return second - first

    @torch.no_grad()
    def rows(self, head: str, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Some rows of `matrices`, by their numbers among the positions of both texts."""
        pair, index = self.pair(head)
        queries, keys = self.align(pair.name)
        found = []
        for side, layer in enumerate((pair.first, pair.second)):
            rows = torch.full((len(numbers), len(keys)), torch.nan)
            known = {n: row for n, row in enumerate(queries[number][side] for number in numbers) if row is not None}
            columns = {n: key for n, key in enumerate(both[side] for both in keys) if key is not None}
            if known:
                entries = read_rows(layer, self.batch, list(known.values()))
                entries = entries.mean(0) if index is None else entries[index]
                part = torch.zeros(len(known), len(keys))
                part[:, list(columns)] = entries[:, list(columns.values())]
                rows[list(known)] = part
            found.append(rows)
        return found[0], found[1]

    def is_read_by_image(self, head: str) -> bool:
        """Whether images attend to text in a layer: what is compared there is the map of a key."""
        layer = self.pair(head)[0].first
        queries, keys = self.first.labels_of(layer)
        return layer.queries != layer.keys and bool(queries.grids(self.batch)) and not keys.grids(self.batch)

    def find_most_changed(self, head: str) -> Aligned:
        """The query of both texts whose weights changed most; the key if images attend to text.

        Of a text with images, the word whose weights on them changed most. Of a long text 512 queries are compared.
        """
        queries, keys = self.align(head)
        numbers = self._list_common(head, 0)
        numbers = numbers[:: max(1, -(-len(numbers) // MAX_COMPARED_ROWS))]
        first, second = self.rows(head, numbers)
        change = (second - first).abs().nan_to_num()
        patches = {*self.first.labels_of(self.pair(head)[0].first)[1].split_kinds(self.batch).get("image", ())}
        on_images = change[:, [n for n, (i, _) in enumerate(keys) if i in patches]]
        change = on_images if on_images.any() else change
        if not self.is_read_by_image(head):
            return queries[numbers[int(change.sum(1).argmax())]]
        words = self._list_common(head, 1)
        return keys[words[int(change[:, words].sum(0).argmax())]]

    def _list_common(self, head: str, axis: int) -> list[int]:
        """The aligned positions that both texts have: those of words, if there are any."""
        labels = self.first.labels_of(self.pair(head)[0].first)[axis]
        common = {i: n for n, (i, j) in enumerate(self.align(head)[axis]) if i is not None and j is not None}
        text = labels.split_kinds(self.batch).get("text", [])
        words = [common[i] for i in text if i in common and labels.texts[self.batch][i].strip()]
        return words or list(common.values())

    def texts(self, head: str) -> tuple[list[str], list[str]]:
        """The texts of the positions of both texts together, along queries and keys."""
        pair, _ = self.pair(head)
        both = zip(self.first.labels_of(pair.first), self.second.labels_of(pair.second), self.align(head), strict=True)
        return tuple(  # type: ignore[return-value]
            [
                (first if i is not None else second).texts[self.batch][i if i is not None else j]  # type: ignore[index]
                for i, j in aligned
            ]
            for first, second, aligned in both
        )

    def joint_record(self) -> Record:
        """One record with the layers of both, whose stacks have their names; of the compared sequence."""
        layers: dict[str, Layer] = {}
        labels: dict[str, Labels] = {}
        for name, record, side in zip(self.names, (self.first, self.second), ("first", "second"), strict=True):
            for pair in self.pairs:
                layer = select_sequence(getattr(pair, side), self.batch)
                for axis in (layer.queries, layer.keys):
                    known = record.labels.get(axis)
                    if known is not None and self.batch < known.batch:
                        labels[f"{name}: {axis}"] = known.select_sequence(self.batch)
                shown = replace(
                    layer,
                    name=f"{name}: {layer.name}",
                    stack=f"{name} {layer.stack}".strip(),
                    queries=f"{name}: {layer.queries}",
                    keys=f"{name}: {layer.keys}",
                )
                layers[shown.name] = shown
        notes = [
            f"{name}: {note}" for name, r in zip(self.names, (self.first, self.second), strict=True) for note in r.notes
        ]
        model = " and ".join(dict.fromkeys(filter(None, (self.first.model, self.second.model))))
        return Record(layers, labels, model=model, calls=self.first.calls + self.second.calls, notes=notes)

    def show(self, word: str | int | None = None, head: str | None = None, **options: Any) -> None:
        """Prints the heads that changed most, and the attention of a word in both records.

        Args:
            word: a word of both texts, or its position; None: the one that changed most.
            head: "L5H3", or "L5" for the mean of its heads; None: the one that changed most.
            options: `width`, the columns, and `file`.
        """
        from foci.view.terminal.comparison import show_comparison

        show_comparison(self, word, head, **options)

    def save(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Saves the comparison by the suffix of the path: .html a page, .png, .svg, .pdf the matrices of a head.

        `head=` chooses the head, which is otherwise the one that changed most; `word=` draws where in both images a
        word looks, `frame=` in one frame of both videos.
        """
        suffix = parse_suffix(path, *PICTURE_SUFFIXES)
        if suffix == ".html":
            from foci.view.page.comparison import write_comparison

            write_comparison(self, path, **options)
        else:
            from foci.view.figures.comparison import save_comparison

            save_comparison(self, path, **options)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """The representation in a notebook."""
        from foci.view.page.comparison import render_comparison_frame

        return {"text/plain": repr(self), "text/html": render_comparison_frame(self)}

    def __repr__(self) -> str:
        layers, heads = len(self.pairs), len(self.heads)
        return (
            f"Comparison of {self.names[0]} and {self.names[1]}: {layers} layer{'s' * (layers != 1)},"
            f" {heads} head{'s' * (heads != 1)}"
        )


def compare(a: Any, b: Any, *, names: Sequence[str] = ("a", "b"), batch: int = 0) -> Comparison:
    """Compares two records, two layers or two heads: side by side and as a difference.

    >>> seen = foci.Record.from_tensors([torch.rand(1, 4, 3, 3).softmax(-1)] * 2, tokens=["a", " red", " shoe"])
    >>> foci.compare(seen["L0H1"], seen["L1H2"], names=("early", "late"))
    Comparison of early and late: 1 layer, 1 head

    Two checkpoints, a model with and without ablation, two prompts, two heads. Where the texts differ, their positions
    are aligned by equal tokens. `show()` prints the comparison, `save("x.html")` and `save("x.pdf")` write it, and a
    notebook displays it; `changes()` and `difference(head)` are the numbers.

    Args:
        a, b: two `Record`, or two layers or heads of records: `seen["L5H3"]`. Records are compared in the layers that
            both have.
        names: what they are called in the views: ("before", "after").
        batch: which sequence of both.
    """
    first_name, second_name = check_names(names)
    first, second = (to_record(name, each) for name, each in (("a", a), ("b", b)))
    is_single = not isinstance(a, Record) and not isinstance(b, Record)
    pairs = pair_single(first, second) if is_single else pair_layers(first, second)
    comparison = Comparison(first, second, (first_name, second_name), pairs, batch)
    for pair in pairs:
        check_pair(comparison, pair, batch)
    return comparison


def check_names(names: Sequence[str]) -> tuple[str, str]:
    given = list(names) if not isinstance(names, str) else [names]
    # A dot or a # would be read as part of a head's name.
    fits = len(given) == 2 and all(isinstance(n, str) and n.strip() and not set(n) & set(".#:~") for n in given)
    if not fits or given[0] == given[1]:
        raise ValueError(f"names must be two different texts without . : # ~, got {names!r}")
    return given[0], given[1]


def to_record(argument: str, shown: Any) -> Record:
    if isinstance(shown, Record):
        shown._check_filled()
        return shown._with_matrices()
    if isinstance(shown, Layer):
        layer = shown.with_head_axis()
        return Record({layer.name: layer}, shown.labels)
    raise TypeError(f"{argument} must be a Record, or a layer or head of one, got {type(shown).__name__}")


def pair_single(first: Record, second: Record) -> list[LayerPair]:
    """Pair one layer with another, whatever their names."""
    (one,), (other,) = first.layers.values(), second.layers.values()
    names = [[record.name_of(layer, head) for head in layer.heads] for record, layer in ((first, one), (second, other))]
    if len(names[0]) != len(names[1]):
        raise ValueError(f"a and b must have the same number of heads, got {len(names[0])} and {len(names[1])}")
    heads = tuple(name_pair(*both) for both in zip(*names, strict=True))
    return [LayerPair(name_pair(first.name_of(one), second.name_of(other)), one, other, heads)]


def name_pair(first: str, second: str) -> str:
    return first if first == second else f"{first} and {second}"


def pair_layers(first: Record, second: Record) -> list[LayerPair]:
    """Pair the layers of the same short name."""
    others = {second.name_of(layer): layer for layer in second.layers.values()}
    pairs = []
    for layer in first.layers.values():
        name = first.name_of(layer)
        if name in others and layer.heads == others[name].heads:
            heads = tuple(first.name_of(layer, head) for head in layer.heads)
            pairs.append(LayerPair(name, layer, others[name], heads))
    if not pairs:
        raise ValueError(
            f"a and b must have layers of the same name with the same heads, got {list_layers(first)} and"
            f" {list_layers(second)}: compare two of them, foci.compare(a['L0'], b['L0'])"
        )
    return pairs


def list_layers(record: Record) -> str:
    names = [f"{record.name_of(layer)} ({len(layer.heads)} heads)" for layer in record.layers.values()]
    return ", ".join(names[:MAX_LISTED_LAYERS]) + (", …" if len(names) > MAX_LISTED_LAYERS else "") or "none"


def check_pair(comparison: Comparison, pair: LayerPair, batch: int) -> None:
    """Raise one clear error if two layers cannot be compared."""
    for argument, layer in (("a", pair.first), ("b", pair.second)):
        if "entries" not in layer.available:
            raise ValueError(
                f"{argument} must have the weights of {layer.label}, got statistics only: use keep='lazy' in foci.watch"
            )
        if not 0 <= batch < layer.shape[0]:
            raise ValueError(f"batch must be from 0 to {layer.shape[0] - 1}, the sequences of {argument}, got {batch}")
    if (pair.first.queries == pair.first.keys) != (pair.second.queries == pair.second.keys):
        raise ValueError(f"a and b must both be self-attention or both cross-attention in {pair.name}, got one of each")
    for axis, aligned in zip(("queries", "keys"), comparison.align(pair.name), strict=True):
        if aligned and not any(None not in both for both in aligned):
            raise ValueError(f"a and b must have tokens in common, got none among the {axis} of {pair.name}")


def align_labels(first: Labels, second: Labels, batch: int) -> list[Aligned]:
    """Align the positions of two texts by equal tokens; those of other sequences by their texts or numbers."""
    if "positions" in (first.kind, second.kind) and len(first) != len(second):
        raise ValueError(
            f"a and b must have labels where their lengths differ, got {len(first)} and {len(second)} positions: name"
            " their tokens with seen.label(tokens)"
        )
    if "positions" in (first.kind, second.kind) or first.texts[batch] == second.texts[batch]:
        return [(i, i) for i in range(len(first))]
    matcher = SequenceMatcher(None, clean_texts(first, batch), clean_texts(second, batch), autojunk=False)
    aligned: list[Aligned] = []
    for kind, start, stop, from_, to in matcher.get_opcodes():
        if kind == "equal":
            aligned += zip(range(start, stop), range(from_, to), strict=True)
        else:
            aligned += [(i, None) for i in range(start, stop)] + [(None, j) for j in range(from_, to)]
    return aligned


def clean_texts(labels: Labels, batch: int) -> list[str]:
    """The texts without spaces around them and in lower case: a word at the start of a text is the same word."""
    return [text.strip().lower() for text in labels.texts[batch]]


def measure_changes(pair: LayerPair, queries: Sequence[Aligned], keys: Sequence[Aligned], batch: int) -> list[float]:
    """The mean total variation distance of the rows of each head: (H,)."""
    rows = [(i, j) for i, j in queries if i is not None and j is not None]
    step = max(1, -(-len(rows) // MAX_COMPARED_ROWS))
    rows, columns = rows[::step], [(i, j) for i, j in keys if i is not None and j is not None]
    first = read_rows(pair.first, batch, [i for i, _ in rows])
    second = read_rows(pair.second, batch, [j for _, j in rows])
    one, other = first[..., [i for i, _ in columns]], second[..., [j for _, j in columns]]
    apart = first.sum(-1) - one.sum(-1) + second.sum(-1) - other.sum(-1)
    distance = ((one - other).abs().sum(-1) + apart) / 2
    return [round(each, 6) + 0.0 for each in distance.nanmean(-1).clamp(min=0).tolist()]


def select_sequence(layer: Layer, batch: int) -> Layer:
    """One sequence of a layer whose weights are known, with a batch axis."""
    if layer.shape[0] == 1:
        return layer
    if layer.steps:
        return replace(layer, steps={number: select_sequence(step, batch) for number, step in layer.steps.items()})
    names = ("weights", "matrix", "windows", "values", "value_norms")
    parts: Any = {name: getattr(layer, name) for name in names}
    parts = {name: part[batch : batch + 1] for name, part in parts.items() if part is not None}
    return replace(layer, **parts)


def read_rows(layer: Layer, batch: int, rows: Sequence[int]) -> Tensor:
    """Some rows of all heads: (H, rows, Tk)."""
    entries = layer.with_head_axis()[batch, :, list(rows)]
    assert isinstance(entries, Tensor)
    return entries.float().cpu()

"""Record: what was seen of a model's attention, with labels; saved as one file, and drawn by views."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from foci.record import file, from_tensors, metrics
from foci.record.labels import Labels
from foci.record.layer import Layer
from foci.record.metrics import HEAD_SCORES, ScoreTotals

RECORD_KEY = re.compile(r"(?:(?P<stack>[^.#]+)\.)?L(?P<layer>\d+)(?:H(?P<head>\d+))?(?P<again>#\d+)?")
IMAGE_SUFFIXES = (".png", ".svg", ".pdf", ".jpg", ".webp")
# What a record is saved as.
SAVE_SUFFIXES = (".foci", ".html", *IMAGE_SUFFIXES)


class Record:
    """What was seen of a model's attention: layers by module name and heads by short names.

    >>> record = foci.Record.from_tensors([torch.rand(1, 4, 3, 3).softmax(-1)] * 2, tokens=["a", " b", " c"])
    >>> record
    Record: 2 layers, 8 heads, 2 attention calls
    >>> record["L1H3"].entropy().shape, list(record.layers)
    (torch.Size([1, 3]), ['layers.0', 'layers.1'])
    >>> record.labels["input"].text(0)
    'a b c'

    Args:
        layers: by module name, in the order of their calls; a module that was called again: "name#2".
        labels: what stands along the axes, by name: "input"; of an encoder-decoder "source" and "target".
        model: the model's class, for titles.
        calls: how many attention calls were seen.
        unseen: attention modules that were there and could not be seen, each with the reason.
        prompt: of a generation, how many positions were the prompt; the rows after it are the steps.
        answer: what the model said, where that is known.
        notes: what whoever sees the record must know: that the text was longer than the model reads.
    """

    def __init__(
        self,
        layers: dict[str, Layer] | None = None,
        labels: dict[str, Labels] | None = None,
        *,
        model: str = "",
        calls: int = 0,
        unseen: Sequence[str] = (),
        prompt: int | None = None,
        answer: str | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.layers, self.labels = dict(layers or {}), dict(labels or {})
        self.model, self.calls, self.unseen = model, calls, list(unseen)
        self.prompt, self.answer, self.notes = prompt, answer, list(notes)
        # Whether a block that fills it is still open.
        self.filling = False
        # Sums over records that were added; those of the record's own layers come to them when asked.
        self.sequences = 1
        self._added: dict[str, ScoreTotals] = {}
        self._own: dict[str, ScoreTotals] = {}

    @classmethod
    def from_tensors(
        cls,
        attentions: Any,
        tokens: Any = None,
        *,
        source: Any = None,
        encoder: Any = None,
        cross: Any = None,
        model: str = "",
    ) -> Record:
        """A record of matrices that another library gave.

        >>> first, second = torch.rand(1, 2, 3, 3).softmax(-1), torch.rand(1, 2, 1, 4).softmax(-1)
        >>> steps = ((first, first), (second, second))                 # generate: [step][layer], the prompt first
        >>> foci.Record.from_tensors(steps, tokens=["a", "b", "c", "d"])["L1"].shape
        (1, 2, 4, 4)

        Args:
            attentions: [layer][batch, head, query, key]: a tuple of tensors, one array, or the tuples of tuples
                that Hugging Face's `generate` gives; (head, query, key) is taken as one sequence. They are weights, not
                scores: a row that adds up to more than 1 is refused.
            tokens: the texts along the axes, [position] or [batch][position], or Labels.
            source: the same for the encoder's side of an encoder-decoder.
            encoder, cross: the other attentions of an encoder-decoder; `attentions` are then the decoder's.
            model: a name for titles.
        """
        return cls(**from_tensors.build_record_fields(attentions, tokens, source, encoder, cross), model=model)

    def __getitem__(self, name: str) -> Layer:
        """seen["L5"], seen["L5H3"], seen["cross.L0H2"], or a module's name; "L5#2" for its second call."""
        self._check_filled()
        if name in self.layers:
            return self.layers[name]
        found, known = RECORD_KEY.fullmatch(name), list(self._short().values())
        if found is not None:
            wanted = (found["stack"] + "." if found["stack"] else "") + f"L{found['layer']}" + (found["again"] or "")
            for layer, short in zip(self.layers.values(), known, strict=True):
                if short == wanted:
                    return layer if found["head"] is None else layer.head(int(found["head"]))
        shown = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
        raise KeyError(f"expected a layer or head such as {shown or 'L0H0 (nothing was recorded)'}, but got {name!r}")

    def _check_filled(self) -> None:
        if self.filling:
            raise RuntimeError(
                "a record is filled when its block ends, but it was asked before (or an exception passed)"
            )

    def name_of(self, layer: Layer, head: int | None = None) -> str:
        """The short name of a layer or head: "L5", "cross.L0H2"; of a second call "L5H2#2"."""
        label, mark, again = self._short()[layer.name].partition("#")
        number = layer.heads[0] if head is None and layer.single else head
        return label + ("" if number is None else f"H{number}") + mark + again

    def _short(self) -> dict[str, str]:
        """The short name of every layer by its full one; where several have one place, the later ones are numbered."""
        times: Counter[str] = Counter()
        found = {}
        for name, layer in self.layers.items():
            label = f"{layer.stack}.L{layer.index}".lstrip(".")
            times[label] += 1
            found[name] = label if times[label] == 1 else f"{label}#{times[label]}"
        return found

    @property
    def heads(self) -> list[str]:
        """The short names of all heads, in order."""
        return [self.name_of(layer, head) for layer in self.layers.values() for head in layer.heads]

    def labels_of(self, layer: Layer) -> tuple[Labels, Labels]:
        """What stands along the queries and the keys of a layer: its labels where they fit, else bare positions."""
        batch, _, queries, keys = layer.shape
        rows = layer.positions.tolist() if layer.rows is None else list(layer.rows)
        if layer.queries != layer.keys and layer.rows is None:
            rows = list(range(queries))
        return self._fitting(layer.queries, batch, queries, rows), self._fitting(layer.keys, batch, keys, range(keys))

    def _fitting(self, name: str, batch: int, length: int, rows: Sequence[int]) -> Labels:
        found = self.labels.get(name)
        if found is None or found.batch != batch or any(not 0 <= row < len(found) for row in rows):
            return Labels.positions(batch, length)
        # A layer that sees fewer or more positions than were labelled is about something else.
        return found.select(rows) if len(rows) == length and len(found) >= length else Labels.positions(batch, length)

    def label(self, tokens: Any, name: str = "input", decode: Any = None) -> Record:
        """Sets the labels afterwards: texts, [batch][position] or [position]; Labels; or token numbers with `decode`.

        `decode` is a tokenizer, or a function from a list of numbers to a text. Returns the record.
        """
        labels = from_tensors.to_labels(tokens, decode)
        # Some layers may see fewer positions than others; labels that fit none of them are about something else.
        along = [layer for layer in self.layers.values() if name in (layer.queries, layer.keys)]
        reasons = [from_tensors.explain_misfit(layer, {name: labels}) for layer in along]
        if reasons and all(reasons):
            raise ValueError(reasons[0])
        self.labels[name] = labels
        self._own.clear()
        return self

    def rollout(self, query: int, batch: int = 0, *, stack: str | None = None, values: bool = False) -> Tensor:
        """What of each position of the input reaches a query of the last layer: (T,), never a dense matrix.

        Args:
            query: its number along the queries, from 0; negative ones count from the end.
            batch: which sequence.
            stack: whose layers, "encoder" or "decoder"; None: all self-attention, which must be one stack.
            values: weigh what is seen with the lengths of the values.
        """
        return metrics.compute_rollout(self._stack(stack), query, batch, values)

    def _stack(self, stack: str | None) -> list[Layer]:
        alone = {layer.stack for layer in self.layers.values() if layer.queries == layer.keys}
        if stack is None and len(alone) != 1:
            raise ValueError(f"rollout takes stack=, one of {', '.join(map(repr, sorted(alone)))}, but got None")
        wanted = next(iter(alone)) if stack is None else stack
        # A second pass is left out; a module that is all layers of its stack is called again for each of them.
        short = self._short()
        found = [layer for name, layer in self.layers.items() if layer.stack == wanted and "#" not in short[name]]
        if not found or wanted not in alone:
            raise ValueError(f"rollout takes stack=, one of {', '.join(map(repr, sorted(alone)))}, but got {stack!r}")
        return sorted(found, key=lambda layer: layer.index)

    def scores(self) -> dict[str, Tensor]:
        """Scores of every head, over all that was added: {score: (layers, H)}; `metrics.SCORES` defines them.

        Layers are in the order of `layers`. NaN where what was kept does not tell, or a layer has fewer heads.
        """
        self._check_filled()
        totals = self.totals()
        means = [totals[self.name_of(layer)].means() for layer in self.layers.values()]
        widest = max((len(layer.heads) for layer in self.layers.values()), default=0)
        found = {}
        for score in HEAD_SCORES:
            table = torch.full((len(means), widest), torch.nan, dtype=torch.float64)
            for row, mean in zip(table, means, strict=True):
                if score in mean:
                    row[: len(mean[score])] = mean[score]
            if not bool(table.isnan().all()):
                found[score] = table
        return found

    def totals(self) -> dict[str, ScoreTotals]:
        """The sums behind the scores, by short layer name."""
        for layer in self.layers.values():
            name = self.name_of(layer)
            if name not in self._own:
                self._own[name] = metrics.compute_score_totals(layer, self._tokens(layer))
        if not self._added:
            return dict(self._own)
        if self._own.keys() != self._added.keys():
            raise ValueError(describe_different_layers(self._own, self._added))
        return {name: own.add(self._added[name]) for name, own in self._own.items()}

    def _tokens(self, layer: Layer) -> tuple[Sequence[Sequence[object]], Sequence[Sequence[object]]] | None:
        """The tokens along both axes, where they are of one sequence and known."""
        if layer.queries != layer.keys:
            return None
        queries, keys = self.labels_of(layer)
        return (queries.texts, keys.texts) if queries.kind == keys.kind == "tokens" else None

    def add(self, other: Record) -> Record:
        """Takes the statistics of another record of the same model to its own: means are then over both.

        Layers stay those of this record, so a data set costs no more memory than its first record. Returns the record.
        """
        self._check_filled()
        other._check_filled()
        mine, more = self.totals(), other.totals()
        if mine.keys() != more.keys():
            raise ValueError(describe_different_layers(mine, more))
        sums = {name: total.add(self._added[name]) if self._added else total for name, total in more.items()}
        # Checked before anything is changed.
        for name, own in self._own.items():
            own.add(sums[name])
        self._added = sums
        self.sequences += other.sequences
        self.calls += other.calls
        return self

    def columns(self) -> dict[str, list[Any]]:
        """The statistics as plain columns, one row per head."""
        rows = list(self._rows())
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name, float("nan")) for row in rows] for name in names}

    def _rows(self) -> Iterator[dict[str, Any]]:
        totals = self.totals()
        for layer in self.layers.values():
            total = totals[self.name_of(layer)]
            means = total.means()
            for place, head in enumerate(layer.heads):
                counts = [int(count[place]) for _, count in total.sums.values()]
                row = {
                    "name": self.name_of(layer, head),
                    "module": layer.name,
                    "stack": layer.stack,
                    "layer": layer.index,
                    "head": head,
                    "queries": max(counts, default=0),
                }
                yield row | {score: float(mean[place]) for score, mean in means.items()}

    def table(self) -> Any:
        """The statistics of every head: a pandas.DataFrame where pandas is installed, else a dict of columns."""
        try:
            import pandas
        except ImportError:
            return self.columns()
        return pandas.DataFrame(self.columns())

    @property
    def nbytes(self) -> int:
        """The bytes that all layers hold."""
        return sum(layer.nbytes for layer in self.layers.values())

    def save(self, path: str | os.PathLike[str], **options: Any) -> None:
        """One file by its ending: .foci opens again with `Record.load`, .html is a page, .png, .svg and .pdf pictures.

        Saving a .foci file of a lazy record saves queries and keys, so every question can be asked later, anywhere.
        Other options go to the page or the picture.
        """
        self._check_filled()
        ending = os.path.splitext(os.fspath(path))[1].lower()  # noqa: PTH122
        if ending == ".html":
            from foci.view.page import document

            document.write_html(self, path, **options)
        elif ending in IMAGE_SUFFIXES:
            from foci.view.figures import plots

            plots.save_figure(self, path, **options)
        elif ending == ".foci":
            if options:
                raise TypeError(f"a .foci file takes no options, but got {', '.join(options)}")
            plain = {name: getattr(self, name) for name in file.PLAIN_FIELDS}
            file.save_record(path, self.layers, self.labels, self._added, plain)
        else:
            raise ValueError(f"a record is saved as {', '.join(SAVE_SUFFIXES)}, but got {os.fspath(path)!r}")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Record:
        """The record in a .foci file; a damaged or foreign file is refused, and nothing in it is executed."""
        found = file.load_record_fields(path)
        record = cls(
            found["layers"],
            found["labels"],
            model=found["model"],
            calls=found["calls"],
            unseen=found["unseen"],
            prompt=found["prompt"],
            answer=found["answer"],
            notes=found["notes"],
        )
        record.sequences, record._added = found["sequences"], found["added"]
        return record

    def show(self, *arguments: Any, **options: Any) -> Any:
        """The record in the terminal."""
        self._check_filled()
        from foci.view.terminal import record

        return record.show_record(self, *arguments, **options)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """What a notebook shows."""
        from foci.view.page import document

        shown = {"text/plain": repr(self)}
        return shown | {"text/html": document.render_frame(self)} if self.layers else shown

    def __repr__(self) -> str:
        heads = sum(len(layer.heads) for layer in self.layers.values())
        model = f" of {self.model}" if self.model else ""
        added = f", {self.sequences} records added up" if self.sequences > 1 else ""
        unseen = f", {len(self.unseen)} attention modules unseen" if self.unseen else ""
        if self.filling:
            return f"Record{model}: to be filled when its block ends"
        return f"Record{model}: {len(self.layers)} layers, {heads} heads, {self.calls} attention calls{added}{unseen}"


def describe_different_layers(mine: dict[str, ScoreTotals], more: dict[str, ScoreTotals]) -> str:
    return f"records of one model add up, but only one of them has {', '.join(sorted(mine.keys() ^ more.keys()))}"

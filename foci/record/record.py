"""Record: the recorded attention of a model, with labels."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from foci.record import file, from_tensors, image_maps, metrics
from foci.record.labels import Labels
from foci.record.layer import Layer, format_layer_name, join_steps
from foci.record.metrics import HEAD_SCORES, ScoreTotals
from foci.runtime.checks import PICTURE_SUFFIXES, parse_suffix

RECORD_KEY = re.compile(r"(?:(?P<stack>[^.#]+)\.)?L(?P<layer>\d+)(?:H(?P<head>\d+))?(?P<again>#\d+)?")
# What a record of `foci.watch` makes when it is first read, one thread at a time.
DEFERRED_FIELDS = ("layers", "labels")
FINISH_LOCK = RLock()
# The file formats of `Record.save`.
SAVE_SUFFIXES = (".foci", *PICTURE_SUFFIXES)


class Record:
    """The recorded attention of a model: layers by module name, heads by short name.

    >>> record = foci.Record.from_tensors([torch.rand(1, 4, 3, 3).softmax(-1)] * 2, tokens=["a", " b", " c"])
    >>> record
    Record: 2 layers, 8 heads, 2 attention calls
    >>> record["L1H3"].entropy().shape, list(record.layers)
    (torch.Size([1, 3]), ['layers.0', 'layers.1'])
    >>> record.labels["input"].text(0)
    'a b c'

    Args:
        layers: by module name, in the order of their calls; the second call of a module is "name#2".
        labels: of the axes, by name: "input"; for an encoder-decoder "source" and "target".
        model: the class name of the model, for titles.
        calls: the number of attention calls.
        unseen: attention modules that ran but could not be recorded, each with the reason.
        prompt: for a generation, the number of prompt positions; the rows after them are the steps.
        answer: the model's answer, if known.
        notes: remarks shown with the record, such as that the text was longer than the model reads.
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
        for layer in self.layers.values():
            for each in (layer, *layer.steps.values()):
                each.labels = self.labels
        self.model, self.calls, self.unseen = model, calls, list(unseen)
        self.prompt, self.answer, self.notes = prompt, answer, list(notes)
        # Whether the watch block that fills the record is still open.
        self.filling = False
        # Adds the layers and labels when they are first read; None: they are there.
        self._finish: Callable[[Record], None] | None = None
        # Totals of added records, and of the record's own layers, which are computed on demand.
        self.sequences = 1
        self._added_totals: dict[str, ScoreTotals] = {}
        self._own_totals: dict[str, ScoreTotals] = {}

    def finish_later(self, finish: Callable[[Record], None]) -> None:
        """Lets a function add the layers and labels when they are first read. Used by foci.capture."""
        self._finish = finish
        del self.layers, self.labels

    def __getattr__(self, name: str) -> Any:
        # Called for missing attributes only. The lock is that of all records: making layers takes microseconds.
        if name not in DEFERRED_FIELDS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with FINISH_LOCK:
            finish = self.__dict__.get("_finish")
            if finish is not None:
                self.layers, self.labels, self._finish = {}, {}, None
                finish(self)
        if name not in self.__dict__:
            raise AttributeError(name)
        return self.__dict__[name]

    def __getstate__(self) -> dict[str, Any]:
        """Copied and pickled records have their layers."""
        return self.__dict__ | {"layers": self.layers, "labels": self.labels, "_finish": None}

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
        """Builds a record from attention matrices of another library, or from Weights and layers.

        >>> first, second = torch.rand(1, 2, 3, 3).softmax(-1), torch.rand(1, 2, 1, 4).softmax(-1)
        >>> steps = ((first, first), (second, second))                 # generate: [step][layer], the prompt first
        >>> foci.Record.from_tensors(steps, tokens=["a", "b", "c", "d"])["L1"].shape
        (1, 2, 4, 4)

        Args:
            attentions: [layer][batch, head, query, key]: a tuple of tensors, one array, or the tuples of tuples
                that `generate` of Hugging Face returns; (head, query, key) is one sequence. They must be weights, not
                scores: a row whose sum is above 1 is refused. A layer may also be `Weights` or a `Layer`; one of them
                is a record of one layer.
            tokens: the token texts, [position] or [batch][position], or Labels.
            source: the token texts of the encoder's input, for an encoder-decoder.
            encoder, cross: the other attentions of an encoder-decoder; `attentions` are then the decoder's.
            model: the name of the model, for titles.
        """
        return cls(**from_tensors.build_record_fields(attentions, tokens, source, encoder, cross), model=model)

    @classmethod
    def from_steps(cls, records: Sequence[Record]) -> Record:
        """Joins the records of the denoising steps of one model: each layer is the mean over its steps.

        >>> records = [foci.Record.from_tensors([torch.rand(1, 4, 3, 5).softmax(-1)]) for _ in range(3)]
        >>> foci.Record.from_steps(records).at(step=2)["L0"].shape
        (1, 4, 3, 5)
        """
        if not records:
            raise ValueError("records must be at least one record, got none")
        steps: dict[str, dict[int, Layer]] = {}
        for number, record in enumerate(records):
            record._check_filled()
            for name, layer in record.layers.items():
                steps.setdefault(name, {})[number] = layer
        layers = {name: join_steps(parts) for name, parts in steps.items()}
        return cls(layers, records[0].labels, model=records[0].model, calls=sum(record.calls for record in records))

    def __getitem__(self, name: str) -> Layer:
        """A layer or head by name: "L5", "L5H3", "cross.L0H2", a module name; "L5#2" for a second call."""
        self._check_filled()
        if not isinstance(name, str):
            raise TypeError(f"name must be that of a layer or head, got {name!r}: seen.layers has all layers")
        if name in self.layers:
            return self.layers[name]
        match, known = RECORD_KEY.fullmatch(name), list(self._short_names().values())
        if match is not None:
            wanted = (match["stack"] + "." if match["stack"] else "") + f"L{match['layer']}" + (match["again"] or "")
            for layer, short in zip(self.layers.values(), known, strict=True):
                if short == wanted:
                    return layer if match["head"] is None else layer.head(int(match["head"]))
        listed = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
        if not known:
            raise KeyError(f"the record has no layers, got {name!r}")
        raise KeyError(f"name must be a layer ({listed}) or a head such as {known[0]}H0, got {name!r}")

    def _check_filled(self) -> None:
        if self.filling:
            raise RuntimeError(
                "a record is filled when its block ends: it cannot be read inside the block or after an exception"
            )

    def name_of(self, layer: Layer, head: int | None = None) -> str:
        """The short name of a layer or head: "L5", "cross.L0H2"; "L5H2#2" for a second call."""
        label, mark, again = self._short_names()[layer.name].partition("#")
        number = layer.heads[0] if head is None and layer.single else head
        return label + ("" if number is None else f"H{number}") + mark + again

    def _short_names(self) -> dict[str, str]:
        """The short names by module name; later layers with the same short name are numbered."""
        counts: Counter[str] = Counter()
        short_names = {}
        for name, layer in self.layers.items():
            label = format_layer_name(layer.stack, layer.index)
            counts[label] += 1
            short_names[name] = label if counts[label] == 1 else f"{label}#{counts[label]}"
        return short_names

    @property
    def steps(self) -> int:
        """The number of denoising steps of a diffusion model, whose layers are means over them; 1 for other models."""
        return 1 + max((number for layer in self.layers.values() for number in self._steps_of(layer)), default=0)

    def _steps_of(self, layer: Layer) -> dict[int, Layer]:
        return {} if layer.averaged else layer.steps

    def at(self, *, step: int) -> Record:
        """The record of one denoising step of a diffusion model, from 0; negative numbers count from the last step.

        >>> steps = [foci.Record.from_tensors([torch.rand(1, 4, 3, 5).softmax(-1)]) for _ in range(3)]
        >>> seen = foci.Record.from_steps(steps)
        >>> seen.steps, seen.at(step=-1).steps, seen.at(step=1)["L0"] is steps[1]["L0"]
        (3, 1, True)
        """
        self._check_filled()
        count = self.steps
        if not isinstance(step, int) or isinstance(step, bool) or not -count <= step < count:
            without = ": the record has no denoising steps" if count == 1 else ""
            raise ValueError(f"step must be from {-count} to {count - 1}, got {step!r}{without}")
        if count == 1:
            return self.mean("steps")
        number = step % count
        # A layer may not have run at every step.
        parts = {name: self._steps_of(layer).get(number) for name, layer in self.layers.items()}
        return self._with_layers({name: layer for name, layer in parts.items() if layer is not None})

    def mean(self, over: str) -> Record:
        """The record without its steps: each layer is the mean over the denoising steps, `seen.mean("steps")`."""
        self._check_filled()
        if over != "steps":
            raise ValueError(f"over must be 'steps', got {over!r}")
        return self._with_layers(
            {name: replace(layer, averaged=bool(layer.steps)) for name, layer in self.layers.items()}
        )

    def _with_layers(self, layers: dict[str, Layer]) -> Record:
        """A record with the same labels and other layers, which keep the labels of this record."""
        return Record(layers, self.labels, model=self.model, calls=self.calls, unseen=self.unseen, notes=self.notes)

    @property
    def heads(self) -> list[str]:
        """The short names of all heads, in order."""
        return [self.name_of(layer, head) for layer in self.layers.values() for head in layer.heads]

    def labels_of(self, layer: Layer) -> tuple[Labels, Labels]:
        """The labels along the queries and the keys of a layer, or bare positions if its labels do not fit."""
        batch, _, queries, keys = layer.sizes
        rows = layer.positions.tolist() if layer.rows is None else list(layer.rows)
        if layer.queries != layer.keys and layer.rows is None:
            rows = list(range(queries))
        return self._fitting_labels(layer.queries, batch, queries, rows), self._fitting_labels(
            layer.keys, batch, keys, range(keys)
        )

    def _fitting_labels(self, name: str, batch: int, length: int, rows: Sequence[int]) -> Labels:
        labels = self.labels.get(name)
        if labels is None or labels.batch != batch or any(not 0 <= row < len(labels) for row in rows):
            return Labels.positions(batch, length)
        # A layer whose length differs from that of the labels reads another sequence.
        return labels.select(rows) if len(rows) == length and len(labels) >= length else Labels.positions(batch, length)

    def label(self, tokens: Any, name: str = "input", decode: Any = None) -> Record:
        """Sets labels: texts, [batch][position] or [position]; Labels; or token ids with `decode`.

        `name` is that of a sequence: `queries` or `keys` of a layer. `decode` is a tokenizer, or a function from a list
        of ids to text. Returns the record.
        """
        labels = from_tensors.to_labels(tokens, decode)
        along = [layer for layer in self.layers.values() if name in (layer.queries, layer.keys)]
        if self.layers and not along:
            names = sorted({axis for layer in self.layers.values() for axis in (layer.queries, layer.keys)})
            raise ValueError(f"name must be a sequence of the record ({', '.join(map(repr, names))}), got {name!r}")
        from_tensors.check_labels_fit_any(along, name, labels)
        self.labels[name] = labels
        self._own_totals.clear()
        return self

    def _set_image(self, image: Any) -> None:
        """Sets the pictures of the sequences that are grids of patches."""
        grids = {name: labels for name, labels in self.labels.items() if labels.grid is not None}
        if not grids:
            raise ValueError(
                "image must be given for a record with a grid of patches, got one without: give the grid with"
                " seen.label(foci.Labels.patches(rows, columns, image=image, extra=1))"
            )
        for name, labels in grids.items():
            self.labels[name] = labels.with_image(image)

    def rollout(self, query: int, batch: int = 0, *, stack: str | None = None, values: bool = False) -> Tensor:
        """Attention rollout: the share of each input position that reaches a query of the last layer, (T,).

        Of an encoder-decoder: the share of each source position, through decoder, cross-attention and encoder; the rest
        of 1 comes from the decoder's own tokens. Computed by matrix-vector products; no dense matrix is built.

        Args:
            query: the query number from 0; negative numbers count from the end.
            batch: which sequence.
            stack: which self-attention, "encoder" or "decoder"; "cross": all layers of an encoder-decoder; None: all
                layers, whose self-attention must be one stack unless there is cross-attention.
            values: weight the attention with the norms of the values.
        """
        layers = self.select_rollout_layers(stack)
        if any(layer.queries != layer.keys for layer in layers):
            return metrics.compute_cross_rollout(layers, query, batch, values)[0]
        return metrics.compute_rollout(layers, query, batch, values)

    def image_map(
        self,
        query: str | int | Sequence[int],
        *,
        image: int = 0,
        layer: int | str | None = None,
        head: int | str | None = None,
        upsample: bool | tuple[int, int] = False,
        batch: int = 0,
        step: int | str | None = None,
        direction: str | None = None,
    ) -> Tensor:
        """Where in an image a word looks: its exact attention weights on the patches, (rows, columns).

        >>> labels = foci.Labels.tokens([["<i>"] * 6 + ["a", " red", " shoe"]])
        >>> labels = labels.with_segments([foci.Segment("patches", rows=2, columns=3)])
        >>> seen = foci.Record.from_tensors([torch.full((1, 4, 9, 9), 1 / 9)], labels)
        >>> seen.image_map("shoe").shape, round(float(seen.image_map("shoe", head=2).sum()), 3)
        (torch.Size([2, 3]), 0.667)

        Only the rows of the word are computed. The map sums to the weight that the word gives to the image; tiles and
        the whole image are added where they lie. A video has one more axis, the frames, first.

        In a diffusion model the patches attend to the words of the prompt: the map holds the weight of each patch on
        the word. Maps of layers with coarser patches are enlarged to the finest grid before they are averaged.

        Args:
            query: a word or phrase of the text, read or generated ("shoe", "shoe#2" for its second occurrence), whose
                tokens are averaged; or one or several positions. Of a vision model: "class token", or a patch "2,3".
            image: which image or video of the sequence.
            layer: a number or name; the beginning of module names, such as "up_blocks.1", for a group of layers; None:
                the mean of all layers that have the word and see the image; "each": one map per layer, (layers, rows,
                columns); "rollout": attention rollout through these layers.
            head: a number; None: the mean; "each": one map per head, before the rows.
            upsample: True: at the size of the picture, interpolated; or (height, width).
            batch: which sequence.
            step: a denoising step of a diffusion model; None: the mean over the steps; "each": one map per step, first.
            direction: "text->image": the word looks at the image; "image->text": the image looks at the word; None: the
                first that the model has.
        """
        self._check_filled()
        return image_maps.compute_image_map(self, query, image, layer, head, upsample, batch, step, direction)

    def words_for(
        self,
        box: tuple[float, float, float, float],
        *,
        image: int = 0,
        layer: int | str | None = None,
        head: int | None = None,
        batch: int = 0,
        step: int | None = None,
        direction: str | None = None,
    ) -> list[tuple[str, float]]:
        """The words that look at a part of an image, heaviest first, each with its weight on that part.

        >>> labels = foci.Labels.tokens([["<i>"] * 6 + ["a", " red", " shoe"]])
        >>> labels = labels.with_segments([foci.Segment("patches", rows=2, columns=3)])
        >>> seen = foci.Record.from_tensors([torch.eye(9).roll(6, 0).view(1, 1, 9, 9)], labels)
        >>> [word for word, weight in seen.words_for((0, 0, 0.5, 0.3)) if weight > 0.5]         # at the top left
        ['a']

        Args:
            box: top, left, bottom, right in parts of the image from 0 to 1; a patch counts by the part inside.
            image: which image or video of the sequence.
            layer: a number, a name or the beginning of module names; None: the mean of all layers that see the image.
            head: a number; None: the mean.
            batch: which sequence.
            step: a denoising step of a diffusion model; None: the mean over the steps.
            direction: "text->image": words that look at the part; "image->text": words that its patches look at, with
                their mean weight; None: the first that the model has.
        """
        self._check_filled()
        return image_maps.rank_words(self, box, image, layer, head, batch, step, direction)

    def select_rollout_layers(self, stack: str | None) -> list[Layer]:
        """The layers of a stack in order; for cross-attention all layers, those of encoder and decoder too."""
        stacks = {layer.stack: layer.queries == layer.keys for layer in self.layers.values()}
        if not stacks:
            raise ValueError("the record must have at least one layer for a rollout, got none: run the model first")
        crosses = [name for name, is_self in stacks.items() if not is_self]
        wanted = stack if stack is not None else next(iter(crosses or stacks), None)
        if wanted not in stacks or (stack is None and not crosses and len(stacks) > 1):
            raise ValueError(f"stack must be one of {', '.join(map(repr, sorted(stacks)))}, got {stack!r}")
        # A second pass is left out; a module shared by all layers has a short name of its own at each call.
        short = self._short_names()
        layers = [layer for name, layer in self.layers.items() if "#" not in short[name]]
        chosen = [layer for layer in layers if wanted in crosses or layer.stack == wanted]
        return sorted(chosen, key=lambda layer: layer.index)

    def scores(self) -> dict[str, Tensor]:
        """Scores of every head, averaged over all added records: {score: (layers, H)}.

        `metrics.HEAD_SCORES` defines the scores. Layers are in the order of `layers`. NaN where the recorded statistics
        do not determine a score, or a layer has fewer heads.
        """
        self._check_filled()
        totals = self.totals()
        means = [totals[self.name_of(layer)].means() for layer in self.layers.values()]
        widest = max((len(layer.heads) for layer in self.layers.values()), default=0)
        scores = {}
        for score in HEAD_SCORES:
            table = torch.full((len(means), widest), torch.nan, dtype=torch.float64)
            for row, mean in zip(table, means, strict=True):
                if score in mean:
                    row[: len(mean[score])] = mean[score]
            if not bool(table.isnan().all()):
                scores[score] = table
        return scores

    def totals(self) -> dict[str, ScoreTotals]:
        """The totals from which the scores are averaged, by short layer name."""
        for layer in self.layers.values():
            name = self.name_of(layer)
            if name not in self._own_totals:
                self._own_totals[name] = metrics.compute_score_totals(layer, self._token_texts(layer))
        if not self._added_totals:
            return dict(self._own_totals)
        if self._own_totals.keys() != self._added_totals.keys():
            raise ValueError(describe_different_layers(self._own_totals, self._added_totals))
        return {name: own.add(self._added_totals[name]) for name, own in self._own_totals.items()}

    def _token_texts(self, layer: Layer) -> tuple[Sequence[Sequence[object]], Sequence[Sequence[object]]] | None:
        """The token texts along both axes, if they are of one sequence and known."""
        if layer.queries != layer.keys:
            return None
        queries, keys = self.labels_of(layer)
        return (queries.texts, keys.texts) if queries.kind == keys.kind == "tokens" else None

    def add(self, other: Record) -> Record:
        """Adds the score totals of another record of the same model; the scores are then means over both.

        The layers stay those of this record, so a data set takes no more memory than its first record. Returns the
        record.
        """
        self._check_filled()
        other._check_filled()
        mine, others = self.totals(), other.totals()
        if mine.keys() != others.keys():
            raise ValueError(describe_different_layers(mine, others))
        sums = {
            name: total.add(self._added_totals[name]) if self._added_totals else total for name, total in others.items()
        }
        # Raises on a mismatch, before anything is changed.
        for name, own in self._own_totals.items():
            own.add(sums[name])
        self._added_totals = sums
        self.sequences += other.sequences
        self.calls += other.calls
        return self

    def columns(self) -> dict[str, list[Any]]:
        """The scores as a dict of columns, one row per head."""
        rows = list(self._rows())
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name, float("nan")) for row in rows] for name in names}

    def _rows(self) -> Iterator[dict[str, Any]]:
        totals = self.totals()
        for layer in self.layers.values():
            total = totals[self.name_of(layer)]
            means = total.means()
            for index, head in enumerate(layer.heads):
                counts = [int(count[index]) for _, count in total.sums.values()]
                row = {
                    "name": self.name_of(layer, head),
                    "module": layer.name,
                    "stack": layer.stack,
                    "layer": layer.index,
                    "head": head,
                    "queries": max(counts, default=0),
                }
                yield row | {score: float(mean[index]) for score, mean in means.items()}

    def table(self) -> Any:
        """The scores of every head: a pandas.DataFrame if pandas is installed, else a dict of columns."""
        try:
            import pandas
        except ImportError:
            return self.columns()
        return pandas.DataFrame(self.columns())

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors of all layers."""
        return sum(layer.nbytes for layer in self.layers.values())

    def save(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Saves the record in the format of the suffix: .foci for `Record.load`, .html a page, .png, .svg, .pdf images.

        A .gif animates the map of a word over the steps of a diffusion model: `seen.save("shoe.gif", word="shoe")`. The
        .foci file of a lazy record holds queries and keys, so any statistic can be computed later. Options go to the
        page or the image.
        """
        self._check_filled()
        suffix = parse_suffix(path, *SAVE_SUFFIXES, ".gif")
        if suffix == ".html":
            from foci.view.page import document

            document.write_html(self._with_matrices(), path, **options)
        elif suffix in (*PICTURE_SUFFIXES, ".gif"):
            from foci.view.figures import plots

            plots.save_figure(self._with_matrices(), path, **options)
        else:
            if options:
                raise TypeError(f"options must be empty for a .foci file, got {', '.join(options)}")
            plain = {name: getattr(self, name) for name in file.PLAIN_FIELDS}
            file.save_record(path, self.layers, self.labels, self._added_totals, plain)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Record:
        """Loads a .foci file; damaged and other files are refused, and nothing in the file is executed."""
        fields = file.load_record_fields(path)
        record = cls(
            fields["layers"],
            fields["labels"],
            model=fields["model"],
            calls=fields["calls"],
            unseen=fields["unseen"],
            prompt=fields["prompt"],
            answer=fields["answer"],
            notes=fields["notes"],
        )
        record.sequences, record._added_totals = fields["sequences"], fields["added"]
        return record

    def show(self, *arguments: Any, **options: Any) -> Any:
        """Prints the record in the terminal; `show(image)` prints the patches of a vision model beside its image.

        The image is a PIL image, an array or a tensor, cropped as the model reads it; it stays in the record.
        """
        self._check_filled()
        if arguments and not isinstance(arguments[0], str | int | None):
            self._set_image(arguments[0])
            arguments = arguments[1:]
        from foci.view.terminal import record

        return record.show_record(self._with_matrices(), *arguments, **options)

    def _with_matrices(self) -> Record:
        """The record for views: layers of which only the weights of text were kept have these as their matrix."""
        if not any(layer.kept_keys or layer.kept_queries for layer in self.layers.values()):
            return self
        labels, layers = dict(self.labels), {}
        for name, layer in self.layers.items():
            layers[name] = layer
            if layer.kept_keys:
                words = f"words of {layer.keys}"
                if layer.keys in labels:
                    labels.setdefault(words, labels[layer.keys].select(layer.kept_keys))
                layers[name] = layer.with_columns(words)
            elif layer.kept_queries:
                layers[name] = layer.with_rows()
        found = Record(layers, labels, model=self.model, calls=self.calls, unseen=self.unseen, notes=self.notes)
        # The layers of this record keep its own labels.
        found.layers = {name: replace(layer, labels=labels) for name, layer in layers.items()}
        return found

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """The representation in a notebook."""
        from foci.view.widget import render_in_notebook

        return render_in_notebook(self)

    def __repr__(self) -> str:
        heads = sum(len(layer.heads) for layer in self.layers.values())
        model = f" of {self.model}" if self.model else ""
        added = f", scores of {self.sequences} records" if self.sequences > 1 else ""
        unseen = f", {len(self.unseen)} attention modules unseen" if self.unseen else ""
        if self.filling:
            return f"Record{model}: filled when its watch block ends"
        return f"Record{model}: {len(self.layers)} layers, {heads} heads, {self.calls} attention calls{added}{unseen}"


def describe_different_layers(mine: dict[str, ScoreTotals], others: dict[str, ScoreTotals]) -> str:
    different = ", ".join(sorted(mine.keys() ^ others.keys()))
    return f"records can be added only if they have the same layers, but only one of the two has {different}"

"""Collects the token ids that a model reads, pass by pass, and makes the labels of the record from them.

By default the ids are those that embeddings look up, so nothing has to be known about the model.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from foci.capture.naming import has_component
from foci.record.labels import SEGMENT_KINDS, Labels, Segment

SOURCE_EMBEDDING = re.compile(r"source|src", re.IGNORECASE)


def sequence_of_embedding(stack: Sequence[str], is_encoder_decoder: bool) -> str:
    """Which sequence the embedding at the end of the module stack reads.

    The enclosing modules decide first: a table shared by encoder and decoder has the name of one of them.
    """
    *outer, own = stack
    for name in (*reversed(outer), own) if is_encoder_decoder else ():
        for part, sequence in (("encoder", "source"), ("decoder", "target")):
            if has_component([name], part):
                return sequence
    if SOURCE_EMBEDDING.search(own):
        return "source"
    return "target" if is_encoder_decoder else "input"


def join_ids(parts: Sequence[Tensor]) -> Tensor:
    """The ids of several passes, (B, T) on the CPU, copied from a GPU at once."""
    for device in {part.device for part in parts if part.is_cuda}:
        # The copies may have been made on another stream.
        torch.cuda.synchronize(device)
    devices = {part.device for part in parts}
    return torch.cat([*parts] if len(devices) == 1 else [part.cpu() for part in parts], 1).cpu()


class TokenIds:
    """Token ids (B, T) by label name and pass, and the labels made from them."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer
        self.ready_labels: dict[str, Labels] = {}
        self._chunks: dict[str, list[tuple[int, Tensor]]] = {}
        self._explicit: set[str] = set()
        self._names: dict[tuple[str, tuple[int, ...]], str] = {}
        # By name, the passes with patches or frames among the tokens.
        self._segments: dict[str, list[tuple[int, Sequence[Segment], Sequence[Tensor]]]] = {}

    def add_segments(self, name: str, segments: Sequence[Segment], pictures: Sequence[Tensor], number: int) -> None:
        """Adds the patches or frames among the ids that a pass reads, at their positions in this pass."""
        self._segments.setdefault(name, []).append((number, segments, pictures))

    def find_text(self, name: str, number: int, length: int) -> tuple[int, ...] | None:
        """The positions up to a length that are not patches or frames; None if the pass reads none of these."""
        known = [segments for each, segments, _ in self._segments.get(name, ()) if each == number]
        if not known:
            return None
        inside = [
            {n for s in known[0] if s.sequence == row for n in range(s.start, s.stop)}
            for row in {s.sequence for s in known[0]}
        ]
        return tuple(n for n in range(length) if any(n not in row for row in inside))

    def add_explicit(self, name: str, ids: Tensor, number: int) -> None:
        """Adds ids that an adapter read from the model's arguments; they replace those seen in embeddings."""
        if name not in self._explicit:
            self._explicit.add(name)
            self._chunks[name] = []
        self._add(name, ids, number)

    def add_embedded(self, stack: Sequence[str], ids: Tensor, number: int, is_encoder_decoder: bool) -> None:
        """Adds ids that an embedding looked up, within the modules on the stack."""
        name = sequence_of_embedding(stack, is_encoder_decoder)
        # A pass reads its tokens once; later lookups in the same table are for something else.
        if name not in self._explicit and not any(before == number for before, _ in self._chunks.get(name, ())):
            self._add(name, ids, number)

    def _add(self, name: str, ids: Tensor, number: int) -> None:
        if ids.dim() <= 2 and not ids.is_floating_point():
            rows = ids.detach().reshape(-1, ids.shape[-1]) if ids.dim() else ids.detach().reshape(1, 1)
            # The caller may write the next text into the same tensor. The copy stays on its device until it is read.
            self._chunks.setdefault(name, []).append((number, rows.clone()))

    def label_name_for(self, name: str, passes: Sequence[int]) -> str:
        """The label name of the ids read in some passes: "input", and "input#2" for another text in the same block."""
        chunks = self._chunks_read_in(name, passes)
        if not chunks:
            return name
        key = (name, tuple(number for number, _ in chunks))
        if key not in self._names:
            before = sum(other == name for other, _ in self._names)
            self._names[key] = name if not before else f"{name}#{before + 1}"
        return self._names[key]

    def _chunks_read_in(self, name: str, passes: Sequence[int]) -> list[tuple[int, Tensor]]:
        """The ids last read in or before each of these passes, each once."""
        found: dict[int, Tensor] = {}
        chunks = self._chunks.get(name, [])
        for number in passes:
            # Chunks are in order of their passes; a long generation has many, and each layer searches them.
            end = bisect_right(chunks, number, key=itemgetter(0))
            found.update(chunks[max(end - 1, 0) : end])
        return list(found.items())

    def build_labels(self) -> dict[str, Labels]:
        """Labels by name, for every name that `label_name_for` returned."""
        labels = dict(self.ready_labels)
        for (name, passes), label_name in self._names.items():
            if label_name in labels:
                continue
            parts = [ids for number, ids in self._chunks[name] if number in set(passes)]
            if len({len(part) for part in parts}) == 1:
                labels[label_name] = self._add_segments_to(self._label(join_ids(parts)), name, passes)
        return labels

    def _add_segments_to(self, labels: Labels, name: str, passes: Sequence[int]) -> Labels:
        """The labels with the patches and frames of these passes, whose positions follow those of earlier passes."""
        placed: list[Segment] = []
        kept: list[Tensor] = []
        for number, segments, pictures in self._segments.get(name, ()):
            if number in passes:
                before = sum(ids.shape[1] for each, ids in self._chunks[name] if each in passes and each < number)
                earlier = {kind: [s.image for s in placed if s.kind == kind] for kind in SEGMENT_KINDS}
                for segment in segments:
                    picture = None if segment.picture is None else segment.picture + len(kept)
                    start = segment.start + before
                    image = segment.image + 1 + max(earlier[segment.kind], default=-1)
                    placed.append(replace(segment, start=start, image=image, picture=picture))
                kept += pictures
        fits = all(segment.sequence < labels.batch and segment.stop <= len(labels) for segment in placed)
        return labels.with_segments(placed, kept) if placed and fits else labels

    def _label(self, ids: Tensor) -> Labels:
        if self.tokenizer is not None:
            return Labels.from_ids(ids, self.tokenizer)
        return Labels.tokens([[str(number) for number in row] for row in ids.tolist()])

"""What a model was given to read, so that a record knows its tokens.

Token numbers are taken from the embeddings that look them up, pass by pass: nothing has to be known of the model.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from foci.capture.host_copy import HostCopier
from foci.capture.naming import has_component
from foci.record.labels import Labels

SOURCE_EMBEDDING = re.compile(r"source|src", re.IGNORECASE)


def sequence_of_embedding(stack: Sequence[str], paired: bool) -> str:
    """Which sequence an embedding on top of the stack reads; a table that two sides share has the name of one."""
    *outer, own = stack
    for name in (*reversed(outer), own) if paired else ():
        for part, sequence in (("encoder", "source"), ("decoder", "target")):
            if has_component([name], part):
                return sequence
    if SOURCE_EMBEDDING.search(own):
        return "source"
    return "target" if paired else "input"


class TokenIds:
    """Token numbers (B, T) by label name and pass, and the labels that they make."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer
        self.ready: dict[str, Labels] = {}
        self._chunks: dict[str, list[tuple[int, Tensor]]] = {}
        # Of its own: what was read arrives long before the statistics of the last layer do.
        self._host = HostCopier()
        self._told: set[str] = set()
        self._names: dict[tuple[str, tuple[int, ...]], str] = {}

    def told(self, name: str, ids: Tensor, number: int) -> None:
        """What somebody who knows the model says was read; what was found otherwise no longer counts."""
        if name not in self._told:
            self._told.add(name)
            self._chunks[name] = []
        self._add(name, ids, number)

    def seen(self, stack: Sequence[str], ids: Tensor, number: int, paired: bool) -> None:
        """What an embedding was given, inside the modules on the stack."""
        name = sequence_of_embedding(stack, paired)
        # A pass reads its tokens once; whatever else is looked up in the same table is about something else.
        if name not in self._told and not any(before == number for before, _ in self._chunks.get(name, ())):
            self._add(name, ids, number)

    def _add(self, name: str, ids: Tensor, number: int) -> None:
        if ids.dim() <= 2 and not ids.is_floating_point():
            rows = ids.detach().reshape(-1, ids.shape[-1]) if ids.dim() else ids.detach().reshape(1, 1)
            self._chunks.setdefault(name, []).append((number, self._host.moved({"ids": rows})["ids"]))

    def name_for(self, name: str, passes: Sequence[int]) -> str:
        """The label name of what was read in some passes: "input", and "input#2" for another text in the same block."""
        chunks = self._of(name, passes)
        if not chunks:
            return name
        key = (name, tuple(number for number, _ in chunks))
        if key not in self._names:
            before = sum(other == name for other, _ in self._names)
            self._names[key] = name if not before else f"{name}#{before + 1}"
        return self._names[key]

    def _of(self, name: str, passes: Sequence[int]) -> list[tuple[int, Tensor]]:
        """What was read last in or before each of these passes, each once."""
        found: dict[int, Tensor] = {}
        chunks = self._chunks.get(name, [])
        for number in passes:
            # They are in order: a long generation has as many as it has passes, and each layer asks.
            place = bisect_right(chunks, number, key=itemgetter(0))
            found.update(chunks[max(place - 1, 0) : place])
        return list(found.items())

    def labels(self) -> dict[str, Labels]:
        """Labels by name, of everything that was asked for with `name_for`."""
        found = dict(self.ready)
        self._host.wait()
        for (name, passes), called in self._names.items():
            if called in found:
                continue
            parts = [ids for number, ids in self._chunks[name] if number in set(passes)]
            if len({len(part) for part in parts}) == 1:
                found[called] = self._made(torch.cat(parts, 1))
        return found

    def _made(self, ids: Tensor) -> Labels:
        if self.tokenizer is not None:
            return Labels.decoded(ids, self.tokenizer)
        return Labels.tokens([[str(number) for number in row] for row in ids.tolist()])

"""Track: one attention module as it is called, step after step, and the Layer that this makes.

B batch, H heads, G key heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from foci.capture.host import Host
from foci.capture.places import Place
from foci.capture.steps import RefusedError, Step, fingerprint, joined
from foci.keep import AXES, Keep, Kept
from foci.layer import Layer
from foci.weights import Weights

Rows = Any


@dataclass
class Track:
    """The calls of one module that belong together: one, or the steps of a generation."""

    name: str
    place: Place
    heads: tuple[int, ...]
    keep: Keep | None
    rows: Rows
    host: Host
    passes: list[int] = field(default_factory=list)
    keys: int = 0
    queries: int = 0
    first: tuple[int, int] = (0, 0)
    nbytes: int = 0
    steps: list[Step] = field(default_factory=list)
    kept: list[dict[str, Tensor]] = field(default_factory=list)
    matrices: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    weights: Weights | None = None
    last: Tensor | None = None
    values: Tensor | None = None
    numbers: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    prints: Tensor | None = None
    broken: Tensor | None = None
    memory: tuple[StorageWeakRef, int] | None = None
    shape: tuple[int, int, int] = (0, 0, 0)

    @property
    def cross(self) -> bool:
        return self.place.cross

    def continues(self, weights: Weights, k: Tensor) -> bool:
        """Whether a call with these keys goes on where this track ended; raises where its cache was changed."""
        batch, heads, queries, keys = weights.shape
        again = self.memory is not None and not self.memory[0].expired() and self.memory[1] == k.data_ptr()
        alike = (heads, weights._call.k.shape[1]) == self.shape[1:]
        if self.cross:
            return again and alike and batch == self.shape[0] and keys == self.keys
        if queries >= keys or not alike:
            return False
        if keys == self.keys + queries:
            if batch != self.shape[0]:
                raise RefusedError(
                    f"the steps of {self.name} cannot be joined: there were {self.shape[0]} sequences and now there are"
                    f" {batch}, so the cache was reordered (beam search): watch one forward pass over the answer"
                )
            return True
        if (queries, keys) == self.first and not again:
            return False
        happened = "cropped or its oldest keys were dropped" if keys < self.keys + queries else "changed outside"
        raise RefusedError(
            f"the steps of {self.name} cannot be joined: after {self.keys} keys a step with {queries} more was expected"
            f" to have {self.keys + queries}, but it has {keys}, so the cache was {happened} or is of a fixed size;"
            " watch one forward pass over the whole text instead"
        )

    def add(self, weights: Weights, k: Tensor, values: Tensor, number: int) -> None:
        """Takes one call (B, H, Tq, Tk) with the keys that the model gave it and values (B, G, Tk, Dv)."""
        batch, heads, queries, keys = weights.shape
        if not self.passes:
            self.first, self.shape = (queries, keys), (batch, heads, weights._call.k.shape[1])
        self._check_prefix(k)
        rows = self.chosen_rows(queries)
        self.numbers += [self.queries + row for row in rows]
        self.places += [row + keys - queries for row in rows]
        if self.rows is not None:
            self._add_rows(weights, rows)
        elif self.keep is None:
            self._add_lazy(weights, values)
        else:
            self._add_kept(weights)
        self._add_norms(values, queries)
        self.passes.append(number)
        self.queries, self.keys = self.queries + queries, keys

    def chosen_rows(self, queries: int) -> list[int]:
        """The numbers of the queries of a call that are kept."""
        every = range(queries)
        if isinstance(self.rows, slice):
            return list(every[self.rows])
        return list(every) if self.rows is None else [every[row] for row in self.rows if -queries <= row < queries]

    def _check_prefix(self, k: Tensor) -> None:
        """The keys of the step before must be the first of these: bits are compared, without waiting for a GPU."""
        if not self.cross:
            prints = fingerprint(k)
            if self.prints is not None and self.passes:
                changed = (prints[:, :, : self.keys] != self.prints).any()
                self.broken = changed if self.broken is None else self.broken | changed
                if not k.is_cuda:
                    self.check()
            self.prints = prints
        self.memory = (StorageWeakRef(k.untyped_storage()), k.data_ptr())

    def check(self) -> None:
        """Raises where the keys of some step were not the first of the next one's."""
        if self.broken is not None and bool(self.broken):
            raise RefusedError(
                f"the steps of {self.name} cannot be joined: keys of an earlier step are not those of the next one, so"
                " the cache was reordered (beam search) or changed; watch one forward pass over the whole text instead"
            )

    def _add_rows(self, weights: Weights, rows: list[int]) -> None:
        with torch.no_grad():
            found = weights[..., rows, :]
        assert isinstance(found, Tensor)
        self.matrices.append(self.host.moved(found) if self.keep is not None else found)
        self.nbytes += found.nbytes

    def _add_lazy(self, weights: Weights, values: Tensor) -> None:
        call = weights._call
        if self.last is not None and self.values is not None:
            self.nbytes -= self.last.nbytes + self.values.nbytes
        self.steps.append(Step.of(weights))
        self.last, self.values = call.k, values.detach()
        self.weights = weights if len(self.steps) == 1 else None
        self.nbytes += self.steps[-1].nbytes + call.k.nbytes + values.nbytes

    def _add_kept(self, weights: Weights) -> None:
        assert self.keep is not None
        # A picture of all rows cannot be made of pictures of some, so a generation has none.
        keep = replace(self.keep, picture=0) if self.kept else self.keep
        found = {name: self.host.moved(tensor) for name, tensor in keep.of(weights).items()}
        self.kept.append(found)
        self.nbytes += sum(tensor.nbytes for tensor in found.values())

    def _add_norms(self, values: Tensor, queries: int) -> None:
        """The lengths of the values, of each key once."""
        if self.keep is not None and not self.keep.values:
            return
        new = values if not self.norms else values[:, :, :0] if self.cross else values[:, :, -queries:]
        if new.shape[2]:
            norms = torch.linalg.vector_norm(new.detach(), dim=-1, dtype=torch.promote_types(new.dtype, torch.float32))
            self.norms.append(norms if self.keep is None else self.host.moved(norms))

    def layer(self) -> Layer:
        """What all calls together make."""
        behind: dict[str, Any] = {}
        shape = (*self.shape[:2], self.queries, self.keys)
        places = None if self.cross else torch.tensor(self.places)
        if places is not None and self.places == list(range(self.keys - len(self.places), self.keys)):
            places = None
        if self.rows is not None:
            behind["matrix"] = torch.cat([F.pad(m, (0, self.keys - m.shape[3])) for m in self.matrices], 2)
            behind["rows"] = tuple(self.numbers)
        elif self.keep is None:
            assert self.last is not None
            behind["weights"] = self.weights or joined(self.steps, self.last, self.cross)
        else:
            behind["kept"] = Kept(together(self.kept, self.keys), shape)
        norms = torch.cat(self.norms, 2) if self.norms else None
        return Layer(
            self.name,
            self.place.stack,
            self.place.index,
            self.heads,
            self.place.queries,
            self.place.keys,
            values=self.values,
            value_norms=norms,
            kv_heads=self.shape[2] if norms is None else norms.shape[1],
            query_places=places,
            **behind,
        )


def together(steps: list[dict[str, Tensor]], keys: int) -> dict[str, Tensor]:
    """The statistics of all steps as those of one matrix."""
    if len(steps) == 1:
        return steps[0]
    found: dict[str, Tensor] = {}
    for name in steps[-1]:
        parts = [step[name] for step in steps if name in step]
        if len(parts) < len(steps) or name == "picture":
            continue
        if AXES[name] == "q":
            found[name] = torch.cat(parts, 2)
        elif AXES[name] == "qn":
            widest = max(part.shape[3] for part in parts)
            empty = -1 if name == "top_keys" else 0
            found[name] = torch.cat([F.pad(part, (0, widest - part.shape[3]), value=empty) for part in parts], 2)
        elif AXES[name] == "k":
            found[name] = torch.stack([F.pad(part, (0, keys - part.shape[2])) for part in parts]).sum(0)
        else:
            found[name] = torch.stack(parts).amax(0)
    return found

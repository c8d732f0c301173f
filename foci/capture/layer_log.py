"""Track: one attention module as it is called, step after step, and the Layer that this makes.

B batch, H heads, G key heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from foci.capture.generation import CaptureError, GenerationStep, count_step_bytes, fingerprint_keys, join_steps
from foci.capture.host_copy import HostCopier
from foci.capture.naming import LayerName
from foci.record.kept import STATISTIC_AXES, Keep, KeptStatistics
from foci.record.layer import Layer
from foci.weights.weights import Weights

RowSelection = Any


@dataclass
class LayerLog:
    """The calls of one module that belong together: one, or the steps of a generation."""

    name: str
    place: LayerName
    heads: tuple[int, ...]
    keep: Keep | None
    rows: RowSelection
    host: HostCopier
    passes: list[int] = field(default_factory=list)
    keys: int = 0
    queries: int = 0
    first: tuple[int, int] = (0, 0)
    nbytes: int = 0
    steps: list[GenerationStep] = field(default_factory=list)
    kept: list[dict[str, Tensor]] = field(default_factory=list)
    matrices: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    weights: Weights | None = None
    last: Tensor | None = None
    values: Tensor | None = None
    numbers: list[Sequence[int]] = field(default_factory=list)
    places: list[Sequence[int]] = field(default_factory=list)
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
        alike = (heads, weights._held.call.k.shape[1]) == self.shape[1:]
        if self.cross:
            return again and alike and batch == self.shape[0] and keys == self.keys
        if queries >= keys or not alike:
            return False
        if keys == self.keys + queries:
            if batch != self.shape[0]:
                raise CaptureError(
                    f"the steps of {self.name} cannot be joined: there were {self.shape[0]} sequences and now there are"
                    f" {batch}, so the cache was reordered (beam search): watch one forward pass over the answer"
                )
            return True
        if (queries, keys) == self.first and not again:
            return False
        happened = "cropped or its oldest keys were dropped" if keys < self.keys + queries else "changed outside"
        raise CaptureError(
            f"the steps of {self.name} cannot be joined: after {self.keys} keys a step with {queries} more was expected"
            f" to have {self.keys + queries}, but it has {keys}, so the cache was {happened} or is of a fixed size;"
            " watch one forward pass over the whole text instead"
        )

    def add(self, weights: Weights, k: Tensor, values: Tensor, number: int) -> None:
        """Takes one call (B, H, Tq, Tk) with the keys that the model gave it and values (B, G, Tk, Dv)."""
        batch, heads, queries, keys = weights.shape
        if not self.passes:
            self.first, self.shape = (queries, keys), (batch, heads, weights._held.call.k.shape[1])
        self._check_prefix(k)
        rows = self.chosen_rows(queries)
        self.numbers.append(shift_numbers(rows, self.queries))
        self.places.append(shift_numbers(rows, keys - queries))
        norms = self._norms(values, queries)
        if self.rows is not None:
            self._hold(norms, matrix=read_rows(weights, rows))
        elif self.keep is None:
            self._add_lazy(weights, values)
            self._hold(norms)
        else:
            # A picture of all rows cannot be made of pictures of some, so a generation has none.
            keep = replace(self.keep, picture=0) if self.kept else self.keep
            self._hold(norms, **keep.of(weights))
        self.passes.append(number)
        self.queries, self.keys = self.queries + queries, keys

    def chosen_rows(self, queries: int) -> Sequence[int]:
        """The numbers of the queries of a call that are kept."""
        every = range(queries)
        if isinstance(self.rows, slice):
            return every[self.rows]
        return every if self.rows is None else [every[row] for row in self.rows if -queries <= row < queries]

    def _check_prefix(self, k: Tensor) -> None:
        """The keys of the step before must be the first of these: bits are compared, without waiting for a GPU."""
        if not self.cross:
            prints = fingerprint_keys(k)
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
            raise CaptureError(
                f"the steps of {self.name} cannot be joined: keys of an earlier step are not those of the next one, so"
                " the cache was reordered (beam search) or changed; watch one forward pass over the whole text instead"
            )

    def _add_lazy(self, weights: Weights, values: Tensor) -> None:
        if self.last is not None and self.values is not None:
            self.nbytes -= self.last.nbytes + self.values.nbytes
            self.steps += [GenerationStep.of(each) for each in (self.weights, weights) if each is not None]
        # Of a single pass the weights are as they should be; of several steps only the last keys are needed.
        self.weights = None if self.steps else weights
        self.last, self.values = weights._held.call.k, values.detach()
        self.nbytes += count_step_bytes(weights) + self.last.nbytes + values.nbytes

    def _norms(self, values: Tensor, queries: int) -> dict[str, Tensor]:
        """The lengths of the values, of each key once."""
        if self.keep is not None and not self.keep.values:
            return {}
        new = values if not self.norms else values[:, :, :0] if self.cross else values[:, :, -queries:]
        if not new.shape[2]:
            return {}
        wide = torch.float64 if new.dtype == torch.float64 else torch.float32
        return {"norms": torch.linalg.vector_norm(new.detach() if new.requires_grad else new, dim=-1, dtype=wide)}

    def _hold(self, norms: dict[str, Tensor], **found: Tensor) -> None:
        """Takes what was computed of a call; all of it leaves for the host together where statistics are kept."""
        computed = found | norms
        held = computed if self.keep is None else self.host.moved(computed)
        self.norms += [held.pop(name) for name in norms]
        self.nbytes += sum(tensor.nbytes for tensor in held.values())
        if self.rows is not None:
            self.matrices.append(held["matrix"])
        elif self.keep is not None:
            self.kept.append(held)

    def layer(self) -> Layer:
        """What all calls together make; what only one made may still be on its way to the host."""
        behind: dict[str, Any] = {}
        shape = (*self.shape[:2], self.queries, self.keys)
        usual = self.cross or are_last_positions(self.places, self.keys)
        if len(self.passes) > 1 or self.rows is not None:
            self.host.wait()
        if self.rows is not None:
            behind["matrix"] = torch.cat([F.pad(m, (0, self.keys - m.shape[3])) for m in self.matrices], 2)
            behind["rows"] = tuple(chain.from_iterable(self.numbers))
        elif self.keep is None:
            assert self.last is not None
            behind["weights"] = self.weights or join_steps(self.steps, self.last, self.cross)
        else:
            behind["kept"] = KeptStatistics(merge_step_statistics(self.kept, self.keys), shape)
        norms = None if not self.norms else self.norms[0] if len(self.norms) == 1 else torch.cat(self.norms, 2)
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
            query_places=None if usual else torch.tensor([*chain.from_iterable(self.places)]),
            **behind,
        )


def shift_numbers(numbers: Sequence[int], by: int) -> Sequence[int]:
    """Each number and so much more; a range stays one, however long."""
    if isinstance(numbers, range):
        return range(numbers.start + by, numbers.stop + by, numbers.step)
    return [number + by for number in numbers]


def are_last_positions(parts: Sequence[Sequence[int]], end: int) -> bool:
    """Whether the numbers of all parts are the last ones before the end, in order."""
    start = end - sum(map(len, parts))
    for part in parts:
        expected = range(start, start + len(part))
        if part != (expected if isinstance(part, range) else list(expected)):
            return False
        start = expected.stop
    return True


def read_rows(weights: Weights, rows: Sequence[int]) -> Tensor:
    """The rows of some queries, exactly."""
    with torch.no_grad():
        found = weights[..., list(rows), :]
    assert isinstance(found, Tensor)
    return found


def merge_step_statistics(steps: list[dict[str, Tensor]], keys: int) -> dict[str, Tensor]:
    """The statistics of all steps as those of one matrix."""
    if len(steps) == 1:
        return steps[0]
    found: dict[str, Tensor] = {}
    for name in steps[-1]:
        parts = [step[name] for step in steps if name in step]
        if len(parts) < len(steps) or name == "picture":
            continue
        if STATISTIC_AXES[name] == "q":
            found[name] = torch.cat(parts, 2)
        elif STATISTIC_AXES[name] == "qn":
            widest = max(part.shape[3] for part in parts)
            empty = -1 if name == "top_keys" else 0
            found[name] = torch.cat([F.pad(part, (0, widest - part.shape[3]), value=empty) for part in parts], 2)
        elif STATISTIC_AXES[name] == "k":
            found[name] = torch.stack([F.pad(part, (0, keys - part.shape[2])) for part in parts]).sum(0)
        else:
            found[name] = torch.stack(parts).amax(0)
    return found

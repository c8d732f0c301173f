"""LayerLog: the calls of one attention module, from its first call to the Layer of the Record.

B batch, H heads, G key/value heads, Tq queries, Tk keys.
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

from foci.capture.generation_steps import CaptureError, GenerationStep, count_step_bytes, fingerprint_keys, join_steps
from foci.capture.host_copy import HostCopier
from foci.capture.naming import LayerName
from foci.record.kept import STATISTIC_AXES, Keep, KeptStatistics
from foci.record.layer import Layer
from foci.weights.weights import Weights

RowSelection = Any


@dataclass
class LayerLog:
    """The calls of one module that form one matrix: a single call, or the steps of a generation.

    Args:
        name: the layer's name in the record: the module name, "name#2" for its second log.
        layer_name: stack, index and axis labels.
        heads: the numbers of the recorded heads.
        keep: statistics to keep; None keeps lazy weights.
        rows: the queries of each call to keep; None keeps all.
        host_copier: copies statistics to the host.
        passes: the number of the forward pass of each call.
        keys, queries: keys of the last call, and queries of all calls so far.
        first_call: queries and keys of the first call.
        nbytes: bytes kept so far.
        steps: with lazy weights, all calls of a generation; `weights` is set instead for a single call.
        step_statistics: with `keep`, the statistics of each call.
        matrices: with `rows`, the kept rows of each call.
        value_norms: norms of the values, each key once.
        last_keys, values: keys and values of the last call.
        query_numbers, query_positions: of the kept queries of each call, the number and the position among the keys.
        key_fingerprints: one number per key of the last call.
        has_changed_keys: a bool tensor: whether earlier keys changed between calls.
        key_memory: the storage and address of the last keys.
        shape: batch, heads and key/value heads.
    """

    name: str
    layer_name: LayerName
    heads: tuple[int, ...]
    keep: Keep | None
    rows: RowSelection
    host_copier: HostCopier
    passes: list[int] = field(default_factory=list)
    keys: int = 0
    queries: int = 0
    first_call: tuple[int, int] = (0, 0)
    nbytes: int = 0
    steps: list[GenerationStep] = field(default_factory=list)
    step_statistics: list[dict[str, Tensor]] = field(default_factory=list)
    matrices: list[Tensor] = field(default_factory=list)
    value_norms: list[Tensor] = field(default_factory=list)
    weights: Weights | None = None
    last_keys: Tensor | None = None
    values: Tensor | None = None
    query_numbers: list[Sequence[int]] = field(default_factory=list)
    query_positions: list[Sequence[int]] = field(default_factory=list)
    key_fingerprints: Tensor | None = None
    has_changed_keys: Tensor | None = None
    key_memory: tuple[StorageWeakRef, int] | None = None
    shape: tuple[int, int, int] = (0, 0, 0)

    @property
    def is_cross(self) -> bool:
        return self.layer_name.is_cross

    def is_continued_by(self, weights: Weights, k: Tensor) -> bool:
        """Whether a call continues the last one with these keys; raises if the key cache was changed in between."""
        batch, heads, queries, keys = weights.shape
        is_same_memory = (
            self.key_memory is not None and not self.key_memory[0].expired() and self.key_memory[1] == k.data_ptr()
        )
        has_same_heads = (heads, weights.tensors.call.k.shape[1]) == self.shape[1:]
        if self.is_cross:
            return is_same_memory and has_same_heads and batch == self.shape[0] and keys == self.keys
        if queries >= keys or not has_same_heads:
            return False
        if keys == self.keys + queries:
            if batch != self.shape[0]:
                raise CaptureError(
                    f"the generation steps of {self.name} cannot be joined: the batch size changed from {self.shape[0]}"
                    f" to {batch}, so the cache was reordered (beam search); watch one forward pass over the answer"
                )
            return True
        if (queries, keys) == self.first_call and not is_same_memory:
            return False
        change = "cropped, lost its oldest keys" if keys < self.keys + queries else "changed outside the model"
        raise CaptureError(
            f"the generation steps of {self.name} cannot be joined: {queries} queries after {self.keys} keys must have"
            f" {self.keys + queries} keys, got {keys}, so the cache was {change} or has a fixed size; watch one forward"
            " pass over the whole text instead"
        )

    def add(self, weights: Weights, k: Tensor, values: Tensor, number: int) -> None:
        """Adds one call (B, H, Tq, Tk) with the keys as the model passed them and values (B, G, Tk, Dv)."""
        batch, heads, queries, keys = weights.shape
        if not self.passes:
            self.first_call, self.shape = (queries, keys), (batch, heads, weights.tensors.call.k.shape[1])
        self._compare_key_prefix(k)
        rows = self.select_rows(queries)
        self.query_numbers.append(shift_numbers(rows, self.queries))
        self.query_positions.append(shift_numbers(rows, keys - queries))
        norms = self._new_value_norms(values, queries)
        if self.rows is not None:
            self._store(norms, matrix=read_weight_rows(weights, rows))
        elif self.keep is None:
            self._add_step(weights, values)
            self._store(norms)
        else:
            # Pictures of single steps cannot be joined into one of all rows, so a generation has none.
            keep = replace(self.keep, picture=0) if self.step_statistics else self.keep
            self._store(norms, **keep.compute(weights))
        self.passes.append(number)
        self.queries, self.keys = self.queries + queries, keys

    def select_rows(self, queries: int) -> Sequence[int]:
        """The numbers of the kept queries of a call."""
        numbers = range(queries)
        if isinstance(self.rows, slice):
            return numbers[self.rows]
        return numbers if self.rows is None else [numbers[row] for row in self.rows if -queries <= row < queries]

    def _compare_key_prefix(self, k: Tensor) -> None:
        """Compares these keys with those of the last call, which must be their prefix, without waiting for a GPU."""
        if not self.is_cross:
            fingerprints = fingerprint_keys(k)
            if self.key_fingerprints is not None and self.passes:
                changed = (fingerprints[:, :, : self.keys] != self.key_fingerprints).any()
                self.has_changed_keys = changed if self.has_changed_keys is None else self.has_changed_keys | changed
                if not k.is_cuda:
                    self.check_key_prefix()
            self.key_fingerprints = fingerprints
        self.key_memory = (StorageWeakRef(k.untyped_storage()), k.data_ptr())

    def check_key_prefix(self) -> None:
        """Raises if the keys of some step were not a prefix of the next step's keys."""
        if self.has_changed_keys is not None and bool(self.has_changed_keys):
            raise CaptureError(
                f"the generation steps of {self.name} cannot be joined: earlier keys differ between steps, so the cache"
                " was reordered (beam search) or changed; watch one forward pass over the whole text instead"
            )

    def _add_step(self, weights: Weights, values: Tensor) -> None:
        if self.last_keys is not None and self.values is not None:
            self.nbytes -= self.last_keys.nbytes + self.values.nbytes
            self.steps += [GenerationStep.from_weights(each) for each in (self.weights, weights) if each is not None]
        # A single call keeps its weights as they are; several steps need only the last keys.
        self.weights = None if self.steps else weights
        self.last_keys, self.values = weights.tensors.call.k, values.detach()
        self.nbytes += count_step_bytes(weights) + self.last_keys.nbytes + values.nbytes

    def _new_value_norms(self, values: Tensor, queries: int) -> dict[str, Tensor]:
        """The norms of the values whose keys are new."""
        if self.keep is not None and not self.keep.values:
            return {}
        new = values if not self.value_norms else values[:, :, :0] if self.is_cross else values[:, :, -queries:]
        if not new.shape[2]:
            return {}
        wide = torch.float64 if new.dtype == torch.float64 else torch.float32
        return {"norms": torch.linalg.vector_norm(new.detach() if new.requires_grad else new, dim=-1, dtype=wide)}

    def _store(self, norms: dict[str, Tensor], **computed: Tensor) -> None:
        """Stores the tensors computed for a call; with `keep`, one copy to the host moves all of them."""
        computed |= norms
        stored = computed if self.keep is None else self.host_copier.copy(computed)
        self.value_norms += [stored.pop(name) for name in norms]
        self.nbytes += sum(tensor.nbytes for tensor in stored.values())
        if self.rows is not None:
            self.matrices.append(stored["matrix"])
        elif self.keep is not None:
            self.step_statistics.append(stored)

    def build_layer(self) -> Layer:
        """The Layer of all calls; tensors of a single call may still be on their way to the host."""
        contents: dict[str, Any] = {}
        shape = (*self.shape[:2], self.queries, self.keys)
        has_default_positions = self.is_cross or are_last_positions(self.query_positions, self.keys)
        if len(self.passes) > 1 or self.rows is not None:
            self.host_copier.wait()
        if self.rows is not None:
            contents["matrix"] = torch.cat([F.pad(m, (0, self.keys - m.shape[3])) for m in self.matrices], 2)
            contents["rows"] = tuple(chain.from_iterable(self.query_numbers))
        elif self.keep is None:
            assert self.last_keys is not None
            contents["weights"] = self.weights or join_steps(self.steps, self.last_keys, self.is_cross)
        else:
            contents["kept"] = KeptStatistics(merge_step_statistics(self.step_statistics, self.keys), shape)
        norms = None
        if self.value_norms:
            norms = self.value_norms[0] if len(self.value_norms) == 1 else torch.cat(self.value_norms, 2)
        positions = None if has_default_positions else torch.tensor([*chain.from_iterable(self.query_positions)])
        return Layer(
            self.name,
            self.layer_name.stack,
            self.layer_name.index,
            self.heads,
            self.layer_name.queries,
            self.layer_name.keys,
            values=self.values,
            value_norms=norms,
            kv_heads=self.shape[2] if norms is None else norms.shape[1],
            query_positions=positions,
            **contents,
        )


def shift_numbers(numbers: Sequence[int], by: int) -> Sequence[int]:
    """Adds `by` to each number; a range stays a range."""
    if isinstance(numbers, range):
        return range(numbers.start + by, numbers.stop + by, numbers.step)
    return [number + by for number in numbers]


def are_last_positions(parts: Sequence[Sequence[int]], end: int) -> bool:
    """Whether the parts together are the last positions before `end`, in order."""
    start = end - sum(map(len, parts))
    for part in parts:
        expected = range(start, start + len(part))
        if part != (expected if isinstance(part, range) else list(expected)):
            return False
        start = expected.stop
    return True


def read_weight_rows(weights: Weights, rows: Sequence[int]) -> Tensor:
    """The exact rows of some queries."""
    with torch.no_grad():
        entries = weights[..., list(rows), :]
    assert isinstance(entries, Tensor)
    return entries


def merge_step_statistics(steps: list[dict[str, Tensor]], keys: int) -> dict[str, Tensor]:
    """Merges the statistics of all steps into those of one matrix."""
    if len(steps) == 1:
        return steps[0]
    merged: dict[str, Tensor] = {}
    for name in steps[-1]:
        parts = [step[name] for step in steps if name in step]
        if len(parts) < len(steps) or name == "picture":
            continue
        if STATISTIC_AXES[name] == "q":
            merged[name] = torch.cat(parts, 2)
        elif STATISTIC_AXES[name] == "qn":
            widest = max(part.shape[3] for part in parts)
            fill = -1 if name == "top_keys" else 0
            merged[name] = torch.cat([F.pad(part, (0, widest - part.shape[3]), value=fill) for part in parts], 2)
        elif STATISTIC_AXES[name] == "k":
            merged[name] = torch.stack([F.pad(part, (0, keys - part.shape[2])) for part in parts]).sum(0)
        else:
            merged[name] = torch.stack(parts).amax(0)
    return merged

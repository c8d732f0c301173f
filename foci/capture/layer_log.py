"""LayerLog: the calls of one attention module, from its first call to the Layer of the Record.

B batch, H heads, G key/value heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from foci.capture.errors import CaptureError
from foci.capture.generation_steps import (
    GenerationStep,
    check_queries,
    count_step_bytes,
    fingerprint_keys,
    join_steps,
)
from foci.capture.host_copy import HostCopier
from foci.capture.naming import LayerName
from foci.capture.pending_statistics import PendingCall, PendingStatistics, PlainCall, are_changeable, compute_norms
from foci.capture.windows import Windows
from foci.record.kept import STATISTIC_AXES, Keep, KeptStatistics, TextPositions
from foci.record.layer import Layer
from foci.record.window_weights import WindowWeights
from foci.weights.tensors import fingerprint
from foci.weights.weights import Weights

# Statistics of the steps of a generation are computed for this many queries at once.
MAX_PENDING_QUERIES = 256
# Fingerprints of keys are compared when a layer has this many bytes of them.
MAX_FINGERPRINT_BYTES = 2**20

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
        pending: computes the statistics of first calls, those of several layers together.
        passes: the number of the forward pass of each call.
        keys, queries: keys of the last call, and queries of all calls so far.
        first_call: queries and keys of the first call.
        nbytes: bytes kept so far.
        steps: with lazy weights, all calls of a generation; `weights` is set instead for a single call. With `keep`,
            the calls after the first whose statistics are not computed yet.
        stored: what was computed for each call: the norms of its new values, with `keep` its statistics and with `rows`
            its matrix; on the way to the host.
        last_keys, values: keys and values of the last call.
        query_numbers, query_positions: of the kept queries of each call, the number and the position among the keys.
        keys_with_norms: the number of keys whose values have norms in `stored`.
        fingerprints: of the keys of the last calls, one number per key; they are compared from time to time.
        has_changed_keys: a bool tensor: whether earlier keys changed between calls.
        key_memory: the storage and address of the last keys.
        shape: batch, heads and key/value heads.
        text: the queries and keys of the last call that are text, if only their weights are kept.
        first_pending: the first call, if its statistics are computed with those of other layers.
        pending_queries: the number of queries in `steps`, with `keep`.
        windows: how the layer cuts its grid of patches into windows, if it does.
    """

    name: str
    layer_name: LayerName
    heads: tuple[int, ...]
    keep: Keep | None
    rows: RowSelection
    host_copier: HostCopier
    pending: PendingStatistics | None = None
    passes: list[int] = field(default_factory=list)
    keys: int = 0
    queries: int = 0
    first_call: tuple[int, int] = (0, 0)
    nbytes: int = 0
    steps: list[GenerationStep] = field(default_factory=list)
    stored: list[dict[str, Tensor]] = field(default_factory=list)
    weights: Weights | None = None
    last_keys: Tensor | None = None
    values: Tensor | None = None
    query_numbers: list[Sequence[int]] = field(default_factory=list)
    query_positions: list[Sequence[int]] = field(default_factory=list)
    keys_with_norms: int = 0
    fingerprints: list[Tensor] = field(default_factory=list)
    has_changed_keys: Tensor | None = None
    key_memory: tuple[StorageWeakRef, int] | None = None
    shape: tuple[int, int, int] = (0, 0, 0)
    text: TextPositions | None = None
    windows: Windows | None = None
    first_pending: PendingCall | None = None
    pending_queries: int = 0

    @property
    def is_cross(self) -> bool:
        return self.layer_name.is_cross

    @property
    def is_lost(self) -> bool:
        """Whether the tensors of the first call were changed before its statistics were computed."""
        return self.first_pending is not None and self.first_pending.is_lost

    def add_plain_call(self, call: PlainCall, pending: PendingCall | None) -> None:
        """Adds the first call of a module, a square matrix of self-attention."""
        batch, heads, length, _ = call.shape
        self.first_call, self.shape, self.queries, self.keys = (length, length), (batch, heads, heads), length, length
        self.passes, self.query_numbers, self.query_positions = [call.number], [range(length)], [range(length)]
        if pending is not None:
            self._set_first(pending, call.shape)
            return
        assert call.tensors is not None
        if not call.tensors.has_changed_values:
            self._store(**self._new_value_norms(call.tensors.v))
        self.keys_with_norms = length
        if are_changeable(call.tensors.k) and not call.tensors.is_changed:
            self.fingerprints.append(fingerprint_keys(call.tensors.k))
        self._add_step(call.to_weights(), call.tensors.v)

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
        self._compare_key_prefix(k, self.rows is None and self.text is None and k is weights.tensors.call.k)
        rows = self.select_rows(queries)
        self.query_numbers.append(shift_numbers(rows, self.queries))
        self.query_positions.append(shift_numbers(rows, keys - queries))
        if self.rows is not None:
            self._store(matrix=read_weight_rows(weights, rows), **self._new_value_norms(values))
        elif self.keep is None:
            if not self.passes:
                self._store(**self._new_value_norms(values))
            self._add_step(weights, values)
        elif self.text is not None:
            if self.passes:
                raise CaptureError(
                    f"keep must be 'lazy' or statistics for a generation ({self.name}), got the weights of text"
                )
            self._store(**self.keep.compute_text(weights, self.text))
        elif not self.passes:
            self._add_pending(weights, values)
        else:
            self._add_kept_step(GenerationStep.from_weights(weights), weights.tensors.call.k, values)
        self.passes.append(number)
        self.queries, self.keys = self.queries + queries, keys

    def select_rows(self, queries: int) -> Sequence[int]:
        """The numbers of the kept queries of a call."""
        numbers = range(queries)
        if isinstance(self.rows, slice):
            return numbers[self.rows]
        return numbers if self.rows is None else [numbers[row] for row in self.rows if -queries <= row < queries]

    def is_continued_by_token(self, q: Tensor, k: Tensor) -> bool:
        """Whether a call (B, H, T, D) is the next step of a generation: one query, and one key more than before."""
        shape, key_shape = q.shape, k.shape
        has_same_heads = (shape[0], shape[1], key_shape[1]) == self.shape
        return not self.is_cross and has_same_heads and shape[2] == 1 and key_shape[2] == self.keys + 1

    def add_token(self, q: Tensor, k: Tensor, values: Tensor, lse: Tensor, number: int) -> None:
        """Adds a call that `is_continued_by_token` accepts, without a mask and of the default score."""
        self._compare_key_prefix(k, True)
        self.query_numbers.append(range(self.queries, self.queries + 1))
        self.query_positions.append(range(self.keys, self.keys + 1))
        step = GenerationStep.from_token(q, k, lse)
        if self.keep is None:
            self._continue_steps(step, q.nbytes + lse.nbytes, k, values)
        else:
            self._add_kept_step(step, k, values)
        self.passes.append(number)
        self.queries, self.keys = self.queries + 1, self.keys + 1

    def _compare_key_prefix(self, k: Tensor, is_kept: bool) -> None:
        """Notes the fingerprints of these keys, of which those of the last call must be a prefix."""
        # Nearly always the first call is the only one; if its keys stay, the next call can compare them. Those in a
        # cache that is written in place may be changed by then.
        is_kept = is_kept and not are_changeable(k)
        if not self.is_cross and (self.passes or not is_kept):
            if self.passes and not self.fingerprints:
                self.fingerprints.append(self._fingerprint_first_keys())
            self.fingerprints.append(fingerprint_keys(k))
            if len(self.fingerprints) * self.fingerprints[-1].nbytes > MAX_FINGERPRINT_BYTES:
                self._compare_fingerprints()
        self.key_memory = (StorageWeakRef(k.untyped_storage()), k.data_ptr())

    def _fingerprint_first_keys(self) -> Tensor:
        if self.first_pending is not None and self.pending is not None:
            if self.first_pending.keys is None:
                self.pending.compute()
            if self.first_pending.keys is None:
                raise self._changed_keys_error()
            return self.first_pending.keys
        assert self.weights is not None
        tensors, k = self.weights.tensors, self.weights.tensors.call.k
        if fingerprint(k) != tensors.fingerprint_of(k):
            raise self._changed_keys_error()
        return fingerprint_keys(k)

    def _compare_fingerprints(self) -> None:
        """Compares the keys of successive calls, without waiting for a GPU."""
        before, after = self.fingerprints[:-1], self.fingerprints[1:]
        if not before:
            return
        prefixes = [new[:, :, : old.shape[2]] for old, new in zip(before, after, strict=True)]
        changed = (torch.cat([old.flatten() for old in before]) != torch.cat([new.flatten() for new in prefixes])).any()
        self.has_changed_keys = changed if self.has_changed_keys is None else self.has_changed_keys | changed
        self.fingerprints = after[-1:]

    def check_key_prefix(self) -> None:
        """Raises if the keys of some step were not a prefix of the next step's keys."""
        self._compare_fingerprints()
        if self.has_changed_keys is not None and bool(self.has_changed_keys):
            raise self._changed_keys_error()

    def _changed_keys_error(self) -> CaptureError:
        return CaptureError(
            f"the generation steps of {self.name} cannot be joined: earlier keys differ between steps, so the cache was"
            " reordered (beam search) or changed; watch one forward pass over the whole text instead"
        )

    def _add_step(self, weights: Weights, values: Tensor) -> None:
        k, nbytes = weights.tensors.call.k, count_step_bytes(weights)
        if self.last_keys is not None:
            self._continue_steps(GenerationStep.from_weights(weights), nbytes, k, values)
            return
        # A single call keeps its weights as they are; several steps need only the last keys.
        self.weights, self.last_keys, self.values = weights, k, values.detach()
        self.nbytes += nbytes + k.nbytes + values.nbytes

    def _continue_steps(self, step: GenerationStep, nbytes: int, k: Tensor, values: Tensor) -> None:
        """Adds a later call, of `nbytes` without its keys and values."""
        assert self.last_keys is not None and self.values is not None
        if self.weights is not None:
            self.steps.append(GenerationStep.from_weights(self.weights))
            self.weights = None
        self.steps.append(step)
        self.nbytes += nbytes + k.nbytes + values.nbytes - self.last_keys.nbytes - self.values.nbytes
        self.last_keys, self.values = k, values.detach()

    def _add_pending(self, weights: Weights, values: Tensor) -> None:
        """Adds the first call of a layer whose statistics are kept."""
        assert self.keep is not None and self.pending is not None
        batch, heads, queries, keys = weights.shape
        kept_nbytes = self.keep.nbytes(batch, heads, queries, keys)
        self._set_first(self.pending.add(weights, values, kept_nbytes), weights.shape)

    def _set_first(self, pending: PendingCall, shape: tuple[int, ...]) -> None:
        assert self.keep is not None
        batch, heads, queries, keys = shape
        self.first_pending = pending
        self.stored.append(pending.stored)
        self.keys_with_norms = keys if self.keep.values else 0
        self.nbytes += self.keep.nbytes(batch, heads, queries, keys)

    def _add_kept_step(self, step: GenerationStep, k: Tensor, values: Tensor) -> None:
        """Adds a later call whose statistics are kept: they are computed for many steps at once."""
        self.steps.append(step)
        self.last_keys, self.values = k, values.detach()
        self.pending_queries += step.queries
        if self.pending_queries >= MAX_PENDING_QUERIES:
            self._compute_steps()

    def finish(self) -> None:
        """Computes what was deferred to the end of the block; raises if the steps cannot be joined."""
        self.check_key_prefix()
        if self.keep is not None:
            self._compute_steps()
            self.last_keys = self.values = None
        elif self.values is not None:
            self._store(**self._new_value_norms(self.values))

    def _compute_steps(self) -> None:
        """Computes the statistics of the steps since the last time, as rows of one matrix where that is possible."""
        if not self.steps or self.keep is None:
            return
        assert self.last_keys is not None and self.values is not None
        check_queries(self.steps)
        try:
            parts = [join_steps(self.steps, self.last_keys, self.is_cross)]
        except CaptureError:
            parts = [step.to_weights(self.last_keys) for step in self.steps]
        # Pictures of single steps cannot be joined into one of all rows, so a generation has none.
        keep, norms = replace(self.keep, picture=0), self._new_value_norms(self.values)
        for weights in parts:
            self._store(**keep.compute(weights), **norms)
            norms = {}
        self.steps, self.pending_queries = [], 0

    def _new_value_norms(self, values: Tensor) -> dict[str, Tensor]:
        """The norms of the values whose keys are new, each key once."""
        if (self.keep is not None and not self.keep.values) or values.shape[2] == self.keys_with_norms:
            return {}
        new = values[:, :, self.keys_with_norms :] if self.keys_with_norms else values
        self.keys_with_norms = values.shape[2]
        return {"norms": compute_norms(new)}

    def _store(self, **computed: Tensor) -> None:
        """Stores the tensors computed for a call; with `keep`, they are copied to the host."""
        self.nbytes += sum(tensor.nbytes for name, tensor in computed.items() if name != "norms")
        self.stored.append(computed if self.keep is None else self.host_copier.copy(computed))

    def _build_window_layer(self, weights: Weights, windows: Windows) -> Layer:
        """A layer over the whole grid, from the weights of all windows, which are small."""
        positions = windows.find_positions()
        with torch.no_grad():
            matrices = weights.dense(limit=2**40).unflatten(0, (-1, len(positions))).transpose(1, 2)
        grid = WindowWeights(matrices, positions, windows.rows * windows.columns)
        return Layer(self.name, self.layer_name.stack, self.layer_name.index, self.heads, windows=grid)

    def build_layer(self) -> Layer:
        """The Layer of all calls; tensors of a single call may still be on their way to the host."""
        if self.windows is not None and self.weights is not None:
            return self._build_window_layer(self.weights, self.windows)
        contents: dict[str, Any] = {}
        shape = (*self.shape[:2], self.queries, self.keys)
        has_default_positions = self.is_cross or are_last_positions(self.query_positions, self.keys)
        if len(self.passes) > 1 or self.rows is not None:
            self.host_copier.wait()
        value_norms = [each.pop("norms") for each in self.stored if "norms" in each]
        if self.rows is not None:
            matrices = [each["matrix"] for each in self.stored]
            contents["matrix"] = torch.cat([F.pad(m, (0, self.keys - m.shape[3])) for m in matrices], 2)
            contents["rows"] = tuple(chain.from_iterable(self.query_numbers))
        elif self.keep is None:
            assert self.last_keys is not None
            contents["weights"] = self.weights or join_steps(self.steps, self.last_keys, self.is_cross)
        else:
            contents["kept"] = KeptStatistics(merge_step_statistics(self.stored, self.keys), shape)
            if self.text is not None:
                contents["kept_keys"] = self.text.keys if self.keep.keys else ()
                contents["kept_queries"] = self.text.queries if self.keep.queries else ()
        norms = None
        # Values that were changed in place have none.
        if value_norms and sum(each.shape[2] for each in value_norms) == self.keys:
            norms = value_norms[0] if len(value_norms) == 1 else torch.cat(value_norms, 2)
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

    def build_similar_layer(self, kept: dict[str, Tensor]) -> Layer:
        """The Layer of another call like the only one of this log, with other weights on text."""
        assert self.keep is not None and self.text is not None
        return Layer(
            self.name,
            self.layer_name.stack,
            self.layer_name.index,
            self.heads,
            self.layer_name.queries,
            self.layer_name.keys,
            kept=KeptStatistics(kept, (*self.shape[:2], self.queries, self.keys)),
            kv_heads=self.shape[2],
            kept_keys=self.text.keys if self.keep.keys else (),
            kept_queries=self.text.queries if self.keep.queries else (),
        )


class RepeatedStep(NamedTuple):
    """A call at a later denoising step that is like that of the first: the log of that one, and the weights on text."""

    first: LayerLog
    kept: dict[str, Tensor]

    def build_layer(self) -> Layer:
        return self.first.build_similar_layer(self.kept)


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

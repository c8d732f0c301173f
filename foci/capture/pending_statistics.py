"""Common calls, of which only the tensors are noted, and PendingStatistics, which computes several calls together.

On short texts a pass over one layer costs less on the device than the Python code that starts it. Layers of a model
make the same call on other tensors: their heads are concatenated, and one pass computes the statistics of all of them.

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.arguments import Call
from foci.call import DEFAULT_SCORE
from foci.capture.generation_steps import fingerprint_keys
from foci.capture.host_copy import HostCopier
from foci.gpu.mask_inputs import describe_mask
from foci.masks.base import Mask
from foci.record.kept import Keep
from foci.scores import Dot
from foci.weights.tensors import fingerprint
from foci.weights.weights import Weights

# Calls wait until their queries, keys and values have this many bytes. Concatenating copies them, which on a CPU soon
# costs more than it saves.
MAX_PENDING_BYTES = {"cuda": 2**26, "cpu": 2**22}


class PlainCall(NamedTuple):
    """A call without a mask or with `causal`, of the default score, and the first one of its module.

    name: of the module; number: of the pass; shape: (B, H, Tq, Tk); lse: the log-sum-exp; is_cross: what the inputs of
    the module tell; original: the fingerprints of query, key and value at the call.
    """

    name: str
    number: int
    shape: tuple[int, int, int, int]
    q: Tensor  # (B, H, T, D)
    k: Tensor
    v: Tensor
    mask: Mask | None
    lse: Tensor  # (B, H, T)
    is_cross: bool | None
    original: tuple[Any, ...]

    @property
    def is_changed(self) -> bool:
        """Whether query or key were changed in place since the call."""
        return (fingerprint(self.q), fingerprint(self.k)) != self.original[:2]

    @property
    def has_changed_values(self) -> bool:
        return bool(fingerprint(self.v) != self.original[2])

    def without_tensors(self) -> PlainCall:
        return self._replace(**dict.fromkeys(("q", "k", "v", "lse")))  # type: ignore[arg-type]

    def to_weights(self) -> Weights:
        """The weights, which raise an error if query or key were changed since the call."""
        weights = Weights.from_plain_call(self.q, self.k, DEFAULT_SCORE, self.mask, self.lse)
        for tensor, original in zip((self.q, self.k), self.original, strict=False):
            weights.tensors.set_fingerprint(tensor, original)
        return weights


@dataclass
class PendingCall:
    """A call whose statistics are computed later; `stored` is filled with them."""

    call: PlainCall | Weights | None  # None once they are computed
    values: Tensor | None  # (B, G, Tk, Dv), if their norms are kept
    stored: dict[str, Tensor] = field(default_factory=dict)
    # The fingerprints of the keys (B, G, Tk).
    keys: Tensor | None = None
    # Whether a tensor of the call was changed in place before the statistics were computed.
    is_lost: bool = False

    @property
    def is_changed(self) -> bool:
        assert self.call is not None
        # Calls wait only if their values had version 0.
        if self.values is not None and self.values._version:
            return True
        return self.call.is_changed if isinstance(self.call, PlainCall) else self.call.tensors.is_changed()


class JoinedResults(NamedTuple):
    """The statistics of several calls, (B, H of all calls, ...), on their way to the host."""

    results: dict[str, Tensor]
    calls: list[PendingCall]


class PendingStatistics:
    """The calls of a watch block whose statistics are not computed yet.

    Args:
        keep: which statistics.
        host_copier: copies them to the host.
    """

    def __init__(self, keep: Keep, host_copier: HostCopier) -> None:
        self.keep, self.host_copier = keep, host_copier
        self._groups: dict[Hashable, list[PendingCall]] = {}
        self._nbytes = 0
        self._joined: list[JoinedResults] = []

    def add(self, call: PlainCall | Weights, values: Tensor) -> PendingCall:
        """Computes the statistics of a call (B, H, Tq, Tk): at once, or later together with those of other layers."""
        pending = PendingCall(call, values if self.keep.values else None)
        kind = describe_kind(call, values)
        q, k = (call.q, call.k) if isinstance(call, PlainCall) else (call.tensors.call.q, call.tensors.call.k)
        nbytes = q.nbytes + k.nbytes + values.nbytes
        limit = MAX_PENDING_BYTES.get(q.device.type, 0)
        if kind is None or 2 * nbytes > limit:
            self._compute([pending])
            return pending
        self._groups.setdefault(kind, []).append(pending)
        self._nbytes += nbytes
        if self._nbytes + nbytes > limit:
            self.compute()
        return pending

    def compute(self) -> None:
        """Computes the statistics of all calls that wait."""
        groups, self._groups, self._nbytes = list(self._groups.values()), {}, 0
        for calls in groups:
            for call in calls:
                call.is_lost = call.is_changed
            self._compute([call for call in calls if not call.is_lost])

    def _compute(self, calls: list[PendingCall]) -> None:
        if not calls:
            return
        with torch.no_grad():
            weights = join_heads([call.call for call in calls if call.call is not None])
            results = self.keep.compute(weights)
            values = [call.values for call in calls if call.values is not None]
            if values:
                results["norms"] = compute_norms(values[0] if len(values) == 1 else torch.cat(values, 1))
            keys = fingerprint_keys(weights.tensors.call.k).chunk(len(calls), 1)
        self._joined.append(JoinedResults(self.host_copier.copy(results), calls))
        for call, of_call in zip(calls, keys, strict=True):
            # The tensors can be freed.
            call.call, call.values, call.keys = None, None, of_call

    def split(self) -> None:
        """Gives each call its own statistics, once the copies to the host have been started."""
        for joined in self._joined:
            for name, tensor in joined.results.items():
                parts = tensor.chunk(len(joined.calls), 1)
                for call, part in zip(joined.calls, parts, strict=True):
                    call.stored[name] = part
        self._joined.clear()


def describe_kind(call: PlainCall | Weights, values: Tensor) -> Hashable | None:
    """What calls must have in common to be computed together; None for a call that must be computed at once.

    That is a call with parts that differ from head to head, and one whose tensors may be changed in place after it, as
    a cache of fixed size is: their version is not 0. Weights have copies of inference tensors, which have no version.
    """
    if isinstance(call, PlainCall):
        return None if are_changeable(call.q, call.k, values) else describe_tensors(call.q, call.k, values, call.mask)
    form = call.tensors.call
    if form.bias is not None or form.sink is not None or form.positions is not None or type(form.score) is not Dot:
        return None
    if form.batch_ids is not None or form.head_ids is not None or values.dim() != 4 or values.is_inference():
        return None
    if are_changeable(values, *(each for each in (form.q, form.k) if not each.is_inference())):
        return None
    tensors: dict[str, Tensor] = {}
    structure = None if form.mask is None else describe_mask(form.mask, tensors)
    if (structure is None) is not (form.mask is None) or any(t.dim() == 4 and t.shape[1] > 1 for t in tensors.values()):
        return None
    addresses = tuple((name, t.data_ptr(), t.shape, t.stride()) for name, t in tensors.items())
    return describe_tensors(form.q, form.k, values, form.score, structure, addresses)


def are_changeable(*tensors: Tensor) -> bool:
    """Whether a tensor was changed in place before, and so may be again."""
    return any(tensor._version for tensor in tensors)


def describe_tensors(q: Tensor, k: Tensor, values: Tensor, *others: Hashable) -> Hashable:
    return q.shape, k.shape, values.shape, q.dtype, k.dtype, q.device, *others


def join_heads(parts: list[PlainCall | Weights]) -> Weights:
    """The weights of several calls of one kind as those of one call with the heads of all of them."""
    first = parts[0]
    weights = first.to_weights() if isinstance(first, PlainCall) else first
    if len(parts) == 1:
        return weights
    call: Call = weights.tensors.call
    calls = [each if isinstance(each, PlainCall) else each.tensors.call for each in parts]
    lses = [each.lse if isinstance(each, PlainCall) else each.tensors.lse for each in parts]
    q, k, lse = torch.cat([each.q for each in calls], 1), torch.cat([each.k for each in calls], 1), torch.cat(lses, 1)
    call = replace(call, q=q, k=k, v=k, sizes=call.sizes._replace(heads=q.shape[1]))
    return Weights(call, lse, (q.shape[0],), True)


def compute_norms(values: Tensor) -> Tensor:
    """The norms of values (..., D), in float32 or float64."""
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    norms: Tensor = torch.linalg.vector_norm(values.detach() if values.requires_grad else values, dim=-1, dtype=wide)
    return norms

"""Plain calls, of which only the tensors are noted, and PendingStatistics, which computes several calls together.

On short texts a pass over one layer costs less on the device than the Python code that starts it. Layers of a model
make the same call on other tensors: their heads are concatenated, and one pass computes the statistics of all of them.

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from foci.arguments import Call
from foci.call import DEFAULT_SCORE
from foci.capture.generation_steps import fingerprint_keys
from foci.capture.host_copy import HostCopier
from foci.masks.base import Mask
from foci.masks.kernel_inputs import describe_mask
from foci.record.kept import Keep
from foci.scores import Dot
from foci.weights.weights import Weights

# Calls wait until their queries, keys and values have this many bytes. Concatenating copies them, which on a CPU soon
# costs more than it saves.
MAX_PENDING_BYTES = {"cuda": 2**27, "cpu": 2**22}
# Or until the statistics of all of them have this many bytes. With both limits the memory that watching takes on a GPU
# does not grow with the number of layers.
MAX_PENDING_STATISTICS = {"cuda": 2**26}


# The version, address, shape and strides of a tensor.
Identity = tuple[int, int, torch.Size, tuple[int, ...]]


class CallTensors(NamedTuple):
    """The tensors of a plain call, with what `identify` told of query, key and value at the call."""

    q: Tensor  # (B, H, T, D)
    k: Tensor
    v: Tensor
    lse: Tensor  # (B, H, T)
    original: tuple[Identity, Identity, Identity]

    @property
    def is_changed(self) -> bool:
        """Whether query or key were changed in place since the call."""
        return identify(self.q) != self.original[0] or identify(self.k) != self.original[1]

    @property
    def has_changed_values(self) -> bool:
        return identify(self.v) != self.original[2]


@dataclass(slots=True)
class PlainCall:
    """A call without a mask or with `causal`, of the default score, and the first one of its module.

    name: of the module; number: of the pass; shape: (B, H, Tq, Tk); is_cross: what the inputs of the module tell;
    tensors: None once the statistics are computed.
    """

    name: str
    number: int
    shape: tuple[int, int, int, int]
    mask: Mask | None
    is_cross: bool | None
    tensors: CallTensors | None

    def to_weights(self) -> Weights:
        """The weights, which raise an error if query or key were changed since the call."""
        assert self.tensors is not None
        q, k, _, lse, original = self.tensors
        weights = Weights.from_plain_call(q, k, DEFAULT_SCORE, self.mask, lse)
        weights.tensors.set_fingerprint(q, original[0])
        weights.tensors.set_fingerprint(k, original[1])
        return weights


def identify(tensor: Tensor) -> Identity:
    """What `fingerprint` returns for the tensors of plain calls, without its checks for other tensors."""
    return tensor._version, tensor.data_ptr(), tensor.shape, tensor.stride()


class PendingCall:
    """A call whose statistics are computed later; `stored` is filled with them.

    call: None once they are computed; values: (B, G, Tk, Dv), if their norms are kept; is_lost: whether a tensor of the
    call was changed in place before; joined_keys: the fingerprints of the keys of all calls that were computed
    together, the number of this one, and how many there are.
    """

    __slots__ = ("call", "is_lost", "joined_keys", "stored", "values")

    def __init__(self, call: PlainCall | Weights, values: Tensor | None) -> None:
        self.call: PlainCall | Weights | None = call
        self.values, self.is_lost = values, False
        self.stored: dict[str, Tensor] = {}
        self.joined_keys: tuple[Tensor, int, int] | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and log-sum-exp."""
        if isinstance(self.call, PlainCall):
            assert self.call.tensors is not None
            return self.call.tensors.q, self.call.tensors.k, self.call.tensors.lse
        assert self.call is not None
        return self.call.tensors.call.q, self.call.tensors.call.k, self.call.tensors.lse

    @property
    def keys(self) -> Tensor | None:
        """The fingerprints of the keys (B, G, Tk), once they are computed."""
        if self.joined_keys is None:
            return None
        keys, number, count = self.joined_keys
        return keys.chunk(count, 1)[number]

    @property
    def is_changed(self) -> bool:
        # Calls wait only if their values had version 0.
        if self.values is not None and self.values._version:
            return True
        assert self.call is not None and self.call.tensors is not None
        return self.call.tensors.is_changed if isinstance(self.call, PlainCall) else self.call.tensors.is_changed()

    def free_tensors(self) -> None:
        if isinstance(self.call, PlainCall):
            self.call.tensors = None
        self.call = self.values = None


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
        self._nbytes = self._kept_nbytes = 0
        self._joined: list[JoinedResults] = []

    def add(self, call: PlainCall | Weights, values: Tensor, kept_nbytes: int) -> PendingCall:
        """Computes the statistics of a call (B, H, Tq, Tk): at once, or later together with those of other layers.

        `kept_nbytes`: the bytes of the statistics.
        """
        pending = PendingCall(call, values if self.keep.values else None)
        kind = describe_kind(call, values)
        q, k, _ = pending.tensors
        nbytes, device = q.nbytes + k.nbytes + values.nbytes, q.device.type
        limit, kept_limit = MAX_PENDING_BYTES.get(device, 0), MAX_PENDING_STATISTICS.get(device, math.inf)
        if kind is None or 2 * nbytes > limit or 2 * kept_nbytes > kept_limit:
            self._compute([pending])
            return pending
        self._groups.setdefault(kind, []).append(pending)
        self._nbytes += nbytes
        self._kept_nbytes += kept_nbytes
        if self._nbytes + nbytes > limit or self._kept_nbytes + kept_nbytes > kept_limit:
            self.compute()
        return pending

    def compute(self) -> None:
        """Computes the statistics of all calls that wait."""
        groups, self._groups, self._nbytes, self._kept_nbytes = list(self._groups.values()), {}, 0, 0
        for calls in groups:
            for call in calls:
                call.is_lost = call.is_changed
                if call.is_lost:
                    call.free_tensors()
            self._compute([call for call in calls if not call.is_lost])

    def _compute(self, calls: list[PendingCall]) -> None:
        if not calls:
            return
        with torch.no_grad():
            results, keys = self._compute_joined(calls)
        for number, call in enumerate(calls):
            call.joined_keys = keys, number, len(calls)
            call.free_tensors()
        self._joined.append(JoinedResults(self.host_copier.copy(results), calls))

    def _compute_joined(self, calls: list[PendingCall]) -> tuple[dict[str, Tensor], Tensor]:
        """The statistics of calls of one kind, and the fingerprints of their keys."""
        weights = join_heads(calls)
        results = self.keep.compute(weights)
        values = [call.values for call in calls if call.values is not None]
        if values:
            results["norms"] = compute_norms(values[0] if len(values) == 1 else torch.cat(values, 1))
        return results, fingerprint_keys(weights.tensors.call.k)

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
        assert call.tensors is not None
        q, (of_q, of_k, of_v) = call.tensors.q, call.tensors.original
        # Their versions; query, key and value have one shape and dtype.
        if of_q[0] or of_k[0] or of_v[0]:
            return None
        return call.shape, q.shape[3], q.dtype, q.device, call.mask is None
    form = call.tensors.call
    if form.bias is not None or form.sink is not None or form.positions is not None or type(form.score) is not Dot:
        return None
    if form.batch_ids is not None or form.head_ids is not None or values.dim() != 4 or values.is_inference():
        return None
    if are_changeable(values, form.q, form.k):
        return None
    tensors: dict[str, Tensor] = {}
    structure = None if form.mask is None else describe_mask(form.mask, tensors)
    if (structure is None) is not (form.mask is None) or any(t.dim() == 4 and t.shape[1] > 1 for t in tensors.values()):
        return None
    addresses = tuple((name, t.data_ptr(), t.shape, t.stride()) for name, t in tensors.items())
    return describe_tensors(form.q, form.k, values, form.score, structure, addresses)


def are_changeable(*tensors: Tensor) -> bool:
    """Whether a tensor was changed in place before, and so may be again; not known of inference tensors."""
    return any(tensor._version for tensor in tensors if not tensor.is_inference())


def describe_tensors(q: Tensor, k: Tensor, values: Tensor, *others: Hashable) -> Hashable:
    return q.shape, k.shape, values.shape, q.dtype, k.dtype, q.device, *others


def join_heads(calls: list[PendingCall]) -> Weights:
    """The weights of several calls of one kind as those of one call with the heads of all of them."""
    first = calls[0].call
    assert first is not None
    weights = first.to_weights() if isinstance(first, PlainCall) else first
    if len(calls) == 1:
        return weights
    call: Call = weights.tensors.call
    q, k, lse = (torch.cat(each, 1) for each in zip(*(call.tensors for call in calls), strict=True))
    call = replace(call, q=q, k=k, v=k, sizes=call.sizes._replace(heads=q.shape[1]))
    return Weights(call, lse, (q.shape[0],), True)


def compute_norms(values: Tensor) -> Tensor:
    """The norms of values (..., D), in float32 or float64."""
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    norms: Tensor = torch.linalg.vector_norm(values.detach() if values.requires_grad else values, dim=-1, dtype=wide)
    return norms

"""A mask in the three forms that our kernels read: runs of keys per query, document ids, and a dense tensor.

Bm is 1 or the batch size, Tq queries, Tk keys.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from foci.arguments import Call
from foci.masks.base import Both, Either, Entries, Mask, Opposite
from foci.masks.kinds import Causal, Documents, Prefix, Window
from foci.masks.ranges import Spans
from foci.masks.tile import Extent
from foci.runtime.tensor_cache import remembered

SMALLEST = Extent((1,), 1, 1, 1, torch.device("cpu"))
SMALL = torch.empty(0)

# Masks of plain numbers alone.
NUMBERS = (Causal, Window, Prefix)


@dataclass(frozen=True, slots=True)
class KernelMasks:
    """What a query sees is what all of these allow; None allows everything."""

    causal: bool = False  # key j <= query i + Tk - Tq
    spans: Tensor | None = None  # (Bm, runs, 2, Tq) int32: the runs of keys that a query sees
    query_ids: Tensor | None = None  # (Bm, Tq): it sees only keys of its own id
    key_ids: Tensor | None = None  # (Bm, Tk)
    dense: Tensor | None = None  # (B or 1, H or 1, Tq or 1, Tk or 1) bool


ALL, TRIANGLE = KernelMasks(), KernelMasks(causal=True)


def reasons(call: Call) -> list[str]:
    """Why the mask has no such form; empty where it has one."""
    if call.mask is None or is_plain_causal(call):
        return []
    key = key_of(call)
    return found_reasons(call) if key is None else remembered(("reasons", key), SMALL, lambda: found_reasons(call))


def found_reasons(call: Call) -> list[str]:
    # Whether runs are exact follows from the kinds of masks: where there are no tensors in it, small ones tell.
    small = call.mask is None or call.mask.static
    _, documents, dense, spans = sorted_out(call, SMALLEST if small else call.extent)
    if len(documents) > 1 or len(dense) > 1:
        return ["more than one tensor mask or documents mask in a call"]
    if spans is not None and not spans.exact:
        return [f"the mask {call.mask!r} is no union of two runs of keys per query"]
    return []


def forms(call: Call) -> KernelMasks:
    """The mask of a call for which `reasons` has none."""
    if call.mask is None or is_plain_causal(call):
        return ALL if call.mask is None else TRIANGLE
    key = key_of(call)
    if key is None:
        return found_forms(call)
    return remembered((key, call.extent.queries, call.extent.keys), call.q, lambda: found_forms(call))


def found_forms(call: Call) -> KernelMasks:
    causal, documents, dense, spans = sorted_out(call, call.extent)
    device = call.q.device
    if documents:
        superset = own(documents[0].spans(call.extent, call.positions is not None), call)
        spans = superset if spans is None else spans & superset
    ids = (own_rows(documents[0].query_ids, call), own_rows(documents[0].key_ids, call)) if documents else (None, None)
    entries = None if not dense else chosen_entries(dense[0].entries, call)
    if causal and spans is None:
        return KernelMasks(True, None, *ids, entries)
    if causal:
        assert spans is not None
        spans = spans & Causal().spans(call.extent, False)
    return KernelMasks(False, None if spans is None else spans.tensor(device), *ids, entries)


def sorted_out(call: Call, extent: Extent) -> tuple[bool, list[Documents], list[Entries], Spans | None]:
    """The masks that all must allow: plain causal, documents, dense tensors, and the rest as runs of keys."""
    causal, documents, dense = False, [], []
    spans: Spans | None = None
    for mask in conjuncts(call.mask):
        if isinstance(mask, Documents):
            documents.append(mask)
        elif isinstance(mask, Entries):
            dense.append(mask)
        elif isinstance(mask, Causal) and is_aligned(mask, call):
            causal = True
        else:
            runs = own(mask.spans(extent, call.positions is not None), call)
            spans = runs if spans is None else spans & runs
    return causal, documents, dense, spans


def is_plain_causal(call: Call) -> bool:
    return isinstance(call.mask, Causal) and is_aligned(call.mask, call)


def key_of(call: Call) -> Hashable | None:
    """What the runs of a mask follow from besides the lengths; None where that is more than plain numbers."""
    if call.mask is None or call.positions is not None or call.batch_ids is not None:
        return None
    return structure(call.mask)


def structure(mask: Mask) -> Hashable | None:
    if isinstance(mask, Both | Either):
        sides = structure(mask.left), structure(mask.right)
        return None if None in sides else (type(mask), sides)
    if isinstance(mask, Opposite):
        inner = structure(mask.mask)
        return None if inner is None else (Opposite, inner)
    if type(mask) not in NUMBERS:
        return None
    return (type(mask), *(getattr(mask, field.name) for field in fields(mask)))  # type: ignore[arg-type]


def is_aligned(mask: Causal, call: Call) -> bool:
    """Whether the last query sees up to the last key and each one before it one key less."""
    if mask.offset is None:
        return call.positions is None
    return mask.offset == call.extent.keys - call.extent.queries


def conjuncts(mask: Mask | None) -> list[Mask]:
    if mask is None:
        return []
    return [*conjuncts(mask.left), *conjuncts(mask.right)] if isinstance(mask, Both) else [mask]


def own(spans: Spans, call: Call) -> Spans:
    return spans if call.batch_ids is None else spans.of(call.batch_ids)


def own_rows(ids: Tensor | None, call: Call) -> Tensor | None:
    if ids is None or ids.shape[0] == 1 or call.batch_ids is None:
        return ids
    return ids[call.batch_ids]


def chosen_entries(entries: Tensor, call: Call) -> Tensor:
    """The dense mask of the call's own sequences and heads."""
    if call.batch_ids is not None and entries.shape[0] > 1:
        entries = entries[call.batch_ids]
    if call.head_ids is not None and entries.shape[1] > 1:
        entries = entries[:, call.head_ids]
    return entries


def inside_vmap(call: Call) -> bool:
    return bool(torch._C._functorch.is_batchedtensor(call.q))

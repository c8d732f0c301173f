"""Convert a mask into the inputs that our kernels read: key ranges of each query, document ids, and a dense tensor.

Bm is 1 or the batch size, Tq queries, Tk keys.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from foci.arguments import Call
from foci.masks.base import Complement, DenseMask, Intersection, Mask, Union, split_conjunction
from foci.masks.kinds import Causal, Documents, Prefix, Window
from foci.masks.range_algebra import KeyRanges
from foci.masks.tile import CallSizes
from foci.runtime.tensor_cache import cache_per_stream
from foci.runtime.tracing import is_vmapped

SMALLEST_SIZES = CallSizes((1,), 1, 1, 1, torch.device("cpu"))
EMPTY_CPU_TENSOR = torch.empty(0)

# Masks without tensors.
NUMERIC_MASKS = (Causal, Window, Prefix)


@dataclass(frozen=True, slots=True)
class KernelMasks:
    """The visible keys of a query are those that all fields allow; None allows everything."""

    causal: bool = False  # key j <= query i + Tk - Tq
    key_ranges: Tensor | None = None  # (Bm, ranges, 2, Tq) int32: first visible key, and last + 1
    query_ids: Tensor | None = None  # (Bm, Tq): a query attends only to keys of its own id
    key_ids: Tensor | None = None  # (Bm, Tk)
    dense: Tensor | None = None  # (B or 1, H or 1, Tq or 1, Tk or 1) bool


NO_MASK, CAUSAL_MASK = KernelMasks(), KernelMasks(causal=True)


def refuses(call: Call) -> list[str]:
    """The reasons why the mask cannot be converted; empty if it can."""
    if call.mask is None or is_plain_causal(call):
        return []
    key = mask_cache_key(call)
    return (
        compute_refusals(call)
        if key is None
        else cache_per_stream(("mask refusals", key), EMPTY_CPU_TENSOR, lambda: compute_refusals(call))
    )


def compute_refusals(call: Call) -> list[str]:
    # Whether key ranges are exact depends on the kinds of masks alone: without tensors, size 1 is enough to find out.
    small = call.mask is None or call.mask.is_static
    _, documents, dense, key_ranges = classify_masks(call, SMALLEST_SIZES if small else call.sizes)
    if len(documents) > 1 or len(dense) > 1:
        return ["more than one tensor mask or documents mask is not supported"]
    if key_ranges is not None and not key_ranges.exact:
        return [f"the mask {call.mask!r} is not a union of at most two key ranges per query"]
    return []


def build_kernel_masks(call: Call) -> KernelMasks:
    """Convert the mask of a call that `refuses` accepts; cached for masks without tensors."""
    if call.mask is None or is_plain_causal(call):
        return NO_MASK if call.mask is None else CAUSAL_MASK
    key = mask_cache_key(call)
    if key is None:
        return compute_kernel_masks(call)
    return cache_per_stream((key, call.sizes.queries, call.sizes.keys), call.q, lambda: compute_kernel_masks(call))


def compute_kernel_masks(call: Call) -> KernelMasks:
    causal, documents, dense, key_ranges = classify_masks(call, call.sizes)
    device = call.q.device
    if documents:
        superset = select_batch_ranges(documents[0].key_ranges(call.sizes, call.positions is not None), call)
        key_ranges = superset if key_ranges is None else key_ranges & superset
    ids = (
        (select_batch_ids(documents[0].query_ids, call), select_batch_ids(documents[0].key_ids, call))
        if documents
        else (None, None)
    )
    entries = None if not dense else select_dense_entries(dense[0].entries, call)
    if causal and key_ranges is None:
        return KernelMasks(True, None, *ids, entries)
    if causal:
        assert key_ranges is not None
        key_ranges = key_ranges & Causal().key_ranges(call.sizes, False)
    return KernelMasks(False, None if key_ranges is None else key_ranges.to_tensor(device), *ids, entries)


def classify_masks(call: Call, sizes: CallSizes) -> tuple[bool, list[Documents], list[DenseMask], KeyRanges | None]:
    """Sort the masks of a conjunction: plain causal, documents, dense tensors, and the rest as key ranges."""
    causal, documents, dense = False, [], []
    key_ranges: KeyRanges | None = None
    for mask in split_conjunction(call.mask):
        if isinstance(mask, Documents):
            documents.append(mask)
        elif isinstance(mask, DenseMask):
            dense.append(mask)
        elif isinstance(mask, Causal) and is_bottom_right_aligned(mask, call):
            causal = True
        else:
            runs = select_batch_ranges(mask.key_ranges(sizes, call.positions is not None), call)
            key_ranges = runs if key_ranges is None else key_ranges & runs
    return causal, documents, dense, key_ranges


def is_plain_causal(call: Call) -> bool:
    return isinstance(call.mask, Causal) and is_bottom_right_aligned(call.mask, call)


def mask_cache_key(call: Call) -> Hashable | None:
    """A cache key of the mask, except for the lengths; None for masks with tensors."""
    if call.mask is None or call.positions is not None or call.batch_ids is not None:
        return None
    return mask_structure(call.mask)


def mask_structure(mask: Mask) -> Hashable | None:
    if isinstance(mask, Intersection | Union):
        sides = mask_structure(mask.left), mask_structure(mask.right)
        return None if None in sides else (type(mask), sides)
    if isinstance(mask, Complement):
        inner = mask_structure(mask.mask)
        return None if inner is None else (Complement, inner)
    if type(mask) not in NUMERIC_MASKS:
        return None
    return (type(mask), *(getattr(mask, field.name) for field in fields(mask)))  # type: ignore[arg-type]


def is_bottom_right_aligned(mask: Causal, call: Call) -> bool:
    """Whether the last query attends up to the last key, and each earlier query to one key less."""
    if mask.offset is None:
        return call.positions is None
    return mask.offset == call.sizes.keys - call.sizes.queries


def select_batch_ranges(key_ranges: KeyRanges, call: Call) -> KeyRanges:
    return key_ranges if call.batch_ids is None else key_ranges.select_batches(call.batch_ids)


def select_batch_ids(ids: Tensor | None, call: Call) -> Tensor | None:
    if ids is None or ids.shape[0] == 1 or call.batch_ids is None:
        return ids
    return ids[call.batch_ids]


def select_dense_entries(entries: Tensor, call: Call) -> Tensor:
    """The entries of a dense mask for the sequences and heads of the call."""
    if call.batch_ids is not None and entries.shape[0] > 1:
        entries = entries[call.batch_ids]
    if call.head_ids is not None and entries.shape[1] > 1:
        entries = entries[:, call.head_ids]
    return entries


def is_inside_vmap(call: Call) -> bool:
    return is_vmapped(call.q)

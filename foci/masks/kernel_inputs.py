"""Convert a mask into the inputs that our kernels read: key ranges of each query, document ids, and a dense tensor.

Bm is 1 or the batch size, Tq queries, Tk keys.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch import Tensor

from foci.masks.base import Complement, DenseMask, Intersection, Mask, Union, split_conjunction
from foci.masks.kinds import Causal, Documents, Padding, Prefix, Window
from foci.masks.range_algebra import KeyRanges
from foci.runtime.tensor_cache import cache_per_stream

if TYPE_CHECKING:
    from foci.arguments import Call

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

# A distance, or a number of keys, that exceeds all lengths: the sum of two and of a length fits in 32 bits.
UNLIMITED = 2**30


class VisibleKeys(NamedTuple):
    """The same for the attention kernels, which find the key ranges of most masks themselves.

    Query i, at position i + Tk - Tq, sees the keys from position - left to position + right or before `always` that
    come before `stop`.
    """

    left: int = UNLIMITED
    right: int = UNLIMITED
    always: int = 0
    stop: int = UNLIMITED
    padded: int = 0  # 0 without lengths, 1 if the first keys of each sequence are visible, 2 if the last ones are
    lengths: Tensor | None = None  # (Bm,)
    key_ranges: Tensor | None = None  # the rest as in KernelMasks
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    dense: Tensor | None = None


ALL_KEYS, EARLIER_KEYS = VisibleKeys(), VisibleKeys(right=0)


def refuses(call: Call) -> list[str]:
    """The reasons why the mask cannot be converted; empty if it can. Reads no tensor: every call pays for it."""
    if call.mask is None or is_plain_causal(call):
        return []
    masks = split_conjunction(call.mask)
    if sum(isinstance(mask, Documents) for mask in masks) > 1 or sum(isinstance(mask, DenseMask) for mask in masks) > 1:
        return ["more than one tensor mask or documents mask is not supported"]
    counts = [
        count_key_ranges(mask, call.positions is not None)
        for mask in masks
        if not isinstance(mask, Documents | DenseMask)
        and not (isinstance(mask, Causal) and is_bottom_right_aligned(mask, call))
    ]
    if None in counts or sum(count == 2 for count in counts) > 1:
        return [f"the mask {call.mask!r} is not a union of at most two key ranges per query"]
    return []


def count_key_ranges(mask: Mask, has_positions: bool) -> int | None:
    """The number of key ranges per query that describe the mask exactly, 1 or 2; None if ranges cannot.

    It says beforehand what the operators of KeyRanges give.
    """
    if isinstance(mask, Intersection | Union):
        left, right = count_key_ranges(mask.left, has_positions), count_key_ranges(mask.right, has_positions)
        if left is None or right is None or (max(left, right) == 2 and (left == right or isinstance(mask, Union))):
            return None
        return 2 if isinstance(mask, Union) else max(left, right)
    if isinstance(mask, Complement):
        return 2 if count_key_ranges(mask.mask, has_positions) == 1 else None
    if isinstance(mask, Padding) or (isinstance(mask, Causal) and mask.offset is not None):
        return 1
    return 1 if type(mask) in NUMERIC_MASKS and not has_positions else None


def build_kernel_masks(call: Call) -> KernelMasks:
    """Convert the mask of a call that `refuses` accepts; cached for masks without tensors."""
    if call.mask is None or is_plain_causal(call):
        return NO_MASK if call.mask is None else CAUSAL_MASK
    key = mask_cache_key(call)
    if key is None:
        return compute_kernel_masks(call)
    return cache_per_stream((key, call.sizes.queries, call.sizes.keys), call.q, lambda: compute_kernel_masks(call))


def find_visible_keys(call: Call) -> VisibleKeys:
    """Convert the mask of a call that `refuses` accepts; most masks need no operation on the device."""
    if call.mask is None or is_plain_causal(call):
        return ALL_KEYS if call.mask is None else EARLIER_KEYS
    fields: dict[str, Any] = {}
    rest: Mask | None = None
    unions: list[Mask] = []
    offset = call.sizes.keys - call.sizes.queries
    for mask in split_conjunction(call.mask):
        if isinstance(mask, Documents):
            fields["query_ids"] = select_batch_ids(mask.query_ids, call)
            fields["key_ids"] = select_batch_ids(mask.key_ids, call)
        elif isinstance(mask, DenseMask):
            fields["dense"] = select_dense_entries(mask.entries, call)
        elif isinstance(mask, Padding) and "lengths" not in fields:
            fields["lengths"] = select_batch_ids(mask.lengths, call)
            fields["padded"] = 1 if mask.side == "right" else 2
        elif isinstance(mask, Causal):
            limit(fields, right=0 if mask.offset is None else mask.offset - offset)
        elif isinstance(mask, Window):
            limit(fields, left=mask.left, right=mask.right)
        elif isinstance(mask, Prefix):
            limit(fields, stop=mask.length)
        elif split_prefix_union(mask) is not None:
            unions.append(mask)
        else:
            rest = mask if rest is None else rest & mask
    if len(unions) == 1 and "right" not in fields:
        earlier, prefix = cast("tuple[Causal, Prefix]", split_prefix_union(unions.pop()))
        limit(fields, right=0 if earlier.offset is None else earlier.offset - offset)
        fields["always"] = prefix.length
    for union in unions:
        rest = union if rest is None else rest & union
    if rest is not None:
        fields["key_ranges"] = compute_key_ranges(replace(call, mask=rest))
    return VisibleKeys(**fields)


def split_prefix_union(mask: Mask) -> tuple[Causal, Prefix] | None:
    """The parts of `causal | prefix(n)`, in either order; None for any other mask."""
    if isinstance(mask, Union):
        for earlier, prefix in ((mask.left, mask.right), (mask.right, mask.left)):
            if isinstance(earlier, Causal) and isinstance(prefix, Prefix):
                return earlier, prefix
    return None


def limit(fields: dict[str, Any], **limits: int | None) -> None:
    """Lower limits of VisibleKeys; None does not limit."""
    for name, value in limits.items():
        if value is not None:
            fields[name] = max(-UNLIMITED, min(value, fields.get(name, UNLIMITED)))


def compute_key_ranges(call: Call) -> Tensor:
    """The key ranges of the mask as one tensor; cached for masks without tensors."""

    def compute() -> Tensor:
        assert call.mask is not None
        ranges = select_batch_ranges(call.mask.key_ranges(call.sizes, call.positions is not None), call)
        return ranges.to_tensor(call.q.device)

    key = mask_cache_key(call)
    if key is None:
        return compute()
    return cache_per_stream((compute_key_ranges, key, call.sizes.queries, call.sizes.keys), call.q, compute)


def compute_kernel_masks(call: Call) -> KernelMasks:
    causal, documents, dense, key_ranges = classify_masks(call)
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


def classify_masks(call: Call) -> tuple[bool, list[Documents], list[DenseMask], KeyRanges | None]:
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
            runs = select_batch_ranges(mask.key_ranges(call.sizes, call.positions is not None), call)
            key_ranges = runs if key_ranges is None else key_ranges & runs
    return causal, documents, dense, key_ranges


def is_plain_causal(call: Call) -> bool:
    return isinstance(call.mask, Causal) and is_bottom_right_aligned(call.mask, call)


def mask_cache_key(call: Call) -> Hashable | None:
    """A cache key of the mask, except for the lengths; None for masks with tensors."""
    if call.mask is None or call.positions is not None or call.batch_ids is not None:
        return None
    return mask_structure(call.mask)


def describe_mask(mask: object, tensors: dict[str, Tensor]) -> Hashable | None:
    """What a mask consists of besides its tensors, which are added to `tensors` by their names in VisibleKeys.

    None for masks with other tensors and for most that would have to be converted to key ranges.
    """
    if isinstance(mask, Tensor | DenseMask):
        if "dense" in tensors:
            return None
        tensors["dense"] = mask if isinstance(mask, Tensor) else mask.entries
        return "dense"
    if isinstance(mask, Window):
        return "window", mask.left, mask.right
    if isinstance(mask, Causal):
        return "causal", mask.offset
    if isinstance(mask, Prefix):
        return "prefix", mask.length
    if isinstance(mask, Padding) and "lengths" not in tensors:
        tensors["lengths"] = mask.lengths
        return "padding", mask.side
    if isinstance(mask, Documents) and "query_ids" not in tensors:
        tensors["query_ids"] = mask.query_ids
        tensors["key_ids"] = mask.query_ids if mask.key_ids is None else mask.key_ids
        return "documents"
    if isinstance(mask, Union) and (parts := split_prefix_union(mask)) is not None:
        return "causal or prefix", parts[0].offset, parts[1].length
    if isinstance(mask, Intersection):
        left, right = describe_mask(mask.left, tensors), describe_mask(mask.right, tensors)
        return None if left is None or right is None else (left, right)
    return None


def mask_structure(mask: Mask) -> Hashable | None:
    if isinstance(mask, Intersection | Union):
        sides = mask_structure(mask.left), mask_structure(mask.right)
        return None if None in sides else (type(mask), sides)
    if isinstance(mask, Complement):
        inner = mask_structure(mask.mask)
        return None if inner is None else (Complement, inner)
    if type(mask) not in NUMERIC_MASKS:
        return None
    return (type(mask), *(getattr(mask, field.name) for field in dataclass_fields(mask)))  # type: ignore[arg-type]


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

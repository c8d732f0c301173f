"""Masks as kernel inputs: they equal the mask, and the conversion never synchronizes with the device."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import foci
from foci.arguments import Call, prepare_call
from foci.backends.flex.block_masks import build_block_lists
from foci.masks import kernel_inputs
from foci.masks.base import Mask
from foci.masks.tile import CallSizes
from foci.scores import Dot
from foci.weights.parts_file import map_tensors

QUERIES, KEYS = 7, 9


def call_of(mask: Mask | None, queries: int = QUERIES, keys: int = KEYS) -> Call:
    q, k = torch.zeros(2, 1, queries, 4), torch.zeros(2, 1, keys, 4)
    return prepare_call(q, k, k, Dot(), mask, None, None, None, 0.0, False)


def seen_by(masks: kernel_inputs.KernelMasks, call: Call) -> Tensor:
    """The visible entries as a kernel computes them: (B, 1, Tq, Tk)."""
    where = call.full_tile()
    seen = torch.ones(2, 1, QUERIES, KEYS, dtype=torch.bool)
    if masks.causal:
        seen = seen & (where.key <= where.query + KEYS - QUERIES)
    if masks.key_ranges is not None:
        ends = masks.key_ranges.unsqueeze(-1).unbind(2)
        inside = (where.key[0] >= ends[0]) & (where.key[0] < ends[1])
        seen = seen & inside.any(1, keepdim=True)
    if masks.query_ids is not None and masks.key_ids is not None:
        seen = seen & (masks.query_ids[:, None, :, None] == masks.key_ids[:, None, None])
    return seen if masks.dense is None else seen & masks.dense


IDS = torch.tensor([0, 0, 1, 1, 1, 2, 2]), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
LENGTHS = torch.tensor([4, 9])

MASKS = {
    "nothing": None,
    "causal": foci.causal,
    "aligned": foci.causal.at(KEYS - QUERIES),
    "first": foci.causal.at(0),
    "window": foci.window(3, 1),
    "causal_window": foci.causal & foci.window(3),
    "prefix": foci.causal | foci.prefix(4),
    "opposite": ~foci.window(1, 1) & foci.causal.at(KEYS - QUERIES),
    "padding": foci.causal & foci.padding(LENGTHS),
    "left": foci.window(3, 2) & foci.padding(LENGTHS, side="left"),
    "documents": foci.causal & foci.documents(*IDS) & foci.window(4),
    "entries": foci.window(4) & (torch.arange(QUERIES * KEYS).view(QUERIES, KEYS) % 3 > 0),
}


@pytest.mark.parametrize("name", MASKS)
def test_kernel_masks_equal_the_mask(name: str) -> None:
    call = call_of(MASKS[name])
    assert kernel_inputs.refuses(call) == []
    expected = torch.ones(2, 1, QUERIES, KEYS, dtype=torch.bool)
    if call.mask is not None:
        expected = call.mask.visible(call.full_tile()).expand(2, 1, -1, -1)
    assert torch.equal(seen_by(kernel_inputs.build_kernel_masks(call), call), expected)


def seen_by_position(keys: kernel_inputs.VisibleKeys, call: Call) -> Tensor:
    """The visible entries as the attention kernels compute them: (B, 1, Tq, Tk)."""
    where = call.full_tile()
    position = where.query + KEYS - QUERIES
    seen = (where.key >= position - keys.left) & ((where.key <= position + keys.right) | (where.key < keys.always))
    seen = (seen & (where.key < keys.stop)).expand(2, 1, -1, -1)
    if keys.lengths is not None:
        lengths = keys.lengths.view(-1, 1, 1, 1)
        seen = seen & (where.key < lengths if keys.padded == 1 else where.key >= KEYS - lengths)
    masks = kernel_inputs.KernelMasks(False, keys.key_ranges, keys.query_ids, keys.key_ids, keys.dense)
    return seen & seen_by(masks, call)


JOINED = MASKS | {
    "reversed_prefix": foci.prefix(4) | foci.causal.at(1),
    "prefix_padding": (foci.causal | foci.prefix(5)) & foci.padding(LENGTHS),
    "prefix_window": (foci.causal | foci.prefix(5)) & foci.window(2, 3),
    "prefix_in_causal": (foci.causal.at(0) | foci.prefix(5)) & foci.causal.at(3),
}


@pytest.mark.parametrize("name", JOINED)
def test_visible_keys_equal_the_mask(name: str) -> None:
    call = call_of(JOINED[name])
    assert kernel_inputs.refuses(call) == []
    expected = torch.ones(2, 1, QUERIES, KEYS, dtype=torch.bool)
    if call.mask is not None:
        expected = call.mask.visible(call.full_tile()).expand(2, 1, -1, -1)
    assert torch.equal(seen_by_position(kernel_inputs.find_visible_keys(call), call), expected)


@pytest.mark.parametrize("name", ["prefix", "reversed_prefix", "prefix_padding"])
def test_a_prefix_needs_no_key_ranges(name: str) -> None:
    keys = kernel_inputs.find_visible_keys(call_of(JOINED[name]))
    assert keys.key_ranges is None
    assert keys.always in {4, 5}


@pytest.mark.parametrize(
    ("offset", "queries", "keys", "plain"),
    [(0, 9, 9, True), (2, 7, 9, True), (-2, 9, 7, True), (0, 7, 9, False), (1, 9, 9, False)],
)
def test_bottom_right_offset_is_plain_causal(offset: int, queries: int, keys: int, plain: bool) -> None:
    """Kernels have a fast path for it: F.scaled_dot_product_attention(..., is_causal=True) is causal.at(0)."""
    masks = kernel_inputs.build_kernel_masks(call_of(foci.causal.at(offset), queries=queries, keys=keys))
    assert (masks.causal, masks.key_ranges is None) == (plain, plain)


@pytest.mark.parametrize("positions", [False, True])
def test_positions_shift_causal_but_not_a_fixed_offset(positions: bool) -> None:
    call = call_of(foci.causal)
    if positions:
        call.positions = torch.arange(QUERIES)[None], torch.arange(KEYS)[None]
    assert bool(kernel_inputs.refuses(call)) == positions
    call.mask = foci.causal.at(KEYS - QUERIES)
    assert kernel_inputs.build_kernel_masks(call) == kernel_inputs.KernelMasks(causal=True)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (foci.documents(*IDS) & foci.documents(*IDS), "more than one"),
        (foci.mask_function(lambda b, h, q, k: q > k), "not a union of at most two key ranges"),
        ((foci.window(1) | foci.prefix(2)) | foci.window(0, 1), "not a union of at most two key ranges"),
        (foci.window(1) | foci.padding(LENGTHS) | foci.prefix(1), "not a union of at most two key ranges"),
    ],
)
def test_unsupported_masks_are_refused(mask: Mask, reason: str) -> None:
    (said,) = kernel_inputs.refuses(call_of(mask))
    assert reason in said


class StaysThere(TorchDispatchMode):
    """Reject operations that copy from the host to the device: they synchronize with the GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
        out = func(*args, **(kwargs or {}))
        made = [leaf.device.type for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        assert not ("cpu" in given and "meta" in (*given, *made)), f"{func} takes a tensor from the host"
        return out


def there(call: Call, name: str = "meta") -> Call:
    """The call with all of its tensors on a device that cannot be read from."""
    device = torch.device(name)
    q, k, mask = map_tensors((call.q, call.k, call.mask), lambda tensor: tensor.to(device))
    return replace(call, q=q, k=k, v=k, mask=mask, sizes=call.sizes._replace(device=device))


@pytest.mark.parametrize("name", MASKS)
def test_no_copies_from_host_to_device(name: str) -> None:
    call = there(call_of(MASKS[name]))
    with StaysThere():
        assert kernel_inputs.refuses(call) == []
        masks = kernel_inputs.build_kernel_masks(call)
        assert masks.key_ranges is None or masks.key_ranges.device.type == "meta"
        if call.mask is not None:
            build_block_lists(call)


def test_copies_from_host_to_device_are_detected() -> None:
    with pytest.raises(AssertionError, match="from the host"), StaysThere():
        torch.arange(3).to("meta")
    with pytest.raises(AssertionError, match="from the host"), StaysThere():
        torch.zeros(3, device="meta").copy_(torch.arange(3))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKS)
def test_no_synchronization_on_a_gpu(name: str) -> None:
    call = there(call_of(MASKS[name]), "cuda:0")
    expected = seen_by(kernel_inputs.build_kernel_masks(call_of(MASKS[name])), call_of(MASKS[name]))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert kernel_inputs.refuses(call) == []
        masks = kernel_inputs.build_kernel_masks(call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    back = kernel_inputs.KernelMasks(
        *(map_tensors(getattr(masks, field.name), lambda tensor: tensor.cpu()) for field in fields(masks))
    )
    assert torch.equal(seen_by(back, call_of(MASKS[name])), expected)


REPEATED: dict[str, Callable[[], Mask | None]] = {
    "none": lambda: None,
    "causal": lambda: foci.causal,
    "window": lambda: foci.causal & foci.window(3),
    "prefix": lambda: foci.causal | foci.prefix(2),
    "opposite": lambda: ~foci.window(1, 1),
}


@pytest.mark.parametrize("name", REPEATED)
def test_masks_without_tensors_are_converted_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> kernel_inputs.KernelMasks:
        call = call_of(REPEATED[name]())
        assert not kernel_inputs.refuses(call)
        return kernel_inputs.build_kernel_masks(call)

    first = asked()
    call = call_of(REPEATED[name]())
    with monkeypatch.context() as patched:
        patched.setattr(kernel_inputs, "classify_masks", None)
        assert not kernel_inputs.refuses(call)
        assert kernel_inputs.build_kernel_masks(call) is first
    longer = call_of(REPEATED[name](), keys=KEYS + 1)
    found, fresh = kernel_inputs.build_kernel_masks(longer), kernel_inputs.compute_kernel_masks(longer)
    assert (found.causal, found.key_ranges is None) == (fresh.causal, fresh.key_ranges is None)
    assert found.key_ranges is None or fresh.key_ranges is None or torch.equal(found.key_ranges, fresh.key_ranges)


def test_mask_cache_key_depends_on_kind_and_numbers() -> None:
    masks = (
        foci.causal, foci.causal.at(1), foci.window(3), foci.window(3, 2), foci.prefix(3), ~foci.window(3),
        foci.causal & foci.window(3), foci.causal | foci.window(3), foci.window(3) & foci.causal,
    )  # fmt: skip
    keys = [kernel_inputs.mask_structure(mask) for mask in masks]
    assert None not in keys
    assert len(set(keys)) == len(masks)


def test_masks_with_tensors_are_not_cached() -> None:
    for mask in (
        foci.padding([3, 4]),
        foci.documents(torch.arange(QUERIES)),
        foci.causal & torch.ones(1, dtype=torch.bool),
    ):
        assert kernel_inputs.mask_structure(mask) is None
        assert kernel_inputs.mask_structure(~(foci.causal | mask)) is None


RANGED = (foci.causal.at(2), foci.window(2, 1), foci.prefix(3), foci.padding([4]), ~foci.window(1, 1))


@pytest.mark.parametrize("has_positions", [False, True])
def test_counted_key_ranges_are_those_that_masks_build(has_positions: bool) -> None:
    sizes = CallSizes((1,), 1, 6, 7, torch.device("cpu"))
    pairs = [joined for one in RANGED for other in RANGED for joined in (one & other, one | other, ~(one & other))]
    for mask in (*RANGED, *pairs, foci.documents(torch.zeros(6, dtype=torch.int64), torch.zeros(7, dtype=torch.int64))):
        built = mask.key_ranges(sizes, has_positions)
        assert kernel_inputs.count_key_ranges(mask, has_positions) == (len(built.ranges) if built.exact else None)

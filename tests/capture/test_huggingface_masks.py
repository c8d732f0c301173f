"""Masks of transformers as masks of foci: the same entries, without an n x n tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from transformers import masking_utils as theirs  # noqa: E402

import foci  # noqa: E402
from foci.capture.huggingface import masks  # noqa: E402
from foci.capture.huggingface.masks import DeferredMask, build_attention_mask, build_deferred_mask  # noqa: E402

LENGTH = 6
RIGHT = torch.arange(LENGTH) < torch.tensor([[6], [4]])
LEFT = RIGHT.flip(1)
HOLES = torch.tensor([[1, 0, 1, 1, 0, 1], [1, 1, 1, 0, 1, 1]], dtype=torch.bool)
PACKED = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 1, 1]])
BLOCKS = torch.tensor([[0, 0, -1, -1, 1, 1], [-1, -1, 0, 0, 0, -1]])

CAUSAL = theirs.causal_mask_function
RULES: dict[str, Callable[..., Any]] = {
    "causal": CAUSAL,
    "everything": theirs.bidirectional_mask_function,
    "window": theirs.sliding_window_causal_mask_function(3),
    "wide window": theirs.sliding_window_causal_mask_function(LENGTH),
    "both sides": theirs.sliding_window_bidirectional_mask_function(2),
    "chunks": theirs.chunked_causal_mask_function(2, torch.tensor([0, 1])),
    "packed": theirs.and_masks(CAUSAL, theirs.packed_sequence_mask_function(PACKED)),
    "blocks": theirs.or_masks(CAUSAL, theirs.blockwise_overlay(BLOCKS)),
    "blocks or everything": theirs.or_masks(theirs.bidirectional_mask_function, theirs.blockwise_overlay(BLOCKS)),
    "real": theirs.and_masks(CAUSAL, theirs.padding_mask_function(LEFT)),
}
# Queries, keys, and the position of the first of each.
PLACES = {
    "square": (6, 6, 0, 0),
    "a cache": (2, 6, 4, 0),
    "one query": (1, 6, 5, 0),
    "a cache that slides": (2, 4, 4, 2),
    "a cache of fixed size": (3, 6, 0, 0),
    "a later part of it": (2, 6, 3, 0),
}
PADDINGS = {"none": None, "all": torch.ones_like(RIGHT), "right": RIGHT, "left": LEFT, "holes": HOLES}


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of this test count as large."""
    monkeypatch.setattr(masks, "MAX_SMALL_MASK_ENTRIES", 0)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rule", RULES)
def test_masks_equal_those_of_transformers(rule: str, place: str, padding: str) -> None:
    queries, keys, query_start, key_start = PLACES[place]
    arguments = (2, queries, keys, query_start, key_start, RULES[rule], PADDINGS[padding])
    expected = theirs.sdpa_mask(*arguments, allow_is_causal_skip=False)
    found = build_attention_mask(*arguments)
    assert isinstance(found, DeferredMask)
    assert found.shape == expected.shape
    assert torch.equal(build_deferred_mask(found), expected)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("rule", RULES)
def test_known_mask_functions_build_no_dense_mask(rule: str, padding: str) -> None:
    found = build_attention_mask(2, LENGTH, LENGTH, 0, 0, RULES[rule], PADDINGS[padding])
    assert isinstance(found, DeferredMask)
    held = [tensor.numel() for tensor in tensors_of(found.mask)]
    assert all(numbers <= 2 * LENGTH for numbers in held)


def tensors_of(mask: foci.Mask) -> list[Tensor]:
    from foci.weights.tensors import find_tensors

    return list(find_tensors(mask))


def test_unknown_mask_functions_are_built_by_transformers() -> None:
    rule = theirs.and_masks(CAUSAL, lambda batch, head, query, key: (query - key) % 2 == 0)
    expected = theirs.sdpa_mask(1, 5, 5, mask_function=rule, allow_is_causal_skip=False, use_vmap=True)
    found = build_attention_mask(1, 5, 5, mask_function=rule, use_vmap=True)
    assert isinstance(found, DeferredMask)
    assert repr(found.mask) == "bool tensor (1, 1, 5, 5)"
    assert torch.equal(build_deferred_mask(found), expected)


def test_full_attention_needs_no_mask() -> None:
    everything = theirs.bidirectional_mask_function
    for padding in (None, PADDINGS["all"]):
        assert build_attention_mask(2, 6, 6, 0, 0, everything, padding, allow_is_bidirectional_skip=True) is None
    assert build_attention_mask(2, 6, 6, 0, 0, everything, RIGHT, allow_is_bidirectional_skip=True) is not None
    assert build_attention_mask(2, 6, 6, 0, 0, everything, None) is not None


def test_a_causal_mask_is_never_skipped() -> None:
    """A module that ignores attn_implementation would not know that it is causal."""
    found = build_attention_mask(1, 4, 4, allow_is_causal_skip=True)
    assert isinstance(found, DeferredMask)
    assert found.mask is foci.causal


def test_empty_slots_of_a_static_cache_are_dropped() -> None:
    found = build_attention_mask(1, 3, 8, torch.tensor(2), 0)
    assert isinstance(found, DeferredMask)
    assert (found.keys, found.mask) == (5, foci.causal)
    one = build_attention_mask(1, 1, 8, torch.tensor(2), 0)
    assert isinstance(one, DeferredMask)
    # For one query the end of the cache is not read: its mask is a dense row.
    assert one.keys == 8
    assert build_deferred_mask(one).tolist() == [[[[True] * 3 + [False] * 5]]]


def deferred() -> DeferredMask:
    found = build_attention_mask(2, LENGTH, LENGTH, attention_mask=RIGHT)
    assert isinstance(found, DeferredMask)
    return found


def test_a_deferred_mask_behaves_as_a_bool_tensor() -> None:
    mask, expected = deferred(), theirs.sdpa_mask(2, LENGTH, LENGTH, attention_mask=RIGHT, allow_is_causal_skip=False)
    assert (mask.dtype, mask.dim(), mask.device.type) == (torch.bool, 4, "cpu")
    assert torch.equal(mask[:, :, 1:], expected[:, :, 1:])
    assert torch.equal(~mask, ~expected)
    assert mask.to("cpu") is mask
    scores = torch.randn(2, 3, LENGTH, LENGTH)
    assert torch.equal(torch.where(mask, scores, 0.0), torch.where(expected, scores, 0.0))
    q = torch.randn(2, 3, LENGTH, 4)
    attend = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(attend(q, q, q, attn_mask=mask), attend(q, q, q, attn_mask=expected))
    assert repr(mask) == "DeferredMask(bool tensor (2, 1, 6, 6), (2, 1, 6, 6))"


def test_code_that_adds_a_deferred_mask_to_scores_gets_an_additive_mask() -> None:
    mask, scores = deferred(), torch.randn(2, 3, LENGTH, LENGTH)
    expected = theirs.eager_mask(2, LENGTH, LENGTH, attention_mask=RIGHT)
    for found in (lambda: scores + mask, lambda: mask + scores, lambda: scores.clone().add_(mask)):
        with pytest.warns(UserWarning, match="applies the mask to its own scores"):
            assert torch.equal(found(), scores + expected)
    with pytest.warns(UserWarning, match="applies the mask to its own scores"):
        assert torch.equal(scores.masked_fill(mask, -9.0), scores.masked_fill(expected.bool(), -9.0))


def test_compiling_returns_the_eager_mask() -> None:
    found = torch.compile(
        lambda padding: build_attention_mask(2, LENGTH, LENGTH, attention_mask=padding), backend="eager"
    )(RIGHT)
    assert torch.equal(found, theirs.eager_mask(2, LENGTH, LENGTH, attention_mask=RIGHT))

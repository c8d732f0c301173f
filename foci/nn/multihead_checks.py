"""The argument checks of `torch.nn.MultiheadAttention`, with its messages: code and tests written for it match them.

N batch, L queries, S keys, E width, H heads.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor


def refuse_nested(*tensors: Tensor) -> None:
    if any(tensor.is_nested for tensor in tensors):
        raise AssertionError(
            "MultiheadAttention does not support NestedTensor outside of its fast path. "
            "The fast path was not hit because foci has none: pad the sequences and give key_padding_mask."
        )


def check_mask_types(attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> None:
    for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
        if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
            raise AssertionError(f"only bool and floating types of {name} are supported")
    if attn_mask is not None and key_padding_mask is not None and attn_mask.dtype != key_padding_mask.dtype:
        warnings.warn(
            "Support for mismatched key_padding_mask and attn_mask is deprecated. Use same type for both instead.",
            stacklevel=4,
        )


def check_dimensions(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, heads: int
) -> None:
    if query.dim() not in {2, 3}:
        raise AssertionError(
            f"query should be unbatched 2D or batched 3D tensor but received {query.dim()}-D query tensor"
        )
    size = query.dim()
    kind = f"{'batched' if size == 3 else 'unbatched'} ({size}-D) `query`"
    if key.dim() != size or value.dim() != size:
        raise AssertionError(
            f"For {kind}, expected `key` and `value` to be {size}-D"
            f" but found {key.dim()}-D and {value.dim()}-D tensors respectively"
        )
    if key_padding_mask is not None and key_padding_mask.dim() != size - 1:
        raise AssertionError(
            f"For {kind}, expected `key_padding_mask` to be `None` or {size - 1}-D"
            f" but found {key_padding_mask.dim()}-D tensor instead"
        )
    if attn_mask is not None and attn_mask.dim() not in {2, 3}:
        raise AssertionError(
            f"For {kind}, expected `attn_mask` to be `None`, 2-D or 3-D but found {attn_mask.dim()}-D tensor instead"
        )
    if size == 2 and attn_mask is not None and attn_mask.dim() == 3:
        expected = (heads, query.shape[0], key.shape[0])
        if attn_mask.shape != expected:
            raise AssertionError(f"Expected `attn_mask` shape to be {expected} but got {attn_mask.shape}")


def check_causal_hint(is_causal: bool, attn_mask: Tensor | None) -> None:
    if is_causal and attn_mask is None:
        raise RuntimeError(
            "Need attn_mask if specifying the is_causal hint. "
            "You may use the Transformer module method `generate_square_subsequent_mask` to create this mask."
        )


def check_sizes(query: Tensor, key: Tensor, value: Tensor, width: int, same_width: bool) -> None:
    """Check shapes (L, N, E): PyTorch's messages use this layout, whatever the caller's."""
    if query.shape[2] != width:
        raise AssertionError(f"was expecting embedding dimension of {width}, but got {query.shape[2]}")
    if same_width and key.shape != value.shape:
        raise AssertionError(f"key shape {key.shape} does not match value shape {value.shape}")
    if key.shape[:2] != value.shape[:2]:
        raise AssertionError(f"key's sequence and batch dims {key.shape[:2]} do not match value's {value.shape[:2]}")
    if key.shape[1] != query.shape[1]:
        raise RuntimeError(f"key must have the query's batch size {query.shape[1]}, but got {key.shape[1]}")


def check_mask_sizes(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, full: tuple[int, int, int, int], extra: int
) -> None:
    """Check the shapes of the masks against `full` (N, H, L, S); one message includes the `extra` appended keys."""
    batch, heads, queries, keys = full
    if attn_mask is not None:
        expected = (queries, keys) if attn_mask.dim() == 2 else (batch * heads, queries, keys)
        if attn_mask.shape != expected:
            raise RuntimeError(
                f"The shape of the {attn_mask.dim()}D attn_mask is {attn_mask.shape}, but should be {expected}."
            )
    if key_padding_mask is None:
        return
    for dim, expected_size, added in ((0, batch, 0), (1, keys, extra)):
        if key_padding_mask.shape[dim] != expected_size:
            raise AssertionError(
                f"Expected key_padded_mask.shape[{dim}] to be {expected_size + added},"
                f" but got {key_padding_mask.shape[dim] + added}"
            )

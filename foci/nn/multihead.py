"""A drop-in replacement for `torch.nn.MultiheadAttention`.

N batch, L queries, S keys, E width, H heads, D head width: PyTorch's letters, because the shapes are PyTorch's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.call import attention
from foci.masks.base import Mask
from foci.masks.kinds import causal
from foci.nn import multihead_checks
from foci.weights.dense_attention import attention_with_matrix


class MultiheadAttention(nn.MultiheadAttention):
    """A drop-in replacement for `torch.nn.MultiheadAttention` that computes attention with foci.

    Constructor, forward, state dict and errors are PyTorch's.

    >>> import foci, torch
    >>> layer = foci.nn.MultiheadAttention(64, 4, batch_first=True)
    >>> x = torch.randn(2, 10, 64)
    >>> out, weights = layer(x, x, x)
    >>> out.shape, weights.shape
    (torch.Size([2, 10, 64]), torch.Size([2, 10, 10]))

    WARNING: masks have PyTorch's meaning here. In a bool `attn_mask` or `key_padding_mask`, True means MASKED OUT, the
    opposite of every other mask in foci. A float mask is added to the scores, as everywhere.

    Differences from PyTorch: a fully masked row gives zeros, not NaN; the returned weights are those before dropout;
    nested tensors are refused.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(L, N, E), or (N, L, E) with batch_first, or (L, E) -> output of the same shape, and weights or None.

        Args:
            query: (L, N, E), or (N, L, E) with batch_first, or (L, E).
            key, value: likewise, with S instead of L.
            key_padding_mask: (N, S) or (S,); True = this key is IGNORED; a float is added to the scores.
            need_weights: also return the weights as a dense tensor (N, L, S).
            attn_mask: (L, S) or (N H, L, S); True = MASKED OUT; a float is added to the scores.
            average_attn_weights: average the weights over the heads; False: (N, H, L, S).
            is_causal: a hint that `attn_mask`, which must be given, is the causal mask.
        """
        multihead_checks.refuse_nested(query, key, value)
        multihead_checks.check_mask_types(attn_mask, key_padding_mask)
        multihead_checks.check_dimensions(query, key, value, attn_mask, key_padding_mask, self.num_heads)
        multihead_checks.check_causal_hint(is_causal, attn_mask)
        multihead_checks.check_sizes(
            self._sequence_first(query),
            self._sequence_first(key),
            self._sequence_first(value),
            self.embed_dim,
            self._qkv_same_embed_dim,
        )
        q, k, v = (self._split_heads(x) for x in self._project(query, key, value))
        full = (*q.shape[:3], k.shape[2])
        k, v = self._append_extra_keys(k, v)
        if is_causal and key_padding_mask is None and not need_weights:
            # PyTorch follows the hint only in this case. In the others a correct hint changes nothing.
            mask: Mask | Tensor | None = causal.at(0)
            bias = None
        else:
            mask, bias = merge_torch_masks(attn_mask, key_padding_mask, full, k.shape[2] - full[3])
        out, weights = self._attend(q, k, v, mask, bias, need_weights, average_attn_weights)
        return self._project_output(out, weights, batched=query.dim() == 3)

    def _sequence_first(self, x: Tensor) -> Tensor:
        """(L, N, E) from any accepted layout."""
        return x.unsqueeze(1) if x.dim() == 2 else x.transpose(0, 1) if self.batch_first else x

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Project each to the width E, in the caller's layout; one matrix product for identical inputs."""
        weight, bias, width = self.in_proj_weight, self.in_proj_bias, self.embed_dim
        if self._qkv_same_embed_dim and query is key and key is value:
            return F.linear(query, weight, bias).chunk(3, dim=-1)
        if self._qkv_same_embed_dim and key is value:
            first, rest = weight.split([width, 2 * width])
            biases = (None, None) if bias is None else bias.split([width, 2 * width])
            return F.linear(query, first, biases[0]), *F.linear(key, rest, biases[1]).chunk(2, dim=-1)
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = weight.chunk(3) if self._qkv_same_embed_dim else separate
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return tuple(F.linear(*each) for each in zip((query, key, value), weights, biases, strict=True))

    def _split_heads(self, x: Tensor) -> Tensor:
        """(N, H, L, D), a view."""
        x = x.unsqueeze(0) if x.dim() == 2 else x if self.batch_first else x.transpose(0, 1)
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _append_extra_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the learned key and value (add_bias_kv) and those of zeros (add_zero_attn)."""
        keys, values = [k], [v]
        if self.bias_k is not None and self.bias_v is not None:
            keys.append(self.bias_k.view(1, self.num_heads, 1, -1).expand(len(k), -1, -1, -1))
            values.append(self.bias_v.view(1, self.num_heads, 1, -1).expand(len(v), -1, -1, -1))
        if self.add_zero_attn:
            keys.append(k.new_zeros(*k.shape[:2], 1, k.shape[3]))
            values.append(v.new_zeros(*v.shape[:2], 1, v.shape[3]))
        return (k, v) if len(keys) == 1 else (torch.cat(keys, dim=2), torch.cat(values, dim=2))

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | Tensor | None,
        bias: Tensor | None,
        need_weights: bool,
        average: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The output (N, H, L, D), and the weights or None."""
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            out, weights = attention_with_matrix(q, k, v, mask=mask, bias=bias, dropout=dropout, average=average)
            return out, weights.to(q.dtype)
        out = attention(q, k, v, mask=mask, bias=bias, dropout=dropout)
        assert isinstance(out, Tensor)
        return out, None

    def _project_output(self, out: Tensor, weights: Tensor | None, batched: bool) -> tuple[Tensor, Tensor | None]:
        """Apply the output projection, in the caller's layout."""
        if not batched:
            merged = out.squeeze(0).transpose(0, 1).flatten(1)
            return self.out_proj(merged), None if weights is None else weights.squeeze(0)
        ordered = out.transpose(1, 2) if self.batch_first else out.permute(2, 0, 1, 3)
        return self.out_proj(ordered.flatten(2)), weights


def merge_torch_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, full: tuple[int, int, int, int], extra: int
) -> tuple[Tensor | None, Tensor | None]:
    """Merge PyTorch's two masks into one foci mask or one bias; `extra` keys are visible to every query."""
    batch, _, queries, keys = full
    if key_padding_mask is not None and key_padding_mask.dim() == 1:
        key_padding_mask = key_padding_mask.unsqueeze(0)
    multihead_checks.check_mask_sizes(attn_mask, key_padding_mask, full, extra)
    masks = []
    if attn_mask is not None:
        masks.append(attn_mask.view((1, 1, queries, keys) if attn_mask.dim() == 2 else full))
    if key_padding_mask is not None:
        masks.append(key_padding_mask.view(batch, 1, 1, keys))
    if not masks:
        return None, None
    if all(mask.dtype == torch.bool for mask in masks):
        # True means masked out in PyTorch and visible in foci.
        visible = ~masks[0] if len(masks) == 1 else ~(masks[0] | masks[1])
        return F.pad(visible, (0, extra), value=True) if extra else visible, None
    floats = [torch.where(mask, -torch.inf, 0.0) if mask.dtype == torch.bool else mask for mask in masks]
    bias = floats[0] if len(floats) == 1 else floats[0] + floats[1]
    return None, F.pad(bias, (0, extra)) if extra else bias

"""PyTorch's fused attention kernel for the CPU, with a log-sum-exp that gradients pass through.

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.arguments import Call
from foci.backends.sdpa.padding import append_lse_column, needs_backward, pad_to_width

cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
# The binding takes less time than the operator: for small calls, a quarter.
cpu_flash_binding = getattr(torch, "_scaled_dot_product_flash_attention_for_cpu", cpu_flash)
cpu_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def run(call: Call, scale: float, alignment: str, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    q, k, v = call.q, call.k, call.v
    even = q.shape[-1] == v.shape[-1] and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    if even and mask is None and alignment != "bottom_right" and not call.needs_lse:
        # Not the comparison itself: while compiling for any number of heads, it is not a bool.
        grouped = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210
        out = F.scaled_dot_product_attention(q, k, v, is_causal=alignment == "square", scale=scale, enable_gqa=grouped)
        return out, None
    width = max(q.shape[-1], v.shape[-1])
    q, k, v = (pad_to_width(t, width) for t in (q, k, v))
    compute = CpuFlashAttention.apply if needs_backward(q, k, v) else flash_forward
    out, lse = compute(q, k, v, mask, split_causal_keys(alignment, q, k), scale)
    return out if width == call.v.shape[-1] else out[..., : call.v.shape[-1]], lse


def run_plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of a call of equal widths, without gradients."""
    whole: tuple[Tensor, Tensor] = cpu_flash_binding(q, k, v, 0.0, causal, scale=q.shape[3] ** -0.5)
    return whole


def split_causal_keys(alignment: str, q: Tensor, k: Tensor) -> tuple[KeySlice, ...]:
    """Splits the keys into slices on which the kernel's causal flag is right."""
    keys = k.shape[2]
    if alignment != "bottom_right":
        return (KeySlice(slice(0, keys), alignment == "square"),)
    seen = keys - q.shape[2]
    return KeySlice(slice(0, seen), False), KeySlice(slice(seen, keys), True)


class KeySlice(NamedTuple):
    """Some of the keys, and whether attention to them is causal."""

    keys: slice
    causal: bool


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, slices: tuple[KeySlice, ...], scale: float
) -> tuple[Tensor, Tensor]:
    """Runs the fused kernel on each slice of the keys, without gradients."""
    if len(slices) == 1:
        whole: tuple[Tensor, Tensor] = cpu_flash(q, k, v, 0.0, slices[0].causal, attn_mask=mask, scale=scale)
        return whole
    results = [
        cpu_flash(q, k[:, :, keys], v[:, :, keys], 0.0, causal, attn_mask=mask, scale=scale) for keys, causal in slices
    ]
    return merge_key_slices(results)


class CpuFlashAttention(torch.autograd.Function):
    """The same with gradients through the output and the log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, slices: tuple[KeySlice, ...], scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = flash_forward(q, k, v, mask, slices, scale)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.slices, ctx.scale = slices, scale
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, lse = ctx.saved_tensors
        if d_out is None and d_lse is None:
            return (None,) * 6
        d_out = torch.zeros_like(out) if d_out is None else d_out
        width = q.shape[-1]
        if d_lse is not None:
            q, k, v, out, d_out = append_lse_column(q, k, v, out, d_out, d_lse)
        d_out = d_out.contiguous()
        # Given the output and the log-sum-exp over all keys, each slice yields its part of the gradient.
        grads = [
            cpu_flash_backward(
                d_out, q, k[:, :, keys], v[:, :, keys], out, lse, 0.0, causal, attn_mask=mask, scale=ctx.scale
            )
            for keys, causal in ctx.slices
        ]
        d_q = grads[0][0] if len(grads) == 1 else grads[0][0] + grads[1][0]
        d_k, d_v = (torch.cat([g[i] for g in grads], dim=2) if len(grads) > 1 else grads[0][i] for i in (1, 2))
        return (*(g[..., :width] for g in (d_q, d_k, d_v)), None, None, None)


def merge_key_slices(results: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over all keys from attention over two slices; every query sees some keys of both."""
    (first, first_lse), (second, second_lse) = results
    lse = torch.logaddexp(first_lse, second_lse)
    shares = (torch.exp(part - lse).unsqueeze(-1) for part in (first_lse, second_lse))
    out = sum(part * share for part, share in zip((first, second), shares, strict=True))
    assert isinstance(out, Tensor)
    return out.to(first.dtype), lse

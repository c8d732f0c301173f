"""PyTorch's fused attention kernels for CUDA: cuDNN on Hopper and later, else flash; efficient for float32 and for
dense masks. Each is called by its own operator.

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from foci.arguments import HALF_DTYPES, Call
from foci.backends.sdpa.padding import append_lse_column, needs_backward, pad_to_width
from foci.runtime.device import has_cudnn, is_hopper_or_later

aten = torch.ops.aten
# PyTorch's binding of the operator takes less host time.
cudnn_attention = getattr(torch, "_scaled_dot_product_cudnn_attention", aten._scaled_dot_product_cudnn_attention)


def is_default_kernel_fastest(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Whether PyTorch itself would choose the fastest kernel for this call."""
    if q.dtype not in HALF_DTYPES or q.shape[2] == k.shape[2] == 1 or not is_hopper_or_later(q.device.index or 0):
        return False
    return torch._fused_sdp_choice(q, k, v, None, 0.0, causal) == SDPBackend.CUDNN_ATTENTION.value


def run_cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp (B, H, Tq) of a call that `is_default_kernel_fastest` accepts."""
    out, lse = cudnn_attention(q, k, v, None, True, 0.0, causal, False)[:2]
    return out, lse.squeeze(-1) if lse.dim() == 4 else lse


def choose_kernel(call: Call, alignment: str, masked: bool) -> str | None:
    """Returns the name of the fastest kernel that supports the call, or None."""
    width = max(call.q.shape[-1], call.v.shape[-1])
    if call.q.dtype == torch.float64 or width > max_width(call):
        return None
    if call.q.dtype == torch.float32 or masked:
        return None if alignment == "bottom_right" else "efficient"
    # cuDNN fails on one query with one key.
    single = call.q.shape[2] == call.k.shape[2] == 1
    # The gradients of cuDNN differ from run to run.
    reproducible = not (call.needs_grad and torch.are_deterministic_algorithms_enabled())
    supported = alignment != "bottom_right" and width <= 128 and not single and reproducible
    return "cudnn" if supported and is_hopper_or_later(call.q.device.index or 0) and has_cudnn() else "flash"


def max_width(call: Call) -> int:
    """The largest supported width; the gradient of the log-sum-exp needs one column more."""
    return 248 if call.needs_lse and call.needs_grad else 256


def kernel_refusals(call: Call, alignment: str, masked: bool) -> list[str]:
    if call.q.dtype == torch.float64:
        return ["there is no fused kernel for float64 on CUDA"]
    width = max(call.q.shape[-1], call.v.shape[-1])
    if width > max_width(call):
        return [f"the fused kernels support widths up to {max_width(call)} for this call, got {width}"]
    if choose_kernel(call, alignment, masked) is None:
        return ["the fused kernels do not support causal with unequal lengths in float32 or with a dense mask"]
    return []


def run(call: Call, scale: float, alignment: str, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    name = choose_kernel(call, alignment, mask is not None)
    assert name is not None
    width = -(-max(call.q.shape[-1], call.v.shape[-1]) // 8) * 8
    q, k, v = (pad_to_width(t, width) for t in (call.q, call.k, call.v))
    if name == "efficient":
        k, v = (repeat_key_heads(t, call.group) for t in (k, v))
        mask = None if mask is None else expand_mask(mask, call)
    arguments = q, k, v, mask, name, scale, alignment != "unmasked", call.dropout
    if call.needs_lse and needs_backward(q, k, v):
        out, lse = FusedAttentionWithLse.apply(*arguments)  # type: ignore[no-untyped-call]
    else:
        out, lse = run_forward(*arguments, call.needs_lse)[:2]
        may_mask_rows = mask is not None or (alignment != "unmasked" and q.shape[2] > k.shape[2])
        lse = normalize_lse(lse, q, may_mask_rows) if call.needs_lse else None
    return out[..., : call.v.shape[-1]] if width != call.v.shape[-1] else out, lse


def repeat_key_heads(x: Tensor, group: int) -> Tensor:
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def expand_mask(mask: Tensor, call: Call) -> Tensor:
    """Expands the mask to all heads and rows; copies it if the kernel would refuse its strides."""
    keys = call.k.shape[2]
    mask = mask.expand(*mask.shape[:3], keys)
    return align_rows(mask).expand(*call.q.shape[:3], keys)


def align_rows(mask: Tensor) -> Tensor:
    """The mask, or a copy whose rows start at multiples of 16 bytes: padding by at least one entry always copies."""
    # A compiler does not know where a tensor starts in memory.
    if not torch.compiler.is_compiling() and is_aligned(mask):
        return mask
    keys = mask.shape[3]
    return F.pad(mask, (0, 16 - keys % 16))[..., :keys]


def is_aligned(mask: Tensor) -> bool:
    """Whether every row starts at a multiple of 16 bytes and is contiguous, as the efficient kernel requires."""
    offsets = [
        mask.storage_offset(),
        *(stride for size, stride in zip(mask.shape[:3], mask.stride()[:3], strict=True) if size > 1),
    ]
    return mask.stride(3) == 1 and all(offset * mask.element_size() % 16 == 0 for offset in offsets)


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    name: str,
    scale: float,
    causal: bool,
    dropout: float,
    lse: bool,
) -> Any:
    if name == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, lse or needs_backward(q, k, v), dropout, causal, False, scale=scale
        )
    if name == "flash":
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, False, scale=scale)
    return aten._scaled_dot_product_efficient_attention(
        q, k, v, mask, lse or needs_backward(q, k, v), dropout, causal, scale=scale
    )


class FusedAttentionWithLse(torch.autograd.Function):
    """A fused kernel with gradients through the log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        name: str,
        scale: float,
        causal: bool,
        dropout: float,
    ) -> tuple[Tensor, Tensor]:
        results = run_forward(q, k, v, mask, name, scale, causal, dropout, True)
        out, raw_lse = results[0], results[1]
        ctx.save_for_backward(q, k, v, mask, out, raw_lse)
        ctx.rest, ctx.name, ctx.scale, ctx.causal, ctx.dropout = results[2:], name, scale, causal, dropout
        ctx.set_materialize_grads(False)
        return out, normalize_lse(raw_lse, q, may_mask_rows=True)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, lse = ctx.saved_tensors
        if d_out is None and d_lse is None:
            return (None,) * 8
        d_out = torch.zeros_like(out) if d_out is None else d_out
        width, dtype, name = q.shape[-1], q.dtype, ctx.name
        if d_lse is not None:
            q, k, v, out, d_out = append_lse_column(q, k, v, out, d_out, d_lse)
            name = "flash" if name == "cudnn" else name
            if name == "efficient":
                # In half precision this kernel drops the column: measured gradients were off by their own size.
                q, k, v, out, d_out = (t.float() for t in (q, k, v, out, d_out))
                mask = None if mask is None else align_rows(mask.float())
        if name == "flash":
            lse = lse.squeeze(-1).contiguous() if lse.dim() == 4 else lse
        grads = run_backward(name, ctx, d_out, q, k, v, out, lse, mask)
        grads = [g[..., :width].to(dtype) for g in grads[:3]]
        return (*grads, None, None, None, None, None)


def run_backward(
    name: str, ctx: Any, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None
) -> Any:
    queries, keys, rest = q.shape[2], k.shape[2], ctx.rest
    if name == "cudnn":
        cum_q, cum_k, max_q, max_k, seed, offset, _ = rest
        return aten._scaled_dot_product_cudnn_attention_backward(
            d_out,
            q,
            k,
            v,
            out,
            lse,
            seed,
            offset,
            mask,
            cum_q,
            cum_k,
            max_q,
            max_k,
            ctx.dropout,
            ctx.causal,
            scale=ctx.scale,
        )
    if name == "flash":
        seed = rest[4] if ctx.name == "flash" else torch.zeros(2, dtype=torch.uint64, device=q.device)
        offset = rest[5] if ctx.name == "flash" else torch.zeros((), dtype=torch.uint64, device=q.device)
        return aten._scaled_dot_product_flash_attention_backward(
            d_out, q, k, v, out, lse, None, None, queries, keys, ctx.dropout, ctx.causal, seed, offset, scale=ctx.scale
        )
    seed, offset = rest
    return aten._scaled_dot_product_efficient_attention_backward(
        d_out,
        q,
        k,
        v,
        mask,
        out,
        lse,
        seed,
        offset,
        ctx.dropout,
        [True, True, True, False],
        ctx.causal,
        scale=ctx.scale,
    )


def normalize_lse(lse: Tensor, q: Tensor, may_mask_rows: bool) -> Tensor:
    """(B, H, Tq): cuDNN adds an axis, efficient rounds the length up, flash marks fully masked rows by +inf.

    If no row can be fully masked, as in most calls, +inf is not replaced: this saves two kernel launches.
    """
    lse = lse.squeeze(-1) if lse.dim() == 4 else lse
    if not may_mask_rows and lse.shape[2] == q.shape[2]:
        return lse
    lse = lse[..., : q.shape[2]]
    return torch.where(lse == torch.inf, -torch.inf, lse)

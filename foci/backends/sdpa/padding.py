"""Tensors as the fused kernels of every device take them: padded widths, and a column for the gradient of the lse."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def needs_backward(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def pad_to_width(x: Tensor, width: int) -> Tensor:
    """Pads the last dimension with zeros, which add nothing to a dot product, and makes rows contiguous."""
    x = F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
    return x if x.stride(-1) == 1 else x.contiguous()


def append_lse_column(q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor, ...]:
    """Appends a column so that a backward kernel that takes only d_out adds the gradient of the log-sum-exp.

    The kernel computes dS = P (d_out·v - d_out·out). A column with 1 in v, 0 in out and d_lse in d_out makes this
    P (d_out·v + d_lse - d_out·out), the full derivative.
    """
    spare = -(-(q.shape[-1] + 1) // 8) * 8 - q.shape[-1]
    q, k, v, out, d_out = (F.pad(t, (0, spare)) for t in (q, k, v, out, d_out))
    v[..., -spare] = 1.0
    d_out[..., -spare] = d_lse
    return q, k, v, out, d_out

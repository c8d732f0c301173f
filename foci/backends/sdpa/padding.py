"""What the fused kernels of every device want done to their tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def needs_backward(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def pad_width(x: Tensor, width: int) -> Tensor:
    """Zeros up to the width: they add nothing to a dot product. The kernels read rows as contiguous."""
    x = F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
    return x if x.stride(-1) == 1 else x.contiguous()


def append_lse_column(q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor, ...]:
    """Lets a kernel that knows only d_out add the gradient of the log-sum-exp.

    It computes dS = P (d_out·v - d_out·out). One more column, with 1 in v, 0 in out and d_lse in d_out, makes that
    P (d_out·v + d_lse - d_out·out), which is the whole derivative.
    """
    spare = -(-(q.shape[-1] + 1) // 8) * 8 - q.shape[-1]
    q, k, v, out, d_out = (F.pad(t, (0, spare)) for t in (q, k, v, out, d_out))
    v[..., -spare] = 1.0
    d_out[..., -spare] = d_lse
    return q, k, v, out, d_out

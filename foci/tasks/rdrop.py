"""The R-Drop loss: two passes with different dropout should agree.

In plain operations it passes over all logits about forty times, which takes as long as a small model itself; on a GPU
one kernel reads them once.

B sequences, T tokens, V vocabulary size.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# A larger vocabulary does not fit into the registers of one program.
MAX_KERNEL_VOCABULARY = 2**15
RDROP_WARPS = 16


def compute_rdrop_loss(logits: Tensor, targets: Tensor, *, ignore: int, smoothing: float, agreement: float) -> Tensor:
    """Sums over all targets the mean cross-entropy of both passes and the weighted divergence between them.

    Args:
        logits: (2 B, T, V), the first pass over all sequences, then the second.
        targets: (B, T), the target tokens.
        ignore: target value that is ignored.
        smoothing: label smoothing.
        agreement: weight of the mean of both KL divergences.
    """
    if logits.is_cuda and logits.shape[-1] <= MAX_KERNEL_VOCABULARY and find_spec("triton") is not None:
        return RDropFunction.apply(logits, targets, ignore, smoothing, agreement / 4)  # type: ignore[no-any-return, no-untyped-call]
    logits = logits.float()
    cross_entropy = F.cross_entropy(
        logits.flatten(0, 1),
        torch.cat([targets, targets]).flatten(),
        ignore_index=ignore,
        reduction="sum",
        label_smoothing=smoothing,
    )
    first, second = logits.chunk(2)
    return cross_entropy / 2 + agreement / 4 * symmetric_kl(first, second, targets != ignore)


def symmetric_kl(first: Tensor, second: Tensor, counts: Tensor) -> Tensor:
    """Sums KL(p, q) + KL(q, p) of two sets of logits (..., V) over the positions where `counts` (...) is True."""
    p, q = first.log_softmax(-1), second.log_softmax(-1)
    divergence = ((p.exp() - q.exp()) * (p - q)).sum(-1)
    return torch.where(counts, divergence, 0.0).sum()


class RDropFunction(torch.autograd.Function):
    """Computes the loss and its gradient in one kernel; the backward only scales the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore: int, smoothing: float, agreement: float) -> Tensor:
        import triton

        from foci.kernels.rdrop import rdrop_loss

        logits, targets = logits.contiguous(), targets.contiguous()
        count, words = targets.numel(), logits.shape[-1]
        losses = torch.empty(count, dtype=torch.float32, device=logits.device)
        gradient = torch.empty_like(logits)
        rdrop_loss[(count,)](
            logits, targets, losses, gradient, count, words, ignore, smoothing, agreement,
            WORDS=triton.next_power_of_2(words), num_warps=RDROP_WARPS,
        )  # fmt: skip
        ctx.save_for_backward(gradient)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * d_loss, None, None, None, None

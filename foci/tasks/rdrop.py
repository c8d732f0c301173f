"""The loss of two passes with different dropout that should agree (R-Drop).

Written in plain operations it goes over all logits some forty times, which takes as long as a small model itself; on a
GPU one kernel reads them once.

B sequences, T tokens, V words.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# More words than this do not fit into the registers of one program.
MOST_WORDS = 2**15
WARPS = 16


def agreeing_loss(logits: Tensor, targets: Tensor, *, ignore: int, smoothing: float, agreement: float) -> Tensor:
    """Summed over all targets: the cross-entropy, the mean of both passes, and how far the passes are from each other.

    Args:
        logits: (2 B, T, V), the first pass over all sequences, then the second.
        targets: (B, T), the words that should come.
        ignore: targets that do not count.
        smoothing: the share of each target that is spread over all words.
        agreement: what the mean of the divergence one way and the other counts, beside the cross-entropy.
    """
    if logits.is_cuda and logits.shape[-1] <= MOST_WORDS and find_spec("triton") is not None:
        return TwoPasses.apply(logits, targets, ignore, smoothing, agreement / 4)  # type: ignore[no-any-return, no-untyped-call]
    logits = logits.float()
    surprise = F.cross_entropy(
        logits.flatten(0, 1),
        torch.cat([targets, targets]).flatten(),
        ignore_index=ignore,
        reduction="sum",
        label_smoothing=smoothing,
    )
    first, second = logits.chunk(2)
    return surprise / 2 + agreement / 4 * disagreement(first, second, targets != ignore)


def disagreement(first: Tensor, second: Tensor, counts: Tensor) -> Tensor:
    """The Kullback-Leibler divergence both ways of two sets of logits (..., V), summed over what counts (...)."""
    p, q = first.log_softmax(-1), second.log_softmax(-1)
    apart = ((p.exp() - q.exp()) * (p - q)).sum(-1)
    return torch.where(counts, apart, 0.0).sum()


class TwoPasses(torch.autograd.Function):
    """The loss, and in the same pass its slopes: the backward only multiplies them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore: int, smoothing: float, agreement: float) -> Tensor:
        import triton

        from foci.kernels.rdrop import rdrop_loss

        logits, targets = logits.contiguous(), targets.contiguous()
        count, words = targets.numel(), logits.shape[-1]
        losses = torch.empty(count, dtype=torch.float32, device=logits.device)
        slopes = torch.empty_like(logits)
        rdrop_loss[(count,)](
            logits, targets, losses, slopes, count, words, ignore, smoothing, agreement,
            WORDS=triton.next_power_of_2(words), num_warps=WARPS,
        )  # fmt: skip
        ctx.save_for_backward(slopes)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return slopes * d_loss, None, None, None, None

"""Cross-entropy of a language model's head without storing all logits: computed in chunks, with the gradient.

The logits of a language model are its largest tensor: for 32 x 1,024 tokens and a vocabulary of 50,304 they take 6 GiB
in float32, and as much again for their gradient. Here only one chunk of them exists at a time.

N tokens, D width, V vocabulary size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def token_loss(
    states: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore: int = -100,
    smoothing: float = 0.0,
    chunk: int = 4096,
) -> Tensor:
    """Compute the mean cross-entropy of the logits `states @ weight.T`, equal to `F.cross_entropy`, in little memory.

    >>> states, weight = torch.randn(2, 5, 16, requires_grad=True), torch.randn(100, 16, requires_grad=True)
    >>> targets = torch.randint(100, (2, 5))
    >>> loss = foci.nn.token_loss(states, weight, targets)
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy((states @ weight.T).mT, targets))
    True

    Args:
        states: (..., D), the input of the head.
        weight: (V, D), the weight of the head; for a tied head, the embedding.
        targets: (...), the tokens to predict.
        ignore: the target value that is excluded. If all targets are excluded, the loss is 0.
        smoothing: label smoothing, the share of each target that is spread over the vocabulary.
        chunk: the number of tokens whose logits exist at a time.
    """
    if states.shape[:-1] != targets.shape or weight.shape[1:] != states.shape[-1:]:
        shapes = f"{tuple(states.shape)}, {tuple(weight.shape)}, {tuple(targets.shape)}"
        raise ValueError(f"states, weight and targets must have shapes (..., D), (V, D) and (...), got {shapes}")
    if not 0.0 <= smoothing < 1.0:
        raise ValueError(f"smoothing must be at least 0 and below 1, got {smoothing!r}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk!r}")
    if torch.is_autocast_enabled(states.device.type):
        dtype = torch.get_autocast_dtype(states.device.type)
        states, weight = states.to(dtype), weight.to(dtype)
    gradients = torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad)
    with torch.autocast(states.device.type, enabled=False):
        return TokenLossFunction.apply(  # type: ignore[no-any-return, no-untyped-call]
            states.flatten(0, -2), weight, targets.flatten(), ignore, smoothing, chunk, gradients
        )


class TokenLossFunction(torch.autograd.Function):
    """Computes the loss and its gradients in one pass; the backward only scales the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        targets: Tensor,
        ignore: int,
        smoothing: float,
        chunk: int,
        gradients: bool,
    ) -> Tensor:
        wide = torch.promote_types(states.dtype, torch.float32)
        real = targets != ignore
        tokens = torch.where(real, targets, 0)
        loss = torch.zeros((), dtype=wide, device=states.device)
        d_weight = torch.zeros_like(weight, dtype=wide) if gradients else None
        d_states = []
        chunks = zip(states.split(chunk), tokens.split(chunk), real.split(chunk), strict=True)
        for chunk_states, chunk_tokens, chunk_real in chunks:
            logits = (chunk_states @ weight.mT).to(wide)
            chunk_loss, d_logits = compute_chunk_loss(logits, chunk_tokens, chunk_real, smoothing)
            loss = loss + chunk_loss
            if d_weight is not None:
                d_logits = d_logits.to(states.dtype)
                d_states.append(d_logits @ weight)
                d_weight = d_weight + d_logits.mT @ chunk_states
        count = real.sum().clamp(min=1).to(wide)
        if d_weight is not None:
            # Divided by count only in the backward: in float16 a single token's share would underflow before the
            # incoming gradient, with its loss scale, is known.
            ctx.save_for_backward(torch.cat(d_states), d_weight, count)
        ctx.dtype = weight.dtype
        return loss / count

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        d_states, d_weight, count = ctx.saved_tensors
        share = d_loss / count
        grads = (d_states.to(share.dtype) * share).to(d_states.dtype), (d_weight * share).to(ctx.dtype)
        return *grads, None, None, None, None, None


def compute_chunk_loss(logits: Tensor, tokens: Tensor, real: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The summed loss of the tokens that are not ignored, and the gradient of their logits (n, V)."""
    lse = logits.logsumexp(-1)
    target_logits = logits.gather(1, tokens[:, None]).squeeze(1)
    losses = lse - (1.0 - smoothing) * target_logits - smoothing * logits.mean(-1)
    is_target = torch.arange(logits.shape[-1], device=logits.device) == tokens[:, None]
    uniform = smoothing / logits.shape[-1]
    d_logits = torch.exp(logits - lse[:, None]) - uniform - torch.where(is_target, 1.0 - smoothing, 0.0)
    return torch.where(real, losses, 0.0).sum(), torch.where(real[:, None], d_logits, 0.0)

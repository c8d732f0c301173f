"""The loss of a head without its logits: computed piece by piece, with the gradient, and forgotten.

The logits of a language model are its largest tensor: 32 x 1,024 tokens and 50,304 words take 6 GiB in float32, and as
much again for their gradient. Here only one piece of them exists at a time.

N tokens, D width, V words.
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
    """The mean cross-entropy of `states @ weight.T` with the targets, as `F.cross_entropy` gives it.

    >>> states, weight = torch.randn(2, 5, 16, requires_grad=True), torch.randn(100, 16, requires_grad=True)
    >>> targets = torch.randint(100, (2, 5))
    >>> loss = foci.nn.token_loss(states, weight, targets)
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy((states @ weight.T).mT, targets))
    True

    Args:
        states: (..., D), what a model gives before its head.
        weight: (V, D), of the head; of a tied head the embedding.
        targets: (...), the words that should come next.
        ignore: targets that do not count. Where none counts, the loss is 0.
        smoothing: the share of each target that is spread over all words.
        chunk: how many tokens have logits at a time.
    """
    if states.shape[:-1] != targets.shape or weight.shape[1:] != states.shape[-1:]:
        shapes = f"{tuple(states.shape)}, {tuple(weight.shape)}, {tuple(targets.shape)}"
        raise ValueError(f"token_loss takes states (..., D), weight (V, D) and targets (...), but got {shapes}")
    if not 0.0 <= smoothing < 1.0 or chunk < 1:
        raise ValueError(f"token_loss takes 0 <= smoothing < 1 and chunk >= 1, but got {smoothing!r} and {chunk!r}")
    if torch.is_autocast_enabled(states.device.type):
        dtype = torch.get_autocast_dtype(states.device.type)
        states, weight = states.to(dtype), weight.to(dtype)
    gradients = torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad)
    with torch.autocast(states.device.type, enabled=False):
        return TokenLossFunction.apply(  # type: ignore[no-any-return, no-untyped-call]
            states.flatten(0, -2), weight, targets.flatten(), ignore, smoothing, chunk, gradients
        )


class TokenLossFunction(torch.autograd.Function):
    """The loss, and in the same pass its gradients: the backward only multiplies them."""

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
        words = torch.where(real, targets, 0)
        loss = torch.zeros((), dtype=wide, device=states.device)
        d_weight = torch.zeros_like(weight, dtype=wide) if gradients else None
        d_states = []
        for some, word, counts in zip(states.split(chunk), words.split(chunk), real.split(chunk), strict=True):
            part, slope = compute_chunk_loss((some @ weight.mT).to(wide), word, counts, smoothing)
            loss = loss + part
            if d_weight is not None:
                slope = slope.to(states.dtype)
                d_states.append(slope @ weight)
                d_weight = d_weight + slope.mT @ some
        count = real.sum().clamp(min=1).to(wide)
        if d_weight is not None:
            # Not divided yet: in float16 a single token's share would vanish before the loss's own scale comes.
            ctx.save_for_backward(torch.cat(d_states), d_weight, count)
        ctx.dtype = weight.dtype
        return loss / count

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        d_states, d_weight, count = ctx.saved_tensors
        share = d_loss / count
        grads = (d_states.to(share.dtype) * share).to(d_states.dtype), (d_weight * share).to(ctx.dtype)
        return *grads, None, None, None, None, None


def compute_chunk_loss(logits: Tensor, words: Tensor, counts: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The summed loss of the tokens that count, and the gradient of their logits (n, V)."""
    lse = logits.logsumexp(-1)
    right = logits.gather(1, words[:, None]).squeeze(1)
    losses = lse - (1.0 - smoothing) * right - smoothing * logits.mean(-1)
    spread = smoothing / logits.shape[-1]
    hit = torch.arange(logits.shape[-1], device=logits.device) == words[:, None]
    slope = torch.exp(logits - lse[:, None]) - spread - torch.where(hit, 1.0 - smoothing, 0.0)
    return torch.where(counts, losses, 0.0).sum(), torch.where(counts[:, None], slope, 0.0)

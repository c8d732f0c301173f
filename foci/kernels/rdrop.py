"""The R-Drop loss of two passes over the same tokens, and its gradient, in one read and one write of the logits.

A program takes one token: its logits a and b of the two passes, and their softmax p and q over V words. With
difference = log p - log q, the symmetric divergence is Σ (p - q) difference, and its gradient with respect to a is
p (difference - Σ p difference) + p - q.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

# The logit of padding: finite, because the difference of infinities is NaN.
PADDING_LOGIT = tl.constexpr(-1e30)


@triton.jit
def log_sum_exp(x, inside):
    """log Σ exp over the vocabulary."""
    top = tl.max(x, 0)
    return top + tl.log(tl.sum(tl.where(inside, tl.exp(x - top), 0.0), 0))


@triton.jit
def smoothed_cross_entropy(x, lse, is_target, inside, V, smoothing):
    """Cross-entropy with label smoothing."""
    right = tl.sum(tl.where(is_target, x, 0.0), 0)
    mean = tl.sum(tl.where(inside, x, 0.0), 0) / V
    return lse - (1.0 - smoothing) * right - smoothing * mean


@triton.jit
def rdrop_loss(logits, targets, losses, gradients, N, V, ignore, smoothing, agreement, WORDS: tl.constexpr):
    """logits (2, N, V), targets (N,) -> losses (N,), gradients (2, N, V); 0 for ignored targets."""
    token = tl.program_id(0).to(tl.int64)
    words = tl.arange(0, WORDS)
    inside = words < V
    first = token * V + words
    second = first + N.to(tl.int64) * V
    target = tl.load(targets + token)
    if target == ignore:
        tl.store(losses + token, 0.0)
        zeros = tl.zeros((WORDS,), gradients.dtype.element_ty)
        tl.store(gradients + first, zeros, mask=inside)
        tl.store(gradients + second, zeros, mask=inside)
    else:
        a = tl.load(logits + first, mask=inside, other=PADDING_LOGIT).to(tl.float32)
        b = tl.load(logits + second, mask=inside, other=PADDING_LOGIT).to(tl.float32)
        a_lse = log_sum_exp(a, inside)
        b_lse = log_sum_exp(b, inside)
        p = tl.where(inside, tl.exp(a - a_lse), 0.0)
        q = tl.where(inside, tl.exp(b - b_lse), 0.0)
        difference = tl.where(inside, (a - a_lse) - (b - b_lse), 0.0)
        p_divergence = tl.sum(p * difference, 0)
        q_divergence = tl.sum(q * difference, 0)
        is_target = words == target
        total = smoothed_cross_entropy(a, a_lse, is_target, inside, V, smoothing)
        total += smoothed_cross_entropy(b, b_lse, is_target, inside, V, smoothing)
        tl.store(losses + token, total / 2 + agreement * (p_divergence - q_divergence))
        target_share = tl.where(is_target, 1.0 - smoothing, 0.0) + smoothing / V
        d_first = (p - target_share) / 2 + agreement * (p * (difference - p_divergence) + p - q)
        d_second = (q - target_share) / 2 + agreement * (q - p - q * (difference - q_divergence))
        tl.store(gradients + first, d_first.to(gradients.dtype.element_ty), mask=inside)
        tl.store(gradients + second, d_second.to(gradients.dtype.element_ty), mask=inside)

"""The loss of two passes over the same tokens, and its slopes, with each logit read once and each slope written once.

A program takes a token: its logits in both passes, a and b, with the shares p and q that they give the V words. With
apart = log p - log q, the divergence both ways is Σ (p - q) apart, and its slope in a is p (apart - Σ p apart) + p - q.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

# Stands where there is no word: finite, because differences of infinities are no numbers.
PADDING_LOGIT = tl.constexpr(-1e30)


@triton.jit
def log_sum_exp(x, inside):
    """log Σ exp over the words."""
    top = tl.max(x, 0)
    return top + tl.log(tl.sum(tl.where(inside, tl.exp(x - top), 0.0), 0))


@triton.jit
def smoothed_cross_entropy(x, lse, hit, inside, V, smoothing):
    """Cross-entropy with a target that is partly spread over all words."""
    right = tl.sum(tl.where(hit, x, 0.0), 0)
    mean = tl.sum(tl.where(inside, x, 0.0), 0) / V
    return lse - (1.0 - smoothing) * right - smoothing * mean


@triton.jit
def rdrop_loss(logits, targets, losses, slopes, N, V, ignore, smoothing, agreement, WORDS: tl.constexpr):
    """logits (2, N, V), targets (N,) -> losses (N,), slopes (2, N, V); a target to be ignored has neither."""
    token = tl.program_id(0).to(tl.int64)
    words = tl.arange(0, WORDS)
    inside = words < V
    first = token * V + words
    second = first + N.to(tl.int64) * V
    target = tl.load(targets + token)
    if target == ignore:
        tl.store(losses + token, 0.0)
        nothing = tl.zeros((WORDS,), slopes.dtype.element_ty)
        tl.store(slopes + first, nothing, mask=inside)
        tl.store(slopes + second, nothing, mask=inside)
    else:
        a = tl.load(logits + first, mask=inside, other=PADDING_LOGIT).to(tl.float32)
        b = tl.load(logits + second, mask=inside, other=PADDING_LOGIT).to(tl.float32)
        a_lse = log_sum_exp(a, inside)
        b_lse = log_sum_exp(b, inside)
        p = tl.where(inside, tl.exp(a - a_lse), 0.0)
        q = tl.where(inside, tl.exp(b - b_lse), 0.0)
        apart = tl.where(inside, (a - a_lse) - (b - b_lse), 0.0)
        forth = tl.sum(p * apart, 0)
        back = tl.sum(q * apart, 0)
        hit = words == target
        both = smoothed_cross_entropy(a, a_lse, hit, inside, V, smoothing)
        both += smoothed_cross_entropy(b, b_lse, hit, inside, V, smoothing)
        tl.store(losses + token, both / 2 + agreement * (forth - back))
        wanted = tl.where(hit, 1.0 - smoothing, 0.0) + smoothing / V
        in_first = (p - wanted) / 2 + agreement * (p * (apart - forth) + p - q)
        in_second = (q - wanted) / 2 + agreement * (q - p - q * (apart - back))
        tl.store(slopes + first, in_first.to(slopes.dtype.element_ty), mask=inside)
        tl.store(slopes + second, in_second.to(slopes.dtype.element_ty), mask=inside)

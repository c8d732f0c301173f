"""The next token, from the logits: the likeliest, or drawn by chance.

B sequences, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Draws each token by chance. In this order: repetition, temperature, top_k, top_p, min_p.

    >>> foci.decoding.Sampling(temperature=0.8, top_k=50, seed=1)
    Sampling(temperature=0.8, top_k=50, top_p=None, min_p=None, repetition=1.0, seed=1)
    """

    temperature: float = 1.0  # logits are divided by it; 0: the likeliest token, nothing is drawn
    top_k: int | None = None  # only the k likeliest tokens
    top_p: float | None = None  # only the likeliest tokens that together have this probability
    min_p: float | None = None  # only tokens with this share of the likeliest token's probability
    repetition: float = 1.0  # above 1: tokens of the prompt and of the answer become less likely
    seed: int | None = None  # the same seed draws the same tokens for the same batch; None: PyTorch's own generator

    def __post_init__(self) -> None:
        limits = (("temperature", 0.0, math.inf), ("top_k", 1, math.inf), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0))
        for name, low, high in limits:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"Sampling.{name} must lie between {low} and {high}, but got {value!r}")
        if not self.repetition > 0:
            raise ValueError(f"Sampling.repetition must be above 0, but got {self.repetition!r}")


class Sampler:
    """Chooses tokens step by step, and remembers what was there where repetitions cost."""

    def __init__(self, method: Sampling, tokens: Tensor, real: Tensor | None) -> None:
        self.method = method
        self.before = (tokens, real)  # (B, T), and bool (B, T) where some of it is padding
        self.seen: Tensor | None = None
        self.generator: torch.Generator | None = None
        if method.seed is not None:
            self.generator = torch.Generator(tokens.device).manual_seed(method.seed)

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, V) -> tokens (B,), and the logarithm of the probability that the model itself gives them."""
        logits = logits.float()
        tokens = self._drawn(self._weighed(logits))
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)
        scores = logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(-1)
        return tokens, scores

    def _weighed(self, logits: Tensor) -> Tensor:
        if self.method.repetition == 1.0:
            return logits
        if self.seen is None:
            self.seen = find_seen_tokens(*self.before, logits)
        cost = self.method.repetition
        return torch.where(self.seen, torch.where(logits > 0, logits / cost, logits * cost), logits)

    def _drawn(self, logits: Tensor) -> Tensor:
        if self.method.temperature == 0.0:
            return logits.argmax(-1)
        shares = filter_logits(logits / self.method.temperature, self.method).softmax(-1)
        # The smallest of waiting times with these rates: drawn in proportion, without a wait for the device.
        waits = torch.empty_like(shares).exponential_(generator=self.generator)
        return (shares / waits).argmax(-1)


def filter_logits(logits: Tensor, method: Sampling) -> Tensor:
    """-inf for the tokens that top_k, top_p and min_p leave out; the likeliest always stays."""
    if method.top_k is not None and method.top_k < logits.shape[-1]:
        least = logits.topk(method.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if method.top_p is not None and method.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        shares = ordered.softmax(-1)
        # A token stays while those before it have less than top_p together.
        beyond = shares.cumsum(-1) - shares >= method.top_p
        beyond[:, 0] = False
        logits = logits.masked_fill(beyond.scatter(1, order, beyond), -torch.inf)
    if method.min_p is not None and method.min_p > 0.0:
        least = logits.amax(-1, keepdim=True) + math.log(method.min_p)
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits


def find_seen_tokens(tokens: Tensor, real: Tensor | None, logits: Tensor) -> Tensor:
    """Which tokens of the vocabulary occur in each sequence: bool (B, V)."""
    counts = torch.zeros_like(logits)
    counts.scatter_add_(1, tokens, torch.ones_like(tokens, dtype=counts.dtype) if real is None else real.to(counts))
    return counts > 0

"""Choice of the next token from the logits: the likeliest one, or a random sample.

B sequences, T tokens, V vocabulary size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from foci.decoding.step_c import rank_tokens


@dataclass(frozen=True)
class Sampling:
    """Settings for sampling each token; applied in the order repetition, temperature, top_k, top_p, min_p.

    >>> foci.decoding.Sampling(temperature=0.8, top_k=50, seed=1)
    Sampling(temperature=0.8, top_k=50, top_p=None, min_p=None, repetition=1.0, seed=1)
    """

    temperature: float = 1.0  # divides the logits; 0: always the likeliest token (greedy)
    top_k: int | None = None  # keep only the k likeliest tokens
    top_p: float | None = None  # keep the likeliest tokens until their probabilities sum to top_p
    min_p: float | None = None  # keep tokens with at least min_p times the probability of the likeliest token
    repetition: float = 1.0  # repetition penalty: above 1, tokens of the prompt and of the answer become less likely
    seed: int | None = None  # the same seed samples the same tokens for the same batch; None: PyTorch's own generator

    def __post_init__(self) -> None:
        limits = (("temperature", 0.0, math.inf), ("top_k", 1, math.inf), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0))
        for name, low, high in limits:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"Sampling.{name} must be between {low} and {high}, got {value!r}")
        if not self.repetition > 0:
            raise ValueError(f"Sampling.repetition must be above 0, got {self.repetition!r}")


class Sampler:
    """Chooses the tokens of each step, and keeps track of seen tokens for the repetition penalty."""

    def __init__(self, method: Sampling, tokens: Tensor, real: Tensor | None) -> None:
        self.method = method
        self.prompt = (tokens, real)  # (B, T), and bool (B, T), False at padding; None: no padding
        self.seen: Tensor | None = None  # bool (B, V)
        self.generator: torch.Generator | None = None
        if method.seed is not None:
            self.generator = torch.Generator(tokens.device).manual_seed(method.seed)

    @property
    def is_greedy(self) -> bool:
        """Whether it chooses the likeliest token whatever the earlier ones were."""
        return self.method.temperature == 0.0 and self.method.repetition == 1.0

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, V) -> tokens (B,) and their log-probabilities (B,) under the unmodified logits."""
        if self.is_greedy:
            scores, tokens = rank_tokens(logits, 1)
            return tokens.squeeze(1), scores.squeeze(1)
        logits = logits.float()
        tokens = self._draw(self._penalize_repetition(logits))
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)
        scores = logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(-1)
        return tokens, scores

    def _penalize_repetition(self, logits: Tensor) -> Tensor:
        if self.method.repetition == 1.0:
            return logits
        if self.seen is None:
            self.seen = find_seen_tokens(*self.prompt, logits)
        penalty = self.method.repetition
        return torch.where(self.seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)

    def _draw(self, logits: Tensor) -> Tensor:
        if self.method.temperature == 0.0:
            return logits.argmax(-1)
        probabilities = filter_logits(logits / self.method.temperature, self.method).softmax(-1)
        # The smallest of exponential waiting times with these rates is a sample in proportion to the rates. It does
        # not synchronize with the device.
        waits = torch.empty_like(probabilities).exponential_(generator=self.generator)
        return (probabilities / waits).argmax(-1)


def filter_logits(logits: Tensor, method: Sampling) -> Tensor:
    """Set the logits of tokens excluded by top_k, top_p and min_p to -inf; the likeliest token always stays."""
    if method.top_k is not None and method.top_k < logits.shape[-1]:
        threshold = logits.topk(method.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if method.top_p is not None and method.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        # A token stays while the sum of those before it is below top_p.
        excluded = probabilities.cumsum(-1) - probabilities >= method.top_p
        excluded[:, 0] = False
        logits = logits.masked_fill(excluded.scatter(1, order, excluded), -torch.inf)
    if method.min_p is not None and method.min_p > 0.0:
        threshold = logits.amax(-1, keepdim=True) + math.log(method.min_p)
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    return logits


def find_seen_tokens(tokens: Tensor, real: Tensor | None, logits: Tensor) -> Tensor:
    """Which tokens of the vocabulary occur in each sequence: bool (B, V)."""
    counts = torch.zeros_like(logits)
    counts.scatter_add_(1, tokens, torch.ones_like(tokens, dtype=counts.dtype) if real is None else real.to(counts))
    return counts > 0

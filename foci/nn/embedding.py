"""The two ends of a stack: the embedding of tokens, and the head that computes logits.

B batch, T tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.nn.block import ACTIVATION_FUNCTIONS, build_norm
from foci.nn.config import TransformerConfig
from foci.nn.positions import LearnedPositions, SinusoidalPositions
from foci.runtime.tracing import is_traced
from foci.scores import describe_value


class Embedding(nn.Module):
    """Embed tokens (B, T), or vectors (B, T, width) without a vocabulary, and add segments and positions.

    >>> embedding = foci.nn.Embedding(foci.nn.TransformerConfig(width=64, vocabulary=100))
    >>> embedding(torch.randint(100, (2, 10))).shape
    torch.Size([2, 10, 64])
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.width, self.dropout = config.width, config.dropout
        self.scale = config.width**0.5 if config.scale_embedding else 1.0
        self.tokens = None if config.vocabulary is None else nn.Embedding(config.vocabulary, config.width)
        self.segments = nn.Embedding(config.segments, config.width) if config.segments else None
        self.positions = build_positions(config)
        self.norm = build_norm(config) if config.embedding_norm else None

    def forward(
        self, tokens: Tensor, segments: Tensor | None = None, positions: Tensor | None = None, start: int = 0
    ) -> Tensor:
        """(B, T) or (B, T, width) -> (B, T, width).

        Args:
            tokens: (B, T), or vectors (B, T, width) if the config has no vocabulary.
            segments: (B, T); None: segment 0.
            positions: (T,) or (B, T); None: in order from `start`.
            start: the position of the first token if `positions` is None.
        """
        x = self._embed_tokens(tokens)
        if self.segments is not None:
            if segments is not None:
                check_tokens(segments, self.segments.num_embeddings, "segments", "the config")
            x = x + (self.segments.weight[0] if segments is None else self.segments(segments))
        elif segments is not None:
            raise ValueError(f"segments must be None for a config with segments=0, got {tuple(segments.shape)}")
        if self.positions is not None:
            x = self.positions(x, positions, start)
        if self.norm is not None:
            x = self.norm(x)
        changed = self.tokens is not None or self.positions is not None
        return F.dropout(x, self.dropout, self.training) if changed else x

    def check_input(self, tokens: Tensor) -> None:
        """Refuse what are neither tokens (B, T) nor, without a vocabulary, vectors (B, T, width)."""
        is_tensor = isinstance(tokens, Tensor)
        if self.tokens is None:
            if not is_tensor or tokens.dim() != 3 or tokens.shape[-1] != self.width or not tokens.is_floating_point():
                expected = f"vectors (B, T, {self.width}) for a model without a vocabulary"
                raise ValueError(f"tokens must be {expected}, got {describe_value(tokens)}")
        elif not is_tensor or tokens.dim() != 2 or tokens.is_floating_point():
            raise ValueError(f"tokens must be integers (B, T), got {describe_value(tokens)}")

    def _embed_tokens(self, tokens: Tensor) -> Tensor:
        self.check_input(tokens)
        if self.tokens is None:
            return tokens * self.scale if self.scale != 1.0 else tokens
        check_tokens(tokens, self.tokens.num_embeddings)
        x: Tensor = self.tokens(tokens)
        return x * self.scale if self.scale != 1.0 else x


class Head(nn.Module):
    """Compute logits (B, T, vocabulary) from states (B, T, width).

    >>> head = foci.nn.Head(foci.nn.TransformerConfig(width=64, vocabulary=100, head="tied"))
    >>> head(torch.randn(2, 10, 64), torch.randn(100, 64)).shape
    torch.Size([2, 10, 100])
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.vocabulary is not None and config.head is not None
        self.kind = config.head
        if config.head == "masked":
            self.transform = nn.Linear(config.width, config.width)
            self.activation = ACTIVATION_FUNCTIONS[config.activation]
            self.norm = build_norm(config)
        if config.head == "linear":
            self.weight = nn.Parameter(torch.zeros(config.vocabulary, config.width))
        biased = config.head_bias or config.head == "masked"
        self.bias = nn.Parameter(torch.zeros(config.vocabulary)) if biased else None

    def forward(self, states: Tensor, embedding: Tensor) -> Tensor:
        """(B, T, width) -> (B, T, vocabulary); `embedding` (vocabulary, width) is the weight of a tied head."""
        if self.kind == "masked":
            states = self.norm(self.activation(self.transform(states)))
        return F.linear(states, self.weight if self.kind == "linear" else embedding, self.bias)


def check_tokens(tokens: Tensor, count: int, name: str = "tokens", table: str = "the vocabulary") -> None:
    """Refuse indices outside the table; on a GPU and in a compiled graph PyTorch's own lookup asserts it, without a
    sync.
    """
    if tokens.device.type != "cpu" or is_traced(tokens) or not tokens.numel():
        return
    lowest, highest = (int(edge) for edge in tokens.aminmax())
    if lowest < 0 or highest >= count:
        expected = f"numbers from 0 to {count - 1}, as {table} has {count}"
        raise ValueError(f"{name} must be {expected}, got {lowest} to {highest}")


def build_positions(config: TransformerConfig) -> LearnedPositions | SinusoidalPositions | None:
    if config.positions is None:
        return None
    kind = LearnedPositions if config.positions == "learned" else SinusoidalPositions
    return kind(config.max_length, config.width)

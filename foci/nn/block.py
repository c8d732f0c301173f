"""A Transformer block: attention and a feed-forward network, each with a norm and a residual connection.

B batch, T tokens, S tokens of the memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.cache import Cache
from foci.masks.base import Mask
from foci.nn.attention import Attention
from foci.nn.config import BlockConfig
from foci.nn.positions import Rotary
from foci.weights.weights import Weights

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class Block(nn.Module):
    """Self-attention, optional cross-attention to a memory, and a feed-forward network.

    >>> import foci, torch
    >>> block = foci.nn.Block(foci.nn.BlockConfig(width=64, heads=4, activation="swiglu", norm="rms"))
    >>> block(torch.randn(2, 10, 64), mask=foci.causal).shape
    torch.Size([2, 10, 64])

    Args:
        config: the sizes and variants of its parts.
        cross: whether the block has cross-attention to a memory.
        bias: a bias module shared by several blocks; None: the block's own, from the config.
        depth_dropout: the rate at which each part is skipped during training (stochastic depth); None: the config's.
    """

    def __init__(
        self,
        config: BlockConfig,
        *,
        cross: bool = False,
        bias: nn.Module | None = None,
        depth_dropout: float | None = None,
    ) -> None:
        super().__init__()
        self.norm_first, self.dropout = config.norm_first, config.dropout
        self.depth_dropout = config.depth_dropout if depth_dropout is None else depth_dropout
        rotary = None if config.rotary is None else Rotary(config.rotary)
        self.attention_norm = build_norm(config)
        self.attention = build_attention(config, bias=config.bias if bias is None else bias, rotary=rotary)
        self.cross_norm = build_norm(config) if cross else None
        self.cross = build_attention(config, bias=None, rotary=None) if cross else None
        self.feed_forward_norm = build_norm(config)
        self.feed_forward = FeedForward(config)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        memory_mask: Mask | Tensor | None = None,
        positions: Tensor | None = None,
        caches: tuple[Cache | None, Cache | None] = (None, None),
        counts: tuple[int, int] | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Weights]]:
        """(B, T, width) -> (B, T, width); with return_weights also {"own": Weights, "cross": Weights}.

        Args:
            x: the tokens (B, T, width).
            memory: (B, S, width), the keys and values of cross-attention.
            mask, memory_mask: the masks of self-attention and of cross-attention.
            positions: the tokens' positions, for rotary.
            caches: the caches of the tokens and of the memory, during generation.
            counts: (tokens, tokens of the memory) of all processes, if they are sharded.
            return_weights: also return the attention weights.
        """
        weights: dict[str, Weights] = {}

        def attend_self(y: Tensor) -> Tensor:
            own = None if counts is None else (counts[0], counts[0])
            options = {"mask": mask, "positions": positions, "cache": caches[0], "counts": own}
            result = self.attention(y, **options, return_weights=return_weights)
            return collect_weights(result, weights, "own")

        def attend_memory(y: Tensor) -> Tensor:
            assert self.cross is not None
            options = {"mask": memory_mask, "cache": caches[1], "counts": counts}
            result = self.cross(y, memory, **options, return_weights=return_weights)
            return collect_weights(result, weights, "cross")

        if memory is None and self.cross is not None:
            raise ValueError(f"memory must be (B, S, {self.attention.width}) for a block with cross=True, got None")
        if memory is not None and self.cross is None:
            raise ValueError(f"memory must be None for a block with cross=False, got {tuple(memory.shape)}")
        x = self._add_residual(x, self.attention_norm, attend_self)
        if self.cross_norm is not None:
            x = self._add_residual(x, self.cross_norm, attend_memory)
        x = self._add_residual(x, self.feed_forward_norm, self.feed_forward)
        return (x, weights) if return_weights else x

    def _add_residual(self, x: Tensor, norm: nn.Module, part: Callable[[Tensor], Tensor]) -> Tensor:
        """x + part(norm(x)) with norm_first, else norm(x + part(x))."""
        update = F.dropout(part(norm(x) if self.norm_first else x), self.dropout, self.training)
        if self.training and self.depth_dropout:
            update = apply_stochastic_depth(update, self.depth_dropout)
        return x + update if self.norm_first else norm(x + update)


class FeedForward(nn.Module):
    """Two linear layers with an activation between them; swiglu multiplies one half by silu of the other.

    >>> feed_forward = foci.nn.FeedForward(foci.nn.BlockConfig(width=64, heads=4, activation="swiglu"))
    >>> feed_forward(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.gated = config.activation == "swiglu"
        self.activation = ACTIVATION_FUNCTIONS["silu" if self.gated else config.activation]
        self.dropout = config.dropout
        self.inner = nn.Linear(config.width, config.hidden_width * (2 if self.gated else 1), bias=config.biases)
        self.outer = nn.Linear(config.hidden_width, config.width, bias=config.biases)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activate(self.inner(x))
        return self.outer(F.dropout(x, self.dropout, self.training))  # type: ignore[no-any-return]

    def activate(self, x: Tensor) -> Tensor:
        """The activation of the output of the first layer."""
        if not self.gated:
            return self.activation(x)
        gate, x = x.chunk(2, dim=-1)
        return self.activation(gate) * x


def build_norm(config: BlockConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.width, eps=config.eps)
    return nn.LayerNorm(config.width, eps=config.eps, bias=config.biases)


def build_attention(config: BlockConfig, *, bias: object, rotary: Rotary | None) -> Attention:
    return Attention(
        config.width,
        config.heads,
        config.kv_heads,
        head_width=config.head_width,
        score=config.score,
        bias=bias,  # type: ignore[arg-type]
        rotary=rotary,
        dropout=config.attention_dropout,
        biases=config.biases,
    )


def collect_weights(result: Tensor | tuple[Tensor, Weights], weights: dict[str, Weights], name: str) -> Tensor:
    """Return the output of attention, and store its weights under `name` if there are any."""
    if isinstance(result, tuple):
        result, weights[name] = result
    return result


def apply_stochastic_depth(x: Tensor, rate: float) -> Tensor:
    """Stochastic depth: zero x for a random share of the sequences, and scale the others so that the mean stays."""
    keep = torch.rand(x.shape[0], 1, 1, device=x.device) >= rate
    return torch.where(keep, x / (1.0 - rate), 0.0)

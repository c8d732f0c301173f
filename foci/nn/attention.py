"""Multi-head attention as a module: project, attend, project.

B batch, T tokens, S tokens of the context, H heads, G key/value heads, D head width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.biases import ALiBi, Bias
from foci.cache import Cache
from foci.call import attention
from foci.masks.base import Mask
from foci.nn.config import BiasName, ScoreName
from foci.nn.learned_scores import AdditiveScore, CosineScore, GeneralScore
from foci.nn.positions import BucketTable, RelativeTable, Rotary
from foci.runtime.argument_names import hide_catch_all, refuse_arguments
from foci.scores import Dot, Score
from foci.weights.weights import Weights

if TYPE_CHECKING:
    from foci.sharding.modules import ModuleShards

SCORE_MODULES: dict[str, type[nn.Module]] = {"additive": AdditiveScore, "general": GeneralScore, "cosine": CosineScore}


class Attention(nn.Module):
    """Multi-head self- or cross-attention, with grouped heads, any score and bias, and a cache.

    >>> import foci, torch
    >>> layer = foci.nn.Attention(width=64, heads=4, kv_heads=2, rotary=foci.nn.Rotary())
    >>> x = torch.randn(2, 10, 64)
    >>> layer(x, mask=foci.causal).shape                                       # self-attention
    torch.Size([2, 10, 64])
    >>> out, weights = layer(x, torch.randn(2, 7, 64), return_weights=True)    # cross-attention to 7 tokens
    >>> weights.shape
    (2, 4, 10, 7)

    Args:
        width: the width of the input and output tokens.
        heads: the number of heads.
        kv_heads: the number of key/value heads, shared by groups of heads; None: as many as heads.
        head_width: the width of each head; None: width / heads.
        score: "dot", "additive", "general" or "cosine"; a foci score without tensors, such as foci.Dot(softcap=50.0);
            or a module whose forward returns a score.
        bias: None, "alibi", "buckets" or "relative"; a foci bias without tensors; or a module whose forward returns a
            bias. It depends on relative positions within one sequence, so cross-attention does not use it.
        rotary: rotary position embedding of queries and keys; not used for cross-attention either.
        dropout: the dropout rate of the attention weights during training.
        biases: whether the projections have biases.
    """

    # Set where this process has only a part of the heads or tokens: see foci.training.parallel.
    shards: ModuleShards | None = None

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        head_width: int | None = None,
        score: ScoreName | Score | nn.Module = "dot",
        bias: BiasName | Bias | nn.Module | None = None,
        rotary: Rotary | None = None,
        dropout: float = 0.0,
        biases: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, heads if kv_heads is None else kv_heads
        self.head_width = resolve_head_width(width, heads, self.kv_heads, head_width)
        self.width, self.rotary, self.dropout = width, rotary, dropout
        self.score = build_score(score, heads, self.head_width)
        self.bias = build_bias(bias, heads, self.head_width)
        # One matrix product computes queries, keys and values.
        self.project = nn.Linear(width, (heads + 2 * self.kv_heads) * self.head_width, bias=biases)
        self.output = nn.Linear(heads * self.head_width, width, bias=biases)

    @hide_catch_all
    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *misplaced: Never,
        mask: Mask | Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        counts: tuple[int, int] | None = None,
        return_weights: bool = False,
        **unknown: Never,
    ) -> Tensor | tuple[Tensor, Weights]:
        """(B, T, width) -> (B, T, width), with return_weights also the attention weights.

        Args:
            x: the tokens (B, T, width).
            context: (B, S, width), the tokens to attend to; None: x itself.
            mask: which keys each query may attend to, such as foci.causal.
            positions: the tokens' positions for `rotary`, (T,) or (B, T); None: in order, after those in the cache.
            cache: keys and values of earlier tokens during generation. A context is projected once, when its cache is
                empty.
            counts: (tokens, tokens of the context) of all processes, if they are sharded.
            return_weights: also return the attention weights (B, H, T, S), as a lazy operator.
        """
        if misplaced or unknown:
            refuse_arguments(self.forward, misplaced, unknown)
        check_input_shape(x, self.width, "x")
        if context is None:
            q, k, v = self._project_self(x, positions, cache)
            key_positions = None if cache is None else cache.positions(x.shape[1])
        else:
            q, k, v = self._project_context(x, context, cache)
            key_positions = None
        options: dict[str, Any] = {
            "score": call_if_module(self.score),
            "mask": mask,
            "bias": call_if_module(self.bias) if context is None else None,
            "positions": key_positions,
            "dropout": self.dropout if self.training else 0.0,
        }
        if self.shards is not None:
            options["return_weights"] = return_weights
            result = self.shards.attend(attention, (q, k, v), counts, options)
            return (self._project_output(result[0]), result[1]) if return_weights else self._project_output(result)
        if not return_weights:
            return self._project_output(attention(q, k, v, **options))
        out, weights = attention(q, k, v, **options, return_weights=True)
        return self._project_output(out), weights

    def _project_output(self, out: Tensor) -> Tensor:
        """(B, H, T, D) -> (B, T, width)."""
        return self.output(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _project_self(self, x: Tensor, positions: Tensor | None, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the tokens; cached keys and values come first."""
        heads = self._split_heads(self.project(x))  # (B, H + 2 G, T, D)
        q_and_k, v = heads.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        if self.rotary is not None:
            if positions is None and cache is not None:
                positions = cache.next_positions(x.shape[1], device=x.device)
            q_and_k = self.rotary(q_and_k, positions)
        q, k = q_and_k.split([self.heads, self.kv_heads], dim=1)
        if cache is not None:
            k, v = cache.append(k, v)
        return q, k, v

    def _project_context(self, x: Tensor, context: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the tokens; keys and values of the context."""
        check_input_shape(context, self.width, "context")
        sizes = [self.heads * self.head_width, 2 * self.kv_heads * self.head_width]
        weights = self.project.weight.split(sizes)
        biases = (None, None) if self.project.bias is None else self.project.bias.split(sizes)
        q = self._split_heads(F.linear(x, weights[0], biases[0]))
        if cache is not None and cache.keys is not None and cache.values is not None:
            return q, cache.keys, cache.values
        k, v = self._split_heads(F.linear(context, weights[1], biases[1])).chunk(2, dim=1)
        return (q, k, v) if cache is None else (q, *cache.append(k, v))

    def _split_heads(self, projected: Tensor) -> Tensor:
        """(B, T, heads D) -> (B, heads, T, D)."""
        heads = projected.shape[2] // self.head_width
        return projected.view(*projected.shape[:2], heads, self.head_width).transpose(1, 2)

    def extra_repr(self) -> str:
        """The sizes, as `print` shows them."""
        return f"width={self.width}, heads={self.heads}, kv_heads={self.kv_heads}, head_width={self.head_width}"


def resolve_head_width(width: int, heads: int, kv_heads: int, head_width: int | None) -> int:
    """The width of each head; refuses sizes that do not fit together."""
    if min(width, heads, kv_heads) < 1:
        raise ValueError(
            f"width, heads and kv_heads must be at least 1, got width={width}, heads={heads}, kv_heads={kv_heads}"
        )
    if heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads, got heads={heads}, kv_heads={kv_heads}")
    if head_width is None and width % heads:
        raise ValueError(
            f"width must be a multiple of heads unless head_width is given, got width={width}, heads={heads}"
        )
    return width // heads if head_width is None else head_width


def build_score(score: ScoreName | Score | nn.Module, heads: int, head_width: int) -> Score | nn.Module:
    if isinstance(score, str):
        if score != "dot" and score not in SCORE_MODULES:
            raise ValueError(f"score must be 'dot', {', '.join(map(repr, SCORE_MODULES))}, got {score!r}")
        return Dot() if score == "dot" else SCORE_MODULES[score](heads, head_width)
    check_no_tensors(score, Score, "score")
    return score


def build_bias(bias: BiasName | Bias | nn.Module | None, heads: int, head_width: int) -> Bias | nn.Module | None:
    if bias is None:
        return None
    if isinstance(bias, str):
        if bias not in {"alibi", "buckets", "relative"}:
            raise ValueError(f"bias must be 'alibi', 'buckets', 'relative' or None, got {bias!r}")
        return ALiBi() if bias == "alibi" else BucketTable(heads) if bias == "buckets" else RelativeTable(head_width)
    check_no_tensors(bias, Bias, "bias")
    return bias


def check_no_tensors(value: Any, kind: type[Score] | type[Bias], name: str) -> None:
    """Refuse scores and biases with tensors: these would neither move nor be saved with the module."""
    if not isinstance(value, nn.Module) and not (isinstance(value, kind) and not value.tensors()):
        raise TypeError(
            f"{name} must be a name, a foci {name} without tensors, or a module that returns one, got {value!r}"
        )


def call_if_module(value: Any) -> Any:
    """The score or bias for this call: a module builds it from its parameters."""
    return value() if isinstance(value, nn.Module) else value


def check_input_shape(x: Tensor, width: int, name: str) -> None:
    if not isinstance(x, torch.Tensor) or x.dim() != 3 or x.shape[-1] != width:
        got = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"{name} must have shape (B, T, {width}), got {got}")

"""Multi-head attention as a module: project, attend, project.

B batch, T tokens, S tokens of the context, H heads, G key heads, D width of a head.
"""

from __future__ import annotations

from typing import Any

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
from foci.scores import Dot, Score
from foci.weights.weights import Weights

SCORE_MODULES: dict[str, type[nn.Module]] = {"additive": AdditiveScore, "general": GeneralScore, "cosine": CosineScore}


class Attention(nn.Module):
    """Multi-head attention, to the tokens themselves or to a context; grouped heads, any score and bias, a cache.

    >>> import foci, torch
    >>> layer = foci.nn.Attention(width=64, heads=4, kv_heads=2, rotary=foci.nn.Rotary())
    >>> x = torch.randn(2, 10, 64)
    >>> layer(x, mask=foci.causal).shape                              # to itself
    torch.Size([2, 10, 64])
    >>> out, weights = layer(x, torch.randn(2, 7, 64), return_weights=True)   # to a context of 7 tokens
    >>> weights.shape
    (2, 4, 10, 7)

    Args:
        width: of the tokens, in and out.
        heads: how many queries each token asks.
        kv_heads: how many keys and values each token has, shared by groups of heads; None: as many as heads.
        head_width: of each head; None: width / heads.
        score: "dot", "additive", "general" or "cosine"; a foci score without tensors, such as foci.Dot(softcap=50.0);
            or a module that gives a score when it is called.
        bias: None, "alibi", "buckets" or "relative"; a foci bias without tensors; or a module that gives a bias.
            It says where tokens of one sequence stand to each other, so attention to a context goes without.
        rotary: turns queries and keys by where they stand; also only within one sequence.
        dropout: the share of the weights that is dropped while training.
        biases: whether the projections have biases.
    """

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
        # Queries, keys and values of one token come from one product.
        self.project = nn.Linear(width, (heads + 2 * self.kv_heads) * self.head_width, bias=biases)
        self.output = nn.Linear(heads * self.head_width, width, bias=biases)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Weights]:
        """(B, T, width) -> (B, T, width), and the weights where they are asked for.

        Args:
            context: (B, S, width), what to look at; None: the tokens themselves.
            mask: who may look at whom, such as foci.causal.
            positions: where the tokens stand, for `rotary`: (T,) or (B, T); None: in order, after those in the cache.
            cache: keys and values kept while generating. A context is projected once, when its cache is empty.
            return_weights: also return the attention matrix, as a lazy operator.
        """
        check_input_shape(x, self.width, "x")
        if context is None:
            q, k, v = self._own(x, positions, cache)
            places = None if cache is None else cache.positions(x.shape[1])
        else:
            q, k, v = self._across(x, context, cache)
            places = None
        options: dict[str, Any] = {
            "score": call_if_module(self.score),
            "mask": mask,
            "bias": call_if_module(self.bias) if context is None else None,
            "positions": places,
            "dropout": self.dropout if self.training else 0.0,
        }
        if not return_weights:
            return self._joined(attention(q, k, v, **options))
        out, weights = attention(q, k, v, **options, return_weights=True)
        return self._joined(out), weights

    def _joined(self, out: Tensor) -> Tensor:
        """(B, H, T, D) -> (B, T, width)."""
        return self.output(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _own(self, x: Tensor, positions: Tensor | None, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the tokens, the keys and values in the cache before them."""
        heads = self._split(self.project(x))  # (B, H + 2 G, T, D)
        turning, v = heads.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        if self.rotary is not None:
            if positions is None and cache is not None:
                positions = cache.upcoming(x.shape[1], device=x.device)
            turning = self.rotary(turning, positions)
        q, k = turning.split([self.heads, self.kv_heads], dim=1)
        if cache is not None:
            k, v = cache.append(k, v)
        return q, k, v

    def _across(self, x: Tensor, context: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the tokens, keys and values of the context."""
        check_input_shape(context, self.width, "context")
        cut = [self.heads * self.head_width, 2 * self.kv_heads * self.head_width]
        weights = self.project.weight.split(cut)
        biases = (None, None) if self.project.bias is None else self.project.bias.split(cut)
        q = self._split(F.linear(x, weights[0], biases[0]))
        if cache is not None and cache.keys is not None and cache.values is not None:
            return q, cache.keys, cache.values
        k, v = self._split(F.linear(context, weights[1], biases[1])).chunk(2, dim=1)
        return (q, k, v) if cache is None else (q, *cache.append(k, v))

    def _split(self, projected: Tensor) -> Tensor:
        """(B, T, heads D) -> (B, heads, T, D)."""
        heads = projected.shape[2] // self.head_width
        return projected.view(*projected.shape[:2], heads, self.head_width).transpose(1, 2)

    def extra_repr(self) -> str:
        """What `print` shows beside the parts."""
        return f"width={self.width}, heads={self.heads}, kv_heads={self.kv_heads}, head_width={self.head_width}"


def resolve_head_width(width: int, heads: int, kv_heads: int, head_width: int | None) -> int:
    if min(width, heads, kv_heads) < 1 or heads % kv_heads:
        raise ValueError(
            f"Attention takes a width of at least 1 and heads that are a multiple of kv_heads, but got width={width},"
            f" heads={heads}, kv_heads={kv_heads}"
        )
    if head_width is None and width % heads:
        raise ValueError(f"without a head_width the width must be a multiple of heads, but got {width} and {heads}")
    return width // heads if head_width is None else head_width


def build_score(score: ScoreName | Score | nn.Module, heads: int, head_width: int) -> Score | nn.Module:
    if isinstance(score, str):
        if score != "dot" and score not in SCORE_MODULES:
            raise ValueError(f"score must be 'dot', {', '.join(map(repr, SCORE_MODULES))}, but got {score!r}")
        return Dot() if score == "dot" else SCORE_MODULES[score](heads, head_width)
    check_no_tensors(score, Score, "score")
    return score


def build_bias(bias: BiasName | Bias | nn.Module | None, heads: int, head_width: int) -> Bias | nn.Module | None:
    if bias is None:
        return None
    if isinstance(bias, str):
        if bias not in {"alibi", "buckets", "relative"}:
            raise ValueError(f"bias must be 'alibi', 'buckets', 'relative' or None, but got {bias!r}")
        return ALiBi() if bias == "alibi" else BucketTable(heads) if bias == "buckets" else RelativeTable(head_width)
    check_no_tensors(bias, Bias, "bias")
    return bias


def check_no_tensors(thing: Any, kind: type[Score] | type[Bias], name: str) -> None:
    """Refuses scores and biases with tensors: those would neither move nor be saved with the module."""
    if not isinstance(thing, nn.Module) and not (isinstance(thing, kind) and not thing.tensors()):
        raise TypeError(
            f"{name} must be a name, a foci {name} without tensors, or a module that gives one, but got {thing!r}"
        )


def call_if_module(thing: Any) -> Any:
    """The score or bias of this call: a module gives it from its parameters."""
    return thing() if isinstance(thing, nn.Module) else thing


def check_input_shape(x: Tensor, width: int, name: str) -> None:
    if not isinstance(x, torch.Tensor) or x.dim() != 3 or x.shape[-1] != width:
        got = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"{name} must have shape (B, T, {width}), but got {got}")

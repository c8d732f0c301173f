"""Small models with common ways to write attention."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FusedAttention(nn.Module):
    """F.scaled_dot_product_attention, as most code calls it."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.project, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def split(self, x: Tensor) -> Tensor:
        return self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # type: ignore[no-any-return]

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        q, k, v = self.split(x)
        out = F.scaled_dot_product_attention(q, k, v, **options)
        return self.output(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class EagerAttention(FusedAttention):
    """Attention written out in eager code, which cannot be recorded."""

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        q, k, v = self.split(x)
        out = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.output(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Blocks of attention, one after the other."""

    def __init__(self, layers: int = 3, kind: type[FusedAttention] = FusedAttention) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(kind() for _ in range(layers))

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = x if x.is_floating_point() else self.embed(x)
        for block in self.blocks:
            x = x + block(x, **options)
        return x


class CachedAttention(FusedAttention):
    """Attention that keeps its keys and values in plain tensors."""

    kept: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        q, k, v = self.split(x)
        if self.kept is not None:
            k, v = (torch.cat([old, new], 2) for old, new in zip(self.kept, (k, v), strict=True))
        self.kept = (k, v)
        count, keys = q.shape[2], k.shape[2]
        seen = torch.ones(count, keys, dtype=torch.bool).tril(keys - count)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=None if count == 1 else seen)
        return self.output(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def change(self, how: Callable[[Tensor], Tensor]) -> None:
        assert self.kept is not None
        self.kept = (how(self.kept[0]), how(self.kept[1]))


class PreallocatedAttention(FusedAttention):
    """Attention that writes its keys and values into a cache of fixed size."""

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.length = torch.zeros(2, 2, 4, 32, 4), 0

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        q, *new = self.split(x)
        count, start = q.shape[2], self.length
        self.length += count
        self.cache[:, :, :, start : self.length] = torch.stack(new)
        k, v = self.cache[:, :, :, : self.length]
        # The first queries have no keys before them.
        seen = None if start == 0 else torch.ones(count, self.length, dtype=torch.bool).tril(start)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=start == 0)
        return self.output(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

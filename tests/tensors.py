"""Queries, keys and values that tests attend with: the same numbers every time."""

import torch
from torch import Tensor


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(queries: int = 6, keys: int = 6, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8))
    q, k, v = (randn(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))
    return q, k, v

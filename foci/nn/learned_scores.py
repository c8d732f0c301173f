"""Learned scores: modules that own the parameters of a score and return it from `forward`."""

from __future__ import annotations

import torch
from torch import nn

from foci.scores import Additive, Cosine, General


class AdditiveScore(nn.Module):
    """The additive score wᵀ tanh(q + k) with a learned w per head (Bahdanau).

    >>> q, k = torch.randn(2, 4, 10, 16), torch.randn(2, 4, 7, 16)
    >>> foci.attention(q, k, k, score=foci.nn.AdditiveScore(heads=4, head_width=16)()).shape
    torch.Size([2, 4, 10, 16])
    """

    def __init__(self, heads: int, head_width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, head_width))
        nn.init.normal_(self.weight, std=head_width**-0.5)

    def forward(self) -> Additive:
        return Additive(self.weight)


class GeneralScore(nn.Module):
    """The score q W k with a learned matrix W per head (Luong); it starts as the scaled dot product.

    >>> foci.nn.GeneralScore(heads=4, head_width=16).matrix.shape
    torch.Size([4, 16, 16])
    """

    def __init__(self, heads: int, head_width: int) -> None:
        super().__init__()
        start = torch.eye(head_width) * head_width**-0.5
        self.matrix = nn.Parameter(start.expand(heads, -1, -1).clone())

    def forward(self) -> General:
        return General(self.matrix)


class CosineScore(nn.Module):
    """The score scale · cos(q, k) with a learned scale per head.

    >>> foci.nn.CosineScore(heads=4, head_width=16).scale
    Parameter containing:
    tensor([4., 4., 4., 4.], requires_grad=True)
    """

    def __init__(self, heads: int, head_width: int) -> None:
        super().__init__()
        # With √d the scores of random vectors have the variance of the scaled dot product.
        self.scale = nn.Parameter(torch.full((heads,), head_width**0.5))

    def forward(self) -> Cosine:
        return Cosine(self.scale)

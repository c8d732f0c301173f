"""Scores that learn: modules that own the parameters and, called, give the score.

H heads, D width of a head.
"""

from __future__ import annotations

import torch
from torch import nn

from foci.scores import Additive, Cosine, General


class AdditiveScore(nn.Module):
    """wᵀ tanh(q + k) with a learned w per head (Bahdanau)."""

    def __init__(self, heads: int, head_width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, head_width))
        nn.init.normal_(self.weight, std=head_width**-0.5)

    def forward(self) -> Additive:
        return Additive(self.weight)


class GeneralScore(nn.Module):
    """q W k with a learned matrix per head (Luong); it starts as the scaled dot product."""

    def __init__(self, heads: int, head_width: int) -> None:
        super().__init__()
        start = torch.eye(head_width) * head_width**-0.5
        self.matrix = nn.Parameter(start.expand(heads, -1, -1).clone())

    def forward(self) -> General:
        return General(self.matrix)


class CosineScore(nn.Module):
    """scale · cos(q, k) with a learned scale per head."""

    def __init__(self, heads: int, head_width: int) -> None:
        super().__init__()
        # At √d the scores of random vectors spread as those of the scaled dot product do.
        self.scale = nn.Parameter(torch.full((heads,), head_width**0.5))

    def forward(self) -> Cosine:
        return Cosine(self.scale)

"""A sequence task that trains in seconds and cannot be guessed: reverse the source."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import foci

START, STOP, VOCABULARY, LENGTH = 1, 2, 10, 5


def sample_pairs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sources (count, LENGTH), and targets with a start and a stop token around them."""
    source = torch.randint(3, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    edges = [torch.full((count, 1), token) for token in (START, STOP)]
    return source, torch.cat([edges[0], source.flip(1), edges[1]], dim=1)


def train(model: nn.Module, steps: int, rate: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(steps):
        source, target = sample_pairs(64, seed=step)
        logits = model(source, target[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def measure_accuracy(model: nn.Module) -> float:
    """The share of unseen sources that are reversed without a mistake."""
    source, target = sample_pairs(64, seed=10**6)
    answers = foci.generate(model, source, start=START, stop=STOP, new_tokens=LENGTH + 2)
    expected = target[:, 1:-1].tolist()
    return sum(answer.tokens == row for answer, row in zip(answers, expected, strict=True)) / len(expected)

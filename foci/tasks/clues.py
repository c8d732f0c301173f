"""Clues to the class of a text: its words, pairs of words and letters in a row, each with a weight of its own.

The weights are those of a logistic regression that starts from naive Bayes (NB-SVM, Wang and Manning, 2012), solved
before the first step of a training. Letters in a row say something of words that no text to learn from has.

B texts, N clues of all texts, K buckets, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor

# The bucket that stands for none.
NO_CLUE = 0
# How many letters in a row are a clue; spaces count.
LETTERS = range(3, 6)
# What keeps weights small, and how often the solver goes over all texts at most.
PENALTY, ROUNDS = 5.0, 30


def clues_in(text: str, buckets: int) -> list[int]:
    """The buckets of what is in a text, each once, from 1 on."""
    return sorted({1 + crc32(each.encode()) % (buckets - 1) for each in parts(text)}) or [NO_CLUE]


def parts(text: str) -> Iterator[str]:
    """Words, pairs of words, the first and the last word as such, and letters in a row.

    >>> sorted(parts("a joy"))
    [' a', 'a', 'a joy', 'joy', 'joy ', '~ a ', '~ a j', '~ a jo', '~ jo', '~ joy', '~ joy ', ...]
    """
    words = text.split()
    yield from words
    yield from (f"{first} {second}" for first, second in zip(["", *words], [*words, ""], strict=True))
    spaced = f" {' '.join(words)} "
    yield from (f"~{spaced[first : first + size]}" for size in LETTERS for first in range(len(spaced) - size + 1))


def weighed(read: Sequence[tuple[list[int], int]], buckets: int, classes: int) -> dict[str, list[float]]:
    """What each clue that several texts have says of the classes: numbers that are added up to logits.

    Args:
        read: the clues of each text, and the number of its class.
    """
    clues = torch.tensor([clue for found, _ in read for clue in found])
    texts = torch.tensor([number for number, (found, _) in enumerate(read) for _ in found])
    labels = torch.tensor([label for _, label in read])
    several = torch.bincount(clues, minlength=buckets)[clues] > 1
    known, places = clues[several].unique(return_inverse=True)
    given = sparse(texts[several], places, len(read), len(known))
    told = F.one_hot(labels, classes).double()
    counts = 1.0 + given.T @ told
    prior = (counts / counts.sum(0)).log()
    prior = prior - prior.mean(1, keepdim=True)
    found = solved(given, labels, prior)
    return {
        str(clue): [round(value, 4) for value in row] for clue, row in zip(known.tolist(), found.tolist(), strict=True)
    }


def sparse(rows: Tensor, columns: Tensor, height: int, width: int) -> Tensor:
    ones = torch.ones(len(rows), dtype=torch.float64)
    return torch.sparse_coo_tensor(
        torch.stack([rows, columns]), ones, (height, width), check_invariants=False
    ).coalesce()


def solved(given: Tensor, labels: Tensor, prior: Tensor) -> Tensor:
    """The weights (N, C) that tell the classes of the texts (B, N) best, without being larger than need be.

    They are what naive Bayes says, each times a factor that is solved for: a clue that it is sure of costs less.
    """
    factors = torch.zeros_like(prior, requires_grad=True)
    solver = torch.optim.LBFGS([factors], max_iter=ROUNDS, line_search_fn="strong_wolfe")

    def cost() -> Tensor:
        solver.zero_grad()
        surprise = F.cross_entropy(torch.sparse.mm(given, factors * prior), labels, reduction="sum")
        total = surprise + PENALTY / 2 * factors.square().sum()
        total.backward()
        return total

    solver.step(cost)
    return (factors * prior).detach()

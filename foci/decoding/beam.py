"""Beam search: several answers grow side by side, and the likeliest are kept.

B prompts, K hypotheses of each, V tokens of the vocabulary, N steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from foci.decoding.steps import CachedSteps
from foci.decoding.stopping import Answer, StopConditions


@dataclass(frozen=True)
class Beam:
    """Keeps the `width` likeliest beginnings of an answer. One that ends gives up its place, so a width of 1 is greedy.

    >>> foci.decoding.Beam(4, best=2)
    Beam(width=4, length_penalty=1.0, best=2, early=False)
    """

    width: int = 4  # how many hypotheses grow side by side
    length_penalty: float = 1.0  # answers are ranked by log-probability / length ** penalty: 0 prefers short ones
    best: int = 1  # how many answers to give: the others are in `Answer.others`
    early: bool = False  # stop when `best` answers have ended; False: when none that grows could still outrank them

    def __post_init__(self) -> None:
        if not 1 <= self.best <= self.width:
            raise ValueError(f"Beam takes 1 <= best <= width, but got best={self.best!r} and width={self.width!r}")
        if not self.length_penalty >= 0:
            raise ValueError(f"Beam.length_penalty must be at least 0, but got {self.length_penalty!r}")


@dataclass
class Hypotheses:
    """What grows and what has ended; a place that is empty has the log-probability -inf."""

    method: Beam
    limit: int
    scores: Tensor  # (B, K): log-probabilities of those that grow
    ranked: Tensor  # (B, best): the best that have ended, by rank
    count: Tensor  # (B, 1): how many have ended
    # Of each step: token, the place it continues, log-probability, and whether it ended there; (B, K) each.
    steps: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def none_yet(cls, method: Beam, limit: int, logits: Tensor) -> Hypotheses:
        """Before the first step there is one beginning of each prompt."""
        batch, device = len(logits), logits.device
        ranked = torch.full((batch, method.best), -torch.inf, device=device)
        count = torch.zeros(batch, 1, dtype=torch.long, device=device)
        return cls(method, limit, torch.zeros(batch, 1, device=device), ranked, count)

    def grow(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The likeliest continuations: tokens, the places they continue and log-probabilities, (B, K) each."""
        batch, width, vocabulary = len(self.scores), self.method.width, logits.shape[-1]
        logs = logits.float().log_softmax(-1).view(batch, -1, vocabulary)
        scores, index = (self.scores.unsqueeze(-1) + logs).flatten(1).topk(width, dim=-1)
        free = torch.arange(width, device=scores.device) < width - self.count
        return index % vocabulary, index // vocabulary, torch.where(free, scores, -torch.inf)

    def settle(self, tokens: Tensor, places: Tensor, scores: Tensor, ends: Tensor) -> None:
        """Takes a step: those that end are ranked and leave, the others grow on."""
        ends = ends & (scores > -torch.inf)
        self.steps.append((tokens, places, scores, ends))
        length, penalty = len(self.steps), self.method.length_penalty
        ranks = torch.where(ends, scores / length**penalty, -torch.inf)
        self.ranked = torch.cat([self.ranked, ranks], dim=-1).topk(self.method.best, dim=-1).values
        self.count = self.count + ends.sum(-1, keepdim=True)
        growing = torch.where(ends, -torch.inf, scores)
        worst = self.ranked[:, -1:]
        # A log-probability only falls and a length only grows, so no answer can get beyond this rank.
        reach = growing.amax(-1, keepdim=True) / self.limit**penalty
        over = worst > -torch.inf if self.method.early else worst >= reach
        self.scores = torch.where(over, -torch.inf, growing)

    def answers(self, endings: StopConditions) -> list[Answer]:
        """The best of each prompt, with the others behind it."""
        tokens, places, scores, ends = (torch.stack(each).tolist() for each in zip(*self.steps, strict=True))
        last, growing = len(tokens) - 1, self.scores.tolist()
        found = []
        for row in range(len(growing)):
            spots = [(n, k) for n in range(last + 1) for k in range(self.method.width)]
            kept = [(n, k) for n, k in spots if ends[n][row][k] or (n == last and growing[row][k] > -torch.inf)]
            kept.sort(key=lambda at: scores[at[0]][row][at[1]] / (at[0] + 1) ** self.method.length_penalty)
            best = [
                endings.answer(trace_tokens(tokens, places, row, n, k), scores[n][row][k], ends[n][row][k])
                for n, k in reversed(kept[-self.method.best :])
            ]
            found.append(best[0].with_others(best[1:]))
        return found


def trace_tokens(
    tokens: list[list[list[int]]], places: list[list[list[int]]], row: int, step: int, place: int
) -> list[int]:
    """The tokens of a hypothesis, read from its end."""
    found = []
    for n in range(step, -1, -1):
        found.append(tokens[n][row][place])
        place = places[n][row][place]
    return found[::-1]


def search_beam(steps: CachedSteps, method: Beam, endings: StopConditions, limit: int, every: int) -> list[Answer]:
    """The best answers to each prompt; looks only `every` few steps whether all have ended."""
    logits = steps.first()
    if method.width > logits.shape[-1]:
        raise ValueError(f"Beam.width must be at most the {logits.shape[-1]} tokens there are, but got {method.width}")
    grown = Hypotheses.none_yet(method, limit, logits)
    rows = torch.arange(len(logits), device=logits.device).unsqueeze(-1) * method.width
    written = StopDetector(endings, rows.numel() * method.width)
    steps.spread(method.width)
    while True:
        tokens, places, scores = grown.grow(logits)
        index = (rows + places).flatten()
        grown.settle(tokens, places, scores, written.ends(tokens, index))
        done = len(grown.steps)
        if done == limit or (done % every == 0 and not bool((grown.scores > -torch.inf).any())):
            return grown.answers(endings)
        steps.reorder(index)
        logits = steps.next(tokens.flatten())


class StopDetector:
    """Says which hypotheses end, by their last token or by their text."""

    def __init__(self, endings: StopConditions, count: int) -> None:
        self.endings = endings
        self.texts: list[list[int]] = [[] for _ in range(count)]

    def ends(self, tokens: Tensor, index: Tensor) -> Tensor:
        """Tokens (B, K) that continue the hypotheses index (B K) -> bool (B, K)."""
        found = torch.isin(tokens, self.endings.tokens.to(tokens.device))
        if not self.endings.words:
            return found
        added = zip(index.tolist(), tokens.flatten().tolist(), strict=True)
        self.texts = [[*self.texts[place], token] for place, token in added]
        cut = [self.endings.cut(text) is not None for text in self.texts]
        return found | torch.tensor(cut, device=found.device).view_as(found)

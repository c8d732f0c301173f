"""Beam search: extends several hypotheses per prompt and keeps the likeliest.

B prompts, K hypotheses per prompt, V vocabulary size, N steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from foci.decoding.cpu_steps import CpuSteps
from foci.decoding.step_c import rank_tokens
from foci.decoding.steps import CachedSteps
from foci.decoding.stopping import Answer, StopConditions

# A length to the power of a much larger penalty is above the range of floats.
MAX_LENGTH_PENALTY = 10


@dataclass(frozen=True)
class Beam:
    """Settings for beam search with `width` hypotheses; one that ends keeps its place, so a width of 1 is greedy.

    >>> foci.decoding.Beam(4, best=2)
    Beam(width=4, length_penalty=1.0, best=2, early=False)
    """

    width: int = 4  # the number of hypotheses per prompt
    length_penalty: float = 1.0  # answers are ranked by log-probability / length ** penalty: 0 prefers short ones
    best: int = 1  # the number of answers to return; all but the first are in `Answer.others`
    early: bool = False  # True: stop when `best` answers have ended; False: when no hypothesis can still outrank them

    def __post_init__(self) -> None:
        if not 1 <= self.best <= self.width:
            raise ValueError(f"Beam.best must be from 1 to width={self.width!r}, got {self.best!r}")
        if not 0 <= self.length_penalty <= MAX_LENGTH_PENALTY:
            raise ValueError(
                f"Beam.length_penalty must be between 0 and {MAX_LENGTH_PENALTY}, got {self.length_penalty!r}"
            )


@dataclass
class Hypotheses:
    """The active and the finished hypotheses; an empty place has log-probability -inf."""

    method: Beam
    limit: int
    scores: Tensor  # (B, K): log-probabilities of the active hypotheses
    best_ranks: Tensor  # (B, best): the highest ranks of finished hypotheses
    finished: Tensor  # (B, 1): how many hypotheses have finished
    # For each step: token, place of the hypothesis it extends, log-probability, whether it ends there; (B, K) each.
    history: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def start(cls, method: Beam, limit: int, logits: Tensor) -> Hypotheses:
        """Start with one empty hypothesis per prompt."""
        batch, device = len(logits), logits.device
        best_ranks = torch.full((batch, method.best), -torch.inf, device=device)
        finished = torch.zeros(batch, 1, dtype=torch.long, device=device)
        return cls(method, limit, torch.zeros(batch, 1, device=device), best_ranks, finished)

    def extend(self, logits: Tensor, prompts: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The likeliest continuations: tokens, places of their parent hypotheses, log-probabilities; (B, K) each.

        The logits are those of the hypotheses of `prompts`; None: of all. The others have ended.
        """
        batch, width = len(self.scores), self.method.width
        # The K best of a prompt are among the K best of its hypotheses.
        logs, tokens = (each.view(-1, self.scores.shape[1], width) for each in rank_tokens(logits, width))
        if prompts is not None and len(prompts) < batch:
            logs = logs.new_full((batch, *logs.shape[1:]), -torch.inf).index_copy(0, prompts, logs)
            tokens = tokens.new_zeros(batch, *tokens.shape[1:]).index_copy(0, prompts, tokens)
        scores, index = (self.scores.unsqueeze(-1) + logs).flatten(1).topk(width, dim=-1)
        free = torch.arange(width, device=scores.device) < width - self.finished
        tokens = tokens.flatten(1).gather(1, index)
        return tokens, index // width, torch.where(free, scores, -torch.inf)

    def record_step(self, tokens: Tensor, parents: Tensor, scores: Tensor, ends: Tensor) -> None:
        """Record a step: rank and remove the hypotheses that end, keep the others active."""
        ends = ends & (scores > -torch.inf)
        self.history.append((tokens, parents, scores, ends))
        length, penalty = len(self.history), self.method.length_penalty
        ranks = torch.where(ends, scores / length**penalty, -torch.inf)
        self.best_ranks = torch.cat([self.best_ranks, ranks], dim=-1).topk(self.method.best, dim=-1).values
        self.finished = self.finished + ends.sum(-1, keepdim=True)
        active = torch.where(ends, -torch.inf, scores)
        worst = self.best_ranks[:, -1:]
        # A log-probability only falls and a length only grows, so this bounds the rank of every active hypothesis.
        bound = active.amax(-1, keepdim=True) / self.limit**penalty
        done = worst > -torch.inf if self.method.early else worst >= bound
        self.scores = torch.where(done, -torch.inf, active)

    def answers(self, conditions: StopConditions) -> list[Answer]:
        """The best answer to each prompt, with the next best ones in `others`."""
        tokens, parents, scores, ends = (torch.stack(each).tolist() for each in zip(*self.history, strict=True))
        last, active = len(tokens) - 1, self.scores.tolist()
        answers = []
        for row in range(len(active)):
            every = [(n, k) for n in range(last + 1) for k in range(self.method.width)]
            complete = [(n, k) for n, k in every if ends[n][row][k] or (n == last and active[row][k] > -torch.inf)]
            complete.sort(key=lambda at: scores[at[0]][row][at[1]] / (at[0] + 1) ** self.method.length_penalty)
            best = [
                conditions.build_answer(trace_tokens(tokens, parents, row, n, k), scores[n][row][k], ends[n][row][k])
                for n, k in reversed(complete[-self.method.best :])
            ]
            if not best:
                raise ValueError(
                    "the logits of the model must be finite, got NaN: its weights are damaged or too large"
                )
            answers.append(best[0].with_others(best[1:]))
        return answers


def trace_tokens(
    tokens: list[list[list[int]]], parents: list[list[list[int]]], row: int, step: int, place: int
) -> list[int]:
    """The tokens of a hypothesis, followed from its last step back to the first."""
    traced = []
    for n in range(step, -1, -1):
        traced.append(tokens[n][row][place])
        place = parents[n][row][place]
    return traced[::-1]


def search_beam(
    steps: CachedSteps, method: Beam, conditions: StopConditions, limit: int, check_every: int
) -> list[Answer]:
    """Find the best answers to each prompt; checks only every `check_every` steps whether all have ended."""
    logits = steps.prefill()
    if method.width > logits.shape[-1]:
        raise ValueError(f"Beam.width must be at most the vocabulary size {logits.shape[-1]}, got {method.width}")
    hypotheses = Hypotheses.start(method, limit, logits)
    first_rows = torch.arange(len(logits), device=logits.device).unsqueeze(-1) * method.width
    detector = StopDetector(conditions, first_rows.numel() * method.width)
    steps.select_rows(torch.arange(len(logits), device=logits.device).repeat_interleave(method.width))
    # The prompts that the steps still compute; None: those of a graph or of a cache that is expensive to change, all.
    prompts = torch.arange(len(logits), device=logits.device) if isinstance(steps, CpuSteps) else None
    while True:
        tokens, parents, scores = hypotheses.extend(logits, prompts)
        index = (first_rows + parents).flatten()
        hypotheses.record_step(tokens, parents, scores, detector.find_ends(tokens, index))
        count = len(hypotheses.history)
        if count == limit or (count % check_every == 0 and not bool((hypotheses.scores > -torch.inf).any())):
            return hypotheses.answers(conditions)
        if prompts is not None:
            before, prompts = prompts, (hypotheses.scores > -torch.inf).any(-1).nonzero().squeeze(1)
            places = torch.searchsorted(before, prompts)
            tokens, index = tokens[prompts], (places[:, None] * method.width + parents[prompts]).flatten()
            steps.select_rows(index)
        else:
            steps.reorder(index)
        logits = steps.advance(tokens.flatten())


class StopDetector:
    """Finds the hypotheses that end, by their last token or by a stop string in their text."""

    def __init__(self, conditions: StopConditions, count: int) -> None:
        self.conditions = conditions
        self.sequences: list[list[int]] = [[] for _ in range(count)]

    def find_ends(self, tokens: Tensor, index: Tensor) -> Tensor:
        """Tokens (B, K) that extend the hypotheses index (B K) -> bool (B, K)."""
        ends = torch.isin(tokens, self.conditions.tokens.to(tokens.device))
        if not self.conditions.strings:
            return ends
        added = zip(index.tolist(), tokens.flatten().tolist(), strict=True)
        self.sequences = [[*self.sequences[parent], token] for parent, token in added]
        cut = [self.conditions.text_before_stop(sequence) is not None for sequence in self.sequences]
        return ends | torch.tensor(cut, device=ends.device).view_as(ends)

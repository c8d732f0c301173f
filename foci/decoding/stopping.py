"""Where an answer ends: at a token, at a text, or at its limit.

B sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

DecodeFunction = Callable[[list[int]], str]


@dataclass(frozen=True)
class Answer:
    """What a model wrote to one prompt."""

    tokens: list[int]  # without the prompt, and without the token that ended it
    score: float  # the log-probability of these tokens, and of the one that ended it
    stopped: bool  # whether it ended by itself; False: it was cut at its limit
    text: str | None = None  # the text of the tokens, before a stop string, where a decode function was given
    others: tuple[Answer, ...] = ()  # the next best ones, where a beam search was asked for several

    def with_others(self, others: Sequence[Answer]) -> Answer:
        return replace(self, others=tuple(others))


class StopConditions:
    """Stop tokens and stop strings."""

    def __init__(self, stop: int | str | Sequence[int | str], decode: DecodeFunction | None) -> None:
        given = [stop] if isinstance(stop, int | str) else list(stop)
        wrong = [each for each in given if isinstance(each, bool) or not isinstance(each, int | str) or each == ""]
        if wrong:
            raise TypeError(f"stop takes tokens (whole numbers) and texts that are not empty, but got {wrong[0]!r}")
        self.words = [each for each in given if isinstance(each, str)]
        if self.words and decode is None:
            raise ValueError(f"stop strings need decode=, a function from tokens to a text, but got {self.words} alone")
        self.ids = {each for each in given if isinstance(each, int)}
        self.tokens = torch.tensor(sorted(self.ids), dtype=torch.long)
        self.decode = decode

    def cut(self, tokens: list[int]) -> str | None:
        """The text before the first stop string; None where there is none in it."""
        if self.decode is None or not self.words:
            return None
        text = self.decode(tokens)
        places = [place for word in self.words if (place := text.find(word)) >= 0]
        return text[: min(places)] if places else None

    def answer(self, tokens: list[int], score: float, stopped: bool) -> Answer:
        """The answer that these tokens are, the one that ended it among them."""
        kept = tokens[:-1] if stopped and tokens[-1] in self.ids else tokens
        text = None
        if self.decode is not None:
            text = self.cut(kept) if stopped else None
            text = self.decode(kept) if text is None else text
        return Answer(kept, score, stopped, text)


class AnswerBatch:
    """The answers to a batch while they are written."""

    def __init__(self, count: int, endings: StopConditions) -> None:
        self.endings = endings
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.scores, self.stopped = [0.0] * count, [False] * count

    def add(self, tokens: list[int], scores: list[float]) -> list[int | None]:
        """One more token of each; what is new in each answer, None where it has ended."""
        return [self._added(row, token, scores[row]) for row, token in enumerate(tokens)]

    def _added(self, row: int, token: int, score: float) -> int | None:
        if self.stopped[row]:
            return None
        self.tokens[row].append(token)
        self.scores[row] += score
        if token in self.endings.ids:
            self.stopped[row] = True
            return None
        self.stopped[row] = self.endings.cut(self.tokens[row]) is not None
        return token

    def answers(self) -> list[Answer]:
        given = zip(self.tokens, self.scores, self.stopped, strict=True)
        return [self.endings.answer(tokens, score, stopped) for tokens, score, stopped in given]

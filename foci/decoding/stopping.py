"""Stop conditions: an answer ends at a stop token, at a stop string or at its maximum length.

B sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

DecodeFunction = Callable[[list[int]], str]


@dataclass(frozen=True)
class Answer:
    """The tokens that a model generated for one prompt.

    >>> model = foci.nn.Decoder.from_name("tiny", vocabulary=100)
    >>> answer = foci.generate(model, [5, 3, 8], new_tokens=4)[0]
    >>> len(answer.tokens), answer.stopped, answer.text
    (4, False, None)
    """

    tokens: list[int]  # without the prompt and without the stop token
    score: float  # the log-probability of these tokens, including the stop token
    stopped: bool  # True: a stop token or string ended it; False: it reached new_tokens
    text: str | None = None  # the decoded tokens up to a stop string, if a decode function was given
    others: tuple[Answer, ...] = ()  # the next best answers of a beam search with best > 1

    def with_others(self, others: Sequence[Answer]) -> Answer:
        return replace(self, others=tuple(others))


class StopConditions:
    """Stop tokens and stop strings."""

    def __init__(self, stop: int | str | Sequence[int | str], decode: DecodeFunction | None) -> None:
        entries = [stop] if isinstance(stop, int | str) else list(stop)
        wrong = [each for each in entries if isinstance(each, bool) or not isinstance(each, int | str) or each == ""]
        if wrong:
            raise TypeError(f"stop must be tokens (int) or non-empty strings, got {wrong[0]!r}")
        self.strings = [each for each in entries if isinstance(each, str)]
        if self.strings and decode is None:
            raise ValueError(f"decode must be a function from tokens to text for stop={self.strings}, got None")
        self.token_ids = {each for each in entries if isinstance(each, int)}
        self.tokens = torch.tensor(sorted(self.token_ids), dtype=torch.long, device="cpu")
        self.decode = decode

    def text_before_stop(self, tokens: list[int]) -> str | None:
        """The text before the first stop string, or None if the text contains none."""
        if self.decode is None or not self.strings:
            return None
        text = self.decode(tokens)
        offsets = [offset for string in self.strings if (offset := text.find(string)) >= 0]
        return text[: min(offsets)] if offsets else None

    def build_answer(self, tokens: list[int], score: float, stopped: bool) -> Answer:
        """The answer made of these tokens, which may end with a stop token."""
        tokens = tokens[:-1] if stopped and tokens[-1] in self.token_ids else tokens
        text = None
        if self.decode is not None:
            text = self.text_before_stop(tokens) if stopped else None
            text = self.decode(tokens) if text is None else text
        return Answer(tokens, score, stopped, text)


class AnswerBatch:
    """The answers to a batch of prompts during generation."""

    def __init__(self, count: int, conditions: StopConditions) -> None:
        self.conditions = conditions
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.scores, self.stopped = [0.0] * count, [False] * count
        self.rows = list(range(count))  # the answers that the steps still compute, in the order of their rows

    def add(self, tokens: list[int], scores: list[float]) -> list[int | None]:
        """Add one token to each answer of `rows`; returns the tokens added, None for answers that have ended."""
        added: list[int | None] = [None] * len(self.tokens)
        for row, token, score in zip(self.rows, tokens, scores, strict=True):
            added[row] = self._add_token(row, token, score)
        return added

    def drop_ended(self) -> list[int]:
        """Drop the answers that have ended from `rows`; returns the places of those that stay."""
        places = [place for place, row in enumerate(self.rows) if not self.stopped[row]]
        self.rows = [self.rows[place] for place in places]
        return places

    def _add_token(self, row: int, token: int, score: float) -> int | None:
        if self.stopped[row]:
            return None
        self.tokens[row].append(token)
        self.scores[row] += score
        if token in self.conditions.token_ids:
            self.stopped[row] = True
            return None
        self.stopped[row] = self.conditions.text_before_stop(self.tokens[row]) is not None
        return token

    def answers(self) -> list[Answer]:
        rows = zip(self.tokens, self.scores, self.stopped, strict=True)
        return [self.conditions.build_answer(tokens, score, stopped) for tokens, score, stopped in rows]

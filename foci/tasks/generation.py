"""Generation: a language model, which says how likely every next token is and writes on.

B windows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.decoding import Sampling, generate
from foci.inputs.padding import padded
from foci.inputs.tables import good_rows, kind, only, rows, text_of
from foci.inputs.text import PAD, START, Tokenizer, TokenizerKind, from_json, learned, to_json
from foci.nn.config import Config
from foci.nn.model import Model
from foci.nn.transformer import Decoder
from foci.record.record import Record
from foci.tasks.task import Done, Problem, Task, unheard
from foci.tasks.task_record import record_of

NOT_COUNTED = -100
# How many tokens are looked at in one call while a text is measured.
MEASURED = 16384


@dataclass(frozen=True)
class GenerationSettings(Config):
    """What a language model is made of: [task] in a run's TOML."""

    section = "task"

    size: Literal["tiny", "small", "base"] = "small"  # of the model; what follows changes single numbers of it
    width: int | None = None  # of the tokens
    layers: int | None = None  # how many blocks
    heads: int | None = None  # of each attention
    dropout: float | None = None  # the share dropped while training
    attention_dropout: float | None = None  # the share of attention weights dropped while training
    biases: bool = True  # whether linear layers and norms have biases
    positions: Literal["learned", "rotary"] = "learned"  # how tokens know where they stand
    tokenizer: TokenizerKind = "characters"  # what is written: characters, bytes, words or pieces of words (bpe)
    vocabulary: int = 8000  # how many tokens there are at most, for bpe and words
    context: int = 256  # how many tokens the model looks back
    stride: int | None = None  # how far windows move on while a text is measured; None: by the context, no overlap
    new_tokens: int = 200  # how much `foci run` writes
    temperature: float = 0.8  # how daring it is: 0 writes the likeliest
    top_k: int | None = None  # only the k likeliest tokens are drawn
    seed: int = 1  # what `foci run` draws with

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "width", "layers", "heads", "vocabulary", "context", "stride", "new_tokens", "top_k")
        self.at_least(0, "temperature")
        self.shares("dropout", "attention_dropout", whole=False)
        if self.stride is not None and self.stride > self.context:
            raise ValueError(f"stride must be at most the context, {self.context}, but got {self.stride}")


@dataclass(frozen=True)
class Passage:
    """A text to learn from, to be measured, or to be continued."""

    text: str


@dataclass(frozen=True)
class Window:
    """A piece of all tokens: the model reads all but the last, and `fresh` tokens at its end count."""

    tokens: Tensor  # (T + 1,)
    fresh: int


class Measured(tuple[float, int]):
    """How many nats a passage takes, and how many characters it has."""

    def __str__(self) -> str:
        return f"{self[0] / max(self[1], 1):.4f} nats per character"


class Generation(Task[Passage | Window, Measured]):
    """A text, or JSONL with the key `text`; nats per character.

    >>> task = Generation.start(GenerationSettings(size="tiny", context=4), [Passage("to be or not")])
    >>> windows = task.epoch([Passage("to be or not")], training=False, generator=torch.Generator())
    >>> [task.tokenizer.decode(window.tokens.tolist()) for window in windows]
    ['to b', 'be or', 'r not']
    """

    name = "generation"
    metric = "nats_per_character"
    better = "lower"
    settings_type = GenerationSettings
    settings: GenerationSettings

    def __init__(self, settings: GenerationSettings, tokenizer: Tokenizer) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        # The examples of the last epoch and their tokens: a long text is put together once.
        self._last: tuple[Sequence[Passage | Window], Tensor] | None = None

    @classmethod
    def read(cls, paths: Sequence[Path], settings: GenerationSettings) -> list[Passage | Window]:
        """A text file is one passage; JSONL has one a line."""
        path = only(paths, "a text or a JSONL file")
        if kind(path) in {".jsonl", ".ndjson"}:
            return [Passage(row.fields["text"]) for row in good_rows(path, ("text",))]
        text = text_of(path)
        if not text:
            raise ValueError(f"{path}: expected a text, but it is empty")
        return [Passage(text)]

    @classmethod
    def check(cls, paths: Sequence[Path], settings: GenerationSettings) -> Iterator[Problem]:
        """Lines that cannot be read, and passages without text."""
        path = only(paths, "a text or a JSONL file")
        if kind(path) not in {".jsonl", ".ndjson"}:
            try:
                cls.read(paths, settings)
            except ValueError as error:
                yield Problem(str(path), str(error).removeprefix(f"{path}: "))
            return
        for row in rows(path, ("text",)):
            if row.problem is not None:
                yield Problem(row.place, row.problem)
            elif not row.fields["text"].strip():
                yield Problem(row.place, "expected a text, but it is empty", "warning")

    @classmethod
    def start(cls, settings: GenerationSettings, train: Sequence[Passage | Window]) -> Self:
        """Learns the vocabulary."""
        texts = [passage.text for passage in train if isinstance(passage, Passage)]
        return cls(settings, learned(settings.tokenizer, texts, settings.vocabulary))

    def files(self) -> dict[str, str]:
        return {"tokenizer.json": to_json(self.tokenizer)}

    @classmethod
    def from_files(cls, settings: GenerationSettings, files: dict[str, str]) -> Self:
        return cls(settings, from_json(files["tokenizer.json"]))

    def model(self) -> Model:
        """A decoder, its embeddings shared with the logits."""
        settings = self.settings
        names = ("width", "layers", "heads", "dropout", "attention_dropout", "biases")
        changes: dict[str, Any] = {name: getattr(settings, name) for name in names}
        if settings.positions == "rotary":
            changes |= {"positions": None, "rotary": 10000.0}
        else:
            changes["positions"] = "learned"
        changes = {name: value for name, value in changes.items() if value is not None or name == "positions"}
        return Decoder.from_name(
            settings.size, vocabulary=self.tokenizer.vocabulary, max_length=settings.context, **changes
        )

    @classmethod
    def split(
        cls, examples: Sequence[Passage | Window], share: float, generator: torch.Generator
    ) -> tuple[Sequence[Passage | Window], Sequence[Passage | Window]]:
        """Of one text its end is the dev part; of several passages some."""
        if len(examples) > 1 or not isinstance(examples[0], Passage):
            return super().split(examples, share, generator)
        text = examples[0].text
        cut = int(len(text) * (1 - share))
        return [Passage(text[:cut])], [Passage(text[cut:])]

    def epoch(
        self, examples: Sequence[Passage | Window], training: bool, generator: torch.Generator
    ) -> Sequence[Passage | Window]:
        """Windows of the context's length; while training they begin elsewhere in each epoch."""
        if self._last is None or self._last[0] is not examples:
            self._last = examples, self._joined([each for each in examples if isinstance(each, Passage)])
        tokens = self._last[1]
        context = self.settings.context
        if training:
            room = max(len(tokens) - 1 - context, 0)
            first = int(torch.randint(min(room + 1, context), (), generator=generator))
            starts = range(first, max(len(tokens) - context, first + 1), context)
            return [Window(tokens[at : at + context + 1], context) for at in starts]
        return windows(tokens, context, self.settings.stride or context)

    def size(self, example: Passage | Window) -> int:
        return len(example.tokens) - 1 if isinstance(example, Window) else len(example.text)

    def batch(
        self, examples: Sequence[Passage | Window], training: bool, generator: torch.Generator
    ) -> dict[str, Tensor]:
        found = [example for example in examples if isinstance(example, Window)]
        targets = []
        for window in found:
            target = window.tokens[1:].clone()
            target[: max(len(target) - window.fresh, 0)] = NOT_COUNTED
            targets.append(target)
        return {
            "inputs": padded([window.tokens[:-1] for window in found], PAD)[0],
            "targets": padded(targets, NOT_COUNTED)[0],
        }

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(batch["inputs"]).logits
        targets = batch["targets"]
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=NOT_COUNTED, reduction="sum"
        )
        return loss, (targets != NOT_COUNTED).sum()

    def decode(self, model: nn.Module, examples: Sequence[Passage | Window], done: Done = unheard) -> list[Measured]:
        """How likely the model finds each passage, all of it, its first token included."""
        return [self._measured(model, example, done) for example in examples if isinstance(example, Passage)]

    def score(self, answers: Sequence[Measured], examples: Sequence[Passage | Window]) -> dict[str, float | str]:
        nats, characters = sum(answer[0] for answer in answers), sum(answer[1] for answer in answers)
        stride = self.settings.stride or self.settings.context
        return {
            "nats_per_character": nats / max(characters, 1),
            "characters": float(characters),
            "signature": f"context:{self.settings.context}|stride:{stride}|tokens:{self.settings.tokenizer}",
        }

    def given(self, text: str) -> Passage:
        return Passage(text)

    @property
    def _room(self) -> int:
        """How many tokens of a prompt are read: a long one leaves a quarter of the context to write in."""
        settings = self.settings
        return settings.context - max(min(settings.new_tokens, settings.context // 4), 1)

    def is_cut(self, example: Passage | Window) -> bool:
        """Of a longer prompt the end is read."""
        return isinstance(example, Passage) and len(self.tokenizer.encode(example.text)) + 1 > self._room

    def write(self, model: nn.Module, examples: Sequence[Passage | Window]) -> list[str]:
        """Each passage, continued."""
        return [
            example.text + self.tokenizer.decode(self._answer(model, example.text)[1])
            for example in examples
            if isinstance(example, Passage)
        ]

    def show(self, model: nn.Module, example: Passage | Window) -> Record:
        """The passage and what comes after it, as the model read them."""
        assert isinstance(example, Passage)
        prompt, answer = self._answer(model, example.text)
        tokens = [*prompt, *answer]
        with torch.no_grad():
            row = torch.tensor([tokens], device=next(model.parameters()).device)
            weights = model(row, return_weights=True).weights
        record = record_of(model, weights, {"input": self.tokenizer.labels(tokens)}, self.tokenizer.decode(tokens))
        record.prompt = len(prompt)
        return record

    def _joined(self, passages: Sequence[Passage]) -> Tensor:
        """All passages as one row of tokens (N,), each after a start."""
        return torch.tensor([token for passage in passages for token in (START, *self.tokenizer.encode(passage.text))])

    @torch.no_grad()
    def _measured(self, model: nn.Module, passage: Passage, done: Done) -> Measured:
        device = next(model.parameters()).device
        pieces = windows(self._joined([passage]), self.settings.context, self.settings.stride or self.settings.context)
        nats, count = torch.zeros((), dtype=torch.float64), max(MEASURED // self.settings.context, 1)
        for first in range(0, len(pieces), count):
            batch = self.batch(pieces[first : first + count], False, torch.Generator())
            loss, _ = self.loss(model, {name: tensor.to(device) for name, tensor in batch.items()})
            nats += loss.double().cpu()
            done(min(count, len(pieces) - first) / len(pieces))
        return Measured((float(nats), len(passage.text)))

    def _answer(self, model: nn.Module, text: str) -> tuple[list[int], list[int]]:
        """The end of a text as tokens, as much as there is room for, and the tokens that come after it."""
        settings = self.settings
        prompt = [START, *self.tokenizer.encode(text)][-self._room :]
        new = min(settings.new_tokens, settings.context - len(prompt))
        method = Sampling(settings.temperature, top_k=settings.top_k, seed=settings.seed)
        return prompt, generate(model, [prompt], new_tokens=new, method=method, stop=START)[0].tokens


def windows(tokens: Tensor, context: int, stride: int) -> list[Passage | Window]:
    """Windows that together predict every token once, each with as much before it as there is room for."""
    found: list[Passage | Window] = []
    predicted = 0
    while predicted < len(tokens) - 1:
        end = min(max(predicted + stride, min(context, len(tokens) - 1)), len(tokens) - 1)
        found.append(Window(tokens[max(end - context, 0) : end + 1], end - predicted))
        predicted = end
    return found

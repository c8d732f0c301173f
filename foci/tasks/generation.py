"""Text generation: a language model that scores texts and continues them.

B windows, T tokens, N tokens of all passages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.decoding import Sampling, generate, stream
from foci.inputs.padding import pad_sequences
from foci.inputs.tables import data_suffix, read_table_rows, read_text_file, read_valid_rows, require_one_path
from foci.inputs.text import (
    PAD,
    START,
    Tokenizer,
    TokenizerKind,
    tokenizer_from_json,
    tokenizer_to_json,
    train_tokenizer,
)
from foci.inputs.tokenizer_choice import choose_vocabulary
from foci.nn.config import SEED_LIMIT, VOCABULARY_LIMIT
from foci.nn.model import Model
from foci.nn.transformer import Decoder
from foci.record.record import Record
from foci.record.token_texts import REPLACEMENT_CHARACTER
from foci.tasks.task import (
    DEFAULT_VOCABULARY,
    LENGTH_LIMIT,
    ModelSize,
    Problem,
    ProgressCallback,
    Task,
    TaskSettings,
    choose_model_size,
    ignore_progress,
)
from foci.tasks.task_record import build_task_record

IGNORED_TARGET = -100
# When the model size is chosen, every CHARACTERS_PER_EXAMPLE characters of a text count as one example.
CHARACTERS_PER_EXAMPLE = 50
# Tokens per forward call while a text is scored.
SCORING_TOKENS = 16384


@dataclass(frozen=True)
class GenerationSettings(TaskSettings):
    """Settings of the language model: the [task] section of a run's TOML."""

    size: ModelSize | None = None  # None: tiny below a million characters, else small; the next settings override it
    width: int | None = None  # model width
    layers: int | None = None  # number of blocks
    heads: int | None = None  # attention heads
    dropout: float | None = None  # dropout rate
    attention_dropout: float | None = None  # dropout rate of the attention weights
    biases: bool = True  # biases in linear layers and norms
    positions: Literal["learned", "rotary"] = "learned"  # position encoding
    tokenizer: TokenizerKind = "characters"  # characters, bytes, words or byte-pair encoding (bpe)
    vocabulary: int | None = None  # maximum vocabulary size, for bpe and words; None: from the data, at most 8000
    context: int = 256  # context length in tokens
    stride: int | None = None  # step between windows while a text is scored; None: the context, without overlap
    new_tokens: int = 200  # tokens that `foci run` generates
    temperature: float = 0.8  # sampling temperature; 0: greedy
    top_k: int | None = None  # sample only from the k most likely tokens
    seed: int = 1  # random seed of `foci run`

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range(1, VOCABULARY_LIMIT, "top_k")
        self.check_range(1, LENGTH_LIMIT, "context", "stride", "new_tokens")
        self.check_range(0, 1000, "temperature")
        self.check_range(0, SEED_LIMIT, "seed")
        self.check_fractions("dropout", "attention_dropout", include_one=False)
        if self.stride is not None and self.stride > self.context:
            raise ValueError(f"task.stride must be at most task.context ({self.context}), got {self.stride}")


@dataclass(frozen=True)
class Passage:
    """A text to train on, to score or to continue."""

    text: str


@dataclass(frozen=True)
class TokenWindow:
    """A piece of the tokens: the model reads all but the last, and the last `counted` tokens enter the loss."""

    tokens: Tensor  # (T + 1,)
    counted: int


class PassageLikelihood(tuple[float, int]):
    """The negative log-likelihood of a passage in nats, and its number of characters."""

    def __str__(self) -> str:
        return f"{self[0] / max(self[1], 1):.4f} nats per character"


class Generation(Task[Passage | TokenWindow, PassageLikelihood]):
    """Language modelling on a text file, or JSONL with the key `text`; metric: nats per character.

    >>> task = Generation.from_examples(GenerationSettings(size="tiny", context=4), [Passage("to be or not")])
    >>> windows = task.epoch_examples([Passage("to be or not")], training=False, generator=torch.Generator())
    >>> [task.tokenizer.decode(window.tokens.tolist()) for window in windows]
    ['to b', 'be or', 'r not']
    """

    name = "generation"
    metric = "nats_per_character"
    better = "lower"
    scores_whole_inputs = True
    settings_type = GenerationSettings
    settings: GenerationSettings

    def __init__(self, settings: GenerationSettings, tokenizer: Tokenizer) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        # The examples of the last epoch and their tokens: a long text is tokenized once.
        self._last: tuple[Sequence[Passage | TokenWindow], Tensor] | None = None

    @classmethod
    def read(cls, paths: Sequence[Path], settings: GenerationSettings) -> list[Passage | TokenWindow]:
        """Reads a text file as one passage, or JSONL with one passage per line."""
        path = require_one_path(paths, "a text or JSONL file")
        if data_suffix(path) in {".jsonl", ".ndjson"}:
            return [Passage(row.fields["text"]) for row in read_valid_rows(path, ("text",))]
        text = read_text_file(path)
        if not text:
            raise ValueError(f"{path} must hold text, got an empty file")
        return [Passage(text)]

    @classmethod
    def check(cls, paths: Sequence[Path], settings: GenerationSettings) -> Iterator[Problem]:
        """Yields lines that cannot be read, and empty passages."""
        path = require_one_path(paths, "a text or JSONL file")
        if data_suffix(path) not in {".jsonl", ".ndjson"}:
            try:
                cls.read(paths, settings)
            except ValueError as error:
                yield Problem(str(path), "the file " + str(error).removeprefix(f"{path} "))
            return
        for row in read_table_rows(path, ("text",)):
            if row.problem is not None:
                yield Problem(row.location, row.problem)
            elif not row.fields["text"].strip():
                yield Problem(row.location, "text must not be empty", "warning")

    @classmethod
    def from_examples(cls, settings: GenerationSettings, train: Sequence[Passage | TokenWindow]) -> Self:
        """Trains the tokenizer."""
        settings = cls.fill_settings(settings, train)
        texts = [passage.text for passage in train if isinstance(passage, Passage)]
        return cls(settings, train_tokenizer(settings.tokenizer, texts, settings.vocabulary or DEFAULT_VOCABULARY))

    @classmethod
    def fill_settings(cls, settings: GenerationSettings, train: Sequence[Passage | TokenWindow]) -> GenerationSettings:
        """Chooses size and vocabulary where they are not set."""
        texts = [passage.text for passage in train if isinstance(passage, Passage)]
        settings = settings.fill(size=choose_model_size(sum(map(len, texts)) // CHARACTERS_PER_EXAMPLE))
        return settings.fill(vocabulary=choose_vocabulary(texts)) if settings.tokenizer == "bpe" else settings

    def learned_state(self) -> dict[str, str]:
        return {"tokenizer.json": tokenizer_to_json(self.tokenizer)}

    @classmethod
    def from_learned_state(cls, settings: GenerationSettings, files: dict[str, str]) -> Self:
        return cls(settings, tokenizer_from_json(files["tokenizer.json"]))

    def model(self) -> Model:
        """Builds a decoder with tied embeddings."""
        settings = self.settings
        names = ("width", "layers", "heads", "dropout", "attention_dropout", "biases")
        changes: dict[str, Any] = {name: getattr(settings, name) for name in names}
        if settings.positions == "rotary":
            changes |= {"positions": None, "rotary": 10000.0}
        else:
            changes["positions"] = "learned"
        changes = {name: value for name, value in changes.items() if value is not None or name == "positions"}
        return Decoder.from_name(
            settings.size or "small", vocabulary=self.tokenizer.vocabulary, max_length=settings.context, **changes
        )

    @classmethod
    def split(
        cls, examples: Sequence[Passage | TokenWindow], share: float, generator: torch.Generator
    ) -> tuple[Sequence[Passage | TokenWindow], Sequence[Passage | TokenWindow]]:
        """Holds out the end of a single text, or some of several passages."""
        if len(examples) > 1 or not isinstance(examples[0], Passage):
            return super().split(examples, share, generator)
        text = examples[0].text
        cut = int(len(text) * (1 - share))
        return [Passage(text[:cut])], [Passage(text[cut:])]

    def epoch_examples(
        self, examples: Sequence[Passage | TokenWindow], training: bool, generator: torch.Generator
    ) -> Sequence[Passage | TokenWindow]:
        """Cuts the tokens into windows of the context length; in training they start at a random offset."""
        if self._last is None or self._last[0] is not examples:
            self._last = examples, self._concatenate([each for each in examples if isinstance(each, Passage)])
        tokens = self._last[1]
        context = self.settings.context
        if training:
            last_start = max(len(tokens) - 1 - context, 0)
            first = int(torch.randint(min(last_start + 1, context), (), generator=generator))
            starts = range(first, max(len(tokens) - context, first + 1), context)
            return [TokenWindow(tokens[at : at + context + 1], context) for at in starts]
        return cut_windows(tokens, context, self.settings.stride or context)

    def size(self, example: Passage | TokenWindow) -> int:
        return len(example.tokens) - 1 if isinstance(example, TokenWindow) else len(example.text)

    def batch(
        self, examples: Sequence[Passage | TokenWindow], training: bool, generator: torch.Generator
    ) -> dict[str, Tensor]:
        windows = [example for example in examples if isinstance(example, TokenWindow)]
        targets = []
        for window in windows:
            target = window.tokens[1:].clone()
            target[: max(len(target) - window.counted, 0)] = IGNORED_TARGET
            targets.append(target)
        return {
            "inputs": pad_sequences([window.tokens[:-1] for window in windows], PAD)[0],
            "targets": pad_sequences(targets, IGNORED_TARGET)[0],
        }

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(batch["inputs"]).logits
        targets = batch["targets"]
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum"
        )
        return loss, (targets != IGNORED_TARGET).sum()

    def decode(
        self, model: nn.Module, examples: Sequence[Passage | TokenWindow], done: ProgressCallback = ignore_progress
    ) -> list[PassageLikelihood]:
        """Scores each passage: the likelihood of all its tokens, the first included."""
        return [self._score_passage(model, example, done) for example in examples if isinstance(example, Passage)]

    def score(
        self, answers: Sequence[PassageLikelihood], examples: Sequence[Passage | TokenWindow]
    ) -> dict[str, float | str]:
        nats, characters = sum(answer[0] for answer in answers), sum(answer[1] for answer in answers)
        stride = self.settings.stride or self.settings.context
        return {
            "nats_per_character": nats / max(characters, 1),
            "characters": float(characters),
            "signature": f"context:{self.settings.context}|stride:{stride}|tokens:{self.settings.tokenizer}",
        }

    def parse_input(self, text: str) -> Passage:
        return Passage(text)

    @property
    def _prompt_limit(self) -> int:
        """Maximum prompt tokens: a long prompt leaves a quarter of the context for the continuation."""
        settings = self.settings
        return settings.context - max(min(settings.new_tokens, settings.context // 4), 1)

    def is_truncated(self, example: Passage | TokenWindow) -> bool:
        """A longer prompt is truncated to its end."""
        return isinstance(example, Passage) and len(self.tokenizer.encode(example.text)) + 1 > self._prompt_limit

    def describe_read_part(self, example: Passage | TokenWindow) -> str:
        assert isinstance(example, Passage)
        unit = "characters" if self.settings.tokenizer == "characters" else "tokens"
        return f"the last {self._prompt_limit:,} of {len(self.tokenizer.encode(example.text)):,} {unit}"

    def answer(self, model: nn.Module, examples: Sequence[Passage | TokenWindow]) -> list[str]:
        """Continues each passage."""
        return [
            example.text + self.tokenizer.decode(generate(model, **self._generation_options(example.text))[0].tokens)
            for example in examples
            if isinstance(example, Passage)
        ]

    def stream(self, model: nn.Module, example: Passage | TokenWindow) -> Iterator[str]:
        """Yields the passage, then each part of its continuation."""
        assert isinstance(example, Passage)
        yield example.text
        tokens: list[int] = []
        written = ""
        for step in stream(model, **self._generation_options(example.text)):
            tokens += [token for token in step if token is not None]
            text = self.tokenizer.decode(tokens)
            # The last token may end within a character.
            if text.startswith(written) and not text.endswith(REPLACEMENT_CHARACTER):
                yield text[len(written) :]
                written = text
        yield self.tokenizer.decode(tokens)[len(written) :]

    def record_attention(self, model: nn.Module, example: Passage | TokenWindow) -> Record:
        """Records the attention over the prompt and its continuation."""
        assert isinstance(example, Passage)
        options = self._generation_options(example.text)
        prompt, answer = options["prompt"][0], generate(model, **options)[0].tokens
        tokens = [*prompt, *answer]
        with torch.no_grad():
            row = torch.tensor([tokens], device=next(model.parameters()).device)
            weights = model(row, return_weights=True).weights
        record = build_task_record(
            model, weights, {"input": self.tokenizer.labels(tokens)}, self.tokenizer.decode(tokens)
        )
        record.prompt = len(prompt)
        return record

    def _concatenate(self, passages: Sequence[Passage]) -> Tensor:
        """Concatenates the tokens of all passages (N,), each after a start token."""
        return torch.tensor([token for passage in passages for token in (START, *self.tokenizer.encode(passage.text))])

    @torch.no_grad()
    def _score_passage(self, model: nn.Module, passage: Passage, done: ProgressCallback) -> PassageLikelihood:
        device = next(model.parameters()).device
        windows = cut_windows(
            self._concatenate([passage]), self.settings.context, self.settings.stride or self.settings.context
        )
        nats, count = torch.zeros((), dtype=torch.float64), max(SCORING_TOKENS // self.settings.context, 1)
        for first in range(0, len(windows), count):
            batch = self.batch(windows[first : first + count], False, torch.Generator())
            loss, _ = self.loss(model, {name: tensor.to(device) for name, tensor in batch.items()})
            nats += loss.double().cpu()
            done(min(count, len(windows) - first) / len(windows))
        return PassageLikelihood((float(nats), len(passage.text)))

    def _generation_options(self, text: str) -> dict[str, Any]:
        """The arguments of `generate` for the continuation of a text."""
        settings = self.settings
        prompt = [START, *self.tokenizer.encode(text)][-self._prompt_limit :]
        new = min(settings.new_tokens, settings.context - len(prompt))
        method = Sampling(settings.temperature, top_k=settings.top_k, seed=settings.seed)
        return {"prompt": [prompt], "new_tokens": new, "method": method, "stop": START}


def cut_windows(tokens: Tensor, context: int, stride: int) -> list[Passage | TokenWindow]:
    """Cuts windows that together predict every token once, each with as much context as fits."""
    windows: list[Passage | TokenWindow] = []
    predicted = 0
    while predicted < len(tokens) - 1:
        end = min(max(predicted + stride, min(context, len(tokens) - 1)), len(tokens) - 1)
        windows.append(TokenWindow(tokens[max(end - context, 0) : end + 1], end - predicted))
        predicted = end
    return windows

"""Text classification, such as sentiment: a text in, its label out.

B texts, T tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.inputs.bpe import SPECIAL_TOKENS
from foci.inputs.padding import group_by_size, pad_sequences
from foci.inputs.tables import read_table_rows, read_valid_rows, require_one_path
from foci.inputs.text import (
    PAD,
    UNKNOWN,
    Tokenizer,
    TokenizerKind,
    tokenizer_from_json,
    tokenizer_to_json,
    train_tokenizer,
)
from foci.nn.classifier import NGRAM_HASH_FACTORS, TextClassifier
from foci.nn.config import VOCABULARY_LIMIT
from foci.nn.model import Model
from foci.record.labels import CLASS_TOKEN, Labels
from foci.record.record import Record
from foci.runtime.json_text import parse_json
from foci.tasks.class_prediction import ClassPrediction, accuracy
from foci.tasks.rdrop import symmetric_kl
from foci.tasks.task import LENGTH_LIMIT, Problem, ProgressCallback, Task, TaskSettings, ignore_progress
from foci.tasks.task_files import check_class_names
from foci.tasks.task_record import build_task_record

COLUMNS = ("text", "label")
# Tokens decoded at a time.
TOKENS_PER_BATCH = 32_768
# Limits of the number of n-gram embeddings that is chosen from the data.
MIN_BUCKETS, MAX_BUCKETS = 2**12, 2**17
MODEL_FIELDS = (
    "width",
    "layers",
    "heads",
    "hidden",
    "dropout",
    "attention_dropout",
    "head_dropout",
    "pool",
    "grams",
    "buckets",
    "max_length",
)


@dataclass(frozen=True)
class LabelledText:
    """A text, and its label if known."""

    text: str
    label: str | None = None


@dataclass(frozen=True)
class SentimentSettings(TaskSettings):
    """Settings of text classification: the [task] section of a run's TOML."""

    size: Literal["tiny", "small", "base"] = "tiny"  # model size; the next settings override single values
    width: int | None = None  # model width
    layers: int | None = None  # number of blocks
    heads: int | None = None  # attention heads
    hidden: int | None = None  # width inside the feed-forward
    dropout: float | None = None  # dropout rate
    attention_dropout: float | None = None  # dropout rate of the attention weights
    head_dropout: float | None = None  # dropout rate of the pooled text representation
    pool: Literal["class", "mean", "both"] = "both"  # text representation: class token, mean, or both
    grams: int = 2  # n-grams of up to this many tokens have embeddings of their own; 1: none
    buckets: int | None = None  # number of hashed n-gram embeddings; None: from the data, at most 131072
    tokenizer: TokenizerKind = "words"  # words, byte-pair encoding (bpe), characters or bytes
    vocabulary: int = 30_000  # maximum vocabulary size
    lower: bool = True  # lower-case all texts
    max_length: int = 512  # maximum tokens of a text; a longer one is cut in the middle
    prior: bool = False  # add a linear term per token, initialized by naive Bayes on the training data
    prior_scale: float = 0.4  # initial scale of that term; below 1, because tokens are not independent
    forget: float = 0.1  # fraction of tokens replaced by <unknown>, in training
    smoothing: float = 0.1  # label smoothing, in training
    agreement: float = 0.0  # weight of the R-Drop loss between two passes with different dropout; 0: one pass

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range(1, 1 + len(NGRAM_HASH_FACTORS), "grams")
        self.check_range(1, VOCABULARY_LIMIT, "buckets")
        self.check_range(2, LENGTH_LIMIT, "max_length")
        self.check_range(0, 1000, "prior_scale")
        self.check_fractions("dropout", "attention_dropout", "head_dropout", "forget", "smoothing", include_one=False)


class Sentiment(Task[LabelledText, ClassPrediction]):
    """Classification of texts (TSV or JSONL: text, label); metric: accuracy.

    >>> train = [LabelledText("a joy", "good"), LabelledText("a bore", "bad")]
    >>> task = Sentiment.from_examples(SentimentSettings(), train)
    >>> task.labels
    ['bad', 'good']
    """

    name = "sentiment"
    metric = "accuracy"
    better = "higher"
    settings_type = SentimentSettings
    settings: SentimentSettings

    def __init__(
        self,
        settings: SentimentSettings,
        tokenizer: Tokenizer,
        labels: Sequence[str],
        prior: Sequence[Sequence[float]] | None = None,
    ) -> None:
        self.settings, self.tokenizer, self.labels, self.prior = settings, tokenizer, list(labels), prior
        self._class_indices = {label: number for number, label in enumerate(self.labels)}

    @classmethod
    def read(cls, paths: Sequence[Path], settings: SentimentSettings) -> list[LabelledText]:
        table = read_valid_rows(require_one_path(paths, "a table of texts and labels"), COLUMNS, find_empty_field)
        return [LabelledText(row.fields["text"].strip(), row.fields["label"].strip()) for row in table]

    @classmethod
    def check(cls, paths: Sequence[Path], settings: SentimentSettings) -> Iterator[Problem]:
        table = require_one_path(paths, "a table of texts and labels")
        seen: dict[str, tuple[str, str]] = {}
        counts: Counter[str] = Counter()
        for row in read_table_rows(table, COLUMNS):
            problem = row.problem or find_empty_field(row.fields)
            if problem is not None:
                yield Problem(row.location, problem)
                continue
            if row.warning is not None:
                yield Problem(row.location, row.warning, "warning")
            text, label = row.fields["text"].strip(), row.fields["label"].strip()
            counts[label] += 1
            location, other = seen.setdefault(text, (row.location, label))
            if other != label:
                yield Problem(row.location, f"the same text has another label at {location}: {other!r}", "warning")
        if len(counts) < 2:
            yield Problem(str(table), f"the data must have at least 2 classes, got {len(counts)}")

    @classmethod
    def from_examples(cls, settings: SentimentSettings, train: Sequence[LabelledText]) -> Self:
        """Trains the tokenizer and collects the labels."""
        settings = cls.fill_settings(settings, train)
        labels = sorted({each.label for each in train if each.label is not None})
        if len(labels) < 2:
            raise ValueError(f"the training data must have at least 2 classes, got {labels}")
        texts = [each.text.lower() if settings.lower else each.text for each in train]
        task = cls(settings, train_tokenizer(settings.tokenizer, texts, settings.vocabulary), labels)
        if settings.prior:
            task.prior = fit_naive_bayes(
                [(task.tokens(each), task.class_index(each)) for each in train], task.tokenizer, labels
            )
        return task

    @classmethod
    def fill_settings(cls, settings: SentimentSettings, train: Sequence[LabelledText]) -> SentimentSettings:
        """Chooses about two embeddings for each word of the texts, if their number is not set."""
        words = sum(len(each.text.split()) for each in train)
        return settings.fill(buckets=min(max(2 ** (2 * words).bit_length(), MIN_BUCKETS), MAX_BUCKETS))

    def learned_state(self) -> dict[str, str]:
        files = {
            "tokenizer.json": tokenizer_to_json(self.tokenizer),
            "labels.json": json.dumps(self.labels, ensure_ascii=False),
        }
        return files if self.prior is None else files | {"prior.json": json.dumps(self.prior)}

    @classmethod
    def from_learned_state(cls, settings: SentimentSettings, files: dict[str, str]) -> Self:
        prior = parse_json(files["prior.json"], "prior.json") if "prior.json" in files else None
        labels = check_class_names(parse_json(files["labels.json"], "labels.json"))
        return cls(settings, tokenizer_from_json(files["tokenizer.json"]), labels, prior)

    def model(self) -> Model:
        own = self.settings
        changes = {name: getattr(own, name) for name in MODEL_FIELDS if getattr(own, name) is not None}
        changes |= {"vocabulary": self.tokenizer.vocabulary, "classes": len(self.labels)}
        model = TextClassifier.from_name(own.size, evidence=self.prior is not None, **changes)
        if self.prior is not None and model.evidence is not None:
            with torch.no_grad():
                model.evidence.table.copy_(torch.tensor(self.prior))
                model.evidence.scale.fill_(own.prior_scale)
        return model

    def is_truncated(self, example: LabelledText) -> bool:
        return len(self.encode(example)) > self.settings.max_length

    def describe_read_part(self, example: LabelledText) -> str:
        half = self.settings.max_length // 2
        return f"the first {half:,} and the last {half:,} of {len(self.encode(example)):,} tokens"

    def encode(self, example: LabelledText) -> list[int]:
        return self.tokenizer.encode(example.text.lower() if self.settings.lower else example.text) or [UNKNOWN]

    def tokens(self, example: LabelledText) -> list[int]:
        """Returns the tokens that the model reads; a long text is cut in the middle, its least informative part."""
        tokens = self.encode(example)
        half = self.settings.max_length // 2
        return tokens if len(tokens) <= self.settings.max_length else tokens[:half] + tokens[-half:]

    def size(self, example: LabelledText) -> int:
        return len(self.tokens(example)) + 1

    def batch(self, examples: Sequence[LabelledText], training: bool, generator: torch.Generator) -> dict[str, Tensor]:
        tokens, lengths = pad_sequences([self.tokens(each) for each in examples], PAD)
        tokens = tokens[:, : self.settings.max_length]
        if training and self.settings.forget:
            hidden = torch.rand(tokens.shape, generator=generator) < self.settings.forget
            tokens = torch.where(hidden & (tokens != PAD), UNKNOWN, tokens)
        return {
            "tokens": tokens,
            "lengths": lengths,
            "labels": torch.tensor([self.class_index(each) for each in examples]),
        }

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Computes the cross-entropy, or the R-Drop loss of two passes if `agreement` is set."""
        count = torch.full((), len(batch["labels"]), device=batch["labels"].device)
        if not model.training or not self.settings.agreement:
            return self._cross_entropy(model, batch)[0], count
        loss, logits = self._cross_entropy(model, {name: torch.cat([each, each]) for name, each in batch.items()})
        first, second = logits.chunk(2)
        divergence = symmetric_kl(first, second, torch.ones_like(batch["labels"], dtype=torch.bool))
        return loss / 2 + self.settings.agreement / 4 * divergence, count

    def _cross_entropy(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the summed cross-entropy and the logits (B, classes)."""
        logits = model(batch["tokens"], padding=batch["lengths"]).logits.float()
        smoothing = self.settings.smoothing if model.training else 0.0
        return F.cross_entropy(logits, batch["labels"], reduction="sum", label_smoothing=smoothing), logits

    def decode(
        self, model: nn.Module, examples: Sequence[LabelledText], done: ProgressCallback = ignore_progress
    ) -> list[ClassPrediction]:
        device = next(model.parameters()).device
        predictions = [ClassPrediction("", 0.0)] * len(examples)
        for group in group_by_size([self.size(each) for each in examples], TOKENS_PER_BATCH):
            tokens, lengths = pad_sequences([self.tokens(examples[index]) for index in group], PAD, multiple=1)
            out = model(tokens.to(device), padding=lengths.to(device))
            probabilities, classes = out.logits.float().softmax(-1).max(-1)
            for index, number, probability in zip(group, classes.tolist(), probabilities.tolist(), strict=True):
                predictions[index] = ClassPrediction(self.labels[number], probability)
            done(len(group))
        return predictions

    def score(self, answers: Sequence[ClassPrediction], examples: Sequence[LabelledText]) -> dict[str, float | str]:
        return accuracy(answers, examples)

    def parse_input(self, text: str) -> LabelledText:
        if not text.strip():
            raise ValueError("the input must be a text, got an empty one")
        return LabelledText(text.strip())

    def answer(self, model: nn.Module, examples: Sequence[LabelledText]) -> list[str]:
        return [str(prediction) for prediction in self.decode(model, examples)]

    def record_attention(self, model: nn.Module, example: LabelledText) -> Record:
        """Records the attention over the class token and the tokens of the text."""
        tokens = self.tokens(example)
        with torch.no_grad():
            device = next(model.parameters()).device
            out = cast("TextClassifier", model)(torch.tensor([tokens], device=device), return_weights=True)
        read = self.tokenizer.labels(tokens)
        labels = Labels.tokens([[CLASS_TOKEN, *read.texts[0]]], read.words and [[None, *read.words[0]]])
        probability, number = out.logits[0].float().softmax(-1).max(-1)
        return build_task_record(
            model, out.weights, {"input": labels}, str(ClassPrediction(self.labels[int(number)], float(probability)))
        )

    def class_index(self, example: LabelledText) -> int:
        if example.label is None or example.label not in self._class_indices:
            known = ", ".join(self.labels[:10]) + (", ..." if len(self.labels) > 10 else "")
            text = example.text[:60]
            raise ValueError(f"the label of {text!r} must be one of {known}, got {example.label!r}")
        return self._class_indices[example.label]


def fit_naive_bayes(
    examples: Sequence[tuple[list[int], int]], tokenizer: Tokenizer, labels: Sequence[str]
) -> list[list[float]]:
    """Computes for each token its log-probability in each class, relative to the mean over the classes.

    Counts texts that contain a token, not occurrences, with add-one smoothing.
    """
    counts = torch.ones(len(labels), tokenizer.vocabulary, dtype=torch.float64)
    for tokens, label in examples:
        counts[label, torch.tensor(sorted(set(tokens)))] += 1
    weights = (counts / counts.sum(1, keepdim=True)).log()
    weights = weights - weights.mean(0)
    weights[:, : len(SPECIAL_TOKENS)] = 0.0
    return [[round(value, 4) for value in row] for row in weights.T.tolist()]


def find_empty_field(fields: dict[str, str]) -> str | None:
    empty = [name for name in COLUMNS if not fields[name].strip()]
    return f"{empty[0]} must not be empty" if empty else None

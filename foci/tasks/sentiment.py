"""Sentiment, or any other class of a text: a text in, its label out.

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

from foci.inputs.padding import longest_first, padded
from foci.inputs.tables import good_rows, only, rows
from foci.inputs.text import PAD, SPECIAL, UNKNOWN, Tokenizer, TokenizerKind, from_json, learned, to_json
from foci.nn.classifier import TextClassifier
from foci.nn.config import Config
from foci.nn.model import Model
from foci.record.labels import Labels
from foci.record.record import Record
from foci.tasks.class_prediction import Guess, accuracy
from foci.tasks.rdrop import disagreement
from foci.tasks.task import Done, Problem, Task, unheard
from foci.tasks.task_record import record_of

COLUMNS = ("text", "label")
# How many tokens are answered at a time.
TOGETHER = 32_768
CHANGES = (
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
class Labelled:
    """A text and the name of its class, where it is known."""

    text: str
    label: str | None = None


@dataclass(frozen=True)
class SentimentSettings(Config):
    """What texts become and what reads them: [task] in a run's TOML."""

    section = "task"

    size: Literal["tiny", "small", "base"] = "tiny"  # of the model; what follows changes single numbers of it
    width: int | None = None  # of the tokens
    layers: int | None = None  # how many blocks
    heads: int | None = None  # of each attention
    hidden: int | None = None  # the width inside the feed-forward
    dropout: float | None = None  # the share dropped while training
    attention_dropout: float | None = None  # the share of attention weights dropped while training
    head_dropout: float | None = None  # the share of what stands for the text that is dropped while training
    pool: Literal["class", "mean", "both"] = "both"  # what stands for the text: a token of its own, the mean, both
    grams: int = 2  # up to so many tokens in a row have a vector of their own; 1: none have
    buckets: int = 2**17  # how many such vectors there are
    tokenizer: TokenizerKind = "words"  # words, pieces of words (bpe), characters or bytes
    vocabulary: int = 30_000  # how many tokens there are at most
    lower: bool = True  # whether large letters are read as small ones
    max_length: int = 512  # how many tokens of a text are read: of a longer one its beginning and its end
    prior: bool = False  # whether to start from naive Bayes: what each token says of the classes in the train part
    prior_scale: float = 0.4  # how much of it: tokens are not as independent as it takes them to be
    forget: float = 0.1  # the share of tokens that are made unknown, while training
    smoothing: float = 0.1  # the share of each target that is spread over all classes, while training
    agreement: float = 0.0  # how much two passes with different dropout must agree while training (R-Drop); 0: one pass

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "width", "layers", "heads", "hidden", "grams", "buckets", "vocabulary")
        self.at_least(2, "max_length")
        self.at_least(0, "agreement", "prior_scale")
        self.shares("dropout", "attention_dropout", "head_dropout", "forget", "smoothing", whole=False)


class Sentiment(Task[Labelled, Guess]):
    """Texts with labels (TSV or JSONL: text, label); accuracy.

    >>> task = Sentiment.start(SentimentSettings(), [Labelled("a joy", "good"), Labelled("a bore", "bad")])
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
        self._numbers = {label: number for number, label in enumerate(self.labels)}

    @classmethod
    def read(cls, paths: Sequence[Path], settings: SentimentSettings) -> list[Labelled]:
        found = good_rows(only(paths, "a table of texts and labels"), COLUMNS, missing)
        return [Labelled(row.fields["text"].strip(), row.fields["label"].strip()) for row in found]

    @classmethod
    def check(cls, paths: Sequence[Path], settings: SentimentSettings) -> Iterator[Problem]:
        table = only(paths, "a table of texts and labels")
        seen: dict[str, tuple[str, str]] = {}
        counts: Counter[str] = Counter()
        for row in rows(table, COLUMNS):
            problem = row.problem or missing(row.fields)
            if problem is not None:
                yield Problem(row.place, problem)
                continue
            if row.warning is not None:
                yield Problem(row.place, row.warning, "warning")
            text, label = row.fields["text"].strip(), row.fields["label"].strip()
            counts[label] += 1
            place, before = seen.setdefault(text, (row.place, label))
            if before != label:
                yield Problem(row.place, f"expected one label for a text, but {place} says {before!r}", "warning")
        if len(counts) < 2:
            yield Problem(str(table), f"expected texts of at least 2 classes, but got {len(counts)}")

    @classmethod
    def start(cls, settings: SentimentSettings, train: Sequence[Labelled]) -> Self:
        """Learns the vocabulary and the labels."""
        labels = sorted({each.label for each in train if each.label is not None})
        if len(labels) < 2:
            raise ValueError(f"expected texts of at least 2 classes to learn from, but got {labels}")
        texts = [each.text.lower() if settings.lower else each.text for each in train]
        task = cls(settings, learned(settings.tokenizer, texts, settings.vocabulary), labels)
        if settings.prior:
            task.prior = naive_bayes([(task.tokens(each), task.number(each)) for each in train], task.tokenizer, labels)
        return task

    def files(self) -> dict[str, str]:
        found = {"tokenizer.json": to_json(self.tokenizer), "labels.json": json.dumps(self.labels, ensure_ascii=False)}
        return found if self.prior is None else found | {"prior.json": json.dumps(self.prior)}

    @classmethod
    def from_files(cls, settings: SentimentSettings, files: dict[str, str]) -> Self:
        prior = json.loads(files["prior.json"]) if "prior.json" in files else None
        return cls(settings, from_json(files["tokenizer.json"]), json.loads(files["labels.json"]), prior)

    def model(self) -> Model:
        own = self.settings
        changes = {name: getattr(own, name) for name in CHANGES if getattr(own, name) is not None}
        changes |= {"vocabulary": self.tokenizer.vocabulary, "classes": len(self.labels)}
        model = TextClassifier.from_name(own.size, evidence=self.prior is not None, **changes)
        if self.prior is not None and model.evidence is not None:
            with torch.no_grad():
                model.evidence.table.copy_(torch.tensor(self.prior))
                model.evidence.scale.fill_(own.prior_scale)
        return model

    def is_cut(self, example: Labelled) -> bool:
        return len(self.encoded(example)) > self.settings.max_length

    def encoded(self, example: Labelled) -> list[int]:
        return self.tokenizer.encode(example.text.lower() if self.settings.lower else example.text) or [UNKNOWN]

    def tokens(self, example: Labelled) -> list[int]:
        """What the model reads; what is in the middle of a text that is too long says least about it."""
        found = self.encoded(example)
        half = self.settings.max_length // 2
        return found if len(found) <= self.settings.max_length else found[:half] + found[-half:]

    def size(self, example: Labelled) -> int:
        return len(self.tokens(example)) + 1

    def batch(self, examples: Sequence[Labelled], training: bool, generator: torch.Generator) -> dict[str, Tensor]:
        tokens, lengths = padded([self.tokens(each) for each in examples], PAD)
        tokens = tokens[:, : self.settings.max_length]
        if training and self.settings.forget:
            forgotten = torch.rand(tokens.shape, generator=generator) < self.settings.forget
            tokens = torch.where(forgotten & (tokens != PAD), UNKNOWN, tokens)
        return {
            "tokens": tokens,
            "lengths": lengths,
            "labels": torch.tensor([self.number(each) for each in examples]),
        }

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Cross-entropy; with `agreement` of two passes, and how far their answers are from each other."""
        count = torch.full((), len(batch["labels"]), device=batch["labels"].device)
        if not model.training or not self.settings.agreement:
            return self._surprise(model, batch)[0], count
        loss, logits = self._surprise(model, {name: torch.cat([each, each]) for name, each in batch.items()})
        first, second = logits.chunk(2)
        apart = disagreement(first, second, torch.ones_like(batch["labels"], dtype=torch.bool))
        return loss / 2 + self.settings.agreement / 4 * apart, count

    def _surprise(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The summed cross-entropy, and the logits (B, classes)."""
        logits = model(batch["tokens"], padding=batch["lengths"]).logits.float()
        smoothing = self.settings.smoothing if model.training else 0.0
        return F.cross_entropy(logits, batch["labels"], reduction="sum", label_smoothing=smoothing), logits

    def decode(self, model: nn.Module, examples: Sequence[Labelled], done: Done = unheard) -> list[Guess]:
        device = next(model.parameters()).device
        found = [Guess("", 0.0)] * len(examples)
        for group in longest_first([self.size(each) for each in examples], TOGETHER):
            tokens, lengths = padded([self.tokens(examples[place]) for place in group], PAD, multiple=1)
            out = model(tokens.to(device), padding=lengths.to(device))
            shares, numbers = out.logits.float().softmax(-1).max(-1)
            for place, number, share in zip(group, numbers.tolist(), shares.tolist(), strict=True):
                found[place] = Guess(self.labels[number], share)
            done(len(group))
        return found

    def score(self, answers: Sequence[Guess], examples: Sequence[Labelled]) -> dict[str, float | str]:
        return accuracy(answers, examples)

    def given(self, text: str) -> Labelled:
        if not text.strip():
            raise ValueError("expected a text, but got none")
        return Labelled(text.strip())

    def write(self, model: nn.Module, examples: Sequence[Labelled]) -> list[str]:
        return [str(verdict) for verdict in self.decode(model, examples)]

    def show(self, model: nn.Module, example: Labelled) -> Record:
        """The tokens, before them the one that gathers what decides, and where they look."""
        tokens = self.tokens(example)
        with torch.no_grad():
            device = next(model.parameters()).device
            out = cast("TextClassifier", model)(torch.tensor([tokens], device=device), return_weights=True)
        read = self.tokenizer.labels(tokens)
        labels = Labels.tokens([["<class>", *read.texts[0]]], read.words and [[None, *read.words[0]]])
        share, number = out.logits[0].float().softmax(-1).max(-1)
        return record_of(model, out.weights, {"input": labels}, str(Guess(self.labels[int(number)], float(share))))

    def number(self, example: Labelled) -> int:
        if example.label is None or example.label not in self._numbers:
            known = ", ".join(self.labels[:10]) + (", ..." if len(self.labels) > 10 else "")
            text = example.text[:60]
            raise ValueError(f"expected one of the labels {known}, but got {example.label!r} for {text!r}")
        return self._numbers[example.label]


def naive_bayes(
    read: Sequence[tuple[list[int], int]], tokenizer: Tokenizer, labels: Sequence[str]
) -> list[list[float]]:
    """For each token the logarithm of how much likelier each class makes it than the classes do on average.

    Whether a token is in a text counts, not how often; each is taken to have been in one text more of every class.
    """
    counts = torch.ones(len(labels), tokenizer.vocabulary, dtype=torch.float64)
    for tokens, label in read:
        counts[label, torch.tensor(sorted(set(tokens)))] += 1
    found = (counts / counts.sum(1, keepdim=True)).log()
    found = found - found.mean(0)
    found[:, : len(SPECIAL)] = 0.0
    return [[round(value, 4) for value in row] for row in found.T.tolist()]


def missing(fields: dict[str, str]) -> str | None:
    empty = [name for name in COLUMNS if not fields[name].strip()]
    return f"expected a {empty[0]}, but it is empty" if empty else None

"""Summarization of documents; a pointer-generator may copy words from the document.

B documents, S tokens of a document, T tokens of its summary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.decoding import Answer, Beam, generate
from foci.inputs.padding import group_by_size, pad_sequences, valid_positions
from foci.inputs.tables import read_table_rows, read_valid_rows, require_one_path
from foci.inputs.text import (
    PAD,
    START,
    STOP,
    UNKNOWN,
    Tokenizer,
    TokenizerKind,
    tokenizer_from_json,
    tokenizer_to_json,
    train_tokenizer,
)
from foci.inputs.tokenizer_choice import choose_vocabulary
from foci.nn.model import Model
from foci.nn.pointer_generator import CopyingTransformer
from foci.nn.transformer import EncoderDecoder
from foci.record.record import Record
from foci.tasks.minimum_bayes_risk import select_minimum_bayes_risk
from foci.tasks.rdrop import compute_rdrop_loss
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

COLUMNS = ("document", "summary")
# Document tokens decoded at a time, over all hypotheses, by device.
DECODE_TOKENS = {"cpu": 16_384, "cuda": 131_072}
# A shorter document does not determine a sentence that is left out of it.
MIN_SENTENCES = 3
MODEL_FIELDS = ("width", "layers", "heads", "hidden", "dropout", "attention_dropout", "norm_first")


@dataclass(frozen=True)
class Document:
    """A text, and its summary if known."""

    text: str
    summary: str = ""
    left_out: int | None = (
        None  # index of a sentence that is removed from the text and is the target; None: the summary is the target
    )


@dataclass(frozen=True)
class SummarizationSettings(TaskSettings):
    """Settings of summarization: the [task] section of a run's TOML."""

    size: ModelSize | None = None  # None: tiny below 20,000 documents, else small; the next settings override it
    width: int | None = None  # model width
    layers: int | None = None  # blocks of each stack
    heads: int | None = None  # attention heads
    hidden: int | None = None  # width inside the feed-forward
    dropout: float | None = None  # dropout rate
    attention_dropout: float | None = None  # dropout rate of the attention weights
    norm_first: bool = True  # pre-norm or post-norm
    copy: bool = True  # copy words from the document (pointer-generator)
    tokenizer: TokenizerKind = "bpe"  # document and summary share one vocabulary
    vocabulary: int | None = None  # maximum vocabulary size; None: from the data, at most 8000
    lower: bool = False  # lower-case all texts
    max_length: int = 512  # maximum tokens of a document; a longer one is cut at the end
    max_summary: int = 48  # maximum tokens of a summary
    left_out: float = 0.0  # fraction of documents that, in each epoch, also train predicting a left-out sentence
    forget: float = 0.0  # fraction of document tokens dropped, in training
    smoothing: float = 0.1  # label smoothing, in training
    agreement: float = 0.0  # weight of the R-Drop loss between two passes with different dropout; 0: one pass
    beam: int = 4  # beam width
    length_penalty: float = 1.0  # of beam search; 0 prefers short answers
    consensus: float = 0.0  # temperature of minimum Bayes risk over the beam, usually 2 or 3; 0: the most likely answer

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range(1, LENGTH_LIMIT, "max_summary")
        self.check_range(0, 1000, "consensus")
        self.check_fractions("left_out")
        self.check_fractions("dropout", "attention_dropout", "forget", "smoothing", include_one=False)


class Summarization(Task[Document, str]):
    """Summarization of documents (TSV or JSONL: document, summary); metric: ROUGE.

    >>> settings = SummarizationSettings(tokenizer="words")
    >>> task = Summarization.from_examples(settings, [Document("Lunch at noon?", "Lunch")])
    >>> task.size(Document("Lunch at noon?", "Lunch"))
    7
    """

    name = "summarization"
    metric = "rougeL"
    better = "higher"
    settings_type = SummarizationSettings
    settings: SummarizationSettings

    def __init__(self, settings: SummarizationSettings, tokenizer: Tokenizer) -> None:
        self.settings, self.tokenizer = settings, tokenizer

    @classmethod
    def read(cls, paths: Sequence[Path], settings: SummarizationSettings) -> list[Document]:
        table = read_valid_rows(
            require_one_path(paths, "a table of documents and summaries"), COLUMNS, find_wordless_field
        )
        return [Document(row.fields["document"].strip(), row.fields["summary"].strip()) for row in table]

    @classmethod
    def check(cls, paths: Sequence[Path], settings: SummarizationSettings) -> Iterator[Problem]:
        table, count = require_one_path(paths, "a table of documents and summaries"), 0
        for row in read_table_rows(table, COLUMNS):
            count += 1
            problem = row.problem or find_wordless_field(row.fields)
            if problem is not None:
                yield Problem(row.location, problem)
                continue
            if row.warning is not None:
                yield Problem(row.location, row.warning, "warning")
            sides = len(row.fields["document"]), len(row.fields["summary"])
            if sides[0] <= sides[1]:
                message = f"the summary is not shorter than the document: {sides[1]} and {sides[0]} characters"
                yield Problem(row.location, message, "warning")
        if not count:
            yield Problem(str(table), "the table must have at least one line, got none")

    @classmethod
    def from_examples(cls, settings: SummarizationSettings, train: Sequence[Document]) -> Self:
        """Trains one tokenizer for documents and summaries."""
        texts = [text for each in train for text in (each.text, each.summary)]
        texts = [text.lower() for text in texts] if settings.lower else texts
        settings = cls.fill_settings(settings, train)
        return cls(settings, train_tokenizer(settings.tokenizer, texts, settings.vocabulary or DEFAULT_VOCABULARY))

    @classmethod
    def fill_settings(cls, settings: SummarizationSettings, train: Sequence[Document]) -> SummarizationSettings:
        """Chooses size and vocabulary where they are not set."""
        settings = settings.fill(size=choose_model_size(len(train)))
        texts = [text for each in train for text in (each.text, each.summary)]
        return settings.fill(vocabulary=choose_vocabulary(texts)) if settings.tokenizer == "bpe" else settings

    def learned_state(self) -> dict[str, str]:
        return {"tokenizer.json": tokenizer_to_json(self.tokenizer)}

    @classmethod
    def from_learned_state(cls, settings: SummarizationSettings, files: dict[str, str]) -> Self:
        return cls(settings, tokenizer_from_json(files["tokenizer.json"]))

    def model(self) -> Model:
        own = self.settings
        changes = {name: getattr(own, name) for name in MODEL_FIELDS if getattr(own, name) is not None}
        kind = CopyingTransformer if own.copy else EncoderDecoder
        length = max(own.max_length, own.max_summary) + 1
        return kind.from_name(
            own.size or "small", vocabulary=self.tokenizer.vocabulary, max_length=length, shared=True, **changes
        )

    def epoch_examples(
        self, examples: Sequence[Document], training: bool, generator: torch.Generator
    ) -> Sequence[Document]:
        """Adds documents with a left-out sentence as target, which is extra training data where summaries are few."""
        if not training or not self.settings.left_out:
            return examples
        chosen = torch.rand(len(examples), 2, generator=generator).tolist()
        extra = []
        for example, (chance, position) in zip(examples, chosen, strict=True):
            count = len(split_sentences(example.text))
            if count >= MIN_SENTENCES and chance < self.settings.left_out:
                extra.append(Document(example.text, example.summary, int(position * count)))
        return [*examples, *extra]

    def is_truncated(self, example: Document) -> bool:
        return len(self.encode(example.text)) > self.settings.max_length

    def describe_read_part(self, example: Document) -> str:
        return f"the first {self.settings.max_length:,} of {len(self.encode(example.text)):,} tokens"

    def source(self, example: Document) -> list[int]:
        """Returns the input tokens: the beginning of the document, and the stop token."""
        if example.left_out is None:
            return [*self.encode(example.text)[: self.settings.max_length], STOP]
        # Sentence by sentence, because the tokenizer caches each text it encodes.
        parts = [self.encode(each) for i, each in enumerate(split_sentences(example.text)) if i != example.left_out]
        return [*[token for part in parts for token in part][: self.settings.max_length], STOP]

    def target(self, example: Document) -> list[int]:
        text = example.summary if example.left_out is None else split_sentences(example.text)[example.left_out]
        return self.encode(text)[: self.settings.max_summary]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text.lower() if self.settings.lower else text)

    def size(self, example: Document) -> int:
        return len(self.source(example)) + len(self.target(example)) + 1

    def batch(self, examples: Sequence[Document], training: bool, generator: torch.Generator) -> dict[str, Tensor]:
        sources = [self.source(each) for each in examples]
        if training and self.settings.forget:
            sources = [drop_random_tokens(row, self.settings.forget, generator) for row in sources]
        source, lengths = pad_sequences(sources, PAD)
        targets = [self.target(each) for each in examples]
        return {
            "source": source,
            "real": valid_positions(lengths, source.shape[1]),
            "inputs": pad_sequences(
                [[first_input_token(each), *row] for each, row in zip(examples, targets, strict=True)], PAD
            )[0],
            "targets": pad_sequences([[*row, STOP] for row in targets], PAD)[0],
        }

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Computes the cross-entropy, or the R-Drop loss of two passes if `agreement` is set."""
        counts = batch["targets"] != PAD
        settings = self.settings
        if model.training and settings.agreement:
            logits = self._logits(model, {name: torch.cat([each, each]) for name, each in batch.items()})
            loss = compute_rdrop_loss(
                logits, batch["targets"], ignore=PAD, smoothing=settings.smoothing, agreement=settings.agreement
            )
            return loss, counts.sum()
        logits, targets = self._logits(model, batch).float().flatten(0, 1), batch["targets"].flatten()
        smoothing = settings.smoothing if model.training else 0.0
        loss = F.cross_entropy(logits, targets, ignore_index=PAD, reduction="sum", label_smoothing=smoothing)
        return loss, counts.sum()

    def _logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = model(batch["source"], batch["inputs"], source_padding=batch["real"]).logits
        return logits

    def decode(
        self, model: nn.Module, examples: Sequence[Document], done: ProgressCallback = ignore_progress
    ) -> list[str]:
        """Runs beam search in batches of documents of similar length."""
        sources = [self.source(each) for each in examples]
        answers = [""] * len(sources)
        budget = DECODE_TOKENS.get(next(model.parameters()).device.type, DECODE_TOKENS["cpu"])
        for group in group_by_size([len(row) for row in sources], budget // self.settings.beam):
            for index, row in zip(group, self.summarize(model, [sources[index] for index in group]), strict=True):
                answers[index] = self.tokenizer.decode(row)
            done(len(group))
        return answers

    def summarize(self, model: nn.Module, sources: list[list[int]]) -> list[list[int]]:
        """Generates the summary tokens of each source."""
        width = min(self.settings.beam, self.tokenizer.vocabulary)
        method = Beam(width, self.settings.length_penalty, best=width if self.settings.consensus else 1)
        options: dict[str, Any] = {"new_tokens": self.settings.max_summary, "method": method}
        # A captured decoding step would keep copying from the words of the batch it was captured with.
        capture = False if self.settings.copy else None
        answers = generate(model, sources, start=START, stop=STOP, capture=capture, **options)
        return [
            self.select_by_consensus(answer).tokens if self.settings.consensus else answer.tokens for answer in answers
        ]

    def select_by_consensus(self, answer: Answer) -> Answer:
        """Selects from the beam by minimum Bayes risk; more likely candidates have more weight."""
        candidates = [answer, *answer.others]
        log_weights = [each.score / self.settings.consensus for each in candidates]
        texts = [self.tokenizer.decode(each.tokens) for each in candidates]
        return candidates[select_minimum_bayes_risk(texts, log_weights)]

    def score(self, answers: Sequence[str], examples: Sequence[Document]) -> dict[str, float | str]:
        """Computes ROUGE F-measures with rouge-score, with stemming, in percent."""
        kinds = ["rouge1", "rouge2", "rougeL"]
        scorer = import_rouge().RougeScorer(kinds, use_stemmer=True)
        pairs = zip(examples, answers, strict=True)
        scores = [scorer.score(each.summary, answer) for each, answer in pairs]
        means = {kind: 100.0 * sum(each[kind].fmeasure for each in scores) / max(len(scores), 1) for kind in kinds}
        return {"rougeL": means["rougeL"], "rouge1": means["rouge1"], "rouge2": means["rouge2"]}

    def parse_input(self, text: str) -> Document:
        if not text.strip():
            raise ValueError("the input must be a text to summarize, got an empty text")
        return Document(text.strip())

    def record_attention(self, model: nn.Module, example: Document) -> Record:
        """Records the attention; the queries of cross-attention are labelled with the token that is generated there."""
        source = self.source(example)
        device = next(model.parameters()).device
        with torch.no_grad():
            summary = self.summarize(model, [source])[0]
            target = torch.tensor([[START, *summary]], device=device)
            out = model(torch.tensor([source], device=device), target, return_weights=True)
        names = {"source": source, "target": [START, *summary], "summary": [*summary, STOP]}
        labels = {name: self.tokenizer.labels(row) for name, row in names.items()}
        return build_task_record(model, out.weights, labels, self.tokenizer.decode(summary), cross_queries="summary")


def first_input_token(example: Document) -> int:
    """Returns the first input token, which selects the target: a summary, or a left-out sentence."""
    return START if example.left_out is None else UNKNOWN


def split_sentences(text: str) -> list[str]:
    """Splits a text into sentences, with their final punctuation.

    >>> split_sentences("Lunch at noon? Bring cake.")
    ['Lunch at noon?', 'Bring cake.']
    """
    return re.split(r"(?<=[.!?])\s+", text)


def drop_random_tokens(tokens: list[int], share: float, generator: torch.Generator) -> list[int]:
    """Drops each token with probability `share`; the last one, the stop token, stays."""
    kept = (torch.rand(len(tokens), generator=generator) >= share).tolist()
    return [token for token, stays in zip(tokens[:-1], kept, strict=False) if stays] + tokens[-1:]


def find_wordless_field(fields: dict[str, str]) -> str | None:
    empty = [name for name in COLUMNS if not re.search(r"\w", fields[name])]
    return f"{empty[0]} must contain words" if empty else None


def import_rouge() -> Any:
    try:
        from rouge_score import rouge_scorer
    except ImportError as error:
        raise ImportError("ROUGE needs rouge-score, which is not installed: pip install 'foci[tasks]'") from error
    return rouge_scorer

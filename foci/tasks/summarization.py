"""Summarization: a document in, a few words that say it out; words may be copied from the document.

B documents, S tokens of a document, T tokens of its summary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.decoding import Answer, Beam, generate
from foci.inputs.padding import longest_first, padded, real
from foci.inputs.tables import good_rows, only, rows
from foci.inputs.text import PAD, START, STOP, UNKNOWN, Tokenizer, TokenizerKind, from_json, learned, to_json
from foci.nn.config import Config
from foci.nn.model import Model
from foci.nn.pointer_generator import CopyingTransformer
from foci.nn.transformer import EncoderDecoder
from foci.record.record import Record
from foci.tasks.minimum_bayes_risk import most_alike
from foci.tasks.rdrop import agreeing_loss
from foci.tasks.task import Done, Problem, Task, unheard
from foci.tasks.task_record import record_of

COLUMNS = ("document", "summary")
# How many tokens of documents are summarised at a time, by device.
TOGETHER = {"cpu": 16_384, "cuda": 131_072}
# A shorter document says too little about a sentence that it lacks.
FEWEST_SENTENCES = 3
CHANGES = ("width", "layers", "heads", "hidden", "dropout", "attention_dropout", "norm_first")


@dataclass(frozen=True)
class Document:
    """A text, and a summary of it, where one is known."""

    text: str
    summary: str = ""
    left_out: int | None = None  # the number of a sentence that is not read but is to be written; None: the summary is


@dataclass(frozen=True)
class SummarizationSettings(Config):
    """What documents become and what reads and writes: [task] in a run's TOML."""

    section = "task"

    size: Literal["tiny", "small", "base"] = "small"  # of the model; what follows changes single numbers of it
    width: int | None = None  # of the tokens
    layers: int | None = None  # of each stack
    heads: int | None = None  # of each attention
    hidden: int | None = None  # the width inside the feed-forward
    dropout: float | None = None  # the share dropped while training
    attention_dropout: float | None = None  # the share of attention weights dropped while training
    norm_first: bool = True  # the norm before each part, or after its residual
    copy: bool = True  # whether words may be copied from the document
    tokenizer: TokenizerKind = "bpe"  # document and summary share one vocabulary
    vocabulary: int = 8000  # how many tokens it has at most
    lower: bool = False  # whether large letters are read and written as small ones
    max_length: int = 512  # how many tokens of a document are read: its beginning
    max_summary: int = 48  # how many tokens a summary has at most
    left_out: float = 0.0  # how often a document also serves to guess a sentence that it lacks, in each epoch
    forget: float = 0.0  # the share of the document's tokens that are dropped, while training
    smoothing: float = 0.1  # the share of each target that is spread over all tokens, while training
    agreement: float = 0.0  # how much two passes with different dropout must agree while training (R-Drop); 0: one pass
    beam: int = 4  # how many hypotheses grow side by side
    length_penalty: float = 1.0  # 0 prefers short answers
    consensus: float = 0.0  # above 0: of the beam the answer most like the others, 2 or 3 being usual; 0: the likeliest

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "width", "layers", "heads", "hidden", "vocabulary", "max_length", "max_summary", "beam")
        self.at_least(0, "agreement", "length_penalty", "consensus")
        self.shares("left_out")
        self.shares("dropout", "attention_dropout", "forget", "smoothing", whole=False)


class Summarization(Task[Document, str]):
    """Documents with summaries (TSV or JSONL: document, summary); ROUGE.

    >>> task = Summarization.start(SummarizationSettings(tokenizer="words"), [Document("Lunch at noon?", "Lunch")])
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
        found = good_rows(only(paths, "a table of documents and summaries"), COLUMNS, missing)
        return [Document(row.fields["document"].strip(), row.fields["summary"].strip()) for row in found]

    @classmethod
    def check(cls, paths: Sequence[Path], settings: SummarizationSettings) -> Iterator[Problem]:
        table, count = only(paths, "a table of documents and summaries"), 0
        for row in rows(table, COLUMNS):
            count += 1
            problem = row.problem or missing(row.fields)
            if problem is not None:
                yield Problem(row.place, problem)
                continue
            if row.warning is not None:
                yield Problem(row.place, row.warning, "warning")
            sides = len(row.fields["document"]), len(row.fields["summary"])
            if sides[0] <= sides[1]:
                what = f"expected a summary shorter than its document, but got {sides[1]} and {sides[0]} characters"
                yield Problem(row.place, what, "warning")
        if not count:
            yield Problem(str(table), "expected at least one line, but it has none")

    @classmethod
    def start(cls, settings: SummarizationSettings, train: Sequence[Document]) -> Self:
        """Learns one vocabulary for documents and summaries."""
        texts = [text for each in train for text in (each.text, each.summary)]
        texts = [text.lower() for text in texts] if settings.lower else texts
        return cls(settings, learned(settings.tokenizer, texts, settings.vocabulary))

    def files(self) -> dict[str, str]:
        return {"tokenizer.json": to_json(self.tokenizer)}

    @classmethod
    def from_files(cls, settings: SummarizationSettings, files: dict[str, str]) -> Self:
        return cls(settings, from_json(files["tokenizer.json"]))

    def model(self) -> Model:
        own = self.settings
        changes = {name: getattr(own, name) for name in CHANGES if getattr(own, name) is not None}
        kind = CopyingTransformer if own.copy else EncoderDecoder
        length = max(own.max_length, own.max_summary) + 1
        return kind.from_name(own.size, vocabulary=self.tokenizer.vocabulary, max_length=length, shared=True, **changes)

    def epoch(self, examples: Sequence[Document], training: bool, generator: torch.Generator) -> Sequence[Document]:
        """The documents; some also without a sentence, which is to be written: much to learn from few summaries."""
        if not training or not self.settings.left_out:
            return examples
        chosen = torch.rand(len(examples), 2, generator=generator).tolist()
        made = []
        for example, (chance, place) in zip(examples, chosen, strict=True):
            count = len(sentences(example.text))
            if count >= FEWEST_SENTENCES and chance < self.settings.left_out:
                made.append(Document(example.text, example.summary, int(place * count)))
        return [*examples, *made]

    def is_cut(self, example: Document) -> bool:
        return len(self.encoded(example.text)) > self.settings.max_length

    def source(self, example: Document) -> list[int]:
        """What the model reads: the beginning of the document, and the token that ends it."""
        if example.left_out is None:
            return [*self.encoded(example.text)[: self.settings.max_length], STOP]
        # Sentence by sentence, because the tokenizer remembers what it has seen.
        parts = [self.encoded(each) for i, each in enumerate(sentences(example.text)) if i != example.left_out]
        return [*[token for part in parts for token in part][: self.settings.max_length], STOP]

    def target(self, example: Document) -> list[int]:
        wanted = example.summary if example.left_out is None else sentences(example.text)[example.left_out]
        return self.encoded(wanted)[: self.settings.max_summary]

    def encoded(self, text: str) -> list[int]:
        return self.tokenizer.encode(text.lower() if self.settings.lower else text)

    def size(self, example: Document) -> int:
        return len(self.source(example)) + len(self.target(example)) + 1

    def batch(self, examples: Sequence[Document], training: bool, generator: torch.Generator) -> dict[str, Tensor]:
        sources = [self.source(each) for each in examples]
        if training and self.settings.forget:
            sources = [thinned(row, self.settings.forget, generator) for row in sources]
        source, lengths = padded(sources, PAD)
        targets = [self.target(each) for each in examples]
        return {
            "source": source,
            "real": real(lengths, source.shape[1]),
            "inputs": padded([[begin(each), *row] for each, row in zip(examples, targets, strict=True)], PAD)[0],
            "targets": padded([[*row, STOP] for row in targets], PAD)[0],
        }

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Cross-entropy; with `agreement` of two passes, and how far their answers are from each other."""
        counts = batch["targets"] != PAD
        settings = self.settings
        if model.training and settings.agreement:
            logits = self._logits(model, {name: torch.cat([each, each]) for name, each in batch.items()})
            loss = agreeing_loss(
                logits, batch["targets"], ignore=PAD, smoothing=settings.smoothing, agreement=settings.agreement
            )
            return loss, counts.sum()
        flat, wanted = self._logits(model, batch).float().flatten(0, 1), batch["targets"].flatten()
        smoothing = settings.smoothing if model.training else 0.0
        loss = F.cross_entropy(flat, wanted, ignore_index=PAD, reduction="sum", label_smoothing=smoothing)
        return loss, counts.sum()

    def _logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = model(batch["source"], batch["inputs"], source_padding=batch["real"]).logits
        return logits

    def decode(self, model: nn.Module, examples: Sequence[Document], done: Done = unheard) -> list[str]:
        """Beam search, documents of similar length together."""
        sources = [self.source(each) for each in examples]
        answers = [""] * len(sources)
        together = TOGETHER.get(next(model.parameters()).device.type, TOGETHER["cpu"])
        for group in longest_first([len(row) for row in sources], together // self.settings.beam):
            for place, row in zip(group, self.written(model, [sources[place] for place in group]), strict=True):
                answers[place] = self.tokenizer.decode(row)
            done(len(group))
        return answers

    def written(self, model: nn.Module, sources: list[list[int]]) -> list[list[int]]:
        width = min(self.settings.beam, self.tokenizer.vocabulary)
        method = Beam(width, self.settings.length_penalty, best=width if self.settings.consensus else 1)
        options: dict[str, Any] = {"new_tokens": self.settings.max_summary, "method": method}
        # A captured step would not see the words of the next batch, which are copied from.
        capture = False if self.settings.copy else None
        answers = generate(model, sources, start=START, stop=STOP, capture=capture, **options)
        return [self.agreed(answer).tokens if self.settings.consensus else answer.tokens for answer in answers]

    def agreed(self, answer: Answer) -> Answer:
        """Of all that a beam found the one that is most like the others; the likelier, the more each of them counts."""
        proposed = [answer, *answer.others]
        logs = [each.score / self.settings.consensus for each in proposed]
        return proposed[most_alike([self.tokenizer.decode(each.tokens) for each in proposed], logs)]

    def score(self, answers: Sequence[str], examples: Sequence[Document]) -> dict[str, float | str]:
        """The F-measures of ROUGE by rouge-score, with stemming, in percent."""
        kinds = ["rouge1", "rouge2", "rougeL"]
        scorer = metrics().RougeScorer(kinds, use_stemmer=True)
        pairs = zip(examples, answers, strict=True)
        found = [scorer.score(each.summary, answer) for each, answer in pairs]
        means = {kind: 100.0 * sum(each[kind].fmeasure for each in found) / max(len(found), 1) for kind in kinds}
        return {"rougeL": means["rougeL"], "rouge1": means["rouge1"], "rouge2": means["rouge2"]}

    def given(self, text: str) -> Document:
        if not text.strip():
            raise ValueError("expected a text to summarise, but got none")
        return Document(text.strip())

    def show(self, model: nn.Module, example: Document) -> Record:
        """The document, the summary, and the attention of both and between them."""
        source = self.source(example)
        device = next(model.parameters()).device
        with torch.no_grad():
            written = self.written(model, [source])[0]
            target = torch.tensor([[START, *written]], device=device)
            out = model(torch.tensor([source], device=device), target, return_weights=True)
        names = {"source": source, "target": [START, *written], "summary": [*written, STOP]}
        labels = {name: self.tokenizer.labels(row) for name, row in names.items()}
        # What looks at the document is named by the word that was being written.
        return record_of(model, out.weights, labels, self.tokenizer.decode(written), across="summary")


def begin(example: Document) -> int:
    """What is to be written is told by the token that it begins with: a summary, or what was left out."""
    return START if example.left_out is None else UNKNOWN


def sentences(text: str) -> list[str]:
    """The sentences of a text, with the marks that end them.

    >>> sentences("Lunch at noon? Bring cake.")
    ['Lunch at noon?', 'Bring cake.']
    """
    return re.split(r"(?<=[.!?])\s+", text)


def thinned(tokens: list[int], share: float, generator: torch.Generator) -> list[int]:
    """A document without some of its tokens; the last one, which ends it, stays."""
    kept = (torch.rand(len(tokens), generator=generator) >= share).tolist()
    return [token for token, stays in zip(tokens[:-1], kept, strict=False) if stays] + tokens[-1:]


def missing(fields: dict[str, str]) -> str | None:
    empty = [name for name in COLUMNS if not re.search(r"\w", fields[name])]
    return f"expected words as {empty[0]}, but it has none" if empty else None


def metrics() -> Any:
    try:
        from rouge_score import rouge_scorer
    except ImportError as error:
        raise ImportError("ROUGE needs rouge-score, which is not installed: pip install 'foci[tasks]'") from error
    return rouge_scorer

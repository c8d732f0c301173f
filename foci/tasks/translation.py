"""Translation: a sentence into a sentence, by a Transformer or by an RNN with attention.

B sentences, S tokens of the source, T tokens of the target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.decoding import Answer, Beam, generate
from foci.inputs.padding import longest_first, padded, real
from foci.inputs.text import PAD, START, STOP, Tokenizer, TokenizerKind, from_json, learned, to_json
from foci.nn.config import Config
from foci.nn.model import Model
from foci.nn.recurrent import Seq2SeqRNN
from foci.nn.transformer import EncoderDecoder
from foci.record.record import Record
from foci.tasks.parallel_text import Pair, pair_problems, read_pairs
from foci.tasks.rdrop import agreeing_loss
from foci.tasks.task import Done, Problem, Task, unheard
from foci.tasks.task_record import record_of

# How many tokens of sources are decoded at a time, of all hypotheses together.
DECODED = {"cpu": 4096, "cuda": 2**16}


@dataclass(frozen=True)
class TranslationSettings(Config):
    """What a translation is made of: [task] in a run's TOML."""

    section = "task"

    model: Literal["transformer", "rnn"] = "transformer"  # rnn: recurrent, with additive attention
    size: Literal["tiny", "small", "base"] = "small"  # of the model; what follows changes single numbers of it
    width: int | None = None  # of the tokens
    layers: int | None = None  # of each stack
    heads: int | None = None  # transformer: of each attention
    hidden: int | None = None  # transformer: the width inside the feed-forward
    dropout: float | None = None  # the share dropped while training
    attention_dropout: float | None = None  # transformer: the share of attention weights dropped while training
    norm_first: bool = True  # transformer: the norm before each part, or after its residual
    attend: Literal["after", "before"] = "after"  # rnn: look after the step (Luong) or before it (Bahdanau)
    tokenizer: TokenizerKind = "bpe"  # source and target share one vocabulary
    vocabulary: int = 8000  # how many tokens it has at most
    smoothing: float = 0.1  # the share of each target that is spread over all tokens, while training
    agreement: float = 0.0  # how much two passes with different dropout must agree while training (R-Drop); 0: one pass
    max_length: int = 256  # the longest sentence, in tokens
    beam: int = 4  # how many hypotheses grow side by side
    length_penalty: float = 1.0  # 0 prefers short answers
    tokenized: bool = False  # whether the texts are tokenised already, so that BLEU takes them as they are

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "width", "layers", "heads", "hidden", "vocabulary", "max_length", "beam")
        self.at_least(0, "agreement", "length_penalty")
        self.shares("dropout", "attention_dropout", "smoothing", whole=False)


class Translation(Task[Pair, str]):
    """Pairs of sentences (TSV, JSONL or parallel files); BLEU and chrF.

    >>> task = Translation.start(TranslationSettings(size="tiny", tokenizer="words"), [Pair("a dog", "ein Hund")])
    >>> batch = task.batch([Pair("a dog", "ein Hund")], training=True, generator=torch.Generator())
    >>> {name: tuple(tensor.shape) for name, tensor in batch.items()}
    {'source': (1, 8), 'real': (1, 8), 'inputs': (1, 8), 'targets': (1, 8)}
    """

    name = "translation"
    metric = "bleu"
    better = "higher"
    settings_type = TranslationSettings
    settings: TranslationSettings

    def __init__(self, settings: TranslationSettings, tokenizer: Tokenizer) -> None:
        self.settings, self.tokenizer = settings, tokenizer

    @classmethod
    def read(cls, paths: Sequence[Path], settings: TranslationSettings) -> list[Pair]:
        """A table with source and target, or two parallel files."""
        return read_pairs(paths)

    @classmethod
    def check(cls, paths: Sequence[Path], settings: TranslationSettings) -> Iterator[Problem]:
        """Errors and doubts, line by line."""
        return pair_problems(paths)

    @classmethod
    def start(cls, settings: TranslationSettings, train: Sequence[Pair]) -> Self:
        """Learns one vocabulary for both languages."""
        texts = [text for pair in train for text in (pair.source, pair.target)]
        return cls(settings, learned(settings.tokenizer, texts, settings.vocabulary))

    def files(self) -> dict[str, str]:
        return {"tokenizer.json": to_json(self.tokenizer)}

    @classmethod
    def from_files(cls, settings: TranslationSettings, files: dict[str, str]) -> Self:
        return cls(settings, from_json(files["tokenizer.json"]))

    def model(self) -> Model:
        """A Transformer or an RNN, its embeddings shared by both languages and by the logits."""
        settings = self.settings
        numbers = {"width": settings.width, "layers": settings.layers, "dropout": settings.dropout}
        if settings.model == "rnn":
            options: dict[str, Any] = {"attend": settings.attend, "tied": True}
            kind: type[Model] = Seq2SeqRNN
        else:
            numbers |= {"heads": settings.heads, "hidden": settings.hidden}
            numbers |= {"attention_dropout": settings.attention_dropout}
            options = {"norm_first": settings.norm_first, "max_length": settings.max_length + 1}
            kind = EncoderDecoder
        changes = {name: value for name, value in numbers.items() if value is not None}
        return kind.from_name(settings.size, vocabulary=self.tokenizer.vocabulary, shared=True, **options, **changes)

    @property
    def longest(self) -> int:
        return self.settings.max_length

    def is_cut(self, example: Pair) -> bool:
        """Of a longer sentence the beginning is read."""
        return len(self.tokenizer.encode(example.source)) > self.settings.max_length

    def size(self, example: Pair) -> int:
        """The longer side, with the token that ends it."""
        return max(len(self.tokenizer.encode(example.source)), len(self.tokenizer.encode(example.target))) + 1

    def batch(self, examples: Sequence[Pair], training: bool, generator: torch.Generator) -> dict[str, Tensor]:
        """Teacher forcing: after the start and each token the next one is to be written, after the last the stop."""
        source, lengths = padded([self._read(example.source) for example in examples], PAD)
        targets = [self.tokenizer.encode(example.target) for example in examples]
        return {
            "source": source,
            "real": real(lengths, source.shape[1]),
            "inputs": padded([[START, *row] for row in targets], PAD)[0],
            "targets": padded([[*row, STOP] for row in targets], PAD)[0],
        }

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Cross-entropy; with `agreement` of two passes, and how far their answers are from each other."""
        targets = batch["targets"]
        count = (targets != PAD).sum()
        if not model.training or not self.settings.agreement:
            return self._surprise(self._logits(model, batch), targets, model.training), count
        twice = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}
        settings = self.settings
        loss = agreeing_loss(
            self._logits(model, twice), targets, ignore=PAD, smoothing=settings.smoothing, agreement=settings.agreement
        )
        return loss, count

    def decode(self, model: nn.Module, examples: Sequence[Pair], done: Done = unheard) -> list[str]:
        """Beam search, sentences of similar length together."""
        sources = [self._read(example.source) for example in examples]
        answers = [""] * len(sources)
        together = DECODED.get(next(model.parameters()).device.type, DECODED["cpu"])
        for group in longest_first([len(row) for row in sources], together // self.settings.beam):
            for place, answer in zip(group, self._answers(model, [sources[place] for place in group]), strict=True):
                answers[place] = self.tokenizer.decode(answer.tokens)
            done(len(group))
        return answers

    def score(self, answers: Sequence[str], examples: Sequence[Pair]) -> dict[str, float | str]:
        """BLEU and chrF by sacrebleu, on the texts as they are, case and all."""
        sacrebleu = metrics()
        references = [[example.target for example in examples]]
        bleu = sacrebleu.BLEU(tokenize="none" if self.settings.tokenized else "13a", force=True)
        chrf = sacrebleu.CHRF()
        found = bleu.corpus_score(list(answers), references).score
        return {
            "bleu": float(found),
            "chrf": float(chrf.corpus_score(list(answers), references).score),
            "signature": str(bleu.get_signature()),
        }

    def given(self, text: str) -> Pair:
        if not text.strip():
            raise ValueError("expected a sentence to translate, but got none")
        return Pair(text.strip(), "")

    def show(self, model: nn.Module, example: Pair) -> Record:
        """Source and translation; what looks from one to the other is named by the word that was being written."""
        source = self._read(example.source)
        answer = self._answers(model, [source])[0].tokens
        device = next(model.parameters()).device
        inputs = [START, *answer]
        with torch.no_grad():
            out = model(*(torch.tensor([row], device=device) for row in (source, inputs)), return_weights=True)
        labels = {"source": source, "target": inputs, "translation": [*answer, STOP]}
        labelled = {name: self.tokenizer.labels(tokens) for name, tokens in labels.items()}
        return record_of(model, out.weights, labelled, self.tokenizer.decode(answer), across="translation")

    def _logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = model(batch["source"], batch["inputs"], source_padding=batch["real"]).logits
        return logits

    def _surprise(self, logits: Tensor, targets: Tensor, training: bool) -> Tensor:
        return F.cross_entropy(
            logits.float().flatten(0, 1),
            targets.flatten(),
            ignore_index=PAD,
            reduction="sum",
            label_smoothing=self.settings.smoothing if training else 0.0,
        )

    def _read(self, source: str) -> list[int]:
        return [*self.tokenizer.encode(source)[: self.settings.max_length], STOP]

    def _answers(self, model: nn.Module, sources: list[list[int]]) -> list[Answer]:
        # Twice the source and a little: more is only written by a model that repeats itself.
        limit = min(2 * max(map(len, sources)) + 10, self.settings.max_length)
        method = Beam(min(self.settings.beam, self.tokenizer.vocabulary), self.settings.length_penalty)
        return generate(model, sources, new_tokens=limit, method=method, start=START, stop=STOP)


def metrics() -> Any:
    try:
        import sacrebleu.metrics as package
    except ImportError as error:
        raise ImportError("BLEU needs sacrebleu, which is not installed: pip install 'foci[tasks]'") from error
    return package

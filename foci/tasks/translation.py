"""Translation of sentences, by a Transformer or an RNN with attention.

B sentences, S tokens of the source, T tokens of the target.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.decoding import Answer, Beam, generate
from foci.inputs.padding import group_by_size, pad_sequences, valid_positions
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
from foci.inputs.tokenizer_choice import choose_tokenizer, choose_vocabulary
from foci.nn.model import Model
from foci.nn.recurrent import Seq2SeqRNN
from foci.nn.transformer import EncoderDecoder
from foci.record.record import Record
from foci.tasks.copying import (
    copy_names,
    find_respelled_words,
    parse_names,
    parse_respelled_words,
    translate_names,
)
from foci.tasks.parallel_text import Pair, check_pairs, read_pairs
from foci.tasks.rdrop import compute_rdrop_loss
from foci.tasks.task import (
    DEFAULT_VOCABULARY,
    ModelSize,
    Problem,
    ProgressCallback,
    Task,
    TaskSettings,
    choose_model_size,
    ignore_progress,
)
from foci.tasks.task_record import build_task_record

# Source tokens decoded at a time, over all hypotheses, by device.
DECODE_TOKENS = {"cpu": 4096, "cuda": 2**16}
# What phones and word processors write for ', ", a space and three dots.
PLAIN_PUNCTUATION = str.maketrans(
    dict.fromkeys("‘’‚‛′´", "'") | dict.fromkeys("“”„‟″", '"') | dict.fromkeys("\u00a0\u202f\t\r\n", " ") | {"…": "..."}
)
# A higher share of unknown tokens in the dev set is reported.
MAX_UNKNOWN_SHARE = 0.02


@dataclass(frozen=True)
class TranslationSettings(TaskSettings):
    """Settings of translation: the [task] section of a run's TOML."""

    model: Literal["transformer", "rnn"] = "transformer"  # rnn: recurrent, with additive attention
    size: ModelSize | None = None  # tiny, small or base; None: tiny below 20,000 pairs; the next settings override it
    width: int | None = None  # model width
    layers: int | None = None  # blocks of each stack
    heads: int | None = None  # transformer: attention heads
    hidden: int | None = None  # transformer: width inside the feed-forward
    dropout: float | None = None  # dropout rate
    attention_dropout: float | None = None  # transformer: dropout rate of the attention weights
    norm_first: bool = True  # transformer: pre-norm or post-norm
    attend: Literal["after", "before"] = "after"  # rnn: attend after the step (Luong) or before it (Bahdanau)
    tokenizer: TokenizerKind | None = None  # bpe, words, characters or bytes, for both sides; None: from the data
    vocabulary: int | None = None  # maximum vocabulary size; None: from the data, at most 8000
    smoothing: float = 0.1  # label smoothing, in training
    agreement: float = 0.0  # weight of the R-Drop loss between two passes with different dropout; 0: one pass
    max_length: int = 256  # maximum tokens of a sentence
    beam: int = 4  # beam width
    length_penalty: float = 1.0  # of beam search; 0 prefers short answers
    tokenized: bool = False  # the texts are already tokenized, so BLEU does not tokenize them
    alignment: tuple[int, ...] = ()  # transformer: cross-attention layers whose mean is the alignment; (): the clearest
    copy_names: bool = False  # spell names that training has not seen as in the source; chosen before training
    plain_punctuation: bool = False  # read a source's typographic quotes, apostrophes and spaces as plain ones

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_fractions("dropout", "attention_dropout", "smoothing", include_one=False)


class Translation(Task[Pair, str]):
    """Translation of pairs of sentences (TSV, JSONL or parallel files); metrics: BLEU and chrF.

    >>> settings = TranslationSettings(size="tiny", tokenizer="words")
    >>> task = Translation.from_examples(settings, [Pair("a dog", "ein Hund")])
    >>> batch = task.batch([Pair("a dog", "ein Hund")], training=True, generator=torch.Generator())
    >>> {name: tuple(tensor.shape) for name, tensor in batch.items()}
    {'source': (1, 8), 'real': (1, 8), 'inputs': (1, 8), 'targets': (1, 8)}
    """

    name = "translation"
    metric = "bleu"
    better = "higher"
    settings_type = TranslationSettings
    settings: TranslationSettings

    def __init__(
        self,
        settings: TranslationSettings,
        tokenizer: Tokenizer,
        respelled: frozenset[str] = frozenset(),
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.settings, self.tokenizer, self.respelled = settings, tokenizer, respelled
        self.names = dict(names or {})

    @classmethod
    def read(cls, paths: Sequence[Path], settings: TranslationSettings) -> list[Pair]:
        """Reads a table with source and target, or two parallel files."""
        return read_pairs(paths)

    @classmethod
    def check(cls, paths: Sequence[Path], settings: TranslationSettings) -> Iterator[Problem]:
        """Yields errors and warnings, line by line."""
        return check_pairs(paths)

    @classmethod
    def from_examples(cls, settings: TranslationSettings, train: Sequence[Pair]) -> Self:
        """Trains one tokenizer for both languages."""
        settings = cls.fill_settings(settings, train)
        texts = [text for pair in train for text in (pair.source, pair.target)]
        tokenizer = train_tokenizer(settings.tokenizer or "bpe", texts, settings.vocabulary or DEFAULT_VOCABULARY)
        task = cls(settings, tokenizer)
        return task.learn_respelled_words(train) if settings.copy_names else task

    def learn_respelled_words(self, train: Sequence[Pair], names: Mapping[str, str] | None = None) -> Self:
        """Returns the task with the words that it must not copy, and names in both languages, for `copy_names`."""
        respelled = find_respelled_words(train, self._is_rare)
        return type(self)(replace(self.settings, copy_names=True), self.tokenizer, respelled, names)

    @classmethod
    def fill_settings(cls, settings: TranslationSettings, train: Sequence[Pair]) -> TranslationSettings:
        """Chooses size, tokenizer and vocabulary where they are not set."""
        sources, targets = [pair.source for pair in train], [pair.target for pair in train]
        kind = settings.tokenizer or choose_tokenizer(sources, targets)
        settings = settings.fill(size=choose_model_size(len(train)), tokenizer=kind)
        return settings.fill(vocabulary=choose_vocabulary([*sources, *targets])) if kind == "bpe" else settings

    def find_warnings(self, dev: Sequence[Pair]) -> list[str]:
        """Warns of words of the dev set that the vocabulary does not cover."""
        tokens = [token for pair in dev for text in (pair.source, pair.target) for token in self.tokenizer.encode(text)]
        share = tokens.count(UNKNOWN) / max(len(tokens), 1)
        if share < MAX_UNKNOWN_SHARE:
            return []
        return [f"{share:.0%} of the dev tokens are not in the vocabulary: use --set task.tokenizer=bpe"]

    def learned_state(self) -> dict[str, str]:
        files = {"tokenizer.json": tokenizer_to_json(self.tokenizer)}
        if self.settings.copy_names:
            files["respelled.json"] = json.dumps(sorted(self.respelled), ensure_ascii=False)
            files["names.json"] = json.dumps(self.names, ensure_ascii=False)
        return files

    @classmethod
    def from_learned_state(cls, settings: TranslationSettings, files: dict[str, str]) -> Self:
        respelled = parse_respelled_words(files.get("respelled.json")) if settings.copy_names else frozenset()
        names = parse_names(files.get("names.json", "{}"))
        return cls(settings, tokenizer_from_json(files["tokenizer.json"]), respelled, names)

    def model(self) -> Model:
        """Builds a Transformer or an RNN whose embeddings are shared by both languages and tied to the output."""
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
        model = kind.from_name(
            settings.size or "small", vocabulary=self.tokenizer.vocabulary, shared=True, **options, **changes
        )
        check_alignment(settings.alignment, model)
        return model

    @property
    def max_size(self) -> int:
        return self.settings.max_length

    def is_truncated(self, example: Pair) -> bool:
        """A longer sentence is truncated to its beginning."""
        return len(self.tokenizer.encode(example.source)) > self.settings.max_length

    def describe_read_part(self, example: Pair) -> str:
        return f"the first {self.settings.max_length:,} of {len(self.tokenizer.encode(example.source)):,} tokens"

    def size(self, example: Pair) -> int:
        """Length of the longer side, including the stop token."""
        return max(len(self.tokenizer.encode(example.source)), len(self.tokenizer.encode(example.target))) + 1

    def batch(self, examples: Sequence[Pair], training: bool, generator: torch.Generator) -> dict[str, Tensor]:
        """Teacher forcing: inputs are start and target tokens, targets are the next tokens and stop."""
        source, lengths = pad_sequences([self._encode_source(example.source) for example in examples], PAD)
        targets = [self.tokenizer.encode(example.target) for example in examples]
        return {
            "source": source,
            "real": valid_positions(lengths, source.shape[1]),
            "inputs": pad_sequences([[START, *row] for row in targets], PAD)[0],
            "targets": pad_sequences([[*row, STOP] for row in targets], PAD)[0],
        }

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Computes the cross-entropy, or the R-Drop loss of two passes if `agreement` is set."""
        targets = batch["targets"]
        count = (targets != PAD).sum()
        if not model.training or not self.settings.agreement:
            return self._cross_entropy(self._logits(model, batch), targets, model.training), count
        doubled = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}
        settings = self.settings
        loss = compute_rdrop_loss(
            self._logits(model, doubled),
            targets,
            ignore=PAD,
            smoothing=settings.smoothing,
            agreement=settings.agreement,
        )
        return loss, count

    def decode(self, model: nn.Module, examples: Sequence[Pair], done: ProgressCallback = ignore_progress) -> list[str]:
        """Runs beam search in batches of sentences of similar length."""
        sources = [self._encode_source(example.source) for example in examples]
        answers = [""] * len(sources)
        budget = DECODE_TOKENS.get(next(model.parameters()).device.type, DECODE_TOKENS["cpu"])
        for group in group_by_size([len(row) for row in sources], budget // self.settings.beam):
            for index, answer in zip(group, self._generate(model, [sources[index] for index in group]), strict=True):
                answers[index] = self.tokenizer.decode(answer.tokens)
            done(len(group))
        return answers

    def score(self, answers: Sequence[str], examples: Sequence[Pair]) -> dict[str, float | str]:
        """Computes BLEU and chrF with sacrebleu, case-sensitive."""
        sacrebleu = import_sacrebleu()
        references = [[example.target for example in examples]]
        bleu = build_bleu(references[0], "none" if self.settings.tokenized else "13a")
        chrf = sacrebleu.CHRF()
        return {
            "bleu": float(bleu.corpus_score(list(answers), references).score),
            "chrf": float(chrf.corpus_score(list(answers), references).score),
            "signature": str(bleu.get_signature()),
        }

    def parse_input(self, text: str) -> Pair:
        if not text.strip():
            raise ValueError("the input must be a sentence to translate, got an empty text")
        return Pair(text.strip(), "")

    def record_attention(self, model: nn.Module, example: Pair) -> Record:
        """Records the attention; the queries of cross-attention are labelled with the token that is generated there."""
        source = self._encode_source(example.source)
        answer = self._generate(model, [source])[0].tokens
        device = next(model.parameters()).device
        inputs = [START, *answer]
        with torch.no_grad():
            out = model(*(torch.tensor([row], device=device) for row in (source, inputs)), return_weights=True)
        tokens_by_name = {"source": source, "target": inputs, "translation": [*answer, STOP]}
        labels_by_name = {name: self.tokenizer.labels(tokens) for name, tokens in tokens_by_name.items()}
        return build_task_record(
            model,
            out.weights,
            labels_by_name,
            self.tokenizer.decode(answer),
            cross_queries="translation",
            alignment=self.settings.alignment,
        )

    def _logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        # Without "real" no source of the batch is padded.
        logits: Tensor = model(batch["source"], batch["inputs"], source_padding=batch.get("real")).logits
        return logits

    def _cross_entropy(self, logits: Tensor, targets: Tensor, training: bool) -> Tensor:
        return F.cross_entropy(
            logits.float().flatten(0, 1),
            targets.flatten(),
            ignore_index=PAD,
            reduction="sum",
            label_smoothing=self.settings.smoothing if training else 0.0,
        )

    def _encode_source(self, source: str) -> list[int]:
        if self.settings.plain_punctuation:
            source = source.translate(PLAIN_PUNCTUATION)
        return [*self.tokenizer.encode(source)[: self.settings.max_length], STOP]

    def _generate(self, model: nn.Module, sources: list[list[int]]) -> list[Answer]:
        # Twice the source plus a margin: only a model that repeats itself generates more.
        limit = min(2 * max(map(len, sources)) + 10, self.settings.max_length)
        method = Beam(min(self.settings.beam, self.tokenizer.vocabulary), self.settings.length_penalty)
        answers = generate(model, sources, new_tokens=limit, method=method, start=START, stop=STOP)
        if not self.settings.copy_names:
            return answers
        return [
            replace(answer, tokens=self._copy_names(model, source, answer.tokens))
            for source, answer in zip(sources, answers, strict=True)
        ]

    def _copy_names(self, model: nn.Module, source: list[int], answer: list[int]) -> list[int]:
        """Spells unseen names as in the source, others as in the table; runs the model once more for a missing one."""
        texts, spelled = (self.tokenizer.labels(tokens).texts[0] for tokens in (source[:-1], answer))
        text = copy_names(texts, spelled, self._is_unseen, lambda: self._read_alignment(model, source, answer))
        text = translate_names("".join(texts), text, self.names)
        tokens = self.tokenizer.encode(text.removeprefix(" ")) if text != "".join(spelled) else answer
        return tokens if len(tokens) <= self.settings.max_length else answer

    def _is_rare(self, word: str) -> bool:
        """Whether a word has several tokens; the others are frequent in training."""
        return len(self.tokenizer.encode(word)) > 1

    def _is_unseen(self, word: str) -> bool:
        return word.lower() not in self.respelled and word not in self.names and self._is_rare(word)

    @torch.no_grad()
    def _read_alignment(self, model: nn.Module, source: list[int], answer: list[int]) -> Tensor:
        """The mean weight of each source token (columns) for each token of an answer (rows)."""
        device = next(model.parameters()).device
        out = model(*(torch.tensor([row], device=device) for row in (source, [START, *answer])), return_weights=True)
        cross = [each for name, each in out.weights.items() if name.startswith("cross.")]
        layers = [cross[number] for number in self.settings.alignment] or cross
        return torch.stack([layer.dense()[0].mean(0) for layer in layers]).mean(0).cpu()


def check_alignment(layers: Sequence[int], model: Any) -> None:
    """Raises ValueError unless the model has cross-attention in these layers."""
    count = sum("cross.L" in name for name in model.attentions())
    if not all(type(number) is int and 0 <= number < count for number in layers):
        raise ValueError(f"task.alignment must be layers from 0 to {count - 1}, got {tuple(layers)}")


def build_bleu(references: Sequence[str], tokenize: str) -> Any:
    """Builds BLEU over words; over characters if no reference has four words, where it is 0 for every answer.

    Texts that are already tokenized (tokenize "none") are always compared word by word.
    """
    bleu = import_sacrebleu().BLEU(tokenize=tokenize, force=True)
    if (
        tokenize == "none"
        or not references
        or any(len(bleu.tokenizer(text).split()) >= bleu.max_ngram_order for text in references)
    ):
        return bleu
    longest = max(len("".join(text.split())) for text in references)
    order = max(min(longest, bleu.max_ngram_order), 1)
    return import_sacrebleu().BLEU(tokenize="char", max_ngram_order=order, force=True)


def import_sacrebleu() -> Any:
    try:
        import sacrebleu.metrics as package
    except ImportError as error:
        raise ImportError("BLEU needs sacrebleu, which is not installed: pip install 'foci[tasks]'") from error
    return package

"""Speech recognition: a recording in, its text out; by CTC, by an attention decoder, or by both.

B recordings, F frames, M features per frame, S states, T tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.decoding import Beam, generate
from foci.inputs.audio_augmentation import change_duration
from foci.inputs.padding import group_by_size, pad_sequences
from foci.inputs.sample_cache import SampleCache
from foci.inputs.tables import read_table_rows, read_valid_rows, require_one_path
from foci.inputs.text import PAD, START, STOP, Tokenizer, tokenizer_from_json, tokenizer_to_json, train_tokenizer
from foci.nn.model import Model
from foci.nn.speech import SpeechConfig, SpeechEncoder, read_ctc
from foci.record.labels import Labels
from foci.record.record import Record
from foci.tasks.class_prediction import ClassPrediction
from foci.tasks.speech_features import (
    SpeechSettings,
    augment_features,
    compute_features,
    find_sound_parts,
    join_recordings,
    load_recording,
    measure_feature_std,
)
from foci.tasks.task import Problem, ProgressCallback, Task, ignore_progress
from foci.tasks.task_files import check_numbers, parse_object
from foci.tasks.task_record import build_task_record

COLUMNS = ("sound", "text")
# The blank of CTC is the padding token, which occurs in no text.
BLANK = PAD
# Recordings used to measure the standard deviation of the features; frames decoded at a time.
STATISTICS_RECORDINGS, DECODE_FRAMES = 500, 20_000
# The largest feature of a recording in which nothing changes.
SILENCE = 1e-3
# A recording with more parts is answered as a whole.
MAX_PARTS = 100
MODEL_FIELDS = (
    "width",
    "layers",
    "decoder_layers",
    "heads",
    "hidden",
    "halvings",
    "local",
    "reach",
    "dropout",
    "attention_dropout",
    "depth_dropout",
)


@dataclass(frozen=True)
class Recording:
    """The path of a recording, and its text if known."""

    path: str
    text: str = ""


class RecordingPart(NamedTuple):
    """A part of a recording, and the tokens of its answer."""

    samples: slice
    tokens: list[int]


class Speech(Task[Recording, str]):
    """Recognition of recordings (a table of paths and texts); metrics: word and character error rate, exact matches.

    A .npy file holds precomputed frames.
    """

    name = "speech"
    metric = "wer"
    better = "lower"
    settings_type = SpeechSettings
    settings: SpeechSettings

    def __init__(self, settings: SpeechSettings, tokenizer: Tokenizer, std: Sequence[float]) -> None:
        self.settings, self.tokenizer, self.std = settings, tokenizer, torch.tensor(std)
        # The tokens of the words that can be answered, and those of the other words; both empty if any text can be.
        self.answers, self.others = split_vocabulary(tokenizer, settings.answers)
        self._recordings = SampleCache(partial(load_recording, rate=settings.rate))

    @classmethod
    def read(cls, paths: Sequence[Path], settings: SpeechSettings) -> list[Recording]:
        table = require_one_path(paths, "a table of paths and texts")
        recordings = []
        for row in read_valid_rows(table, COLUMNS):
            each = recording_from_row(table, row.fields)
            if not each.text:
                raise ValueError(f"{row.location}: text must not be empty")
            if not Path(each.path).is_file():
                raise ValueError(f"{row.location}: {each.path} must be an audio file, but it does not exist")
            recordings.append(each)
        return recordings

    @classmethod
    def check(cls, paths: Sequence[Path], settings: SpeechSettings) -> Iterator[Problem]:
        table = require_one_path(paths, "a table of paths and texts")
        count = 0
        for row in read_table_rows(table, COLUMNS):
            count += 1
            if row.problem is not None:
                yield Problem(row.location, row.problem)
                continue
            if row.warning is not None:
                yield Problem(row.location, row.warning, "warning")
            yield from check_recording(row.location, recording_from_row(table, row.fields), settings)
        if not count:
            yield Problem(str(table), "the table must have at least one line, got none")

    @classmethod
    def from_examples(cls, settings: SpeechSettings, train: Sequence[Recording]) -> Self:
        """Trains the tokenizer, and measures the standard deviation of the features."""
        tokenizer = train_tokenizer(settings.tokenizer, [each.text for each in train], settings.vocabulary)
        sample = train[:: len(train) // STATISTICS_RECORDINGS + 1]
        std = measure_feature_std(
            [compute_features(load_recording(each.path, settings.rate), settings) for each in sample]
        )
        return cls(settings, tokenizer, std.tolist())

    def learned_state(self) -> dict[str, str]:
        return {
            "tokenizer.json": tokenizer_to_json(self.tokenizer),
            "frames.json": json.dumps({"std": self.std.tolist()}),
        }

    @classmethod
    def from_learned_state(cls, settings: SpeechSettings, files: dict[str, str]) -> Self:
        (std,) = parse_object(files["frames.json"], "frames.json", "std")
        return cls(settings, tokenizer_from_json(files["tokenizer.json"]), check_numbers(std, "std", above=0.0))

    def model(self) -> Model:
        own = self.settings
        changes = {name: getattr(own, name) for name in MODEL_FIELDS if getattr(own, name) is not None}
        if own.ctc == 1.0:
            changes["decoder_layers"] = 0
        return SpeechEncoder.from_name(
            own.size, features=len(self.std), vocabulary=self.tokenizer.vocabulary, ctc=own.ctc > 0.0, **changes
        )

    @property
    def max_size(self) -> int:
        """Maximum frames: the number of positions of the model, before the frame rate is halved."""
        config = cast("SpeechConfig", SpeechEncoder.sizes[self.settings.size])
        halvings = config.halvings if self.settings.halvings is None else self.settings.halvings
        return config.max_length << halvings

    def is_truncated(self, example: Recording) -> bool:
        """A longer recording is truncated to its beginning."""
        return self.size(example) > self.max_size

    def describe_read_part(self, example: Recording) -> str:
        read, whole = (count * self.settings.hop for count in (self.max_size, self.size(example)))
        return f"the first {read:.1f} of {whole:.1f} seconds"

    def size(self, example: Recording) -> int:
        """Returns the number of frames."""
        recording = self._recordings(example.path)
        return (
            len(recording)
            if recording.dim() == 2
            else 1 + len(recording) // round(self.settings.hop * self.settings.rate)
        )

    def batch(self, examples: Sequence[Recording], training: bool, generator: torch.Generator) -> dict[str, Tensor]:
        features = [self.frames(each, generator if training else None) for each in examples]
        texts = [self.tokenizer.encode(each.text) for each in examples]
        if training and self.settings.join:
            features, texts = join_recordings(features, texts, self.settings.join, generator)
        frames, lengths = pad_sequences([each[: self.max_size] for each in features])
        targets, counts = pad_sequences([[*row, STOP] for row in texts], PAD)
        return {
            "frames": frames,
            "lengths": lengths,
            "inputs": pad_sequences([[START, *row] for row in texts], PAD)[0],
            "targets": targets,
            "counts": counts - 1,
        }

    def frames(self, example: Recording, generator: torch.Generator | None = None, part: slice = slice(None)) -> Tensor:
        """Computes the features of a recording or a part of it: (F, M); with a generator, randomly augmented."""
        recording = self._recordings(example.path)[part]
        if generator is None:
            features = compute_features(recording, self.settings)
        else:
            features = augment_features(recording, self.settings, generator)
        if features.shape[1] != len(self.std):
            expected = f"{len(self.std)} features per frame, as the training data"
            raise ValueError(f"{example.path} must have {expected}, got {features.shape[1]}")
        return features[: self.max_size] / self.std

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        share = self.settings.ctc
        has_decoder = cast("SpeechEncoder", model).decoder is not None
        out = model(batch["frames"], batch["inputs"] if has_decoder else None, padding=batch["lengths"])
        targets = batch["targets"]
        loss = torch.zeros((), device=targets.device)
        if out.ctc is not None:
            scores = out.ctc.float().log_softmax(-1).transpose(0, 1)
            args = scores, targets, out.lengths, batch["counts"], BLANK
            # A text with more tokens than states has loss zero instead of infinity.
            loss = loss + (share if has_decoder else 1.0) * F.ctc_loss(*args, reduction="sum", zero_infinity=True)
        if has_decoder:
            smoothing = self.settings.smoothing if model.training else 0.0
            logits = out.logits.float().flatten(0, 1)
            flat = targets.flatten()
            cross_entropy = F.cross_entropy(logits, flat, ignore_index=PAD, reduction="sum", label_smoothing=smoothing)
            loss = loss + (1.0 - share) * cross_entropy
        return loss, (targets != PAD).sum()

    def decode(
        self, model: nn.Module, examples: Sequence[Recording], done: ProgressCallback = ignore_progress
    ) -> list[str]:
        answers = self.transcribe_parts(cast("SpeechEncoder", model), examples, done)
        return [" ".join(self.tokenizer.decode(part.tokens) for part in parts) for parts in answers]

    def answer(self, model: nn.Module, examples: Sequence[Recording]) -> list[str]:
        """Returns the text; a model that can decline says for each part how sure it is: "four (98%), two (95%)"."""
        encoder = cast("SpeechEncoder", model)
        answers = self.transcribe_parts(encoder, examples)
        return [self.describe_answer(encoder, *pair) for pair in zip(examples, answers, strict=True)]

    def describe_answer(self, model: SpeechEncoder, example: Recording, parts: list[RecordingPart]) -> str:
        """Returns the text of `foci run` for one recording."""
        if not self.answers:
            return " ".join(self.tokenizer.decode(part.tokens) for part in parts)
        return ", ".join(str(self.judge(model, self.frames(example, part=part), tokens)) for part, tokens in parts)

    def judge(self, model: SpeechEncoder, frames: Tensor, tokens: list[int]) -> ClassPrediction:
        """Computes the probability of an answer among all answers, and whether the sound is declined."""
        answers, others = self.score_words(model, frames)
        probability = answers.softmax(0)[self.answers.index(tokens[0])]
        ratio = float(others.logsumexp(0) - answers.logsumexp(0))
        declined = ratio > math.log(self.settings.decline) or bool(frames.abs().amax() < SILENCE)
        return ClassPrediction(self.tokenizer.decode(tokens), float(probability), declined)

    def score_words(self, model: SpeechEncoder, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the log-likelihoods of the answers and of the other words for one recording (F, M)."""
        frames = frames.to(next(model.parameters()).device)
        scores = torch.stack([self.score_vocabulary(model, each) for each in self.vary_tempo(frames)]).mean(0)
        return scores[: len(self.answers)], scores[len(self.answers) :]

    def score_vocabulary(self, model: SpeechEncoder, frames: Tensor) -> Tensor:
        """Computes the log-likelihood of each word: first the answers, then the others."""
        ctc = model(frames[None]).ctc
        own = None if ctc is None else ctc[0].float().log_softmax(-1)
        return self.rescore(model, frames, own, [[token] for token in (*self.answers, *self.others)])

    def vary_tempo(self, frames: Tensor) -> list[Tensor]:
        """The features as they are, and with `tempo` faster and slower ones."""
        if not self.settings.tempo:
            return [frames]
        factor = 1.0 + self.settings.tempo
        return [frames, *(change_duration(frames, each)[: self.max_size] for each in (factor, 1.0 / factor))]

    def transcribe_parts(
        self, model: SpeechEncoder, examples: Sequence[Recording], done: ProgressCallback = ignore_progress
    ) -> list[list[RecordingPart]]:
        """Answers each recording as a whole, or each of its parts between pauses."""
        answers: list[list[RecordingPart]] = [[] for _ in examples]
        for group in group_by_size([self.size(each) for each in examples], DECODE_FRAMES):
            tokens = self.transcribe(model, [self.frames(examples[index]) for index in group])
            for index, row in zip(group, tokens, strict=True):
                answers[index] = [RecordingPart(slice(None), row)]
                if parts := self.find_unanswered_parts(examples[index], self.tokenizer.decode(row)):
                    spoken = self.transcribe(model, [self.frames(examples[index], part=part) for part in parts])
                    answers[index] = list(map(RecordingPart, parts, spoken))
            done(len(group))
        return answers

    def find_unanswered_parts(self, example: Recording, answer: str) -> list[slice]:
        """Finds the parts between pauses if there are more of them than words in the answer.

        A model that was trained on single words answers a whole recording with one or two words, so each part is
        answered on its own.
        """
        recording = self._recordings(example.path)
        parts = find_sound_parts(recording, self.settings.rate) if recording.dim() == 1 else []
        return parts if max(len(answer.split()), 1) < len(parts) <= MAX_PARTS else []

    def transcribe(self, model: SpeechEncoder, frames: list[Tensor]) -> list[list[int]]:
        """Returns the tokens of each recording: the best candidate of CTC and the decoder, scored by both.

        The candidates are the `answers` of the settings, if there are any.
        """
        if self.answers:
            return [[self.answers[int(self.score_words(model, each)[0].argmax())]] for each in frames]
        device = next(model.parameters()).device
        batch, lengths = pad_sequences(frames, multiple=1)
        out = model(batch.to(device), padding=lengths.to(device))
        by_ctc = None if out.ctc is None else read_ctc(out.ctc.float(), out.lengths, BLANK)
        if model.decoder is None:
            assert by_ctc is not None
            return by_ctc
        width = min(self.settings.beam, self.tokenizer.vocabulary)
        limit = min(self.settings.max_tokens, model.config.max_length)
        method = Beam(width, best=width)
        # A list of frames, so that each recording keeps its own length.
        answers = generate(
            model, [each.to(device) for each in frames], new_tokens=limit, method=method, start=START, stop=STOP
        )
        beams = [[each.tokens for each in (answer, *answer.others)] for answer in answers]
        if by_ctc is None or out.ctc is None:
            return [self.drop_short(candidates)[0] for candidates in beams]
        log_probabilities = out.ctc.float().log_softmax(-1)
        chosen = []
        for i, by_decoder in enumerate(beams):
            candidates = self.drop_short([*by_decoder, by_ctc[i][:limit]])
            own = log_probabilities[i, : int(out.lengths[i])]
            scores = self.rescore(model, frames[i].to(device), own, candidates)
            chosen.append(candidates[int(scores.argmax())])
        return chosen

    def drop_short(self, candidates: list[list[int]]) -> list[list[int]]:
        """Drops candidates below `min_tokens` if others remain: CTC is often overconfident that nothing is said."""
        return [each for each in candidates if len(each) >= self.settings.min_tokens] or candidates

    def rescore(self, model: SpeechEncoder, frames: Tensor, ctc: Tensor | None, candidates: list[list[int]]) -> Tensor:
        """Computes the weighted log-likelihood of each candidate by CTC (S, V) and the decoder, in nats."""
        device = frames.device
        inputs, _ = pad_sequences([[START, *row] for row in candidates], PAD)
        targets, counts = pad_sequences([[*row, STOP] for row in candidates], PAD)
        inputs, targets, counts = inputs.to(device), targets.to(device), counts.to(device)
        likelihood = torch.zeros(len(candidates), device=device)
        if model.decoder is not None:
            rows = torch.zeros(len(candidates), dtype=torch.long, device=device)
            logits = model.decode(inputs, model.encode(frames[None]).select_rows(rows)).logits
            assert logits is not None
            loss = F.cross_entropy(logits.float().mT, targets, ignore_index=PAD, reduction="none").sum(1)
            likelihood = likelihood - (1.0 - self.settings.ctc) * loss
        if ctc is not None:
            repeated = ctc[:, None].expand(-1, len(candidates), -1)
            states = torch.full((len(candidates),), len(ctc), device=device)
            loss = F.ctc_loss(repeated, targets, states, counts - 1, BLANK, reduction="none")
            likelihood = likelihood - self.settings.ctc * loss
        return likelihood

    def score(self, answers: Sequence[str], examples: Sequence[Recording]) -> dict[str, float | str]:
        """Computes word and character error rate, and exact matches, in percent."""
        texts = [each.text for each in examples]
        correct = sum(answer == text for answer, text in zip(answers, texts, strict=True))
        words, characters, signature = error_rates(texts, answers)
        return {
            "wer": 100.0 * words,
            "cer": 100.0 * characters,
            "accuracy": 100.0 * correct / max(len(texts), 1),
            "signature": signature,
        }

    def parse_input(self, text: str) -> Recording:
        return Recording(text)

    def record_attention(self, model: nn.Module, example: Recording) -> Record:
        """Records the attention, with seconds along the recording and the answer along the text.

        Where the parts of a recording are answered on their own, each is a sequence of the record.
        """
        encoder = cast("SpeechEncoder", model)
        device = next(model.parameters()).device
        with torch.no_grad():
            (answered,) = self.transcribe_parts(encoder, [example])
            answer = self.describe_answer(encoder, example, answered)
            parts, tokens = [part.samples for part in answered], [part.tokens for part in answered]
            several = len(parts) > 1
            frames, lengths = pad_sequences([self.frames(example, part=part) for part in parts], multiple=1)
            target, _ = pad_sequences([[START, *row] for row in tokens], PAD, multiple=1)
            out = encoder(
                frames.to(device),
                target.to(device) if encoder.decoder is not None else None,
                padding=lengths.to(device) if several else None,
                return_weights=True,
            )
        labels = {
            "source": self.label_frames(
                example, parts, out.states.shape[1], self.settings.hop * 2**encoder.config.halvings
            ),
            "target": join_labels([self.tokenizer.labels([START, *row]) for row in tokens]),
            "heard": join_labels([self.tokenizer.labels([*row, STOP]) for row in tokens]),
        }
        # The queries of cross-attention are labelled with the token that is generated there.
        record = build_task_record(model, out.weights, labels, answer, cross_queries="heard")
        if several:
            note = f"the recording has {len(parts)} parts with pauses between them"
            record.notes.append(f"{note}: each was answered on its own and is one sequence of this record")
        return record

    def label_frames(self, example: Recording, parts: list[slice], states: int, seconds: float) -> Labels:
        """Labels the states of each part with their time in the recording, and stores its samples."""
        recording, rate = self._recordings(example.path), self.settings.rate
        starts = [(part.start or 0) / rate for part in parts]
        times = tuple(tuple(f"{start + state * seconds:.2f}" for state in range(states)) for start in starts)
        if recording.dim() != 1:
            return Labels("frames", times, seconds=seconds)
        length = round(states * seconds * rate)
        samples, _ = pad_sequences([recording[part][:length] for part in parts], multiple=1)
        loudest = samples.abs().amax().clamp(min=1e-9)
        return Labels("frames", times, seconds=seconds, sounds=(samples / loudest * 32000).to(torch.int16), rate=rate)


def split_vocabulary(tokenizer: Tokenizer, answers: str) -> tuple[list[int], list[int]]:
    """Splits the words of a vocabulary into answers and others; no answers: both are empty."""
    words = {tokenizer.decode([token]): token for token in range(STOP + 1, tokenizer.vocabulary)} if answers else {}
    chosen = answers.split()
    if missing := [word for word in chosen if word not in words]:
        raise ValueError(f"task.answers must be words of the vocabulary, got {' '.join(missing)}")
    return [words[word] for word in chosen], [token for word, token in words.items() if word not in chosen]


def join_labels(parts: Sequence[Labels]) -> Labels:
    """Joins the labels of single sequences into those of a batch."""
    return Labels.tokens([part.texts[0] for part in parts], [part.words[0] for part in parts if part.words])


def recording_from_row(table: Path, fields: dict[str, str]) -> Recording:
    """Converts a row of a table; its path is relative to the table."""
    return Recording(str(table.parent / fields["sound"]), fields["text"].strip())


def check_recording(location: str, each: Recording, settings: SpeechSettings) -> Iterator[Problem]:
    """Yields the problems of a recording: unreadable, no text, very long, or silent."""
    if not each.text:
        yield Problem(location, "text must not be empty")
    try:
        recording = load_recording(each.path, settings.rate)
    except (OSError, ValueError) as error:
        yield Problem(location, str(error))
        return
    seconds = len(recording) / settings.rate if recording.dim() == 1 else len(recording) * settings.hop
    if seconds > 60 or not math.isfinite(seconds):
        yield Problem(location, f"{each.path} is longer than a minute: {seconds:.0f} seconds", "warning")
    if not bool(recording.any()):
        yield Problem(location, f"{each.path} is silent", "warning")


def error_rates(texts: Sequence[str], answers: Sequence[str]) -> tuple[float, float, str]:
    """Computes word and character error rate, and names the counter: jiwer if installed, else our own."""
    try:
        import jiwer
    except ImportError:
        words = edit_rate([text.split() for text in texts], [text.split() for text in answers])
        return words, edit_rate([text.strip() for text in texts], [text.strip() for text in answers]), "edits"
    return float(jiwer.wer(list(texts), list(answers))), float(jiwer.cer(list(texts), list(answers))), "jiwer"


def edit_rate(texts: Sequence[Sequence[str]], answers: Sequence[Sequence[str]]) -> float:
    """Computes the edit distance of all answers divided by the length of all texts.

    >>> edit_rate(["kitten", "sun"], ["sitting", "sun"])
    0.3333333333333333
    """
    edits = sum(edit_distance(text, answer) for text, answer in zip(texts, answers, strict=True))
    return edits / max(sum(map(len, texts)), 1)


def edit_distance(text: Sequence[str], answer: Sequence[str]) -> int:
    """Computes the Levenshtein distance, row by row."""
    row = list(range(len(answer) + 1))
    for count, part in enumerate(text, start=1):
        before, row[0] = row[0], count
        for i, other in enumerate(answer, start=1):
            before, row[i] = row[i], min(row[i] + 1, row[i - 1] + 1, before + (part != other))
    return row[-1]

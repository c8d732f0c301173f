"""Speech recognition: a recording in, what is said out; by CTC, by an attention decoder, or by both.

B recordings, F frames, S states, T tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.decoding import Beam, generate
from foci.inputs.padding import longest_first, padded
from foci.inputs.sample_cache import Shelf
from foci.inputs.tables import good_rows, only, rows
from foci.inputs.text import PAD, START, STOP, Tokenizer, from_json, learned, to_json
from foci.nn.model import Model
from foci.nn.speech import SpeechConfig, SpeechEncoder, read_ctc
from foci.record.labels import Labels
from foci.record.record import Record
from foci.tasks.speech_features import SpeechSettings, frames_of, heard, joined, spread, varied_frames
from foci.tasks.task import Done, Problem, Task, unheard
from foci.tasks.task_record import record_of

COLUMNS = ("sound", "text")
# The CTC head's blank: no text has the padding in it.
BLANK = PAD
# How many recordings the spread of the frames is measured on, and how many frames are answered at a time.
MEASURED, TOGETHER = 500, 20_000
CHANGES = (
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
    """A recording's file, and what is said in it, where that is known."""

    path: str
    text: str = ""


class Speech(Task[Recording, str]):
    """Recordings named by a table of paths and texts; word and character error rates, and whole answers right.

    A path that ends in .npy holds frames that were made elsewhere.
    """

    name = "speech"
    metric = "wer"
    better = "lower"
    settings_type = SpeechSettings
    settings: SpeechSettings

    def __init__(self, settings: SpeechSettings, tokenizer: Tokenizer, std: Sequence[float]) -> None:
        self.settings, self.tokenizer, self.std = settings, tokenizer, torch.tensor(std)
        self._sounds = Shelf(partial(heard, rate=settings.rate))

    @classmethod
    def read(cls, paths: Sequence[Path], settings: SpeechSettings) -> list[Recording]:
        table = only(paths, "a table of paths and texts")
        found = []
        for row in good_rows(table, COLUMNS):
            each = recording(table, row.fields)
            if not each.text:
                raise ValueError(f"{row.place}: expected what is said as text, but it is empty")
            if not Path(each.path).is_file():
                raise ValueError(f"{row.place}: expected a sound file at {each.path}, but there is none")
            found.append(each)
        return found

    @classmethod
    def check(cls, paths: Sequence[Path], settings: SpeechSettings) -> Iterator[Problem]:
        table = only(paths, "a table of paths and texts")
        count = 0
        for row in rows(table, COLUMNS):
            count += 1
            if row.problem is not None:
                yield Problem(row.place, row.problem)
                continue
            if row.warning is not None:
                yield Problem(row.place, row.warning, "warning")
            yield from problems(row.place, recording(table, row.fields), settings)
        if not count:
            yield Problem(str(table), "expected at least one line, but it has none")

    @classmethod
    def start(cls, settings: SpeechSettings, train: Sequence[Recording]) -> Self:
        """Learns the vocabulary, and how far the numbers of a frame spread."""
        tokenizer = learned(settings.tokenizer, [each.text for each in train], settings.vocabulary)
        some = train[:: len(train) // MEASURED + 1]
        measured = spread([frames_of(heard(each.path, settings.rate), settings) for each in some])
        return cls(settings, tokenizer, measured.tolist())

    def files(self) -> dict[str, str]:
        return {"tokenizer.json": to_json(self.tokenizer), "frames.json": json.dumps({"std": self.std.tolist()})}

    @classmethod
    def from_files(cls, settings: SpeechSettings, files: dict[str, str]) -> Self:
        return cls(settings, from_json(files["tokenizer.json"]), json.loads(files["frames.json"])["std"])

    def model(self) -> Model:
        own = self.settings
        changes = {name: getattr(own, name) for name in CHANGES if getattr(own, name) is not None}
        if own.ctc == 1.0:
            changes["decoder_layers"] = 0
        return SpeechEncoder.from_name(
            own.size, features=len(self.std), vocabulary=self.tokenizer.vocabulary, ctc=own.ctc > 0.0, **changes
        )

    @property
    def longest(self) -> int:
        """As many frames as become the states that a model has positions for: minutes."""
        config = cast("SpeechConfig", SpeechEncoder.sizes[self.settings.size])
        halvings = config.halvings if self.settings.halvings is None else self.settings.halvings
        return config.max_length << halvings

    def is_cut(self, example: Recording) -> bool:
        """Of a longer recording the beginning is heard."""
        return self.size(example) > self.longest

    def size(self, example: Recording) -> int:
        """How many frames it has."""
        given = self._sounds(example.path)
        return len(given) if given.dim() == 2 else 1 + len(given) // round(self.settings.hop * self.settings.rate)

    def batch(self, examples: Sequence[Recording], training: bool, generator: torch.Generator) -> dict[str, Tensor]:
        heard_so = [self.frames(each, generator if training else None) for each in examples]
        texts = [self.tokenizer.encode(each.text) for each in examples]
        if training and self.settings.join:
            heard_so, texts = joined(heard_so, texts, self.settings.join, generator)
        frames, lengths = padded([each[: self.longest] for each in heard_so])
        targets, counts = padded([[*row, STOP] for row in texts], PAD)
        return {
            "frames": frames,
            "lengths": lengths,
            "inputs": padded([[START, *row] for row in texts], PAD)[0],
            "targets": targets,
            "counts": counts - 1,
        }

    def frames(self, example: Recording, generator: torch.Generator | None = None) -> Tensor:
        """What the model hears: (F, M); with a generator varied by chance."""
        given = self._sounds(example.path)
        made = frames_of(given, self.settings) if generator is None else varied_frames(given, self.settings, generator)
        if made.shape[1] != len(self.std):
            wanted = f"{len(self.std)} numbers per frame, as the first recordings have"
            raise ValueError(f"{example.path}: expected {wanted}, but got {made.shape[1]}")
        return made[: self.longest] / self.std

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        share = self.settings.ctc
        writes = cast("SpeechEncoder", model).decoder is not None
        out = model(batch["frames"], batch["inputs"] if writes else None, padding=batch["lengths"])
        targets = batch["targets"]
        loss = torch.zeros((), device=targets.device)
        if out.ctc is not None:
            scores = out.ctc.float().log_softmax(-1).transpose(0, 1)
            args = scores, targets, out.lengths, batch["counts"], BLANK
            # A text that does not fit into its states has no loss, instead of an infinite one.
            loss = loss + (share if writes else 1.0) * F.ctc_loss(*args, reduction="sum", zero_infinity=True)
        if writes:
            smoothing = self.settings.smoothing if model.training else 0.0
            logits = out.logits.float().flatten(0, 1)
            wanted = targets.flatten()
            told = F.cross_entropy(logits, wanted, ignore_index=PAD, reduction="sum", label_smoothing=smoothing)
            loss = loss + (1.0 - share) * told
        return loss, (targets != PAD).sum()

    def decode(self, model: nn.Module, examples: Sequence[Recording], done: Done = unheard) -> list[str]:
        answers = [""] * len(examples)
        for group in longest_first([self.size(each) for each in examples], TOGETHER):
            tokens = self.written(cast("SpeechEncoder", model), [self.frames(examples[place]) for place in group])
            for place, row in zip(group, tokens, strict=True):
                answers[place] = self.tokenizer.decode(row)
            done(len(group))
        return answers

    def written(self, model: SpeechEncoder, frames: list[Tensor]) -> list[list[int]]:
        """The tokens of each recording: the likeliest of what CTC and the decoder propose, by both."""
        device = next(model.parameters()).device
        batch, lengths = padded(frames, multiple=1)
        out = model(batch.to(device), padding=lengths.to(device))
        by_ctc = None if out.ctc is None else read_ctc(out.ctc.float(), out.lengths, BLANK)
        if model.decoder is None:
            assert by_ctc is not None
            return by_ctc
        width = min(self.settings.beam, self.tokenizer.vocabulary)
        limit = min(self.settings.max_tokens, model.config.max_length)
        method = Beam(width, best=width)
        # A list of frames, so that each is read by its own length.
        found = generate(
            model, [each.to(device) for each in frames], new_tokens=limit, method=method, start=START, stop=STOP
        )
        all_proposed = [[each.tokens for each in (answer, *answer.others)] for answer in found]
        if by_ctc is None or out.ctc is None:
            return [self.long_enough(proposed)[0] for proposed in all_proposed]
        likely = out.ctc.float().log_softmax(-1)
        chosen = []
        for i, by_decoder in enumerate(all_proposed):
            proposed = self.long_enough([*by_decoder, by_ctc[i][:limit]])
            scores = self.judged(model, frames[i].to(device), likely[i, : int(out.lengths[i])], proposed)
            chosen.append(proposed[int(scores.argmax())])
        return chosen

    def long_enough(self, proposed: list[list[int]]) -> list[list[int]]:
        """Those of `min_tokens`, where there are any: CTC that hears nothing is too sure of it to be outvoted."""
        return [each for each in proposed if len(each) >= self.settings.min_tokens] or proposed

    def judged(self, model: SpeechEncoder, frames: Tensor, likely: Tensor, proposed: list[list[int]]) -> Tensor:
        """How likely each answer is by CTC and by the decoder together, in nats."""
        device = frames.device
        inputs, _ = padded([[START, *row] for row in proposed], PAD)
        targets, counts = padded([[*row, STOP] for row in proposed], PAD)
        inputs, targets, counts = inputs.to(device), targets.to(device), counts.to(device)
        memory = model.encode(frames[None]).at(torch.zeros(len(proposed), dtype=torch.long, device=device))
        logits = model.decode(inputs, memory).logits
        assert logits is not None
        told = F.cross_entropy(logits.float().mT, targets, ignore_index=PAD, reduction="none").sum(1)
        several = likely[:, None].expand(-1, len(proposed), -1)
        states = torch.full((len(proposed),), len(likely), device=device)
        heard_so = F.ctc_loss(several, targets, states, counts - 1, BLANK, reduction="none")
        return -(self.settings.ctc * heard_so + (1.0 - self.settings.ctc) * told)

    def score(self, answers: Sequence[str], examples: Sequence[Recording]) -> dict[str, float | str]:
        """Word and character error rates, and how many answers are wholly right; in percent."""
        texts, said = [each.text for each in examples], list(answers)
        right = sum(answer == text for answer, text in zip(said, texts, strict=True))
        words, characters, signature = error_rates(texts, said)
        return {
            "wer": 100.0 * words,
            "cer": 100.0 * characters,
            "accuracy": 100.0 * right / max(len(texts), 1),
            "signature": signature,
        }

    def given(self, text: str) -> Recording:
        return Recording(text)

    def show(self, model: nn.Module, example: Recording) -> Record:
        """The states of the recording with their seconds, what was written, and where each word was heard."""
        listener = cast("SpeechEncoder", model)
        device = next(model.parameters()).device
        frames = self.frames(example).to(device)
        with torch.no_grad():
            tokens = self.written(listener, [frames.cpu()])[0]
            target = torch.tensor([[START, *tokens]], device=device) if listener.decoder is not None else None
            out = listener(frames[None], target, return_weights=True)
        seconds = self.settings.hop * 2**listener.config.halvings
        times = tuple(f"{state * seconds:.2f}" for state in range(out.states.shape[1]))
        labels = {
            "source": Labels("frames", (times,), seconds=seconds),
            "target": self.tokenizer.labels([START, *tokens]),
            "heard": self.tokenizer.labels([*tokens, STOP]),
        }
        # What looks at the sound is named by the word that was being written.
        return record_of(model, out.weights, labels, self.tokenizer.decode(tokens), across="heard")


def recording(table: Path, fields: dict[str, str]) -> Recording:
    """A row of a table; its path is meant from where the table is."""
    return Recording(str(table.parent / fields["sound"]), fields["text"].strip())


def problems(place: str, each: Recording, settings: SpeechSettings) -> Iterator[Problem]:
    """A recording that cannot be heard, or says nothing; and one that is strangely long or silent."""
    if not each.text:
        yield Problem(place, "expected what is said as text, but it is empty")
    try:
        sound = heard(each.path, settings.rate)
    except (OSError, ValueError) as error:
        yield Problem(place, str(error))
        return
    seconds = len(sound) / settings.rate if sound.dim() == 1 else len(sound) * settings.hop
    if seconds > 60 or not math.isfinite(seconds):
        yield Problem(
            place, f"expected at most a minute of sound, but {each.path} has {seconds:.0f} seconds", "warning"
        )
    if not bool(sound.any()):
        yield Problem(place, f"expected a sound in {each.path}, but there is silence", "warning")


def error_rates(texts: Sequence[str], said: Sequence[str]) -> tuple[float, float, str]:
    """The shares of words and of characters that are wrong, and who counted: jiwer where it is installed."""
    try:
        import jiwer
    except ImportError:
        words = share_of_edits([text.split() for text in texts], [text.split() for text in said])
        return words, share_of_edits([text.strip() for text in texts], [text.strip() for text in said]), "edits"
    return float(jiwer.wer(list(texts), list(said))), float(jiwer.cer(list(texts), list(said))), "jiwer"


def share_of_edits(texts: Sequence[Sequence[str]], said: Sequence[Sequence[str]]) -> float:
    """How many parts must be put in, left out or exchanged in all, for each part of the texts.

    >>> share_of_edits(["kitten", "sun"], ["sitting", "sun"])
    0.3333333333333333
    """
    wrong = sum(edits(text, answer) for text, answer in zip(texts, said, strict=True))
    return wrong / max(sum(map(len, texts)), 1)


def edits(text: Sequence[str], answer: Sequence[str]) -> int:
    """The fewest changes that turn one into the other (Levenshtein), row by row of the table."""
    row = list(range(len(answer) + 1))
    for count, part in enumerate(text, start=1):
        before, row[0] = row[0], count
        for place, other in enumerate(answer, start=1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (part != other))
    return row[-1]

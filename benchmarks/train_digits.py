"""Train the digit model on a CPU: first on the words of an4, then on the digits of fsdd and an4 together.

    python benchmarks/datasets.py fsdd --data DATA --out plain/fsdd
    python benchmarks/an4_words.py --data DATA --out plain/an4_words
    python benchmarks/train_digits.py base --data plain --out trained/base
    python benchmarks/train_digits.py digits --data plain --start trained/base --out trained/digits
    python benchmarks/train_digits.py digits --data plain --start trained/base --without george --out trained/george

The first stage learns digits, letters and other words; at the end of the second only the ten digits stay in the
vocabulary. With --without, no recording of that speaker is used in any stage, and the script prints how many of all 500
are answered right. The settings are those of benchmarks/training/speech-digits.toml; OUT gets the model, its config and
its log, as benchmarks/ship.py reads them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from foci.inputs.padding import group_by_size
from foci.inputs.text import Tokenizer, train_tokenizer
from foci.nn.speech import SpeechEncoder
from foci.tasks.model_file import load_trained_model, save_trained_model
from foci.tasks.speech import Recording, Speech
from foci.training.config import RunConfig, apply_change, config_from_table, read_toml

CONFIG = Path(__file__).parent / "training" / "speech-digits.toml"
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SPEAKERS = ("george", "jackson", "lucas", "nicolas", "theo", "yweweler")
# Words that are rarer are not learned.
FEWEST = 10
# The first stage; the second one is in the config.
BASE = {"epochs": 10, "rate": 1.5e-3}


class Training:
    """Model, optimizer and moving average of a stage."""

    def __init__(self, task: Speech, model: SpeechEncoder, config: RunConfig, stage: str) -> None:
        self.task, self.model, self.config, self.stage = task, model, config.train, stage
        self.rng, self.generator = random.Random(config.seed), torch.Generator().manual_seed(config.seed)
        self.parameters = list(model.parameters())
        self.average = [each.detach().clone() for each in self.parameters]
        matrices = [each for each in self.parameters if each.dim() > 1]
        others = [each for each in self.parameters if each.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": self.config.decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(self.config.momentum, self.config.variance), fused=True)
        self.steps, self.loss, self.targets, self.lines = 0, 0.0, 0, list[str]()

    def run(self, digits: Sequence[Recording], others: Sequence[Recording], sampled: int) -> None:
        """All epochs: every digit, and so many of the other words."""
        began = time.process_time()
        for epoch in range(round(self.config.epochs)):
            examples = [*digits, *self.rng.sample(others, min(sampled, len(others)))]
            batches = list(self.make_batches(examples))
            for number, batch in enumerate(batches):
                self.step(batch, (epoch + number / len(batches)) / self.config.epochs)
            seconds = round(time.process_time() - began, 1)
            self.log({"epoch": epoch + 1, "loss": self.loss / self.targets, "cpu_seconds": seconds})
            self.loss, self.targets = 0.0, 0
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.average)
        self.model.eval()

    def make_batches(self, examples: Sequence[Recording]) -> Iterator[list[Recording]]:
        sizes = [self.task.size(each) * 100 + self.rng.randrange(800) for each in examples]
        groups = group_by_size(sizes, self.config.batch_tokens * 100)
        self.rng.shuffle(groups)
        for group in groups:
            yield [examples[index] for index in group]

    def step(self, examples: list[Recording], done: float) -> None:
        self.model.train()
        loss, count = self.task.loss(self.model, self.task.batch(examples, True, self.generator))
        (loss / count).backward()
        nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        floor = self.config.floor
        rate = self.config.rate * (floor + (1.0 - floor) * (1.0 + math.cos(math.pi * done)) / 2.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * min((self.steps + 1) / self.config.warmup, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        with torch.no_grad():
            kept = min(self.config.ema, self.steps / (self.steps + 10))
            torch._foreach_lerp_(self.average, self.parameters, 1.0 - kept)
        self.loss, self.targets = self.loss + loss.item(), self.targets + int(count)

    def log(self, values: dict[str, object]) -> None:
        line = {"stage": self.stage, "step": self.steps} | values
        self.lines.append(json.dumps(line))
        print(line, flush=True)


def main() -> None:
    """Train a stage and write its model."""
    options = parse_arguments()
    torch.manual_seed(options.seed)
    table = read_toml(CONFIG)
    table["train"] |= BASE if options.stage == "base" else {}
    for change in (f"seed={options.seed}", *options.changes):
        apply_change(table, change)
    config = config_from_table(None, table, str(CONFIG))
    words = read_words(options.data / "an4_words" / "train.tsv", config)
    rare = {word for word, count in Counter(each.text for each in words).items() if count < FEWEST}
    words = [each for each in words if each.text not in rare]
    if options.stage == "base":
        task = Speech.from_examples(config.settings, words)
        model = task.model()
        training = Training(task, model, config, options.stage)
        training.run(words, [], 0)
        previous = ""
    else:
        task, model, _ = load_trained_model(options.start)
        task = Speech(config.settings, task.tokenizer, task.std.tolist())
        fsdd = read_words(options.data / "fsdd" / "train.tsv", config)
        kept = [each for each in fsdd if speaker_of(each) != options.without]
        spoken = [each for each in words if each.text in DIGITS]
        training = Training(task, model, config, options.stage)
        training.run([*kept, *spoken], [each for each in words if each.text not in DIGITS], options.others)
        previous = (options.start / "metrics.jsonl").read_text()
        task, model = keep_digits(task, model)
    about = {"name": "speech-digits", "seed": options.seed, "torch": torch.__version__, "device": "cpu, one core"}
    about |= {
        "epochs": config.train.epochs,
        "rate": config.train.rate,
        "others": options.others,
        "without": options.without,
    }
    if options.stage == "digits":
        for name, examples in read_tests(options, config).items():
            right, wrong = measure(task, model, examples)
            training.log({"part": name, "right": right, "of": len(examples)})
            print(wrong.most_common(8), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    save_trained_model(options.out / "model.safetensors", task, model, about)
    (options.out / "config.toml").write_text(config.to_toml())
    (options.out / "metrics.jsonl").write_text(previous + "".join(f"{line}\n" for line in training.lines))


def read_tests(options: argparse.Namespace, config: RunConfig) -> dict[str, list[Recording]]:
    """The dev and test sets of fsdd or all recordings of the speaker who was left out, and the digits of an4's test."""
    parts = {name: read_words(options.data / "fsdd" / f"{name}.tsv", config) for name in ("train", "dev", "test")}
    if options.without:
        whole = [each for part in parts.values() for each in part]
        parts = {options.without: [each for each in whole if speaker_of(each) == options.without]}
    parts.pop("train", None)
    words = read_words(options.data / "an4_words" / "test.tsv", config)
    return parts | {"an4 test": [each for each in words if each.text in DIGITS]}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["base", "digits"])
    parser.add_argument("--data", type=Path, required=True, help="the folder with fsdd and an4_words")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="the output folder of the first stage")
    parser.add_argument("--without", choices=SPEAKERS, default="", help="a speaker of fsdd to leave out")
    parser.add_argument("--others", type=int, default=0, help="so many of the other words in each epoch of digits")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE")
    return parser.parse_args()


def read_words(path: Path, config: RunConfig) -> list[Recording]:
    found: list[Recording] = Speech.read([path], config.settings)
    return [Recording(each.path, "o" if each.text == "oh" else each.text) for each in found]


def speaker_of(recording: Recording) -> str:
    return Path(recording.path).stem.split("_")[1]


def keep_digits(task: Speech, model: SpeechEncoder) -> tuple[Speech, SpeechEncoder]:
    """The same model with the ten digits as its only words."""
    smaller = Speech(task.settings, train_tokenizer("words", DIGITS, 100), task.std.tolist())
    size, other = smaller.tokenizer.vocabulary, task.tokenizer.vocabulary
    rows = torch.tensor([match_token(smaller.tokenizer, task.tokenizer, token) for token in range(size)])
    built, state = smaller.model(), model.state_dict()
    for name, value in built.state_dict().items():
        if value.shape != state[name].shape:
            assert (len(value), len(state[name])) == (size, other)
            state[name] = state[name][rows]
    built.load_state_dict(state)
    return smaller, built.eval()


def match_token(smaller: Tokenizer, larger: Tokenizer, token: int) -> int:
    """The token of the larger tokenizer with the same text; special tokens have the same number in both."""
    word = smaller.decode([token])
    return larger.encode(word)[0] if word in DIGITS else token


@torch.no_grad()
def measure(task: Speech, model: SpeechEncoder, examples: Sequence[Recording]) -> tuple[int, Counter[tuple[str, str]]]:
    """How many answers are right, and the pairs of word and answer that are not."""
    answers = [(each.text, answer) for each, answer in zip(examples, task.decode(model, examples), strict=True)]
    return sum(text == answer for text, answer in answers), Counter(pair for pair in answers if pair[0] != pair[1])


if __name__ == "__main__":
    main()

"""Train the digit model, and six more of it that each leave out a speaker of fsdd, side by side.

    python benchmarks/datasets.py fsdd --data DATA --out plain/fsdd
    python benchmarks/an4_words.py --data DATA --out plain/an4_words
    python benchmarks/train_digits.py pack --data plain --words words.xz
    python benchmarks/train_digits.py all --words words.xz --out trained
    python benchmarks/train_digits.py one --words words.xz --out trained/george --without george

The training has the digits of fsdd, digits, letters and words of an4, words that are made from phones, other made
sounds and words in pieces. Every batch is changed at random on the device. The answers are the ten digits; a
recording that is more likely to be another word is declined. With --without, no recording of that speaker is used, and
all 500 are answered. The settings are those of benchmarks/training/speech-digits.toml.

OUT gets results.json and a folder for each model, as benchmarks/ship.py reads it.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from frame_augmentation import MAX_FRAMES, Changes, augment_batch, break_words
from made_sounds import Sounds
from made_words import OTHER, choose_words, make_words

from foci.inputs.text import START, STOP, train_tokenizer
from foci.masks.kinds import Causal, Padding
from foci.nn import attention as attention_module
from foci.nn.speech import SpeechEncoder
from foci.tasks.model_file import save_trained_model
from foci.tasks.speech import Speech
from foci.tasks.speech_features import (
    SpeechSettings,
    compute_features,
    compute_log_mel,
    load_recording,
    measure_feature_std,
)
from foci.training.config import RunConfig, apply_change, config_from_table, read_toml

CONFIG = Path(__file__).parent / "training" / "speech-digits.toml"
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SPEAKERS = ("george", "jackson", "lucas", "nicolas", "theo", "yweweler")
# Words that are rarer share a token.
FEWEST = 10
# Log energies are packed as bytes: from the floor in steps of a tenth.
STEP, OFFSET = 0.1, -14.0
SOUNDS_PER_KIND, MADE_WORDS, MADE_DIGITS = 150, 16_000, 0.6
BATCH = 96
# So many batches are drawn at a time.
SORTED_BATCHES = 4
# The share of each group of words in a batch; the rest is digits in pieces.
SHARES = {"fsdd": 0.4, "an4 digits": 0.12, "an4 words": 0.14, "made digits": 0.16, "made words": 0.11, "sounds": 0.04}
BROKEN = 0.03
LOG_EVERY = 100


class Word(NamedTuple):
    """A spoken word as log-mel bands (F, M), where it is from, and its part of the data: train, dev or test."""

    frames: Tensor
    text: str
    source: str
    part: str


def read_words(folder: Path, source: str, settings: SpeechSettings) -> list[Word]:
    words = []
    for part in ("train", "dev", "test"):
        for each in Speech.read([folder / f"{part}.tsv"], settings):
            recording = load_recording(each.path, settings.rate)
            frames = compute_log_mel(recording, settings) if recording.dim() == 1 else recording
            speaker = Path(each.path).stem.split("_")[1] if source == "fsdd" else source
            words.append(Word(frames, "o" if each.text == "oh" else each.text, speaker, part))
    return words


def make_sounds(settings: SpeechSettings) -> list[Word]:
    made = Sounds([], seed=5)
    sounds = made.make(made.learned().values(), SOUNDS_PER_KIND)
    return [Word(compute_log_mel(each, settings), OTHER, "sounds", "train") for each in sounds]


def pack(data: Path, path: Path, settings: SpeechSettings) -> None:
    """Write all words into one compressed file, energies as bytes."""
    words = read_words(data / "fsdd", "fsdd", settings) + read_words(data / "an4_words", "an4", settings)
    words += make_sounds(settings)
    frames = torch.cat([each.frames for each in words])
    content = {
        "frames": ((frames - OFFSET) / STEP).round().clamp(0, 255).to(torch.uint8),
        "lengths": torch.tensor([len(each.frames) for each in words]),
    }
    rows = json.dumps([each[1:] for each in words])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(safetensors.torch.save(content, {"rows": rows})))
    print(f"{len(words)} words, {path.stat().st_size / 2**20:.1f} MiB: {path}")


def unpack(path: Path) -> list[Word]:
    packed = lzma.decompress(path.read_bytes())
    content = safetensors.torch.load(packed)
    header = json.loads(packed[8 : 8 + int.from_bytes(packed[:8], "little")])
    frames = content["frames"].float() * STEP + OFFSET
    parts = frames.split(content["lengths"].tolist())
    rows = json.loads(header["__metadata__"]["rows"])
    return [Word(each, *row) for each, row in zip(parts, rows, strict=True)]


def group_words(words: Sequence[Word], settings: SpeechSettings, seed: int) -> dict[str, list[Word]]:
    """The words of the training by group, with those that are made here."""
    train = [each for each in words if each.part == "train"]
    chosen = choose_words(MADE_WORDS, MADE_DIGITS, random.Random(seed))
    made = make_words([phones for _, phones in chosen], settings.bands, settings.lowest, settings.rate / 2, seed)
    spoken = [Word(frames, word, "made", "train") for frames, (word, _) in zip(made, chosen, strict=True)]
    return {
        "fsdd": [each for each in train if each.source in SPEAKERS],
        "an4 digits": [each for each in train if each.source == "an4" and each.text in DIGITS],
        "an4 words": [each for each in train if each.source == "an4" and each.text not in DIGITS],
        "made digits": [each for each in spoken if each.text in DIGITS],
        "made words": [each for each in spoken if each.text not in DIGITS],
        "sounds": [each for each in train if each.source == "sounds"],
    }


class Pool:
    """All words of the training on a device, from which batches are drawn."""

    def __init__(self, groups: dict[str, list[Word]], task: Speech, device: torch.device) -> None:
        words = [each for group in groups.values() for each in group]
        self.frames = torch.zeros(len(words), MAX_FRAMES, task.settings.bands, dtype=torch.float16)
        for row, each in zip(self.frames, words, strict=True):
            row[: len(each.frames)] = each.frames[:MAX_FRAMES]
        self.frames = self.frames.to(device)
        self.lengths = torch.tensor([min(len(each.frames), MAX_FRAMES) for each in words], device=device)
        known = {task.tokenizer.decode([token]): token for token in range(STOP + 1, task.tokenizer.vocabulary)}
        self.other = known[OTHER]
        self.tokens = torch.tensor([known.get(each.text, self.other) for each in words], device=device)
        self.starts = dict(zip(groups, torch.tensor([0, *map(len, groups.values())]).cumsum(0).tolist(), strict=False))
        self.sizes = {name: len(group) for name, group in groups.items()}
        self.settings, self.std, self.device = task.settings, task.std.to(device), device

    def stream(self, size: int, changes: Changes) -> Iterator[dict[str, Tensor]]:
        """Batches without end, each of words of similar length: several are drawn at once and sorted."""
        while True:
            drawn = self.draw(size * SORTED_BATCHES, changes)
            groups = drawn["lengths"].argsort().split(size)
            for number in torch.randperm(SORTED_BATCHES).tolist():
                batch = {name: each[groups[number]] for name, each in drawn.items()}
                batch["frames"] = batch["frames"][:, : 8 * math.ceil(int(batch["lengths"].max()) / 8)]
                yield batch

    def draw(self, size: int, changes: Changes) -> dict[str, Tensor]:
        """Random words in random variants, as `Speech.loss` reads them."""
        counts = {name: round(share * size) for name, share in SHARES.items()}
        broken = round(BROKEN * size)
        drawn = [self.draw_group(name, count) for name, count in counts.items()]
        index = torch.cat([self.draw_group("fsdd", broken), *drawn])
        frames, lengths, tokens = self.frames[index].float(), self.lengths[index], self.tokens[index]
        pieces, shorter = break_words(frames[:broken], lengths[:broken])
        frames, lengths = torch.cat([pieces, frames[broken:]]), torch.cat([shorter, lengths[broken:]])
        tokens = torch.cat([torch.full_like(tokens[:broken], self.other), tokens[broken:]])
        features, lengths = augment_batch(frames, lengths, changes, self.settings)
        return {
            "frames": features / self.std,
            "lengths": lengths,
            "inputs": torch.stack([torch.full_like(tokens, START), tokens], 1),
            "targets": torch.stack([tokens, torch.full_like(tokens, STOP)], 1),
            "counts": torch.ones_like(tokens),
        }

    def draw_group(self, name: str, count: int) -> Tensor:
        return self.starts[name] + torch.randint(self.sizes[name], (count,), device=self.device)


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Any, dropout: float, **others: Any) -> Tensor:
    """`foci.attention` for the masks of this model, by PyTorch's kernel with a dense mask."""
    assert mask is None or isinstance(mask, Causal | Padding)
    visible = None
    if isinstance(mask, Padding):
        visible = torch.arange(k.shape[2], device=k.device) < mask.lengths.to(k.device)[:, None, None, None]
    is_causal = isinstance(mask, Causal)
    return F.scaled_dot_product_attention(q, k, v, visible, dropout_p=dropout, is_causal=is_causal)


@contextmanager
def use_torch_attention() -> Iterator[None]:
    """Without compilation: the sequences have at most 36 states, so a dense mask costs nothing."""
    own, attention_module.attention = attention_module.attention, attend
    try:
        yield
    finally:
        attention_module.attention = own


class Training:
    """Model, optimizer and moving average of the weights."""

    def __init__(self, task: Speech, pool: Pool, config: RunConfig) -> None:
        self.task, self.pool, self.config, self.changes = task, pool, config.train, Changes()
        self.model = task.model().to(pool.device)
        self.parameters = list(self.model.parameters())
        self.average = [each.detach().clone() for each in self.parameters]
        matrices = [each for each in self.parameters if each.dim() > 1]
        others = [each for each in self.parameters if each.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": self.config.decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(self.config.momentum, self.config.variance), fused=True)
        self.lines = list[str]()

    def run(self, size: int) -> SpeechEncoder:
        """All steps, with a rate that falls to the end; the model gets the averaged weights."""
        began, total = time.process_time(), torch.zeros((), device=self.pool.device)
        assert self.config.steps is not None
        for step, batch in zip(range(self.config.steps), self.pool.stream(size, self.changes), strict=False):
            total += self.step(batch, step, step / self.config.steps)
            if (step + 1) % LOG_EVERY == 0:
                seconds = round(time.process_time() - began, 1)
                self.log({"step": step + 1, "loss": round(float(total) / LOG_EVERY, 4), "cpu_seconds": seconds})
                total.zero_()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.average)
        return self.model.cpu().eval()

    def step(self, batch: dict[str, Tensor], steps: int, done: float) -> Tensor:
        """One step; `done` is the share of the training before it. Returns the loss per token."""
        self.model.train()
        with torch.autocast(self.pool.device.type, torch.bfloat16, self.pool.device.type == "cuda"):
            loss, count = self.task.loss(self.model, batch)
        loss = loss / count
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        floor = self.config.floor
        rate = self.config.rate * (floor + (1.0 - floor) * (1.0 + math.cos(math.pi * done)) / 2.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * min((steps + 1) / (self.config.warmup or 1), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(self.average, self.parameters, 1.0 - min(self.config.ema, steps / (steps + 10)))
        return loss.detach()

    def log(self, values: dict[str, object]) -> None:
        self.lines.append(json.dumps(values))
        print(values, flush=True)


def main() -> None:
    """Pack the words, or train one model or all."""
    options = parse_arguments()
    table = read_toml(CONFIG)
    for change in (f"seed={options.seed}", *options.changes):
        apply_change(table, change)
    config = config_from_table(None, table, str(CONFIG))
    if options.stage == "pack":
        pack(options.data, options.words, config.settings)
    elif options.stage == "one":
        train_one(options, config)
    else:
        train_all(options)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["pack", "one", "all"])
    parser.add_argument("--words", type=Path, required=True, help="the packed words")
    parser.add_argument("--data", type=Path, help="the folder with fsdd and an4_words, to pack")
    parser.add_argument("--out", type=Path, help="the output folder")
    parser.add_argument("--without", choices=SPEAKERS, default="", help="a speaker of fsdd to leave out")
    parser.add_argument("--batch", type=int, default=BATCH, help="words in a batch")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="models that are trained at a time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE")
    return parser.parse_args()


def train_all(options: argparse.Namespace) -> None:
    """Train every model in a process of its own, and print how the left-out speakers are understood."""
    names = ("final", *SPEAKERS)
    with ThreadPoolExecutor(options.jobs) as executor:
        found = dict(zip(names, executor.map(partial(run_one, options.out), names), strict=True))
    shares = {name: 100.0 * found[name][name]["right"] / found[name][name]["of"] for name in SPEAKERS}
    summary = {"mean": sum(shares.values()) / len(shares), "worst": min(shares.values())} | shares
    print(json.dumps(summary, indent=1), flush=True)
    (options.out / "results.json").write_text(json.dumps({"left out": summary, "models": found}, indent=1))


def run_one(out: Path, name: str) -> dict[str, dict[str, Any]]:
    """Train a model in another process; returns its results."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "one", *sys.argv[2:], "--out", str(folder)]
    command += ["--without", name] if name in SPEAKERS else []
    with (folder / "log.txt").open("w") as log:
        subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True
        )
    results: dict[str, dict[str, Any]] = json.loads((folder / "results.json").read_text())
    return results


def train_one(options: argparse.Namespace, config: RunConfig) -> None:
    """Train a model, answer the recordings that it has not heard, and write both."""
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    # It would build a plan for each length of a batch.
    torch.backends.cuda.enable_cudnn_sdp(False)
    options.out.mkdir(parents=True, exist_ok=True)
    words = unpack(options.words)
    kept = [each for each in words if each.source != options.without]
    groups = group_words(kept, config.settings, options.seed)
    counts = Counter(each.text for group in groups.values() for each in group)
    vocabulary = [OTHER, *(word for word, count in counts.items() if count >= FEWEST and word != OTHER)]
    features = [compute_features(each.frames, config.settings) for each in groups["fsdd"][::5]]
    std = measure_feature_std(features).tolist()
    task = Speech(config.settings, train_tokenizer("words", vocabulary, len(vocabulary) + 10), std)
    training = Training(task, Pool(groups, task, torch.device(options.device)), config)
    with use_torch_attention():
        model = training.run(options.batch)
    about = {"seed": options.seed, "torch": torch.__version__, "device": device_name(options)}
    about |= {"steps": config.train.steps, "batch": options.batch, "without": options.without}
    save_trained_model(options.out / "model.safetensors", task, model, about)
    (options.out / "config.toml").write_text(config.to_toml())
    results = {name: measure(task, model, part) for name, part in list_tests(words, options.without).items()}
    for name, result in results.items():
        training.log({"part": name} | result)
    (options.out / "metrics.jsonl").write_text("".join(f"{line}\n" for line in training.lines))
    (options.out / "results.json").write_text(json.dumps(results))


def device_name(options: argparse.Namespace) -> str:
    return torch.cuda.get_device_name() if options.device == "cuda" else "cpu, one core"


def list_tests(words: Sequence[Word], without: str) -> dict[str, list[Word]]:
    """All recordings of the speaker who was left out, or dev and test of fsdd; and the words of an4's test."""
    spoken = [each for each in words if each.source in SPEAKERS]
    an4 = [each for each in words if each.source == "an4" and each.part == "test"]
    tests = {part: [each for each in spoken if each.part == part] for part in ("dev", "test")}
    if without:
        tests = {without: [each for each in words if each.source == without]}
    return tests | {
        "an4 digits": [each for each in an4 if each.text in DIGITS],
        "an4 letters": [each for each in an4 if len(each.text) == 1],
        "an4 words": [each for each in an4 if len(each.text) > 1 and each.text not in DIGITS],
    }


@torch.no_grad()
def measure(task: Speech, model: SpeechEncoder, words: Sequence[Word]) -> dict[str, object]:
    """How many answers are right, how many words are declined, and the most frequent wrong answers."""
    wrong: Counter[str] = Counter()
    declined = 0
    for word in words:
        features = (compute_features(word.frames, task.settings) / task.std)[: task.max_size]
        (tokens,) = task.transcribe(model, [features])
        found = task.judge(model, features, tokens)
        declined += found.declined
        wrong[f"{word.text}: {found.label}"] += word.text != found.label
    counts = {"right": len(words) - wrong.total(), "declined": declined, "of": len(words)}
    return counts | {"wrong": dict((+wrong).most_common(12))}


if __name__ == "__main__":
    main()

"""Continue the training of a translator on a CPU or a GPU, with pairs that are drawn again for every round.

    python benchmarks/continue_translation.py foci/models/translation --data DATA --out trained/translation

A round is a sample of benchmarks/translation_pairs.py: sentences of Tatoeba with other names, places and numbers, and
the pairs that were written for the model. The weights are trained in bfloat16 beside a copy in float32, which the
optimizer updates. The length of the run is a number of pairs or of minutes; the learning rate falls to zero at its end.
A run that was stopped continues with the same command.

A batch holds sources of one length, so that no attention needs a mask. On a GPU drawing and encoding the pairs takes
longer than training on them: --workers processes do it ahead.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slots import Slots
from translation_pairs import FOLDER, PairSource, read_written_pairs, words

from foci.backends.sdpa import cuda as cuda_kernels
from foci.inputs.text import PAD
from foci.nn.transformer import EncoderDecoder
from foci.tasks.model_file import load_trained_model, save_trained_model
from foci.tasks.parallel_text import Pair, read_pairs
from foci.tasks.translation import Translation

WARMUP_SHARE = 0.04
AVERAGE = 0.998
LOG_EVERY = {"cpu": 20, "cuda": 200}
SAVE_SECONDS = {"cpu": 300, "cuda": 90}
MASK_POOL = 2**24
# Pairs of a length wait until they fill so many batches, which are then sorted by the length of the target.
POOLED_BATCHES = 2
# Sources longer than this are rare: their batches hold a half, and an eighth, of the tokens.
LONG, LONGEST = 24, 32
# Batches that may wait in the queue, for each worker.
QUEUED = 16
QUEUE_SECONDS = 60

Batch = dict[str, Tensor]
BEGAN = time.monotonic()


def main() -> None:
    """Train until the planned number of pairs or minutes is reached."""
    options = parse_arguments()
    task, model, about = load_trained_model(options.start)
    if not isinstance(task, Translation):
        raise ValueError(f"start must be a translator, got a model for {task.name}")
    if options.encoder_layers:
        model = grow_encoder(model, options.encoder_layers)
    if options.copy_names:
        task = learn_names(task, options.data)
    task.settings = replace(task.settings, agreement=options.agreement)
    progress = multiprocessing.get_context("fork").Value("d", 0.0, lock=False)
    source = PairSource(options.data, options.reverse, options.synthetic)
    dev = [source.reverse_if_asked(pair) for pair in read_pairs([options.data / "tatoeba_en_de" / "dev.tsv.xz"])]
    stream = partial(stream_batches, task, source, options.batch_tokens, lambda: progress.value)
    # The workers start before the GPU is used: it cannot be used after a fork.
    log = options.out / "metrics.jsonl"
    lines = len(log.read_text().splitlines()) if log.exists() else 0
    names = [f"{options.seed} {lines} {number}" for number in range(max(options.workers, 1))]
    batches = start_workers(stream, names) if options.workers else stream(names[0])
    training = Training(task, model, options)
    training.resume()
    signal.signal(signal.SIGTERM, training.stop)
    while training.progress < 1:
        training.step(next(batches))
        progress.value = training.progress
        if training.is_time_to_save():
            training.log({"dev_loss": training.evaluate(dev)})
            training.save()
    if training.steps and not training.is_stopped:
        training.log({"dev_loss": training.evaluate(dev)})
    described = ("seed", "rate", "dropout", "agreement", "encoder_layers", "reverse")
    run = {name: getattr(options, name) for name in described} | {
        "pairs": training.pairs_seen,
        "torch": torch.__version__,
    }
    continued = [*about.get("continued", []), run] if training.steps else about.get("continued", [])
    training.finish(about | {"continued": continued})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start", type=Path, help="the model to continue from")
    parser.add_argument("--data", type=Path, required=True, help="the folder of the datasets")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=500_000, help="the pairs to train on; 0: only save again")
    parser.add_argument("--minutes", type=float, help="the length of the run, loading included, instead of --pairs")
    parser.add_argument("--rate", type=float, default=4e-4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--agreement", type=float, default=0.0, help="the weight of R-Drop; 0: one pass")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--encoder-layers", type=int, help="insert layers into the encoder until it has this many")
    parser.add_argument("--reverse", action="store_true", help="train German to English")
    parser.add_argument("--synthetic", type=Path, help="a table of pairs to add, as soon as it exists")
    parser.add_argument("--copy-names", action="store_true", help="let the model copy names, with task.copy_names")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens of the sources of a batch")
    parser.add_argument("--workers", type=int, default=0, help="processes that draw and encode pairs; 0: this one does")
    parser.add_argument("--storage", choices=["float32", "int8"], default="float32", help="dtype of the saved weights")
    return parser.parse_args()


def learn_names(task: Translation, data: Path) -> Translation:
    """Return a task that copies unseen names, and knows the German names of places."""
    pairs = [*read_pairs([data / "tatoeba_en_de" / "train.tsv.xz"]), *read_written_pairs()]
    ordinary = {word for pair in pairs for word in words(pair.source) if f" {word}" in pair.source}
    places = Slots(FOLDER).list_renamed_places()
    return task.learn_respelled_words(pairs, {name: places[name] for name in places if name.lower() not in ordinary})


def grow_encoder(model: EncoderDecoder, layers: int) -> EncoderDecoder:
    """Return a model with more encoder layers that computes the same.

    Every new layer is a copy of the one before it, whose attention and feed-forward network add nothing yet.
    """
    old = model.config.encoder.layers
    if not old <= layers <= 2 * old:
        raise ValueError(f"encoder-layers must be between {old} and {2 * old}, got {layers}")
    # The layer of the old model that each new one is made from: 0 1 1 2 3 3 from four.
    origins = sorted([*range(old), *range(old - 1, -1, -2), *range(old - 2, -1, -2)][:layers])
    larger = EncoderDecoder(model.config.replace(encoder=model.config.encoder.replace(layers=layers)))
    larger.decoder.load_state_dict(model.decoder.state_dict())
    state = {name: value for name, value in model.encoder.state_dict().items() if not name.startswith("blocks.")}
    for number, (block, origin) in enumerate(zip(larger.encoder.blocks, origins, strict=True)):
        block.load_state_dict(model.encoder.blocks[origin].state_dict())
        if origin in origins[:number]:
            for last in (block.attention.output, block.feed_forward.outer):
                nn.init.zeros_(last.weight)
                nn.init.zeros_(last.bias)
    larger.encoder.load_state_dict(state, strict=False)
    return larger


def stream_batches(
    task: Translation, source: PairSource, tokens: int, progress: Callable[[], float], name: str
) -> Iterator[Batch]:
    """Batches without end; those of another name are others."""
    rng = random.Random(name)
    for pairs in group_pairs(task, source.stream_pairs(rng, progress), tokens):
        yield build_batch(task, pairs)


def group_pairs(task: Translation, pairs: Iterable[Pair], tokens: int) -> Iterator[list[Pair]]:
    """Group pairs whose sources have the same number of tokens, and targets of similar length."""
    waiting: dict[int, list[tuple[int, Pair]]] = {}
    for pair in pairs:
        length = len(task.tokenizer.encode(pair.source)) + 1
        group = waiting.setdefault(length, [])
        group.append((len(task.tokenizer.encode(pair.target)), pair))
        rows = max(tokens // length // (1 if length <= LONG else 2 if length <= LONGEST else 8), 1)
        if len(group) == rows * POOLED_BATCHES:
            group.sort(key=lambda each: each[0])
            for start in range(0, len(group), rows):
                yield [each for _, each in group[start : start + rows]]
            group.clear()


def build_batch(task: Translation, pairs: Sequence[Pair]) -> Batch:
    """The tensors of pairs whose sources have the same number of tokens, without columns of padding."""
    batch = task.batch(pairs, True, torch.Generator())
    lengths = {"source": int(batch["real"].sum(1).max()), "targets": int((batch["targets"] != PAD).sum(1).max())}
    lengths["inputs"] = lengths["targets"]
    return {name: batch[name][:, :length].contiguous() for name, length in lengths.items()}


def start_workers(stream: Callable[[str], Iterator[Batch]], names: Sequence[str]) -> Iterator[Batch]:
    """Start a process for each name; returns the batches of all of them."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue(QUEUED * len(names))
    for name in names:
        context.Process(target=fill_queue, args=(queue, stream, name), daemon=True).start()
    return read_queue(queue)


def fill_queue(queue: Any, stream: Callable[[str], Iterator[Batch]], name: str) -> None:
    # The threads of a process are not copied by a fork.
    torch.set_num_threads(1)
    for batch in stream(name):
        queue.put({key: tensor.to(torch.int16).numpy() for key, tensor in batch.items()})


def read_queue(queue: Any) -> Iterator[Batch]:
    while True:
        batch = queue.get(timeout=QUEUE_SECONDS)
        yield {key: torch.from_numpy(array) for key, array in batch.items()}


class Training:
    """Model, optimizer, average and position of a run."""

    def __init__(self, task: Translation, model: nn.Module, options: argparse.Namespace) -> None:
        self.task, self.options, self.out = task, options, options.out
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device).train()
        self.exact = [each.detach().clone().float() for each in self.model.parameters()]
        self.average = [each.clone() for each in self.exact]
        for each in self.exact:
            each.grad = torch.zeros_like(each)
        self.model.bfloat16()
        self.parameters = list(self.model.parameters())
        set_dropout(model, options.dropout)
        if self.device.type == "cpu":
            F.dropout = MaskPool(options.dropout)  # type: ignore[assignment]
        else:
            turn_off_cudnn_attention()
        self.optimizer = torch.optim.AdamW(
            self.exact, lr=options.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
        )
        self.steps = self.pairs_seen = 0
        self.seconds, self.began, self.saved, self.is_stopped = 0.0, BEGAN, time.monotonic(), False
        self.loss = torch.zeros((), device=self.device)
        self.targets = torch.zeros((), dtype=torch.long, device=self.device)
        self.out.mkdir(parents=True, exist_ok=True)

    @property
    def elapsed(self) -> float:
        """Seconds that the run took, in all its parts."""
        return self.seconds + time.monotonic() - self.began

    @property
    def progress(self) -> float:
        """The share of the run that is done."""
        if self.is_stopped or not self.options.pairs:
            return 1.0
        minutes = self.options.minutes
        return min(self.elapsed / 60 / minutes if minutes else self.pairs_seen / self.options.pairs, 1.0)

    def learning_rate(self) -> float:
        """Linear warm-up, then a straight line to zero."""
        progress = self.progress
        return float(self.options.rate * min(progress / WARMUP_SHARE, (1 - progress) / (1 - WARMUP_SHARE)))

    def stop(self, *_: object) -> None:
        """End the run after this step: it is saved as it is."""
        self.is_stopped = True

    def is_time_to_save(self) -> bool:
        return time.monotonic() - self.saved > SAVE_SECONDS[self.device.type]

    def move(self, batch: Batch) -> Batch:
        """A batch on the device, which the host does not wait for."""
        if self.device.type == "cuda":
            batch = {name: each.pin_memory().to(self.device, non_blocking=True) for name, each in batch.items()}
        return {name: each.long() for name, each in batch.items()}

    def step(self, batch: Batch) -> None:
        loss, count = self.task.loss(self.model, self.move(batch))
        (loss / count).backward()
        torch._foreach_copy_([each.grad for each in self.exact], [each.grad for each in self.parameters])
        nn.utils.clip_grad_norm_(self.exact, 1.0)
        self.optimizer.param_groups[0]["lr"] = self.learning_rate()
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.exact)
            torch._foreach_lerp_(self.average, self.exact, 1 - min(AVERAGE, self.steps / (self.steps + 10)))
            self.loss += loss.detach()
            self.targets += count
        self.steps, self.pairs_seen = self.steps + 1, self.pairs_seen + len(batch["source"])
        if self.steps % LOG_EVERY[self.device.type] == 0:
            values = {"loss": float(self.loss / self.targets), "rate": self.learning_rate()}
            self.log(values | {"pairs_per_second": self.pairs_seen / self.elapsed})
            self.loss.zero_()
            self.targets.zero_()

    def log(self, values: dict[str, float]) -> None:
        line = {"step": self.steps, "pairs": self.pairs_seen} | {k: round(v, 7) for k, v in values.items()}
        with (self.out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    @torch.no_grad()
    def evaluate(self, dev: Sequence[Pair]) -> float:
        """The loss per token of the averaged weights on dev."""
        self.set_weights(self.average)
        self.model.eval()
        groups: dict[int, list[Pair]] = {}
        for pair in dev:
            groups.setdefault(len(self.task.tokenizer.encode(pair.source)), []).append(pair)
        total = count = 0.0
        for group in groups.values():
            loss, targets = self.task.loss(self.model, self.move(build_batch(self.task, group)))
            total, count = total + loss.item(), count + int(targets)
        self.model.train()
        self.set_weights(self.exact)
        return total / count

    @torch.no_grad()
    def set_weights(self, weights: Sequence[Tensor]) -> None:
        for parameter, weight in zip(self.model.parameters(), weights, strict=True):
            parameter.copy_(weight)

    def save(self) -> None:
        """Write everything that a stopped run needs, in one step."""
        position = {"steps": self.steps, "pairs_seen": self.pairs_seen, "seconds": self.elapsed}
        state = {"exact": self.exact, "average": self.average, "optimizer": self.optimizer.state_dict()} | position
        torch.save(state, self.out / "state.part")
        (self.out / "state.part").replace(self.out / "state.pt")
        self.saved = time.monotonic()

    def resume(self) -> None:
        """Continue a stopped run; the pairs that it has not drawn yet are others."""
        if not (self.out / "state.pt").exists():
            return
        state = torch.load(self.out / "state.pt", weights_only=True, map_location=self.device)
        self.optimizer.load_state_dict(state.pop("optimizer"))
        with torch.no_grad():
            for name in ("exact", "average"):
                torch._foreach_copy_(getattr(self, name), state.pop(name))
        for name, value in state.items():
            setattr(self, name, value)
        self.set_weights(self.exact)

    def finish(self, about: dict[str, object]) -> None:
        """Write the averaged weights as a model, with the config of its start and the log of both trainings."""
        shutil.copy(self.options.start / "config.toml", self.out)
        log = self.out / "metrics.jsonl"
        own = log.read_text() if log.exists() else ""
        log.write_text((self.options.start / "metrics.jsonl").read_text() + own)
        self.model.float()
        self.set_weights(self.average)
        path = self.out / "model.safetensors"
        save_trained_model(path, self.task, self.model, about, storage=self.options.storage)


def turn_off_cudnn_attention() -> None:
    """Use the flash kernel on every GPU: cuDNN plans each shape for a while, and batches have many."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    cuda_kernels.has_cudnn = lambda: False


def set_dropout(model: nn.Module, rate: float) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "dropout", None), float) and module.dropout > 0:
            module.dropout = rate


class MaskPool:
    """Dropout that takes its masks from random places of a large one: drawing new ones takes a fifth of a step."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.pool = torch.bernoulli(torch.full((MASK_POOL,), 1 - rate)).div_(1 - rate).bfloat16()

    def __call__(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return x
        if p != self.rate:
            raise ValueError(f"the rate must be {self.rate}, as in the pool, got {p}")
        offset = int(torch.randint(MASK_POOL - x.numel(), ()))
        return x * self.pool[offset : offset + x.numel()].view(x.shape)


if __name__ == "__main__":
    main()

"""Continue the training of a translator on a CPU, with pairs that are drawn again for every round.

    python benchmarks/continue_translation.py foci/models/translation --data DATA --out trained/translation

A round is a sample of benchmarks/translation_pairs.py: sentences of Tatoeba with other names, places and numbers, and
the pairs that were written for the model. The weights are trained in bfloat16 beside a copy in float32, which the
optimizer updates. A run that was stopped continues with the same command; --pairs changes the length of the run, and
so the learning rate, which falls to zero at its end.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from translation_pairs import PairSource

from foci.inputs.padding import group_by_size
from foci.inputs.text import PAD
from foci.nn.transformer import EncoderDecoder
from foci.tasks.model_file import load_trained_model, save_trained_model
from foci.tasks.parallel_text import Pair, read_pairs
from foci.tasks.translation import Translation

BATCH_TOKENS = 4096
WARMUP_PAIRS = 20_000
AVERAGE = 0.998
LOG_EVERY, SAVE_EVERY = 20, 100
MASK_POOL = 2**24


def main() -> None:
    """Train round after round until the planned number of pairs is reached."""
    options = parse_arguments()
    task, model, about = load_trained_model(options.start)
    if not isinstance(task, Translation):
        raise ValueError(f"start must be a translator, got a model for {task.name}")
    if options.encoder_layers:
        model = grow_encoder(model, options.encoder_layers)
    source = PairSource(options.data, options.reverse)
    dev = [source.reverse_if_asked(pair) for pair in read_pairs([options.data / "tatoeba_en_de" / "dev.tsv.xz"])]
    task.settings = replace(task.settings, agreement=0.0)
    training = Training(task, model, options)
    training.resume()
    while training.pairs_seen < options.pairs:
        rng = random.Random(f"{options.seed} {training.round}")
        for batch in make_batches(task, source.sample_round(rng), rng):
            training.step(batch)
            if training.pairs_seen >= options.pairs:
                break
        training.round += 1
        training.log({"round": training.round, "dev_loss": training.evaluate(dev)})
        training.save()
    settings = {name: getattr(options, name) for name in ("seed", "rate", "dropout", "encoder_layers")}
    run = settings | {"pairs": training.pairs_seen, "torch": torch.__version__}
    training.finish(about | {"continued": [*about.get("continued", []), run]})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start", type=Path, help="the model to continue from")
    parser.add_argument("--data", type=Path, required=True, help="the folder of the datasets")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=500_000, help="the pairs to train on, over all rounds")
    parser.add_argument("--rate", type=float, default=4e-4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--encoder-layers", type=int, help="insert layers into the encoder until it has this many")
    parser.add_argument("--reverse", action="store_true", help="train German to English")
    return parser.parse_args()


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


def make_batches(task: Translation, pairs: Sequence[Pair], rng: random.Random) -> Iterator[list[Pair]]:
    """Group pairs that are similar in the length of both sides, and shuffle the groups."""
    lengths = [[len(task.tokenizer.encode(text)) + 1 for text in (pair.source, pair.target)] for pair in pairs]
    sizes = [1000 * max(both) + 10 * min(both) + rng.randrange(10) for both in lengths]
    groups = group_by_size(sizes, BATCH_TOKENS * 1000)
    rng.shuffle(groups)
    for group in groups:
        yield [pairs[index] for index in group]


def trim_padding(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Cut the columns that are padding in every row: lengths are rounded up, which a CPU does not need."""
    lengths = {"source": int(batch["real"].sum(1).max()), "targets": int((batch["targets"] != PAD).sum(1).max())}
    lengths |= {"real": lengths["source"], "inputs": lengths["targets"]}
    return {name: tensor[:, : lengths[name]].contiguous() for name, tensor in batch.items()}


class Training:
    """Model, optimizer, average and position of a run."""

    def __init__(self, task: Translation, model: nn.Module, options: argparse.Namespace) -> None:
        self.task, self.options, self.out = task, options, options.out
        self.exact = [each.detach().clone().float() for each in model.parameters()]
        self.average = [each.clone() for each in self.exact]
        self.model = model.bfloat16().train()
        set_dropout(model, options.dropout)
        F.dropout = MaskPool(options.dropout)  # type: ignore[assignment]
        self.optimizer = torch.optim.AdamW(
            self.exact, lr=options.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
        )
        self.round = self.steps = self.pairs_seen = 0
        self.seconds = self.loss = 0.0
        self.targets = 0
        self.generator = torch.Generator()
        self.out.mkdir(parents=True, exist_ok=True)

    def learning_rate(self) -> float:
        """Linear warm-up, then a straight line to zero."""
        seen, total = self.pairs_seen, self.options.pairs
        return float(self.options.rate * min(seen / WARMUP_PAIRS, max(total - seen, 0) / (total - WARMUP_PAIRS), 1.0))

    def step(self, pairs: list[Pair]) -> None:
        began = time.monotonic()
        batch = trim_padding(self.task.batch(pairs, True, self.generator))
        loss, count = self.task.loss(self.model, batch)
        (loss / count).backward()
        parameters = list(self.model.parameters())
        for exact, each in zip(self.exact, parameters, strict=True):
            exact.grad = None if each.grad is None else each.grad.float()
        nn.utils.clip_grad_norm_(self.exact, 1.0)
        self.optimizer.param_groups[0]["lr"] = self.learning_rate()
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for exact, each in zip(self.exact, parameters, strict=True):
                each.copy_(exact)
            torch._foreach_lerp_(self.average, self.exact, 1 - min(AVERAGE, self.steps / (self.steps + 10)))
        self.steps, self.pairs_seen = self.steps + 1, self.pairs_seen + len(pairs)
        self.loss, self.targets = self.loss + loss.item(), self.targets + int(count)
        self.seconds += time.monotonic() - began
        if self.steps % LOG_EVERY == 0:
            values = {"loss": self.loss / self.targets, "rate": self.learning_rate()}
            self.log(values | {"pairs_per_second": self.pairs_seen / self.seconds})
            self.loss, self.targets = 0.0, 0
        if self.steps % SAVE_EVERY == 0:
            self.save()

    def log(self, values: dict[str, float]) -> None:
        line = {"step": self.steps, "pairs": self.pairs_seen} | {k: round(v, 7) for k, v in values.items()}
        with (self.out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)

    @torch.no_grad()
    def evaluate(self, dev: Sequence[Pair]) -> float:
        """The loss per token of the averaged weights on dev."""
        self.set_weights(self.average)
        self.model.eval()
        total = count = 0.0
        for group in group_by_size([self.task.size(pair) for pair in dev], BATCH_TOKENS):
            loss, targets = self.task.loss(self.model, self.task.batch([dev[i] for i in group], False, self.generator))
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
        position = {name: getattr(self, name) for name in ("round", "steps", "pairs_seen", "seconds")}
        state = {"exact": self.exact, "average": self.average, "optimizer": self.optimizer.state_dict()} | position
        torch.save(state, self.out / "state.part")
        (self.out / "state.part").replace(self.out / "state.pt")

    def resume(self) -> None:
        """Continue a stopped run from the start of the round in which it was stopped."""
        if not (self.out / "state.pt").exists():
            return
        state = torch.load(self.out / "state.pt", weights_only=True)
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
        log.write_text((self.options.start / "metrics.jsonl").read_text() + log.read_text())
        self.model.float()
        self.set_weights(self.average)
        save_trained_model(self.out / "model.safetensors", self.task, self.model, about)


def set_dropout(model: nn.Module, rate: float) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "dropout", None), float) and module.dropout > 0:
            module.dropout = rate


class MaskPool:
    """Dropout that takes its masks from random places of a large one: drawing them anew is a fifth of a step."""

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

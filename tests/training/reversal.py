"""A tiny translation run: sentences of a few words, to be reversed."""

import json
import random
from pathlib import Path
from typing import Any

from foci.training import RunConfig, read_config

WORDS = ("ab", "cd", "ef", "gh", "ij", "kl")
SMALL = (
    *("task.size=tiny", "task.width=32", "task.heads=2", "task.layers=1", "task.hidden=64", "task.tokenizer=words"),
    *("task.dropout=0.1", "task.beam=1", "train.device=cpu", "train.batch_tokens=256", "train.warmup=3"),
    *("train.log_every=1", "train.evaluate_every=10", "train.checkpoint_every=5", "train.select=loss"),
)


def written(path: Path, count: int = 200, longest: int = 4, seed: int = 1) -> Path:
    """Writes a TSV of pairs."""
    chance = random.Random(seed)
    rows = [[chance.choice(WORDS) for _ in range(chance.randint(1, longest))] for _ in range(count)]
    path.write_text("".join(f"{' '.join(row)}\t{' '.join(reversed(row))}\n" for row in rows))
    return path


def config(data: Path, *changes: str) -> RunConfig:
    return read_config("translation", None, [*SMALL, *changes], data=[str(data)])


def logged(folder: Path, name: str) -> dict[int, Any]:
    """Reads a metric by step from metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}

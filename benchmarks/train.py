"""Trains one of the models of benchmarks/training inside a time limit, and writes what is scored elsewhere.

    python benchmarks/train.py translation-multi30k --data DATA --seed 1 --out trained/multi30k-1 --minutes 4

DATA is the folder that holds one folder per dataset, as it was published; what needs another format is first made by
benchmarks/datasets.py in DATA/plain. Nothing but torch, tokenizers and safetensors is needed where this runs; the
answers are scored by benchmarks/score.py, where the metric packages are.

The folder then has the weights in bfloat16 in files below 15 MiB, config.toml, run.json, metrics.jsonl, summary.json,
and the answers to the dev and the test part, one JSON a line, for every variant of the settings that the config names.
Scoring needs all of it but the weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from foci.tasks import model_file
from foci.training import RunConfig, train
from foci.training.config import apply_change, config_from_table, read_toml

CONFIGS = Path(__file__).parent / "training"
LARGEST = 14 * 2**20
PLAIN = {"plain": []}


def main() -> None:
    """Trains, answers, writes."""
    options = parsed()
    table = read_toml(CONFIGS / f"{options.name}.toml")
    benchmark = table.pop("benchmark", {})
    for change in options.changes:
        apply_change(table, change)
    table["seed"] = options.seed
    table["train"] = table.get("train", {}) | ({"minutes": options.minutes} if options.minutes else {})
    config = config_from_table(None, inside(table, options.data), options.name)
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        found = train(config, run)
        taken = time.monotonic() - began
        model = model_file.load_trained_model(run)
        about = model.about | {"name": options.name, "training_seconds": round(taken, 1), "device": device_name()}
        model_file.save_trained_model(
            options.out / "model.safetensors", model.task, model.model, about, storage="bfloat16", largest=LARGEST
        )
        for name in ("metrics.jsonl", "run.json"):
            shutil.copy(run / name, options.out)
        # As it was used, with the paths from the folder of the datasets on.
        (options.out / "config.toml").write_text(config_from_table(None, table, options.name).to_toml())
        parts = {"dev": config.dev, "test": tests(benchmark, config)}
        answer(run, config, options, benchmark.get("variants", PLAIN), parts)
    summary = about | {"final": found, "seconds": round(time.monotonic() - began, 1), "seed": options.seed}
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1))
    print(json.dumps(summary))


def parsed() -> argparse.Namespace:
    names = sorted(path.stem for path in CONFIGS.glob("*.toml"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=names)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the datasets")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=0.0, help="of training; answering comes on top")
    parser.add_argument("--limit", type=int, default=0, help="answer only so many examples: to see that it runs")
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE")
    return parser.parse_args()


def inside(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same config with its paths in the folder of the datasets."""
    return table | {key: [str(folder / each) for each in table.get(key, [])] for key in ("data", "dev")}


def tests(benchmark: dict[str, Any], config: RunConfig) -> tuple[str, ...]:
    """Where the test part is: as the config says, else where train is, under its own name; none where that is not."""
    root = Path(config.data[0]).parent
    if "test" in benchmark:
        return tuple(str(beside(root, each)) for each in benchmark["test"])
    data = [Path(each) for each in config.data]
    likely = [each.with_name(each.name.replace("train", "test")) for each in data]
    return tuple(map(str, likely)) if likely != data and all(each.exists() for each in likely) else ()


def beside(root: Path, name: str) -> Path:
    place = root / name
    if not place.exists():
        raise ValueError(f"expected the test part at {place}, but there is nothing")
    return place


def answer(
    run: Path, config: RunConfig, options: argparse.Namespace, variants: dict[str, Any], parts: dict[str, Any]
) -> None:
    """Writes the answers to each part, once for every variant of the settings."""
    from foci.cli.model_choice import load_with_changes

    for variant, changes in variants.items():
        task, model = load_with_changes(run, changes)
        for part, paths in parts.items():
            if not paths:
                continue
            examples = task.read([Path(each) for each in paths], config.settings)[: options.limit or None]
            with torch.no_grad():
                answers = task.decode(model, examples)
            lines = [json.dumps(written(each), ensure_ascii=False) for each in answers]
            (options.out / f"answers-{part}-{variant}.jsonl").write_text("".join(f"{line}\n" for line in lines))
            print(f"{len(lines)} answers to {part}, {variant}", file=sys.stderr, flush=True)


def written(answer: Any) -> Any:
    """An answer as JSON: a text or numbers as they are, others by their fields."""
    if is_dataclass(answer) and not isinstance(answer, type):
        return {"kind": type(answer).__name__, "fields": asdict(answer)}
    return answer


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()

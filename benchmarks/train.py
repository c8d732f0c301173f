"""Train one of the models of benchmarks/training within a time limit, and write its answers for scoring.

    python benchmarks/train.py translation-multi30k --data DATA --seed 1 --out trained/multi30k-1 --minutes 4

DATA holds one folder per dataset, as it was published; benchmarks/datasets.py converts some of them to DATA/plain.
This script needs only torch, tokenizers and safetensors; benchmarks/score.py scores the answers and needs the metric
packages.

The output folder has the weights in bfloat16 in files below 15 MiB, config.toml, run.json, metrics.jsonl, summary.json,
and the answers to the dev and test sets, one JSON value per line, for every variant of the settings in the config.
Scoring needs all of it except the weights.
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
MAX_FILE_BYTES = 14 * 2**20
NO_VARIANTS = {"plain": []}


def main() -> None:
    """Train, answer the dev and test sets, and write the results."""
    options = parse_arguments()
    table = read_toml(CONFIGS / f"{options.name}.toml")
    benchmark = table.pop("benchmark", {})
    for change in options.changes:
        apply_change(table, change)
    table["seed"] = options.seed
    table["train"] = table.get("train", {}) | ({"minutes": options.minutes} if options.minutes else {})
    config = config_from_table(None, with_data_folder(table, options.data), options.name)
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        found = train(config, run)
        taken = time.monotonic() - began
        model = model_file.load_trained_model(run)
        about = model.about | {"name": options.name, "training_seconds": round(taken, 1), "device": device_name()}
        model_file.save_trained_model(
            options.out / "model.safetensors",
            model.task,
            model.model,
            about,
            storage="bfloat16",
            max_bytes=MAX_FILE_BYTES,
        )
        for name in ("metrics.jsonl", "run.json"):
            shutil.copy(run / name, options.out)
        # The config of the run, with paths relative to the folder of the datasets.
        (options.out / "config.toml").write_text(config_from_table(None, table, options.name).to_toml())
        parts = {"dev": config.dev, "test": test_paths(benchmark, config)}
        write_answers(run, config, options, benchmark.get("variants", NO_VARIANTS), parts)
    summary = about | {"final": found, "seconds": round(time.monotonic() - began, 1), "seed": options.seed}
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1))
    print(json.dumps(summary))


def parse_arguments() -> argparse.Namespace:
    names = sorted(path.stem for path in CONFIGS.glob("*.toml"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=names)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the datasets")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=0.0, help="time limit of the training, without answering")
    parser.add_argument("--limit", type=int, default=0, help="answer only this many examples, to check that it runs")
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE")
    return parser.parse_args()


def with_data_folder(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config with its paths inside the folder of the datasets."""
    return table | {key: [str(folder / each) for each in table.get(key, [])] for key in ("data", "dev")}


def test_paths(benchmark: dict[str, Any], config: RunConfig) -> tuple[str, ...]:
    """The test set: as in the config, else next to the train set with test in its name; empty if there is none."""
    root = Path(config.data[0]).parent
    if "test" in benchmark:
        return tuple(str(check_exists(root, each)) for each in benchmark["test"])
    data = [Path(each) for each in config.data]
    likely = [each.with_name(each.name.replace("train", "test")) for each in data]
    return tuple(map(str, likely)) if likely != data and all(each.exists() for each in likely) else ()


def check_exists(root: Path, name: str) -> Path:
    place = root / name
    if not place.exists():
        raise ValueError(f"the test set must exist, got {place}, which does not")
    return place


def write_answers(
    run: Path, config: RunConfig, options: argparse.Namespace, variants: dict[str, Any], parts: dict[str, Any]
) -> None:
    """Write the answers to each part, once per variant of the settings."""
    from foci.cli.model_choice import load_with_changes

    for variant, changes in variants.items():
        task, model = load_with_changes(run, changes)
        for part, paths in parts.items():
            if not paths:
                continue
            examples = task.read([Path(each) for each in paths], config.settings)[: options.limit or None]
            with torch.no_grad():
                answers = task.decode(model, examples)
            lines = [json.dumps(encode_answer(each), ensure_ascii=False) for each in answers]
            (options.out / f"answers-{part}-{variant}.jsonl").write_text("".join(f"{line}\n" for line in lines))
            print(f"{len(lines)} answers to {part}, {variant}", file=sys.stderr, flush=True)


def encode_answer(answer: Any) -> Any:
    """An answer as JSON: texts and numbers directly, dataclasses by their fields."""
    if is_dataclass(answer) and not isinstance(answer, type):
        return {"kind": type(answer).__name__, "fields": asdict(answer)}
    return answer


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()

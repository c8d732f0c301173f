"""Score the answers that benchmarks/train.py wrote: choose the variant on dev, read the test set once.

    python benchmarks/score.py trained/multi30k-1 trained/multi30k-2 trained/multi30k-3 --data DATA

Several folders are seeds of one config: the last line is their median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.train import CONFIGS, test_paths, with_data_folder
from foci.tasks import find_task
from foci.tasks.task import Task
from foci.training.config import config_from_table, read_toml


def main() -> None:
    """Print one line per folder, and the median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the datasets")
    options = parser.parse_args()
    metric, scores = "", []
    for folder in options.folders:
        metric, variant, dev, test = score_folder(folder, options.data)
        scores.append(float((test or dev)[metric]))
        print(json.dumps({"folder": folder.name, "variant": variant, "dev": dev, "test": test}))
    part = "test" if test else "dev"
    print(f"median {metric} on {part} of {len(scores)}: {statistics.median(scores):.4f}")


def score_folder(folder: Path, data: Path) -> tuple[str, str, dict[str, Any], dict[str, Any]]:
    """The metric, the best variant on dev, and its scores on dev and on test."""
    summary, run = (json.loads((folder / name).read_text()) for name in ("summary.json", "run.json"))
    benchmark = read_toml(CONFIGS / f"{summary['name']}.toml").get("benchmark", {})
    # The config of the run, which may have used other data.
    config = config_from_table(None, with_data_folder(read_toml(folder / "config.toml"), data), summary["name"])
    task = find_task(config.task).from_learned_state(config.settings, run["files"])
    sign = 1.0 if task.better == "higher" else -1.0
    on_dev = {
        path.stem.removeprefix("answers-dev-"): score(task, path, config.dev)
        for path in sorted(folder.glob("answers-dev-*.jsonl"))
    }
    if not on_dev:
        # The whole dev set was scored during training.
        return task.metric, "plain", summary["final"], {}
    best = max(on_dev, key=lambda variant: sign * float(on_dev[variant][task.metric]))
    paths = test_paths(benchmark, config)
    test = score(task, folder / f"answers-test-{best}.jsonl", paths) if paths else {}
    return task.metric, best, on_dev[best], test


def score(task: Task[Any, Any], path: Path, parts: tuple[str, ...]) -> dict[str, Any]:
    answers = [decode_answer(task, json.loads(line)) for line in path.read_text().splitlines()]
    examples = task.read([Path(each) for each in parts], task.settings)[: len(answers)]
    return task.score(answers, examples) | {"examples": len(answers)}


def decode_answer(task: Task[Any, Any], content: Any) -> Any:
    """The answer that `benchmarks.train.encode_answer` encoded."""
    if isinstance(content, dict) and "kind" in content:
        return getattr(sys.modules[find_task(task.name).__module__], content["kind"])(**content["fields"])
    return content


if __name__ == "__main__":
    main()

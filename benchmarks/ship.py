"""Add a model that benchmarks/train.py trained to the pretrained models, with its config, log, data and licence.

    python benchmarks/ship.py trained/tatoeba-1 --as translation --storage int8 \
        --source "tatoeba.org, by way of manythings.org/anki" --licence "CC BY 2.0" --score "39.1 BLEU"

Score the stored model, not the trained one: foci evaluate foci/models/translation --data DATA/tatoeba_en_de/test.tsv.xz
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from foci.cli.model_choice import apply_changes
from foci.models import MODELS_DIRECTORY
from foci.tasks.model_file import load_trained_model, save_trained_model

MAX_FILE_BYTES = 14 * 2**20


def main() -> None:
    """Write the weights, the log, the config and about.json; the model card stays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder that benchmarks/train.py wrote")
    parser.add_argument("--as", dest="name", required=True, help="the name of the task")
    parser.add_argument("--storage", choices=["bfloat16", "int8"], default="int8")
    parser.add_argument("--source", required=True, help="the source of the training data")
    parser.add_argument("--licence", required=True, help="the licence of the data")
    parser.add_argument("--score", default="", help="its score, and on which dataset")
    parser.add_argument(
        "--set", action="append", default=[], dest="changes", metavar="KEY=VALUE", help="task.ground=dark"
    )
    options = parser.parse_args()
    task, model, about = load_trained_model(options.folder)
    task = apply_changes(task, options.changes)
    if task.name != options.name:
        raise ValueError(f"folder must hold a model for {options.name}, got {options.folder} with one for {task.name}")
    about |= {"source": options.source, "licence": options.licence, "score": options.score}
    target = MODELS_DIRECTORY / options.name
    target.mkdir(parents=True, exist_ok=True)
    for path in target.glob("*.safetensors"):
        path.unlink()
    files = save_trained_model(
        target / "model.safetensors", task, model, about, storage=options.storage, max_bytes=MAX_FILE_BYTES
    )
    for name in ("config.toml", "metrics.jsonl"):
        shutil.copy(options.folder / name, target)
    (target / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    print(f"{sum(path.stat().st_size for path in files) / 2**20:.1f} MiB in {len(files)} files: {target}")


if __name__ == "__main__":
    main()

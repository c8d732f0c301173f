"""`foci evaluate`: score the answers of a trained model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foci.cli.output import check_file_path, print_lines

if TYPE_CHECKING:
    from foci.tasks.task import Task

EXAMPLES = """\
examples (`foci samples samples` writes the files in samples/):
  foci evaluate runs/translation --data samples/test.tsv
  foci evaluate runs/translation --data samples/test.tsv --answers answers.txt --json
  foci evaluate runs/translation
  foci evaluate translation --data test.en test.de --set task.beam=8
"""


def add(commands: Any) -> None:
    """Add the command and its options."""
    parser = commands.add_parser("evaluate", help="score a trained model on held-out data", epilog=EXAMPLES)
    parser.add_argument("model", type=Path, help="a run directory, a model file, or the name of a pretrained model")
    parser.add_argument(
        "--data", nargs="+", default=[], metavar="PATH", help="the data to score on (default: the run's own dev set)"
    )
    parser.add_argument(
        "--set", action="append", default=[], dest="changes", metavar="KEY=VALUE", help="change a setting; repeatable"
    )
    parser.add_argument("--answers", type=Path, help="write the answers to this file, one per line")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Answer all examples and print the score."""
    import torch

    from foci.cli.model_choice import load_with_changes, print_truncated, resolve_model_path
    from foci.training.progress import decoding_progress

    options.model = resolve_model_path(options.model)
    if options.answers is not None:
        check_file_path(options.answers, "--answers")
    task, model = load_with_changes(options.model, options.changes, options.device)
    examples = examples_to_evaluate(task, options)
    if not task.scores_whole_inputs:
        print_truncated("evaluate", sum(map(task.is_truncated, examples)), len(examples))
    with torch.no_grad(), decoding_progress(len(examples)) as done:
        answers = task.decode(model, examples, done)
    if options.answers is not None:
        options.answers.write_text("".join(f"{answer}\n" for answer in answers), encoding="utf-8")
    scores = task.score(answers, examples)
    if options.json:
        print_lines(json.dumps(scores))
        return 0
    for name, value in scores.items():
        print_lines(f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}")
    return 0


def examples_to_evaluate(task: Task[Any, Any], options: argparse.Namespace) -> Sequence[Any]:
    """The examples of --data, or the dev set of the run."""
    if options.data:
        return task.read([Path(path) for path in options.data], task.settings)
    from foci import models
    from foci.training.run import read_dev_examples

    if options.model.parent == models.MODELS_DIRECTORY:
        raise ValueError(f"--data is required to evaluate {options.model.name}: pretrained models come without data")
    return read_dev_examples(options.model)

"""`foci evaluate`: how good a model's answers are."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foci.cli.output import check_file_path

if TYPE_CHECKING:
    from foci.tasks.task import Task

EXAMPLES = """\
examples:
  foci evaluate runs/translation --data test.tsv
  foci evaluate runs/translation --data test.en test.de --set task.beam=8
  foci evaluate runs/translation --data test.tsv --answers answers.txt --json
  foci evaluate runs/translation
  foci evaluate speech --data test.tsv
"""


def add(commands: Any) -> None:
    """Names the options."""
    parser = commands.add_parser(
        "evaluate", help="measure a trained model on data that it has not seen", epilog=EXAMPLES
    )
    parser.add_argument("model", type=Path, help="a run's folder, a model file, or one that ships")
    parser.add_argument(
        "--data", nargs="+", default=[], metavar="PATH", help="what to measure with (default: the run's own dev part)"
    )
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE", help="one setting")
    parser.add_argument("--answers", type=Path, help="write the answers to this file, a line each")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Answers all examples and prints their score."""
    import torch

    from foci.cli.model_choice import load_with_changes, print_truncated, resolve_model_path
    from foci.training.progress import answering

    options.model = resolve_model_path(options.model)
    if options.answers is not None:
        check_file_path(options.answers, "--answers")
    task, model = load_with_changes(options.model, options.changes, options.device)
    examples = examples_to_evaluate(task, options)
    print_truncated("evaluate", sum(map(task.is_cut, examples)), len(examples))
    with torch.no_grad(), answering(len(examples)) as done:
        answers = task.decode(model, examples, done)
    if options.answers is not None:
        options.answers.write_text("".join(f"{answer}\n" for answer in answers), encoding="utf-8")
    found = task.score(answers, examples)
    if options.json:
        print(json.dumps(found))
        return 0
    for name, value in found.items():
        print(f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}")
    return 0


def examples_to_evaluate(task: Task[Any, Any], options: argparse.Namespace) -> Sequence[Any]:
    """The data that was named, or what a run held out of its own."""
    if options.data:
        return task.read([Path(each) for each in options.data], task.settings)
    from foci.models.pretrained import MODELS_DIRECTORY
    from foci.training.run import held_out

    if options.model.parent == MODELS_DIRECTORY:
        raise ValueError(f"expected data to measure {options.model.name} with (--data): a model that ships has none")
    return held_out(options.model)

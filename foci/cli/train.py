"""`foci train`: from data to a model that answers."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

EXAMPLES = """\
examples:
  foci train translation --data pairs.tsv --size small
  foci train translation --data train.en train.de --dev val.en val.de --set task.model=rnn
  foci train generation --data book.txt --set task.context=128 --set train.rate=0.002
  foci train translation --resume
  foci train translation --settings
  torchrun --nproc-per-node 8 -m foci train translation --data pairs.tsv
"""


def add(commands: Any) -> None:
    """Names the options."""
    parser = commands.add_parser(
        "train",
        help="train a model for a task",
        epilog=EXAMPLES,
    )
    parser.add_argument("task", help="translation, generation, vision, sentiment, speech or summarization")
    parser.add_argument("--data", nargs="+", default=[], metavar="PATH", help="a table, parallel files or a folder")
    parser.add_argument("--dev", nargs="+", default=[], metavar="PATH", help="what to measure with (default: a share)")
    parser.add_argument("--size", help="of the model: tiny, small or base; as --set task.size=...")
    parser.add_argument("--config", type=Path, help="a TOML file with the settings of a run")
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE", help="one setting")
    parser.add_argument("--settings", action="store_true", help="only say what --set takes: every key and its default")
    parser.add_argument("--seed", type=int, help="what all chance is drawn from (default: 1)")
    parser.add_argument("--out", type=Path, help="the run's folder (default: runs/TASK)")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run in that folder; --data, if it has moved"
    )
    parser.add_argument("--quiet", action="store_true", help="say nothing until the end")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Trains, and prints what the model reaches; the status is 130 where somebody stopped it, as after Ctrl-C."""
    if options.settings:
        from foci.cli.settings import describe_settings

        print(describe_settings(options.task))
        return 0
    from foci.training import read_config, train

    folder = options.out or Path("runs") / options.task
    path = resumed_config_path(options, folder) if options.resume else options.config
    changes = [*([f"task.size={options.size}"] if options.size else []), *options.changes]
    config = read_config(options.task, path, changes, data=options.data, dev=options.dev, seed=options.seed)
    found = train(config, folder, resume=options.resume, quiet=options.quiet)
    # Of several processes the first speaks for all.
    for name, value in found.items() if os.environ.get("RANK", "0") == "0" else ():
        print(f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}")
    # What waits for a finished training (foci train ... && foci evaluate ...) does not go on with half a one.
    return 128 + signal.SIGINT if "stopped_at_step" in found else 0


def resumed_config_path(options: argparse.Namespace, folder: Path) -> Path:
    """The config of the run that is resumed, which only [train] may change."""
    from foci.training import read_config

    given = [name for name in ("config", "seed", "size") if getattr(options, name) is not None]
    if given:
        raise ValueError(f"--resume goes on with the run's own config, but got --{given[0]} too")
    path = folder / "config.toml"
    if not path.exists():
        raise ValueError(f"expected a run to resume in {folder}, but there is none")
    before = read_config(options.task, path, [])
    for change in options.changes:
        # The command that was interrupted, as it was: what it says again changes nothing.
        if not change.startswith("train.") and read_config(options.task, path, [change]) != before:
            raise ValueError(f"a resumed run takes changes of [train] only, but got --set {change}")
    return path

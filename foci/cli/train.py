"""`foci train`: train a model for a task, or resume a run."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

from foci.cli.output import TASK_NAMES, print_lines

EXAMPLES = """\
examples (`foci samples samples` writes the files in samples/):
  foci train translation --data samples/pairs.tsv
  foci train translation --resume
  foci train translation --settings
  foci train translation --data train.en train.de --dev val.en val.de --size small --set task.model=rnn
  foci train generation --data book.txt --set task.context=128 --set train.rate=0.002
  torchrun --nproc-per-node 8 -m foci train translation --data pairs.tsv
"""


def add(commands: Any) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "train",
        help="train a model for a task",
        epilog=EXAMPLES,
    )
    parser.add_argument("task", help=TASK_NAMES)
    parser.add_argument("--data", nargs="+", default=[], metavar="PATH", help="a table, parallel files or a directory")
    parser.add_argument("--dev", nargs="+", default=[], metavar="PATH", help="the dev set (default: a share of --data)")
    parser.add_argument("--size", help="model size: tiny, small or base; the same as --set task.size=...")
    parser.add_argument("--config", type=Path, help="a TOML file with the settings of a run")
    parser.add_argument(
        "--set", action="append", default=[], dest="changes", metavar="KEY=VALUE", help="change a setting; repeatable"
    )
    parser.add_argument("--settings", action="store_true", help="list every key of --set with its default, and exit")
    parser.add_argument("--seed", type=int, help="random seed (default: 1)")
    parser.add_argument("--out", type=Path, help="the run directory (default: runs/TASK)")
    parser.add_argument(
        "--resume", action="store_true", help="resume the run in that directory; add --data if the data has moved"
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing until the end")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train and print the scores; the exit status is 130 if the training was stopped, as after Ctrl-C."""
    if options.settings:
        from foci.cli.settings_help import describe_settings

        print_lines(describe_settings(options.task))
        return 0
    from foci.training import read_config, train

    folder = options.out or Path("runs") / options.task
    path = resumed_config_path(options, folder) if options.resume else options.config
    changes = [*([f"task.size={options.size}"] if options.size else []), *options.changes]
    config = read_config(options.task, path, changes, data=options.data, dev=options.dev, seed=options.seed)
    scores = train(config, folder, resume=options.resume, quiet=options.quiet)
    # Only the first of several processes prints.
    for name, value in scores.items() if os.environ.get("RANK", "0") == "0" else ():
        print_lines(f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}")
    # A status other than 0 stops `foci train ... && foci evaluate ...` after an unfinished training.
    return 128 + signal.SIGINT if "stopped_at_step" in scores else 0


def resumed_config_path(options: argparse.Namespace, folder: Path) -> Path:
    """The config file of the run to resume; only its [train] settings may change."""
    from foci.training import read_config

    conflicting = [name for name in ("config", "seed", "size") if getattr(options, name) is not None]
    if conflicting:
        raise ValueError(f"--resume uses the config of the run and cannot be combined with --{conflicting[0]}")
    path = folder / "config.toml"
    if not path.is_file():
        raise ValueError(f"--resume needs a run directory, got {folder}: there is no config.toml")
    before = read_config(options.task, path, [])
    for change in options.changes:
        # The settings of the interrupted command may be repeated: they change nothing.
        if not change.startswith("train.") and read_config(options.task, path, [change]) != before:
            raise ValueError(f"--set must change [train] settings when resuming, got {change}")
    return path

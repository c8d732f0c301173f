"""`foci data check`: find problems in a dataset before training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from foci.cli.output import TASK_NAMES, print_lines

EXAMPLES = """\
examples:
  foci data check translation --data pairs.tsv
  foci data check translation --data train.en train.de --all
  foci data check vision --data pictures/
"""
# The totals at the end count all problems.
MAX_PRINTED_PROBLEMS = 100


def add(commands: Any) -> None:
    """Add the command and its options."""
    parser = commands.add_parser("data", help="check a dataset", epilog=EXAMPLES)
    inner = parser.add_subparsers(dest="what", metavar="check", required=True)
    check = inner.add_parser("check", help="print the problems of a dataset, line by line", epilog=EXAMPLES)
    check.add_argument("task", help=TASK_NAMES)
    check.add_argument(
        "--data", nargs="+", required=True, metavar="PATH", help="a table, parallel files or a directory"
    )
    check.add_argument(
        "--set", action="append", default=[], dest="changes", metavar="KEY=VALUE", help="change a setting; repeatable"
    )
    check.add_argument(
        "--all", action="store_true", help=f"print every problem, not only the first {MAX_PRINTED_PROBLEMS}"
    )
    check.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the problems; the exit status is 2 if there are errors."""
    from foci.runtime.console import format_count
    from foci.runtime.printable import make_printable
    from foci.tasks import find_task
    from foci.training import read_config

    settings = read_config(options.task, None, options.changes).settings
    counts = {"error": 0, "warning": 0}
    for problem in find_task(options.task).check([Path(path) for path in options.data], settings):
        counts[problem.severity] += 1
        if options.all or sum(counts.values()) <= MAX_PRINTED_PROBLEMS:
            print_lines(make_printable(str(problem)))
    more = sum(counts.values()) - MAX_PRINTED_PROBLEMS
    if more > 0 and not options.all:
        print_lines(f"and {more} more (--all prints them)")
    print_lines(", ".join(format_count(number, severity) for severity, number in counts.items()))
    return 2 if counts["error"] else 0

"""`foci data check`: find problems in a dataset before training."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foci.cli.output import TASK_NAMES, print_lines
from foci.runtime.console import format_count
from foci.runtime.printable import make_printable

if TYPE_CHECKING:
    from foci.tasks.task import Problem

EXAMPLES = """\
examples (`foci samples samples` writes the files in samples/):
  foci data check translation --data samples/pairs.tsv
  foci data check translation --data train.en train.de --all
  foci data check vision --data pictures/
"""
# Problems are alike if their messages differ only in numbers and in what was found. The first ones of each kind are
# printed, the others counted.
MAX_ALIKE_PROBLEMS = 3
MAX_PROBLEM_KINDS = 30
FOUND = re.compile(r"(, got |: ).*|\d+")


def add(commands: Any) -> None:
    """Add the command and its options."""
    parser = commands.add_parser("data", help="check a dataset", epilog=EXAMPLES)
    inner = parser.add_subparsers(dest="what", metavar="check", required=True)
    check = inner.add_parser("check", help="print the problems of a dataset, line by line", epilog=EXAMPLES)
    check.add_argument("task", help=TASK_NAMES)
    check.add_argument("--data", nargs="+", default=[], metavar="PATH", help="a table, parallel files or a directory")
    check.add_argument(
        "--set", action="append", default=[], dest="changes", metavar="KEY=VALUE", help="change a setting; repeatable"
    )
    check.add_argument(
        "--all", action="store_true", help=f"print every problem, not only the first {MAX_ALIKE_PROBLEMS} of each kind"
    )
    check.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the problems; the exit status is 2 if there are errors."""
    from foci.tasks import find_task
    from foci.training import read_config

    if not options.data:
        raise ValueError("--data must name the data to check, got none")
    settings = read_config(options.task, None, options.changes).settings
    problems = find_task(options.task).check([Path(path) for path in options.data], settings)
    counts = print_problems(problems, options.all)
    print_lines(", ".join(format_count(number, severity) for severity, number in counts.items()))
    return 2 if counts["error"] else 0


def print_problems(problems: Iterable[Problem], print_all: bool) -> Counter[str]:
    """Print the first problems of each kind and the number of the others; return the number of each severity."""
    counts, alike = Counter(error=0, warning=0), Counter[tuple[str, str]]()
    first: dict[tuple[str, str], str] = {}
    for problem in problems:
        kind = problem.severity, FOUND.sub("", problem.message)
        counts[problem.severity] += 1
        alike[kind] += 1
        first.setdefault(kind, make_printable(problem.message))
        if print_all or (alike[kind] <= MAX_ALIKE_PROBLEMS and len(alike) <= MAX_PROBLEM_KINDS):
            print_lines(make_printable(str(problem)))
    for each, message in [*first.items()][: 0 if print_all else MAX_PROBLEM_KINDS]:
        if alike[each] > MAX_ALIKE_PROBLEMS:
            more = format_count(alike[each] - MAX_ALIKE_PROBLEMS, f"more {each[0]}")
            print_lines(f"and {more} like this: {message} (--all prints them)")
    if len(first) > MAX_PROBLEM_KINDS and not print_all:
        print_lines(f"and {len(first) - MAX_PROBLEM_KINDS} more kinds of problems (--all prints them)")
    return counts

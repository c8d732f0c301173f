"""`foci bench`: run a benchmark of the source checkout."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

EXAMPLES = """\
examples:
  foci bench attention --help
  foci bench attention --quick
"""
# Benchmarks are not part of the wheel; in a checkout they are next to the package.
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def add(commands: Any) -> None:
    """Add the command and its options."""
    parser = commands.add_parser("bench", help="run a benchmark of the source checkout", epilog=EXAMPLES)
    parser.add_argument("name", nargs="?", default="attention", help="a script in benchmarks/ (default: attention)")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="options of the script, such as --help")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the script and return its exit status."""
    names = list_benchmarks()
    if not names:
        raise ValueError(f"no benchmarks in {BENCHMARKS}: they come with a source checkout, not with the wheel")
    if options.name not in names:
        raise ValueError(f"the benchmark must be one of {', '.join(names)}, got {options.name!r}")
    return subprocess.run([sys.executable, str(BENCHMARKS / f"{options.name}.py"), *options.rest]).returncode


def list_benchmarks() -> list[str]:
    """The scripts with a main part; the other files are modules that they share."""
    return sorted(path.stem for path in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in path.read_text())

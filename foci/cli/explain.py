"""`foci explain`: show attention on a sentence, step by step, with every number computed."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from foci.cli.output import print_page

EXAMPLES = """\
examples:
  foci explain "Jane is hungry, and she's really craving pasta from Italy."
  foci explain "Jane is hungry." --word hungry
"""


def add(commands: Any) -> None:
    """Add the command and its options."""
    parser = commands.add_parser("explain", help="attention step by step on your own sentence", epilog=EXAMPLES)
    parser.add_argument("text", nargs="+", help="the sentence")
    parser.add_argument("--word", help="the word to follow (default: the one with the lowest entropy)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the page."""
    from foci.cli.explain_page import explain
    from foci.runtime.console import TextPage, supports_color, terminal_columns

    print_page(explain(" ".join(options.text), options.word, TextPage(terminal_columns(), supports_color(sys.stdout))))
    return 0

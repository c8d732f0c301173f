"""The command line: one line for each command, which is in a file of its own or below."""

import argparse
import io
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from foci import __version__
from foci.cli import data, evaluate, explore, look, run, train
from foci.cli.output import BAD_INPUT, describe_error

EXAMPLES = """\
examples:
  foci explain "Jane is hungry, and she's really craving pasta from Italy."
  foci explain "Jane is hungry." --word hungry
  foci look "Jane is hungry." --model ./minilm
  foci explore
  foci train translation --data pairs.tsv --size small
  foci run translation "A man sleeps." --show
  foci doctor
  foci bench attention --help
"""
OF_EXPLAIN = """\
examples:
  foci explain "Jane is hungry, and she's really craving pasta from Italy."
  foci explain "Jane is hungry." --word hungry
"""
OF_DOCTOR = """\
examples:
  foci doctor
"""
OF_BENCH = """\
examples:
  foci bench attention --help
  foci bench attention --quick
"""

FAILED = 1


class CommandParser(argparse.ArgumentParser):
    """Says what is wrong in one line, not after a page of usage; examples stay as they are written."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Ends the program with the message."""
        self.exit(BAD_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; gives the exit status: 0, 2 where the input was bad, 1 where something else went wrong."""
    replace_closed_streams()
    options = parse_arguments(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        # A terminal that cannot show a character shows a question mark instead of a traceback.
        sys.stdout.reconfigure(errors="replace")
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except ValueError as problem:
        print(f"foci {options.command}: {problem}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        # As the shell says of a command that Ctrl-C ended.
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader (head, less) has seen enough; without this Python complains once more while it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ImportError, FloatingPointError) as problem:
        print(f"foci {options.command}: {problem}", file=sys.stderr)
        return FAILED
    except OSError as problem:
        # A disk that is full, a file that may not be read.
        print(f"foci {options.command}: {describe_error(problem)}", file=sys.stderr)
        return BAD_INPUT if isinstance(problem, FileNotFoundError) else FAILED
    return status


def replace_closed_streams() -> None:
    """Where stdout or stderr was closed Python has none, and nobody reads what is said there."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, io.StringIO())


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of a command; its inputs may also stand behind them, where argparse finds none before."""
    top = build_parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        top.print_help(sys.stderr)
        top.exit(BAD_INPUT)
    options, more = top.parse_known_args(arguments)
    if more and (not hasattr(options, "inputs") or any(each.startswith("-") for each in more)):
        top.error(f"unrecognized arguments: {' '.join(more)}")
    if more:
        options.inputs += more
    return options


def build_parser() -> CommandParser:
    """The commands and their options."""
    top = CommandParser(
        prog="foci",
        description="Attention for PyTorch, with the attention matrix in reach.",
        epilog=EXAMPLES,
    )
    top.add_argument("--version", action="version", version=f"foci {__version__}")
    commands = top.add_subparsers(dest="command", metavar="command", required=True)

    explain = commands.add_parser(
        "explain", help="attention worked through, step by step, on a sentence of yours", epilog=OF_EXPLAIN
    )
    explain.add_argument("text", nargs="+", help="the sentence")
    explain.add_argument("--word", help="the word to follow (default: the one whose attention is sharpest)")
    explain.set_defaults(run=run_explain)

    for command in (look, explore, train, evaluate, run, data):
        command.add(commands)

    doctor = commands.add_parser(
        "doctor", help="what is installed here, and which backend serves which call", epilog=OF_DOCTOR
    )
    doctor.set_defaults(run=run_doctor)

    bench = commands.add_parser("bench", help="run a benchmark of the source checkout", epilog=OF_BENCH)
    bench.add_argument("name", nargs="?", default="attention", help="the script in benchmarks/ (default: attention)")
    bench.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its own options, --help among them")
    bench.set_defaults(run=run_bench)
    return top


def run_explain(options: argparse.Namespace) -> int:
    """`foci explain`."""
    from foci.cli.explanation import explain
    from foci.runtime.console import TextPage, supports_color, terminal_columns

    print(explain(" ".join(options.text), options.word, TextPage(terminal_columns(), supports_color(sys.stdout))))
    return 0


def run_doctor(_options: argparse.Namespace) -> int:
    """`foci doctor`."""
    from foci.cli.doctor import build_report
    from foci.runtime.console import TextPage, supports_color, terminal_columns

    print(build_report(TextPage(terminal_columns(), supports_color(sys.stdout))))
    return 0


def run_bench(options: argparse.Namespace) -> int:
    """`foci bench`: the benchmarks are no part of the wheel, so they are looked for beside the package."""
    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    # What has a main part is a benchmark; the rest is what they share.
    names = sorted(path.stem for path in folder.glob("*.py") if '__name__ == "__main__"' in path.read_text())
    if not names:
        raise ValueError(
            f"expected benchmarks in {folder}, found none: they come with a source checkout, not the wheel"
        )
    if options.name not in names:
        raise ValueError(f"expected one of the benchmarks {', '.join(names)}, received {options.name!r}")
    return subprocess.run([sys.executable, str(folder / f"{options.name}.py"), *options.rest]).returncode

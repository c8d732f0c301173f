"""The `foci` command: parse the arguments, run one command, turn errors into one line and an exit status."""

import argparse
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from foci import __version__
from foci.cli import bench, data, doctor, evaluate, explain, explore, look, run, samples, train, warmup
from foci.cli.output import BAD_INPUT, FAILURE, describe_error, print_status
from foci.cli.unknown_options import explain_unknown_option
from foci.runtime.printable import make_printable

EXAMPLES = """\
examples:
  foci explain "Jane is hungry, and she's really craving pasta from Italy."
  foci explain "Jane is hungry." --word hungry
  foci look "Jane is hungry." --out page.html
  foci explore
  foci samples samples
  foci train translation --data samples/pairs.tsv
  foci run translation "A man sleeps." --show
  foci doctor
  foci warmup --mask causal padding --backward
  foci bench attention --help
"""


class CommandParser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line and prints the examples as they are written."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse the arguments; the parser of a command refuses unknown ones itself, because it knows its options."""
        words = sys.argv[1:] if args is None else [*args]
        options, more = super().parse_known_args(words, namespace)
        unknown = [word for word in more if word.startswith("-")]
        if unknown:
            hint = explain_unknown_option(
                words, unknown[0], self._option_string_actions, getattr(options, "task", None)
            )
            self.error(f"unrecognized arguments: {unknown[0]}{hint}")
        if more and not hasattr(options, "inputs"):
            self.error(f"unrecognized arguments: {' '.join(more)}")
        return options, more

    def error(self, message: str) -> NoReturn:
        """Exit with the message."""
        self.exit(BAD_INPUT, make_printable(f"{self.prog}: {message} (see {self.prog} --help)") + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 2 for bad input, 1 for any other failure."""
    replace_closed_streams()
    options = parse_arguments(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        # Characters that the terminal cannot show are printed as question marks instead of raising.
        sys.stdout.reconfigure(errors="replace")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = partial(print_warning, options.command, warnings.showwarning)
            status: int = options.run(options)
        sys.stdout.flush()
    except ValueError as error:
        print_status(options.command, str(error))
        return BAD_INPUT
    except KeyboardInterrupt:
        # The status that a shell reports for a command stopped by Ctrl-C.
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader (head, less) closed the pipe. Without this Python prints an error at shutdown.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ImportError, FloatingPointError) as error:
        print_status(options.command, str(error))
        return FAILURE
    except OSError as error:
        # For example a full disk or an unreadable file.
        print_status(options.command, describe_error(error))
        return BAD_INPUT if isinstance(error, FileNotFoundError) else FAILURE
    return status


def print_warning(
    command: str, show_other: Callable[..., None], message: Warning | str, category: type[Warning], *place: Any
) -> None:
    """Print a warning about the user's data in one line; warnings of other libraries keep their form."""
    if category.__module__.startswith("foci."):
        print_status(command, str(message))
    else:
        show_other(message, category, *place)


def replace_closed_streams() -> None:
    """Replace a closed stdout or stderr, which Python sets to None, by a buffer that is never read."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, io.StringIO())


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; the inputs of a command may also follow its options, which argparse does not support."""
    top = build_parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        top.print_help(sys.stderr)
        top.exit(BAD_INPUT)
    options: argparse.Namespace
    options, more = top.parse_known_args(arguments)
    if more:
        options.inputs += more
    return options


def build_parser() -> CommandParser:
    """The parser with all commands and their options."""
    top = CommandParser(
        prog="foci",
        description="Attention for PyTorch, with access to the attention matrix.",
        epilog=EXAMPLES,
    )
    top.add_argument("--version", action="version", version=f"foci {__version__}")
    commands = top.add_subparsers(dest="command", metavar="command", required=True)

    for command in (explain, look, explore, samples, train, evaluate, run, data, doctor, warmup, bench):
        command.add(commands)
    return top

"""`foci run`: a model answers, and shows where it looked."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

EXAMPLES = """\
examples:
  foci run translation "A man sleeps." --show
  foci run translation --file sentences.txt > answers.txt
  foci run generation "To be" --set task.temperature=0.5
  foci run translation "A man sleeps." --out page.html
"""
# What a record is saved as; any other ending is a file of answers.
RECORDS = {".html", ".foci", ".png", ".svg", ".pdf", ".jpg", ".webp"}
TOGETHER = 64


def add(commands: Any) -> None:
    """Names the options."""
    parser = commands.add_parser(
        "run",
        help="let a trained model answer, and see where it looks",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("task", help="translation, generation, vision, sentiment, speech or summarization")
    parser.add_argument("inputs", nargs="*", help="sentences, or files of pictures or sound (default: lines of stdin)")
    parser.add_argument("--file", type=Path, help="a file with an input on each line")
    parser.add_argument(
        "--model", type=Path, help="a run's folder or a model file (default: runs/TASK, else one that ships)"
    )
    parser.add_argument("--show", action="store_true", help="the attention, in the terminal")
    parser.add_argument("--out", type=Path, help="the attention as page.html, .foci, .png; or the answers as .txt")
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE", help="one setting")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Answers every input."""
    import torch

    from foci.commands.loading import loaded, place_of

    task, model = loaded(place_of(options.task, options.model), options.changes, options.device)
    if task.name != options.task:
        raise ValueError(f"expected a model for {options.task}, but {options.model} is one for {task.name}")
    as_record = options.out is not None and options.out.suffix.lower() in RECORDS
    if as_record and len(options.inputs) != 1:
        raise ValueError(f"{options.out} takes the attention to one input, but got {len(options.inputs)}")
    with torch.no_grad(), answers_to(None if as_record else options.out) as file:
        for some in in_groups(inputs(options), 1 if options.show or as_record else TOGETHER):
            examples = [task.given(each) for each in some]
            if not options.show and not as_record:
                for answer in task.write(model, examples):
                    print(answer, file=file, flush=True)
                continue
            record = task.show(model, examples[0])
            print(record.answer, file=file, flush=True)
            if options.show:
                record.show(file=file)
            if as_record:
                record.save(options.out)
    return 0


def inputs(options: argparse.Namespace) -> Iterator[str]:
    """What was typed, the lines of a file, or those of stdin."""
    if options.inputs and options.file is not None:
        raise ValueError(f"expected inputs or a file of them, but got both: {options.inputs[0]!r} and {options.file}")
    if options.inputs:
        yield from options.inputs
    elif options.file is not None:
        from foci.inputs.tables import text_of

        yield from text_of(options.file).splitlines()
    else:
        for line in sys.stdin:
            yield line.rstrip("\n")


def in_groups(lines: Iterator[str], count: int) -> Iterator[list[str]]:
    """So many lines at a time."""
    while group := list(islice(lines, count)):
        yield group


@contextmanager
def answers_to(path: Path | None) -> Iterator[TextIO]:
    """A file for the answers, or stdout."""
    if path is None:
        yield sys.stdout
        return
    with path.open("w", encoding="utf-8") as file:
        yield file

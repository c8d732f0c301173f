"""`foci run`: a model answers, and shows where it looked."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from foci.cli.output import BAD_INPUT, check_out_path, check_utf8, describe_error

if TYPE_CHECKING:
    from foci.nn.model import Model
    from foci.tasks.task import Task

EXAMPLES = """\
examples:
  foci run translation "Where is the train station?" --show
  foci run translation "A man sleeps." --out page.html
  foci run translation --file sentences.txt > answers.txt
  foci run speech seven.wav --show
  foci run vision shoe.png coat.png
  foci run generation "ROMEO:" --set task.temperature=0.5
"""
# Those whose inputs are files; the others take the text itself.
FILE_TASKS = ("speech", "vision")
TASKS = "translation, generation, vision, sentiment, speech or summarization"
# Looked for by its files: what lists them elsewhere is slow to import.
SHIPPED_MODELS = Path(__file__).parents[1] / "models"
# The ending of a file of answers; the others are those of records.
ANSWERS_SUFFIX = ".txt"
BATCH_SIZE = 64
# What a task says of an input that it cannot read.
INPUT_ERRORS = (ValueError, OSError)


def add(commands: Any) -> None:
    """Names the options."""
    parser = commands.add_parser(
        "run",
        help="let a trained model answer, and see where it looks",
        epilog=EXAMPLES,
    )
    there = sorted({file.parent.name for file in SHIPPED_MODELS.glob("*/*.safetensors")})
    parser.add_argument("task", help=f"{TASKS}; models ship for {', '.join(there)}")
    parser.add_argument("inputs", nargs="*", help="sentences, or files of pictures or sound (default: lines of stdin)")
    parser.add_argument("--file", type=Path, help="a file with an input on each line; an empty one stays empty")
    parser.add_argument(
        "--model",
        type=Path,
        help="a run's folder, a model file, or one that ships (default: runs/TASK, else the one that ships)",
    )
    parser.add_argument("--show", action="store_true", help="the attention, in the terminal")
    parser.add_argument("--out", type=Path, help="the attention as page.html, .foci, .png; or the answers as .txt")
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE", help="one setting")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Answers every input; the status is 2 where some could not be read."""
    import torch

    from foci.cli.model_choice import find_task_model, load_with_changes, print_truncated

    check_out_path(options.out, ANSWERS_SUFFIX)
    place = find_task_model(options.task, options.model)
    task, model = load_with_changes(place, options.changes, options.device)
    if task.name != options.task:
        raise ValueError(f"expected a model for {options.task}, but {place} is one for {task.name}")
    if options.model is None and place.parent != SHIPPED_MODELS:
        # It stands in front of the one that ships, which is easily forgotten.
        ships = f"; --model {task.name} is the one that ships" if (SHIPPED_MODELS / task.name).is_dir() else ""
        tell(f"the model in {place} answers{ships}")
    as_record = options.out is not None and options.out.suffix.lower() != ANSWERS_SUFFIX
    if as_record and len(options.inputs) != 1:
        raise ValueError(f"{options.out} takes the attention to one input, but got {len(options.inputs)}")
    asked = InputRunner(task, model)
    one_by_one = options.show or as_record or is_interactive(options)
    with torch.no_grad(), open_answers(None if as_record else options.out) as file:
        for some in group_lines(read_inputs(options), 1 if one_by_one else BATCH_SIZE):
            # Answers and the lines of a file stay side by side.
            examples = asked.examples({i: text for i, text in enumerate(some) if options.inputs or text.strip()})
            if options.show or as_record:
                asked.look(examples, options.show, options.out if as_record else None, file)
                continue
            answers = asked.answers(examples)
            for i in range(len(some)):
                print(answers.get(i, ""), file=file, flush=True)
    print_truncated("run", asked.cut, asked.count)
    if options.out is not None and not (as_record and asked.refused):
        tell(f"written: {options.out}")
    return BAD_INPUT if asked.refused else 0


class InputRunner:
    """A model and what it was asked; an input that it cannot read is told and does not keep the others waiting."""

    def __init__(self, task: Task[Any, Any], model: Model) -> None:
        self.task, self.model = task, model
        self.count = self.cut = self.refused = 0

    def examples(self, texts: dict[int, str]) -> dict[int, Any]:
        """What some lines are to the task, by their places."""
        found = {}
        for place, text in texts.items():
            with self.refusing():
                example = self.task.given(check_input_file(text, self.task.name))
                self.cut += self.task.is_cut(example)
                found[place] = example
        self.count += len(found)
        return found

    def answers(self, examples: dict[int, Any]) -> dict[int, str]:
        """The answers, by their places."""
        if not examples:
            return {}
        try:
            return dict(zip(examples, self.task.write(self.model, [*examples.values()]), strict=True))
        except INPUT_ERRORS:
            # One of them cannot be read: each is asked alone.
            found = {}
            for place, example in examples.items():
                with self.refusing():
                    found[place] = self.task.write(self.model, [example])[0]
            return found

    def look(self, examples: dict[int, Any], show: bool, out: Path | None, file: TextIO) -> None:
        """The answer to one input, into the file of answers, and where the model looked: shown, saved, or both."""
        from foci.capture.look import record_example

        record = None
        for example in examples.values():
            with self.refusing():
                record = record_example(self.task, self.model, example)
        print("" if record is None else record.answer, file=file, flush=True)
        if record is not None and show:
            record.show()
        if record is not None and out is not None:
            record.save(out)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        try:
            yield
        except INPUT_ERRORS as problem:
            self.refused += 1
            tell(describe_error(problem))


def tell(message: str) -> None:
    """Beside the answers and not among them."""
    print(f"foci run: {message}", file=sys.stderr, flush=True)


def check_input_file(text: str, task: str) -> str:
    """The text; refuses a folder where a file is asked for."""
    check_utf8(text)
    if task in FILE_TASKS and Path(text).is_dir():
        raise ValueError(f"expected a file for {task}, but {text} is a folder: name the files in it")
    return text


def is_interactive(options: argparse.Namespace) -> bool:
    """Whether somebody types line after line, and waits for the answer to each."""
    return not options.inputs and options.file is None and sys.stdin is not None and sys.stdin.isatty()


def read_inputs(options: argparse.Namespace) -> Iterator[str]:
    """What was typed, the lines of a file, or those of stdin."""
    if options.inputs and options.file is not None:
        raise ValueError(f"expected inputs or a file of them, but got both: {options.inputs[0]!r} and {options.file}")
    if options.inputs:
        yield from options.inputs
    elif options.file is not None:
        from foci.inputs.tables import text_of

        yield from text_of(options.file).splitlines()
    elif sys.stdin is None:
        raise ValueError("expected inputs, a file of them or lines of stdin, but stdin is closed")
    else:
        for line in sys.stdin:
            yield line.rstrip("\n")


def group_lines(lines: Iterator[str], count: int) -> Iterator[list[str]]:
    """So many lines at a time."""
    while group := list(islice(lines, count)):
        yield group


@contextmanager
def open_answers(path: Path | None) -> Iterator[TextIO]:
    """A file for the answers, or stdout."""
    if path is None:
        yield sys.stdout
        return
    with path.open("w", encoding="utf-8") as file:
        yield file

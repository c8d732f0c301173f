"""`foci run`: answer inputs with a trained model, and show its attention."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from foci import models
from foci.cli.output import BAD_INPUT, TASK_NAMES, check_out_path, check_utf8, describe_error, print_lines, print_status

if TYPE_CHECKING:
    from foci.nn.model import Model
    from foci.tasks.task import Task

EXAMPLES = """\
examples (`foci samples samples` writes the files in samples/):
  foci run translation "Where is the train station?" --show
  foci run translation "A man sleeps." --out page.html
  foci run generation "ROMEO:" --set task.temperature=0.5
  foci run speech samples/seven.wav --show
  foci run vision samples/shirt.png
  foci run runs/translation "sixty one"
  foci run translation --file FILE --out answers.txt
"""
# The suffix of --out for answers; the others are those of records.
ANSWERS_SUFFIX = ".txt"
BATCH_SIZE = 64
# What a task raises for an input that it cannot read.
INPUT_ERRORS = (ValueError, OSError)


def add(commands: Any) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "run",
        help="answer inputs with a trained model, and show its attention",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "task",
        help=f"{TASK_NAMES}; pretrained models: {', '.join(models.list_pretrained())}; or the path of a model",
    )
    parser.add_argument("inputs", nargs="*", help="sentences, or image or sound files (default: lines of stdin)")
    parser.add_argument("--file", type=Path, help="a file with one input per line; empty lines give empty answers")
    parser.add_argument(
        "--model",
        type=Path,
        help="a run directory, a model file, or a pretrained model (default: runs/TASK, else the pretrained model)",
    )
    parser.add_argument("--show", action="store_true", help="show the attention in the terminal")
    parser.add_argument("--out", type=Path, help="write the attention (page.html, .foci, .png) or the answers (.txt)")
    parser.add_argument(
        "--set", action="append", default=[], dest="changes", metavar="KEY=VALUE", help="change a setting; repeatable"
    )
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Answer every input; the exit status is 2 if some could not be read."""
    import torch

    from foci.cli.model_choice import find_task_model, load_with_changes, print_truncated
    from foci.tasks import TASKS, Task

    check_out_path(options.out, ANSWERS_SUFFIX)
    path = find_task_model(options.task, options.model)
    task, model = load_with_changes(path, options.changes, options.device)
    is_task = options.task in TASKS
    if is_task and task.name != options.task:
        named = options.model or path
        raise ValueError(f"--model must be a model for {options.task}, got {named}, a model for {task.name}")
    if is_task and options.model is None and path.parent != models.MODELS_DIRECTORY:
        # A run takes precedence over the pretrained model, which is easily overlooked.
        is_pretrained = task.name in models.list_pretrained()
        instead = f"; use --model {task.name} for the pretrained model" if is_pretrained else ""
        print_status("run", f"using the model in {path}{instead}")
    as_record = options.out is not None and options.out.suffix.lower() != ANSWERS_SUFFIX
    if as_record and len(options.inputs) != 1:
        raise ValueError(f"--out {options.out} needs exactly one input, got {len(options.inputs)}")
    refuse_files(options.inputs, task.name)
    if is_interactive(options):
        print_status("run", "reading lines from the terminal: one input each, Ctrl+D to end")
    runner = InputRunner(task, model)
    streams = type(task).stream is not Task.stream
    one_by_one = options.show or as_record or streams or is_interactive(options)
    with torch.no_grad(), open_answers(None if as_record else options.out) as file:
        for group in group_lines(read_inputs(options), 1 if one_by_one else BATCH_SIZE):
            # Empty lines of a file get empty answers, so that line numbers match.
            examples = runner.read_examples({i: text for i, text in enumerate(group) if options.inputs or text.strip()})
            if options.show or as_record:
                runner.show(examples, options.show, options.out if as_record else None, file)
                continue
            if streams:
                runner.stream(examples, file)
                continue
            answers = runner.answer(examples)
            for i in range(len(group)):
                write_answer(answers.get(i, ""), file)
    print_truncated("run", runner.truncated, runner.count, runner.part)
    if options.out is not None and not (as_record and runner.failed):
        print_status("run", f"written: {options.out}")
    return BAD_INPUT if runner.failed else 0


class InputRunner:
    """Runs a model on inputs; an input that cannot be read is reported and does not stop the others."""

    def __init__(self, task: Task[Any, Any], model: Model) -> None:
        self.task, self.model = task, model
        self.count = self.truncated = self.failed = 0
        # The part of the first truncated input that the model reads.
        self.part = ""

    def read_examples(self, texts: dict[int, str]) -> dict[int, Any]:
        """The task's examples for some inputs, by their index."""
        examples = {}
        for index, text in texts.items():
            with self.report_errors():
                example = self.task.parse_input(check_input_file(text, self.task.name))
                if self.task.is_truncated(example):
                    self.truncated += 1
                    self.part = self.part or self.task.describe_read_part(example)
                examples[index] = example
        self.count += len(examples)
        return examples

    def answer(self, examples: dict[int, Any]) -> dict[int, str]:
        """The answers, by the index of their input."""
        if not examples:
            return {}
        try:
            return dict(zip(examples, self.task.answer(self.model, [*examples.values()]), strict=True))
        except INPUT_ERRORS:
            # One of them cannot be read: answer each one separately.
            answers = {}
            for index, example in examples.items():
                with self.report_errors():
                    answers[index] = self.task.answer(self.model, [example])[0]
            return answers

    def stream(self, examples: dict[int, Any], file: TextIO) -> None:
        """Write the answer part by part, as it is generated."""
        for example in examples.values():
            with self.report_errors():
                for part in self.task.stream(self.model, example):
                    write_answer(part, file, end="")
        write_answer("", file)

    def show(self, examples: dict[int, Any], in_terminal: bool, out: Path | None, file: TextIO) -> None:
        """Write the answer to the file of answers, and show or save the attention."""
        from foci.capture.look import record_example

        record = None
        for example in examples.values():
            with self.report_errors():
                record = record_example(self.task, self.model, example)
        write_answer("" if record is None or record.answer is None else record.answer, file)
        if record is not None and in_terminal:
            record.show()
        if record is not None and out is not None:
            record.save(out)

    @contextmanager
    def report_errors(self) -> Iterator[None]:
        try:
            yield
        except INPUT_ERRORS as error:
            self.failed += 1
            print_status("run", describe_error(error))


def check_input_file(text: str, task: str) -> str:
    """Return the input; refuse a directory for a task that takes files."""
    from foci.capture.model_loading import TASK_INPUTS

    check_utf8(text)
    if task in TASK_INPUTS and Path(text).is_dir():
        raise ValueError(f"inputs of {task} must be files, got the directory {text}: name the files in it")
    return text


def refuse_files(inputs: Sequence[str], task: str) -> None:
    """Refuse the name of a file in place of a text, which the model would read as a text."""
    from foci.capture.look import INPUT_FILE_NAME
    from foci.capture.model_loading import TASK_INPUTS, names_file

    for text in inputs if task not in TASK_INPUTS else ():
        if names_file(text):
            raise ValueError(f"inputs of {task} must be texts, got the file {text}: --file reads the lines of a file")
        if INPUT_FILE_NAME.fullmatch(text):
            raise ValueError(f"inputs of {task} must be texts, got {text}: no such file")


def is_interactive(options: argparse.Namespace) -> bool:
    """Whether inputs are typed in a terminal, so that each line is answered at once."""
    return not options.inputs and options.file is None and sys.stdin is not None and sys.stdin.isatty()


def read_inputs(options: argparse.Namespace) -> Iterator[str]:
    """The inputs of the command line, or the lines of --file or of stdin."""
    if options.inputs and options.file is not None:
        raise ValueError(f"inputs cannot be combined with --file, got {options.inputs[0]!r} and {options.file}")
    if options.inputs:
        yield from options.inputs
    elif options.file is not None:
        from foci.inputs.tables import read_text_file

        yield from read_text_file(options.file).splitlines()
    elif sys.stdin is None:
        raise ValueError("no inputs: none were given, there is no --file, and stdin is closed")
    else:
        for line in sys.stdin:
            yield line.rstrip("\n")


def group_lines(lines: Iterator[str], count: int) -> Iterator[list[str]]:
    """Up to `count` lines at a time."""
    while group := list(islice(lines, count)):
        yield group


def write_answer(answer: str, file: TextIO, end: str = "\n") -> None:
    """Print an answer, or write it to a file as it is."""
    if file is sys.stdout:
        print_lines(answer, end)
    else:
        file.write(answer + end)
        file.flush()


@contextmanager
def open_answers(path: Path | None) -> Iterator[TextIO]:
    """The file for the answers, or stdout."""
    if path is None:
        yield sys.stdout
        return
    with path.open("w", encoding="utf-8") as file:
        yield file

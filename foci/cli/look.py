"""`foci look`: run a model on a text and show its attention."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from foci.cli.output import check_out_path, check_utf8, print_status

if TYPE_CHECKING:
    from foci.record.layer import Layer
    from foci.record.record import Record
    from foci.view.selection import SelectedHead

EXAMPLES = """\
examples (`foci samples samples` writes the files in samples/):
  foci look "Jane is hungry, and she's really craving pasta from Italy."
  foci look "Jane is hungry." --word hungry
  foci look "Where is the train station?" --head cross.L1 --word Bahnhof
  foci look "ROMEO:" --model generation --out page.html
  foci look samples/shirt.png
  foci look "Jane is hungry." --model FOLDER --head L0H1
"""


def add(commands: Any) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "look",
        help="run a model on your text and show its attention",
        epilog=EXAMPLES,
    )
    parser.add_argument("text", nargs="+", help="the text, or the path of a text, image or sound file")
    parser.add_argument(
        "--model",
        help="a Hugging Face model by directory or name, a foci model file or run directory, or a pretrained model"
        " (default: translation for a text, vision for an image, speech for a sound)",
    )
    parser.add_argument("--layer", type=int, help="a layer, from 0")
    parser.add_argument("--head", help="a head: L5H3, cross.L0H2, or a number together with --layer")
    parser.add_argument(
        "--word",
        help="the word to follow, of the answer or of the text: hungry, the#2 for the second the, or its position",
    )
    parser.add_argument("--tokens", action="store_true", help="show single tokens instead of whole words")
    parser.add_argument("--out", type=Path, help="write to a file: page.html, figure.png, .svg or .pdf, record.foci")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the model, then show or save the record."""
    from foci.capture.look import look
    from foci.capture.model_loading import MissingModelError
    from foci.runtime.checks import IMAGE_SUFFIXES

    limit_transformers_logging()
    check_out_path(options.out)
    text = check_utf8(" ".join(options.text))
    refuse_directory(text)
    try:
        record = look(text, options.model, device=options.device, report=print_look_status)
    except MissingModelError as error:
        hint = 'choose one with --model; foci explain "..." shows attention without a model'
        raise ValueError(f"{error}: {hint}") from error
    head = int(options.head) if options.head is not None and options.head.isdigit() else options.head
    head = choose_head_to_show(record, options, head)
    if options.out is None:
        record.show(options.word, head, options.layer, by_token=options.tokens)
        return 0
    suffix = options.out.suffix.lower()
    # A figure shows all words, but a --word that does not occur is refused for every kind of file.
    opens_at = page_options(record, options, head)
    record.save(
        options.out,
        **(figure_options(head, options) if suffix in IMAGE_SUFFIXES else opens_at if suffix == ".html" else {}),
    )
    print_look_status(f"written: {options.out}")
    return 0


def refuse_directory(text: str) -> None:
    """Refuse the path of a directory; a word without a dot or a slash is a text, also if a directory has that name."""
    from foci.capture.model_loading import path_exists

    if {".", os.sep} & {*text} and path_exists(Path(text)) and Path(text).is_dir():
        raise ValueError(f"text must be a text, or the path of a text, image or sound file, got the directory {text}")


def choose_head_to_show(record: Record, options: argparse.Namespace, head: str | int | None) -> str | int | None:
    """The head to show: the requested one, or one that reads the text if --word occurs only there."""
    from foci.view.selection import select_source_head

    if options.word is None:
        return head
    requested = head is not None or options.layer is not None
    choice = requested_head(record, options, head)
    matching = [layer for layer in record.layers.values() if has_query_word(record, layer, options)]
    if not matching or choice.layer in matching or record.labels_of(choice.layer)[1].grid is not None:
        return head
    names = (
        f"{record.name_of(matching[0])} to {record.name_of(matching[-1])}"
        if matching[1:]
        else record.name_of(matching[0])
    )
    if requested:
        raise ValueError(
            f"{options.word!r} is not among the queries of {choice.name}; it occurs in {names}: choose one with --head"
        )
    reading = select_source_head(record, choice)
    shown = reading.name if reading is not None and reading.layer in matching else record.name_of(matching[0])
    print_look_status(f"{options.word} is not among the queries of {choice.name}; showing {shown}, where it occurs")
    return shown


def requested_head(record: Record, options: argparse.Namespace, head: str | int | None) -> SelectedHead:
    """The head named by the options, or the one that every view opens with."""
    from foci.view.selection import select_default_head, select_head

    return (
        select_default_head(record)
        if head is None and options.layer is None
        else select_head(record, head, options.layer)
    )


def has_query_word(record: Record, layer: Layer, options: argparse.Namespace) -> bool:
    """Whether --word is among the queries of a layer."""
    from foci.view.units import find_unit, list_layer_units

    try:
        find_unit(list_layer_units(record, layer, 0, options.tokens)[0], options.word)
    except ValueError:
        return False
    return True


def page_options(record: Record, options: argparse.Namespace, head: str | int | None) -> dict[str, Any]:
    """Options of `Record.save` for a page: the head and the word at which it opens."""
    from foci.view.selection import select_patch
    from foci.view.units import find_unit, list_layer_units, list_other_units

    if head is None and options.layer is None and options.word is None:
        return {}
    choice = requested_head(record, options, head)
    state = {"h": choice.name}
    if options.word is not None:
        labels = record.labels_of(choice.layer)[0]
        queries = list_layer_units(record, choice.layer, 0, options.tokens)[0]
        patches = labels.grid is not None
        others = list_other_units(record, choice.layer, 0, options.tokens)
        place = (
            select_patch(labels, options.word)[0]
            if patches
            else queries[find_unit(queries, options.word, others)].stop - 1
        )
        state["t"] = str(place)
    return {"state": urlencode(state)}


def figure_options(head: str | int | None, options: argparse.Namespace) -> dict[str, Any]:
    """Options of `Record.save` for a figure: which head to draw, and by word or by token."""
    name = f"L{options.layer}" + ("" if head is None else f"H{head}") if options.layer is not None else head
    return ({"head": name} if name is not None else {}) | ({"by_token": True} if options.tokens else {})


def print_look_status(message: str) -> None:
    """Print progress to stderr."""
    print_status("look", message)


def limit_transformers_logging() -> None:
    """Log only errors of transformers; show its progress bars only in a terminal."""
    if find_spec("transformers") is None:
        return
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()

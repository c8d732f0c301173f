"""`foci look`: where a model looks when it reads a text of yours."""

from __future__ import annotations

import argparse
import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from foci.cli.output import check_out_path, check_utf8

if TYPE_CHECKING:
    from foci.record.layer import Layer
    from foci.record.record import Record
    from foci.view.selection import Choice

PAGE = ".html"
EXAMPLES = """\
examples:
  foci look "Jane is hungry, and she's really craving pasta from Italy."
  foci look "Jane is hungry." --word hungry
  foci look "Where is the train station?" --head cross.L1 --word Bahnhof
  foci look "ROMEO:" --model generation --out page.html
  foci look "Jane is hungry." --model ./minilm --head L0H1
  foci look shoe.png --model vision
"""


def add(commands: Any) -> None:
    """Names the options."""
    parser = commands.add_parser(
        "look",
        help="see where a model looks when it reads a text of yours",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "text", nargs="+", help="the text; a picture's file with --model vision, a sound's with --model speech"
    )
    parser.add_argument(
        "--model",
        help="a Hugging Face model by folder or name, a file or run of foci, or one that ships (default: translation)",
    )
    parser.add_argument("--layer", type=int, help="a layer, from 0")
    parser.add_argument("--head", help="a head: L5H3, cross.L0H2, or a number beside --layer")
    parser.add_argument(
        "--word",
        help="the word to follow, of the answer or of the text: hungry, the#2 for the second the, or its place",
    )
    parser.add_argument("--tokens", action="store_true", help="single tokens instead of whole words")
    parser.add_argument("--out", type=Path, help="into a file: page.html, figure.png, .svg or .pdf, record.foci")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Looks, and shows or writes it."""
    from foci.capture.look import look
    from foci.record.record import IMAGE_SUFFIXES

    limit_transformers_logging()
    check_out_path(options.out)
    record = look(check_utf8(" ".join(options.text)), options.model, device=options.device, say=tell)
    head = int(options.head) if options.head is not None and options.head.isdigit() else options.head
    head = choose_head_to_show(record, options, head)
    if options.out is None:
        record.show(options.word, head, options.layer, by_token=options.tokens)
        return 0
    ending = options.out.suffix.lower()
    # A figure shows all words; one that is not there is refused all the same.
    opens = page_options(record, options, head)
    record.save(
        options.out, **(figure_options(head, options) if ending in IMAGE_SUFFIXES else opens if ending == PAGE else {})
    )
    tell(f"written: {options.out}")
    return 0


def choose_head_to_show(record: Record, options: argparse.Namespace, head: str | int | None) -> str | int | None:
    """The head to show: the one that was named, or one that reads the text, where only the text has the word."""
    from foci.view.selection import reading_of

    if options.word is None:
        return head
    asked = head is not None or options.layer is not None
    choice = requested_head(record, options, head)
    having = [layer for layer in record.layers.values() if has_query_word(record, layer, options)]
    if not having or choice.layer in having or record.labels_of(choice.layer)[1].grid is not None:
        return head
    names = f"{record.name_of(having[0])} to {record.name_of(having[-1])}" if having[1:] else record.name_of(having[0])
    if asked:
        raise ValueError(
            f"{options.word!r} is no word that looks in {choice.name}, but one in {names}: name one of them"
        )
    reading = reading_of(record, choice)
    shown = reading.name if reading is not None and reading.layer in having else record.name_of(having[0])
    tell(f"{options.word} is no word that looks in {choice.name}, but one in {shown}, which is shown")
    return shown


def requested_head(record: Record, options: argparse.Namespace, head: str | int | None) -> Choice:
    """The head that was named, or the one that every view begins with."""
    from foci.view.selection import choose, telling

    return telling(record) if head is None and options.layer is None else choose(record, head, options.layer)


def has_query_word(record: Record, layer: Layer, options: argparse.Namespace) -> bool:
    """Whether the word to follow is one that looks in a layer."""
    from foci.view.selection import find, sides

    try:
        find(sides(record, layer, 0, options.tokens)[0], options.word)
    except ValueError:
        return False
    return True


def page_options(record: Record, options: argparse.Namespace, head: str | int | None) -> dict[str, Any]:
    """What of the options says where a page opens."""
    from foci.view.selection import find, sides
    from foci.view.terminal.patches import looking

    if head is None and options.layer is None and options.word is None:
        return {}
    choice = requested_head(record, options, head)
    state = {"h": choice.name}
    if options.word is not None:
        labels = record.labels_of(choice.layer)[0]
        queries = sides(record, choice.layer, 0, options.tokens)[0]
        patches = labels.grid is not None
        place = looking(labels, options.word)[0] if patches else queries[find(queries, options.word)].stop - 1
        state["t"] = str(place)
    return {"state": urlencode(state)}


def figure_options(head: str | int | None, options: argparse.Namespace) -> dict[str, Any]:
    """What of the options says which figure to draw."""
    name = f"L{options.layer}" + ("" if head is None else f"H{head}") if options.layer is not None else head
    return ({"head": name} if name is not None else {}) | ({"by_token": True} if options.tokens else {})


def tell(message: str) -> None:
    """What takes a while, beside the answer and not in it."""
    print(f"foci look: {message}", file=sys.stderr, flush=True)


def limit_transformers_logging() -> None:
    """Leaves of what transformers says the errors, and its progress bars where somebody sees them."""
    if find_spec("transformers") is None:
        return
    from transformers.utils import logging as of_transformers

    of_transformers.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        of_transformers.disable_progress_bar()

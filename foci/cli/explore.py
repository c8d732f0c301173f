"""`foci explore` and `foci view`: explore attention in the browser."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from foci.cli.output import check_out_path, print_lines

EXPLORE_EXAMPLES = """\
examples:
  foci explore
  foci explore --model FOLDER
  foci explore --no-browser --port 8000
"""
VIEW_EXAMPLES = """\
examples:
  foci view run.foci
  foci view run.foci --out run.html
  foci view runs/translation/attention.jsonl
  foci view runs/translation/attention.jsonl --out heads.png
"""


def add(commands: Any) -> None:
    """Add both commands and their options."""
    explore = commands.add_parser(
        "explore", help="enter a text, pick a model and see its attention in the browser", epilog=EXPLORE_EXAMPLES
    )
    explore.add_argument(
        "--model", action="append", default=[], help="a model to offer: a directory or a name; repeatable"
    )
    add_server_options(explore)
    explore.set_defaults(run=run_explore)

    view = commands.add_parser("view", help="open a record or the heads of a monitored training", epilog=VIEW_EXAMPLES)
    view.add_argument(
        "file",
        type=Path,
        help="a record (.foci) saved by foci look --out, foci run --out or Record.save, or the attention.jsonl of a"
        " training with train.monitor",
    )
    view.add_argument(
        "--out", type=Path, help="write a file instead: run.html (one self-contained page), .png, .svg, .pdf"
    )
    add_server_options(view)
    view.set_defaults(run=run_view)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=0, help="the port (default: any free one)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where models run")
    parser.add_argument("--no-browser", action="store_true", help="print the address without opening a browser")


def run_explore(options: argparse.Namespace) -> int:
    """Run `foci explore`."""
    from foci.cli.look import limit_transformers_logging
    from foci.explore.server import serve

    limit_transformers_logging()
    serve(options.model, port=options.port, device=options.device, browse=not options.no_browser, say=print_lines)
    return 0


def run_view(options: argparse.Namespace) -> int:
    """Run `foci view`."""
    from foci.record.record import Record

    check_out_path(options.out)
    if not options.file.is_file():
        problem = "is a directory" if options.file.is_dir() else "does not exist"
        raise ValueError(f"file must be a .foci file or an attention.jsonl, got {options.file}, which {problem}")
    if options.file.suffix.lower() == ".jsonl":
        return view_history(options)
    if options.file.suffix.lower() != ".foci":
        raise ValueError(f"file must be a .foci file or an attention.jsonl, got {options.file}")
    record = Record.load(options.file)
    if options.out is not None:
        record.save(options.out)
        print_lines(f"written: {options.out}")
        return 0
    from foci.explore.server import serve

    serve([], record, port=options.port, device=options.device, browse=not options.no_browser, say=print_lines)
    return 0


def view_history(options: argparse.Namespace) -> int:
    """Show the heads of a monitored training over its steps, as a page beside the file or in another file."""
    import webbrowser

    from foci.record.history import History

    history = History.load(options.file)
    path = options.file.with_suffix(".html") if options.out is None else options.out
    history.save(path)
    print_lines(f"written: {path}")
    if options.out is None and not options.no_browser:
        webbrowser.open(path.absolute().as_uri())
    return 0

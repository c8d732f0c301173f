"""The page of a record in a browser: file size, time to open, and frame times of its map.

Headless Chromium opens the file from disk, without a network. For comparison the size of the same matrices in BertViz's
page, which has every entry as a decimal number: extrapolated from one head, because all of them would not fit.

    python benchmarks/page.py
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from table import Table, machine_name
from timing import log

import foci
from foci.record.kept import KeptStatistics
from foci.record.labels import Labels
from foci.record.layer import Layer
from foci.record.record import Record

COLUMNS = ("case", "contestant", "mb", "opens_ms", "frames", "median_ms", "most_ms_of_95")
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
# The duration of each frame over ten seconds.
FRAMES = """() => { window.frames_ = new Promise((done) => {
    const times = []; let last = performance.now(); const end = last + 10000;
    const step = (now) => {
        times.push(now - last); last = now; now < end ? requestAnimationFrame(step) : done(times); };
    requestAnimationFrame(step); }); }"""


def main() -> int:
    """Measure every record."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    device = torch.device("cpu")
    table = Table(device, COLUMNS, Path(__file__).parent / "results" / f"page-{machine_name(device)}.csv")
    with open_browser() as chromium:
        for case, record in records():
            log(case)
            table.add(case=case, contestant="foci", **measure_page(chromium, record))
            if all(layer.weights is not None for layer in record.layers.values()):
                table.add(case=case, contestant="BertViz's format", mb=bertviz_megabytes(record))
    more = {"opens, ms": ("foci", "opens_ms"), "95% of frames within, ms": ("foci", "most_ms_of_95")}
    table.print_table("MB", ("case",), "mb", more)
    table.print_footer()
    return 0


def records() -> Iterator[tuple[str, Record]]:
    yield "512 tokens, 12 x 12 heads, causal", full_record(512, foci.causal)
    yield "512 tokens, 12 x 12 heads, no mask", full_record(512, None)
    yield "100,000 tokens, 8 heads", long_record()


def full_record(length: int, mask: foci.Mask | None, layers: int = 12, heads: int = 12) -> Record:
    """A record of random queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for index in range(layers):
        q, k, v = (torch.randn(1, heads, length, 32, generator=generator) for _ in range(3))
        _, weights = foci.attention(q, k, v, mask=mask, return_weights=True)
        made[f"layers.{index}"] = Layer(f"layers.{index}", index=index, weights=weights, values=v)
    texts = [f" w{n}" for n in torch.randint(20_000, (length,), generator=generator).tolist()]
    return Record(made, {"input": Labels.tokens([texts])}, model="Whole", calls=layers)


def long_record(length: int = 100_000, heads: int = 8, top: int = 16) -> Record:
    """A record of random kept statistics; computing them at this length would take minutes."""
    generator = torch.Generator().manual_seed(0)
    places = torch.arange(length).view(1, 1, length, 1)
    keys = (torch.rand(1, heads, length, top, generator=generator) * (places + 1)).long().sort(-1).values
    fresh = torch.cat([torch.ones_like(keys[..., :1], dtype=torch.bool), keys[..., 1:] > keys[..., :-1]], -1)
    values = torch.where(fresh, torch.rand(1, heads, length, top, generator=generator).pow(3) / 5, 0.0)
    values, order = values.sort(-1, descending=True)
    found = {name: torch.rand(1, heads, length, generator=generator) for name in ("entropy", "received", "distance")}
    found |= {"lse": torch.rand(1, heads, length, generator=generator), "sink_mass": torch.zeros(1, heads, length)}
    found |= {"top_values": values, "top_keys": torch.where(values > 0, keys.gather(-1, order), -1)}
    found["picture"] = torch.rand(1, heads, 256, 256, generator=generator).pow(4).tril() / length
    layer = Layer("layers.0", kept=KeptStatistics(found, (1, heads, length, length)))
    texts = [f" t{n}" for n in torch.randint(20_000, (length,), generator=generator).tolist()]
    return Record({"layers.0": layer}, {"input": Labels.tokens([texts])}, model="Long", calls=1)


def bertviz_megabytes(record: Record) -> float:
    """MB of all entries as JSON."""
    layers = list(record.layers.values())
    one = json.dumps(layers[0][0, 0].dense().tolist())
    return len(one) * sum(len(layer.heads) for layer in layers) / 1e6


@contextmanager
def open_browser() -> Iterator[Any]:
    """The installed Chromium."""
    from playwright.sync_api import sync_playwright

    path = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    if path is None:
        raise SystemExit(f"Chromium must be on the PATH, as one of {', '.join(CHROMIUM)}, got none")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def measure_page(chromium: Any, record: Record) -> dict[str, float]:
    """File size, time until ready, and frame times over ten seconds of panning and zooming in the map."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "page.html")
        record.save(file)
        context = chromium.new_context(viewport={"width": 1280, "height": 800}, offline=True)
        tab = context.new_page()
        tab.goto(file.as_uri())
        tab.wait_for_selector("html[data-ready]")
        loaded = tab.evaluate("() => performance.timing.loadEventEnd - performance.timing.navigationStart")
        ready = tab.evaluate("() => Number(document.documentElement.dataset.ready)")
        times = sorted(frame_times(tab))
        context.close()
        return {
            "mb": file.stat().st_size / 1e6,
            "opens_ms": max(loaded, ready),
            "frames": len(times),
            "median_ms": statistics.median(times),
            "most_ms_of_95": times[int(0.95 * len(times))],
        }


def frame_times(tab: Any) -> list[float]:
    """The duration of each frame while the map is dragged and zoomed."""
    tab.get_by_role("tab", name="Map").click()
    box = tab.locator(".map").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    tab.mouse.move(x, y)
    tab.evaluate(FRAMES)
    for turn in range(120):
        if turn % 3:
            tab.mouse.wheel(0, -160 if turn % 40 < 28 else 160)
        else:
            tab.mouse.down()
            for part in range(6):
                tab.mouse.move(x - 10 * part, y - 8 * part)
            tab.mouse.up()
            tab.mouse.move(x, y)
    return [float(ms) for ms in tab.evaluate("() => window.frames_")]


if __name__ == "__main__":
    sys.exit(main())

"""The widget in JupyterLab and marimo, in Chromium without a network, and its fallbacks."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHORT = """\
import torch, foci
torch.manual_seed(0)
_, weights = foci.attention(*torch.randn(3, 1, 4, 12, 8), mask=foci.causal, return_weights=True)
record = foci.Record.from_tensors([weights, weights], [f" w{i}" for i in range(12)])
view = foci.widget(record, height=500)
view"""
LONG = """\
_, many = foci.attention(*torch.randn(3, 1, 1, 100_000, 16), mask=foci.causal & foci.window(64), return_weights=True)
long = foci.widget(many)
long"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def serving(command: list[str], address: str, folder: Path) -> Iterator[None]:
    """Run a notebook server until the block ends, from the moment when it answers."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(folder), "JUPYTER_CONFIG_DIR": str(folder)}
    server = subprocess.Popen(
        [sys.executable, "-m", *command], cwd=folder, env=environment, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(address, timeout=5).close()
                break
            except OSError:
                assert server.poll() is None
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.2)
        yield
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(20)


@contextmanager
def local_tab(browser: Any, address: str) -> Iterator[Any]:
    """Open a page from which only this machine can be reached; at the end, check that nothing else was asked."""
    context = browser.new_context(viewport={"width": 1700, "height": 1000})
    asked: list[str] = []

    def block(route: Any) -> None:
        asked.append(route.request.url)
        route.abort()

    context.route(lambda url: not re.match(r"(https?|wss?)://127\.0\.0\.1[:/]|data:|blob:", url), block)
    tab = context.new_page()
    tab.goto(address)
    yield tab
    context.close()
    # The notebook's own questions (news, kernels) are none of ours.
    assert [url for url in asked if not re.search(r"jupyter|marimo", url)] == []


def run_cell(tab: Any, number: int) -> str:
    """Run a cell of JupyterLab and return the text of its output."""
    cell = tab.locator(".jp-Notebook .jp-CodeCell").nth(number)
    cell.locator(".cm-content").click()
    tab.keyboard.press("Control+Enter")
    cell.locator(".jp-InputPrompt", has_text=re.compile(r"\[\d+\]:")).wait_for()
    return str(cell.locator(".jp-Cell-outputArea").inner_text())


def write_notebook(path: Path, cells: list[str]) -> None:
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    written = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "outputs": [], "execution_count": None, "source": source}
        for i, source in enumerate(cells)
    ]
    path.write_text(json.dumps({"cells": written, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))


@pytest.mark.browser
@pytest.mark.slow
def test_jupyterlab_shows_the_widget_which_python_reads_and_sets(browser: Any, tmp_path: Path) -> None:
    for package in ("anywidget", "jupyterlab"):
        pytest.importorskip(package)
    read = "view.layer, view.head, view.query, view.selection"
    write_notebook(tmp_path / "x.ipynb", [SHORT, read, "view.layer, view.query = 0, 4", LONG, "record", "view.close()"])
    port, token = free_port(), secrets.token_hex(8)
    options = [f"--port={port}", f"--IdentityProvider.token={token}", "--no-browser", "--allow-root"]
    address = f"http://127.0.0.1:{port}/"
    with (
        serving(["jupyterlab", *options], f"{address}api", tmp_path),
        local_tab(browser, f"{address}lab/tree/x.ipynb?token={token}") as tab,
    ):
        tab.set_default_timeout(60_000)
        run_cell(tab, 0)
        frames = tab.locator("iframe[title='attention weights']")
        page = frames.content_frame
        page.locator(".textpane [data-i='7']").click()
        page.locator(".headgrid .cell[aria-label='L1H3']").click()
        assert run_cell(tab, 1).strip().endswith("(1, 3, 7, [7])")
        run_cell(tab, 2)
        page.locator(".headgrid .cell[aria-label='L0H3'][aria-pressed='true']").wait_for()
        page.locator(".textpane .chosen[data-i='4']").wait_for()
        assert frames.bounding_box()["height"] == 500
        assert page.locator("html[data-theme='light']").count() == 1
        # A row of 100,000 weights comes from the kernel when it is shown.
        run_cell(tab, 3)
        frames.nth(1).content_frame.get_by_text("All weights are here, exact").wait_for()
        run_cell(tab, 4)
        frames.nth(2).content_frame.locator(".textpane [data-i='7']").wait_for()
        run_cell(tab, 5)
        tab.wait_for_function("document.querySelectorAll(\"iframe[title='attention weights']\").length === 2")


@pytest.mark.browser
def test_marimo_shows_the_widget(browser: Any, tmp_path: Path) -> None:
    for package in ("anywidget", "marimo"):
        pytest.importorskip(package)
    body = textwrap.indent(f"{SHORT}\n", "    ")
    (tmp_path / "x.py").write_text(f"import marimo\napp = marimo.App()\n\n@app.cell\ndef _():\n{body}    return\n")
    address = f"http://127.0.0.1:{(port := free_port())}/"
    options = ["--headless", "--no-token", f"--port={port}"]
    with (
        serving(["marimo", "run", "x.py", *options], f"{address}health", tmp_path),
        local_tab(browser, address) as tab,
    ):
        tab.set_default_timeout(60_000)
        frame = tab.locator("iframe[title='attention weights']")
        frame.content_frame.locator(".textpane [data-i='7']").click()
        frame.content_frame.locator(".textpane .chosen[data-i='7']").wait_for()
        assert frame.bounding_box()["height"] == 500
        assert frame.content_frame.locator("html[data-theme='light']").count() == 1

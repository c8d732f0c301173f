"""The explorer in Chromium: texts, files, and exact weights that are loaded on demand."""

import re
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foci.capture.model_loading import list_pretrained_by_input
from tests.conftest import chromium_path
from tests.view import records
from tests.view.browsing import browsing, listed, opened, shares, summed
from tests.view.pages import lazy, output_of, record_small_model

pytest.importorskip("playwright", reason="browser: playwright is not installed")
pytest.importorskip("uvicorn", reason="browser: uvicorn is not installed")
pytestmark = pytest.mark.browser


def start_server(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """Start a server; return its process and address."""
    command = [sys.executable, "-m", "foci", *arguments, "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r"http://127\.0\.0\.1:\d+/\S+", process.stdout.readline())
    assert found
    return process, found.group()


def stop_server(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait(10)
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = chromium_path()
    assert path is not None
    with browsing(path) as found:
        yield found


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    process, found = start_server("explore")
    yield found
    stop_server(process)


def test_a_text_is_typed_and_run(browser: Any, address: str) -> None:
    with opened(browser, address, offline=False) as tab:
        tab.get_by_label("Text").fill("Jane <b>is</b> hungry")
        tab.get_by_label("Model").fill("untrained vectors")
        tab.get_by_role("button", name="Run", exact=True).click()
        tab.wait_for_selector(".token")
        assert tab.locator(".token").all_inner_texts() == ["Jane", "<", "b", ">", "is", "<", "/", "b", ">", "hungry"]
        tab.locator('[data-i="9"]').hover()
        assert sum(shares(tab).values()) == pytest.approx(1, abs=0.02)
        tab.get_by_role("link", name="New text").click()
        tab.wait_for_selector(".startcard")
        assert tab.get_by_label("Text").input_value() == "Jane <b>is</b> hungry"


def test_shipped_models_are_offered_and_translate(browser: Any, address: str) -> None:
    with opened(browser, address, offline=False) as tab:
        assert tab.locator(".modelchip").all_inner_texts()[:4] == ["untrained vectors", *list_pretrained_by_input()[:3]]
        assert tab.get_by_label("Model").input_value() == "translation"
        tab.get_by_label("Text").fill("Where is the train station?")
        tab.get_by_role("button", name="Run", exact=True).click()
        tab.wait_for_selector(".token")
        assert "Wo ist der Bahnhof?" in tab.locator(".app").inner_text()


def test_a_sound_is_recorded(browser: Any, address: str, tmp_path: Path) -> None:
    with wave.open(str(tmp_path / "x.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(range(256)) * 32)
    with opened(browser, address, offline=False) as tab:
        # The selected model takes texts: a shipped model for sounds replaces it.
        tab.get_by_label("Model").fill("translation")
        tab.get_by_label("Open a file").set_input_files(tmp_path / "x.wav")
        tab.wait_for_selector(".app")
        assert tab.locator("h1").inner_text() == "speech"
        assert tab.locator(".soundview").is_visible()
    with opened(browser, address, offline=False) as tab:
        tab.get_by_label("Model").fill("./nowhere")
        tab.get_by_label("Open a file").set_input_files(tmp_path / "x.wav")
        tab.get_by_role("alert").wait_for()
        assert "./nowhere: no such path" in tab.get_by_role("alert").inner_text()


def test_an_unknown_model_shows_an_error(browser: Any, address: str) -> None:
    with opened(browser, address, offline=False) as tab:
        tab.get_by_label("Model").fill("./nowhere")
        tab.get_by_role("button", name="Run", exact=True).click()
        tab.get_by_role("alert").wait_for()
        assert "./nowhere: no such path" in tab.get_by_role("alert").inner_text()
        assert tab.get_by_role("button", name="Run", exact=True).is_enabled()


def test_open_a_file(browser: Any, address: str, tmp_path: Path) -> None:
    records.jane().save(tmp_path / "x.foci")
    (tmp_path / "bad.foci").write_bytes(b"nonsense")
    with opened(browser, address, offline=False) as tab:
        tab.get_by_label("Open a file").set_input_files(tmp_path / "bad.foci")
        tab.get_by_role("alert").wait_for()
        assert "file must be a .foci file" in tab.get_by_role("alert").inner_text()
        tab.get_by_label("Open a file").set_input_files(tmp_path / "x.foci")
        tab.wait_for_selector(".token")
        assert tab.locator(".token").first.inner_text() == "[CLS]"


def test_a_file_on_the_command_line_shows_exact_weights(browser: Any, tmp_path: Path) -> None:
    record = lazy(2000, layers=1, heads=2)
    record.save(tmp_path / "long.foci")
    process, address = start_server("view", str(tmp_path / "long.foci"))
    try:
        with opened(browser, f"{address}#h=L0H1&t=1500", offline=False) as tab:
            tab.locator(".right .note", has_text="All weights are here, exact.").wait_for()
            row = record["L0H1"].row(0, 1500)
            top = row.sort(descending=True)
            assert [position for _, position, _ in listed(tab)][:5] == top.indices[:5].tolist()
            tab.get_by_role("button", name="Show 100").click()
            assert len(listed(tab)) == 100
            tab.get_by_role("tab", name="Map").click()
            for _ in range(3):
                tab.get_by_role("button", name="+", exact=True).click()
            tab.locator(".tools .count", has_text=re.compile("^(Blocks|Entries)")).wait_for()
            tab.get_by_role("tab", name="How it is computed").click()
            tab.locator(".result .vector span").first.wait_for()
            assert tab.locator(".card").count() == 4
            tab.get_by_role("tab", name="Rollout").click()
            tab.locator(".rolllist li").first.wait_for()
            flow = record.rollout(1500)
            first = tab.locator(".rolllist li .value").first.inner_text()
            assert float(first.rstrip("%")) / 100 == pytest.approx(float(flow.max()), rel=0.051)
    finally:
        stop_server(process)


def test_weighted_sum_of_a_recorded_model(browser: Any, address: str, tmp_path: Path) -> None:
    record = record_small_model()
    record.save(tmp_path / "x.foci")
    with opened(browser, address, offline=False) as tab:
        tab.get_by_label("Open a file").set_input_files(tmp_path / "x.foci")
        tab.wait_for_selector(".token")
        tab.goto(f"{tab.url.split('#')[0]}#v=compute&h=L1H1&t=9")
        assert summed(tab) == pytest.approx(output_of(record, "L1H1", 9), abs=1e-3)

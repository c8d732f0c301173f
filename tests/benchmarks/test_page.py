"""The limits of the page: files that stay small, open at once and move smoothly."""

import sys
from pathlib import Path

import pytest

import foci

pytest.importorskip("playwright", reason="browser: playwright is not installed")
pytestmark = [pytest.mark.browser, pytest.mark.slow]

FOLDER = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts import each other from their own folder."""
    monkeypatch.setattr(sys, "path", [FOLDER, *sys.path])


@pytest.mark.parametrize("mask", [foci.causal, None], ids=["causal", "no mask"])
def test_512_tokens_and_144_heads(mask: foci.Mask | None) -> None:
    from benchmarks import page

    with page.open_browser() as chromium:
        found = page.measure_page(chromium, page.full_record(512, mask))
    assert found["mb"] < 12
    assert found["opens_ms"] < 2000


def test_100_000_tokens() -> None:
    from benchmarks import page

    with page.open_browser() as chromium:
        found = page.measure_page(chromium, page.long_record())
    assert found["mb"] < 60
    assert found["most_ms_of_95"] < 50

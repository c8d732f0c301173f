"""Chromium and a function that opens the page of a record, for the browser tests."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from foci.record.record import Record
from foci.view.page import document
from tests.conftest import chromium_path
from tests.view.browsing import Look, browsing, opened


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = chromium_path()
    assert path is not None
    with browsing(path) as found:
        yield found


@pytest.fixture
def look(browser: Any, tmp_path: Path) -> Look:
    """Opens a record's page: look(record, "#v=map")."""

    def open_page(record: Record, address: str = "", **options: Any) -> AbstractContextManager[Any]:
        document.write_html(record, tmp_path / "x.html")
        return opened(browser, f"file://{tmp_path / 'x.html'}{address}", **options)

    return open_page

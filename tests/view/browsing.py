"""Chromium for the tests of pages, offline, with errors collected."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

Look = Callable[..., AbstractContextManager[Any]]
SIZE = {"width": 1280, "height": 800}


@contextmanager
def browsing(path: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Slow motion: the page draws some frames after each step.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], slow_mo=50)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, address: str, *, offline: bool = True, **options: Any) -> Iterator[Any]:
    """Open a page and wait until it is ready; at the end, check that there was no error and no network request."""
    context = browser.new_context(viewport=SIZE, offline=offline, **options)
    tab = context.new_page()
    wrong: list[str] = []
    tab.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    tab.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    tab.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}"))
    if offline:
        tab.on("request", lambda request: wrong.append(request.url) if request.url.startswith(("http", "ws")) else None)
    tab.goto(address)
    tab.wait_for_selector("html[data-ready]")
    settle(tab)
    yield tab
    assert wrong == []
    context.close()


def token(tab: Any, index: int) -> Any:
    return tab.locator(f'.textpane [data-i="{index}"]')


def settle(tab: Any) -> None:
    """Wait until everything is drawn."""
    tab.evaluate(
        "() => new Promise((done) => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 50))"
    )


def until(tab: Any, selector: str, count: int) -> None:
    """Wait until a selector matches this many elements: under load a change takes many frames."""
    tab.wait_for_function("([what, n]) => document.querySelectorAll(what).length === n", arg=[selector, count])


def listed(tab: Any) -> list[tuple[str, int, str]]:
    """The rows of the weight list: token, position, weight."""
    settle(tab)
    rows = tab.eval_on_selector_all(
        ".ranked tbody tr",
        "rows => rows.map((row) => [...row.children].map((cell) => cell.innerText.trim()))",
    )
    return [(token, int(position), weight) for _, token, position, weight in rows]


def shares(tab: Any) -> dict[int, float]:
    """The listed weights by position."""
    return {position: float(weight.strip("<%")) / 100 for _, position, weight in listed(tab)}


def summed(tab: Any) -> list[float]:
    """The output vector of the "How it is computed" view."""
    tab.locator(".result .vector span").first.wait_for()
    titles = tab.locator(".result .vector span").evaluate_all("cells => cells.map((cell) => cell.title)")
    return [float(title.split("= ")[1]) for title in titles]

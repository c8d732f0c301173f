"""The Compare tab: two texts or images side by side, their difference, frames and denoising steps."""

from pathlib import Path
from typing import Any

import pytest

import foci
from tests.view import records
from tests.view.browsing import Look, opened, settle

pytestmark = pytest.mark.browser

PIXEL = """(canvas, [x, y]) => [...canvas.getContext("2d")
    .getImageData(Math.floor(canvas.width * x), Math.floor(canvas.height * y), 1, 1).data]"""


def test_two_records_are_compared(look: Look, browser: Any, tmp_path: Path) -> None:
    a, b = (
        records.of_texts("Jane", " eats", " soup", seed=1, heads=2),
        records.of_texts("Jane", " Smith", " eats", seed=2, heads=2),
    )
    foci.compare(a, b, names=("short", "long")).save(tmp_path / "x.html")
    with opened(browser, f"file://{tmp_path / 'x.html'}") as tab:
        assert tab.get_by_role("tab", selected=True).inner_text() == "Compare"
        assert tab.locator(".matrices canvas").count() == 3
        tab.get_by_label("Head", exact=True).select_option("short.L0H1")
        tab.get_by_label("short", exact=True).get_by_text("eats").click()
        settle(tab)
        rows = tab.locator(".differences tbody tr").all_inner_texts()
        one, other = a["L0H1"].dense()[0, 1], b["L0H1"].dense()[0, 2]
        change = {"Jane": other[0] - one[0], "Smith": other[1], "eats": other[2] - one[1], "soup": -one[2]}
        found = {row.split()[0]: float(row.split()[-1].replace("−", "-")) for row in rows}
        assert found == pytest.approx({word: 100 * float(value) for word, value in change.items()}, abs=0.06)
        tab.set_viewport_size({"width": 400, "height": 700})
        settle(tab)
        assert tab.evaluate("() => document.documentElement.scrollWidth") == 400
        for name in ("Text", "Map", "Heads"):
            tab.get_by_role("tab", name=name).click()
            settle(tab)


def test_a_narrow_comparison_shows_all_maps(browser: Any, tmp_path: Path) -> None:
    foci.compare(records.words_and_images(), records.words_and_images()).save(tmp_path / "x.html")
    with opened(browser, f"file://{tmp_path / 'x.html'}") as tab:
        tab.set_viewport_size({"width": 420, "height": 700})
        settle(tab)
        height, shown = tab.locator(".comparebody").evaluate("body => [body.scrollHeight, body.clientHeight]")
        assert height == shown
        view, maps = tab.locator(".compareview").bounding_box(), tab.locator(".comparebody canvas")
        assert maps.count() == 6
        last = maps.last.bounding_box()
        assert last["y"] + last["height"] <= view["y"] + view["height"]
        assert tab.evaluate("document.documentElement.scrollWidth") == 420


def compared(tab: Any) -> dict[str, float]:
    """The listed differences, in percent."""
    settle(tab)
    rows = tab.locator(".differences tbody tr").all_inner_texts()
    return {row.split()[0]: float(row.split()[-1].replace("−", "-")) for row in rows}


def test_the_images_of_two_records_are_compared(browser: Any, tmp_path: Path) -> None:
    foci.compare(*records.mirrored_images()).save(tmp_path / "x.html")
    with opened(browser, f"file://{tmp_path / 'x.html'}") as tab:
        maps = tab.locator(".maps canvas")
        assert maps.count() == 3

        def find_brightest(image: int) -> tuple[int, int]:
            settle(tab)
            cells = [(row, column) for row in range(2) for column in range(3)]
            places = {(row, column): [(column + 0.5) / 3, (row + 0.5) / 2] for row, column in cells}
            return max(cells, key=lambda cell: sum(maps.nth(image).evaluate(PIXEL, places[cell])[:3]))

        # The patches are maps, not text.
        assert tab.locator(".comparetext").first.is_hidden()
        assert tab.get_by_label("a", exact=True).all_inner_texts() == ["<s>\nA\nred\nsh\noe\n."]
        tab.get_by_label("a", exact=True).get_by_text("oe").click()
        assert (find_brightest(0), find_brightest(1)) == ((1, 2), (0, 0))
        tab.get_by_label("b", exact=True).get_by_text("red").click()
        assert (find_brightest(0), find_brightest(1)) == ((0, 1), (1, 1))
        found = compared(tab)
        assert found["1,1"] > 80
        assert found["0,1"] == -found["1,1"]
        # A patch is selected by a press on it.
        box = maps.first.bounding_box()
        tab.mouse.click(box["x"] + box["width"] / 6, box["y"] + box["height"] / 4)
        assert compared(tab) == {}


def test_words_of_cross_attention_are_chosen_in_a_comparison(browser: Any, tmp_path: Path) -> None:
    before, after = records.translation(), records.translation()
    layer = after["cross.L0"]
    layer.matrix = layer.matrix.flip(-1)  # type: ignore[union-attr]
    foci.compare(before, after).save(tmp_path / "x.html")
    with opened(browser, f"file://{tmp_path / 'x.html'}") as tab:
        tab.get_by_label("Head", exact=True).select_option("a cross.L0H1")
        queries = tab.get_by_label("Selected token")
        assert queries.all_inner_texts() == ["Ein\nMann\nschläft\n</s>"]
        queries.get_by_text("Ein").click()
        assert compared(tab) == {"A": -70, "sleeps": 70}
        queries.get_by_text("Mann").click()
        assert compared(tab) == {}
        tab.get_by_role("button", name="attended by").click()
        settle(tab)
        assert queries.all_inner_texts() == ["A\nman\nsleeps"]
        queries.get_by_text("A", exact=True).click()
        assert compared(tab) == {"Ein": -70, "schläft": 90, "</s>": 100}
        # By rank, equal weights are not all of the same color as the largest.
        tab.get_by_role("button", name="rank").click()
        settle(tab)
        panes = tab.get_by_label("a", exact=True).locator(".comparetoken")
        assert len({*panes.evaluate_all("tokens => tokens.map((token) => token.style.backgroundColor)")}) > 1


def test_the_frames_of_two_videos_are_compared(browser: Any, tmp_path: Path) -> None:
    foci.compare(*records.mirrored_images(frames=3)).save(tmp_path / "x.html")
    with opened(browser, f"file://{tmp_path / 'x.html'}") as tab:

        def find_brightest(image: int) -> tuple[int, int] | None:
            settle(tab)
            places = {(row, column): [(column + 0.5) / 3, (row + 0.5) / 2] for row in range(2) for column in range(3)}
            maps = tab.locator(".maps canvas")
            levels = {cell: sum(maps.nth(image).evaluate(PIXEL, place)[:3]) for cell, place in places.items()}
            return max(levels, key=lambda cell: levels[cell]) if len({*levels.values()}) > 1 else None

        tab.get_by_label("a", exact=True).get_by_text("oe").click()
        slider = tab.get_by_label("Frame")
        assert "1 of 3" in tab.locator(".compareview .sliders").inner_text()
        # “shoe” attends to the first frame only; mirrored, to the last.
        assert (find_brightest(0), find_brightest(1)) == ((1, 2), None)
        slider.fill("2")
        assert (find_brightest(0), find_brightest(1)) == (None, (0, 0))
        slider.fill("1")
        assert (find_brightest(0), find_brightest(1)) == (None, None)
        assert tab.locator(".maps canvas").count() == 3


def test_denoising_steps_are_compared(browser: Any, tmp_path: Path) -> None:
    foci.compare(records.denoising(), records.denoising(steps=3)).save(tmp_path / "x.html")
    with opened(browser, f"file://{tmp_path / 'x.html'}") as tab:
        tab.get_by_label("Selected token").get_by_text("shoe").click()
        slider = tab.get_by_label("Denoising step")
        assert "mean of 4" in tab.locator(".compareview .sliders").inner_text()
        assert compared(tab)["0,3"] == -17.5
        slider.fill("3")
        # At the third step, both attend to the word from the third patch.
        assert compared(tab) == {}
        assert tab.locator(".comparenumbers").inner_text().strip() == "Its weights are the same."
        slider.fill("4")
        settle(tab)
        assert "does not have this head at this step" in tab.locator(".comparebody").inner_text()
        assert tab.locator(".maps canvas").count() == 1


def test_a_comparison_says_what_its_colors_mean(browser: Any, tmp_path: Path) -> None:
    foci.compare(*records.mirrored_images()).save(tmp_path / "x.html")
    with opened(browser, f"file://{tmp_path / 'x.html'}") as tab:
        tab.get_by_label("a", exact=True).get_by_text("oe").click()
        settle(tab)
        weights, difference = tab.locator(".comparelegends .ticks").all_inner_texts()
        assert weights.split() == ["0", "50.0%", "99.9%"]
        assert difference.split() == ["−99.9", "0", "+99.9"]
        # What a comparison does not follow is not offered.
        assert tab.get_by_role("switch").count() == 0
        tab.get_by_role("tab", name="Image").click()
        settle(tab)
        assert tab.get_by_role("switch", name="words").is_visible()


def test_a_narrow_comparison_has_both_images_beside_each_other(browser: Any, tmp_path: Path) -> None:
    foci.compare(*records.mirrored_images()).save(tmp_path / "x.html")
    with opened(browser, f"file://{tmp_path / 'x.html'}") as tab:
        tab.set_viewport_size({"width": 420, "height": 700})
        settle(tab)
        first, second = (tab.locator(".maps canvas").nth(n).bounding_box() for n in range(2))
        assert first["y"] == second["y"]
        assert second["x"] + second["width"] < 420

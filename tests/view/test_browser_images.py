"""The Image tab: words light up patches, patches light up words; layers, steps, frames, heads."""

from typing import Any

import pytest

from foci.view.page import images, payload
from tests.view import records
from tests.view.browsing import Look, settle, shares

pytestmark = pytest.mark.browser

PIXEL = """(canvas, [x, y]) => [...canvas.getContext("2d")
    .getImageData(Math.floor(canvas.width * x), Math.floor(canvas.height * y), 1, 1).data]"""


def brightness(tab: Any, column: int, row: int, image: int = 0) -> int:
    settle(tab)
    return int(sum(tab.locator(".image").nth(image).evaluate(PIXEL, [(column + 0.5) / 3, (row + 0.5) / 2])[:3]))


def brightest(tab: Any, image: int = 0) -> tuple[int, int]:
    cells = [(row, column) for row in range(2) for column in range(3)]
    return max(cells, key=lambda cell: brightness(tab, cell[1], cell[0], image))


def word(tab: Any, text: str) -> Any:
    return tab.locator(".words .chip", has_text=text).first


@pytest.mark.parametrize("is_long", [False, True])
def test_a_word_lights_up_its_patch_and_a_patch_its_words(
    is_long: bool, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_long:
        monkeypatch.setattr(payload, "MAX_EXACT_LENGTH", 1)
        monkeypatch.setattr(payload, "MAX_EXACT_ENTRIES", 1)
        monkeypatch.setattr(payload, "PAYLOAD_TOP_KEYS", 1)
    with look(records.words_and_images()) as tab:
        assert tab.get_by_role("tab", selected=True).inner_text() == "Image"
        word(tab, "red").hover()
        assert brightest(tab) == (0, 1)
        word(tab, "shoe").hover()
        assert brightest(tab) == (1, 2)
        settle(tab)
        box = tab.locator(".image").bounding_box()
        tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 4)
        settle(tab)
        assert tab.locator(".image").bounding_box() == box
        tints = tab.eval_on_selector_all(
            ".words .chip",
            "chips => chips.filter((chip) => parseFloat(chip.title) > 50).map((chip) => chip.innerText.trim())",
        )
        assert tints == ["red"]
        tab.mouse.move(2, 2)
        assert brightest(tab) == (1, 2)


def test_several_images_and_the_frames_of_a_video(look: Look) -> None:
    with look(records.words_and_images(images=3)) as tab:
        assert tab.locator(".images figcaption").all_inner_texts() == ["Image 1", "Image 2", "Image 3"]
        word(tab, "red").hover()
        assert [brightest(tab, image) for image in range(3)] == [(0, 1)] * 3
    with look(records.words_and_images(frames=3), "#f=2") as tab:
        assert tab.locator(".image").count() == 1
        assert "3 of 3" in tab.locator(".sliders").inner_text()
        word(tab, "shoe").hover()
        # It attends to the first frame only.
        assert brightness(tab, 2, 1) == brightness(tab, 0, 0)
        tab.get_by_label("Frame").fill("0")
        word(tab, "shoe").hover()
        assert brightest(tab) == (1, 2)


def test_layers_heads_scale_and_opacity(look: Look) -> None:
    with look(records.words_and_images()) as tab:
        assert tab.locator(".headmap").count() == 2
        tab.get_by_label("Layer").fill("1")
        settle(tab)
        assert "L0, mean of 2 heads" in tab.locator(".sliders").inner_text()
        tab.locator(".headmap").nth(1).click()
        settle(tab)
        assert tab.locator(".headmap[aria-pressed=true]").inner_text() == "H1"
        assert "L0H1" in tab.locator(".sliders").inner_text()
        tab.locator(".headmap").nth(1).click()
        word(tab, "red").click()
        tab.get_by_role("button", name="fixed").click()
        settle(tab)
        ticks = tab.locator(".legend .ticks").inner_text()
        tab.get_by_label("Layer").fill("2")
        settle(tab)
        assert tab.locator(".legend .ticks").inner_text() == ticks
        dark = brightness(tab, 0, 0)
        tab.get_by_label("Opacity of the attention").fill("0")
        assert brightness(tab, 0, 0) == 600 > dark


def test_the_mean_of_all_layers_and_the_map_of_each(look: Look) -> None:
    record = records.words_and_images()
    with look(record) as tab:
        tab.get_by_label("Layer").fill("0")
        word(tab, "red").click()
        tab.mouse.move(2, 2)
        settle(tab)
        assert "mean of 2 layers" in tab.locator(".sliders").inner_text()
        assert tab.locator(".headmap").all_inner_texts() == ["L0", "L1"]
        patch = int(record.labels["input"].segments[0].positions[0, 1])
        assert shares(tab)[patch] == pytest.approx(float(record.image_map("red")[0, 1]), abs=1e-3)
        tab.locator(".headmap").nth(1).click()
        settle(tab)
        assert "L1, mean of 2 heads" in tab.locator(".sliders").inner_text()
        assert tab.locator(".headmap").all_inner_texts() == ["H0", "H1"]


def test_the_small_maps_are_those_of_the_chosen_image(look: Look) -> None:
    with look(records.words_and_images(images=2)) as tab:

        def find_colors() -> set[tuple[int, ...]]:
            settle(tab)
            places = [((column + 0.5) / 3, (row + 0.5) / 2) for row in range(2) for column in range(3)]
            canvas = tab.locator(".headmap canvas").first
            return {tuple(canvas.evaluate(PIXEL, list(place))) for place in places}

        # “shoe”, which is selected first, attends to a patch of the first image only.
        assert len(find_colors()) == 2
        tab.get_by_role("button", name="Image 2").click()
        assert len(find_colors()) == 1
        assert tab.get_by_role("button", name="Image 2").get_attribute("aria-pressed") == "true"


def test_without_a_picture_the_grid_is_drawn(look: Look) -> None:
    with look(records.words_and_images(pictures=False)) as tab:
        word(tab, "shoe").hover()
        settle(tab)
        assert brightness(tab, 2, 1) < brightness(tab, 0, 0)


def test_denoising_steps_have_a_slider(look: Look) -> None:
    with look(records.denoising()) as tab:
        assert "mean of 4" in tab.locator(".sliders").inner_text()
        slider = tab.get_by_label("Denoising step")
        slider.fill("3")
        settle(tab)
        assert "3 of 4" in tab.locator(".sliders").inner_text()
        assert shares(tab)[2] == pytest.approx(0.8, abs=1e-3)
        box = tab.locator(".image").bounding_box()
        tab.mouse.move(box["x"] + box["width"] * 5 / 8, box["y"] + 4)
        settle(tab)
        assert shares(tab) == pytest.approx({0: 0.1, 1: 0.1, 2: 0.8}, abs=2e-3)
    with look(records.denoising().label(["<s>", "shoe", ""], name="prompt")) as tab:
        # The padding of the prompt is not a word.
        assert tab.locator(".words .chip").all_inner_texts() == ["<s>", "shoe"]
    with look(records.denoising(), "#k=99&v=text") as tab:
        assert tab.get_by_role("tab", selected=True).inner_text() == "Text"


def test_a_narrow_page_shows_all_maps(look: Look) -> None:
    """The page is as long as what it shows: no map is cut off, and none scrolls out of sight in it."""
    script = "view => [view.scrollHeight, view.clientHeight]"
    with look(records.words_and_images(heads=8)) as tab:
        tab.set_viewport_size({"width": 420, "height": 700})
        settle(tab)
        height, shown = tab.locator(".imageview").evaluate(script)
        assert height == shown
        assert tab.locator(".headmap").count() == 8
        bottom = tab.locator(".imageview").bounding_box()
        last = tab.locator(".headmap").last.bounding_box()
        assert last["y"] + last["height"] <= bottom["y"] + bottom["height"]
        heights = {tab.locator(".imageview").evaluate(script)[0] for _ in range(3) if not settle(tab)}
        assert heights == {height}


def test_a_step_without_this_head_says_so_above_the_image(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    # The file has the mean of the heads only.
    monkeypatch.setattr(images, "MAX_STEP_NUMBERS", 200)
    with look(records.denoising(), "#h=cross.L0H1&k=2") as tab:
        tab.set_viewport_size({"width": 420, "height": 700})
        settle(tab)
        note = tab.locator(".imagenote")
        assert note.inner_text().startswith("This file has no weights of this head at this step")
        above, below = note.bounding_box(), tab.locator(".image").bounding_box()
        assert note.evaluate("note => note.scrollHeight <= note.clientHeight")
        assert above["y"] + above["height"] <= below["y"]
        assert "Of a single denoising step" in tab.locator(".right .note").inner_text()

"""Details of the page in Chromium: numbers of sparse records, sinks, keys, overlaps, uniform attention, rollout."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foci.record.labels import Labels
from foci.record.layer import Layer
from foci.record.record import Record
from foci.view.page import payload
from tests.view import records
from tests.view.browsing import Look, listed, settle, token
from tests.view.pages import lazy

pytest.importorskip("playwright", reason="browser: playwright is not installed")
pytestmark = pytest.mark.browser

SHORT = {"width": 400, "height": 800}


def overlap(tab: Any, selector: str) -> bool:
    """Whether the texts of two of these elements overlap."""
    script = """elements => {
        const boxes = elements.map((element) => {
            const range = document.createRange();
            range.selectNodeContents(element);
            return range.getBoundingClientRect();
        });
        const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
        return boxes.some((a, i) => boxes.slice(i + 1).some((b) => meet(a, b)));
    }"""
    return bool(tab.locator(selector).evaluate_all(script))


def translate(layers: int = 2, heads: int = 4, length: int = 9) -> Record:
    """An encoder-decoder with random weights and words of two tokens."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(layers):
        for stack, queries, keys in (
            ("encoder", "source", "source"),
            ("decoder", "target", "target"),
            ("cross", "target", "source"),
        ):
            matrix = torch.randn(1, heads, length, length, generator=generator).softmax(-1)
            made.append(Layer(f"{stack}.{i}", stack, i, matrix=matrix, queries=queries, keys=keys))
    texts = [f" w{i}" if i % 2 == 0 else "ord" for i in range(length)]
    words = [i // 2 for i in range(length)]
    labels = {name: Labels.tokens([texts], words=[words]) for name in ("source", "target")}
    return Record({layer.name: layer for layer in made}, labels, model="translation", answer=" ".join(texts) * 4)


def test_the_entropy_of_a_word_in_a_sparse_record_is_that_of_all_its_tokens(
    look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload, "MAX_EXACT_ENTRIES", 0)
    record = lazy(150, layers=1)
    record.labels["input"] = Labels.tokens(record.labels["input"].texts, [[i // 3 for i in range(150)]])
    expected = float(record["L0H1"].entropy()[0, 60:63].mean())
    with look(record, "#h=L0H1&t=60") as tab:
        assert f"{expected:.2f} nats mean of 3 tokens" in tab.locator(".facts").inner_text()
    # A token alone has its own entropy.
    with look(record, "#h=L0H1&t=60&w=0") as tab:
        own = float(record["L0H1"].entropy()[0, 60])
        assert f"{own:.2f} nats ≈" in tab.locator(".facts").inner_text()


def test_the_entropy_of_a_word_counts_words_as_the_list_does(look: Look) -> None:
    with look(records.jane(), "#h=L0H1&t=3") as tab:
        weights = torch.tensor([float(weight.strip("%")) / 100 for *_, weight in listed(tab)])
        nats = -float((weights * weights.log()).sum())
        found = tab.locator(".facts").inner_text().split("entropy")[1].split()
        assert float(found[0]) == pytest.approx(nats, abs=0.02)
        assert found[-1] == "words"


def test_a_short_input_has_no_sinks(look: Look) -> None:
    matrix = torch.zeros(1, 1, 20, 20)
    matrix[..., 0] = 1.0
    labels = Labels.tokens([[f" w{i}" for i in range(20)]])
    with look(Record({"l": Layer("l", matrix=matrix)}, {"input": labels}, model="Short"), "#t=5") as tab:
        assert not tab.get_by_role("switch", name="hide sinks").is_visible()
        assert "sink" not in tab.locator("body").inner_text()


def test_only_the_first_token_and_delimiters_are_sinks(look: Look) -> None:
    matrix = torch.zeros(1, 1, 60, 60)
    matrix[..., 0], matrix[..., 7], matrix[..., 9] = 0.2, 0.3, 0.5
    texts = [f" w{i}" for i in range(60)]
    texts[7] = ","
    with look(Record({"l": Layer("l", matrix=matrix)}, {"input": Labels.tokens([texts])}, model="S"), "#t=5") as tab:
        assert tab.locator(".sinkshare").inner_text() == "50.0% of its attention is in sinks"
        assert "An attention sink is" in tab.locator(".sinkshare").get_attribute("title")
        assert "“w0”, “,”" in tab.locator(".facts").inner_text()


def test_uniform_attention_is_pale(look: Look) -> None:
    uniform = Record({"l": Layer("l", matrix=torch.full((1, 1, 12, 12), 1 / 12))}, model="Uniform")
    for view in ("text", "heads", "map"):
        with look(uniform, f"#v={view}&t=3") as tab:
            if view == "text":
                color = token(tab, 8).evaluate("element => getComputedStyle(element).backgroundColor")
                levels = [int(part) for part in color.strip("rgb()").split(",")]
            else:
                script = """canvas => [...canvas.getContext("2d").getImageData(
                    Math.floor(canvas.width * 0.6), Math.floor(canvas.height * 0.6), 1, 1).data].slice(0, 3)"""
                levels = tab.locator(".thumb canvas, canvas.map").first.evaluate(script)
            assert sum(levels) > 500, (view, levels)


def test_escape_closes_the_help(look: Look) -> None:
    with look(records.jane()) as tab:
        tab.keyboard.press("?")
        assert tab.locator("dialog").is_visible()
        tab.keyboard.press("Escape")
        assert not tab.locator("dialog").is_visible()
        assert "t=" not in tab.url


def test_lines_open_at_the_selected_word(look: Look) -> None:
    with look(lazy(100, layers=1), "#v=lines&h=L0H0&t=80") as tab:
        settle(tab)
        assert tab.locator(".linesframe").evaluate("frame => frame.scrollTop") > 500


def test_steps_keep_the_selected_word(look: Look) -> None:
    record = lazy(30, layers=1)
    record.prompt = 4
    with look(record, "#h=L0H0&t=12") as tab:
        tab.get_by_role("tab", name="Steps").click()
        settle(tab)
        title = tab.locator(".ranked-title").inner_text()
        assert "Step 10 of 26" in tab.locator(".status").inner_text()
        tab.get_by_role("tab", name="Text").click()
        settle(tab)
        assert tab.locator(".ranked-title").inner_text() == title
        # A word of the prompt has no step; it is selected again afterwards.
        token(tab, 1).click()
        tab.mouse.move(5, 5)
        title = tab.locator(".ranked-title").inner_text()
        tab.get_by_role("tab", name="Steps").click()
        tab.get_by_role("tab", name="Text").click()
        settle(tab)
        assert tab.locator(".ranked-title").inner_text() == title


def test_shift_click_selects_no_text(look: Look) -> None:
    with look(records.jane(), "#t=1") as tab:
        token(tab, 1).click()
        token(tab, 5).click(modifiers=["Shift"])
        assert tab.evaluate("() => String(getSelection())") == ""


def test_nothing_overlaps_at_both_widths(look: Look) -> None:
    with look(translate(), "#v=heads") as tab:
        assert tab.locator(".caption").first.inner_text().split()[0] == "L0H0"
        assert not overlap(tab, ".caption")
        tab.get_by_role("button", name="sorted").click()
        settle(tab)
        assert not overlap(tab, ".caption")
        tab.set_viewport_size(SHORT)
        settle(tab)
        assert not overlap(tab, ".caption")
        for view in ("Text", "Lines", "Alignment", "How it is computed", "Steps"):
            tab.get_by_role("tab", name=view).click()
            settle(tab)
            assert not overlap(tab, ".tools, .paneframe h3"), view
            wide = "frames => frames.every((frame) => frame.scrollWidth <= frame.clientWidth)"
            assert tab.locator(".view, .worked, .linesframe, .alignframe").evaluate_all(wide), view


def test_the_title_counts_the_layers_of_each_stack(look: Look) -> None:
    with look(translate()) as tab:
        assert tab.locator("h1").inner_text() == "translation"
        about = tab.locator(".about")
        assert about.inner_text() == "2 encoder + 2 decoder + 2 cross-attention layers · 24 heads"
        assert about.get_attribute("title").endswith("source: 9 tokens, target: 9 tokens")


def test_scales_have_tooltips(look: Look) -> None:
    with look(records.jane()) as tab:
        assert "factor of ten" in tab.get_by_role("button", name="log").get_attribute("title")
        assert "order of the weights" in tab.get_by_role("button", name="rank").get_attribute("title")


def test_rollout_of_an_encoder_decoder_reaches_the_source(look: Look) -> None:
    record = translate()
    expected = record.rollout(4)
    with look(record, "#v=rollout&h=cross.L1H0&t=4") as tab:
        assert tab.locator(".paneframe h3").all_inner_texts()[0].startswith("source")
        share = tab.locator(".paneframe .axis").first.inner_text()
        assert float(share.split("%")[0]) == pytest.approx(100 * float(expected.sum()), rel=0.01)
        found = [
            float(item.split("\n")[-1].rstrip("%")) / 100 for item in tab.locator(".rolllist li").all_inner_texts()
        ]
        assert found[0] == pytest.approx(float(expected.max()), rel=0.06)


def record_sound() -> Record:
    """One answered word that attends to the second of four frames of a tone."""
    samples = (torch.arange(3200) / 5).sin().mul(20_000).to(torch.int16)
    source = Labels("frames", (("0.00", "0.10", "0.20", "0.30"),), seconds=0.1, sounds=samples[None], rate=8000)
    weights = torch.tensor([0.1, 0.7, 0.1, 0.1]).view(1, 1, 1, 4)
    layers = {
        "encoder": Layer("encoder", "encoder", matrix=torch.eye(4)[None, None], queries="source", keys="source"),
        "cross": Layer("cross", "cross", matrix=weights, queries="heard", keys="source"),
    }
    labels = {"source": source, "heard": Labels.tokens([["seven"]])}
    return Record(layers, labels, model="speech", answer="seven")


def test_a_sound_is_drawn_and_can_be_played(look: Look) -> None:
    with look(record_sound()) as tab:
        assert tab.locator(".soundview").is_visible()
        tab.wait_for_function("() => document.querySelector('audio').duration > 0")
        assert tab.locator("audio").evaluate("audio => audio.duration") == pytest.approx(0.4)
        assert listed(tab)[0] == ("0.10 s", 1, "70.0%")
        canvas = tab.locator("canvas.sound")
        box = canvas.bounding_box()
        canvas.click(position={"x": 16 + (box["width"] - 32) * 0.375, "y": 50})
        tab.mouse.move(5, 5)
        settle(tab)
        assert tab.locator(".ranked-title").inner_text() == "“0.10 s” is attended to by"
        assert listed(tab) == [("seven", 0, "70.0%")]
        tab.locator(".chip").first.click()
        settle(tab)
        assert tab.locator(".ranked-title").inner_text() == "“seven” attends to"


def test_a_word_lights_up_its_time_and_a_time_tints_its_words(look: Look) -> None:
    record = record_sound()
    matrix = torch.tensor([[0.05, 0.85, 0.05, 0.05], [0.05, 0.05, 0.05, 0.85]]).view(1, 1, 2, 4)
    record.layers["cross"] = replace(record.layers["cross"], matrix=matrix)
    record.labels["heard"] = Labels.tokens([["seven", " one"]])
    with look(Record(record.layers, record.labels, model="speech")) as tab:
        canvas = tab.locator("canvas.sound")
        box = canvas.bounding_box()

        def find_lit_frame() -> int:
            settle(tab)
            # Above the tone, where the recording is silent.
            script = """(canvas, x) => canvas.getContext("2d")
                .getImageData(canvas.width * x, canvas.height * 0.2, 1, 1).data.slice(0, 3).reduce((a, b) => a + b)"""
            places = [(16 + (box["width"] - 32) * (frame + 0.5) / 4) / box["width"] for frame in range(4)]
            levels = [canvas.evaluate(script, place) for place in places]
            return levels.index(max(levels))

        words = tab.locator(".soundview .chip")
        words.nth(1).hover()
        assert find_lit_frame() == 3
        words.nth(0).hover()
        assert find_lit_frame() == 1
        tab.mouse.move(box["x"] + 16 + (box["width"] - 32) * 0.875, box["y"] + 40)
        settle(tab)
        assert [words.nth(i).get_attribute("title") for i in range(2)] == ["5%", "85.0%"]
        assert words.nth(1).evaluate("word => word.style.backgroundColor") != ""
        tab.mouse.move(2, 2)
        settle(tab)
        assert words.nth(1).get_attribute("title") == ""


@pytest.mark.parametrize("width", [1280, 420])
def test_a_sound_among_words(width: int, look: Look) -> None:
    """The frames of a recording lie in the middle of a text."""
    with look(records.words_and_sound()) as tab:
        tab.set_viewport_size({"width": width, "height": 900})
        tab.get_by_role("tab", name="Sound").click()
        settle(tab)
        words = tab.locator(".soundview .chip")
        assert words.all_inner_texts() == ["What", "do", "you", "hear", "?", "First", "low", ",", "then", "high", "."]
        canvas = tab.locator("canvas.sound")
        box = canvas.bounding_box()
        script = """(canvas, x) => canvas.getContext("2d")
            .getImageData(canvas.width * x, canvas.height * 0.1, 1, 1).data.slice(0, 3).reduce((a, b) => a + b)"""

        def find_lit_frames() -> list[int]:
            settle(tab)
            places = [(16 + (box["width"] - 32) * (frame + 0.6) / 8) / box["width"] for frame in range(8)]
            levels = [canvas.evaluate(script, place) for place in places]
            return [frame for frame, level in enumerate(levels) if level > max(levels) / 2]

        words.get_by_text("low").hover()
        assert find_lit_frames() == [0, 1, 2, 3]
        words.get_by_text("high").hover()
        assert find_lit_frames() == [4, 5, 6, 7]
        tab.mouse.move(box["x"] + 16 + (box["width"] - 32) * 5.5 / 8, box["y"] + 40)
        settle(tab)
        shares = {word.inner_text(): float(word.get_attribute("title").strip("<%") or 0) for word in words.all()}
        assert max(shares, key=lambda word: shares[word]) == "high"
        canvas.focus()
        tab.mouse.move(2, 2)
        tab.keyboard.press("Enter")
        settle(tab)
        assert tab.locator(".ranked-title").inner_text() == "“0.00s” is attended to by"
        assert tab.evaluate("document.documentElement.scrollWidth") == width


def test_a_spectrogram_without_a_recording_lights_up(look: Look) -> None:
    with look(records.words_and_spectrograms()) as tab:
        assert tab.get_by_role("tab", selected=True).inner_text() == "Sound"
        assert not tab.locator("audio").is_visible()
        words = tab.locator(".soundview .chip")
        assert words.all_inner_texts() == ["What", "do", "you", "hear", "?", "First", "low", ",", "then", "high", "."]
        canvas = tab.locator("canvas.sound")
        script = """(canvas, [x, y]) => canvas.getContext("2d")
            .getImageData(canvas.width * x, canvas.height * y, 1, 1).data.slice(0, 3).reduce((a, b) => a + b)"""
        words.get_by_text("high").hover()
        settle(tab)
        # Half-way up, where neither of the two sounds is.
        assert canvas.evaluate(script, [0.3, 0.4]) < canvas.evaluate(script, [0.7, 0.4])
        words.get_by_text("low").hover()
        settle(tab)
        assert canvas.evaluate(script, [0.3, 0.4]) > canvas.evaluate(script, [0.7, 0.4])
        # The low sound lies at the bottom.
        assert canvas.evaluate(script, [0.3, 0.6]) > canvas.evaluate(script, [0.3, 0.1])


@pytest.mark.parametrize("width", [1280, 420])
@pytest.mark.parametrize("make", [records.words_and_sound, records.words_and_spectrograms])
def test_the_layers_and_heads_of_a_sound(make: Callable[[], Record], width: int, look: Look) -> None:
    record = make()
    matrix = record.layers["layers.1"].matrix
    assert matrix is not None
    # In one head of the second layer, "low" attends to everything alike.
    matrix = matrix.clone()
    matrix[:, 1, 14, :15] = 1 / 15
    record.layers["layers.1"] = replace(record.layers["layers.1"], matrix=matrix)
    with look(record, "#v=sound&h=L1&t=14") as tab:
        tab.set_viewport_size({"width": width, "height": 800})
        maps = tab.locator(".headmap")

        def count_colors() -> list[int]:
            settle(tab)
            script = """(canvas) => new Set([0.2, 0.8].map((x) => [...canvas.getContext("2d")
                .getImageData(canvas.width * x, canvas.height / 2, 1, 1).data].join())).size"""
            return [one.evaluate(script) for one in tab.locator(".headmap canvas").all()]

        assert count_colors() == [2, 1]
        assert maps.all_inner_texts() == ["H0", "H1"]
        maps.nth(1).click()
        settle(tab)
        assert tab.locator(".headmap[aria-pressed=true]").inner_text() == "H1"
        assert "L1H1" in tab.locator(".sliders").inner_text()
        # Another layer keeps the head; a second press on it shows the mean.
        tab.get_by_label("Layer").fill("1")
        assert count_colors() == [2, 2]
        assert "L0H1" in tab.locator(".sliders").inner_text()
        maps.nth(1).click()
        settle(tab)
        assert "L0, mean of 2 heads" in tab.locator(".sliders").inner_text()
        tab.get_by_label("Layer").fill("0")
        settle(tab)
        assert "mean of 2 layers" in tab.locator(".sliders").inner_text()
        assert maps.all_inner_texts() == ["L0", "L1"]
        canvas, last = tab.locator("canvas.sound").bounding_box(), maps.last.bounding_box()
        view = tab.locator(".soundview").bounding_box()
        assert canvas["height"] >= 120
        assert canvas["y"] + canvas["height"] <= maps.first.bounding_box()["y"]
        assert last["y"] + last["height"] <= view["y"] + view["height"]


def test_the_layers_of_a_sound_have_other_queries(look: Look) -> None:
    with look(record_sound()) as tab:
        assert not tab.locator(".headmap").count()
        slider = tab.get_by_label("Layer")
        assert slider.get_attribute("max") == "2"
        slider.fill("1")
        settle(tab)
        assert "encoder" in tab.locator(".sliders").inner_text()
        assert tab.locator("canvas.sound").is_visible()


def test_a_sound_is_saved_with_its_record(tmp_path: Path) -> None:
    record_sound().save(tmp_path / "x.foci")
    loaded, made = Record.load(tmp_path / "x.foci").labels["source"], record_sound().labels["source"]
    assert torch.equal(loaded.sounds, made.sounds)
    assert loaded.rate == 8000


def test_the_legend_of_an_image_is_that_of_its_patches(look: Look) -> None:
    record = records.image()
    layer = record.layers["blocks.0"]
    layer.matrix[0, 0, 0] = torch.tensor([0.4, 0.0, 0.0, 0.0, 0.0, 0.1, 0.5])
    with look(record) as tab:
        assert "attention weight of each patch" in tab.locator(".legend-title").inner_text()
        assert tab.locator(".legend .ticks span").last.inner_text() == "50.0%"
        first = tab.locator(".legend .strip span").first
        grey = first.evaluate("cell => cell.style.backgroundColor")
        tab.get_by_role("button", name="color").click()
        settle(tab)
        assert tab.locator(".legend .strip span").first.evaluate("cell => cell.style.backgroundColor") != grey

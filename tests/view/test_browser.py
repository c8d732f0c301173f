"""The page in Chromium, from disk and offline."""

import csv
import io
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from foci.record.labels import Labels
from foci.record.layer import Layer
from foci.record.record import Record
from foci.view.page import payload
from tests.view import records
from tests.view.browsing import Look, listed, opened, settle, shares, summed, token, until
from tests.view.pages import lazy, output_of, record_small_model

pytest.importorskip("playwright", reason="browser: playwright is not installed")
pytestmark = pytest.mark.browser


def near(found: dict[int, float], expected: Tensor) -> None:
    """Check that the listed weights equal the expected ones to the displayed digits."""
    for position, share in found.items():
        assert share == pytest.approx(float(expected[position]), rel=0.051, abs=1e-4)


def background(tab: Any, index: int) -> str:
    settle(tab)
    tab.wait_for_timeout(150)
    return str(token(tab, index).evaluate("element => getComputedStyle(element).backgroundColor"))


CLEAR = "rgba(0, 0, 0, 0)"


def test_hover_click_and_add(look: Look) -> None:
    row = torch.tensor(records.HUNGRY) / 100
    with look(records.jane(), "#h=L0H1&w=0&t=") as tab:
        token(tab, 3).hover()
        assert tab.locator(".ranked-title").inner_text() == "“hun” attends to"
        near(shares(tab), row[3])
        assert background(tab, 1) != CLEAR
        assert background(tab, 5) == CLEAR
        token(tab, 2).click()
        tab.mouse.move(5, 5)
        near(shares(tab), row[2])
        assert listed(tab)[0] == ("is", 2, "40.0%")
        token(tab, 3).click(modifiers=["Shift"])
        tab.mouse.move(5, 5)
        near(shares(tab), row[2] + row[3])
        token(tab, 3).click(modifiers=["Shift"])
        tab.mouse.move(5, 5)
        near(shares(tab), row[2])


def test_queries_that_attend_to_a_key(look: Look) -> None:
    column = (torch.tensor(records.HUNGRY) / 100)[:, 1]
    with look(records.jane(), "#h=L0H1&w=0&t=1") as tab:
        tab.get_by_role("button", name="attended by").click()
        near(shares(tab), column)
        assert tab.locator(".ranked-title").inner_text() == "“Jane” is attended to by"
        assert len(listed(tab)) == 6


def test_words_are_grouped_as_the_record_groups_them(look: Look) -> None:
    record = records.jane()
    words = [(0, 1), (1, 2), (2, 3), (3, 5), (5, 6), (6, 7)]
    expected = record["L0"].grouped(words, words)[0, 1]
    assert isinstance(expected, Tensor)
    with look(record, "#h=L0H1&t=3") as tab:
        assert tab.locator(".ranked-title").inner_text() == "“hungry” attends to"
        starts = {start: u for u, (start, _) in enumerate(words)}
        for position, share in shares(tab).items():
            assert share == pytest.approx(float(expected[3, starts[position]]), rel=0.051)
        tab.get_by_role("switch", name="words").click()
        assert tab.locator(".ranked-title").inner_text() == "“hun” attends to"


def test_mean_of_several_heads(look: Look) -> None:
    record = lazy(12)
    with look(record, "#h=L1&t=9") as tab:
        assert "L1, mean of 4 heads" in tab.locator(".facts").inner_text()
        near(shares(tab), record["L1"].dense()[0, :, 9].mean(0))
        tab.locator('.cell[aria-label="L0H2"]').click()
        tab.locator('.cell[aria-label="L0H3"]').click(modifiers=["Shift"])
        near(shares(tab), record["L0"].dense()[0, 2:, 9].mean(0))


def test_a_long_text_shows_top_keys(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "MAX_EXACT_ENTRIES", 0)
    record = lazy(400, layers=1)
    with look(record, "#h=L0H1&t=399") as tab:
        assert "the exact weights of the 16 top keys of each query" in tab.locator(".right .note").inner_text()
        near(shares(tab), record["L0H1"].row(0, 399))
        assert tab.locator(".minimap").is_visible()
        # The line of the selected token is visible, although the text is longer than the window.
        assert token(tab, 399).is_visible()
        assert tab.locator(".token").count() < 400
        tab.locator(".textpane").evaluate("pane => pane.scrollTop = 0")
        settle(tab)
        assert token(tab, 0).is_visible()
        tab.get_by_role("button", name="attended by").click()
        _values, keys = record["L0H1"].top(16)
        expected = {i for i in range(400) if 399 in keys[0, i]}
        assert set(shares(tab)) <= expected


def test_search_finds_all_matches(look: Look) -> None:
    with look(lazy(120, layers=1)) as tab:
        tab.keyboard.press("/")
        tab.keyboard.type("OLD CAS")
        settle(tab)
        assert tab.locator(".tools .count").inner_text() == "1 of 6"
        assert tab.locator(".token.found").first.inner_text() == "old"
        tab.keyboard.press("Enter")
        assert tab.locator(".tools .count").inner_text() == "2 of 6"
        tab.keyboard.press("Shift+Enter")
        assert tab.locator(".tools .count").inner_text() == "1 of 6"
        tab.locator(".find").fill("nowhere")
        settle(tab)
        assert tab.locator(".tools .count").inner_text() == "not found"


def test_hidden_sinks_show_their_share(look: Look) -> None:
    matrix = torch.full((1, 1, 60, 60), 0.4 / 59)
    matrix[..., 0] = 0.6
    texts = [f" w{i}" for i in range(60)]
    record = Record({"l": Layer("l", matrix=matrix)}, {"input": Labels.tokens([texts])}, model="Sink")
    with look(record, "#t=5") as tab:
        assert tab.locator(".sinkshare").inner_text() == "60.0% of its attention is in sinks"
        assert listed(tab)[0] == ("w0", 0, "60.0%")
        tab.get_by_role("switch", name="hide sinks").click()
        assert 0 not in shares(tab)
        assert tab.locator(".sinkshare").inner_text() == "60.0% of its attention is hidden in sinks"
        assert "sink" in token(tab, 0).get_attribute("class")
        tab.keyboard.press("Escape")
        settle(tab)
        assert tab.locator(".sinkshare").inner_text() == "60.0% of this head’s attention is hidden in sinks"


def test_a_learned_sink_shows_its_weight(look: Look) -> None:
    record = lazy(10, layers=1, sink=torch.tensor([4.0, 0.0, 0.0, 0.0]))
    with look(record, "#h=L0H0&t=6") as tab:
        mass = float(record["L0H0"].sink_mass()[0, 6])
        said = tab.locator(".facts").inner_text().split("in the learned sink")[1].split("%")[0]
        assert float(said) / 100 == pytest.approx(mass, rel=0.051)


def test_color_scale_changes_the_legend(look: Look) -> None:
    with look(records.jane(), "#h=L0H1&t=3&w=0") as tab:
        linear = background(tab, 0)
        assert tab.locator(".legend .ticks span").all_inner_texts() == ["0", "35.0%", "70.0%"]
        tab.keyboard.press("c")
        settle(tab)
        assert tab.locator(".legend .ticks span").last.inner_text() == "70.0%"
        assert tab.locator(".legend .ticks span").count() == 5
        assert background(tab, 0) != linear
        tab.keyboard.press("c")
        settle(tab)
        assert tab.locator(".legend .ticks span").all_inner_texts() == ["smallest", "median", "largest"]


def test_heads_are_drawn_sorted_and_grouped(look: Look) -> None:
    record = lazy(30, layers=3, heads=4, kv_heads=2)
    with look(record, "#v=heads") as tab:
        assert tab.locator(".thumb").count() == 12
        assert tab.locator(".thumbs .group").count() == 6
        tab.locator("select").first.select_option("previous_token")
        tab.get_by_role("button", name="sorted").click()
        settle(tab)
        scores = record.scores()["previous_token"]
        order = [f"L{i // 4}H{i % 4}" for i in scores.flatten().argsort(descending=True).tolist()]
        names = tab.eval_on_selector_all(".thumb", "thumbs => thumbs.map((thumb) => thumb.dataset.name)")
        assert names[:3] == order[:3]
        tab.locator(".thumb").first.dblclick()
        settle(tab)
        assert tab.locator(".mapview").is_visible()
        assert "h=" + order[0] in wait_for_address(tab)


def wait_for_address(tab: Any) -> str:
    tab.wait_for_timeout(250)
    return str(tab.url)


def test_the_map_zooms_and_shows_entries(look: Look) -> None:
    record = lazy(60, layers=1)
    with look(record, "#v=map&h=L0H2") as tab:
        assert tab.locator(".tools .count").inner_text() == "Entries: every cell is one weight"
        box = tab.locator(".map").bounding_box()
        tab.mouse.move(box["x"] + 116 + 5, box["y"] + 92 + 5)
        settle(tab)
        weight = float(record["L0H2"].row(0, 0)[0])
        assert tab.locator(".tip-value").inner_text() == "100%"
        assert weight == 1
        before = wait_for_address(tab)
        tab.mouse.wheel(0, -600)
        settle(tab)
        assert "z=" in wait_for_address(tab)
        assert tab.url != before
        tab.locator(".map").focus()
        tab.keyboard.press("0")
        assert "z=" not in wait_for_address(tab)


def test_the_map_of_a_long_text_has_blocks_then_entries(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "MAX_EXACT_ENTRIES", 0)
    monkeypatch.setattr(payload, "PICTURE_SIDES", (100,))
    record = lazy(1000, layers=1, heads=2)
    with look(record, "#v=map&h=L0H1") as tab:
        told = tab.locator(".tools .count")
        assert told.inner_text() == "Picture: a block is 10 × 10 tokens"
        assert tab.get_by_role("button", name="max").is_enabled()
        for _ in range(4):
            tab.get_by_role("button", name="+", exact=True).click()
        settle(tab)
        assert "overlaid with the exact 16 top keys of each query" in told.inner_text()


def test_lines_between_two_columns(look: Look) -> None:
    with look(records.jane(), "#v=lines&h=L0H1&w=0&t=3") as tab:
        assert tab.locator(".linesframe path").count() == 6
        assert "hun attends to Jane: 70.0% (L0H1)" in tab.locator(".linesframe title").all_text_contents()
        tab.locator(".lineword", has_text="[SEP]").first.click()
        tab.mouse.move(2, 2)
        until(tab, ".linesframe path", 2)


def test_alignment_marks_the_largest_weight(look: Look) -> None:
    with look(records.translation(), "#v=align&h=cross.L0H1") as tab:
        titles = tab.locator(".alignframe title").all_text_contents()
        assert "Mann attends to man: 80.0%" in titles
        assert tab.locator('.alignframe rect[stroke-width="1.6"]').count() == 4
        tab.locator(".alignrow", has_text="Mann").click()
        tab.mouse.move(2, 2)
        assert listed(tab)[0] == ("man", 1, "80.0%")


def test_two_texts_side_by_side(look: Look) -> None:
    with look(records.translation(), "#h=cross.L0H1&t=") as tab:
        assert tab.locator(".paneframe h3").all_inner_texts() == ["target\nqueries", "source\nkeys"]
        tab.locator("#pane-keys-1").hover()
        assert tab.locator(".ranked-title").inner_text() == "“man” is attended to by"
        near(shares(tab), torch.tensor([0.1, 0.8, 0.1, 0.0]))


def test_patches_are_brightened_by_weight(look: Look) -> None:
    record = records.image((2, 3))
    with look(record, "#v=image&t=") as tab:
        tab.locator(".chip").hover()
        near(shares(tab), record["L0H0"].row(0, 0))
        box = tab.locator(".image").bounding_box()
        tab.mouse.click(box["x"] + box["width"] * 5 / 6, box["y"] + box["height"] * 3 / 4)
        tab.mouse.move(2, 2)
        near(shares(tab), record["L0H0"].row(0, 6))
        # The patch with the largest weight is bright, another one dark.
        lit, dark = (pixel(tab, x, y) for x, y in ((5 / 6, 0.8), (1 / 6, 0.2)))
        assert lit[:3] == pytest.approx([150, 160, 170], abs=12)
        assert max(dark[:3]) < 60


def test_an_image_opens_in_the_image_view_with_its_class_token(look: Look) -> None:
    record = records.image((2, 3))
    with look(record) as tab:
        assert tab.get_by_role("tab", selected=True).inner_text() == "Image"
        near(shares(tab), record["L0H0"].row(0, 0))
    with look(record, "#v=text") as tab:
        assert tab.get_by_role("tab", selected=True).inner_text() == "Text"


def test_without_a_class_token_the_middle_patch_is_selected_and_black_patches_brighten(look: Look) -> None:
    record = records.plain_image((3, 3))
    with look(record) as tab:
        near(shares(tab), record["L0H0"].row(0, 4))
        assert "answer: a night" in tab.locator(".tools:visible").all_inner_texts()[-1].replace("\n", " ")
        lit, dark = (pixel(tab, x, y) for x, y in ((0.5, 0.45), (1 / 6, 0.2)))
        assert max(lit[:3]) > max(dark[:3]) + 50


def test_a_narrow_window_has_no_horizontal_overflow(look: Look) -> None:
    for record in (records.translation(), records.plain_image((3, 3))):
        with look(record) as tab:
            tab.set_viewport_size({"width": 400, "height": 700})
            settle(tab)
            assert tab.evaluate("() => document.documentElement.scrollWidth") == 400


def pixel(tab: Any, x: float, y: float) -> list[int]:
    settle(tab)
    script = """(canvas, [x, y]) => [...canvas.getContext("2d")
        .getImageData(Math.floor(canvas.width * x), Math.floor(canvas.height * y), 1, 1).data]"""
    return list(tab.locator(".image").evaluate(script, [x, y]))


def test_generation_step_by_step(look: Look) -> None:
    record = lazy(10, layers=1)
    record.prompt = 4
    with look(record, "#v=steps&h=L0H1&n=2") as tab:
        # The third token after the prompt is at position 6; the query before it generated it.
        assert "Step 3 of 6: generated and" in tab.locator(".status").inner_text()
        near(shares(tab), record["L0H1"].row(0, 5))
        tab.get_by_role("button", name="›").click()
        near(shares(tab), record["L0H1"].row(0, 6))
        assert tab.locator(".stepbar").count() == 6
        tab.keyboard.press("p")
        tab.wait_for_timeout(1600)
        assert "Step 6 of 6" in tab.locator(".status").inner_text()


def test_tokens_not_generated_yet_have_no_color(look: Look) -> None:
    record = records.of_texts("a", " comm", "and", "ed")
    record.labels["input"] = Labels.tokens([record.labels["input"].texts[0]], [[0, 1, 1, 1]])
    record.prompt = 1
    with look(record, "#v=steps&n=1") as tab:
        assert background(tab, 1) != CLEAR
        assert [background(tab, i) for i in (2, 3)] == [CLEAR, CLEAR]


def test_many_steps_have_thin_bars_that_all_fit(look: Look) -> None:
    record = records.of_texts(*("\n" if i % 40 == 39 else "n" for i in range(210)))
    record.prompt = 10
    with look(record, "#v=steps&n=199") as tab:
        wide, room = tab.locator(".stepstrip").evaluate("strip => [strip.scrollWidth, strip.clientWidth]")
        assert tab.locator(".stepbar").count() == 200
        assert wide == room


def test_character_tokens_break_lines_at_spaces(look: Look) -> None:
    text = "so we are here " * 20
    with look(records.of_texts("<start>", *text), "#t=") as tab:
        assert token(tab, 3).inner_text() == "\u00a0"
        ends = tab.eval_on_selector_all(".line", "lines => lines.slice(0, -1).map((line) => line.lastChild.innerText)")
        assert ends
        assert set(ends) == {"\u00a0"}
        assert "gap" in str(token(tab, 1).get_attribute("class"))
    with look(records.of_texts("so", " ", " we"), "#t=") as tab:
        assert token(tab, 1).inner_text() == "␣"


def test_a_word_of_character_tokens_is_selected_first(look: Look) -> None:
    text = "who are you "
    record = records.of_texts(*text)
    record.labels["input"] = Labels.tokens([tuple(text)], [[0, 0, 0, 1, 2, 2, 2, 3, 4, 4, 4, 5]])
    with look(record) as tab:
        assert tab.locator(".ranked-title").inner_text() == "“you” attends to"


def test_a_special_token_has_a_gap_before_it(look: Look) -> None:
    record = records.of_texts("Ein", " Mann", ".", "<stop>")
    record.labels["input"] = Labels.tokens([record.labels["input"].texts[0]], [[0, 1, 1, 2]])
    with look(record, "#t=") as tab:
        assert "gap" in str(token(tab, 3).get_attribute("class"))
        assert "gap" not in str(token(tab, 2).get_attribute("class"))


def test_an_alignment_of_a_usual_sentence_fits(look: Look) -> None:
    entries = torch.eye(17)[:4].mul(0.83).add(0.01).view(1, 1, 4, 17)
    labels = {"s": Labels.tokens([[f" {i}" for i in range(17)]]), "t": Labels.tokens([["a", " b", " c", " d"]])}
    layer = Layer("cross.0", "cross", 0, matrix=entries, queries="t", keys="s")
    with look(Record({"cross.0": layer}, labels, model="M"), "#v=align") as tab:
        wide, room = tab.locator(".alignframe").evaluate("frame => [frame.scrollWidth, frame.clientWidth]")
        assert wide == room
        assert tab.locator(".alignrow text", has_text="84").count() == 4


def test_an_alignment_opens_with_the_clearest_layer(look: Look) -> None:
    record = records.translation_with_sinks()
    with look(record, "#v=align") as tab:
        assert "cross.L1, mean of 2 heads" in tab.locator(".right").inner_text()


def test_arithmetic_equals_the_record(look: Look) -> None:
    record = lazy(9, heads=4, kv_heads=2)
    layer = record["L1"]
    assert layer.weights is not None
    assert layer.values is not None
    with look(record, "#v=compute&h=L1H3&t=7") as tab:
        cards = tab.locator(".card")
        assert cards.count() == 4
        call = layer.weights.call
        raw = float(call.q[0, 3, 7] @ call.k[0, 1, 0])
        rows = cards.nth(1).locator("tbody tr").all_inner_texts()
        first = next(row for row in rows if row.startswith("the"))
        numbers = [float(part.replace("−", "-")) for part in first.split("\t")[-3:]]
        assert numbers == pytest.approx([raw, raw / 8**0.5, raw / 8**0.5], abs=2e-3)
        assert "hides 1 of 9 keys" in cards.nth(1).inner_text()
        assert cards.nth(2).locator("tbody tr").last.inner_text().endswith("100%")
        out = (layer.weights[0] @ layer.values[0].repeat_interleave(2, 0))[3, 7]
        assert summed(tab) == pytest.approx(out.tolist(), abs=1e-4)


def test_arithmetic_names_what_was_not_recorded(look: Look) -> None:
    with look(records.jane(), "#v=compute&h=L0H1&t=3") as tab:
        cards = tab.locator(".card")
        assert "They were not recorded: record with keep='lazy'" in cards.nth(0).inner_text()
        assert "The scores were not recorded" in cards.nth(1).inner_text()
        assert cards.nth(1).locator("td").count() == 0
        assert cards.nth(2).locator("tbody tr").first.inner_text().endswith("70.0%")
        assert "They were not recorded" in cards.nth(3).inner_text()
    with look(records.kept(), "#v=compute&t=5") as tab:
        # Scores follow from the weights and the log-sum-exp; products do not.
        assert tab.locator(".card").nth(1).locator("th").all_inner_texts() == ["key", "score"]
        assert "No mask" not in tab.locator(".card").nth(1).inner_text()


@pytest.mark.parametrize(("options", "columns"), [({}, ["key", "q · k", "× 0.354", "score"]), (None, ["key", "score"])])
def test_a_file_too_large_for_vectors_says_so(
    options: dict[str, Any] | None, columns: list[str], look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload, "MAX_VECTOR_NUMBERS", (0, 0))
    record = lazy(9, **({"bias": torch.ones(9, 9)} if options is None else options))
    with look(record, "#v=compute&h=L1H3&t=7") as tab:
        cards = tab.locator(".card")
        assert cards.nth(1).locator("th").all_inner_texts() == columns
        for place in (0, 3):
            assert "This file is too large to include them" in cards.nth(place).inner_text()


def test_weighted_sum_of_a_recorded_model(look: Look) -> None:
    record = record_small_model()
    with look(record, "#v=compute&h=L1H1&t=9") as tab:
        assert tab.locator(".card").count() == 4
        assert summed(tab) == pytest.approx(output_of(record, "L1H1", 9), abs=1e-3)


def test_rollout_equals_the_record(look: Look) -> None:
    record = lazy(12, layers=3)
    with look(record, "#v=rollout&t=10") as tab:
        assert "Read with care" in tab.locator(".caveat").inner_text()
        flow = record.rollout(10)
        items = tab.locator(".rolllist li").all_inner_texts()
        found = [float(item.split("\n")[-1].rstrip("%")) / 100 for item in items]
        assert found == pytest.approx(flow.sort(descending=True).values[: len(found)].tolist(), rel=0.051)


def test_the_state_is_in_the_url(look: Look, browser: Any) -> None:
    with look(lazy(40), "#h=L1H2&t=5") as tab:
        tab.keyboard.press("c")
        tab.keyboard.press("s")
        tab.get_by_role("tab", name="Map").click()
        address = wait_for_address(tab)
        assert {"v=map", "h=L1H2", "t=5", "c=log", "s=1"} <= set(address.split("#")[1].split("&"))
        with opened(browser, address) as again:
            assert again.locator(".mapview").is_visible()
            assert again.get_by_role("switch", name="hide sinks").get_attribute("aria-checked") == "true"
            assert "L1H2" in again.locator(".facts").inner_text()


@pytest.mark.parametrize("address", ["#h=L99H1&t=999.-1.x&b=7&v=nowhere&z=NaN", "#%%%", "#t=&h=<img>"])
def test_an_invalid_url_state_still_opens(look: Look, address: str) -> None:
    with look(records.jane(), address) as tab:
        assert tab.locator(".token").count() == 7


def test_everything_by_keyboard(look: Look) -> None:
    with look(lazy(20), "#t=&h=L0H0") as tab:
        tab.locator(".textpane").focus()
        tab.keyboard.press("End")
        tab.keyboard.press("ArrowLeft")
        tab.keyboard.press("Enter")
        assert "t=18" in wait_for_address(tab)
        tab.keyboard.press("ArrowLeft")
        tab.keyboard.press("Shift+Enter")
        assert "t=18.17" in wait_for_address(tab)
        tab.keyboard.press("]")
        settle(tab)
        assert "L0H1" in tab.locator(".facts").inner_text()
        tab.keyboard.press("}")
        settle(tab)
        assert "L1H1" in tab.locator(".facts").inner_text()
        tab.keyboard.press("d")
        settle(tab)
        assert "are attended to by" in tab.locator(".ranked-title").inner_text()
        tab.keyboard.press("Escape")
        assert "t=&" in wait_for_address(tab) + "&"
        tab.keyboard.press("3")
        settle(tab)
        assert tab.locator(".mapview").is_visible()
        tab.keyboard.press("?")
        assert tab.locator("dialog.help").is_visible()


def test_the_list_is_a_table_with_a_caption(look: Look) -> None:
    with look(records.jane(), "#h=L0H1&t=1&w=0") as tab:
        table = tab.get_by_role("table", name="“Jane” attends to in L0H1, largest weight first")
        assert table.get_by_role("columnheader").all_inner_texts() == ["#", "token", "pos", "weight"]
        assert (
            tab.locator('[aria-live="polite"].visually-hidden')
            .inner_text()
            .startswith("“Jane” attends to: [CLS] 50.0%")
        )


@pytest.mark.parametrize("view", ["text", "heads", "map", "lines", "compute", "rollout"])
def test_copies(look: Look, view: str) -> None:
    record = lazy(8)
    with look(record, f"#v={view}&h=L0H1&t=5") as tab:
        # Without permission to write to the clipboard, the page saves a file.
        tab.evaluate(
            "() => { for (const name of ['write', 'writeText'])"
            " navigator.clipboard[name] = () => Promise.reject(new Error('no')) }"
        )
        saved = {}
        for kind in ("png", "svg", "csv"):
            tab.locator("summary").click()
            with tab.expect_download() as download:
                tab.locator(f'[data-copy="{kind}"]').click()
            saved[kind] = Path(download.value.path()).read_bytes()
        assert saved["png"].startswith(b"\x89PNG")
        assert min(struct.unpack(">II", saved["png"][16:24])) > 50
        assert saved["svg"].startswith(b"<svg")
        rows = list(csv.reader(io.StringIO(saved["csv"].decode())))
        assert len(rows) > 5
        if view == "text":
            assert float(rows[1][3]) == pytest.approx(float(record["L0H1"].row(0, 5).max()), rel=1e-4)


def test_copies_go_to_the_clipboard_if_allowed(look: Look) -> None:
    with look(records.jane(), "#h=L0H1&t=1&w=0", permissions=["clipboard-read", "clipboard-write"]) as tab:
        tab.locator("summary").click()
        tab.locator('[data-copy="csv"]').click()
        tab.wait_for_selector(".toast.on")
        assert tab.locator(".toast").inner_text() == "CSV copied"
        text = tab.evaluate("() => navigator.clipboard.readText()")
        assert text.splitlines()[:2] == ["rank,position,key,weight", "1,0,[CLS],0.5"]


def test_hostile_tokens_are_text(look: Look) -> None:
    hostile = [
        "<img src=x onerror=alert(1)>",
        "</script><script>alert(2)</script>",
        "\u202eevil",
        "\x00\x1b",
        "=1+1",
        "x" * 100_000,
        "\n",
        "",
    ]
    record = records.of_texts(*hostile, layers=2)
    for view in ("text", "heads", "map", "lines", "compute", "rollout"):
        with look(record, f"#v={view}&t=0&w=0") as tab:
            assert tab.locator("img").count() == 0
            assert tab.locator("script").count() <= 1
            if view == "text":
                texts = tab.locator(".token").all_inner_texts()
                assert texts[:2] == hostile[:2]
                assert texts[2:4] == ["⟨202E⟩evil", "␀␛"]
                assert len(texts[5]) == 49
                assert texts[6:] == ["↵", "∅"]


def test_right_to_left(look: Look) -> None:
    with look(records.of_texts("אני", " אוהב", " פסטה"), "#t=0&w=0") as tab:
        first, second = (token(tab, i).bounding_box() for i in (0, 1))
        assert first["x"] > second["x"]
        tab.locator(".textpane").focus()
        tab.keyboard.press("Home")
        tab.keyboard.press("ArrowLeft")
        settle(tab)
        assert tab.locator(".ranked-title").inner_text().startswith("“אוהב”")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(look: Look, scheme: str) -> None:
    with look(records.jane(), color_scheme=scheme) as tab:
        paper = tab.evaluate("() => getComputedStyle(document.body).backgroundColor")
        assert paper == {"light": "rgb(247, 245, 241)", "dark": "rgb(16, 18, 22)"}[scheme]
        tab.keyboard.press("t")
        settle(tab)
        assert tab.evaluate("() => getComputedStyle(document.body).backgroundColor") != paper


def test_statistics_only(look: Look) -> None:
    record = records.kept()
    for view in ("text", "heads", "map", "lines", "compute", "rollout"):
        with look(record, f"#v={view}&t=3") as tab:
            if view == "text":
                _values, keys = record["L0H0"].top(2)
                assert {at for _, at, _ in listed(tab)} == set(keys[0, 3].tolist())
            if view == "rollout":
                assert "Rollout needs all weights" in tab.locator(".status").inner_text()


def test_a_frame_in_a_notebook(browser: Any, tmp_path: Path) -> None:
    bundle = records.jane()._repr_mimebundle_()
    (tmp_path / "notebook.html").write_text(f"<!doctype html><html data-ready>{bundle['text/html']}", "utf-8")
    with opened(browser, f"file://{tmp_path / 'notebook.html'}") as tab:
        frame = tab.frame_locator("iframe")
        frame.locator('[data-i="3"]').click()
        frame.locator(".ranked-title", has_text="“hungry” attends to").wait_for()


def test_several_sequences(look: Look) -> None:
    matrix = torch.rand(2, 1, 3, 3).softmax(-1)
    record = Record(
        {"l": Layer("l", matrix=matrix)}, {"input": Labels.tokens([["a", " b", " c"], ["d", " e", " f"]])}, model="M"
    )
    with look(record, "#t=0") as tab:
        tab.get_by_label("Sequence").select_option("1")
        settle(tab)
        assert tab.locator(".token").all_inner_texts() == ["d", "e", "f"]
        token(tab, 1).hover()
        near(shares(tab), matrix[1, 0, 1])


def test_the_title_names_model_and_package(look: Look) -> None:
    with look(records.jane()) as tab:
        assert tab.title() == "BertModel · foci"
        assert foci.__version__


def test_nonfinite_rows_are_noted_and_not_drawn(look: Look) -> None:
    record = records.jane()
    matrix = record["L0"].matrix
    assert matrix is not None
    matrix[0, 1, 2] = torch.nan
    with look(record, "#h=L0H1&w=0&t=2") as tab:
        said = "1 of 7 rows of L0H1 have NaN or infinite weights, which are not drawn or counted."
        assert tab.locator(".panel.right .note").inner_text() == said
        facts = tab.locator(".facts").inner_text()
        assert "NaN or infinite" in facts
        assert "nats" not in facts
        assert listed(tab) == []
        token(tab, 1).click()
        tab.mouse.move(5, 5)
        near(shares(tab), matrix[0, 1, 1])
    with look(record, "#h=L0H1&w=0&t=2&v=compute") as tab:
        assert "NaN or infinite" in tab.locator(".worked").inner_text()
    with look(record, "#h=L0H1&w=0&t=2&v=rollout") as tab:
        assert "Rollout is undefined" in tab.locator(".status").inner_text()


def test_notes_and_small_weights_are_shown(look: Look) -> None:
    record = records.of_texts("a", " b", " c")
    matrix = record["L0"].matrix
    assert matrix is not None
    matrix[0, 0, 0] = torch.tensor([0.6, 0.399994, 0.000006])
    record.notes.append("the text is longer than the model reads: only a part of it is shown")
    with look(record, "#h=L0H0&t=0") as tab:
        note = "The text is longer than the model reads: only a part of it is shown."
        assert note in tab.locator("footer").inner_text()
        assert (
            tab.locator(".panel.right .note").inner_text()
            == "All weights of the part that the model read are here, exact."
        )
        assert [weight for *_, weight in listed(tab)] == ["60.0%", "40.0%", "<0.01%"]
        cells = tab.locator(".ranked td.weight").evaluate_all("cells => cells.map((cell) => cell.offsetHeight)")
        # One line each; heights differ by rounding.
        assert max(cells) - min(cells) <= 1


def test_every_view_names_the_selection_alike(look: Look) -> None:
    with look(records.jane(), "#h=L0H1&t=4") as tab:
        assert tab.locator(".ranked-title").inner_text() == "“hungry” attends to"
        tab.get_by_role("tab", name="How it is computed").click()
        assert tab.locator(".worked-title").inner_text() == "Attention of gry (position 4, in “hungry”) in L0H1"
        tab.get_by_role("tab", name="Rollout").click()
        assert (
            tab.locator(".status").inner_text().startswith("Rollout to gry (position 4, in “hungry”) through 1 layer")
        )


def test_a_generated_word_has_the_same_name_in_all_views(look: Look) -> None:
    record = records.translation()
    cross = record.layers["cross.0"]
    record.layers["cross.0"] = replace(cross, queries="answer")
    record.labels["answer"] = Labels.tokens([("Ein", " Mann", " schläft", "</s>")])
    record.labels["target"] = Labels.tokens([("<s>", "Ein", " Mann", " schläft")])
    with look(record, "#h=cross.L0H1&t=2&v=rollout") as tab:
        assert (
            tab.locator(".status")
            .inner_text()
            .startswith("Rollout to schläft (position 2), generated after “Mann”, through 1 layer")
        )


def test_heads_with_equal_metrics_have_equal_colors(look: Look) -> None:
    record = records.of_texts(*"abcd", layers=1, heads=2)
    record.layers["layers.0"] = Layer("layers.0", matrix=(torch.rand(1, 2, 4, 4) * 0.001).softmax(-1))
    with look(record) as tab:
        assert tab.locator(".left").inner_text().count("1.39 in every head") == 1
        cells = tab.locator(".left .cell").evaluate_all("cells => cells.map((cell) => cell.style.backgroundColor)")
        assert len(cells) == 2
        assert len({*cells}) == 1


@pytest.mark.parametrize(("queries", "keys", "x", "y"), [(3, 500, 0.5, 42), (500, 3, 42, 0.5)])
def test_the_map_of_a_long_matrix_has_stretched_cells(queries: int, keys: int, x: float, y: float, look: Look) -> None:
    """Cells along the short axis are 28 pixels large."""
    record = Record.from_tensors([torch.full((1, 1, queries, keys), 1 / keys)])
    with look(record, "#v=map&h=L0H0") as tab:
        box = tab.locator(".map").bounding_box()
        assert box is not None
        tab.mouse.move(box["x"] + 116 + x, box["y"] + 92 + y)
        settle(tab)
        query, key = (0, 1) if queries > keys else (1, 0)
        assert f"query {query}, key {key}" in tab.locator(".tip").inner_text()


def test_the_map_of_audio_frames_shows_seconds(look: Look) -> None:
    record = records.translation()
    times = Labels("frames", (tuple(f"{i * 0.04:.2f}" for i in range(300)),), seconds=0.04)
    matrix = torch.full((1, 1, 4, 300), 1 / 300)
    layer = Layer("cross.0", "cross", 0, matrix=matrix, queries="target", keys="frames")
    sound = Record({"cross.0": layer}, {"target": record.labels["target"], "frames": times}, model="M")
    written = "CanvasRenderingContext2D.prototype"
    with look(sound) as tab:
        tab.evaluate(
            f"() => {{ const plain = {written}.fillText; window.said = [];"
            f" {written}.fillText = function (text, ...rest) {{ said.push(text); plain.call(this, text, ...rest); }} }}"
        )
        tab.get_by_role("tab", name="Map").click()
        settle(tab)
        assert {"4.00 s", "8.00 s"} <= {*tab.evaluate("() => window.said")}

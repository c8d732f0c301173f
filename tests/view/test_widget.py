"""The widget without a browser: traits, answers to the page, memory, and what a notebook displays."""

import gc
import json
import weakref
from typing import Any

import numpy as np
import pytest
import torch

import foci
from foci.record.kept import KeptStatistics, TextPositions
from foci.record.layer import Layer
from foci.view import display, widget
from tests.view.pages import decode_payload

pytest.importorskip("anywidget")

TEXTS = [f" w{i}" for i in range(12)]


def make_weights(heads: int = 4, length: int = 12) -> foci.Weights:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, heads, length, 8, generator=generator)
    return foci.attention(q, k, v, mask=foci.causal, return_weights=True)[1]


def make_record(layers: int = 2) -> foci.Record:
    return foci.Record.from_tensors([make_weights() for _ in range(layers)], TEXTS)


def ask(view: Any, question: str, **parts: Any) -> bytes:
    """The answer to a question of the page."""
    sent: list[Any] = []
    view.send = lambda content, buffers: sent.append((content, buffers))
    view._receive(view, {"id": 3, "question": question, "parts": parts}, [])
    ((content, (answer,)),) = sent
    assert content == {"id": 3, "error": ""}
    return bytes(answer)


def test_the_initial_selection_is_that_of_the_page() -> None:
    record = make_record()
    view = foci.widget(record)
    header, _ = decode_payload(view.payload)
    assert header["initial"] == {
        "head": record.name_of(list(record.layers.values())[view.layer], view.head),
        "query": view.query,
        "direction": view.direction,
    }
    assert view.selection == [view.query]


def test_query_and_selection_follow_each_other() -> None:
    view = foci.widget(make_record())
    view.query = 5
    assert view.selection == [5]
    view.selection = [3, 4]
    assert view.query == 3
    view.direction = "from"
    assert view.query is None
    view.query = 2
    assert (view.direction, view.selection) == ("to", [2])


@pytest.mark.parametrize(("name", "value"), [("layer", 2), ("head", 4), ("head", -1)])
def test_a_number_out_of_range_is_refused(name: str, value: int) -> None:
    view = foci.widget(make_record())
    with pytest.raises(ValueError, match=rf"^{name} must be an integer from 0 to \d, got {value}$"):
        setattr(view, name, value)


@pytest.mark.parametrize("embed", [True, False])
def test_rows_and_pictures_come_from_the_lazy_weights(embed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widget, "Thread", ImmediateThread)
    record = make_record()
    view = foci.widget(record, embed=embed)
    header, _ = decode_payload(view.payload)
    assert header["onDemand"] is not embed
    assert ("0.entries" in header["arrays"]) is embed
    row = np.frombuffer(ask(view, "row", layer=1, head=2, query=7, seq=0), np.float32)
    np.testing.assert_allclose(row, record["L1H2"][0, 7].numpy(), rtol=1e-6)
    picture = np.frombuffer(ask(view, "picture", layer=1, head=2, seq=0, reduce="max"), np.float32)
    np.testing.assert_allclose(picture.reshape(12, 12), record["L1H2"].dense()[0].numpy(), atol=1e-6)


class ImmediateThread:
    """A thread that runs when it starts."""

    def __init__(self, target: Any, args: Any, daemon: bool) -> None:
        self.target, self.args = target, args

    def start(self) -> None:
        self.target(*self.args)


def test_a_wrong_question_is_answered_with_the_reason() -> None:
    record = make_record()
    assert widget.handle_message(record, {"question": "row", "parts": {"layer": 9}}) == (
        b"",
        "layer must be an integer from 0 to 1, got '9'",
    )
    assert widget.handle_message(record, {"question": "delete"})[1]
    assert "no longer available" in widget.handle_message(None, {})[1]


def test_a_long_record_opens_without_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foci.Weights, "_compute", None)
    _, weights = foci.attention(*torch.randn(3, 1, 1, 100_000, 4), mask=foci.window(8), return_weights=True)
    view = foci.widget(weights)
    assert (view.layer, view.head, view.query) == (0, 0, 99_999)
    assert len(view.payload) < 2**20


def test_close_frees_the_tensors() -> None:
    record = make_record()
    view, held = foci.widget(record), weakref.ref(record)
    del record
    gc.collect()
    assert held() is not None
    view.close()
    gc.collect()
    assert held() is None


def test_a_display_shows_the_widget_the_page_and_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widget, "can_show_widgets", lambda: True)
    for shown in (make_record(), make_weights(), make_record()["L1"]):
        bundle = shown._repr_mimebundle_()
        assert "model_id" in bundle["application/vnd.jupyter.widget-view+json"]
        assert bundle["text/plain"] == repr(shown)
        # GitHub removes frames and styles: the text stays.
        assert bundle["text/html"].startswith('<pre style="display: none">')
        assert "<iframe" in bundle["text/html"]


def test_a_displayed_widget_does_not_keep_the_record_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widget, "can_show_widgets", lambda: True)
    record = make_record()
    record._repr_mimebundle_()
    held = weakref.ref(record)
    del record
    gc.collect()
    assert held() is None


def keep_words(length: int = 12) -> foci.Record:
    """A record of patches that attend to words, with the weights of two words only."""
    weights = foci.attention(*torch.randn(3, 1, 2, length, 8), return_weights=True)[1]
    kept = KeptStatistics(foci.Keep(keys="text").compute_text(weights, TextPositions((), (1, 3))), weights.shape)
    labels = {"image": foci.Labels.patches(3, 4), "prompt": foci.Labels.tokens([TEXTS])}
    layer = Layer("x", kept=kept, kept_keys=(1, 3), queries="image", keys="prompt")
    return foci.Record({"x": layer}, labels)


def test_a_record_of_kept_weights_answers_while_it_is_alive() -> None:
    record = keep_words()
    shown = widget.make_display_widget(record, display.build_view_record(record))
    gc.collect()
    for view in (foci.widget(record, embed=False), shown):
        row = np.frombuffer(ask(view, "row", layer=0, head=1, query=7, seq=0), np.float32)
        np.testing.assert_allclose(row, record["L0H1"].columns([1, 3])[0, 7].numpy(), rtol=1e-6)
    del record
    gc.collect()
    assert shown.get_record() is None


def test_a_large_matrix_is_displayed_as_a_widget_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widget, "can_show_widgets", lambda: True)
    monkeypatch.setattr(display, "MAX_NOTEBOOK_ENTRIES", 100)
    bundle = make_weights()._repr_mimebundle_()
    assert sorted(bundle) == ["application/vnd.jupyter.widget-view+json", "text/plain"]


def test_without_a_kernel_no_widget_is_made() -> None:
    assert not widget.can_show_widgets()
    assert "application/vnd.jupyter.widget-view+json" not in make_record()._repr_mimebundle_()


def test_the_module_has_no_address_of_a_network() -> None:
    module = foci.widget(make_record())._esm
    addresses = {part.split('"')[0] for part in module.split("http")[1:]}
    assert all(address.startswith("://www.w3.org/2000/svg") for address in addresses), addresses
    assert "import " not in [line[:7] for line in module.splitlines()]
    json.dumps(module)

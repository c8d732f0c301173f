import re
import sys
import webbrowser
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import foci
from foci import bertviz
from foci.bertviz import EncoderDecoderAttention, build_record, build_token_labels, restore_spaces

TOKENS = ["[CLS]", "Jane", "is", "hun", "##gry", "[SEP]"]


def attention(layers: int = 2, heads: int = 3, queries: int = 6, keys: int = 6) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.rand(1, heads, queries, keys, generator=generator).softmax(-1) for _ in range(layers))


def state(page: Any) -> str:
    return unescape(re.findall(r'<html lang="en" data-state="([^"]*)">', page.data)[0])


def recorded(monkeypatch: pytest.MonkeyPatch, view: Any = foci.bertviz.head_view, **given: Any) -> Any:
    """The record of a view."""
    found = []
    monkeypatch.setattr(bertviz.document, "render_html", lambda record, title, state: found.append(record) or "<html>")
    view(**given, html_action="return")
    return found[0]


def test_a_returned_page_opens_at_the_given_heads() -> None:
    page = foci.bertviz.head_view(attention(), TOKENS, layer=1, heads=[0, 2], html_action="return")
    assert page is not None
    assert page.data.startswith("<!doctype html>")
    assert state(page) == "v=lines&h=L1H0~L1H2"
    assert "srcdoc=" in page._repr_html_()


@pytest.mark.parametrize(("mode", "found"), [("dark", "v=heads&e=dark"), ("light", "v=heads&e=light")])
def test_model_view_opens_the_heads_view(mode: str, found: str) -> None:
    page = foci.bertviz.model_view(attention(), TOKENS, display_mode=mode, html_action="return")
    assert state(page) == found


def test_weights_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    given = attention()
    record = recorded(monkeypatch, attention=given, tokens=TOKENS)
    assert torch.equal(record["L1H2"].dense()[0], given[1][0, 2])
    assert record.labels["input"].texts == (("[CLS]", " Jane", " is", " hun", "gry", " [SEP]"),)
    assert record.labels["input"].words == ((None, 1, 2, 3, 3, None),)


def test_layers_and_heads_keep_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    given = attention(layers=4)
    some = {"attention": given, "tokens": TOKENS, "include_layers": [1, 3]}
    assert recorded(monkeypatch, **some).heads == ["L1H0", "L1H1", "L1H2", "L3H0", "L3H1", "L3H2"]
    record = recorded(monkeypatch, foci.bertviz.model_view, **some, include_heads=[2])
    assert record.heads == ["L1H2", "L3H2"]
    assert torch.equal(record["L3H2"].dense()[0], given[3][0, 2])


def test_an_encoder_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    cross = attention(queries=2, keys=6)
    record = recorded(
        monkeypatch,
        encoder_attention=attention(),
        decoder_attention=attention(queries=2, keys=2),
        cross_attention=cross,
        encoder_tokens=TOKENS,
        decoder_tokens=["▁Jane", "▁hat"],
    )
    assert {layer.stack for layer in record.layers.values()} == {"encoder", "decoder", "cross"}
    assert torch.equal(record["cross.L1H2"].dense()[0], cross[1][0, 2])
    assert record.labels["target"].text(0) == " Jane hat"


def test_one_stack_of_an_encoder_decoder_is_enough() -> None:
    record = build_record(
        None,
        None,
        None,
        EncoderDecoderAttention(cross=attention(queries=1), encoder_tokens=TOKENS, decoder_tokens=["x"]),
        True,
        None,
    )
    assert record.heads[0] == "cross.L0H0"


def test_two_sentences_add_four_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    given = attention(layers=1)
    record = recorded(monkeypatch, attention=given, tokens=TOKENS, sentence_b_start=4)
    assert [record.name_of(layer) for layer in record.layers.values()] == ["L0", "A→A.L0", "A→B.L0", "B→A.L0", "B→B.L0"]
    assert torch.equal(record["A→B.L0H1"].dense()[0], given[0][0, 1, :4, 4:])
    assert [len(labels) for labels in record.labels_of(record["A→B.L0"])] == [4, 2]


def test_tokens_are_prettified_or_unchanged() -> None:
    assert restore_spaces(["low</w>", "er"]) == ["low ", "er"]
    assert build_token_labels(["Ġa", "##b"], "tokens", False).texts == (("Ġa", "##b"),)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "attention must be given, or encoder_, decoder_ or cross_attention, got neither"),
        (
            {"attention": attention(), "tokens": TOKENS, "cross_attention": attention()},
            "attention must be given, or encoder_, decoder_ or cross_attention, got both",
        ),
        ({"attention": attention()}, "tokens must be a list of strings, got None"),
        ({"attention": attention(), "tokens": [*TOKENS, "x"]}, "tokens must have 6 entries for L0, got 7"),
        (
            {"attention": attention(), "tokens": TOKENS, "include_layers": [0, 9]},
            "include_layers must be from 0 to 1, got [9]",
        ),
        ({"attention": attention(), "tokens": TOKENS, "layer": 5}, "layer must be one of L0, L1, got 5"),
        ({"attention": attention(), "tokens": TOKENS, "heads": [7]}, "heads must be from 0 to 2 in L0, got [7]"),
        (
            {"attention": attention(), "tokens": TOKENS, "sentence_b_start": 6},
            "sentence_b_start must be from 1 to 5, got 6",
        ),
        (
            {"attention": attention(), "tokens": TOKENS, "html_action": "show"},
            "html_action must be 'view' or 'return', got 'show'",
        ),
    ],
)
def test_invalid_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        foci.bertviz.head_view(**given)


def test_an_unknown_display_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"display_mode must be 'dark' or 'light', got 'blue'"):
        foci.bertviz.model_view(attention(), TOKENS, display_mode="blue")


def test_outside_a_notebook_the_page_opens_in_a_browser(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert foci.bertviz.head_view(attention(), TOKENS) is None
    written = next(tmp_path.iterdir())
    assert opened == [written.as_uri()]
    assert capsys.readouterr().err == f"page written to {written}\n"


def test_a_notebook_displays_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    notebook = SimpleNamespace(get_ipython=object, display=SimpleNamespace(display=shown.append))
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    foci.bertviz.model_view(attention(), TOKENS)
    assert "srcdoc" in shown[0]._repr_html_()


def test_weights_and_layers_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 1, 3, 6, 8)
    weights = foci.attention(q, k, v, mask=foci.causal, return_weights=True)[1]
    layer = foci.Record.from_tensors([weights])["L0"]
    page = foci.bertviz.head_view(weights, TOKENS, heads=[0, 2], html_action="return")
    assert page is not None
    assert state(page) == "v=lines&h=L0H0~L0H2"
    for given in (weights, [weights], [layer], layer):
        record = recorded(monkeypatch, attention=given, tokens=TOKENS, sentence_b_start=2)
        torch.testing.assert_close(record["L0H2"].dense(), weights[:, 2].dense())
        torch.testing.assert_close(record["B→A.L0"].dense(), weights.dense()[:, :, 2:, :2])
    record = recorded(monkeypatch, foci.bertviz.model_view, attention=weights, tokens=TOKENS, include_heads=[1])
    torch.testing.assert_close(record["L0H1"].dense(), weights[:, 1].dense())

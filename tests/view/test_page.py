import base64
import hashlib
import html
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import foci
from foci.record.labels import Labels
from foci.record.layer import Layer
from foci.record.record import Record
from foci.view import selection
from foci.view.page import bundle, document, payload
from foci.view.page.arrays import PackedArrays
from foci.view.terminal.record import render_record
from foci.view.units import list_units
from tests.view import records
from tests.view.pages import decode_array, decode_payload, lazy, read_payload

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--",
    "\u202eevil",
    "\x00\x1b[31m",
    '"onload="x',
    "&lt;",
    "\ud800",
    "",
)


@pytest.mark.parametrize(
    ("kind", "error"),
    [("f4", 0), ("f2", 5e-4), ("log16", 1 / 4096), ("log8", 1 / 31)],
    ids=["f4", "f2", "log16", "log8"],
)
def test_numbers_are_decoded_within_the_error_of_their_kind(kind: str, error: float) -> None:
    weights = torch.tensor([[1.0, 0.5, 0.123456, 1e-3, 3e-5], [0.25, 0.2, 0.0, 1e-4, 7e-3]])
    packed = PackedArrays()
    packed.add("w", weights, kind)
    found = decode_array({"arrays": packed.index}, packed.data, "w").float()
    assert bool(((found - weights).abs() <= error * 1.001 * weights + 3e-8).all())
    assert found[1, 2] == 0


def test_a_short_record_has_every_entry() -> None:
    record = lazy(20)
    header, arrays = read_payload(document.render_html(record))
    entries = decode_array(header, arrays, "1.entries")
    assert header["layers"][1]["exact"]
    assert torch.equal(entries, record["L1"].dense().float())


def test_many_heads_are_stored_with_four_digits() -> None:
    record = lazy(128, layers=2, heads=40)
    header, arrays = read_payload(document.render_html(record))
    assert header["layers"][0]["entries"] == "log16"
    torch.testing.assert_close(
        decode_array(header, arrays, "0.entries").float(), record["L0"].dense(), rtol=3e-4, atol=1e-13
    )


def test_a_long_record_has_top_keys_and_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "MAX_EXACT_ENTRIES", 0)
    record = lazy(150, layers=1)
    header, arrays = read_payload(document.render_html(record))
    assert not header["layers"][0]["exact"]
    steps, values = decode_array(header, arrays, "0.keys"), decode_array(header, arrays, "0.values")
    expected, at = record["L0"].top(16)
    for query in (0, 5, 149):
        keys = steps[0, 2, query].cumsum(0)
        found = {int(key): float(value) for key, value in zip(keys, values[0, 2, query], strict=True) if value > 0}
        wanted = {
            int(key): float(value)
            for key, value in zip(at[0, 2, query], expected[0, 2, query], strict=True)
            if key >= 0
        }
        assert found == pytest.approx(wanted, rel=3e-4)
    for reduce in ("mean", "max"):
        picture = decode_array(header, arrays, f"0.{reduce}").float()
        assert torch.equal(picture > 0, record["L0"].picture(150, 150, reduce)[0] > 0)
        torch.testing.assert_close(picture, record["L0"].picture(150, 150, reduce)[0], rtol=0.04, atol=3e-7)
    torch.testing.assert_close(
        decode_array(header, arrays, "0.received"), record["L0"].received().double() / 150, rtol=3e-4, atol=0
    )


def test_kept_statistics_are_written_unchanged() -> None:
    record = records.kept()
    header, arrays = read_payload(document.render_html(record))
    assert decode_array(header, arrays, "0.keys").shape == (1, 1, 6, 2)
    torch.testing.assert_close(
        decode_array(header, arrays, "0.mean").float(), record["L0"].picture(3, 3)[0], rtol=0.04, atol=1e-7
    )
    assert "0.max" not in header["arrays"]
    assert header["layers"][0]["score"] is None


def test_vectors_and_score_of_the_arithmetic() -> None:
    weight = torch.randn(8)
    record = lazy(6, score=foci.Additive(weight), sink=None)
    header, arrays = read_payload(document.render_html(record))
    assert header["layers"][0]["score"]["additive"]
    assert torch.equal(decode_array(header, arrays, "0.w")[3], weight)
    plain, arrays = read_payload(document.render_html(lazy(6, heads=4, kv_heads=2)))
    assert plain["layers"][0]["score"] | {"mask": ""} == {
        "kind": "Dot",
        "additive": False,
        "scale": pytest.approx(8**-0.5),
        "softcap": None,
        "width": 8,
        "mask": "",
        "bias": None,
        "sink": False,
    }
    assert decode_array(plain, arrays, "0.k").shape == (1, 2, 6, 8)


def test_metrics_and_names() -> None:
    record = records.translation()
    header, _ = read_payload(document.render_html(record, title="Ein Titel"))
    assert header["title"] == "Ein Titel"
    assert [layer["label"] for layer in header["layers"]] == ["encoder.L0", "decoder.L0", "cross.L0"]
    assert header["layers"][2]["names"] == ["cross.L0H0", "cross.L0H1"]
    assert [header["labels"][n]["texts"][0][0] for n in header["layers"][2]["labels"]] == ["Ein", "A"]
    entropy = next(measure for measure in header["metrics"] if measure["name"] == "entropy")
    assert entropy["values"][0] == [0.0, 0.0]
    induction = [measure for measure in header["metrics"] if measure["name"] == "induction"]
    assert induction
    assert induction[0]["values"][2] == [None, None]


def test_tokens_are_not_in_the_markup() -> None:
    record = records.of_texts(*HOSTILE)
    record.model = '</title><img src=x onerror="alert(1)">'
    record.answer = HOSTILE[0]
    text = document.render_html(record)
    assert text.count("</script>") == 2
    assert "<img" not in text
    assert "alert(1)</script" not in text
    assert "<title>&lt;/title&gt;&lt;img" in text
    header, _ = read_payload(text)
    assert header["labels"][0]["texts"][0] == [token.replace("\ud800", "\ufffd") for token in HOSTILE]


def test_long_tokens_are_cut_with_their_length() -> None:
    header, _ = read_payload(document.render_html(records.of_texts("x" * 3_000_000, "y")))
    assert header["labels"][0]["texts"][0][0] == "x" * 1000 + "… (3,000,000 characters)"


def test_the_policy_allows_one_script_and_one_style() -> None:
    text = document.render_html(records.jane())
    policy = html.unescape(re.search(r'Security-Policy" content="([^"]*)"', text)[1])  # type: ignore[index]
    script = re.search(r"<script>(.*)</script>", text, re.DOTALL)[1]  # type: ignore[index]
    style = re.search(r"<style>(.*)</style>", text, re.DOTALL)[1]  # type: ignore[index]
    assert policy == (
        f"default-src 'none'; script-src {hashed(script)}; style-src {hashed(style)}; img-src data: blob:;"
        " media-src blob:; base-uri 'none'; form-action 'none'"
    )


def hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_page_has_no_external_references() -> None:
    text = document.render_html(records.jane())
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", text)
    assert not re.search(r"\b(?:fetch|XMLHttpRequest|WebSocket|import)\s*\(", text)


def test_equal_records_give_equal_pages() -> None:
    assert document.render_html(lazy(10)) == document.render_html(lazy(10))


def test_a_frame_holds_the_whole_page() -> None:
    record = records.jane()
    frame = document.render_frame(record)
    assert html.unescape(re.search(r'srcdoc="([^"]*)"', frame)[1]) == document.render_html(record)  # type: ignore[index]
    assert record._repr_mimebundle_()["text/html"].endswith(frame)


def test_further_sequences_are_counted() -> None:
    layer = Layer("l", matrix=torch.rand(20, 1, 3, 3).softmax(-1))
    record = Record({"l": layer}, {"input": Labels.positions(20, 3)}, model="M")
    header, arrays = read_payload(document.render_html(record))
    assert (header["sequences"], header["total"]) == (8, 20)
    assert decode_array(header, arrays, "0.entries").shape == (8, 1, 3, 3)


def test_save_writes_the_page(tmp_path: Path) -> None:
    records.jane().save(tmp_path / "x.html")
    assert (tmp_path / "x.html").read_text("utf-8") == document.render_html(records.jane())


def test_an_empty_record_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one layer"):
        document.render_html(Record())


def test_modules_are_bundled_in_order() -> None:
    names = bundle.order_modules("main")
    assert names.index("dom") < names.index("text") < names.index("app") < names.index("main")
    assert not re.search(r"^(import|export)\b", bundle.bundle_script(), re.MULTILINE)
    assert "</script" not in bundle.bundle_script()


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"a": 'import { b } from "./b.js";\n', "b": 'import { a } from "./a.js";\n'}, "a -> b -> a"),
        ({"a": "export default 3;\n"}, "export default 3"),
        ({"a": 'import x from "./b.js";\n'}, "import x from"),
    ],
)
def test_unsupported_modules_are_refused(
    sources: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "read_module", sources.__getitem__)
    with pytest.raises(ValueError, match=message):
        bundle.bundle_script("a")


def test_lightness_of_page_ramps_is_monotonic() -> None:
    ramps = re.findall(r"\b(?:to|from): (\[.*?\])", bundle.read_module("colors"))
    assert len(ramps) == 4
    for ramp in ramps:
        light = [
            sum(w * int(color[i : i + 2], 16) for w, i in ((0.299, 1), (0.587, 3), (0.114, 5))) for color in eval(ramp)
        ]
        steps = [after - before for before, after in pairwise(light)]
        # Monotonic lightness is readable without color vision.
        assert all(step < -12 for step in steps) or all(step > 12 for step in steps)


def test_gzip_has_no_time_stamp() -> None:
    packed = payload.encode_payload(records.jane())
    assert packed[4:8] == b"\0\0\0\0"
    assert decode_payload(packed)[0]["model"] == "BertModel"


@pytest.mark.parametrize("name", [*HOSTILE, "x" * 1_000_000])
def test_any_model_name_is_accepted(name: str) -> None:
    record = records.jane()
    record.model = name
    made = document.render_html(record)
    made.encode()
    title = re.search("<title>([^<]*)</title>", made)
    assert title
    assert len(title[1]) < 300
    assert len(made) < 300_000
    assert 'title="attention of ' in document.render_frame(record)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf")])
def test_nonfinite_numbers_are_null_in_json(seconds: float) -> None:
    record = records.jane()
    record.labels["input"] = replace(record.labels["input"], seconds=seconds)
    record.layers["layers.0"] = replace(record.layers["layers.0"], matrix=torch.full((1, 2, 7, 7), float("inf")))
    header, _ = read_payload(document.render_html(record))
    assert header["labels"][0]["seconds"] is None
    assert "Infinity" not in str(header["metrics"])


def test_a_layer_without_keys_is_refused() -> None:
    record = Record({"l": Layer("l", matrix=torch.zeros(1, 1, 4, 0))}, {}, model="M")
    with pytest.raises(ValueError, match=r"L0 must have at least one query and one key, got shape \(1, 1, 4, 0\)"):
        document.render_html(record)


@pytest.mark.parametrize("make", [records.jane, records.translation, records.image, lambda: lazy(12)])
def test_page_and_terminal_have_the_same_initial_selection(make: Callable[[], Record]) -> None:
    record = make()
    first = read_payload(document.render_html(record))[0]["initial"]
    selected = selection.select_default_head(record)
    assert first["head"] == selected.name
    heading = next(line for line in str(render_record(record)).splitlines()[::-1] if line.startswith("Attention of "))
    assert f" in {selected.name}" in heading
    labels = record.labels_of(selected.layer)[0]
    if labels.grid is None:
        word = next(unit for unit in list_units(labels) if first["query"] in unit.positions)
        assert f"“{word.text}”" in heading
    else:
        assert first["query"] == 0


def test_nonfinite_rows_are_counted_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without NaN, entries would be stored as logarithms.
    monkeypatch.setattr(payload, "MAX_FLOAT_ENTRIES", 1)
    record = records.jane()
    matrix = record["L0"].matrix
    assert matrix is not None
    matrix[0, 1, 2:4] = torch.nan
    header, arrays = read_payload(document.render_html(record))
    assert header["layers"][0]["nonfiniteRows"] == [[0, 2]]
    assert decode_array(header, arrays, "0.entries").isnan().any(-1).nonzero().tolist() == [[0, 1, 2], [0, 1, 3]]
    monkeypatch.setattr(payload, "MAX_EXACT_LENGTH", 1)
    monkeypatch.setattr(payload, "MAX_EXACT_ENTRIES", 1)
    assert read_payload(document.render_html(record))[0]["layers"][0]["nonfiniteRows"] == [[0, 2]]

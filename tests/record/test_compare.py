"""foci.compare: two records side by side, aligned by tokens, in every view."""

import io
import re
from pathlib import Path

import pytest
import torch

import foci
from foci.record.compare import align_labels
from foci.record.labels import Labels
from foci.record.record import Record
from foci.view.page.comparison import render_comparison_page
from tests.view import records
from tests.view.pages import decode_array, lazy, read_payload

SHORT = ("Jane", " eats", " soup")
LONG = ("Jane", " Smith", " eats", " pasta")


def make(tokens: tuple[str, ...], seed: int = 0, layers: int = 2, heads: int = 2) -> Record:
    return records.of_texts(*tokens, seed=seed, layers=layers, heads=heads)


def test_positions_are_aligned_by_tokens() -> None:
    comparison = foci.compare(make(SHORT), make(LONG))
    queries, keys = comparison.align("L0")
    assert queries == keys == [(0, 0), (None, 1), (1, 2), (2, None), (None, 3)]
    assert comparison.texts("L0")[0] == ["Jane", " Smith", " eats", " soup", " pasta"]
    first, second = (Labels.tokens([texts]) for texts in (("The", " cat"), ("the", " cat")))
    assert align_labels(first, second, 0) == [(0, 0), (1, 1)]


def test_the_difference_is_that_of_the_aligned_weights() -> None:
    a, b = make(SHORT, 1), make(LONG, 2)
    difference = foci.compare(a, b).difference("L1H1")
    one, other = a["L1H1"].dense()[0], b["L1H1"].dense()[0]
    assert difference[0, 0] == other[0, 0] - one[0, 0]
    assert difference[2, 1] == other[2, 1]
    assert difference[2, 3] == -one[1, 2]
    assert difference[[1, 3, 4]].isnan().all()
    mean = foci.compare(a, b).difference("L1")
    torch.testing.assert_close(mean[2, 2], b["L1"].dense()[0, :, 2, 2].mean() - a["L1"].dense()[0, :, 1, 1].mean())


def test_changes_are_total_variation_distances() -> None:
    a = make(SHORT)
    assert set(foci.compare(a, a).changes().values()) == {0.0}
    b = make(SHORT, 5)
    changes = foci.compare(a, b).changes()
    for head, change in changes.items():
        exact = (a[head].dense()[0] - b[head].dense()[0]).abs().sum(-1).mean() / 2
        assert change == pytest.approx(float(exact), abs=1e-6)
    assert list(changes.values()) == sorted(changes.values(), reverse=True)
    apart = foci.compare(
        Record.from_tensors([torch.eye(2)[None, None]]), Record.from_tensors([torch.eye(2).flip(0)[None, None]])
    )
    assert apart.changes() == {"L0H0": 1.0}


def test_heads_layers_and_lazy_records_are_compared() -> None:
    record = lazy(12)
    comparison = foci.compare(record["L0H1"], record["L1H2"], names=("early", "late"))
    assert comparison.heads == ["L0H1 and L1H2"]
    exact = record["L1H2"].dense()[0] - record["L0H1"].dense()[0]
    torch.testing.assert_close(comparison.difference("L0H1 and L1H2"), exact)
    assert repr(foci.compare(record["L0"], record["L1"])) == "Comparison of a and b: 1 layer, 4 heads"
    # The labels of the record are unchanged.
    assert list(record.labels) == ["input"]


def test_the_terminal_shows_both_texts_and_the_difference() -> None:
    out = io.StringIO()
    foci.compare(make(SHORT, 1), make(LONG, 2), names=("short", "long")).show("eats", head="L0H1", width=80, file=out)
    text = out.getvalue()
    assert "Attention of “eats” in L0H1" in text
    assert "Jane »eats« soup" in text
    assert "Jane Smith »eats« pasta" in text
    one, other = make(SHORT, 1)["L0H1"].dense()[0, 1, 0], make(LONG, 2)["L0H1"].dense()[0, 2, 0]
    assert f"{100 * float(other - one):+.1f}" in text
    same = io.StringIO()
    foci.compare(make(SHORT), make(SHORT)).show(file=same)
    assert "Its weights are the same." in same.getvalue()


def test_the_page_and_the_figures_are_written(tmp_path: Path) -> None:
    comparison = foci.compare(make(SHORT, 1), make(LONG, 2), names=("short", "long"))
    for suffix in ("html", "png", "svg", "pdf"):
        comparison.save(tmp_path / f"x.{suffix}")
    assert "pasta" in (tmp_path / "x.svg").read_text()
    header, _ = read_payload(render_comparison_page(comparison))
    assert header["compare"]["names"] == ["short", "long"]
    pair = header["compare"]["pairs"][1]
    assert [header["layers"][number]["label"] for number in pair["layers"]] == ["short.L1", "long.L1"]
    assert pair["queries"] == [[0, 0], [None, 1], [1, 2], [2, None], [None, 3]]
    assert "<iframe" in comparison._repr_mimebundle_()["text/html"]


def test_an_encoder_decoder_is_compared() -> None:
    comparison = foci.compare(records.translation(), records.translation())
    assert "cross.L0H1" in comparison.heads
    assert comparison.difference("cross.L0H1").shape == (4, 3)
    render_comparison_page(comparison)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (make(SHORT), 3, r"b must be a Record, or a layer or head of one, got int"),
        (make(SHORT), make(SHORT, heads=4), r"a and b must have layers of the same name with the same heads, got L0 "),
        (make(SHORT), make(("x", "y")), r"a and b must have tokens in common, got none among the queries of L0"),
        (make(SHORT), records.kept(), r"a and b must have layers of the same name with the same heads"),
        (records.kept(), records.kept(), r"a must have the weights of L0, got statistics only: use keep='lazy'"),
        (
            lazy(5),
            Record.from_tensors([torch.eye(3).expand(1, 4, 3, 3)]),
            r"a and b must have labels where their lengths differ",
        ),
        (lazy(5)["L0"], lazy(5)["L0H1"], r"a and b must have the same number of heads, got 4 and 1"),
    ],
)
def test_what_cannot_be_compared_is_refused(a: object, b: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        foci.compare(a, b)


def test_wrong_arguments_are_refused() -> None:
    comparison = foci.compare(make(SHORT), make(LONG))
    with pytest.raises(ValueError, match=r"names must be two different texts without \. : # ~, got"):
        foci.compare(make(SHORT), make(LONG), names=("a", "a"))
    with pytest.raises(ValueError, match=r"batch must be from 0 to 0, the sequences of a, got 1"):
        foci.compare(make(SHORT), make(LONG), batch=1)
    with pytest.raises(ValueError, match=r"head must be a layer \(L0, L1\) or a head such as L0H0, got 'L7'"):
        comparison.difference("L7")
    with pytest.raises(ValueError, match=r"word must be one that both texts have, got 'soup'"):
        comparison.show("soup")


def test_the_terminal_shows_the_maps_of_a_word_on_both_images() -> None:
    out = io.StringIO()
    foci.compare(*records.mirrored_images(), names=("one", "other")).show("shoe", head="L0H1", width=80, file=out)
    text = out.getvalue()
    assert "<s> A red »sh«oe." in text
    assert "0,1" not in text.split("difference")[0]
    assert re.findall(r"brightest: [\d.]+%, patch (\d,\d)", text) == ["1,2", "0,0"]


def test_where_images_attend_to_text_the_maps_are_those_of_a_word() -> None:
    seen, out = records.denoising(), io.StringIO()
    comparison = foci.compare(seen.at(step=1), seen.at(step=3))
    comparison.show("shoe", width=80, file=out)
    assert "Attention to “shoe” in cross.L0H0" in out.getvalue()
    assert re.findall(r"brightest: 80.0%, patch (\d,\d)", out.getvalue()) == ["0,1", "0,3"]
    header, _ = read_payload(render_comparison_page(comparison))
    assert header["initial"] == {"head": "a cross.L0H0", "query": 0, "direction": "from"}


def test_a_word_at_other_places_in_both_texts_is_found() -> None:
    a, b, out = make(("soup", " Jane", " eats"), 1), make(SHORT, 2), io.StringIO()
    comparison = foci.compare(a, b)
    assert comparison.align("L0")[0] == [(0, None), (1, 0), (2, 1), (None, 2)]
    comparison.show("soup", head="L0H0", width=80, file=out)
    assert "»soup«" in out.getvalue()
    listed = [line.split() for line in out.getvalue().splitlines()]
    one, other = a["L0H0"].dense()[0, 0, 2], b["L0H0"].dense()[0, 2, 1]
    assert ["eats", f"{one:.1%}", f"{other:.1%}", f"{100 * float(other - one):+.1f}"] in listed


def test_the_page_begins_with_what_changed_most_and_has_both_pictures() -> None:
    before, after = records.mirrored_images()
    for record, key in ((before, 0), (after, 7)):
        for layer in record.layers.values():
            assert layer.matrix is not None
            # The last token changes most, but does not attend to the image.
            layer.matrix[..., -1, :] = torch.eye(layer.shape[-1])[key]
    header, _ = read_payload(render_comparison_page(foci.compare(before, after)))
    texts = before.labels["input"].texts[0]
    assert texts[header["initial"]["query"]] in {" sh", "oe"}
    shown = {layer["labels"][1] for layer in header["layers"]}
    pictures = {header["labels"][number]["images"][0][0]["segments"][0]["picture"] for number in shown}
    assert len(pictures) == 2
    # The layers of one record share their labels.
    assert len(header["labels"]) == 2


def test_the_page_shows_the_compared_sequence() -> None:
    weights = [torch.rand(3, 1, 2, 2).softmax(-1) for _ in range(2)]
    a, b = (Record.from_tensors([each], tokens=[["a", "b"], ["c", "d"], ["e", "f"]]) for each in weights)
    header, arrays = read_payload(render_comparison_page(foci.compare(a, b, batch=1)))
    assert header["sequences"] == 1
    assert [labels["texts"] for labels in header["labels"]] == [[["c", "d"]]]
    torch.testing.assert_close(decode_array(header, arrays, "1.entries")[0], weights[1][1])


def test_the_figure_of_a_word_has_its_maps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from foci.view.figures.comparison import plot_compared_maps

    before, after = records.mirrored_images()
    comparison = foci.compare(before, after)
    axes = plot_compared_maps(comparison, "shoe", head="L0H1").figure.axes
    drawn = [torch.as_tensor(ax.images[-1].get_array().filled(float("nan"))) for ax in axes[:3]]
    one, other = (each.image_map("shoe", layer=0, head=1).to(drawn[0]) for each in (before, after))
    for found, expected in zip(drawn, (one, other, other - one), strict=True):
        torch.testing.assert_close(found, expected, check_dtype=False)
    comparison.save(tmp_path / "x.png", word="shoe", dpi=30)
    with pytest.raises(ValueError, match=r"query must be a word of the text .*, got 'hat'"):
        comparison.save(tmp_path / "x.png", word="hat")
    with pytest.raises(ValueError, match="the record must have image patches among its keys, got none"):
        foci.compare(make(SHORT), make(SHORT, 1)).save(tmp_path / "x.png", word="soup")
    with pytest.raises(TypeError, match="options of a figure must be head, word, image, frame and dpi, got words"):
        comparison.save(tmp_path / "x.png", words=["shoe"])


def test_the_figure_of_a_word_shows_a_frame_of_both_videos(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from foci.view.figures.comparison import plot_compared_maps

    before, after = records.mirrored_images(frames=3)
    comparison, expected = foci.compare(before, after), before.image_map("shoe", layer=0, head=1)
    for frame in (None, 0, 2):
        ax = plot_compared_maps(comparison, "shoe", head="L0H1", frame=frame)
        found = torch.as_tensor(ax.images[-1].get_array().filled(float("nan")))
        wanted = expected.sum(0) if frame is None else expected[frame]
        torch.testing.assert_close(found, wanted.to(found), check_dtype=False)
    with pytest.raises(ValueError, match="frame must be from 0 to 2, got 3"):
        comparison.save(tmp_path / "x.png", word="shoe", frame=3)


def test_the_terminal_says_that_frames_are_summed() -> None:
    out = io.StringIO()
    foci.compare(*records.mirrored_images(frames=3)).show("shoe", head="L0H1", width=80, file=out)
    assert out.getvalue().count("in the sum of 3 frames") == 2

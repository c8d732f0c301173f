import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import pytest
import torch
from matplotlib.axes import Axes

from foci.record.labels import Labels
from foci.record.layer import Layer
from foci.record.record import Record
from foci.view.figures import plots, theme
from tests.view.records import image, jane, of_texts, plain_image, translation


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    mpl.use("agg")
    yield
    theme.import_pyplot().close("all")


def shown(ax: Axes) -> torch.Tensor:
    return torch.as_tensor(ax.images[-1].get_array().filled(float("nan")))


def texts(labels: list[mpl.text.Text]) -> list[str]:
    return [label.get_text() for label in labels]


def test_a_matrix_has_numbers_words_and_axis_labels() -> None:
    ax = plots.plot_matrix(jane(), "L0H1")
    assert texts(ax.get_yticklabels()) == texts(ax.get_xticklabels()) == ["[CLS]", "Jane", "is", "hungry", ".", "[SEP]"]
    assert (ax.get_ylabel(), ax.get_xlabel(), ax.get_title(loc="left")) == ("query", "key", "L0H1")
    torch.testing.assert_close(shown(ax)[3], torch.tensor([0.1, 0.6, 0.075, 0.15, 0.025, 0.05]))
    assert texts(ax.texts)[-2:] == ["90", "10"]


def test_a_matrix_by_token_and_without_numbers() -> None:
    ax = plots.plot_matrix(jane(), "L0", by_token=True, numbers=False)
    assert shown(ax).shape == (7, 7)
    assert not ax.texts
    assert ax.get_title(loc="left") == "L0, mean of heads"


def test_given_axes_are_used() -> None:
    figure, axes = theme.import_pyplot().subplots(1, 2)
    assert plots.plot_matrix(jane(), "L0H0", ax=axes[1]) is axes[1]
    assert plots.plot_entropy(jane(), axes[0]) is axes[0]
    assert axes[1].get_figure() is figure


def test_an_alignment_has_source_words_in_columns() -> None:
    ax = plots.plot_alignment(translation(), "cross.L0H1")
    assert texts(ax.get_xticklabels()) == ["A", "man", "sleeps"]
    assert texts(ax.get_yticklabels()) == ["Ein", "Mann", "schläft", "</s>"]
    assert plots.plot_alignment(translation()).get_title(loc="left") == "cross.L0, mean of heads"
    with pytest.raises(ValueError, match=r"head must be a cross-attention head such as cross\.L0H1, got L0H1"):
        plots.plot_alignment(jane())


def test_the_head_grid_has_a_picture_for_each_head() -> None:
    ax = plots.plot_heads(of_texts(*"abcdef", layers=3, heads=4))
    assert shown(ax).shape == (3 * 7, 4 * 7)
    assert texts(ax.get_yticklabels()) == ["L0", "L1", "L2"]
    assert texts(ax.get_xticklabels()) == ["H0", "H1", "H2", "H3"]
    # Each picture is relative to its largest weight.
    assert [float(shown(ax)[:6, i * 7 : i * 7 + 6].max()) for i in range(4)] == [1.0] * 4


def test_the_overlay_colors_the_patches() -> None:
    ax = plots.plot_overlay(image())
    assert ax.get_title(loc="left") == "Attention of the class token in L0H0"
    assert len(ax.images) == 2
    torch.testing.assert_close(shown(ax).flatten(), 0.9 * torch.arange(1.0, 7) / 21)
    assert not ax.patches
    framed = plots.plot_overlay(image(pictures=False), patch="1,2")
    assert len(framed.images) == 1
    assert framed.patches[0].get_xy() == (1.5, 0.5)


def test_entropy_per_layer_has_a_line_for_each_stack() -> None:
    assert texts(plots.plot_entropy(translation()).get_legend().get_texts()) == ["encoder", "decoder", "cross"]
    record = of_texts(*"abc", layers=2, heads=3)
    means = plots.plot_entropy(record).lines[-1].get_ydata()
    torch.testing.assert_close(torch.as_tensor(means), record.scores()["entropy"].mean(1))


def test_a_long_text_is_drawn_in_blocks() -> None:
    ax = plots.plot_matrix(of_texts(*(f" w{i}" for i in range(300))))
    assert shown(ax).shape == (256, 256)
    assert ax.images[0].get_extent() == [-0.5, 299.5, 299.5, -0.5]
    assert legend(ax) == "attention weight, mean of a block\ncolor by its square root"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("queries", "keys"), [(17, 129), (129, 17), (5, 100), (30, 300), (2, 1500), (2, 40), (1, 1)])
def test_a_matrix_of_any_shape_has_room_and_integer_ticks(queries: int, keys: int) -> None:
    ax = plots.plot_matrix(across(queries, keys), "cross.L0H0")
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.canvas.draw()
    width, height = figure.get_size_inches()
    box = ax.get_window_extent()
    assert 1.9 < min(width, height) < max(width, height) < 13
    assert box.width / figure.dpi > 1
    assert box.height / figure.dpi > 1.4
    for axis in (ax.xaxis, ax.yaxis):
        names = [label for label in axis.get_ticklabels() if label.get_text()]
        # There is a tick below 0 outside of the axes, which is not drawn.
        assert all(label.get_text().lstrip("\u2212").isdecimal() for label in names)
        assert axis.axis_name == "x" or apart(names)


def apart(labels: list[mpl.text.Text]) -> bool:
    """Whether no label overlaps the one below it."""
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.y0)
    return all(low.y1 <= high.y0 + 1 for low, high in pairwise(boxes))


def test_words_are_written_along_the_short_axis() -> None:
    record = across(3, 100)
    record.labels["target"] = Labels.tokens([["ver", "rückt", "."]], [[0, 0, 1]])
    ax = plots.plot_matrix(record, "cross.L0H0")
    assert texts(ax.get_yticklabels()) == ["verrückt", "."]
    torch.testing.assert_close(shown(ax)[0], record["cross.L0H0"].dense()[0, :2].mean(0))
    assert legend(ax) == "attention weight\ncolor by its square root"


def test_audio_frames_are_labelled_in_seconds() -> None:
    record = across(2, 200)
    record.labels["source"] = Labels("frames", (tuple(f"{i * 0.04:.2f}" for i in range(200)),), seconds=0.04)
    ax = plots.plot_matrix(record, "cross.L0H0")
    assert {"0 s", "2 s", "6 s"} <= {*ax.xaxis.get_major_formatter().format_ticks(ax.get_xticks())}


def across(queries: int, keys: int) -> Record:
    """Random cross-attention between two sequences without texts."""
    matrix = torch.randn(1, 1, queries, keys, generator=torch.Generator().manual_seed(0)).softmax(-1)
    return Record({"cross": Layer("cross", "cross", matrix=matrix, queries="target", keys="source")})


def legend(ax: Axes) -> str:
    return ax.child_axes[0].get_ylabel()


@pytest.mark.parametrize(
    ("record", "what"),
    [
        (jane(), "matrix"),
        (jane(), "heads"),
        (jane(), "entropy"),
        (translation(), "alignment"),
        (translation(), "heads"),
        (image(), "overlay"),
        (of_texts("x"), "matrix"),
        (of_texts("x"), "heads"),
    ],
)
def test_every_figure_is_saved_and_closed(record: Record, what: str, tmp_path: Path) -> None:
    record.save(tmp_path / "x.png", what=what, dpi=50)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert not theme.import_pyplot().get_fignums()


def test_the_default_figure_depends_on_the_record(tmp_path: Path) -> None:
    for record, word in ((jane(), "hungry"), (translation(), "schläft"), (image(), "Attention of the class token")):
        record.save(tmp_path / "x.svg")
        assert word in (tmp_path / "x.svg").read_text()


def test_equal_records_give_equal_files(tmp_path: Path) -> None:
    for ending in ("svg", "pdf"):
        for name in ("a", "b"):
            jane().save(tmp_path / f"{name}.{ending}", what="entropy")
        assert (tmp_path / f"a.{ending}").read_bytes() == (tmp_path / f"b.{ending}").read_bytes()


def test_text_stays_text_and_fonts_are_embedded(tmp_path: Path) -> None:
    jane().save(tmp_path / "x.svg", head="L0H1")
    svg = (tmp_path / "x.svg").read_text()
    assert ">hungry</text>" in svg
    assert ">query</text>" in svg
    jane().save(tmp_path / "x.pdf", head="L0H1")
    pdf = (tmp_path / "x.pdf").read_bytes()
    assert b"/TrueType" in pdf or b"/CIDFontType2" in pdf
    assert b"/Type3" not in pdf


def test_hostile_tokens_are_plain_text(tmp_path: Path) -> None:
    record = of_texts("$x^2$", "\\frac{", "</text><script>", "\x1b[2J", "a" * 10_000, "%", "_", "\n")
    record.save(tmp_path / "x.svg")
    svg = (tmp_path / "x.svg").read_text()
    assert ">$x^2$</text>" in svg
    assert ">\\frac{</text>" in svg
    assert "<script>" not in svg
    assert ">⟨001B⟩[2J</text>" in svg
    assert len(svg) < 100_000


def test_characters_without_a_font_become_boxes_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theme, "list_drawable_characters", lambda: frozenset(map(ord, "abc")))
    with pytest.warns(UserWarning, match=r"no installed font has 漢x: drawn as □; install one such as Noto Sans CJK"):
        assert theme.format_labels(["a漢", "xb"]) == ["a□", "□b"]


def test_latin_greek_and_cyrillic_need_no_extra_font() -> None:
    assert theme.format_labels(["naïve", "ελληνικά", "русский", "⟨202E⟩↵⇥∅…□�"]) == [
        "naïve",
        "ελληνικά",
        "русский",
        "⟨202E⟩↵⇥∅…□�",
    ]


def test_unknown_figures_and_missing_grids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"what must be one of matrix, heads, alignment, overlay, entropy, words, steps, got"
    ):
        jane().save(tmp_path / "x.png", what="cake")
    with pytest.raises(ValueError, match=r"labels must be those of an image with a grid of patches, got"):
        plots.plot_overlay(jane())


def test_missing_matplotlib_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        ImportError, match=r"figures need matplotlib, which is not installed: pip install 'foci\[view\]'"
    ):
        plots.plot_matrix(jane())


def test_user_settings_are_not_changed() -> None:
    before = dict(mpl.rcParams)
    plots.plot_matrix(jane())
    assert dict(mpl.rcParams) == before


def test_words_come_from_the_labels() -> None:
    record = of_texts("a", "b")
    record.labels["input"] = Labels.tokens([["left", " right"]])
    assert texts(plots.plot_matrix(record, "L0H0").get_xticklabels()) == ["left", "right"]


def test_uniform_attention_leaves_the_image_visible() -> None:
    count = 36
    record = plain_image((6, 6))
    record.layers["blocks.0"] = Layer(
        "blocks.0", matrix=torch.full((1, 1, count, count), 1 / count), queries="patches", keys="patches"
    )
    ax = plots.plot_overlay(record)
    over = ax.images[-1]
    assert float(over.get_alpha().max()) < 0.5
    assert over.get_clim()[1] == pytest.approx(3 / count)
    assert ax.get_title(loc="left") == "Attention of the middle patch in L0H0"
    # Black stays dark.
    assert float(ax.images[0].get_array().max()) < 0.2


@pytest.mark.parametrize(("queries", "keys"), [(70, 1), (9, 3), (3, 9)])
def test_query_and_key_lengths_may_differ(queries: int, keys: int) -> None:
    ax = plots.plot_matrix(Record.from_tensors([torch.full((1, 1, queries, keys), 1 / keys)]))
    assert ax.images[0].get_array().shape == (queries, keys)


def test_uniform_attention_is_pale_in_figures() -> None:
    uniform = Record({"l": Layer("l", matrix=torch.full((1, 2, 12, 12), 1 / 12))}, model="Uniform")
    matrix = plots.plot_matrix(uniform, "L0H0").images[0]
    assert float(matrix.norm(1 / 12)) < 0.4
    heads = plots.plot_heads(uniform).images[0]
    assert float(heads.get_array().max()) < 0.6


def test_a_note_is_written_below_the_figure(tmp_path: Path) -> None:
    record = jane()
    record.notes.append("the text is cut: the model reads the first 7 of 90 tokens")
    record.save(tmp_path / "x.svg")
    assert "Note: the text is cut: the model reads the first 7 of 90 tokens." in (tmp_path / "x.svg").read_text()

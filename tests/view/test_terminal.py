import io
import os
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import foci
from foci.record.labels import Labels, Segment
from foci.record.layer import Layer
from foci.record.record import Record
from foci.runtime.console import ANSI_STYLE, text_width
from foci.view.selection import (
    compute_unit_weights,
    select_default_head,
    select_default_query,
    select_head,
    select_patch,
)
from foci.view.terminal import patches, record, text
from foci.view.terminal.record import render_record, show_record
from foci.view.terminal.styled_text import TerminalPage
from foci.view.units import TextUnit, find_unit, list_layer_units, list_units
from tests.view.records import (
    denoising,
    image,
    jane,
    kept,
    of_texts,
    translation,
    translation_with_sinks,
    words_and_images,
)


def lines(record: Record, width: int = 72, **options: object) -> list[str]:
    return render_record(record, page=TerminalPage(width), **options).lines  # type: ignore[arg-type]


JANE = """\
BertModel
   1 layer of 2 heads, 7 tokens

Heads
   Rows are layers, columns are heads; below each table its extreme
   head.
      entropy        first token    distance       previous token
   L0     ████           ░░░░           ████
      min L0H0 0.0   max L0H1 39%   max L0H1 2.6   max L0H1 11%

Attention of “hungry” in L0H1
   [CLS] Jane is »hungry«. [SEP]
   ▒▒▒▒▒ ████ ░░ ▒▒▒▒▒▒▒▒  ░░░░░

   Jane     60.0%  ███████████████████████████████▊
   hungry   15.0%  ████████
   [CLS]    10.0%  █████▎
   is        7.5%  ████
   [SEP]     5.0%  ██▋
   .         2.5%  █▍

All of L0H1
   Rows are queries, columns are keys; in percent.
            [CLS]   Jane     is hungry      .  [SEP]
   [CLS]   ███ 40 ▒▒▒ 10 ▒▒▒ 10 ▓▓▓ 20 ▒▒▒ 10 ▒▒▒ 10
   Jane    ███ 50 ▓▓▓ 20 ▒▒▒ 10 ▒▒▒ 10 ░░░  5 ░░░  5
   is      ▒▒▒ 10 ▒▒▒ 10 ███ 40 ▓▓▓ 30 ░░░  5 ░░░  5
   hungry  ▒▒▒ 10 ███ 60 ░░░  8 ▒▒▒ 15      3 ░░░  5
   .       ███ 60 ▒▒▒ 10 ░░░  5 ▒▒▒ 10 ▒▒▒ 10 ░░░  5
   [SEP]   ███ 90      0      0      0      0 ▒▒▒ 10"""


def test_a_sentence_without_color() -> None:
    assert str(render_record(jane(), page=TerminalPage(72))) == JANE


def test_show_prints_the_rendered_page_without_color_to_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLORTERM", "truecolor")
    out = io.StringIO()
    jane().show(width=72, file=out)
    assert out.getvalue() == JANE + "\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def painted(monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    for name in ("NO_COLOR", "COLORTERM", "COLORFGBG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    out = Terminal()
    show_record(jane(), "hungry", head="L0H1", width=72, file=out)
    return out.getvalue()


def test_text_in_true_color(monkeypatch: pytest.MonkeyPatch) -> None:
    assert painted(monkeypatch, COLORTERM="truecolor").splitlines()[4] == (
        "   \x1b[48;2;113;30;128;38;2;238;236;232m[CLS]\x1b[0m"
        " \x1b[48;2;249;139;104;38;2;16;14;24mJane\x1b[0m"
        " \x1b[48;2;96;25;125;38;2;238;236;232mis\x1b[0m"
        " \x1b[48;2;141;40;127;38;2;238;236;232m\x1b[1;4mhungry\x1b[0m\x1b[0m"
        "\x1b[48;2;52;18;96;38;2;238;236;232m.\x1b[0m"
        " \x1b[48;2;77;22;112;38;2;238;236;232m[SEP]\x1b[0m"
    )


def test_text_in_256_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    line = painted(monkeypatch).splitlines()[4]
    assert re.findall(r"48;5;(\d+)", line) == ["54", "209", "54", "90", "53", "53"]
    assert "48;2;" not in line


def test_a_light_background_has_light_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    line = painted(monkeypatch, COLORTERM="24bit", COLORFGBG="0;15").splitlines()[4]
    assert line.startswith("   \x1b[48;2;250;159;114;38;2;16;14;24m[CLS]")


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_color_if_disabled(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in painted(monkeypatch, **environment)


def test_color_does_not_change_words(monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = ANSI_STYLE.sub("", painted(monkeypatch, COLORTERM="truecolor"))
    assert "Attention of “hungry” in L0H1\n   [CLS] Jane is hungry. [SEP]\n\n   Jane     60.0%  ██████" in coloured
    assert "   hungry     10     60      8     15      3      5 " in coloured


def test_a_narrow_terminal_has_shades_and_vertical_words() -> None:
    assert lines(jane(), 24, head="L0H1")[4:] == [
        "Attention of “hungry”",
        "in L0H1",
        " [CLS] Jane is »hungry«.",
        " ▒▒▒▒▒ ████ ░░ ▒▒▒▒▒▒▒▒",
        " [SEP]",
        " ░░░░░",
        "",
        " Jane     60.0%  ████▎",
        " hungry   15.0%  █",
        " [CLS]    10.0%  ▊",
        " is        7.5%  ▌",
        " [SEP]     5.0%  ▍",
        " .         2.5%  ▏",
        "",
        "All of L0H1",
        " Rows are queries,",
        " columns are keys.",
        "              h",
        "        [     u   [",
        "        C J   n   S",
        "        L a   g   E",
        "        S n i r   P",
        "        ] e s y . ]",
        " [CLS]  ██▒▒▒▒▓▓▒▒▒▒",
        " Jane   ██▓▓▒▒▒▒░░░░",
        " is     ▒▒▒▒██▓▓░░░░",
        " hungry ▒▒██░░▒▒  ░░",
        " .      ██▒▒░░▒▒▒▒░░",
        " [SEP]  ██        ▒▒",
    ]


def test_the_alignment_has_target_words_in_rows() -> None:
    found = lines(translation(), 60)
    assert found[-7:] == [
        "All of cross.L0, the mean of its heads",
        " Rows are queries, columns are keys; in percent.",
        "               A    man sleeps",
        " Ein      ███ 60 ▓▓▓ 20 ▓▓▓ 20",
        " Mann     ▓▓▓ 20 ███ 60 ▓▓▓ 20",
        " schläft  ▒▒▒ 15 ▓▓▓ 20 ███ 65",
        " </s>     ▒▒▒ 10 ▒▒▒ 10 ███ 80",
    ]
    assert lines(translation(), 60, word="schläft", head="L0H1")[5:10] == [
        "Attention of “schläft” in cross.L0H1",
        " Ein Mann »schläft« </s>",
        " ↓ attends to",
        " A man sleeps",
        "   ▒▒▒ ██████",
    ]


def test_patches_of_an_image() -> None:
    assert lines(image(), 60, head="L0")[1:] == [
        " 1 layer of 1 head, 2 × 3 patches",
        "",
        "Attention of the class token in L0H0",
        " ▒▒▓▓██",
        " ██████",
        " brightest: 25.7%, patch 1,2 (row, column)",
        " on the class token: 10.0%",
    ]
    assert "Attention of patch 1,0 in L0H0" in lines(image(), 60, word="1,0", head="L0")


@pytest.mark.parametrize(("grid", "place"), [((7, 7), 24), ((4, 6), 15), ((1, 1), 0), ((3, 2), 3)])
def test_without_a_class_token_the_middle_patch_is_selected(grid: tuple[int, int], place: int) -> None:
    names = tuple(f"{row},{column}" for row in range(grid[0]) for column in range(grid[1]))
    labels = Labels("patches", (names,), grid=grid)
    assert select_patch(labels, None) == (place, "the middle patch")
    assert names[place] == f"{grid[0] // 2},{grid[1] // 2}"


def test_many_patches_are_half_blocks() -> None:
    found = render_record(image((31, 40)), head="L0", page=TerminalPage(60, True, bits=24)).lines[4:-2]
    assert [text_width(line) for line in found] == [41] * 16
    assert found[0].count("▀") == 40


def test_the_image_is_beside_its_patches() -> None:
    first = render_record(image(), head="L0", page=TerminalPage(60, True, bits=24)).lines[4]
    assert first.startswith(" \x1b[38;2;0;10;20;48;2;0;10;20m▀\x1b[0m")
    assert ANSI_STYLE.sub("", first) == " ▀▀▀▀▀▀         "
    assert "▀" not in render_record(image(pictures=False), head="L0", page=TerminalPage(60, True, bits=24)).lines[4]


@pytest.mark.parametrize("place", ["2,0", "0,3", "99", "first"])
def test_an_unknown_patch_is_refused(place: str) -> None:
    with pytest.raises(ValueError, match=r"^patch must be row,column below 2,3 or a position, got"):
        render_record(image(), place)


def test_kept_statistics_show_top_keys() -> None:
    found = lines(kept(), 60)
    assert " 4 others   <0.1%" in found
    assert not any("sink" in line for line in found)


def test_a_learned_sink_is_named() -> None:
    layer = Layer("l", matrix=torch.full((1, 1, 2, 2), 0.25))
    record = Record({"l": layer}, {"input": Labels.tokens([("a", "b")])})
    found = lines(record, 60, head="L0H0")
    assert found[0] == "Attention"
    assert " on no key   50.0%" in found


def test_long_texts_skip_lines_and_end_with_a_map() -> None:
    record = of_texts(*(f" w{i}" for i in range(400)), seed=3)
    found = lines(record, 60)
    folded = [line for line in found if line.startswith(" ⋮")]
    assert folded
    assert any("»w" in line for line in found)
    start = found.index(" Queries from top to bottom, keys from left to right.") + 1
    assert len(found[start:]) == 20
    in_colour = render_record(record, page=TerminalPage(60, True, bits=24)).lines
    assert sum("▀" in line for line in in_colour) == 20


HOSTILE = (
    "\x1b[2J\x1b]0;title\x07",
    " \u202egnp.exe",
    "</script>",
    "a" * 1_000_000,
    "\n\n",
    "e" + "\u0301" * 500,
    "\ud800",
)


def test_hostile_tokens_are_plain_text() -> None:
    text = str(render_record(of_texts(*HOSTILE), page=TerminalPage(60)))
    assert not set(text) & {chr(c) for c in (*range(10), *range(11, 32), 0x7F, *range(0x80, 0xA0), 0x202E)}
    assert "␛[2J␛]0;title␇" in text
    assert "⟨202E⟩gnp.exe" in text
    text.encode()
    assert len(text) < 5000


def test_right_to_left_words_stay_in_their_column() -> None:
    record = of_texts("שלום", " עולם", " hello")
    rows = lines(record, 60, head="L0H0")[-3:]
    assert {line.split()[0] for line in rows} == {"\u2068שלום\u2069", "\u2068עולם\u2069", "hello"}
    assert {text_width(line) for line in rows} == {7 + 3 * 6}
    plain = next(line for line in lines(record, 60, head="L0H0") if "hello" in line and "עולם" in line)
    assert "\u2068" in plain
    running = render_record(record, head="L0H0", page=TerminalPage(60, True, bits=24)).lines[4]
    # In colour no line of shades has to stand under the words: the terminal may order them as they read.
    assert "\u2068" not in running


@pytest.mark.parametrize("width", [24, 40, 72, 80, 120])
@pytest.mark.parametrize("bits", [0, 8, 24])
@pytest.mark.parametrize(
    "record",
    [
        jane(),
        translation(),
        image(),
        kept(),
        of_texts("漢字", "は", "好き", "です", "👩\u200d👧", "❤\ufe0f", "नमस्ते", "한국어", layers=3, heads=16),
        of_texts(*HOSTILE),
        of_texts(*(f" word{i}" for i in range(18)), heads=40),
        of_texts("x"),
    ],
    ids=["jane", "translation", "image", "kept", "wide", "hostile", "many", "one"],
)
def test_no_line_is_wider_than_the_terminal(record: Record, width: int, bits: int) -> None:
    found = render_record(record, page=TerminalPage(width, bits > 0, bits=bits)).lines
    assert [line for line in found if text_width(line) > width] == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=9), st.integers(24, 90), st.sampled_from([0, 8, 24]))
def test_any_tokens_fit_any_width(texts: list[str], width: int, bits: int) -> None:
    found = render_record(of_texts(*texts), page=TerminalPage(width, bits > 0, bits=bits)).lines
    assert all(text_width(line) <= width for line in found)
    assert all("\n" not in line for line in found)


def test_words_are_summed_over_keys_and_averaged_over_queries() -> None:
    record = jane()
    layer = record.layers["layers.0"]
    queries, keys = list_layer_units(record, layer, 0)
    grouped = layer.grouped([(u.start, u.stop) for u in queries], [(u.start, u.stop) for u in keys])
    torch.testing.assert_close(compute_unit_weights(select_head(record, "L0H1"), 0, queries, keys), grouped[0, 1])
    mean = compute_unit_weights(select_head(record, "L0"), 0, queries, keys)
    torch.testing.assert_close(mean, grouped[0].mean(0))


def test_units_are_words_or_tokens_with_their_spaces() -> None:
    labels = jane().labels["input"]
    assert [(unit.text, unit.space_before) for unit in list_units(labels)] == [
        ("[CLS]", True),
        ("Jane", True),
        ("is", True),
        ("hungry", True),
        (".", False),
        ("[SEP]", True),
    ]
    assert [unit.text for unit in list_units(labels, by_token=True)] == [
        "[CLS]",
        "Jane",
        "is",
        "hun",
        "gry",
        ".",
        "[SEP]",
    ]
    assert [unit.text for unit in list_units(labels) if unit.is_word] == ["Jane", "is", "hungry"]


def test_padding_is_dropped_and_a_split_character_is_one_unit() -> None:
    padded = Labels.tokens([["a", "b", "c"], ["🙂", "", "d"], ["e"]])
    assert [[unit.text for unit in list_units(padded, i)] for i in range(3)] == [["a", "b", "c"], ["🙂", "d"], ["e"]]
    assert list_units(padded, 1)[0].stop == 2


def test_lines_break_at_newlines() -> None:
    texts = ["One", "\nTwo", " three", "\n", "four"]
    found = text.wrap_words(text.tint_words(list_units(Labels.tokens([texts])), [0.0] * 5, None, plain=True), 40)
    assert [[word.text for word in line] for line in found] == [["One"], ["Two", "three", "↵", "four"]]


def test_the_default_head_attends_to_distant_words() -> None:
    assert select_default_head(jane()).name == "L0H1"
    assert select_default_head(translation()).name == "cross.L0"
    assert select_default_head(translation_with_sinks()).name == "cross.L1"
    assert select_default_head(image()).name == "L0H0"


def record_of_links(links: list[dict[int, int]], numbers: list[int]) -> Record:
    """A record in which each query attends to one key: that of `links[head]`, else itself."""
    texts = ["Jane", " is", " ve", "ry", " hun", "gry", " in", " Rome", "."]
    places = [[head.get(i, i) for i in range(len(texts))] for head in links]
    entries = torch.eye(len(texts))[torch.tensor(places)].unsqueeze(0)
    labels = Labels.tokens([texts], [numbers])
    return Record({"layers.0": Layer("layers.0", matrix=entries)}, {"input": labels}, model="Example")


def test_punctuation_and_neighbor_words_are_not_distant() -> None:
    whole = [0, 1, 2, 2, 3, 3, 4, 5, 5]
    to_the_dot, to_the_word_before, to_jane = {0: 8, 1: 8}, {5: 2}, {7: 0}
    record = record_of_links([to_the_dot, to_the_word_before, to_jane], whole)
    assert select_default_head(record).name == "L0H2"
    assert "Attention of “Rome.” in L0H2" in render_record(record).lines


def test_a_space_token_does_not_make_a_word_distant() -> None:
    text, numbers = "so we go on", [0, 0, 1, 2, 2, 3, 4, 4, 5, 6, 6]
    to_the_word_before, to_the_first = {8: 4, 10: 6}, {10: 0}
    places = [[head.get(i, i) for i in range(len(text))] for head in (to_the_word_before, to_the_first)]
    entries = torch.eye(len(text))[torch.tensor(places)].unsqueeze(0)
    labels = Labels.tokens([tuple(text)], [numbers])
    record = Record({"layers.0": Layer("layers.0", matrix=entries)}, {"input": labels}, model="Example")
    assert select_default_head(record).name == "L0H1"


def test_a_head_with_few_large_weights_is_preferred_to_many_small_ones() -> None:
    entries = torch.zeros(1, 2, 8, 8)
    entries[0, 0] = torch.eye(8) * 0.7
    for i in range(8):
        entries[0, 0, i, (i + 4) % 8] += 0.3
    entries[0, 1] = torch.eye(8)
    entries[0, 1, 6] = torch.eye(8)[0]
    labels = Labels.tokens([[f" word{i}" for i in range(8)]])
    record = Record({"layers.0": Layer("layers.0", matrix=entries)}, {"input": labels}, model="Example")
    assert select_default_head(record).name == "L0H1"


def test_a_word_is_found_by_text_occurrence_and_index() -> None:
    shown = [TextUnit(text, i, i + 1) for i, text in enumerate(["the", "cat", "The", "7", "C#"])]
    assert [find_unit(shown, word) for word in ("the", "THE#2", "the#2", 3, "7", "2", "C#")] == [0, 2, 2, 3, 3, 2, 4]
    marked = [TextUnit(text, i, i + 1) for i, text in enumerate(["(Wo", "ist", "?", "Bahnhof?", "<stop>", "Wo"])]
    assert [find_unit(marked, word) for word in ("bahnhof", "Bahnhof?", "?", "wo", "<stop>")] == [3, 3, 2, 5, 4]
    for wrong in ("dog", "the#3", "99", 99, -1, "cat#0"):
        with pytest.raises(ValueError, match=r"^word must be one of the cat The 7 C#, got"):
            find_unit(shown, wrong)


def test_an_unknown_word_lists_the_words_of_the_other_sequences() -> None:
    record = Record(
        {
            "encoder": Layer(
                "encoder", stack="encoder", queries="source", keys="source", matrix=torch.eye(2)[None, None]
            ),
            "cross": Layer("cross", stack="cross", queries="answer", keys="source", matrix=torch.eye(2)[None, None]),
        },
        {"source": Labels.tokens([["Jane", " sleeps"]]), "answer": Labels.tokens([["Jane", " schläft"]])},
        model="Example",
    )
    message = r"^word must be one of Jane schläft, or of the source: Jane sleeps, got 'nope'$"
    with pytest.raises(ValueError, match=message):
        record.show("nope", "cross.L0")


@pytest.mark.parametrize(
    ("head", "layer", "message"),
    [
        ("L9H9", None, "head must be one of L0H0 to L0H1, got 'L9H9'"),
        ("hungry", None, "head must be one of L0H0 to L0H1, got 'hungry'"),
        (5, 0, "head must be one of L0H0 to L0H1, got 'L0H5'"),
        (1, None, "layer must be an int where head is 1, got None; a name has both: L0H0 to L0H1"),
    ],
)
def test_an_unknown_head_is_refused(head: str | int, layer: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        render_record(jane(), head=head, layer=layer)


def test_an_unknown_sequence_and_an_empty_record_are_refused() -> None:
    with pytest.raises(ValueError, match=r"batch must be from 0 to 0, got 3"):
        render_record(jane(), batch=3)
    with pytest.raises(ValueError, match=r"record must have at least one layer, got none"):
        render_record(Record({}, {}))


def test_modules_that_were_not_recorded_are_listed() -> None:
    record = jane()
    record.unseen = ["layers.7: it calls its own kernel"]
    assert "   not recorded: layers.7: it calls its own kernel" in lines(record)


def test_the_width_is_that_of_the_terminal_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for given_, used in (("10", 24), ("40", 40), ("500", 120)):
        monkeypatch.setitem(os.environ, "COLUMNS", given_)
        assert TerminalPage.for_stream(io.StringIO()).width == used


def lazy(length: int, heads: int = 1) -> Record:
    q = torch.randn(1, heads, length, 4, generator=torch.Generator().manual_seed(0))
    _, weights = foci.attention(q, q, q, mask=foci.causal, return_weights=True)
    labels = Labels.tokens([[f" w{i}" for i in range(length)]])
    return Record({"l": Layer("l", weights=weights)}, {"input": labels}, model="Lazy", calls=1)


def test_a_very_long_text_has_no_head_metrics() -> None:
    found = lines(lazy(2100, heads=2))
    assert "   Head metrics are slow for a text of this length: call record.scores()" in found
    assert "Attention of “w2099” in L0, the mean of its heads" in found
    assert len(found) < 60


def test_a_map_of_too_many_entries_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MAX_MAP_ENTRIES", 199 * 199)
    assert lines(lazy(199), 80, head="L0")[-1].startswith(" " * 3)
    assert lines(lazy(200), 80, head="L0")[-1] == "   No map of 200 positions: record with keep=foci.Keep() for one."


def test_lazy_weights_and_their_dense_matrix_print_the_same() -> None:
    record = lazy(30)
    matrix = record.layers["l"].dense()
    dense = Record({"l": Layer("l", matrix=matrix)}, record.labels, model="Lazy", calls=1)
    assert lines(record) == lines(dense)


def test_untrusted_names_are_printed_safely() -> None:
    harm = "\x1b[2J\u202e\x00"
    layer = Layer("l", harm, matrix=torch.eye(3).expand(1, 2, 3, 3), queries=harm, keys=harm)
    labels = {name: Labels.tokens([("a", "b", "c")]) for name in (harm, "input")}
    record = Record({"l": layer}, labels, model=harm * 10**6, unseen=[harm * 1000] * 100)
    text = "\n".join(lines(record))
    assert not {*harm} - {*"[2J"} & {*text}
    assert "not recorded: 88 more" in text
    assert len(text) < 10_000
    with pytest.raises(ValueError, match="head must be one of") as refused:
        lines(record, head="L9")
    assert "\x1b" not in str(refused.value)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("length", [5, 200])
def test_nonfinite_weights_are_noted(wrong: float, length: int) -> None:
    matrix = torch.eye(length).expand(1, 2, length, length).clone()
    matrix[:, :, 1] = wrong
    record = Record({"l": Layer("l", matrix=matrix)}, {"input": Labels.tokens([["w"] * length])}, model="M")
    found = lines(record, head="L0H1", word=1)
    said = f"1 of {length} rows of L0H1 has NaN or infinite weights, which are not drawn or counted."
    assert said in " ".join(" ".join(found).split())
    assert any("are NaN or infinite." in line for line in found)
    assert not any("sink" in line for line in found if "%" in line)
    assert lines(record)


def test_a_row_with_one_nan_is_not_shown() -> None:
    matrix = torch.full((1, 1, 5, 5), 0.2)
    matrix[0, 0, 2, 3] = torch.nan
    record = Record({"l": Layer("l", matrix=matrix)}, {"input": Labels.tokens([["a", "b", "c", "d", "e"]])})
    rows = [line.split() for line in lines(record, head="L0H0")]
    assert ["c", *"?????"] in rows
    assert ["b", *["▓20"] * 5] in rows


def test_a_matrix_of_nan_has_no_statistics() -> None:
    record = Record(
        {"l": Layer("l", matrix=torch.full((1, 2, 3, 3), torch.nan))}, {"input": Labels.tokens([["a"] * 3])}
    )
    text = " ".join("\n".join(lines(record)).split())
    assert "3 of 3 rows of L0H0 have NaN" in text
    assert "%" not in text
    assert "nats" not in text
    assert "? ? ?" in text


def test_a_single_other_key_is_singular() -> None:
    record = of_texts(*(f" w{i}" for i in range(text.MAX_LISTED_KEYS + 1)))
    assert any(line.strip().startswith("1 other ") for line in lines(record, word=0, head="L0H0"))


def test_layers_are_grouped_by_stack() -> None:
    layers = [
        Layer(f"{stack}.{i}", stack, i, matrix=torch.full((1, 2, 3, 3), 1 / 3 if (stack, i) == ("cross", 0) else 0.0))
        for i in range(2)
        for stack in ("decoder", "cross")
    ]
    record = Record({layer.name: layer for layer in layers}, {"input": Labels.tokens([["a", " b", " c"]])}, model="M")
    found = lines(record)
    first = next(i for i, line in enumerate(found) if line.strip().startswith("decoder.L0"))
    rows = found[first : first + 4]
    assert [row.split()[0] for row in rows] == ["decoder.L0", "decoder.L1", "cross.L0", "cross.L1"]
    assert ["█" in row for row in rows] == [False, False, True, False]


def sound() -> Record:
    """Two words that attend to three audio frames, with one small weight."""
    labels = {
        "heard": Labels.tokens([["one", " two"]]),
        "source": Labels("frames", (("0.00", "0.04s", "0.08"),), seconds=0.04),
    }
    matrix = torch.tensor([[0.0001, 0.2999, 0.7], [0.2, 0.3, 0.5]])
    layer = Layer("cross", "cross", matrix=matrix[None, None], queries="heard", keys="source")
    return Record({"cross": layer}, labels, model="M")


def test_audio_frames_have_their_unit() -> None:
    found = "\n".join(lines(sound(), word="one", head="cross.L0H0"))
    assert "0.00 s 0.04 s 0.08 s" in found
    assert " <0.1%" in found
    assert find_unit(list_units(sound().labels["source"]), "0.04") == 1


def test_notes_are_printed() -> None:
    record = jane()
    record.notes.append("the text is longer than the model reads: only a part of it is shown")
    assert "note: the text is longer than the model reads" in "\n".join(lines(record))


def test_the_image_of_a_vision_language_model_is_one_unit() -> None:
    tokens = Labels.tokens([["a", *["<i>"] * 4, " shoe"]], words=[[0, *[None] * 4, 1]])
    labels = tokens.with_segments([Segment("patches", start=1, rows=2, columns=2)])
    assert [(unit.text, unit.start, unit.stop) for unit in list_units(labels)] == [
        ("a", 0, 1),
        ("<image1>", 1, 5),
        ("shoe", 5, 6),
    ]
    assert [unit.text for unit in list_units(labels, by_token=True)][1:3] == ["0,0", "0,1"]


def test_a_word_is_drawn_on_its_images() -> None:
    found = lines(words_and_images(images=2), word="red")
    start = found.index("“red” on the image in the mean of all layers")
    first = [line.strip() for line in found[start + 1 : start + 5]]
    assert first[:3] == ["image 1", "██", ""]
    assert first[3].startswith("brightest: ")
    assert first[3].endswith("patch 0,1 (row, column)")
    assert any("Attention of “red”" in line for line in found)
    colored = render_record(words_and_images(), word="shoe", head="L1H0", page=TerminalPage(72, True, bits=24)).lines
    start = next(i for i, line in enumerate(colored) if "“shoe” on the image in L1H0" in line)
    # The picture is grey; the patch 1,2 beside it is not.
    assert "200;200;200" in colored[start + 1]
    assert "“" not in "".join(line for line in lines(words_and_images()) if "on the image" in line)


def test_a_word_of_a_prompt_is_drawn_on_the_image_that_attends_to_it() -> None:
    record = denoising()
    found = "\n".join(lines(record, word="shoe"))
    assert "“shoe” on the image in the mean of all layers" in found
    assert "brightest" in found
    with pytest.raises(ValueError, match="query must be a word of the text"):
        lines(record, word="boot")
    # Without a word, the last one of the prompt is drawn.
    assert lines(record) == lines(record, word="shoe")
    assert "“shoe” on the image in cross.L0H1" in lines(record, head="cross.L0H1")


def test_views_of_cross_attention_to_an_image_begin_with_what_is_clear() -> None:
    """All words give all of their weight to the image."""
    clear = torch.tensor([[0.4, 0.2, 0.2, 0.2], [0.0, 1.0, 0.0, 0.0]]).expand(1, 1, 2, 4)
    matrices = {"cross.0": torch.full((1, 1, 2, 4), 0.25), "cross.1": clear}
    layers = {
        name: Layer(name, "cross", index=i, matrix=matrix, queries="caption", keys="image")
        for i, (name, matrix) in enumerate(matrices.items())
    }
    labels = {"caption": Labels.tokens([["a", " shoe"]]), "image": Labels.patches(2, 2)}
    record = Record(layers, labels, model="M")
    selection = select_default_head(record)
    assert (selection.name, select_default_query(record, selection)) == ("cross.L1H0", 1)


def test_attention_to_padding_is_named() -> None:
    labels = {"image": Labels.patches(1, 1), "prompt": Labels.tokens([["red", " shoe", "", ""]])}
    matrix = torch.tensor([0.2, 0.4, 0.3, 0.1]).view(1, 1, 1, 4)
    layer = Layer("cross", "cross", matrix=matrix, queries="image", keys="prompt")
    record = Record({"cross": layer}, labels, model="M")
    found = [line.split() for line in lines(record, word="0,0", head="cross.L0H0")]
    assert ["on", "padding", "40.0%"] in found
    assert not any("no" in line and "key" in line for line in found)


def test_a_fine_grid_is_shrunk_to_the_terminal() -> None:
    grid = torch.rand(100, 200)
    small = patches.shrink_grid(TerminalPage(72), grid)
    assert small.shape == (34, 67)
    torch.testing.assert_close(small.sum(), grid.sum())

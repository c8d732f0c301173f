import math

import pytest
import torch

import foci
from foci.cli.explain_page import AttentionRow, explain
from foci.models.untrained import UntrainedSentence, merge_heads, random_from_name, split_heads, split_words
from foci.runtime.console import ANSI_STYLE, TextPage, text_width

JANE = "Jane is hungry, and she's really craving pasta from Italy."


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (JANE, ["Jane", "is", "hungry", ",", "and", "she", "'s", "really", "craving", "pasta", "from", "Italy", "."]),
        ("  one\ttwo\n", ["one", "two"]),
        ("我爱 pasta", ["我", "爱", "pasta"]),
        ("e\u0301te\u0301 नमस्ते", ["été", "नमस्ते"]),
        ("snake_case x2", ["snake_case", "x2"]),
        ("wait...", ["wait", ".", ".", "."]),
        ("a\x1b[31mb", ["a", "[", "31mb"]),
        ("👩\u200d👧 ok", ["👩\u200d👧", "ok"]),
        (" \n\u200b", []),
    ],
)
def test_split(text: str, words: list[str]) -> None:
    assert split_words(text) == words


def test_vectors_depend_on_the_word_alone() -> None:
    example = UntrainedSentence(["The", "cat", "saw", "the", "dog"])
    assert torch.equal(example.embeddings[0], example.embeddings[3])
    assert not torch.equal(example.embeddings[0], example.embeddings[1])
    assert not torch.equal(example.inputs[0], example.inputs[3])


def test_seeds_are_the_same_everywhere() -> None:
    torch.testing.assert_close(
        random_from_name("word hungry", 8)[:3], torch.tensor([0.53, -2.03, 1.28]), atol=0.005, rtol=0
    )


def test_fold_and_join_are_inverse() -> None:
    x = torch.arange(24.0).view(3, 8)
    assert split_heads(x).shape == (1, 2, 3, 4)
    assert split_heads(x)[0, 1, 2].tolist() == x[2, 4:].tolist()
    assert torch.equal(merge_heads(split_heads(x)), x)


def test_the_computed_row_equals_the_row_of_the_library() -> None:
    example = UntrainedSentence(split_words(JANE))
    row = AttentionRow.of(example, 2)
    assert math.isclose(sum(row.weights), 1.0)
    assert row.error(example, 2) < 1e-6
    assert row.error(example, 3) > 1e-2


def test_a_difference_from_the_library_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    right = foci.attention

    def wrong(q, k, v, **options):
        return right(q, k, v * 1.001, **options)

    monkeypatch.setattr("foci.models.untrained.attention", wrong)
    with pytest.raises(ArithmeticError, match=r"foci\.attention must equal the arithmetic shown"):
        explain(JANE)


def test_the_page_shows_the_numbers_of_the_library() -> None:
    lines, example = explain(JANE, "hungry").lines, UntrainedSentence(split_words(JANE))
    weights = foci.attention(*example.qkv, return_weights=True)[1].dense()[2].tolist()
    assert "   hungry  " + "".join(TextPage().shaded(weight, 5) for weight in weights) in lines
    heads = foci.attention(*map(split_heads, example.qkv), return_weights=True)[1].dense()[0, :, 2]
    for head in range(2):
        found = heads[head].topk(3)
        seen = ", ".join(f"“{example.words[j]}” {w:.0%}" for w, j in zip(*map(torch.Tensor.tolist, found), strict=True))
        assert f"   head {head}: “hungry” attends to {seen}" in lines


def test_each_step_is_shown_once() -> None:
    lines = explain(JANE).lines
    assert [line[0] for line in lines if line[:1].isdigit()] == list("12345678")
    assert "   Jane · is · hungry · , · and · she · 's · really · craving · pasta · from ·" in lines
    assert "   (13, 8) ─split→ (2, 13, 4) ─attend→ (2, 13, 4) ─merge→ (13, 8) ─mix→ (13, 8)" in lines
    assert sum(line.count("✓") for line in lines) == 1


def test_the_causal_matrix_hides_later_words() -> None:
    lines = explain(JANE).lines
    start = next(i for i, line in enumerate(lines) if line.startswith("8"))
    rows = [line for line in lines[start:] if line.rstrip().endswith("·")]
    assert [row.count("·") for row in rows] == list(range(12, 0, -1))
    assert rows[0].split() == ["Jane", "█100", *["·"] * 12]


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(
    "text", [JANE, "x", "漢字 は 好き です " * 9, "x" * 500 + " wordwordwordwordwordword" * 30, "👩\u200d👧 e\u0301"]
)
@pytest.mark.parametrize("color", [False, True])
def test_no_line_is_wider_than_the_terminal(text: str, width: int, color: bool) -> None:
    lines = explain(text, page=TextPage(width, color)).lines
    assert [line for line in lines if text_width(line) > width] == []
    assert any("\x1b" in line for line in lines) == color


def test_color_changes_only_the_shading() -> None:
    plain = explain(JANE, page=TextPage(100)).lines
    painted = [ANSI_STYLE.sub("", line) for line in explain(JANE, page=TextPage(100, color=True)).lines]
    # Shades of grey stand in for colours, so the two matrices differ; nothing else may.
    assert [a for a, b in zip(plain, painted, strict=True) if a.split() != b.split() and not set("░▒▓█") & set(a)] == []


def test_the_word_can_be_chosen() -> None:
    assert "We follow “pasta”." in "\n".join(explain(JANE, "PASTA").lines)


def test_long_sentences_are_truncated_with_a_note() -> None:
    text = "\n".join(explain(" ".join(f"w{i}" for i in range(1000))).lines)
    assert "(982 more words are omitted so that the matrix fits the terminal.)" in text
    assert "w17" in text
    assert "w18" not in text
    assert "(1 more word is omitted so that" in "\n".join(explain(" ".join("abcdefghijklmnopqrst")).lines)


def test_a_word_far_into_a_long_text_is_shown_with_its_neighbours() -> None:
    text = "\n".join(explain(" ".join(f"w{i}" for i in range(30_000)), "w20000").lines)
    assert "We follow “w20000”." in text
    assert "w19993 · w19994" in text
    assert "We follow “w999”." in "\n".join(explain(" ".join(f"w{i}" for i in range(1000)), "w999").lines)


def test_a_single_word_attends_to_itself() -> None:
    text = "\n".join(explain("Hungry").lines)
    assert "“Hungry” is the only word and attends to itself: add more words." in text
    assert "all 1" not in text
    assert "Without the division" not in text


@pytest.mark.parametrize(
    ("text", "word", "message"),
    [
        ("", None, "the text must have at least one word, got ''"),
        (" \n ", None, "the text must have at least one word, got"),
        ("Jane is hungry.", "pizza", "--word must be one of Jane is hungry ., got 'pizza'"),
        ("Jane is " * 999, "pizza", "--word must be one of " + "Jane is " * 24 + "Jane is…, got 'pizza'"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(text: str, word: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=r" must ") as caught:
        explain(text, word)
    assert str(caught.value).startswith(message)

import io

import pytest

from foci.runtime.console import (
    TextPage,
    clip_text,
    cut_to_width,
    pad_text,
    supports_color,
    terminal_columns,
    text_width,
)


@pytest.mark.parametrize(
    ("text", "width"), [("Jane", 4), ("漢字", 4), ("e\u0301", 1), ("", 0), ("\x1b[1mJane\x1b[0m", 4)]
)
def test_text_width(text: str, width: int) -> None:
    assert text_width(text) == width


def test_clip_and_start_never_exceed_the_width() -> None:
    assert clip_text("craving", 7) == "craving"
    assert clip_text("craving", 5) == "crav…"
    assert cut_to_width("craving", 5) == "cravi"
    assert clip_text("漢字漢字", 4) == "漢…"
    assert cut_to_width("漢字漢字", 3) == "漢"


def test_pad_counts_columns() -> None:
    assert pad_text("漢", 4) == "漢  "
    assert pad_text("漢", 4, right=True) == "  漢"
    assert pad_text("craving", 4) == "cra…"


def test_shaded_cells_have_one_width() -> None:
    page = TextPage()
    assert [page.shaded(w, 4) for w in (0.0, 0.04, 0.1, 0.2, 0.4, 1.0)] == [
        "   0",
        " ░ 4",
        " ▒10",
        " ▓20",
        " █40",
        " 100",
    ]
    assert page.shaded(0.25, 7) == " ▓▓▓ 25"
    assert all(
        text_width(TextPage(color=True).shaded(w / 100, width)) == width for w in range(101) for width in (4, 5, 8)
    )


def test_bar_is_exact_to_an_eighth() -> None:
    assert [TextPage().bar(f, 2) for f in (0.0, 1 / 16, 0.5, 15 / 16, 1.0)] == ["", "▏", "█", "█▉", "██"]


def test_prose_wraps_and_keeps_long_words_whole() -> None:
    page = TextPage(width=60)
    page.prose("short words " * 6 + "x" * 70)
    assert page.lines == [
        " short words short words short words short words short words",
        " short words",
        " " + "x" * 70,
    ]


def test_width_comes_from_the_terminal_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, used in (("20", 60), ("100", 100), ("500", 120)):
        monkeypatch.setenv("COLUMNS", given)
        assert terminal_columns() == used


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_color_support_follows_terminal_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert supports_color(Terminal())
    assert not supports_color(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not supports_color(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not supports_color(Terminal())

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foci.runtime.console import text_width
from foci.runtime.printable import format_label, isolate_direction, make_printable, split_clusters


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Jane", "Jane"),
        ("a\nb\tc", "a↵b⇥c"),
        ("\x00\x1b[31m\x7f\x9b", "␀␛[31m␡⟨009B⟩"),
        ("\u202e\u2066\u200b\u00ad\ufeff", "⟨202E⟩⟨2066⟩⟨200B⟩⟨00AD⟩⟨FEFF⟩"),
        ("\u2028", "↵"),
        ("\ud83d", "�"),
        ("e\u0301", "é"),
        ("z" + "\u0335" * 9, "z" + "\u0335" * 3),
        ("👩\u200d👧", "👩👧"),
        ("❤\ufe0f", "❤"),
        ("نمی\u200cخواهم", "نمی\u200cخواهم"),
        ("क\u094d\u200dष", "क\u094d\u200dष"),
        ("a\u3000b\u00a0c", "a b c"),
    ],
)
def test_make_printable(text: str, shown: str) -> None:
    assert make_printable(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"), [(" is", "is"), ("  ", "␣␣"), (" \n", "␣↵"), ("", "∅"), ("\u200b", "⟨200B⟩")]
)
def test_format_label(text: str, shown: str) -> None:
    assert format_label(text) == shown


@given(st.text())
def test_control_characters_are_replaced(text: str) -> None:
    shown = make_printable(text)
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")]
    assert {c for c in shown if unicodedata.category(c) == "Cf"} <= {"\u200c", "\u200d"}
    assert "".join(split_clusters(shown)) == shown


def test_right_to_left_is_isolated_and_nothing_else() -> None:
    assert isolate_direction("שלום") == "\u2068שלום\u2069"
    assert isolate_direction("Jane") == "Jane"
    assert text_width(isolate_direction("שלום")) == 4

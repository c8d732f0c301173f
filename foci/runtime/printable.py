"""Makes any text safe to print in a terminal, a plot or a table.

Tokens come from models and untrusted input. Control characters and characters that move the cursor or change the
direction of a line are replaced by visible signs; emoji sequences are reduced to one width in all terminals.
"""

import re
import unicodedata

from foci.runtime.console import character_width

# Signs of common control characters; the others have pictures in Unicode.
CONTROL_SIGNS = {"\n": "↵", "\r": "␍", "\t": "⇥", "\u2028": "↵", "\u2029": "↵", "\x7f": "␡"}
ZERO_WIDTH_JOINER, ZERO_WIDTH_NON_JOINER, EMOJI_SELECTOR = "\u200d", "\u200c", "\ufe0f"
FIRST_STRONG_ISOLATE, POP_ISOLATE = "\u2068", "\u2069"
MAX_MARKS = 3
# Characters that a terminal executes, or that reorder a line: all control characters but the line break and the tab.
TERMINAL_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def make_printable(text: str) -> str:
    r"""The text with control and invisible characters replaced by visible signs.

    >>> make_printable("a\tb\x1b[31m\u202eevil")
    'a⇥b␛[31m⟨202E⟩evil'
    """
    shown = ""
    marks = 0
    for character in unicodedata.normalize("NFC", text):
        marks = marks + 1 if unicodedata.category(character) in ("Mn", "Me") else 0
        # Many marks on one letter would overlap the lines above and below.
        if marks <= MAX_MARKS:
            shown += printable_character(character, shown)
    return shown


def escape_controls(text: str) -> str:
    r"""The text with the characters that a terminal executes replaced by visible signs; everything else stays.

    For whole texts, such as the answers of a model: line breaks, tabs and spaces are kept.

    >>> escape_controls("one\ttwo\nthree\x1b]0;title\x07")
    'one\ttwo\nthree␛]0;title␇'
    """
    return TERMINAL_CONTROLS.sub(lambda match: printable_character(match[0], ""), text)


def printable_character(character: str, before: str) -> str:
    """The printed form of one character; `before` is the text to its left."""
    kind = unicodedata.category(character)
    if character in CONTROL_SIGNS:
        return CONTROL_SIGNS[character]
    if character in (ZERO_WIDTH_JOINER, ZERO_WIDTH_NON_JOINER, EMOJI_SELECTOR):
        # Between letters they shape the script; in an emoji their width depends on the terminal.
        return character if before and unicodedata.category(before[-1])[0] in "LM" else ""
    if kind == "Cc":
        return chr(0x2400 + ord(character)) if character < " " else format_code_point(character)
    if kind == "Cs":
        return "�"
    if kind in ("Cf", "Zl", "Zp"):
        return format_code_point(character)
    return " " if kind == "Zs" else character


def format_code_point(character: str) -> str:
    return f"⟨{ord(character):04X}⟩"


def format_label(text: str) -> str:
    r"""A printable label without surrounding space; a token of spaces only is shown as ␣.

    >>> format_label(" hungry"), format_label("  "), format_label("\n\n"), format_label("")
    ('hungry', '␣␣', '↵↵', '∅')
    """
    return make_printable(text.strip() or text.replace(" ", "␣")) or "∅"


def format_bytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size:,} bytes"


def has_right_to_left(text: str) -> bool:
    return any(unicodedata.bidirectional(character) in ("R", "AL", "AN") for character in text)


def isolate_direction(text: str) -> str:
    """The text in a Unicode isolate if it has right-to-left letters, so that it cannot reorder its neighbours."""
    return FIRST_STRONG_ISOLATE + text + POP_ISOLATE if has_right_to_left(text) else text


def split_clusters(text: str) -> list[str]:
    r"""Splits the text into grapheme clusters: a letter with its marks.

    >>> [len(cluster) for cluster in split_clusters("e\u0301te")]
    [2, 1, 1]
    """
    clusters: list[str] = []
    for character in text:
        if clusters and character_width(character) == 0:
            clusters[-1] += character
        else:
            clusters.append(character)
    return clusters

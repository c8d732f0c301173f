"""Any text as a terminal, a plot or a table can show it: nothing in it moves the cursor or turns a line around.

Tokens come from models and strangers. What would not print, or would print somewhere else, is shown by a sign of its
own; what prints differently wide from terminal to terminal is brought to one width.
"""

import unicodedata

from foci.runtime.console import character_width

# What is often seen has a sign that people know; the other controls have their pictures in Unicode.
CONTROL_SIGNS = {"\n": "↵", "\r": "␍", "\t": "⇥", "\u2028": "↵", "\u2029": "↵", "\x7f": "␡"}
ZERO_WIDTH_JOINER, ZERO_WIDTH_NON_JOINER, EMOJI_SELECTOR = "\u200d", "\u200c", "\ufe0f"
FIRST_STRONG_ISOLATE, POP_ISOLATE = "\u2068", "\u2069"
MAX_MARKS = 3


def make_printable(text: str) -> str:
    r"""The text with everything harmful or invisible made visible.

    >>> printable("a\tb\x1b[31m\u202eevil")
    'a⇥b␛[31m⟨202E⟩evil'
    """
    shown = ""
    marks = 0
    for character in unicodedata.normalize("NFC", text):
        marks = marks + 1 if unicodedata.category(character) in ("Mn", "Me") else 0
        # A pile of marks on one letter would run over the lines above and below.
        if marks <= MAX_MARKS:
            shown += printable_character(character, shown)
    return shown


def printable_character(character: str, before: str) -> str:
    """What is shown for one character; `before` is what stands to its left."""
    kind = unicodedata.category(character)
    if character in CONTROL_SIGNS:
        return CONTROL_SIGNS[character]
    if character in (ZERO_WIDTH_JOINER, ZERO_WIDTH_NON_JOINER, EMOJI_SELECTOR):
        # Between letters they shape the script. In an emoji their width differs from terminal to terminal.
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
    r"""A label: printable, without the space around it; a token that is nothing but space is shown as one.

    >>> visible(" hungry"), visible("  "), visible("\n\n"), visible("")
    ('hungry', '␣␣', '↵↵', '∅')
    """
    return make_printable(text.strip() or text.replace(" ", "␣")) or "∅"


def has_right_to_left(text: str) -> bool:
    return any(unicodedata.bidirectional(character) in ("R", "AL", "AN") for character in text)


def isolate_direction(text: str) -> str:
    """The text as one piece that cannot change the order of what stands beside it: for tables, right to left too."""
    return FIRST_STRONG_ISOLATE + text + POP_ISOLATE if has_right_to_left(text) else text


def split_clusters(text: str) -> list[str]:
    r"""The text in pieces that take a place of their own: a letter with the marks on it.

    >>> [len(cluster) for cluster in clusters("e\u0301te")]
    [2, 1, 1]
    """
    found: list[str] = []
    for character in text:
        if found and character_width(character) == 0:
            found[-1] += character
        else:
            found.append(character)
    return found

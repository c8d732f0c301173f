"""Any text as a terminal, a plot or a table can show it: nothing in it moves the cursor or turns a line around.

Tokens come from models and strangers. What would not print, or would print somewhere else, is shown by a sign of its
own; what prints differently wide from terminal to terminal is brought to one width.
"""

import unicodedata

from foci.runtime.console import character_width

# What is often seen has a sign that people know; the other controls have their pictures in Unicode.
SIGNS = {"\n": "↵", "\r": "␍", "\t": "⇥", "\u2028": "↵", "\u2029": "↵", "\x7f": "␡"}
JOINER, NON_JOINER, EMOJI_STYLE = "\u200d", "\u200c", "\ufe0f"
FIRST_STRONG, END = "\u2068", "\u2069"
MOST_MARKS = 3


def printable(text: str) -> str:
    r"""The text with everything harmful or invisible made visible.

    >>> printable("a\tb\x1b[31m\u202eevil")
    'a⇥b␛[31m⟨202E⟩evil'
    """
    shown = ""
    marks = 0
    for character in unicodedata.normalize("NFC", text):
        marks = marks + 1 if unicodedata.category(character) in ("Mn", "Me") else 0
        # A pile of marks on one letter would run over the lines above and below.
        if marks <= MOST_MARKS:
            shown += sign(character, shown)
    return shown


def sign(character: str, before: str) -> str:
    """What is shown for one character; `before` is what stands to its left."""
    kind = unicodedata.category(character)
    if character in SIGNS:
        return SIGNS[character]
    if character in (JOINER, NON_JOINER, EMOJI_STYLE):
        # Between letters they shape the script. In an emoji their width differs from terminal to terminal.
        return character if before and unicodedata.category(before[-1])[0] in "LM" else ""
    if kind == "Cc":
        return chr(0x2400 + ord(character)) if character < " " else code(character)
    if kind == "Cs":
        return "�"
    if kind in ("Cf", "Zl", "Zp"):
        return code(character)
    return " " if kind == "Zs" else character


def code(character: str) -> str:
    return f"⟨{ord(character):04X}⟩"


def visible(text: str) -> str:
    r"""A label: printable, without the space around it; a token that is nothing but space is shown as one.

    >>> visible(" hungry"), visible("  "), visible("\n\n"), visible("")
    ('hungry', '␣␣', '↵↵', '∅')
    """
    return printable(text.strip() or text.replace(" ", "␣")) or "∅"


def runs_leftward(text: str) -> bool:
    return any(unicodedata.bidirectional(character) in ("R", "AL", "AN") for character in text)


def isolated(text: str) -> str:
    """The text as one piece that cannot change the order of what stands beside it: for tables, right to left too."""
    return FIRST_STRONG + text + END if runs_leftward(text) else text


def clusters(text: str) -> list[str]:
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

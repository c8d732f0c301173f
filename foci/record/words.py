"""The words of a text and their positions, without patches and frames."""

from __future__ import annotations

import re

from foci.record.labels import Labels


def find_word(labels: Labels, word: str, batch: int) -> list[int]:
    """The positions of a word or phrase: "the", "the#2" for its second occurrence; case does not matter.

    >>> labels = Labels.tokens([["The", " red", " sh", "oe", " and", " the", " boot"]])
    >>> find_word(labels, "shoe", 0), find_word(labels, "the#2", 0), find_word(labels, "hoe", 0)
    ([2, 3], [5], [])
    """
    if labels.kind != "tokens":
        return [position for position, text in enumerate(labels.texts[batch]) if text == word.strip()][:1]
    text, owners = join_texts(labels, batch)
    wanted, _, count = word.strip().partition("#")
    if not wanted:
        return []
    pattern = re.compile(rf"(?<!\w){re.escape(wanted)}(?!\w)", re.IGNORECASE)
    matches = list(pattern.finditer(text))
    number = int(count) if count.isdigit() else 1
    if not 1 <= number <= len(matches):
        return []
    match = matches[number - 1]
    return sorted({owner for owner in owners[match.start() : match.end()] if owner >= 0})


def join_texts(labels: Labels, batch: int) -> tuple[str, list[int]]:
    """The text without patches, and the position of each of its characters, -1 for a space between tokens."""
    patches = positions_of_segments(labels, batch)
    texts = labels.texts[batch]
    # Tokens that carry no spaces are words of their own.
    between = "" if any(text[:1].isspace() for text in texts[1:]) else " "
    parts: list[str] = []
    owners: list[int] = []
    for position, text in enumerate(texts):
        shown = " " if position in patches else text + between
        parts.append(shown)
        owners += [position if position not in patches and index < len(text) else -1 for index in range(len(shown))]
    return "".join(parts), owners


def positions_of_segments(labels: Labels, batch: int) -> set[int]:
    segments = [each for each in labels.segments if each.sequence == batch]
    return {position for each in segments for position in range(each.start, each.stop)}


def list_words(labels: Labels, batch: int) -> list[tuple[str, list[int]]]:
    """The words of a text and their positions, without the patches."""
    text, owners = join_texts(labels, batch)
    words = []
    for match in re.finditer(r"\S+", text):
        positions = sorted({owner for owner in owners[match.start() : match.end()] if owner >= 0})
        if positions:
            words.append((match.group(), positions))
    return words

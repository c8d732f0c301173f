"""Splits the labels of a sequence into text units: words, or single tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from foci.record.labels import Labels
from foci.record.layer import Layer
from foci.record.record import Record
from foci.runtime.printable import format_label

# Tokens that a tokenizer adds: [CLS], <s>, <|endoftext|>.
SPECIAL_TOKEN = re.compile(r"\[[A-Z]+\d*\]|<[^<>\s]+>")
# Punctuation around a word.
SURROUNDING_PUNCTUATION = re.compile(r"^[^\w<\[]+|[^\w>\]]+$")
# The time of an audio frame, with or without its unit.
FRAME_TIME = re.compile(r"^([\d.]*\d) ?s?$")
MAX_UNIT_CHARACTERS = 200
# Units named in an error message.
MAX_LISTED_UNITS = 40


@dataclass(frozen=True)
class TextUnit:
    """A word or a token: its text, and its positions from start to stop."""

    text: str
    start: int
    stop: int
    # Whether a space, or a newline, precedes it in the running text.
    space_before: bool = True
    newline_before: bool = False
    # Whether the tokenizer added it: [CLS], <s>.
    is_special: bool = False

    @property
    def is_word(self) -> bool:
        """Whether it is a word of the text: not punctuation and not a special token."""
        return not self.is_special and any(map(str.isalnum, self.text))

    @property
    def positions(self) -> list[int]:
        return list(range(self.start, self.stop))


def list_units(labels: Labels, batch: int = 0, by_token: bool = False) -> list[TextUnit]:
    """List the words of a sequence, or its tokens where the labels have no word numbers; padding is left out."""
    texts = display_texts(labels, batch)
    if not by_token:
        texts = merge_media(labels, batch, texts)
    numbers = labels.words[batch] if labels.words is not None else None
    # Tokenizers such as GPT-2's keep the space in the token. If no token has one, a space is drawn between all tokens.
    has_spaces = any(text[:1].isspace() for text in texts[1:])
    units: list[TextUnit] = []
    for start, stop in group_positions(texts, None if by_token else numbers):
        text = "".join(texts[start:stop])
        special = bool(SPECIAL_TOKEN.fullmatch(text.strip())) or (numbers is not None and numbers[start] is None)
        space = special or not has_spaces or text[:1].isspace() or (bool(units) and units[-1].is_special)
        newline = bool(text.strip()) and "\n" in text[: len(text) - len(text.lstrip())]
        units.append(TextUnit(format_label(truncate_text(text)), start, stop, space, newline, special))
    return units


def list_layer_units(
    record: Record, layer: Layer, batch: int, by_token: bool = False
) -> tuple[list[TextUnit], list[TextUnit]]:
    """List the units of a layer's queries and of its keys; their positions index the layer's axes."""
    check_batch(layer, batch)
    queries, keys = record.labels_of(layer)
    return list_units(queries, batch, by_token), list_units(keys, batch, by_token)


def check_batch(layer: Layer, batch: int) -> None:
    if not 0 <= batch < layer.shape[0]:
        raise ValueError(f"batch must be from 0 to {layer.shape[0] - 1}, got {batch}")


def merge_media(labels: Labels, batch: int, texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the texts with each image or recording as one: "<image1>" at its first position, "" at the others."""
    merged = list(texts)
    names = {"patches": "image", "frames": "audio"}
    for segment in labels.segments if labels.kind == "tokens" else ():
        if segment.sequence == batch:
            name = f"<{names[segment.kind]}{segment.image + 1}>"
            merged[segment.start : segment.stop] = [name, *[""] * (segment.stop - segment.start - 1)]
    return tuple(merged)


def display_texts(labels: Labels, batch: int) -> tuple[str, ...]:
    """Return the text at each position; the times of audio frames get their unit: "0.04 s"."""
    if labels.kind != "frames" or labels.seconds is None:
        return labels.texts[batch]
    return tuple(FRAME_TIME.sub(r"\1 s", text) for text in labels.texts[batch])


def truncate_text(text: str) -> str:
    """Cut a text to MAX_UNIT_CHARACTERS: a token may have a megabyte."""
    return text if len(text) <= MAX_UNIT_CHARACTERS else text[: MAX_UNIT_CHARACTERS - 1] + "…"


def group_positions(texts: Sequence[str], numbers: Sequence[int | None] | None) -> list[tuple[int, int]]:
    """Group neighboring positions with the same word number; empty texts join the group before, padding is dropped.

    A position without a number is a group of its own.

    >>> group_positions(["[CLS]", "hun", "gry", "!", "", ""], [None, 0, 0, 1, 1, None])
    [(0, 1), (1, 3), (3, 5)]
    """
    length = len(texts)
    while length and not texts[length - 1] and (numbers is None or numbers[length - 1] is None):
        length -= 1
    if not length:
        return [(i, i + 1) for i in range(len(texts))]
    edges = [i for i in range(length) if i == 0 or (texts[i] and starts_group(i, numbers))]
    return list(zip(edges, [*edges[1:], length], strict=True))


def starts_group(position: int, numbers: Sequence[int | None] | None) -> bool:
    return numbers is None or numbers[position] is None or numbers[position] != numbers[position - 1]


def find_unit(
    units: Sequence[TextUnit], word: str | int, others: Mapping[str, Sequence[TextUnit]] = MappingProxyType({})
) -> int:
    """Find a unit by its text ("the", "the#2" for the second occurrence) or by its index from 0.

    The error lists the units, then those of `others`: the sequences that other layers read.
    """
    if isinstance(word, int) and 0 <= word < len(units):
        return word
    text, _, count = str(word).partition("#") if str(word) not in {unit.text for unit in units} else (str(word), "", "")
    wanted = text.strip().casefold()
    matches = [i for i, unit in enumerate(units) if unit.text.casefold() in (wanted, f"{wanted} s")]
    # “Bahnhof?” is found as Bahnhof too.
    matches = matches or [
        i for i, unit in enumerate(units) if wanted and SURROUNDING_PUNCTUATION.sub("", unit.text.casefold()) == wanted
    ]
    occurrence = int(count) - 1 if count.isdigit() else 0
    if 0 <= occurrence < len(matches):
        return matches[occurrence]
    if not matches and text.isdigit() and int(text) < len(units):
        return int(text)
    known = {unit.text for unit in units}
    new = {name: each for name, each in others.items() if any(u.is_word and u.text not in known for u in each)}
    more = "".join(f", or of the {name}: {join_texts(each)}" for name, each in new.items())
    raise ValueError(f"word must be one of {join_texts(units)}{more}, got {str(word)[:40]!r}")


def join_texts(units: Sequence[TextUnit]) -> str:
    texts = [unit.text for unit in units]
    return " ".join(texts[:MAX_LISTED_UNITS]) + " …" * (len(texts) > MAX_LISTED_UNITS)


def list_other_units(record: Record, layer: Layer, batch: int, by_token: bool = False) -> dict[str, list[TextUnit]]:
    """List the units of the queries of the other layers, by the name of the sequence: the text besides the answer."""
    layers = {each.queries: each for each in record.layers.values() if each.queries != layer.queries}
    labels = {format_label(truncate_text(name)): record.labels_of(each)[0] for name, each in layers.items()}
    return {name: list_units(each, batch, by_token) for name, each in labels.items() if each.kind == "tokens"}


def number_words(labels: Labels, batch: int) -> Tensor:
    """Number the word at each position; punctuation and special tokens get the number of the word before: (T,)."""
    numbers = torch.zeros(len(labels), dtype=torch.long)
    number = 0
    for unit in list_units(labels, batch):
        number += unit.is_word
        numbers[unit.start : unit.stop] = number
    return numbers


def mark_word_positions(labels: Labels, batch: int) -> Tensor:
    """Mark positions that belong to words; punctuation inside a word, the dot of "Italy.", does not: (T,)."""
    texts = labels.texts[batch]
    marks = torch.zeros(len(labels), dtype=torch.bool)
    for unit in list_units(labels, batch):
        for position in unit.positions:
            marks[position] = unit.is_word and (not texts[position] or any(map(str.isalnum, texts[position])))
    return marks

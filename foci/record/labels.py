"""Labels: what stands at each position of a sequence, ready to print."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

LABEL_KINDS = ("tokens", "patches", "frames", "positions")
# What a decoder gives for bytes that are no whole character yet.
REPLACEMENT_CHARACTER = "\ufffd"

LabelTexts = tuple[tuple[str, ...], ...]
WordNumbers = tuple[tuple[int | None, ...], ...]


@dataclass(frozen=True)
class Labels:
    """What stands at each position: tokens, patches of an image, frames of sound, or bare positions.

    >>> from foci.record.labels import Labels
    >>> labels = Labels.tokens([["Where", " does", " it", " look", "?"]], words=[[0, 1, 2, 3, 3]])
    >>> len(labels), labels.text(0)
    (5, 'Where does it look?')

    Args:
        kind: "tokens", "patches", "frames" or "positions".
        texts: [sequence][position], ready to print (" hello", never "Ġhello") and raw: whoever draws them escapes them.
            The parts of a character that is split over several tokens read as the character, then as "".
        words: [sequence][position], the number of the word that a token belongs to; None: to none.
        grid: rows and columns of patches.
        leading: how many positions (class token, registers) stand before the first patch.
        images: the pictures themselves, uint8 (B, height, width, 3).
        seconds: how long a frame is.
    """

    kind: str
    texts: LabelTexts
    words: WordNumbers | None = None
    grid: tuple[int, int] | None = None
    leading: int = 0
    images: Tensor | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        validate_labels(self)

    @classmethod
    def positions(cls, batch: int, length: int) -> Labels:
        """Nothing but numbers from 0."""
        return cls("positions", (tuple(map(str, range(length))),) * batch)

    @classmethod
    def tokens(cls, texts: Iterable[Sequence[str]], words: Iterable[Sequence[int | None]] | None = None) -> Labels:
        """Tokens as they read; sequences of unequal length are filled up with ""."""
        rows = [tuple(row) for row in texts]
        length = max(map(len, rows), default=0)
        filled = tuple(row + ("",) * (length - len(row)) for row in rows)
        if words is None:
            return cls("tokens", filled)
        numbers = [tuple(row) for row in words]
        return cls("tokens", filled, tuple(row + (None,) * (length - len(row)) for row in numbers))

    @classmethod
    def by_offsets(
        cls,
        sources: Sequence[str],
        offsets: Sequence[Sequence[tuple[int, int]]],
        names: Sequence[Sequence[str]] | None = None,
        words: Sequence[Sequence[int | None]] | None = None,
    ) -> Labels:
        """Tokens as pieces of the texts they were cut from, so that a character split over tokens stays whole.

        >>> offsets = [(0, 0), (0, 2), (3, 4), (3, 4)]                       # [CLS], Hi, two halves of an emoji
        >>> Labels.by_offsets(["Hi 🙂"], [offsets], [["[CLS]", "hi", "ð", "Ł"]]).texts
        (('[CLS]', 'Hi', ' 🙂', ''),)

        Args:
            sources: the texts that were tokenized.
            offsets: (start, end) of each token in its text, as tokenizers give them; (0, 0) belongs to no text.
            names: what stands at tokens that belong to no text ("[CLS]"); None: nothing.
            words: the word of each token, as `word_ids` of a tokenizer gives it.
        """
        called = [[""] * len(row) for row in offsets] if names is None else names
        texts = [
            slice_by_offsets(source, row, name) for source, row, name in zip(sources, offsets, called, strict=True)
        ]
        return cls.tokens(texts, words)

    @classmethod
    def decoded(cls, ids: Any, decode: Any) -> Labels:
        """Tokens by their numbers: `decode` is a tokenizer, or a function from a list of numbers to a text.

        Neighbours are decoded together, so a character that is split over tokens stays whole. Words begin at spaces.
        """
        listed = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        rows = listed if not listed or isinstance(listed[0], Iterable) else [listed]
        texts = [decode_each_token([int(number) for number in row], make_decoder(decode)) for row in rows]
        return cls.tokens(texts, [number_words_by_spaces(row) for row in texts])

    def text(self, batch: int) -> str:
        """Everything of one sequence, as it reads."""
        return "".join(self.texts[batch])

    def __len__(self) -> int:
        """How many positions there are."""
        return len(self.texts[0]) if self.texts else 0

    @property
    def batch(self) -> int:
        """How many sequences there are."""
        return len(self.texts)

    def at(self, positions: Sequence[int]) -> Labels:
        """The labels of some positions only; a grid that is no longer whole is dropped."""
        texts = tuple(tuple(row[i] for i in positions) for row in self.texts)
        words = None if self.words is None else tuple(tuple(row[i] for i in positions) for row in self.words)
        if list(positions) == list(range(len(self))):
            return self
        return replace(self, texts=texts, words=words, grid=None, leading=0, images=None)


def validate_labels(labels: Labels) -> None:
    if labels.kind not in LABEL_KINDS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, LABEL_KINDS))}, but got {labels.kind!r}")
    lengths = sorted({len(row) for row in labels.texts})
    if len(lengths) > 1:
        raise ValueError(f"all sequences must have one number of positions, but got {lengths}")
    if labels.words is not None and [len(row) for row in labels.words] != [len(row) for row in labels.texts]:
        raise ValueError("words must hold one number per token, but its lengths differ from those of the texts")
    if labels.grid is not None and labels.leading + labels.grid[0] * labels.grid[1] != len(labels):
        raise ValueError(
            f"a grid of {labels.grid[0]} x {labels.grid[1]} patches after {labels.leading} positions must have"
            f" {labels.leading + labels.grid[0] * labels.grid[1]} positions, but got {len(labels)}"
        )
    if labels.images is not None and (labels.images.dtype != torch.uint8 or labels.images.dim() != 4):
        got = f"{labels.images.dtype} {tuple(labels.images.shape)}"
        raise ValueError(f"images must be uint8 (B, height, width, 3), but got {got}")


def slice_by_offsets(source: str, offsets: Sequence[tuple[int, int]], names: Sequence[str]) -> list[str]:
    """Each token's piece of the text, with the space before it; what an earlier token has shown is not shown again."""
    found, done = [], 0
    for (start, end), name in zip(offsets, names, strict=True):
        if start == end:
            found.append(name)
            continue
        gap = source[done:start]
        first = done if gap.isspace() else max(start, done)
        found.append(source[first:end])
        done = max(done, end)
    return found


def decode_each_token(ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """The text of each token: what the decoded text gains by it; tokens of one split character give it to the first."""
    found = [""] * len(ids)
    # The text of ids[known:shown] is known; decoding from there on lets a decoder see what stands before a token.
    known = shown = 0
    for place in range(len(ids)):
        before = decode(list(ids[known:shown])) if shown > known else ""
        now = decode(list(ids[known : place + 1]))
        if now.endswith(REPLACEMENT_CHARACTER) and place + 1 < len(ids) and place - shown < 4:
            continue
        found[shown] = now[len(before) :] if now.startswith(before) else decode(list(ids[shown : place + 1]))
        known, shown = shown, place + 1
    return found


def make_decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """How to decode numbers with a tokenizer, special tokens included; a function is taken as it is."""
    if not hasattr(tokenizer, "decode"):
        if not callable(tokenizer):
            raise TypeError(f"expected a tokenizer with decode, or a function, but got {type(tokenizer).__name__}")
        decode: Callable[[list[int]], str] = tokenizer
        return decode
    whole = {"skip_special_tokens": False}
    for options in (whole | {"clean_up_tokenization_spaces": False}, whole, {}):
        try:
            tokenizer.decode([], **options)
        except TypeError:
            continue
        return partial(decode_ids, tokenizer, options)
    raise TypeError(f"{type(tokenizer).__name__}.decode must take a list of token numbers, but does not")


def decode_ids(tokenizer: Any, options: dict[str, bool], ids: list[int]) -> str:
    return str(tokenizer.decode(ids, **options))


def number_words_by_spaces(texts: Sequence[str]) -> list[int | None]:
    """A word goes from one space to the next; a token that is nothing but space belongs to none."""
    words: list[int | None] = []
    number, fresh = -1, True
    for text in texts:
        if text and text.isspace():
            words.append(None)
            fresh = True
            continue
        if fresh or text[:1].isspace():
            number += 1
        words.append(number)
        fresh = text[-1:].isspace()
    return words

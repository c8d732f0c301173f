"""Labels: the texts of the positions of a sequence, ready to print."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

LABEL_KINDS = ("tokens", "patches", "frames", "positions")
# What a decoder returns for bytes that are not a whole character.
REPLACEMENT_CHARACTER = "\ufffd"
# The position of a text classifier whose state decides the answer.
CLASS_TOKEN = "<class>"

LabelTexts = tuple[tuple[str, ...], ...]
WordNumbers = tuple[tuple[int | None, ...], ...]


@dataclass(frozen=True)
class Labels:
    """The text of each position: a token, an image patch, an audio frame, or a bare position.

    >>> labels = foci.Labels.tokens([["Where", " does", " it", " look", "?"]], words=[[0, 1, 2, 3, 3]])
    >>> len(labels), labels.text(0)
    (5, 'Where does it look?')

    Args:
        kind: "tokens", "patches", "frames" or "positions".
        texts: [sequence][position], ready to print (" hello", never "Ġhello") and not escaped. A character that is
            split over several tokens is the text of the first; the others are "".
        words: [sequence][position], the number of the word that a token belongs to; None: no word.
        grid: rows and columns of patches.
        leading: the number of positions (class token, registers) before the first patch.
        images: the images, uint8 (B, height, width, 3).
        seconds: the duration of a frame.
        sounds: the recordings, int16 (B, samples).
        rate: the samples per second of `sounds`.
    """

    kind: str
    texts: LabelTexts
    words: WordNumbers | None = None
    grid: tuple[int, int] | None = None
    leading: int = 0
    images: Tensor | None = None
    seconds: float | None = None
    sounds: Tensor | None = None
    rate: int | None = None

    def __post_init__(self) -> None:
        validate_labels(self)

    @classmethod
    def positions(cls, batch: int, length: int) -> Labels:
        """Position numbers from 0."""
        return cls("positions", (tuple(map(str, range(length))),) * batch)

    @classmethod
    def tokens(cls, texts: Iterable[Sequence[str]], words: Iterable[Sequence[int | None]] | None = None) -> Labels:
        """Labels from token texts; shorter sequences are padded with ""."""
        rows = [tuple(row) for row in texts]
        length = max(map(len, rows), default=0)
        filled = tuple(row + ("",) * (length - len(row)) for row in rows)
        if words is None:
            return cls("tokens", filled)
        numbers = [tuple(row) for row in words]
        return cls("tokens", filled, tuple(row + (None,) * (length - len(row)) for row in numbers))

    @classmethod
    def from_offsets(
        cls,
        sources: Sequence[str],
        offsets: Sequence[Sequence[tuple[int, int]]],
        names: Sequence[Sequence[str]] | None = None,
        words: Sequence[Sequence[int | None]] | None = None,
    ) -> Labels:
        """Labels from character offsets into the source texts, which keeps split characters whole.

        >>> offsets = [(0, 0), (0, 2), (3, 4), (3, 4)]                       # [CLS], Hi, two halves of an emoji
        >>> foci.Labels.from_offsets(["Hi 🙂"], [offsets], [["[CLS]", "hi", "ð", "Ł"]]).texts
        (('[CLS]', 'Hi', ' 🙂', ''),)

        Args:
            sources: the texts that were tokenized.
            offsets: (start, end) of each token in its text, as tokenizers return them; (0, 0) for special tokens.
            names: the texts of special tokens ("[CLS]"); None: "".
            words: the word number of each token, as `word_ids` of a tokenizer returns it.
        """
        names = [[""] * len(row) for row in offsets] if names is None else names
        texts = [slice_by_offsets(source, row, name) for source, row, name in zip(sources, offsets, names, strict=True)]
        return cls.tokens(texts, words)

    @classmethod
    def from_ids(cls, ids: Any, decode: Any) -> Labels:
        """Labels from token ids; `decode` is a tokenizer, or a function from a list of ids to text.

        Neighbours are decoded together, which keeps characters that are split over tokens whole. Words begin at spaces.
        """
        listed = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        rows = listed if not listed or isinstance(listed[0], Iterable) else [listed]
        texts = [decode_each_token([int(number) for number in row], make_decoder(decode)) for row in rows]
        return cls.tokens(texts, [number_words_by_spaces(row) for row in texts])

    def text(self, batch: int) -> str:
        """The whole text of one sequence."""
        return "".join(self.texts[batch])

    def __len__(self) -> int:
        """The number of positions."""
        return len(self.texts[0]) if self.texts else 0

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return len(self.texts)

    def select(self, positions: Sequence[int]) -> Labels:
        """The labels of some positions; the grid is dropped unless all positions are selected."""
        texts = tuple(tuple(row[i] for i in positions) for row in self.texts)
        words = None if self.words is None else tuple(tuple(row[i] for i in positions) for row in self.words)
        if list(positions) == list(range(len(self))):
            return self
        return replace(self, texts=texts, words=words, grid=None, leading=0, images=None, sounds=None)


def validate_labels(labels: Labels) -> None:
    if labels.kind not in LABEL_KINDS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, LABEL_KINDS))}, got {labels.kind!r}")
    lengths = sorted({len(row) for row in labels.texts})
    if len(lengths) > 1:
        raise ValueError(f"all sequences must have the same number of positions, got {lengths}")
    if labels.words is not None and [len(row) for row in labels.words] != [len(row) for row in labels.texts]:
        raise ValueError("words must have one number per token, got lengths that differ from those of texts")
    if labels.grid is not None and labels.leading + labels.grid[0] * labels.grid[1] != len(labels):
        raise ValueError(
            f"labels with a grid of {labels.grid[0]} x {labels.grid[1]} patches after {labels.leading} positions must"
            f" have {labels.leading + labels.grid[0] * labels.grid[1]} positions, got {len(labels)}"
        )
    if labels.images is not None and (labels.images.dtype != torch.uint8 or labels.images.dim() != 4):
        got = f"{labels.images.dtype} {tuple(labels.images.shape)}"
        raise ValueError(f"images must be uint8 (B, height, width, 3), got {got}")
    if labels.sounds is not None and (labels.sounds.dtype != torch.int16 or labels.sounds.dim() != 2):
        raise ValueError(f"sounds must be int16 (B, samples), got {labels.sounds.dtype} {tuple(labels.sounds.shape)}")
    if labels.sounds is not None and not (labels.rate and labels.seconds):
        raise ValueError("rate and seconds must be given with sounds, got None")


def slice_by_offsets(source: str, offsets: Sequence[tuple[int, int]], names: Sequence[str]) -> list[str]:
    """The part of the source that each token covers, with the space before it; no character is used twice."""
    texts, done = [], 0
    for (start, end), name in zip(offsets, names, strict=True):
        if start == end:
            texts.append(name)
            continue
        gap = source[done:start]
        first = done if gap.isspace() else max(start, done)
        texts.append(source[first:end])
        done = max(done, end)
    return texts


def decode_each_token(ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """The text that each token adds to the decoded text; a split character belongs to its first token."""
    texts = [""] * len(ids)
    # ids[start:done] is decoded again together with the next tokens: a decoder needs the context before a token.
    start = done = 0
    for index in range(len(ids)):
        before = decode(list(ids[start:done])) if done > start else ""
        now = decode(list(ids[start : index + 1]))
        if now.endswith(REPLACEMENT_CHARACTER) and index + 1 < len(ids) and index - done < 4:
            continue
        texts[done] = now[len(before) :] if now.startswith(before) else decode(list(ids[done : index + 1]))
        start, done = done, index + 1
    return texts


def make_decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """A function that decodes ids with a tokenizer, including special tokens; a function is returned as it is."""
    if not hasattr(tokenizer, "decode"):
        if not callable(tokenizer):
            raise TypeError(
                f"decode must be a tokenizer with a decode method, or a function, got {type(tokenizer).__name__}"
            )
        decode: Callable[[list[int]], str] = tokenizer
        return decode
    with_special = {"skip_special_tokens": False}
    for options in (with_special | {"clean_up_tokenization_spaces": False}, with_special, {}):
        try:
            tokenizer.decode([], **options)
        except TypeError:
            continue
        return partial(decode_ids, tokenizer, options)
    raise TypeError(
        f"decode must be a tokenizer whose decode takes a list of token ids, got {type(tokenizer).__name__}"
    )


def decode_ids(tokenizer: Any, options: dict[str, bool], ids: list[int]) -> str:
    return str(tokenizer.decode(ids, **options))


def number_words_by_spaces(texts: Sequence[str]) -> list[int | None]:
    """The word number of each token; words are separated by spaces, and a token of only spaces has none."""
    words: list[int | None] = []
    number, is_new = -1, True
    for text in texts:
        if text and text.isspace():
            words.append(None)
            is_new = True
            continue
        if is_new or text[:1].isspace():
            number += 1
        words.append(number)
        is_new = text[-1:].isspace()
    return words

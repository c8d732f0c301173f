"""The texts of tokens, ready to print: from character offsets or from token ids, and the words that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

# What a decoder returns for bytes that are not a whole character.
REPLACEMENT_CHARACTER = "\ufffd"


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

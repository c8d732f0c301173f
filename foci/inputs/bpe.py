"""Byte-pair encoding (BPE) with the package `tokenizers`: training, and reading from a model file.

The package trusts what it reads: a tokenizer can make it panic, allocate without bounds or search with a regular
expression from the file. So only the tokens and merges are taken from a file, and they are checked before.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from foci.runtime.json_text import parse_json

# The first tokens of every vocabulary.
SPECIAL_TOKENS = ("<pad>", "<start>", "<stop>", "<unknown>")
# The largest vocabulary that a file may hold.
MAX_TOKENS = 2**20
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
PLAIN_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
# What the package writes apart from the tokens and merges; False counts as None.
BPE_PARTS: dict[str, Any] = {
    "added_tokens": [
        {"id": number, "content": token, **PLAIN_TOKEN, "special": True} for number, token in enumerate(SPECIAL_TOKENS)
    ],
    "truncation": None,
    "padding": None,
    "normalizer": None,
    "pre_tokenizer": BYTE_LEVEL,
    "post_processor": None,
    "decoder": BYTE_LEVEL,
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": None,
    "byte_fallback": None,
    "ignore_merges": None,
}


def train_bpe(texts: Sequence[str], size: int) -> Any:
    """Trains byte-pair encoding with the package `tokenizers`; a word includes the space before it."""
    package = import_tokenizers()
    minimum = len(SPECIAL_TOKENS) + 256
    if size < minimum:
        raise ValueError(
            f"the vocabulary of a bpe tokenizer must be at least {minimum}, which includes all bytes, got {size}"
        )
    model = build_bpe({}, [])
    trainer = package.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return model


def build_bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """Builds byte-pair encoding from its tokens and merges; everything else is the same for all texts."""
    package = import_tokenizers()
    model = package.Tokenizer(package.models.BPE(vocab=vocabulary, merges=merges))
    model.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=True)
    model.decoder = package.decoders.ByteLevel()
    model.add_special_tokens([token for token in SPECIAL_TOKENS if token in vocabulary])
    # A text that contains the name of a special token is encoded as plain text.
    model.encode_special_tokens = True
    return model


def parse_bpe(text: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Parses the tokens and merges of a saved byte-pair encoding, the only parts that differ between those of foci.

    A file with other parts is refused: some of them make the package panic, allocate without bounds, or search with
    a regular expression from the file.
    """
    content = parse_json(text, "the bpe tokenizer")
    parts = content | content["model"] if isinstance(content, dict) and isinstance(content.get("model"), dict) else {}
    for name, expected in BPE_PARTS.items():
        found = parts.get(name) or None
        if found != expected:
            raise ValueError(
                f"{name} of the bpe tokenizer must be {expected!r}, as foci writes it, got {reprlib.repr(found)}"
            )
    vocabulary = check_bpe_vocabulary(parts.get("vocab"))
    return vocabulary, check_bpe_merges(parts.get("merges"), vocabulary)


def check_bpe_vocabulary(vocabulary: Any) -> dict[str, int]:
    """Returns the vocabulary; refuses one whose ids have gaps, that lacks a byte, or with tokens that are not bytes."""
    alphabet = {*import_tokenizers().pre_tokenizers.ByteLevel.alphabet()}
    if not isinstance(vocabulary, dict) or len(vocabulary) > MAX_TOKENS:
        raise ValueError(f"the bpe tokenizer must have a vocabulary of at most {MAX_TOKENS} tokens, got another one")
    ids = [*vocabulary.values()]
    if any(type(number) is not int for number in ids) or sorted(ids) != [*range(len(ids))]:
        raise ValueError(f"the ids of the bpe tokenizer must be the integers from 0 to {len(ids) - 1}, got others")
    ordered = sorted(vocabulary, key=vocabulary.__getitem__)
    if tuple(ordered[: len(SPECIAL_TOKENS)]) != SPECIAL_TOKENS or not alphabet <= vocabulary.keys():
        raise ValueError(
            "the bpe tokenizer must begin with the special tokens and contain every byte, got other tokens"
        )
    odd = next((token for token in ordered[len(SPECIAL_TOKENS) :] if not token or not alphabet.issuperset(token)), None)
    if odd is not None:
        raise ValueError(f"the tokens of the bpe tokenizer must be made of bytes, got {reprlib.repr(odd)}")
    return vocabulary


def check_bpe_merges(merges: Any, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Returns the merges as pairs; refuses one that does not make a token out of two tokens."""
    if not isinstance(merges, list) or len(merges) > len(vocabulary):
        raise ValueError("the bpe tokenizer must have a list of merges, at most one per token, got another value")
    pairs = []
    for merge in merges:
        # Earlier versions of the package write a pair as one text.
        pair = merge.split(" ") if isinstance(merge, str) else merge
        texts = pair if isinstance(pair, list) and all(isinstance(part, str) for part in pair) else []
        if len(texts) != 2 or not {*texts, "".join(texts)} <= vocabulary.keys():
            raise ValueError(f"a merge of the bpe tokenizer must join two of its tokens, got {reprlib.repr(merge)}")
        pairs.append((texts[0], texts[1]))
    return pairs


def import_tokenizers() -> Any:
    try:
        import tokenizers as package
    except ImportError as error:
        raise ImportError(
            "the bpe tokenizer needs tokenizers, which is not installed: pip install 'foci[tasks]'"
        ) from error
    return package


@contextmanager
def explain_panics(what: str) -> Iterator[None]:
    """Turns a panic of the package, which is not an Exception, into a ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer cannot process {what}: {str(error).partition(chr(10))[0]}") from error

"""Tokenizers: text to token ids and back, by bytes, characters, words, or byte-pair encoding (BPE).

Every vocabulary begins with four special tokens: padding, start, stop, unknown.
"""

from __future__ import annotations

import json
import re
import reprlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

from foci.inputs.bpe import MAX_TOKENS, SPECIAL_TOKENS, build_bpe, explain_panics, parse_bpe, train_bpe
from foci.record.labels import Labels
from foci.record.token_texts import decode_each_token, number_words_by_spaces
from foci.runtime.json_text import parse_json

PAD, START, STOP, UNKNOWN = range(4)
# Every epoch encodes the same texts; this many are cached, the others are encoded every time.
MAX_CACHED_TEXTS = 2**20

TokenizerKind = Literal["bpe", "words", "characters", "bytes"]


class Tokenizer(ABC):
    """Text to token ids, and back.

    >>> tokenizer = CharacterTokenizer(["hello"])
    >>> tokenizer.encode("hole")
    [5, 7, 6, 4]
    >>> tokenizer.decode(tokenizer.encode("hole"))
    'hole'
    """

    kind: ClassVar[TokenizerKind]

    def __init__(self) -> None:
        self._cached: dict[str, list[int]] = {}

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of tokens, including the four special ones."""

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens; special tokens other than <unknown> are left out."""

    @abstractmethod
    def _texts(self, tokens: Sequence[int]) -> list[str]:
        """Returns the text of each token, including a leading space if it has one."""

    @abstractmethod
    def save(self) -> dict[str, Any]:
        """Returns what `tokenizer_from_dict` needs, as JSON values."""

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, cached between epochs."""
        if text not in self._cached:
            if len(self._cached) >= MAX_CACHED_TEXTS:
                return self._encode(text)
            self._cached[text] = self._encode(text)
        return self._cached[text]

    def labels(self, tokens: Sequence[int]) -> Labels:
        """Returns display labels of tokens with the words they belong to; a special token is a word of its own."""
        texts = [
            SPECIAL_TOKENS[token] if token < len(SPECIAL_TOKENS) else text
            for token, text in zip(tokens, self._texts(tokens), strict=True)
        ]
        spaced = [
            f" {text} " if token < len(SPECIAL_TOKENS) else text for token, text in zip(tokens, texts, strict=True)
        ]
        return Labels.tokens([texts], [number_words_by_spaces(spaced)])


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8: 256 tokens that cover every text; nothing is learned."""

    kind = "bytes"
    vocabulary = len(SPECIAL_TOKENS) + 256

    def _encode(self, text: str) -> list[int]:
        return [byte + len(SPECIAL_TOKENS) for byte in text.encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token - len(SPECIAL_TOKENS) for token in tokens if token >= len(SPECIAL_TOKENS)).decode(
            errors="replace"
        )

    def _texts(self, tokens: Sequence[int]) -> list[str]:
        return decode_each_token(tokens, self.decode)

    def save(self) -> dict[str, Any]:
        return {"kind": self.kind}


class VocabularyTokenizer(Tokenizer):
    """Tokens from a fixed list; anything else becomes <unknown>."""

    def __init__(self, tokens: Iterable[str]) -> None:
        super().__init__()
        self.tokens = list(tokens)
        self._ids = {token: number for number, token in enumerate(self.tokens, start=len(SPECIAL_TOKENS))}

    @property
    def vocabulary(self) -> int:
        return len(SPECIAL_TOKENS) + len(self.tokens)

    @abstractmethod
    def _split(self, text: str) -> Sequence[str]: ...

    def _encode(self, text: str) -> list[int]:
        return [self._ids.get(part, UNKNOWN) for part in self._split(text)]

    def _texts_without_special(self, tokens: Sequence[int]) -> list[str]:
        """Returns the text of each token that is not special, and � for <unknown>."""
        first = len(SPECIAL_TOKENS)
        return ["�" if token == UNKNOWN else self.tokens[token - first] for token in tokens if token >= UNKNOWN]

    def _texts(self, tokens: Sequence[int]) -> list[str]:
        return [self.decode([token]) for token in tokens]

    def save(self) -> dict[str, Any]:
        return {"kind": self.kind, "listed": self.tokens}


class CharacterTokenizer(VocabularyTokenizer):
    """The characters of the training texts."""

    kind = "characters"

    def __init__(self, texts: Iterable[str]) -> None:
        super().__init__(sorted(set().union(*texts)))

    def _split(self, text: str) -> Sequence[str]:
        return text

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self._texts_without_special(tokens))


class WordTokenizer(VocabularyTokenizer):
    """The most frequent words and punctuation marks of the training texts."""

    kind = "words"

    def _split(self, text: str) -> Sequence[str]:
        return tokenize_words(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return join_words(self._texts_without_special(tokens))

    def _texts(self, tokens: Sequence[int]) -> list[str]:
        return [f" {text}" if index else text for index, text in enumerate(super()._texts(tokens))]


class BPETokenizer(Tokenizer):
    """Subwords learned by byte-pair encoding; they cover every text, because all bytes are among them."""

    kind = "bpe"

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def vocabulary(self) -> int:
        return int(self.model.get_vocab_size())

    def _encode(self, text: str) -> list[int]:
        with explain_panics("a text"):
            return list(self.model.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        shown = [token for token in tokens if token >= len(SPECIAL_TOKENS)]
        with explain_panics("tokens"):
            return str(self.model.decode(shown)).removeprefix(" ")

    def _texts(self, tokens: Sequence[int]) -> list[str]:
        return decode_each_token(tokens, lambda ids: str(self.model.decode(ids, skip_special_tokens=False)))

    def save(self) -> dict[str, Any]:
        return {"kind": self.kind, "model": self.model.to_str()}


def train_tokenizer(kind: TokenizerKind, texts: Sequence[str], size: int) -> Tokenizer:
    """Trains a tokenizer on texts, with at most `size` tokens.

    >>> train_tokenizer("words", ["a man sleeps .", "a dog sleeps ."], size=7).encode("a cat sleeps .")
    [5, 3, 6, 4]
    """
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "characters":
        return CharacterTokenizer(texts)
    if kind == "words":
        counts = Counter(word for text in texts for word in tokenize_words(text))
        common = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return WordTokenizer(word for word, _ in common[: max(size - len(SPECIAL_TOKENS), 0)])
    return BPETokenizer(train_bpe(texts, size))


def tokenizer_from_dict(content: Any) -> Tokenizer:
    """Rebuilds the tokenizer that `Tokenizer.save` described."""
    match content:
        case {"kind": "bytes"}:
            return ByteTokenizer()
        case {"kind": "characters", "listed": list(tokens)}:
            check_token_list(tokens)
            if any(len(token) != 1 for token in tokens):
                raise ValueError("the tokens of a characters tokenizer must be single characters, got longer ones")
            return CharacterTokenizer(tokens)
        case {"kind": "words", "listed": list(tokens)}:
            check_token_list(tokens)
            return WordTokenizer(tokens)
        case {"kind": "bpe", "model": str(model)}:
            return BPETokenizer(build_bpe(*parse_bpe(model)))
    raise ValueError(f"a tokenizer must be of the kind bpe, words, characters or bytes, got {reprlib.repr(content)}")


def check_token_list(tokens: list[Any]) -> None:
    """Refuses tokens that are not different texts, and too many of them."""
    if len(tokens) > MAX_TOKENS:
        raise ValueError(f"a tokenizer must have at most {MAX_TOKENS} tokens, got {len(tokens)}")
    odd = next((token for token in tokens if not (isinstance(token, str) and token)), None)
    if odd is not None:
        raise ValueError(f"the tokens of a tokenizer must be texts, got {reprlib.repr(odd)}")
    if len({*tokens}) != len(tokens):
        raise ValueError("the tokens of a tokenizer must be different, got one twice")


def tokenizer_to_json(tokenizer: Tokenizer) -> str:
    """Formats a tokenizer as the JSON of a model file."""
    return json.dumps(tokenizer.save(), ensure_ascii=False)


def tokenizer_from_json(text: str) -> Tokenizer:
    """Parses the tokenizer of a model file."""
    return tokenizer_from_dict(parse_json(text, "the tokenizer"))


def tokenize_words(text: str) -> list[str]:
    """Splits a text into words and punctuation marks.

    >>> tokenize_words("she's hungry.")
    ['she', "'s", 'hungry', '.']
    """
    return re.findall(r"\w+|'\w+|[^\w\s]", text)


def join_words(parts: Sequence[str]) -> str:
    """Joins words to a text, without a space before closing punctuation.

    >>> join_words(["she", "'s", "hungry", "."])
    "she's hungry."
    """
    return re.sub(r" (?=[.,;:!?)\]}%]|'\w)", "", " ".join(parts))

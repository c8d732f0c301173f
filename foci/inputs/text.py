"""Tokenizers: text to token ids and back, by bytes, characters, words, or byte-pair encoding (BPE).

Every vocabulary begins with four special tokens: padding, start, stop, unknown.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

from foci.record.labels import Labels, decode_each_token, number_words_by_spaces

SPECIAL_TOKENS = ("<pad>", "<start>", "<stop>", "<unknown>")
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
        return list(self.model.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.model.decode([token for token in tokens if token >= len(SPECIAL_TOKENS)])).removeprefix(" ")

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


def train_bpe(texts: Sequence[str], size: int) -> Any:
    """Trains byte-pair encoding with the package `tokenizers`; a word includes the space before it."""
    package = import_tokenizers()
    minimum = len(SPECIAL_TOKENS) + 256
    if size < minimum:
        raise ValueError(
            f"the vocabulary of a bpe tokenizer must be at least {minimum}, which includes all bytes, got {size}"
        )
    model = package.Tokenizer(package.models.BPE())
    model.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=True)
    model.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    # A text that contains the name of a special token is encoded as plain text.
    model.encode_special_tokens = True
    return model


def tokenizer_from_dict(content: Any) -> Tokenizer:
    """Rebuilds the tokenizer that `Tokenizer.save` described."""
    match content:
        case {"kind": "bytes"}:
            return ByteTokenizer()
        case {"kind": "characters", "listed": list(tokens)}:
            return CharacterTokenizer(tokens)
        case {"kind": "words", "listed": list(tokens)}:
            return WordTokenizer(tokens)
        case {"kind": "bpe", "model": str(model)}:
            loaded = import_tokenizers().Tokenizer.from_str(model)
            loaded.encode_special_tokens = True
            return BPETokenizer(loaded)
    raise ValueError(f"a tokenizer must be of the kind bpe, words, characters or bytes, got {str(content)[:80]}")


def tokenizer_to_json(tokenizer: Tokenizer) -> str:
    """Formats a tokenizer as the JSON of a model file."""
    return json.dumps(tokenizer.save(), ensure_ascii=False)


def tokenizer_from_json(text: str) -> Tokenizer:
    """Parses the tokenizer of a model file."""
    return tokenizer_from_dict(json.loads(text))


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


def import_tokenizers() -> Any:
    try:
        import tokenizers as package
    except ImportError as error:
        raise ImportError(
            "the bpe tokenizer needs tokenizers, which is not installed: pip install 'foci[tasks]'"
        ) from error
    return package

"""Text into tokens and back: bytes, characters, words, or pieces of words (BPE).

Every vocabulary begins with four tokens that stand for no text: padding, start, stop, unknown.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

from foci.record.labels import Labels, decode_each_token, number_words_by_spaces

SPECIAL = ("<pad>", "<start>", "<stop>", "<unknown>")
PAD, START, STOP, UNKNOWN = range(4)
# Texts are asked for once an epoch; more than so many are encoded anew.
REMEMBERED = 2**20

TokenizerKind = Literal["bpe", "words", "characters", "bytes"]


class Tokenizer(ABC):
    """Text into the numbers of its tokens, and back.

    >>> tokens = Characters(["hello"])
    >>> tokens.encode("hole")
    [5, 7, 6, 4]
    >>> tokens.decode(tokens.encode("hole"))
    'hole'
    """

    kind: ClassVar[TokenizerKind]

    def __init__(self) -> None:
        self._known: dict[str, list[int]] = {}

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """How many tokens there are, the four that stand for no text among them."""

    @abstractmethod
    def _encoded(self, text: str) -> list[int]: ...

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; those that stand for no text are left out, but for unknown ones."""

    @abstractmethod
    def _texts(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token, with the space before it where it has one."""

    @abstractmethod
    def save(self) -> dict[str, Any]:
        """What `load` needs, as JSON."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, remembered from one epoch to the next."""
        if text not in self._known:
            if len(self._known) >= REMEMBERED:
                return self._encoded(text)
            self._known[text] = self._encoded(text)
        return self._known[text]

    def labels(self, tokens: Sequence[int]) -> Labels:
        """The tokens as views print them, with the words that they belong to; one that is no text is its own word."""
        texts = [
            SPECIAL[token] if token < len(SPECIAL) else text
            for token, text in zip(tokens, self._texts(tokens), strict=True)
        ]
        apart = [f" {text} " if token < len(SPECIAL) else text for token, text in zip(tokens, texts, strict=True)]
        return Labels.tokens([texts], [number_words_by_spaces(apart)])


class Bytes(Tokenizer):
    """The bytes of UTF-8: 256 tokens, every text has them, nothing is learned."""

    kind = "bytes"
    vocabulary = len(SPECIAL) + 256

    def _encoded(self, text: str) -> list[int]:
        return [byte + len(SPECIAL) for byte in text.encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token - len(SPECIAL) for token in tokens if token >= len(SPECIAL)).decode(errors="replace")

    def _texts(self, tokens: Sequence[int]) -> list[str]:
        return decode_each_token(tokens, self.decode)

    def save(self) -> dict[str, Any]:
        return {"kind": self.kind}


class Listed(Tokenizer):
    """Tokens from a list: what is not in it is unknown."""

    def __init__(self, listed: Iterable[str]) -> None:
        super().__init__()
        self.listed = list(listed)
        self._numbers = {token: number for number, token in enumerate(self.listed, start=len(SPECIAL))}

    @property
    def vocabulary(self) -> int:
        return len(SPECIAL) + len(self.listed)

    @abstractmethod
    def _parts(self, text: str) -> Sequence[str]: ...

    def _encoded(self, text: str) -> list[int]:
        return [self._numbers.get(part, UNKNOWN) for part in self._parts(text)]

    def _found(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token that stands for one."""
        first = len(SPECIAL)
        return ["�" if token == UNKNOWN else self.listed[token - first] for token in tokens if token >= UNKNOWN]

    def _texts(self, tokens: Sequence[int]) -> list[str]:
        return [self.decode([token]) for token in tokens]

    def save(self) -> dict[str, Any]:
        return {"kind": self.kind, "listed": self.listed}


class Characters(Listed):
    """The characters that occur in the texts to learn from."""

    kind = "characters"

    def __init__(self, listed: Iterable[str]) -> None:
        super().__init__(sorted(set().union(*listed)))

    def _parts(self, text: str) -> Sequence[str]:
        return text

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self._found(tokens))


class Words(Listed):
    """Words and punctuation marks, the commonest of the texts to learn from."""

    kind = "words"

    def _parts(self, text: str) -> Sequence[str]:
        return words(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return joined(self._found(tokens))

    def _texts(self, tokens: Sequence[int]) -> list[str]:
        return [f" {text}" if place else text for place, text in enumerate(super()._texts(tokens))]


class Pieces(Tokenizer):
    """Pieces of words, learned by byte-pair encoding; every text has them, because bytes are among them."""

    kind = "bpe"

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def vocabulary(self) -> int:
        return int(self.model.get_vocab_size())

    def _encoded(self, text: str) -> list[int]:
        return list(self.model.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.model.decode([token for token in tokens if token >= len(SPECIAL)])).removeprefix(" ")

    def _texts(self, tokens: Sequence[int]) -> list[str]:
        return decode_each_token(tokens, lambda some: str(self.model.decode(some, skip_special_tokens=False)))

    def save(self) -> dict[str, Any]:
        return {"kind": self.kind, "model": self.model.to_str()}


def learned(kind: TokenizerKind, texts: Sequence[str], size: int) -> Tokenizer:
    """A tokenizer for texts like these, with at most `size` tokens.

    >>> learned("words", ["a man sleeps .", "a dog sleeps ."], size=7).encode("a cat sleeps .")
    [5, 3, 6, 4]
    """
    if kind == "bytes":
        return Bytes()
    if kind == "characters":
        return Characters(texts)
    if kind == "words":
        counts = Counter(word for text in texts for word in words(text))
        common = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return Words(word for word, _ in common[: max(size - len(SPECIAL), 0)])
    return Pieces(learned_pieces(texts, size))


def learned_pieces(texts: Sequence[str], size: int) -> Any:
    """Byte-pair encoding by the package `tokenizers`; a word begins with its space."""
    package = tokenizers()
    least = len(SPECIAL) + 256
    if size < least:
        raise ValueError(f"a vocabulary of pieces has at least {least} tokens, the bytes among them, but got {size}")
    model = package.Tokenizer(package.models.BPE())
    model.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=True)
    model.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    # A text that spells a special token is a text like any other.
    model.encode_special_tokens = True
    return model


def load(content: Any) -> Tokenizer:
    """The tokenizer that `save` described."""
    match content:
        case {"kind": "bytes"}:
            return Bytes()
        case {"kind": "characters", "listed": list(listed)}:
            return Characters(listed)
        case {"kind": "words", "listed": list(listed)}:
            return Words(listed)
        case {"kind": "bpe", "model": str(model)}:
            found = tokenizers().Tokenizer.from_str(model)
            found.encode_special_tokens = True
            return Pieces(found)
    raise ValueError(f"expected a tokenizer of the kinds bpe, words, characters or bytes, but got {str(content)[:80]}")


def to_json(tokenizer: Tokenizer) -> str:
    """What goes into a model's file."""
    return json.dumps(tokenizer.save(), ensure_ascii=False)


def from_json(text: str) -> Tokenizer:
    """The tokenizer in a model's file."""
    return load(json.loads(text))


def words(text: str) -> list[str]:
    """Words and punctuation marks.

    >>> words("she's hungry.")
    ['she', "'s", 'hungry', '.']
    """
    return re.findall(r"\w+|'\w+|[^\w\s]", text)


def joined(parts: Sequence[str]) -> str:
    """Words as a text: no space before a mark that closes.

    >>> joined(["she", "'s", "hungry", "."])
    "she's hungry."
    """
    return re.sub(r" (?=[.,;:!?)\]}%]|'\w)", "", " ".join(parts))


def tokenizers() -> Any:
    try:
        import tokenizers as package
    except ImportError as error:
        raise ImportError(
            "pieces of words need tokenizers, which is not installed: pip install 'foci[tasks]'"
        ) from error
    return package

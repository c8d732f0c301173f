"""Untrained vectors for the words of a sentence: `foci explain` and the explorer show how attention works with them.

The vectors are random and seeded with the word, so that equal words have equal vectors on every machine.

T words.
"""

import hashlib
import math
import unicodedata
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from foci.call import attention
from foci.positions import sinusoidal
from foci.weights.weights import Weights

VECTOR_WIDTH = 8
HEAD_COUNT = 2


def split_words(text: str) -> list[str]:
    """Split a text into words and punctuation marks; scripts without spaces into characters.

    >>> split_words("She's hungry, really.")
    ['She', "'s", 'hungry', ',', 'really', '.']
    """
    words: list[str] = []
    joins = False
    for character in unicodedata.normalize("NFC", text):
        kind = unicodedata.category(character)[0]
        letter = kind in "LN" or character == "_"
        wide = unicodedata.east_asian_width(character) in "WF"
        # A combining mark belongs to the character before it; other non-printing characters separate words.
        if words and (kind == "M" or character == "\u200d" or words[-1].endswith("\u200d")):
            words[-1] += character
        elif kind in "ZC":
            joins = False
        elif joins and letter and not wide:
            words[-1] += character
        else:
            words.append(character)
            joins = (letter and not wide) or character in "'’"
    return words


def random_from_name(name: str, *shape: int) -> Tensor:
    """Normal random numbers seeded with a name: the same on every machine and in every run."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def apply_random_projection(x: Tensor, name: str) -> Tensor:
    """Multiply by a random matrix, scaled to keep the variance."""
    # Of the first few seeds, 2 gives weights that are neither uniform nor concentrated on one word.
    return x @ random_from_name(f"projection 2 {name}", VECTOR_WIDTH, VECTOR_WIDTH).div(VECTOR_WIDTH**0.5)


def split_heads(x: Tensor) -> Tensor:
    """(T, width) -> (1, heads, T, width / heads)."""
    return x.view(1, -1, HEAD_COUNT, VECTOR_WIDTH // HEAD_COUNT).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(1, heads, T, width / heads) -> (T, width): the inverse of `split_heads`."""
    return x.transpose(1, 2).reshape(-1, VECTOR_WIDTH)


@dataclass(frozen=True)
class UntrainedSentence:
    """The words of a sentence with their vectors, queries, keys, values and attention."""

    words: list[str]
    omitted: int = 0  # words of the text that are not among `words`

    @cached_property
    def embeddings(self) -> Tensor:
        """One vector per word, (T, width); equal words have equal vectors."""
        return torch.stack([random_from_name(f"word {word.casefold()}", VECTOR_WIDTH) for word in self.words])

    @cached_property
    def inputs(self) -> Tensor:
        """The embeddings with sinusoidal positions added, (T, width)."""
        return self.embeddings + sinusoidal(len(self.words), VECTOR_WIDTH)

    @cached_property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (T, width)."""
        query, key, value = (apply_random_projection(self.inputs, name) for name in ("query", "key", "value"))
        return query, key, value

    @cached_property
    def output_and_weights(self) -> tuple[Tensor, Weights]:
        """Output and weights of `foci.attention`."""
        out, weights = attention(*self.qkv, return_weights=True)
        return out, weights

    def most_focused_word(self) -> int:
        """The index of the word with the lowest entropy; punctuation only if there are no words."""
        entropy = self.output_and_weights[1].entropy().clone()
        is_word = torch.tensor([any(map(str.isalnum, word)) for word in self.words])
        if is_word.any():
            entropy[~is_word] = math.inf
        return int(entropy.argmin())

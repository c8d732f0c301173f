"""Chooses a tokenizer and the size of its vocabulary by counting the words of the training texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from foci.inputs.text import TokenizerKind, join_words, tokenize_words

# Texts that are counted of each side; more do not change the choice.
MAX_COUNTED_TEXTS = 20_000
# A word is learned if it occurs this often; words as tokens need nearly all words to be.
LEARNED_COUNT, MAX_RARE_SHARE = 5, 0.01
# The share of texts that words as tokens may change, such as in their spaces.
MAX_CHANGED_SHARE = 0.01
# Below this mean number of words the texts of a side are single words, such as names, dates and codes.
SINGLE_WORD_MEAN = 1.5
# Byte-pair encoding has one token per WORDS_PER_TOKEN words of the texts, within these limits.
WORDS_PER_TOKEN, MIN_BPE_VOCABULARY, MAX_BPE_VOCABULARY = 20, 500, 8000


def choose_tokenizer(*sides: Sequence[str]) -> TokenizerKind:
    """Chooses words where they recur, characters where a side holds single words, and byte-pair encoding otherwise.

    >>> choose_tokenizer(["two three", "one two"] * 5, ["2 3", "1 2"] * 5)
    'words'
    >>> choose_tokenizer(["March 5, 2021", "May 1, 1999"], ["2021-03-05", "1999-05-01"])
    'characters'
    """
    sides = tuple(side[:MAX_COUNTED_TEXTS] for side in sides)
    if words_recur([text for side in sides for text in side]):
        return "words"
    is_single = any(sum(len(text.split()) for text in side) < SINGLE_WORD_MEAN * len(side) for side in sides)
    return "characters" if is_single else "bpe"


def words_recur(texts: Sequence[str]) -> bool:
    """Whether nearly every word occurs often enough to be learned, and words restore nearly every text."""
    split = [tokenize_words(text) for text in texts]
    counts = Counter(word for words in split for word in words)
    rare = sum(count for count in counts.values() if count < LEARNED_COUNT)
    changed = sum(join_words(words) != text for words, text in zip(split, texts, strict=True))
    return rare <= MAX_RARE_SHARE * counts.total() and changed <= MAX_CHANGED_SHARE * len(texts)


def choose_vocabulary(texts: Sequence[str]) -> int:
    """Chooses the maximum vocabulary size of byte-pair encoding, so that most tokens occur often.

    >>> choose_vocabulary(["Where is the train station?"] * 4000)
    1000
    """
    counted = texts[:MAX_COUNTED_TEXTS]
    words = sum(len(text.split()) for text in counted) * len(texts) // max(len(counted), 1)
    return min(max(words // WORDS_PER_TOKEN, MIN_BPE_VOCABULARY), MAX_BPE_VOCABULARY)

"""Names in a translation: unseen ones as the source spells them, found by the attention, others by a table.

S tokens of the source, T tokens of the answer.
"""

from __future__ import annotations

import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from foci.runtime.json_text import parse_json
from foci.tasks.parallel_text import Pair

# Letters and digits with hyphens between them; � stands for a byte that the answer lost.
WORD = re.compile(r"[\w\ufffd]+(?:-[\w\ufffd]+)*")
MIN_LETTERS = 4
# The share of letters that a word has in common with one that was meant to be the same.
SIMILARITY = 0.5


class Word(NamedTuple):
    """A word of a tokenized text: its characters from start to stop, and its tokens."""

    text: str
    start: int
    stop: int
    tokens: range


def find_words(texts: Sequence[str]) -> list[Word]:
    """The words of a text that is given token by token, without punctuation.

    >>> [(word.text, word.tokens) for word in find_words(["Hi", ",", " Ze", "be", "dee", "!"])]
    [('Hi', range(0, 1)), ('Zebedee', range(2, 5))]
    """
    owners = [position for position, text in enumerate(texts) for _ in text]
    return [
        Word(match.group(), *match.span(), range(owners[match.start()], owners[match.end() - 1] + 1))
        for match in WORD.finditer("".join(texts))
    ]


def compare(word: str, other: str) -> SequenceMatcher[str]:
    return SequenceMatcher(None, word, other, autojunk=False)


def resemble(word: str, other: str) -> bool:
    """Whether two words have most of their letters in common, in the same order.

    >>> resemble("Poughkeepsie", "Parteepsie"), resemble("Prague", "Prag"), resemble("Kate", "Maria")
    (True, True, False)
    """
    matcher = compare(word, other)
    # The first two are upper bounds that take less time.
    return min(matcher.real_quick_ratio(), matcher.quick_ratio()) >= SIMILARITY and matcher.ratio() >= SIMILARITY


def find_respelled_words(pairs: Iterable[Pair], is_split: Callable[[str], bool]) -> frozenset[str]:
    """Words that are not copied, in lower case: most targets translate them or spell them in their own way.

    Prague (Prag) and October (Oktober) are such words, and all that is written in lower case but not kept.

    Args:
        pairs: of the training set.
        is_split: whether a word has several tokens; the others are frequent, and never copied.
    """
    is_split, are_alike = cache(is_split), cache(resemble)
    copied: Counter[str] = Counter()
    for pair in pairs:
        target = set(WORD.findall(pair.target))
        for word in set(WORD.findall(pair.source)):
            if len(word) < MIN_LETTERS or not is_split(word.capitalize()):
                continue
            if {word, f"{word}s"} & target:
                copied[word.lower()] += 1
            elif word.islower() or any(are_alike(word.lower(), other.lower()) for other in target):
                copied[word.lower()] -= 1
    return frozenset(word for word, count in copied.items() if count < 0)


def parse_respelled_words(text: str | None) -> frozenset[str]:
    """Parses the words of a model file."""
    if text is None:
        raise ValueError("task.copy_names must be set before training: this model does not know which words to copy")
    words = parse_json(text, "respelled.json")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"respelled.json must be a list of words, got {reprlib.repr(words)}")
    return frozenset(words)


def parse_names(text: str) -> dict[str, str]:
    """Parses the table of names of a model file."""
    names = parse_json(text, "names.json")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"names.json must be a table of names, got {reprlib.repr(names)}")
    return names


def translate_names(source: str, answer: str, names: Mapping[str, str]) -> str:
    """The answer, in which names that it keeps are replaced by those of the table, such as Vienna by Wien.

    A name beside another word with a capital letter stays: "Hotel Vienna" and "Mr. Rome" are other names.

    >>> translate_names("Is Vienna's zoo old?", "Ist Viennas Zoo alt?", {"Vienna": "Wien"})
    'Ist Wiens Zoo alt?'
    """
    for name in names.keys() & set(WORD.findall(source)):
        if not re.search(rf"[^.] [A-Z]\w*\.? {re.escape(name)}\b|\b{re.escape(name)} [A-Z]", source):
            answer = re.sub(rf"\b{re.escape(name)}(?=s?(?!-)\b)", names[name], answer)
    return answer


def copy_names(
    source: Sequence[str], answer: Sequence[str], is_unseen: Callable[[str], bool], read_weights: Callable[[], Tensor]
) -> str:
    """The answer, in which words that resemble the unseen name that they attend to are replaced by it.

    >>> weights = torch.eye(4)
    >>> copy_names(["Hi", " Ze", "be", "dee"], ["Hallo", " Ze", "be", "de"], "Zebedee".__eq__, lambda: weights)
    'Hallo Zebedee'

    Args:
        source, answer: the texts of the tokens.
        is_unseen: whether the model has to spell a word, and the answer spells it in the same way.
        read_weights: returns the alignment (T, S); called only if a name is missing in the answer.
    """
    source_words, answer_words = find_words(source), find_words(answer)
    text = "".join(answer)
    names = [
        number
        for number, word in enumerate(source_words)
        if len(word.text) >= MIN_LETTERS
        and word.text[0].isupper()
        and is_unseen(word.text)
        and not any(contains_name(other.text, word.text) for other in answer_words)
    ]
    if names and answer_words:
        owners = find_owners(read_weights(), answer_words, source_words)
        spans = [(span, name) for name in names for span in find_attempts(owners, name, answer_words, source_words)]
        for span, name in sorted(spans, reverse=True):
            text = text[: span[0]] + spell_name(source, source_words[name], text[slice(*span)]) + text[span[1] :]
    return text


def contains_name(word: str, name: str) -> bool:
    """Whether a word of the answer is a name, with a German ending (Bostoner) or in a compound (Bostonreise)."""
    ending = word.removeprefix(name)
    return word.startswith(name) and (len(ending) > 2 or ending in ("", "s", "er", "en", "in"))


def find_owners(weights: Tensor, answer_words: Sequence[Word], source_words: Sequence[Word]) -> list[int]:
    """For each word of the answer the number of the source word with the largest weight."""
    rows = torch.stack([weights[word.tokens.start : word.tokens.stop].mean(0) for word in answer_words])
    sums = torch.stack([rows[:, word.tokens.start : word.tokens.stop].sum(-1) for word in source_words], -1)
    return [int(number) for number in sums.argmax(-1)]


def find_attempts(
    owners: Sequence[int], name: int, answer_words: Sequence[Word], source_words: Sequence[Word]
) -> Iterator[tuple[int, int]]:
    """The words that were meant to be a name, as characters from start to stop: one attempt per run of its words."""
    for is_owned, group in groupby(enumerate(answer_words), lambda item: owners[item[0]] == name):
        words = [word for _, word in group] if is_owned else []
        best = max(range(len(words)), key=lambda i: rate_attempt(words[i : i + 1], source_words[name].text), default=0)
        # The model may have made a word of the end of the name: "Lossiem Süden" for Lossiemouth.
        ends = [j for j in range(best + 1, len(words) + 1) if rate_attempt(words[best:j], source_words[name].text)]
        if ends:
            yield words[best].start, words[ends[-1] - 1].stop


def rate_attempt(words: Sequence[Word], name: str) -> float:
    """The share of letters in common with a name; 0 for words that were not meant to be it: "Maria", "Kalgo und"."""
    text = "".join(word.text for word in words)
    too_long = len(words) > 1 and len(text) > len(name) + 2
    spelled = sum(len(word.tokens) for word in words) > 1
    if too_long or not spelled or any(len(word.tokens) == 1 and word.text[0].islower() for word in words):
        return 0.0
    ratio = compare(text.removesuffix("s"), name.removesuffix("s")).ratio()
    return ratio if ratio >= SIMILARITY else 0.0


def spell_name(source: Sequence[str], name: Word, attempt: str) -> str:
    """The name, with the German genitive if the attempt has it and the source an apostrophe."""
    possessive = "".join(source)[name.stop : name.stop + 2] in ("'s", "’s")
    return name.text + ("s" if possessive and attempt.endswith("s") and not name.text.endswith(("s", "x", "z")) else "")

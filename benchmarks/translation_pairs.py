"""The pairs that the translator is trained on: Tatoeba with other names, places and numbers, and pairs of our own.

    python benchmarks/translation_pairs.py --data DATA --count 40      # print some of a round

training/pairs holds what was written for the model: sentences (*.txt), nouns, adjectives, verbs and templates
(noun_phrases.py), names, places and sentences with slots for them (slots.py). A round draws a share of Tatoeba, all
sentences of our own, fills templates and slots, and adds synthetic pairs: German sentences with the English that a
model made of them (back_translation.py).
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from noun_phrases import Lexicon, read_lines
from slots import Slots

from foci.tasks.parallel_text import Pair, read_pairs

FOLDER = Path(__file__).parent / "training" / "pairs"
# Pairs of each kind in a round; the sentences of our own are all in every round.
TATOEBA, SLOTS, TEMPLATES, SYNTHETIC = 50_000, 14_000, 6_000, 35_000
# The training ends without synthetic pairs, after this share of it.
SYNTHETIC_SHARE = 0.75
# Greetings and single words, which people try first, are added this often to a round.
BASICS = 8
# The share of the pairs of Tatoeba that are changed, where they can be; of all pairs, of those that lose their end mark
# and of those that are joined.
SWAPPED, UNMARKED, JOINED = 0.6, 0.03, 0.04
# A sentence that shares this part of its words with a test sentence is left out.
NEAR = 0.75
TESTS = ("everyday", "kept")

TATOEBA_NAMES = {
    "Tom": ("m", ("Tom",)),
    "John": ("m", ("John", "Johannes")),
    "Ken": ("m", ("Ken",)),
    "Jim": ("m", ("Jim",)),
    "Mary": ("f", ("Maria", "Mary")),
    "Alice": ("f", ("Alice", "Elke")),
    "Jane": ("f", ("Jane", "Johanna")),
}
NAME = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
NUMBER = re.compile(r"(?<![\w.,:/$€£-])\d{2,4}(?![\w:/%€]|[.,]\d)")


class PairSource:
    """Draws the pairs of a round."""

    def __init__(self, data: Path, reverse: bool = False, synthetic: Path | None = None) -> None:
        self.reverse, self.synthetic_file, self.synthetic = reverse, synthetic, list[Pair]()
        self.tests = TestSentences(data)
        self.tatoeba = self.tests.filter_tatoeba(read_pairs([data / "tatoeba_en_de" / "train.tsv.xz"]))
        self.lexicon, self.slots = Lexicon(FOLDER), Slots(FOLDER)
        self.basics = self.read_written("basics.txt")
        self.cities = dict(self.slots.cities)

    def stream_pairs(self, rng: random.Random, progress: Callable[[], float]) -> Iterator[Pair]:
        """Pairs of round after round in random order; `progress` returns the share of the training that is done."""
        while True:
            pairs = self.sample_round(rng)
            if progress() < SYNTHETIC_SHARE:
                pairs += self.sample_synthetic(rng)
            rng.shuffle(pairs)
            yield from pairs

    def sample_synthetic(self, rng: random.Random) -> list[Pair]:
        """Some synthetic pairs; none before their file is there."""
        if not self.synthetic and self.synthetic_file is not None and self.synthetic_file.exists():
            self.synthetic = read_pairs([self.synthetic_file])
        return rng.sample(self.synthetic, min(SYNTHETIC, len(self.synthetic)))

    def read_written(self, pattern: str = "*.txt") -> list[Pair]:
        """The written pairs that resemble no test sentence."""
        return self.tests.filter_pairs(read_written_pairs(pattern))

    def sample_round(self, rng: random.Random) -> list[Pair]:
        """The pairs of a round but synthetic ones, in no order; pairs that were written meanwhile are among them."""
        chosen = rng.sample(self.tatoeba, TATOEBA)
        pairs = [self.swap(pair, rng) if rng.random() < SWAPPED else pair for pair in chosen]
        pairs += self.read_written()
        pairs += [Pair(*self.slots.draw(rng)) for _ in range(SLOTS)]
        templates = (self.lexicon.fill_template(rng, self.slots.draw_name) for _ in range(TEMPLATES))
        pairs += [Pair(*each) for each in templates if each is not None]
        pairs = [self.roughen(pair, pairs, rng) for pair in pairs]
        pairs += self.basics * BASICS
        return [self.reverse_if_asked(pair) for pair in pairs]

    def swap(self, pair: Pair, rng: random.Random) -> Pair:
        """Other names, cities and numbers, on both sides."""
        source, target = pair.source, pair.target
        for name, (gender, german) in TATOEBA_NAMES.items():
            if re.search(rf"\b{name}\b", source) and any(re.search(rf"\b{each}(s|’|')?\b", target) for each in german):
                source, target = replace_name(source, target, name, german, self.slots.draw_name(rng, gender))
        for english in re.findall(r"\b[A-Z][a-z]+\b", source):
            german_city = self.cities.get(english)
            if german_city and re.search(rf"\b{german_city}\b", target):
                new, new_german = self.slots.draw_city(rng)
                source = re.sub(rf"\b{english}\b", new, source)
                target = re.sub(rf"\b{german_city}\b", new_german, target)
        for number in set(NUMBER.findall(source)) & set(NUMBER.findall(target)):
            new = str(rng.randrange(10 ** (len(number) - 1), 10 ** len(number)))
            source, target = (re.sub(rf"(?<!\d){number}(?!\d)", new, text) for text in (source, target))
        return Pair(source, target)

    def roughen(self, pair: Pair, pairs: Sequence[Pair], rng: random.Random) -> Pair:
        """Some sentences lose their end mark, as people type, and some follow another one."""
        if rng.random() < UNMARKED and pair.source[-1:] == pair.target[-1:] and pair.source[-1:] in ".!?":
            return Pair(pair.source[:-1], pair.target[:-1])
        if rng.random() < JOINED:
            second = rng.choice(pairs)
            if len(pair.source) + len(second.source) < 160 and pair.source[-1:] in ".!?":
                return Pair(f"{pair.source} {second.source}", f"{pair.target} {second.target}")
        return pair

    def reverse_if_asked(self, pair: Pair) -> Pair:
        return Pair(pair.target, pair.source) if self.reverse else pair


def replace_name(source: str, target: str, name: str, german: Sequence[str], new: str) -> tuple[str, str]:
    """Replace a name on both sides; the German genitive of names that end in s, x or z has an apostrophe."""
    genitive = f"{new}’" if new.endswith(("s", "x", "z", "ß")) else f"{new}s"
    source = re.sub(rf"\b{name}\b", new, source)
    for each in german:
        target = re.sub(rf"\b{each}(s\b|’s\b|'s\b)", genitive, target)
        target = re.sub(rf"\b{each}\b", new, target)
    return source, target


def read_written_pairs(pattern: str = "*.txt") -> list[Pair]:
    pairs = []
    for path in sorted(FOLDER.glob(pattern)):
        if path.name not in ("templates.txt", "verb_templates.txt", "surnames.txt"):
            pairs += [Pair(*line.split(" ||| ")) for line in read_lines(path)]
    return pairs


class TestSentences:
    """The sentences of the test sets, which no pair of the training may resemble."""

    __test__ = False

    def __init__(self, data: Path) -> None:
        parts = [data / "tatoeba_en_de" / f"{part}.tsv.xz" for part in ("dev", "test")]
        self.tatoeba = [pair for part in parts for pair in read_pairs([part])]
        everyday, kept = ([line.split("\t") for line in read_lines(FOLDER / f"{name}-test.tsv")] for name in TESTS)
        self.sources = [row[1] for row in [*everyday, *kept]]
        self.references = [reference for row in everyday for reference in row[2].split(" | ")]
        self.unseen = {row[2] for row in kept if row[0].startswith("unseen")}

    def filter_pairs(self, pairs: Sequence[Pair]) -> list[Pair]:
        """The pairs that are far from every test sentence on both sides, and have no name that is unseen in a test."""
        sources, targets = [pair.source for pair in pairs], [pair.target for pair in pairs]
        left_out = find_near(sources, self.sources) | find_near(targets, self.references)
        left_out |= find_equal(sources, [pair.source for pair in self.tatoeba])
        left_out |= find_equal(targets, [pair.target for pair in self.tatoeba])
        left_out |= {number for number, source in enumerate(sources) if self.unseen & set(NAME.findall(source))}
        return [pair for number, pair in enumerate(pairs) if number not in left_out]

    def filter_tatoeba(self, train: Sequence[Pair]) -> list[Pair]:
        """The pairs of Tatoeba that are far from the sentences of the other tests; its own test part is apart."""
        left_out = find_near([pair.source for pair in train], self.sources)
        return [pair for number, pair in enumerate(train) if number not in left_out]


def find_equal(texts: Sequence[str], others: Sequence[str]) -> set[int]:
    """Find the texts that have the same words, in the same order, as one of the others."""
    known = {tuple(words(other)) for other in others}
    return {number for number, text in enumerate(texts) if tuple(words(text)) in known}


def find_near(texts: Sequence[str], others: Sequence[str]) -> set[int]:
    """Find the texts that share most of their words with one of the others."""
    index: dict[str, list[int]] = {}
    sets = [frozenset(words(text)) for text in others]
    for number, own in enumerate(sets):
        for word in own:
            index.setdefault(word, []).append(number)
    found = set()
    for number, text in enumerate(texts):
        own = set(words(text))
        # A near text shares at least one of the rarest words: more than 1 - NEAR of them cannot be missing.
        rarest = sorted(own, key=lambda word: len(index.get(word, ())))[: int(len(own) * (1 - NEAR)) + 1]
        candidates = {each for word in rarest for each in index.get(word, ())}
        if is_near(text, [sets[each] for each in candidates]):
            found.add(number)
    return found


def is_near(text: str, others: Sequence[Set[str]]) -> bool:
    """Whether a text shares most of its words with one of the others, whose words are given."""
    own = set(words(text))
    return any(len(own & other) > NEAR * max(len(own), len(other)) for other in others)


def words(text: str) -> list[str]:
    return re.findall(r"\w+(?:['’]\w+)?", text.lower())


def main() -> None:
    """Print some pairs of a round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the datasets")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    source = PairSource(options.data)
    pairs = source.sample_round(rng)
    print(f"{len(source.read_written()):,} written pairs, {len(pairs):,} in a round")
    for pair in rng.sample(pairs, options.count):
        print(f"{pair.source} ||| {pair.target}")


if __name__ == "__main__":
    main()

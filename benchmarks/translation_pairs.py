"""The pairs that the translator is trained on: Tatoeba with other names, places and numbers, and pairs of our own.

    python benchmarks/translation_pairs.py --data DATA --count 40      # print some of a round

training/pairs holds what was written for the model: sentences (*.txt), nouns, adjectives, verbs and templates
(noun_phrases.py), names, places and sentences with slots for them (slots.py). A round draws a share of Tatoeba, all
sentences of our own, and fills templates and slots.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from noun_phrases import Lexicon, read_lines
from slots import Slots

from foci.tasks.parallel_text import Pair, read_pairs

FOLDER = Path(__file__).parent / "training" / "pairs"
# Pairs of each kind in a round; the sentences of our own are all in every round.
TATOEBA, SLOTS, TEMPLATES = 40_000, 24_000, 10_000
# Greetings and single words, which people try first, are added this often to a round.
BASICS = 8
# The share of the pairs of Tatoeba that are changed, where they can be; of all pairs, of those that lose their end mark
# and of those that are joined.
SWAPPED, UNMARKED, JOINED = 0.6, 0.03, 0.04
# A written sentence that shares this part of its words with a sentence of the test set is left out.
NEAR = 0.75

TATOEBA_NAMES = {
    "Tom": ("m", ("Tom",)),
    "John": ("m", ("John", "Johannes")),
    "Ken": ("m", ("Ken",)),
    "Jim": ("m", ("Jim",)),
    "Mary": ("f", ("Maria", "Mary")),
    "Alice": ("f", ("Alice", "Elke")),
    "Jane": ("f", ("Jane", "Johanna")),
}
NUMBER = re.compile(r"(?<![\w.,:/$€£-])\d{2,4}(?![\w:/%€]|[.,]\d)")


class PairSource:
    """Draws the pairs of a round."""

    def __init__(self, data: Path, reverse: bool = False) -> None:
        self.reverse = reverse
        self.tatoeba = read_pairs([data / "tatoeba_en_de" / "train.tsv.xz"])
        self.lexicon, self.slots = Lexicon(FOLDER), Slots(FOLDER)
        tests = [set(words(line.split("\t")[1])) for line in read_lines(FOLDER / "everyday-test.tsv")]
        self.written = [pair for pair in read_written_pairs() if not is_near(pair.source, tests)]
        self.cities = dict(self.slots.cities)

    def sample_round(self, rng: random.Random) -> list[Pair]:
        """The pairs of a round, in no order."""
        chosen = rng.sample(self.tatoeba, TATOEBA)
        pairs = [self.swap(pair, rng) if rng.random() < SWAPPED else pair for pair in chosen]
        pairs += self.written
        pairs += [Pair(*self.slots.draw(rng)) for _ in range(SLOTS)]
        templates = (self.lexicon.fill_template(rng, self.slots.draw_name) for _ in range(TEMPLATES))
        pairs += [Pair(*each) for each in templates if each is not None]
        pairs = [self.roughen(pair, pairs, rng) for pair in pairs]
        pairs += read_written_pairs("basics.txt") * BASICS
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


def is_near(text: str, tests: Sequence[set[str]]) -> bool:
    own = set(words(text))
    return any(len(own & test) > NEAR * max(len(own), len(test)) for test in tests)


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
    print(f"{len(source.written):,} written pairs, {len(pairs):,} in a round")
    for pair in rng.sample(pairs, options.count):
        print(f"{pair.source} ||| {pair.target}")


if __name__ == "__main__":
    main()

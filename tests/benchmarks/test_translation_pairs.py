"""The pairs of sentences that the translator is trained on: German that is right, and no sentence of a test set."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from foci.tasks.parallel_text import Pair

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FOLDER = BENCHMARKS / "training" / "pairs"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in ("noun_phrases", "slots", "translation_pairs"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("template", "german", "english"),
    [
        ("{the.n}", "der Junge", "the boy"),
        ("{The.a}", "Den Jungen", "The boy"),
        ("{a~.d}", "einem kleinen Jungen", "a small boy"),
        ("{a~.n}", "ein kleiner Junge", "a small boy"),
        ("{the~+.n}", "die kleinen Jungen", "the small boys"),
        ("{bare+.d}", "Jungen", "boys"),
        ("{my+.n}", "meine Jungen", "my boys"),
        ("{this.n}", "dieser Junge", "this boy"),
    ],
)
def test_noun_phrases_are_declined(template: str, german: str, english: str) -> None:
    import noun_phrases

    noun = noun_phrases.Noun("boy", "boys", "m", "Junge", "Jungen", "person", weak=True)
    small = noun_phrases.Adjective("small", "klein", frozenset({"any"}))
    match = noun_phrases.PLACEHOLDER.fullmatch(template)
    assert noun_phrases.german_phrase(match, noun, small) == german
    assert noun_phrases.english_phrase(match, noun, small) == english


def test_dative_plurals_and_neuter_adjectives() -> None:
    import noun_phrases

    child = noun_phrases.Noun("child", "children", "n", "Kind", "Kinder", "person", weak=False)
    assert child.decline("d", plural=True) == "Kindern"
    assert noun_phrases.decline_adjective("alt", "a", "n", "n") == "altes"
    assert noun_phrases.decline_adjective("teuer", "the", "n", "n") == "teure"


def test_numbers_and_times_in_words() -> None:
    import slots

    assert (slots.english_words(73), slots.german_words(73)) == ("seventy-three", "dreiundsiebzig")
    assert slots.german_words(121) == "einhunderteinundzwanzig"
    rng = random.Random(1)
    times = dict(slots.make_spoken_time(rng, 3) for _ in range(200))
    assert times["half past three"] == "halb vier"
    assert times["quarter to four"] == "Viertel vor vier"
    assert times["twenty-five to four"] == "fünf nach halb vier"
    assert slots.make_ordinal(21) == ("twenty-first", "einundzwanzigsten")


def test_slots_hold_the_same_values_on_both_sides() -> None:
    import slots

    found = slots.Slots(FOLDER)
    rng = random.Random(1)
    for _ in range(500):
        english, german = found.draw(rng)
        assert "{" not in english + german
    assert slots.replace_german_slot("{name}s Haus", "{name}", "Anna") == "Annas Haus"
    assert slots.replace_german_slot("{name}s Haus", "{name}", "Hans") == "Hans' Haus"


def test_names_are_replaced_on_both_sides() -> None:
    import translation_pairs

    new = translation_pairs.replace_name("Tom's dog likes Tom.", "Toms Hund mag Tom.", "Tom", ("Tom",), "Max")
    assert new == ("Max's dog likes Max.", "Max’ Hund mag Max.")


def test_written_pairs_are_whole_and_far_from_the_tests() -> None:
    import noun_phrases
    import translation_pairs

    pairs = translation_pairs.read_written_pairs()
    assert len(pairs) > 9_000
    assert all(isinstance(pair, Pair) and pair.source.strip() and pair.target.strip() for pair in pairs)
    tests = [line.split("\t") for line in noun_phrases.read_lines(FOLDER / "everyday-test.tsv")]
    assert len(tests) == 200
    own = set(translation_pairs.words(tests[0][1]))
    assert translation_pairs.is_near(tests[0][1], [own])
    assert not translation_pairs.is_near("A dog sleeps.", [own])
    assert Path(FOLDER / "kept-test.tsv").read_text().count("\n") == 160

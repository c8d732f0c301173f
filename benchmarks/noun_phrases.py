"""English and German noun phrases with determiner and adjective, and templates that are filled with them.

The nouns, adjectives and verbs are those of training/pairs; `fill_template` draws from them and declines the German.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Articles and their endings by case (n, a, d) and gender (m, f, n, p: the plural). Only kein and mein have a plural.
DEFINITE = {
    "n": {"m": "der", "f": "die", "n": "das", "p": "die"},
    "a": {"m": "den", "f": "die", "n": "das", "p": "die"},
    "d": {"m": "dem", "f": "der", "n": "dem", "p": "den"},
}
EIN_ENDINGS = {
    "n": {"m": "", "f": "e", "n": "", "p": "e"},
    "a": {"m": "en", "f": "e", "n": "", "p": "e"},
    "d": {"m": "em", "f": "er", "n": "em", "p": "en"},
}
EIN_WORDS = {"a": "ein", "no": "kein", "my": "mein", "your": "dein"}
GENDERS = {"der": "m", "die": "f", "das": "n", "pl": "p"}
PLACEHOLDER = re.compile(r"\{(the|The|a|A|no|my|My|your|Your|this|This|these|bare|zu)(2?)(~?)(\+?)(?:\.([nad]))?\}")
# Of the templates that are filled, the share of those with a verb of the lexicon.
VERB_SHARE = 0.4
VOWEL = re.compile(r"(?!uni|use|usu|eu|one)[aeiou]|hour|honest|heir", re.IGNORECASE)


@dataclass(frozen=True)
class Noun:
    """An English noun and its German translation; "-" where there is no plural."""

    english: str
    english_plural: str
    gender: str
    german: str
    german_plural: str
    category: str
    weak: bool

    def decline(self, case: str, plural: bool) -> str:
        """The German form: -n in the dative plural, -(e)n for weak nouns."""
        if plural:
            adds = case == "d" and not self.german_plural.endswith(("n", "s"))
            return self.german_plural + ("n" if adds else "")
        if self.weak and case != "n":
            if self.german == "Herr":
                return "Herrn"
            return self.german + ("n" if self.german.endswith("e") else "en")
        return self.german


@dataclass(frozen=True)
class Adjective:
    """An English adjective, its German stem, and the categories of nouns that it fits."""

    english: str
    german: str
    categories: frozenset[str]

    def fits(self, noun: Noun) -> bool:
        return "any" in self.categories or noun.category in self.categories


class Lexicon:
    """Nouns, adjectives and templates."""

    def __init__(self, folder: Path) -> None:
        self.nouns = [parse_noun(line) for line in read_rows(folder / "nouns.tsv")]
        self.nouns = [noun for noun in self.nouns if noun.gender]
        self.adjectives = [parse_adjective(line) for line in read_rows(folder / "adjectives.tsv")]
        self.templates = [line.split(" ||| ") for line in read_lines(folder / "templates.txt")]
        self.verbs = read_rows(folder / "verbs.tsv")
        self.verb_templates = [line.split(" ||| ") for line in read_lines(folder / "verb_templates.txt")]
        self.by_category: dict[str, list[Noun]] = {}
        for noun in self.nouns:
            self.by_category.setdefault(noun.category, []).append(noun)

    def fill_template(
        self, rng: random.Random, draw_name: Callable[[random.Random, str], str]
    ) -> tuple[str, str] | None:
        """A pair from a random template; None if the noun drawn has not the number that the template needs."""
        with_verb = rng.random() < VERB_SHARE
        english, german, categories = self.fill_verb(rng) if with_verb else rng.choice(self.templates)
        noun, other = self.draw_noun(categories, rng), self.draw_noun(categories, rng)
        found = PLACEHOLDER.findall(english + german)
        for number, second in ((bool(each[3]), bool(each[1])) for each in found):
            used = other if second else noun
            if (used.english_plural == "-" or used.german_plural == "-") if number else used.gender == "p":
                return None
            # Without a plural it is a mass noun: no "a milk".
            if not number and used.english_plural == "-" and re.search(r"\{(a|no)2?~?[.}]", english):
                return None
        fitting = [each for each in self.adjectives if each.fits(noun)] if "~" in english else []
        if "~" in english and not fitting:
            return None
        adjective = rng.choice(fitting) if fitting else None
        name = draw_name(rng, "m" if ":m}" in english else "")
        english, german = (re.sub(r"\{Name(:m)?\}", name, text) for text in (english, german))
        english = PLACEHOLDER.sub(lambda match: english_phrase(match, other if match[2] else noun, adjective), english)
        german = PLACEHOLDER.sub(lambda match: german_phrase(match, other if match[2] else noun, adjective), german)
        return english, german

    def fill_verb(self, rng: random.Random) -> tuple[str, str, str]:
        """A template with the forms of a verb, and the categories of its object."""
        base, past, participle, infinitive, _, simple, partizip, _, categories = rng.choice(self.verbs)
        simple, _, prefix = simple.partition(" ")
        forms = {"base": base, "past": past, "participle": participle, "infinitive": infinitive.replace("·", "")}
        forms |= {"simple": simple, "partizip": partizip, "prefix": prefix and f" {prefix}"}
        english, german = rng.choice(self.verb_templates)
        for name, form in forms.items():
            english, german = (text.replace(f"{{{name}}}", form) for text in (english, german))
        return english, german, categories.replace(",", " ")

    def draw_noun(self, categories: str, rng: random.Random) -> Noun:
        if categories == "any":
            return rng.choice(self.nouns)
        pools = [self.by_category.get(name, []) for name in categories.split()]
        sizes = [len(pool) for pool in pools]
        return rng.choice(rng.choices(pools, sizes)[0])


def english_phrase(match: re.Match[str], noun: Noun, adjective: Adjective | None) -> str:
    kind, _, described, plural, _ = match.groups()
    words = noun.english_plural if plural else noun.english
    if described and adjective is not None:
        words = f"{adjective.english} {words}"
    match kind.lower():
        case "bare":
            return words
        case "a" | "no":
            article = "an" if VOWEL.match(words) else "a"
            return f"{article.capitalize() if kind[0].isupper() else article} {words}"
    return f"{kind} {words}"


def german_phrase(match: re.Match[str], noun: Noun, adjective: Adjective | None) -> str:
    kind, _, described, plural, case = match.groups()
    case = case or "d"
    gender = "p" if plural else noun.gender
    words = noun.decline(case, bool(plural))
    if described and adjective is not None:
        words = f"{decline_adjective(adjective.german, kind.lower(), case, gender)} {words}"
    determiner = german_determiner(kind.lower(), case, gender)
    phrase = f"{determiner} {words}".strip()
    return phrase[0].upper() + phrase[1:] if kind[0].isupper() else phrase


def german_determiner(kind: str, case: str, gender: str) -> str:
    match kind:
        case "bare":
            return ""
        case "zu":
            return {"f": "zur", "p": "zu den"}.get(gender, "zum")
        case "the":
            return DEFINITE[case][gender]
        case "this" | "these":
            return "dies" + {"das": "es", "die": "e"}.get(DEFINITE[case][gender], DEFINITE[case][gender][1:])
    return EIN_WORDS[kind] + EIN_ENDINGS[case][gender]


def decline_adjective(stem: str, kind: str, case: str, gender: str) -> str:
    """Weak endings after der, mixed ones after ein."""
    stem = re.sub("el$", "l", stem) if stem.endswith("el") else stem
    stem = {"hoch": "hoh", "teuer": "teur", "sauer": "saur"}.get(stem, stem)
    if stem.endswith(("rosa", "lila", "beige")):
        return stem
    stem = stem.removesuffix("e")
    if kind in EIN_WORDS and gender != "p" and case in "na" and EIN_ENDINGS[case][gender] == "":
        return stem + ("er" if gender == "m" else "es")
    if (case in "na" and gender in "fn") or (case == "n" and gender == "m"):
        return stem + "e"
    return stem + "en"


def parse_noun(fields: list[str]) -> Noun:
    english, plural, article, german, german_plural, category, *weak = fields
    return Noun(english, plural, GENDERS.get(article, ""), german, german_plural, category, bool(weak))


def parse_adjective(fields: list[str]) -> Adjective:
    english, german, categories = fields
    return Adjective(english, german, frozenset(each.strip() for each in categories.split(",")))


def read_rows(path: Path) -> list[list[str]]:
    return [[field.strip() for field in line.split("|")] for line in read_lines(path)]


def read_lines(path: Path) -> list[str]:
    """The lines of a file but comments and empty ones."""
    return [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]

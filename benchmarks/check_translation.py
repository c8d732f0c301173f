"""Check a translator on text of several kinds, and write its answers for a reader to judge.

    python benchmarks/check_translation.py foci/models/translation --data DATA --out trained/check

Rows: BLEU (sacrebleu, 13a, cased) on the test part of Tatoeba, on those of its sentences that resemble none of the
training set, and on Multi30k 2016, which no pair of the training imitates; BLEU and chrF on the everyday sentences of
training/pairs/everyday-test.tsv, with several references; the share of names, cities and numbers of kept-test.tsv that
an answer keeps; nouns in "Where is the X?" by how often Tatoeba has them; and the share of sentences with a word that
is neither in the German training text nor in the source or the reference.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import sacrebleu
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from noun_phrases import Lexicon, read_lines
from translation_pairs import FOLDER, find_near, read_written_pairs, words

from foci.tasks.model_file import load_trained_model
from foci.tasks.parallel_text import Pair, read_pairs
from foci.tasks.translation import Translation

NOUN_RANGES = ((0, 0), (1, 2), (3, 10), (11, 50), (51, 10**6))
NOUNS_EACH = 40


def main() -> None:
    """Translate every set, print the rows and write them with the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the datasets")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sentence", default="Jane is hungry, and she's really craving pasta from Italy.")
    options = parser.parse_args()
    task, model, _ = load_trained_model(options.model)
    if not isinstance(task, Translation):
        raise ValueError(f"model must be a translator, got one for {task.name}")
    check = Check(task, model, options.data, options.out)
    print(check.translate("sentence", [options.sentence])[0])
    for row in check.all_rows():
        print(f"{row[0]:45} {row[1]}", flush=True)


class Check:
    """A translator with the data that it is checked on."""

    def __init__(self, task: Translation, model: torch.nn.Module, data: Path, out: Path) -> None:
        self.task, self.model, self.data, self.out = task, model, data, out
        self.train, self.written = read_pairs([data / "tatoeba_en_de" / "train.tsv.xz"]), read_written_pairs()
        self.known = {word for pair in [*self.train, *self.written] for word in words(pair.target)}
        out.mkdir(parents=True, exist_ok=True)

    def translate(self, name: str, sources: Sequence[str]) -> list[str]:
        """Translate sentences, and write them with the answers."""
        with torch.no_grad():
            answers = self.task.decode(self.model, [Pair(source, "") for source in sources])
        lines = (f"{source}\t{answer}\n" for source, answer in zip(sources, answers, strict=True))
        (self.out / f"{name}.tsv").write_text("".join(lines))
        return answers

    def all_rows(self) -> Iterable[tuple[str, str]]:
        rows = []
        for check in (self.tatoeba_rows, self.multi30k_rows, self.everyday_rows, self.kept_rows, self.noun_rows):
            for row in check():
                rows.append(row)
                yield row
        (self.out / "rows.json").write_text(json.dumps(dict(rows), indent=1, ensure_ascii=False))

    def tatoeba_rows(self) -> Iterable[tuple[str, str]]:
        test = read_pairs([self.data / "tatoeba_en_de" / "test.tsv.xz"])
        answers = self.translate("tatoeba", [pair.source for pair in test])
        yield f"tatoeba test, {len(test):,}: BLEU", f"{bleu(answers, test):.1f}"
        near = find_near([pair.source for pair in test], [pair.source for pair in [*self.train, *self.written]])
        far = [index for index in range(len(test)) if index not in near]
        score = bleu([answers[index] for index in far], [test[index] for index in far])
        yield f"tatoeba test, {len(far):,} unlike any training: BLEU", f"{score:.1f}"
        yield from self.invented_rows("tatoeba", answers, test)

    def multi30k_rows(self) -> Iterable[tuple[str, str]]:
        folder = self.data / "multi30k"
        names = (folder / f"test_2016_flickr.{side}.gz" for side in ("en", "de"))
        sides = (gzip.decompress(name.read_bytes()).decode().splitlines() for name in names)
        test = [Pair(*each) for each in zip(*sides, strict=True)]
        answers = self.translate("multi30k", [pair.source for pair in test])
        yield "multi30k 2016: BLEU", f"{bleu(answers, test):.1f}"
        yield from self.invented_rows("multi30k", answers, test)

    def invented_rows(self, name: str, answers: Sequence[str], test: Sequence[Pair]) -> Iterable[tuple[str, str]]:
        """The share of sentences with an unknown word, and that of the references, whose words may be new too."""
        for kind, texts in (("answers", answers), ("references", [pair.target for pair in test])):
            unknown = [
                set(words(text)) - self.known - set(words(pair.source)) for text, pair in zip(texts, test, strict=True)
            ]
            if kind == "answers":
                unknown = [each - set(words(pair.target)) for each, pair in zip(unknown, test, strict=True)]
            share = sum(map(bool, unknown)) / len(test)
            yield f"{name}: {kind} with an unknown word", f"{share:.1%}"

    def everyday_rows(self) -> Iterable[tuple[str, str]]:
        rows = [line.split("\t") for line in read_lines(FOLDER / "everyday-test.tsv")]
        answers = self.translate("everyday", [row[1] for row in rows])
        references = [row[2].split(" | ") for row in rows]
        width = max(map(len, references))
        # Sentences with fewer references repeat their first one.
        columns = [[each[min(i, len(each) - 1)] for each in references] for i in range(width)]
        yield f"everyday, {len(rows)}: BLEU", f"{sacrebleu.corpus_bleu(answers, columns).score:.1f}"
        yield f"everyday, {len(rows)}: chrF", f"{sacrebleu.corpus_chrf(answers, columns).score:.1f}"
        equal = sum(answer in each for answer, each in zip(answers, references, strict=True))
        yield f"everyday, {len(rows)}: equal to a reference", str(equal)

    def kept_rows(self) -> Iterable[tuple[str, str]]:
        rows = [line.split("\t") for line in read_lines(FOLDER / "kept-test.tsv")]
        answers = self.translate("kept", [row[1] for row in rows])
        totals: Counter[str] = Counter(row[0] for row in rows)
        kept: Counter[str] = Counter(
            row[0]
            for row, answer in zip(rows, answers, strict=True)
            if re.search(rf"(?<!\w){re.escape(row[2])}s?(?!\w)", answer)
        )
        for kind, total in totals.items():
            yield f"kept: {kind}", f"{kept[kind]} of {total}"

    def noun_rows(self) -> Iterable[tuple[str, str]]:
        """Nouns of the lexicon, which the training fills templates with, by their number in Tatoeba."""
        counts = Counter(word for pair in self.train for word in words(pair.source))
        nouns = [noun for noun in Lexicon(FOLDER).nouns if noun.gender != "p" and " " not in noun.english]
        for low, high in NOUN_RANGES:
            fitting = [noun for noun in nouns if low <= counts[noun.english] <= high]
            chosen = random.Random(1).sample(fitting, min(NOUNS_EACH, len(fitting)))
            answers = self.translate(f"nouns-{low}", [f"Where is the {noun.english}?" for noun in chosen])
            right = sum(noun.german in answer for noun, answer in zip(chosen, answers, strict=True))
            yield f"nouns of the lexicon, {low} to {high} times in Tatoeba", f"{right} of {len(chosen)}"


def bleu(answers: Sequence[str], test: Sequence[Pair]) -> float:
    return float(sacrebleu.corpus_bleu(list(answers), [[pair.target for pair in test]]).score)


if __name__ == "__main__":
    main()

"""Choose the cross-attention layers whose mean is the alignment that views show, on the dev part of Tatoeba.

    python benchmarks/choose_alignment.py foci/models/translation --data DATA

The model reads the reference as its translation. A query is right if the source word with the largest weight, mean over
the heads of the layers, is its counterpart: nouns of the lexicon in training/pairs that occur once on each side, and
words that are the same on both sides. Every second sentence is not used for the choice, and is printed beside it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from noun_phrases import Lexicon
from translation_pairs import FOLDER

from foci.inputs.text import START, STOP
from foci.tasks.model_file import load_trained_model
from foci.tasks.parallel_text import Pair, read_pairs
from foci.tasks.translation import Translation

SENTENCES = 1600
KINDS = ("nouns", "copied")


def main() -> None:
    """Print every choice of layers with its share of right words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the datasets")
    options = parser.parse_args()
    task, model, _ = load_trained_model(options.model)
    if not isinstance(task, Translation):
        raise ValueError(f"model must be a translator, got one for {task.name}")
    pairs = read_pairs([options.data / "tatoeba_en_de" / "dev.tsv.xz"])[:SENTENCES]
    dictionary = {noun.english: noun.german for noun in Lexicon(FOLDER).nouns if noun.gender != "p"}
    halves = [count_right(task, model, half, dictionary) for half in (pairs[::2], pairs[1::2])]
    print(f"{'layers':14}" + "".join(f"{f'{kind}, {half}':>22}" for half in ("chosen on", "others") for kind in KINDS))
    for layers, first in sorted(halves[0].items(), key=lambda item: -sum(right / total for right, total in item[1])):
        cells = [f"{right / total:.1%} of {total}" for right, total in (*first, *halves[1][layers])]
        print(f"{','.join(map(str, layers)):14}" + "".join(f"{cell:>22}" for cell in cells))


def count_right(
    task: Translation, model: torch.nn.Module, pairs: Sequence[Pair], dictionary: dict[str, str]
) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """By layers: the right words and all words of each kind."""
    counts: dict[tuple[int, ...], list[list[int]]] = {}
    for pair in pairs:
        links = list(find_links(pair, dictionary))
        for layers, weights in read_alignments(task, model, pair) if links else ():
            own = counts.setdefault(layers, [[0, 0] for _ in KINDS])
            for kind, german, english in links:
                own[kind][0] += is_right(task, pair, weights, german, english)
                own[kind][1] += 1
    return {layers: [(right, total) for right, total in own] for layers, own in counts.items()}


def find_links(pair: Pair, dictionary: dict[str, str]) -> Iterator[tuple[int, int, int]]:
    """Words that translate each other for certain, as (kind, German word, English word)."""
    english, german = (text.split() for text in (pair.source, pair.target))
    plain_english, plain_german = ([re.sub(r"\W", "", word) for word in words] for words in (english, german))
    for index, word in enumerate(plain_english):
        for kind, other in enumerate((dictionary.get(word.lower()), word if len(word) > 1 else None)):
            if other and plain_english.count(word) == 1 and plain_german.count(other) == 1:
                yield kind, plain_german.index(other), index


@torch.no_grad()
def read_alignments(task: Translation, model: torch.nn.Module, pair: Pair) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """The mean over heads and layers, for every choice of layers: (target tokens, source tokens)."""
    source = [*task.tokenizer.encode(pair.source), STOP]
    target = [START, *task.tokenizer.encode(pair.target)]
    out = model(torch.tensor([source]), torch.tensor([target]), return_weights=True)
    layers = [each.dense()[0].mean(0) for name, each in out.weights.items() if name.startswith("cross.")]
    for size in range(1, len(layers) + 1):
        for chosen in combinations(range(len(layers)), size):
            yield chosen, torch.stack([layers[number] for number in chosen]).mean(0)


def is_right(task: Translation, pair: Pair, weights: Tensor, german: int, english: int) -> bool:
    """Whether the heaviest source word of a German word, summed over its tokens, is the English one."""
    rows, columns = (number_tokens(task, text) for text in (pair.target, pair.source))
    queries = [position for position, word in enumerate(rows) if word == german]
    per_token = weights[queries].mean(0)[: len(columns)]
    sums = torch.zeros(max(columns) + 1).index_add(0, torch.tensor(columns), per_token)
    return int(sums.argmax()) == english


def number_tokens(task: Translation, text: str) -> list[int]:
    """For each token the number of its word: words are separated by spaces."""
    ends = [len(" ".join(text.split()[: number + 1])) for number in range(len(text.split()))]
    tokens = task.tokenizer.encode(text)
    read = [len(task.tokenizer.decode(tokens[: position + 1]).strip()) for position in range(len(tokens))]
    return [next((number for number, end in enumerate(ends) if length <= end), len(ends) - 1) for length in read]


if __name__ == "__main__":
    main()

"""Translate German sentences into English with a model of that direction, as synthetic pairs for the translator.

    python benchmarks/back_translation.py trained/reversed DATA/common_voice_text/de.txt.xz --data DATA --out pairs.tsv

The English may be wrong, but the German is what people wrote. Pairs that cannot be translations are left out, and those
that the model finds least likely, and those that resemble a sentence of a test set.
"""

from __future__ import annotations

import argparse
import lzma
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from continue_translation import turn_off_cudnn_attention
from translation_pairs import TestSentences, words

from foci.decoding import generate
from foci.inputs.text import START, STOP
from foci.tasks.model_file import load_trained_model
from foci.tasks.parallel_text import Pair
from foci.tasks.translation import Translation

# Tokens that are translated at a time.
TOKENS = {"cpu": 2048, "cuda": 2**15}
MIN_WORDS, MAX_WORDS = 3, 20
MAX_LENGTH_RATIO = 1.8
MAX_COPIED = 0.6
# The share of the pairs that is kept: the likeliest.
KEPT = 0.8


def main() -> None:
    """Translate the sentences in random order until the time is over, and write the good pairs."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model from German to English")
    parser.add_argument("sentences", type=Path, help="German sentences, one in a line, compressed by xz")
    parser.add_argument("--data", type=Path, required=True, help="the folder of the datasets")
    parser.add_argument("--out", type=Path, required=True, help="the table of English and German sentences to write")
    parser.add_argument("--count", type=int, help="translate only so many sentences")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after this time")
    options = parser.parse_args()
    task, model, _ = load_trained_model(options.model)
    if not isinstance(task, Translation):
        raise ValueError(f"model must be a translator, got one for {task.name}")
    if torch.cuda.is_available():
        turn_off_cudnn_attention()
        model = model.cuda().bfloat16()
    sentences = choose_sentences(options.sentences)[: options.count]
    rated = []
    for batch in translate(task, model, sentences):
        rated += [(rating, pair) for rating, pair in batch if is_plausible(pair)]
        if time.monotonic() - began > options.seconds:
            break
    rated.sort(key=lambda each: -each[0])
    kept = TestSentences(options.data).filter_pairs([pair for _, pair in rated[: int(len(rated) * KEPT)]])
    if kept:
        temporary = options.out.with_suffix(".part")
        temporary.write_text("".join(f"{pair.source}\t{pair.target}\n" for pair in kept))
        temporary.replace(options.out)
    print(f"{len(kept):,} of {len(sentences):,} sentences in {time.monotonic() - began:.0f} s")


def choose_sentences(path: Path) -> list[str]:
    """Sentences of moderate length, in random order."""
    lines = lzma.decompress(path.read_bytes()).decode().splitlines()
    chosen = [" ".join(line.split()) for line in dict.fromkeys(lines) if MIN_WORDS <= len(words(line)) <= MAX_WORDS]
    random.Random(1).shuffle(chosen)
    return chosen


@torch.no_grad()
def translate(
    task: Translation, model: torch.nn.Module, sentences: Sequence[str]
) -> Iterator[list[tuple[float, Pair]]]:
    """Pairs with the log-probability per token, in batches of sentences with the same number of tokens."""
    device = next(model.parameters()).device
    waiting: dict[int, list[tuple[str, list[int]]]] = {}
    for sentence in sentences:
        tokens = [*task.tokenizer.encode(sentence), STOP]
        waiting.setdefault(len(tokens), []).append((sentence, tokens))
    groups = []
    for length, group in waiting.items():
        rows = max(TOKENS[device.type] // length, 1)
        groups += [group[start : start + rows] for start in range(0, len(group), rows)]
    random.Random(1).shuffle(groups)
    for group in groups:
        prompts = torch.tensor([tokens for _, tokens in group], device=device)
        limit = min(3 * prompts.shape[1] // 2 + 8, task.settings.max_length)
        answers = generate(model, prompts, new_tokens=limit, start=START, stop=STOP, capture=False)
        yield [
            (
                answer.score / (len(answer.tokens) + 1),
                Pair(" ".join(task.tokenizer.decode(answer.tokens).split()), sentence),
            )
            for (sentence, _), answer in zip(group, answers, strict=True)
            if answer.stopped
        ]


def is_plausible(pair: Pair) -> bool:
    """Whether a pair may be a translation: of similar length, neither copied nor repetitive.

    >>> is_plausible(Pair("The dog is big.", "Der Hund ist groß.")), is_plausible(Pair("The the the.", "Die."))
    (True, False)
    """
    english, german = words(pair.source), words(pair.target)
    if not english or max(len(english), len(german)) > MAX_LENGTH_RATIO * min(len(english), len(german)) + 1:
        return False
    trigrams = Counter(zip(english, english[1:], english[2:], strict=False))
    if max(trigrams.values(), default=0) > 1 or re.search(r"\b(\w+) \1\b", pair.source, re.IGNORECASE):
        return False
    lower = {word for word in re.findall(r"\w+", pair.target) if word.islower()}
    return "\ufffd" not in pair.source and len(set(english) & lower) <= MAX_COPIED * max(len(lower), 1)


if __name__ == "__main__":
    main()

"""Finish and score models for reviews: add logistic regression, calibrate, and compare with TF-IDF.

    python benchmarks/sentiment.py --data DATA/plain/reviews --write-train
    python benchmarks/sentiment.py trained/reviews-1 trained/reviews-2 ... --data DATA/plain/reviews --out finished

The first command joins the reviews and the sentences of training/sentiment/written.tsv, which were written for the
model, to the train set of the config sentiment-reviews. The folders are seeds of that config, trained by
benchmarks/train.py. A logistic regression over tokens and pairs of tokens, fitted on the train set alone, is added to
the linear term of each: fitted before the training it would leave the encoder nothing to learn. Then the logits of
pairs that begin with a negation or "at" are corrected by another one, on sentences from
training/sentiment/templates.tsv. The weight of the linear term and the temperature of the softmax are chosen on dev,
which has every tenth written sentence, too. The baseline, TF-IDF and logistic regression, has its regularization and
n-grams chosen on the dev part of the reviews; it is fitted on the reviews, and on the reviews with the written
sentences.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from noun_phrases import read_rows
from translation_pairs import is_near, words

from foci.inputs.padding import pad_sequences
from foci.inputs.text import PAD
from foci.nn.classifier import TextClassifier, hash_ngrams
from foci.tasks.model_file import load_trained_model, save_trained_model
from foci.tasks.sentiment import LabelledText, Sentiment, SentimentSettings

POSITIVE = "positive"
PARTS = ("dev", "test.labelled_sentences", "test.polarity")
STRENGTHS, NGRAMS = (1.0, 2.0, 4.0, 8.0, 16.0), (1, 2)
# Of the regression that is the linear term: inverse regularization, and what its features are divided by.
STRENGTH, FEATURE_SCALE = 1.0, 18.0
PAIRS = 2**19  # logits of pairs of tokens
MIXES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)
REPEAT = 2  # how often the train set has each written sentence
# Of the regression for negations: sentences from the templates, and inverse regularization. "at all" is one of the
# pairs: it follows negations, whose meaning it would otherwise take over.
DRAWN, NEGATION_STRENGTH = 5000, 3.0
NEGATIONS = {"not", "never", "nothing", "no", "cannot", "'t", "at"}
WORD = re.compile(r"\b\w\w+\b")
BINS = 10
FOLDER = Path(__file__).resolve().parent / "training" / "sentiment"
# Sentences as users write them, and short ones, many with a negation; no training has seen what resembles them.
TESTS = (FOLDER / "users-test.tsv", FOLDER / "short-test.tsv")


class Features:
    """Sparse rows as one list of columns and values, for `embedding_bag`."""

    def __init__(self, rows: Sequence[dict[int, float]]) -> None:
        self.columns = torch.tensor([column for row in rows for column in row])
        self.values = torch.tensor([value for row in rows for value in row.values()])
        counts = torch.tensor([len(row) for row in rows])
        self.starts = counts.cumsum(0) - counts

    def __matmul__(self, weights: Tensor) -> Tensor:
        table = weights[:, None]
        return F.embedding_bag(self.columns, table, self.starts, mode="sum", per_sample_weights=self.values)[:, 0]


def fit_logistic_regression(
    features: Features, targets: Tensor, width: int, strength: float, offsets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weights and bias, as scikit-learn defines the regularization: C is `strength`, the bias is free.

    With `offsets`, these logits are added and the bias stays 0.
    """
    weights, bias = torch.zeros(width, requires_grad=True), torch.zeros((), requires_grad=offsets is None)
    optimizer = torch.optim.LBFGS(
        [each for each in (weights, bias) if each.requires_grad],
        max_iter=100,
        history_size=10,
        line_search_fn="strong_wolfe",
    )

    def compute_loss() -> Tensor:
        optimizer.zero_grad()
        logits = features @ weights + (bias if offsets is None else offsets)
        fit = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
        loss = strength * fit + weights.square().sum() / 2
        loss.backward()
        return loss

    optimizer.step(compute_loss)
    return weights.detach(), bias.detach()


class TfIdf:
    """Words and n-grams of words as unit vectors: counts times smoothed inverse document frequency."""

    def __init__(self, texts: Sequence[str], ngrams: int) -> None:
        self.ngrams = ngrams
        seen = Counter(term for text in texts for term in set(self.terms(text)))
        self.columns = {term: column for column, term in enumerate(seen)}
        self.rarity = {term: float(torch.tensor((1 + len(texts)) / (1 + n)).log()) + 1 for term, n in seen.items()}

    def terms(self, text: str) -> list[str]:
        words = WORD.findall(text.lower())
        return [" ".join(words[i : i + n]) for n in range(1, self.ngrams + 1) for i in range(len(words) - n + 1)]

    def __call__(self, texts: Sequence[str]) -> Features:
        rows = []
        for text in texts:
            row = {term: n * self.rarity[term] for term, n in Counter(self.terms(text)).items() if term in self.rarity}
            norm = sum(value**2 for value in row.values()) ** 0.5 or 1.0
            rows.append({self.columns[term]: value / norm for term, value in row.items()})
        return Features(rows)


def read_written() -> tuple[list[LabelledText], list[LabelledText]]:
    """The sentences that were written for the model: for training, and every tenth for dev."""
    written = Sentiment.read([FOLDER / "written.tsv"], SentimentSettings())
    return [each for number, each in enumerate(written) if number % 10], written[::10]


def draw_sentences(count: int, rng: random.Random) -> list[LabelledText]:
    """Different sentences from the templates, most with a negation; none resembles a sentence of users."""
    kinds = {kind: choices.split() for kind, choices in read_rows(FOLDER / "words.txt")}
    templates = Sentiment.read([FOLDER / "templates.tsv"], SentimentSettings())
    tests = [set(words(each.text)) for path in TESTS for each in Sentiment.read([path], SentimentSettings())]
    drawn: dict[LabelledText, None] = {}
    while len(drawn) < count:
        template = rng.choice(templates)
        text = re.sub(r"{(\w+?)2?}", lambda slot: rng.choice(kinds[slot[1]]).replace("_", " "), template.text)
        text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
        if not is_near(text, tests):
            drawn[LabelledText(text, template.label)] = None
    return list(drawn)


def write_train(data: Path) -> None:
    """Write the train set with the written sentences."""
    examples = Sentiment.read([data / "train.tsv"], SentimentSettings()) + read_written()[0] * REPEAT
    lines = ["text\tlabel", *(f"{each.text}\t{each.label}" for each in examples)]
    (data / "train-written.tsv").write_text("\n".join(lines) + "\n")


def labels_of(examples: Sequence[LabelledText]) -> Tensor:
    return torch.tensor([float(each.label == POSITIVE) for each in examples])


def measure_accuracy(logits: Tensor, examples: Sequence[LabelledText]) -> float:
    return 100.0 * float(((logits > 0) == labels_of(examples).bool()).float().mean())


def score_baseline(train: Sequence[LabelledText], sets: dict[str, list[LabelledText]]) -> dict[str, float]:
    """The accuracy of TF-IDF and logistic regression on each set; the settings are those that are best on dev."""
    best: tuple[float, dict[str, float]] = (-1.0, {})
    for ngrams in NGRAMS:
        vectors = TfIdf([each.text for each in train], ngrams)
        features = vectors([each.text for each in train])
        tests = {name: vectors([each.text for each in examples]) for name, examples in sets.items()}
        for strength in STRENGTHS:
            weights, bias = fit_logistic_regression(features, labels_of(train), len(vectors.columns), strength)
            scores = {name: measure_accuracy(tests[name] @ weights + bias, sets[name]) for name in sets}
            print(f"baseline, {ngrams}-grams, C {strength:g}: {show_scores(scores)}", flush=True)
            best = max(best, (scores["dev"], scores), key=lambda pair: pair[0])
    return best[1]


def count_columns(task: Sentiment, pairs: int, examples: Sequence[LabelledText]) -> list[dict[int, float]]:
    """The columns of the linear term that a text adds up: its tokens, and its pairs of tokens after those."""
    rows = []
    for each in examples:
        tokens = torch.tensor([task.tokens(each)])
        hashed = hash_ngrams(tokens, 2, pairs) + task.tokenizer.vocabulary
        rows.append({column: float(n) for column, n in Counter(torch.cat([tokens, hashed], 1)[0].tolist()).items()})
    return rows


def fit_linear_term(rows: Sequence[dict[int, float]], targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The logit of each column by logistic regression, (width,), and the bias."""
    seen = Counter(column for row in rows for column in row)
    counts = torch.zeros(width)
    counts[torch.tensor(list(seen))] = torch.tensor([float(n) for n in seen.values()])
    rarity = (((1 + len(rows)) / (1 + counts)).log() + 1) / FEATURE_SCALE
    scale = rarity.tolist()
    features = Features([{column: n * scale[column] for column, n in row.items()} for row in rows])
    weights, bias = fit_logistic_regression(features, targets, width, STRENGTH)
    return weights * rarity, bias


@torch.no_grad()
def compute_logits(task: Sentiment, model: TextClassifier, examples: Sequence[LabelledText]) -> Tensor:
    """How much more likely positive is than negative, in nats: (N,)."""
    parts = []
    for first in range(0, len(examples), 200):
        tokens, lengths = pad_sequences([task.tokens(each) for each in examples[first : first + 200]], PAD, multiple=1)
        logits = model(tokens, padding=lengths).logits
        parts.append(logits[:, task.labels.index(POSITIVE)] * 2 - logits.sum(1))
    return torch.cat(parts)


def add_linear_term(task: Sentiment, model: TextClassifier, weights: Tensor, bias: Tensor) -> TextClassifier:
    """The model with logits of tokens, and of pairs after them, and a bias added to its own."""
    assert model.evidence is not None
    vocabulary, pairs = len(model.evidence.table), len(weights) - len(model.evidence.table)
    larger = TextClassifier(model.config.replace(evidence_pairs=pairs))  # type: ignore[arg-type]
    larger.load_state_dict(model.state_dict(), strict=False)
    assert larger.evidence is not None
    assert larger.evidence.pairs is not None
    sign = torch.tensor([1.0 if label == POSITIVE else -1.0 for label in task.labels])
    # Half of it for either class: the difference is the logit.
    rows = weights[:, None] * sign / 2 / model.evidence.scale
    with torch.no_grad():
        larger.evidence.table += rows[:vocabulary]
        larger.evidence.pairs += rows[vocabulary:].mT
        larger.head.bias += bias * sign / 2
    return larger.eval()


def add_negations(task: Sentiment, model: TextClassifier) -> None:
    """Correct the logits of pairs that begin with a negation, by a regression on sentences from the templates."""
    assert model.evidence is not None
    assert model.evidence.pairs is not None
    negations = {n for n in range(task.tokenizer.vocabulary) if task.tokenizer.decode([n]).strip() in NEGATIONS}
    sentences, width = draw_sentences(DRAWN, random.Random(0)), model.evidence.pairs.shape[1]
    rows = []
    for each in sentences:
        tokens = task.tokens(each)
        hashed = hash_ngrams(torch.tensor([tokens]), 2, width)[0].tolist()
        pairs = (pair for before, pair in zip(tokens, hashed[1:], strict=False) if before in negations)
        rows.append({pair: float(n) for pair, n in Counter(pairs).items()})
    offsets = compute_logits(task, model, sentences)
    weights, _ = fit_logistic_regression(Features(rows), labels_of(sentences), width, NEGATION_STRENGTH, offsets)
    sign = torch.tensor([1.0 if label == POSITIVE else -1.0 for label in task.labels])
    with torch.no_grad():
        model.evidence.pairs += sign[:, None] * weights / 2 / model.evidence.scale


def divide_logits(model: TextClassifier, temperature: float) -> None:
    """Divide the logits by a temperature; they are linear in these parameters."""
    assert model.evidence is not None
    with torch.no_grad():
        for parameter in (model.head.weight, model.head.bias, model.evidence.scale):
            parameter /= temperature


def choose_temperature(logits: Tensor, examples: Sequence[LabelledText]) -> float:
    """The temperature with the lowest cross-entropy."""
    candidates = [0.5 + 0.02 * step for step in range(150)]
    return min(
        candidates, key=lambda each: float(F.binary_cross_entropy_with_logits(logits / each, labels_of(examples)))
    )


def calibration_error(logits: Tensor, examples: Sequence[LabelledText]) -> float:
    """The mean distance of the stated probability from the share of correct answers, in ten bins, in percent."""
    sure = logits.abs().sigmoid()
    correct = ((logits > 0) == labels_of(examples).bool()).float()
    place = ((sure - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
    bins = [place == number for number in range(BINS) if bool((place == number).any())]
    return 100.0 * sum(float(each.float().mean() * (sure[each].mean() - correct[each].mean()).abs()) for each in bins)


def show_scores(scores: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in scores.items())


def finish(folder: Path, data: Path, out: Path | None) -> dict[str, float]:
    """Add a linear term, calibrate, score; write the finished model."""
    task, trained, about = load_trained_model(folder)
    assert isinstance(task, Sentiment)
    assert isinstance(trained, TextClassifier)
    sets = {name: task.read([data / f"{name}.tsv"], task.settings) for name in PARTS}
    sets["dev"] += read_written()[1]
    sets |= {path.stem: task.read([path], task.settings) for path in TESTS}
    train = task.read([data / "train.tsv"], task.settings) + read_written()[0]
    width = PAIRS + task.tokenizer.vocabulary
    weights, bias = fit_linear_term(count_columns(task, PAIRS, train), labels_of(train), width)
    plain = {name: measure_accuracy(compute_logits(task, trained, sets[name]), sets[name]) for name in sets}
    own = compute_logits(task, trained, sets["dev"])
    change = Features(count_columns(task, PAIRS, sets["dev"])) @ weights + bias
    mix = max(MIXES, key=lambda each: (measure_accuracy(own + each * change, sets["dev"]), -each))
    model = add_linear_term(task, trained, mix * weights, mix * bias)
    add_negations(task, model)
    temperature = choose_temperature(compute_logits(task, model, sets["dev"]), sets["dev"])
    divide_logits(model, temperature)
    logits = {name: compute_logits(task, model, sets[name]) for name in sets}
    scores = {name: measure_accuracy(logits[name], sets[name]) for name in sets}
    errors = {name: calibration_error(logits[name], sets[name]) for name in sets}
    print(f"{folder.name}: without the regression {show_scores(plain)}; regression x {mix:g} {show_scores(scores)};")
    print(f"  temperature {temperature:.2f}, calibration error {show_scores(errors)}", flush=True)
    if out is not None:
        target = out / folder.name
        target.mkdir(parents=True, exist_ok=True)
        save_trained_model(target / "model.safetensors", task, model, about)
        for name in ("config.toml", "metrics.jsonl"):
            shutil.copy(folder / name, target)
    return scores


def main() -> None:
    """Print the baseline, each seed and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="the folder that benchmarks/datasets.py reviews wrote")
    parser.add_argument("--out", type=Path, help="write the finished models to this folder")
    parser.add_argument("--baseline", action="store_true", help="score TF-IDF and logistic regression, too")
    parser.add_argument("--write-train", action="store_true", help="write the train set with the written sentences")
    options = parser.parse_args()
    if options.write_train:
        write_train(options.data)
    if options.baseline:
        read: Callable[[str], list[LabelledText]] = lambda name: Sentiment.read(  # noqa: E731
            [options.data / f"{name}.tsv"], SentimentSettings()
        )
        # Each sentence once: the repetition of the smaller file makes the baseline worse on the larger one.
        train = list(dict.fromkeys(read("train")))
        sets = {name: read(name) for name in PARTS} | {
            path.stem: Sentiment.read([path], SentimentSettings()) for path in TESTS
        }
        for name, examples in (("reviews", train), ("reviews and written", train + read_written()[0])):
            print(f"baseline on {name}, chosen on dev: {show_scores(score_baseline(examples, sets))}")
    scores = [finish(folder, options.data, options.out) for folder in options.folders]
    if scores:
        medians = {name: statistics.median(each[name] for each in scores) for name in scores[0]}
        print(f"median of {len(scores)}: {show_scores(medians)}")


if __name__ == "__main__":
    main()

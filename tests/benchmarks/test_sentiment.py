"""The data and the linear term of the sentiment model: no training sentence resembles a test sentence."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from foci.nn.classifier import TextClassifier
from foci.tasks.sentiment import LabelledText, Sentiment, SentimentSettings

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in ("noun_phrases", "sentiment", "slots", "translation_pairs"):
        sys.modules.pop(name, None)


def test_written_sentences_are_balanced_and_far_from_the_tests() -> None:
    import sentiment
    from translation_pairs import is_near, words

    train, dev = sentiment.read_written()
    written = train + dev
    assert len(written) > 1_900
    assert len({each.text for each in written}) == len(written)
    counts = Counter(each.label for each in written)
    assert counts.keys() == {"negative", "positive"}
    assert min(counts.values()) > 0.45 * len(written)
    tests = [set(words(each.text)) for path in sentiment.TESTS for each in Sentiment.read([path], SentimentSettings())]
    assert len(tests) == 60 + 20
    assert is_near("Really not bad at all!", tests)
    drawn = sentiment.draw_sentences(1000, random.Random(1))
    assert len(set(drawn)) == 1000
    assert min(Counter(each.label for each in drawn).values()) > 400
    assert all("{" not in each.text for each in drawn)
    assert [each.text for each in written + drawn if is_near(each.text, tests)] == []


def test_the_linear_term_of_a_model_is_the_regression() -> None:
    import sentiment

    train = [LabelledText("not bad", "positive"), LabelledText("bad", "negative"), LabelledText("not good", "negative")]
    task = Sentiment.from_examples(SentimentSettings(size="tiny", grams=1, forget=0.0), train)
    model = TextClassifier(task.model().config.replace(evidence=True)).eval()  # type: ignore[attr-defined]
    rows = sentiment.count_columns(task, 512, train)
    weights, bias = sentiment.fit_linear_term(rows, sentiment.labels_of(train), task.tokenizer.vocabulary + 512)
    larger = sentiment.add_linear_term(task, model, weights, bias)
    change = sentiment.compute_logits(task, larger, train) - sentiment.compute_logits(task, model, train)
    torch.testing.assert_close(change, sentiment.Features(rows) @ weights + bias)
    # "not" turns "bad" around, which no sum over words can: this is the pair.
    assert change[0] > change[1]


def test_negations_are_corrected() -> None:
    import sentiment

    train = sentiment.draw_sentences(3000, random.Random(1))
    task = Sentiment.from_examples(SentimentSettings(size="tiny", grams=1, prior=True), train)
    model = TextClassifier(task.model().config.replace(evidence_pairs=2**16)).eval()  # type: ignore[attr-defined]
    texts = [LabelledText(text) for text in ("a boring film", "not boring", "not great", "the dull plot")]
    before = sentiment.compute_logits(task, model, texts)
    sentiment.add_negations(task, model)
    after = sentiment.compute_logits(task, model, texts)
    assert after[1] > before[1] + 1.0
    assert after[2] < before[2] - 1.0
    assert torch.equal(after[[0, 3]], before[[0, 3]])

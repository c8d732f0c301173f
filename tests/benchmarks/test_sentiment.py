"""The data and the linear term of the sentiment model: no training sentence resembles a test sentence."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from foci.nn.classifier import TextClassifier
from foci.tasks.sentiment import LabelledText, Sentiment, SentimentSettings
from tests.models.test_pretrained import NEGATIVE_TEXTS, POSITIVE_TEXTS

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
    users = [each.text for each in Sentiment.read([sentiment.USERS], SentimentSettings())]
    assert len(users) == 60
    tests = [set(words(text)) for text in [*POSITIVE_TEXTS, *NEGATIVE_TEXTS, *users]]
    assert is_near("Really not bad at all!", tests)
    assert [each.text for each in written if is_near(each.text, tests)] == []


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

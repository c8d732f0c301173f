"""Of several answers the one most like the others."""

from __future__ import annotations

import math
import random

import pytest

from foci.tasks.minimum_bayes_risk import alike, most_alike, words

PARTS = ["budget", "meeting", "on", "monday", "the", "sale"]


def test_what_few_support_is_not_given_even_where_it_is_the_likeliest() -> None:
    texts = ["Sale", "Meeting on Monday", "the meeting on monday", "Meeting"]
    assert most_alike(texts, [0.0, -0.5, -0.6, -0.7]) == 1
    assert most_alike(texts, [0.0, -50.0, -60.0, -70.0]) == 0


def test_of_equals_the_first_is_given() -> None:
    assert most_alike(["a b", "A  B", "a, b!"], [-1.0, -1.0, -1.0]) == 0
    assert most_alike(["", ""], [-1.0, -math.inf]) == 0


def test_words_have_no_case_and_no_marks() -> None:
    assert words("Re: the Größe, 10/30!") == ["re", "the", "größe", "10", "30"]


def test_it_is_the_f_measure_of_rouge() -> None:
    rouge = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    chance = random.Random(0)
    for _ in range(50):
        one, other = (chance.choices(PARTS, k=chance.randint(0, 7)) for _ in range(2))
        expected = rouge.score(" ".join(one), " ".join(other))["rougeL"].fmeasure
        assert alike(one, other) == pytest.approx(expected)

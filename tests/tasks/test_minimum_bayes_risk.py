"""Of several answers the one most like the others."""

from __future__ import annotations

import math
import random

import pytest

from foci.tasks.minimum_bayes_risk import rouge_l, rouge_words, select_minimum_bayes_risk

PARTS = ["budget", "meeting", "on", "monday", "the", "sale"]


def test_an_outlier_is_not_selected_even_if_it_is_most_likely() -> None:
    texts = ["Sale", "Meeting on Monday", "the meeting on monday", "Meeting"]
    assert select_minimum_bayes_risk(texts, [0.0, -0.5, -0.6, -0.7]) == 1
    assert select_minimum_bayes_risk(texts, [0.0, -50.0, -60.0, -70.0]) == 0


def test_ties_go_to_the_first() -> None:
    assert select_minimum_bayes_risk(["a b", "A  B", "a, b!"], [-1.0, -1.0, -1.0]) == 0
    assert select_minimum_bayes_risk(["", ""], [-1.0, -math.inf]) == 0


def test_words_ignore_case_and_punctuation() -> None:
    assert rouge_words("Re: the Größe, 10/30!") == ["re", "the", "größe", "10", "30"]


def test_similarity_is_the_rouge_l_f_measure() -> None:
    rouge = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    chance = random.Random(0)
    for _ in range(50):
        one, other = (chance.choices(PARTS, k=chance.randint(0, 7)) for _ in range(2))
        expected = rouge.score(" ".join(one), " ".join(other))["rougeL"].fmeasure
        assert rouge_l(one, other) == pytest.approx(expected)

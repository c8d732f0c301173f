"""Minimum Bayes risk: selects the candidate with the highest expected ROUGE-L F-measure against all candidates.

The most likely candidate is often a short one that few others resemble.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence


def select_minimum_bayes_risk(texts: Sequence[str], log_weights: Sequence[float]) -> int:
    """Returns the index of the text most similar to all texts, weighted by exp(log_weights); ties go to the first.

    >>> texts = ["sale", "meeting on monday", "the meeting on monday", "meeting"]
    >>> select_minimum_bayes_risk(texts, [0.0, -0.5, -0.6, -0.7])
    1
    """
    candidates = [rouge_words(text) for text in texts]
    weights = [math.exp(log_weight - max(log_weights)) for log_weight in log_weights]
    expected = [
        sum(weight * rouge_l(one, other) for weight, other in zip(weights, candidates, strict=True))
        for one in candidates
    ]
    return max(range(len(texts)), key=expected.__getitem__)


def rouge_words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def rouge_l(one: Sequence[str], other: Sequence[str]) -> float:
    """Computes the F-measure of ROUGE-L, from the longest common subsequence: 0 to 1.

    >>> rouge_l(["a", "b", "c"], ["a", "c"])
    0.8
    """
    row = [0] * (len(other) + 1)
    for word in one:
        before = 0
        for i, second in enumerate(other):
            before, row[i + 1] = row[i + 1], before + 1 if word == second else max(row[i + 1], row[i])
    return 2 * row[-1] / max(len(one) + len(other), 1)

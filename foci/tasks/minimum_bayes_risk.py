"""Of several answers the one that is most like all of them: what is expected to score best, whichever of them is right.

The likeliest answer is often a short one that few others support: minimum Bayes risk, with the F-measure of ROUGE-L.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence


def most_alike(texts: Sequence[str], logs: Sequence[float]) -> int:
    """The place of the text that is most like the others, each of which counts as exp(log); of equals the first.

    >>> most_alike(["sale", "meeting on monday", "the meeting on monday", "meeting"], [0.0, -0.5, -0.6, -0.7])
    1
    """
    said = [words(text) for text in texts]
    counts = [math.exp(log - max(logs)) for log in logs]
    shares = [sum(count * alike(one, other) for count, other in zip(counts, said, strict=True)) for one in said]
    return max(range(len(texts)), key=shares.__getitem__)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def alike(one: Sequence[str], other: Sequence[str]) -> float:
    """Twice the words that both have in the same order, for all words that they have: 0 to 1.

    >>> alike(["a", "b", "c"], ["a", "c"])
    0.8
    """
    row = [0] * (len(other) + 1)
    for word in one:
        before = 0
        for place, second in enumerate(other):
            before, row[place + 1] = row[place + 1], before + 1 if word == second else max(row[place + 1], row[place])
    return 2 * row[-1] / max(len(one) + len(other), 1)

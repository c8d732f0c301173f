"""Clues: what they are, and what they say of classes that no single word tells."""

from __future__ import annotations

import pytest
import torch

from foci.tasks.clues import NO_CLUE, clues_in, weighed
from foci.tasks.sentiment import Labelled, Sentiment, SentimentSettings

BUCKETS = 5000
# No word alone tells; pairs do.
TURNED = {"is good": "plus", "not good": "minus", "not bad": "plus", "is bad": "minus"}


def test_clues_are_found_once_and_never_the_one_that_says_nothing() -> None:
    found = clues_in("so so good", BUCKETS)
    assert found == sorted(set(found))
    assert NO_CLUE not in found
    assert max(found) < BUCKETS


def test_pairs_of_words_tell_what_words_do_not() -> None:
    labels = sorted(set(TURNED.values()))
    read = [(clues_in(text, BUCKETS), labels.index(label)) for text, label in TURNED.items() for _ in range(5)]
    weights = weighed(read, BUCKETS, len(labels))
    for text, label in TURNED.items():
        said = torch.tensor([weights.get(str(clue), [0.0, 0.0]) for clue in clues_in(text, BUCKETS)]).sum(0)
        assert labels[int(said.argmax())] == label
        assert float(said.max() - said.min()) > 0.3


def test_a_clue_of_one_text_alone_says_nothing() -> None:
    weights = weighed([([1, 2], 0), ([1, 3], 1), ([2, 4], 0), ([3], 1)], 10, 2)
    assert sorted(map(int, weights)) == [1, 2, 3]
    assert weights["2"][0] > 0.0 > weights["3"][0]
    assert abs(weights["1"][0]) < 0.1


def test_a_task_answers_with_its_clues_before_it_has_learned_anything() -> None:
    settings = SentimentSettings(clues=BUCKETS, width=16, heads=2, layers=1, grams=1)
    train = [Labelled(text, label) for text, label in TURNED.items() for _ in range(5)]
    task = Sentiment.start(settings, train)
    again = Sentiment.from_files(settings, task.files())
    model = again.model().eval()
    with torch.no_grad():
        said = again.decode(model, [Labelled(text) for text in TURNED])
    assert [each.label for each in said] == list(TURNED.values())
    assert again.show(model, Labelled("not bad")).answer == again.write(model, [Labelled("not bad")])[0]
    assert again.batch(train[:2], True, torch.Generator())["clues"].unique().tolist() == [NO_CLUE]


def test_one_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 because one says nothing, but got 1"):
        SentimentSettings(clues=1)

"""Texts into classes: shapes, padding, tokens in a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foci.nn.classifier import ClassifierConfig, TextClassifier, hash_ngrams
from tests.nn.same import assert_same


def small(**options: Any) -> TextClassifier:
    torch.manual_seed(0)
    given: dict[str, Any] = {"width": 16, "layers": 2, "heads": 2, "vocabulary": 20, "classes": 3, "max_length": 12}
    model = TextClassifier(ClassifierConfig(**given | {"grams": 2, "buckets": 50} | options)).eval()
    for table in (model.head.weight, *([] if model.grams is None else [model.grams.weight])):
        torch.nn.init.normal_(table)
    return model


def tokens(batch: int = 3, length: int = 7) -> torch.Tensor:
    return torch.randint(1, 20, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("pool", ["class", "mean", "both"])
def test_padding_changes_nothing(pool: str) -> None:
    model = small(pool=pool)
    padded = tokens()
    padded[1, 4:] = 0
    alone = model(padded[1:2, :4]).logits
    assert_same(model(padded, padding=torch.tensor([7, 4, 7])).logits[1:2], alone)
    # The check can fail: without the lengths padding is read.
    assert not torch.allclose(model(padded).logits[1:2], alone, atol=1e-4)


@pytest.mark.parametrize("grams", [1, 3])
def test_every_parameter_has_a_gradient(grams: int) -> None:
    model = small(grams=grams, pool="both").train()
    model(tokens(), padding=torch.tensor([7, 4, 7])).logits.square().sum().backward()
    assert [name for name, each in model.named_parameters() if each.grad is None or not bool(each.grad.any())] == []


def test_the_order_of_words_is_told_by_pairs_alone() -> None:
    one, other = torch.tensor([[3, 5]]), torch.tensor([[5, 3]])
    bag, pairs = (small(grams=grams, positions=None, pool="mean") for grams in (1, 2))
    assert_same(bag(one).logits, bag(other).logits)
    assert not torch.allclose(pairs(one).logits, pairs(other).logits, atol=1e-4)


def test_buckets_depend_on_the_tokens_before() -> None:
    found = hash_ngrams(torch.tensor([[4, 9, 4, 9, 2]]), 2, 2**20)[0].tolist()
    assert found[1] == found[3]
    assert len(set(found)) == 4
    assert hash_ngrams(torch.tensor([[4]]), 3, 7).shape == (1, 1)
    assert int(hash_ngrams(tokens(20, 12), 3, 5).max()) == 4


@pytest.mark.parametrize("buckets", [10_000, 2**14])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_few_pairs_share_a_bucket(buckets: int, count: int) -> None:
    """As few as by chance: a third of 10,000 in 10,000 have no bucket of their own."""
    pairs = torch.cartesian_prod(torch.arange(100), torch.arange(100))
    given = torch.cat([torch.zeros(len(pairs), count - 2, dtype=torch.long), pairs], dim=1)
    found = hash_ngrams(given, count, buckets)[:, -1]
    by_chance = buckets * (1 - (1 - 1 / buckets) ** len(pairs))
    assert len(found.unique()) > 0.95 * by_chance


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"T at most 12, but got torch.int64 \(3, 13\)"):
        small()(tokens(length=13))
    with pytest.raises(ValueError, match="grams must be at most 4, but got 5"):
        small(grams=5)


def test_evidence_is_added_up_over_real_tokens() -> None:
    model = small(evidence=True)
    assert model.evidence is not None
    before = model(tokens(), padding=torch.tensor([7, 4, 7])).logits
    torch.nn.init.normal_(model.evidence.table)
    after = model(tokens(), padding=torch.tensor([7, 4, 7])).logits
    said = model.evidence.table[tokens()[1, :4]].sum(0)
    assert_same((after - before)[1], said)


def test_clues_speak_in_answers_and_not_in_training() -> None:
    model = small(clues=6, classes=2, dropout=0.0).eval()
    assert model.clues is not None
    model.clues.copy_(torch.arange(12.0).view(6, 2))
    model.clues[0] = 0.0
    clues = torch.tensor([[1, 5, 0], [2, 0, 0], [0, 0, 0]])
    alone = model(tokens()).logits
    said = torch.tensor([[2.0 + 10.0, 3.0 + 11.0], [4.0, 5.0], [0.0, 0.0]])
    assert_same(model(tokens(), clues=clues).logits, (alone + said) / 2)
    assert_same(model.train()(tokens(), clues=clues).logits, alone)

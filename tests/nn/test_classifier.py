"""The text classifier: padding, pooling, n-grams, evidence."""

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
def test_padding_does_not_change_the_logits(pool: str) -> None:
    model = small(pool=pool)
    padded = tokens()
    padded[1, 4:] = 0
    alone = model(padded[1:2, :4]).logits
    assert_same(model(padded, padding=torch.tensor([7, 4, 7])).logits[1:2], alone)
    # The check can fail: without lengths, padding changes the logits.
    assert not torch.allclose(model(padded).logits[1:2], alone, atol=1e-4)


@pytest.mark.parametrize("grams", [1, 3])
def test_every_parameter_has_a_gradient(grams: int) -> None:
    model = small(grams=grams, pool="both").train()
    model(tokens(), padding=torch.tensor([7, 4, 7])).logits.square().sum().backward()
    assert [name for name, each in model.named_parameters() if each.grad is None or not bool(each.grad.any())] == []


def test_only_bigrams_encode_the_word_order() -> None:
    one, other = torch.tensor([[3, 5]]), torch.tensor([[5, 3]])
    bag, pairs = (small(grams=grams, positions=None, pool="mean") for grams in (1, 2))
    assert_same(bag(one).logits, bag(other).logits)
    assert not torch.allclose(pairs(one).logits, pairs(other).logits, atol=1e-4)


def test_ngram_hashes_depend_on_the_previous_tokens() -> None:
    found = hash_ngrams(torch.tensor([[4, 9, 4, 9, 2]]), 2, 2**20)[0].tolist()
    assert found[1] == found[3]
    assert len(set(found)) == 4
    assert hash_ngrams(torch.tensor([[4]]), 3, 7).shape == (1, 1)
    assert int(hash_ngrams(tokens(20, 12), 3, 5).max()) == 4


@pytest.mark.parametrize("buckets", [10_000, 2**14])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_hash_collisions_are_as_rare_as_by_chance(buckets: int, count: int) -> None:
    """10,000 pairs in 10,000 buckets: by chance about a third of the buckets stay empty."""
    pairs = torch.cartesian_prod(torch.arange(100), torch.arange(100))
    given = torch.cat([torch.zeros(len(pairs), count - 2, dtype=torch.long), pairs], dim=1)
    found = hash_ngrams(given, count, buckets)[:, -1]
    by_chance = buckets * (1 - (1 - 1 / buckets) ** len(pairs))
    assert len(found.unique()) > 0.95 * by_chance


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"T at most 12, got torch.int64 \(3, 13\)"):
        small()(tokens(length=13))
    with pytest.raises(ValueError, match="grams must be between 1 and 4, got 5"):
        small(grams=5)


def test_evidence_is_summed_over_real_tokens() -> None:
    model = small(evidence=True)
    assert model.evidence is not None
    before = model(tokens(), padding=torch.tensor([7, 4, 7])).logits
    torch.nn.init.normal_(model.evidence.table)
    after = model(tokens(), padding=torch.tensor([7, 4, 7])).logits
    said = model.evidence.table[tokens()[1, :4]].sum(0)
    assert_same((after - before)[1], said)


def test_evidence_of_pairs_is_that_of_their_hashes() -> None:
    model = small(evidence=True, evidence_pairs=64)
    assert model.evidence is not None
    assert model.evidence.pairs is not None
    before = model(tokens(), padding=torch.tensor([7, 4, 7])).logits
    torch.nn.init.normal_(model.evidence.pairs)
    after = model(tokens(), padding=torch.tensor([7, 4, 7])).logits
    said = model.evidence.pairs[:, hash_ngrams(tokens()[1:2, :4], 2, 64)[0]].sum(1)
    assert_same((after - before)[1], said)


def test_removed_fields_are_refused() -> None:
    with pytest.raises(ValueError, match=r"fields of ClassifierConfig must be among width, .*, got clues"):
        ClassifierConfig.from_dict({"width": 16, "clues": 6})

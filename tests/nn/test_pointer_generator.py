"""The pointer-generator: logits are log-probabilities, caching changes nothing, and unseen tokens are copied."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import foci
from foci.nn.pointer_generator import CopyingTransformer, sum_weights_by_token
from tests.nn.same import assert_same


def small(vocabulary: int = 20) -> CopyingTransformer:
    torch.manual_seed(0)
    return CopyingTransformer.from_name(
        "tiny", vocabulary=vocabulary, shared=True, width=32, heads=2, layers=1, dropout=0.0, max_length=16
    ).eval()


def test_weights_are_summed_over_all_occurrences_of_a_token() -> None:
    weights = torch.tensor([[[0.5, 0.2, 0.3]]])
    assert_same(
        sum_weights_by_token(weights, torch.tensor([[4, 1, 4]]), 6), torch.tensor([[[0.0, 0.2, 0.0, 0.0, 0.8, 0.0]]])
    )


def test_logits_are_log_probabilities_and_ignore_padding() -> None:
    model = small()
    source, target = torch.randint(1, 20, (2, 7)), torch.randint(1, 20, (2, 5))
    real = torch.arange(7) < torch.tensor([7, 4])[:, None]
    out = model(source, target, source_padding=real, return_weights=True).logits
    assert_same(out.logsumexp(-1), torch.zeros(2, 5))
    assert_same(out[1:], model(source[1:, :4], target[1:]).logits)


def test_cached_beam_search_equals_uncached() -> None:
    model = small()
    sources = [[5, 3, 8, 9], [7, 4]]
    options = {"start": 1, "stop": 2, "new_tokens": 6, "method": foci.decoding.Beam(3)}
    cached = foci.generate(model, sources, **options)  # type: ignore[arg-type]
    uncached = foci.generate(model, sources, cache=False, **options)  # type: ignore[arg-type]
    assert [answer.tokens for answer in cached] == [answer.tokens for answer in uncached]


def test_copies_tokens_unseen_in_training() -> None:
    """The target is the first source token; tokens 12 to 19 occur in no training example."""
    model = small().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    start = torch.ones(64, 1, dtype=torch.long)
    for _ in range(80):
        source = torch.randint(3, 12, (64, 5), generator=generator)
        loss = F.cross_entropy(model(source, start).logits.mT, source[:, :1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    unseen = torch.randint(12, 20, (64, 5), generator=generator)
    with torch.no_grad():
        found = model.eval()(unseen, start).logits[:, 0].argmax(-1)
    assert (found == unseen[:, 0]).float().mean() > 0.5


def test_invalid_arguments_are_refused() -> None:
    model = small()
    with pytest.raises(ValueError, match="documents must be None for CopyingTransformer"):
        model.encode(torch.ones(1, 3, dtype=torch.long), documents=torch.zeros(1, 3, dtype=torch.long))
    plain = foci.nn.EncoderDecoder(model.config)
    memory = plain.encode(torch.ones(1, 3, dtype=torch.long))
    with pytest.raises(TypeError, match="memory must be the result of this model's encode, got Memory"):
        model.decode(torch.ones(1, 1, dtype=torch.long), memory)

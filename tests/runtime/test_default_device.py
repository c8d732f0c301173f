"""Nothing reads the default device where the data lies elsewhere: on "meta" such a tensor has no values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import foci
from foci.decoding import Beam, Sampling


@pytest.fixture
def meta_default() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def build(name: str) -> torch.nn.Module:
    with torch.device("cpu"):
        torch.manual_seed(0)
        kind = foci.nn.EncoderDecoder if name == "EncoderDecoder" else foci.nn.Decoder
        return kind.from_name("tiny", vocabulary=50)


def answer(name: str, **options: Any) -> list[list[int]]:
    return [each.tokens for each in foci.generate(build(name), [[5, 3, 8], [7]], new_tokens=4, **options)]


@pytest.mark.parametrize(
    "question",
    [
        lambda: answer("Decoder"),
        lambda: answer("Decoder", cache=False, stop=3),
        lambda: answer("Decoder", method=Sampling(temperature=0.7, top_p=0.9, seed=1)),
        lambda: answer("EncoderDecoder", start=1, stop=2, method=Beam(3, best=2)),
        lambda: foci.pretrained("sentiment")("I loved it"),
        lambda: foci.pretrained("sentiment").show("I loved it").answer,
        lambda: foci.look("Jane is hungry.", "translation", device="cpu").answer,
    ],
)
def test_answers_do_not_depend_on_the_default_device(
    question: Callable[[], Any], request: pytest.FixtureRequest
) -> None:
    expected = question()
    request.getfixturevalue("meta_default")
    assert question() == expected


@pytest.mark.parametrize("mask", [foci.causal, foci.window(2), foci.padding([3]), foci.documents([0, 0, 1, 1, 1])])
def test_weights_do_not_depend_on_the_default_device(mask: foci.Mask, request: pytest.FixtureRequest) -> None:
    q = torch.randn(1, 2, 5, 8)

    def ask() -> list[torch.Tensor]:
        out, weights = foci.attention(q, q, q, mask=mask, return_weights=True)
        return [out, weights[0, 1, 2], weights.entropy(), weights.top(2)[0], weights.received()]

    expected = ask()
    request.getfixturevalue("meta_default")
    for found, wanted in zip(ask(), expected, strict=True):
        torch.testing.assert_close(found, wanted)

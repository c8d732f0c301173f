"""`model.generate` under `foci.watch`: the rows of all steps join into one matrix per layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from tests.nn.same import assert_same

transformers = pytest.importorskip("transformers")

from tests.capture.architectures import ARCHITECTURES, LEFT, RIGHT, TOKENS, made  # noqa: E402
from tests.capture.test_huggingface import in_eager  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
NEW = 4
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()


def generated(model: Any, inputs: dict[str, Tensor], **options: Any) -> tuple[Tensor, foci.Record]:
    with foci.watch(model) as seen:
        said = model.generate(**inputs, **(GREEDY | options))
    return said, seen


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt-neox", "olmo2", "opt"])
def test_rows_of_all_steps_equal_those_of_one_pass(name: str, padded: bool, cache: str) -> None:
    """Another pass over the prompt and the answer, in eager code, has every row that the steps had."""
    model = made(ARCHITECTURES[name])
    inputs = {"input_ids": TOKENS} | ({"attention_mask": LEFT.long()} if padded else {})
    with torch.no_grad():
        expected = model.generate(**inputs, **GREEDY)
        said, seen = generated(model, inputs, cache_implementation=cache)
    assert torch.equal(said, expected)
    # The last generated token was never read.
    length = TOKENS.shape[1] + NEW - 1
    real = torch.cat([LEFT if padded else torch.ones_like(LEFT), torch.ones(2, NEW - 1, dtype=torch.bool)], 1)
    whole = {"input_ids": said[:, :-1], "attention_mask": real.long()}
    if padded and name in {"gpt2", "llama", "gpt-neox", "olmo2"}:
        whole["position_ids"] = (real.long().cumsum(1) - 1).clamp(min=0)
    eager = in_eager(model, whole)
    assert (seen.calls, seen.prompt, len(seen.layers)) == (2 * NEW, TOKENS.shape[1], 2)
    assert seen.labels["input"].texts[0] == tuple(map(str, said[0, :-1].tolist()))
    for place, (matrix,) in eager.items():
        layer = seen.layers[place]
        assert layer.shape == (2, 4, length, length)
        assert_same(layer.weights.dense().transpose(1, 2)[real], matrix.transpose(1, 2)[real], place, slack=128)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["bart", "t5", "marian"])
def test_an_encoder_decoder(name: str, cache: str) -> None:
    """The decoder's rows join, those of the cross-attention over the same keys too; the encoder runs once."""
    model = made(ARCHITECTURES[name])
    inputs = {"input_ids": TOKENS, "attention_mask": RIGHT.long()}
    with torch.no_grad():
        said, seen = generated(model, inputs, cache_implementation=cache)
    eager = in_eager(model, inputs | {"decoder_input_ids": said[:, :-1]})
    assert eager.keys() == seen.layers.keys()
    for place, (matrix,) in eager.items():
        layer = seen.layers[place]
        rows = RIGHT if layer.queries == "source" else torch.ones(2, NEW, dtype=torch.bool)
        found = layer.weights.dense().transpose(1, 2)[rows]
        assert_same(found, matrix.transpose(1, 2)[rows], place, slack=128)


def test_statistics_of_a_generation_are_kept_step_by_step() -> None:
    model = made(ARCHITECTURES["llama"])
    with torch.no_grad(), foci.watch(model, keep=foci.Keep(top=3, picture=0)) as seen:
        said = model.generate(TOKENS, **GREEDY)
    for place, (matrix,) in in_eager(model, {"input_ids": said[:, :-1]}).items():
        assert_same(seen.layers[place].received(), matrix.sum(-2), slack=128)
        assert_same(seen.layers[place].top(3).values, matrix.topk(3).values, slack=128)


def test_the_last_query_of_each_step() -> None:
    model = made(ARCHITECTURES["llama"])
    with torch.no_grad(), foci.watch(model, queries="last") as seen:
        said = model.generate(TOKENS, **GREEDY)
    for place, (matrix,) in in_eager(model, {"input_ids": said[:, :-1]}).items():
        assert_same(seen.layers[place].matrix, matrix[:, :, -NEW:], slack=128)


def test_a_cache_continues_in_a_second_generation() -> None:
    """Two generations in one block are two records of each layer."""
    model = made(ARCHITECTURES["llama"])
    with torch.no_grad(), foci.watch(model) as seen:
        for count in (5, 7):
            model.generate(TOKENS[:, :count], **GREEDY)
    assert [layer.shape[2] for layer in seen.layers.values()] == [5 + NEW - 1] * 2 + [7 + NEW - 1] * 2


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("llama", {"num_beams": 2}, "beam search"),
        ("mistral", {}, "lost its oldest keys"),
        ("llama", {"prompt_lookup_num_tokens": 2, "max_new_tokens": 6}, "cropped"),
    ],
)
def test_caches_that_change_are_refused(name: str, options: dict[str, Any], reason: str) -> None:
    model = made(ARCHITECTURES[name])
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    with torch.no_grad(), pytest.raises(ValueError, match=reason), foci.watch(model):
        model.generate(ids, **(GREEDY | options))
    assert model.config._attn_implementation == "sdpa"

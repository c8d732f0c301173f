"""Decoding steps in C choose the tokens of steps without a cache, and refuse what they do not support."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import foci
import foci.nn
from foci.decoding import Beam, Sampling, cpu_steps, step_c
from foci.decoding.cpu_steps import CpuSteps, find_refusal
from foci.decoding.generation import choose_steps
from foci.decoding.step_c import Linear, rank_tokens
from foci.decoding.steps import CachedSteps, prepare_prompt
from foci.runtime import native

V, START, STOP = 50, 1, [11]
PROMPTS = [[5, 3, 8, 9, 1], [7, 4], [6, 2, 2]]
SIZE: dict[str, Any] = {"vocabulary": V, "width": 64, "heads": 4}
DECODERS: dict[str, dict[str, Any]] = {
    "decoder": {},
    "rotary": {"kv_heads": 2, "positions": None, "rotary": 10000.0},
    "swiglu": {"activation": "swiglu", "hidden": 96, "norm": "rms", "biases": False, "final_norm": False},
    "linear head": {"head": "linear", "head_bias": True, "scale_embedding": True, "embedding_norm": True},
}
KINDS = (*DECODERS, "encoder-decoder", "post-norm")
METHODS: dict[str, Sampling | Beam] = {
    "greedy": Sampling(0.0),
    "beam": Beam(3, best=2),
    "sampling": Sampling(0.9, seed=3),
}

pytestmark = pytest.mark.skipif(native.why_unavailable("decoding") is not None, reason="needs a C compiler")


def build_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind in DECODERS:
        model: nn.Module = foci.nn.Decoder.from_name("tiny", **SIZE, **DECODERS[kind])
    else:
        config: Any = foci.nn.EncoderDecoder.sizes["tiny"].replace(**SIZE, norm_first=kind != "post-norm")
        # An untrained tied head repeats the last token.
        model = foci.nn.EncoderDecoder(config.replace(decoder=config.decoder.replace(head="linear")))
    for parameter in model.parameters():
        parameter.data.mul_(3.0 if parameter.dim() > 1 else 1.0)
    return model.eval()


def build_options(kind: str) -> dict[str, Any]:
    return {"stop": STOP, "new_tokens": 12} | ({} if kind in DECODERS else {"start": START})


def summarize(answers: list[foci.decoding.Answer]) -> list[list[tuple[list[int], bool]]]:
    return [[(each.tokens, each.stopped) for each in (answer, *answer.others)] for answer in answers]


def refusal_of(model: nn.Module) -> str | None:
    with torch.no_grad():
        return find_refusal(model, prepare_prompt(model, PROMPTS, None if hasattr(model, "embedding") else START))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_in_c_equal_uncached_steps(kind: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # So that the buffers grow several times.
    monkeypatch.setattr(cpu_steps, "MIN_NEW_SLOTS", 2)
    model, options = build_model(kind), {"method": METHODS[method], **build_options(kind)}
    assert refusal_of(model) is None
    answers = foci.generate(model, PROMPTS, **options)
    uncached = foci.generate(model, PROMPTS, cache=False, **options)
    assert summarize(answers) == summarize(uncached)
    assert [answer.score for answer in answers] == pytest.approx(
        [answer.score for answer in uncached], rel=1e-4, abs=1e-4
    )
    # Identical answers would prove little.
    assert len({tuple(answer.tokens) for answer in answers}) > 1


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_steps_in_c_transcribe_speech_of_unequal_length(method: str) -> None:
    torch.manual_seed(0)
    model = foci.nn.SpeechEncoder.from_name("tiny", vocabulary=V, features=4, width=64, heads=4)
    for parameter in model.parameters():
        parameter.data.mul_(3.0 if parameter.dim() > 1 else 1.0)
    frames = [torch.randn(length, 4) for length in (30, 11, 21)]
    with torch.no_grad():
        assert find_refusal(model.eval(), prepare_prompt(model, frames, START)) is None
    options: dict[str, Any] = {"start": START, "new_tokens": 8, "method": METHODS[method]}
    expected = summarize(foci.generate(model, frames, cache=False, **options))
    assert summarize(foci.generate(model, frames, **options)) == expected


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_answers_that_have_ended_are_not_computed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("swiglu")
    counts: list[int] = []
    whole = foci.generate(model, PROMPTS, new_tokens=12, method=METHODS[method])
    stop = [answer.tokens[number] for number, answer in enumerate(whole, start=2)]
    expected = foci.generate(model, PROMPTS, new_tokens=12, method=METHODS[method], stop=stop, cache=False)
    advance = CpuSteps.advance

    def count_rows(steps: CpuSteps, tokens: Tensor) -> Tensor:
        counts.append(len(tokens))
        return advance(steps, tokens)

    monkeypatch.setattr(CpuSteps, "advance", count_rows)
    answers = foci.generate(model, PROMPTS, new_tokens=12, method=METHODS[method], stop=stop)
    assert summarize(answers) == summarize(expected)
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) > 1


def test_streamed_answers_that_have_ended_are_none() -> None:
    model = build_model("swiglu")
    stop = foci.generate(model, PROMPTS, new_tokens=12)[1].tokens[2]
    answers = foci.generate(model, PROMPTS, new_tokens=12, stop=stop)
    columns = list(foci.decoding.stream(model, PROMPTS, new_tokens=12, stop=stop))
    rows = [[token for token in row if token is not None] for row in zip(*columns, strict=True)]
    assert rows == [answer.tokens for answer in answers]


def test_a_start_of_several_tokens() -> None:
    model = build_model("encoder-decoder")
    whole = foci.generate(model, PROMPTS[:1], start=START, new_tokens=8)[0]
    rest = foci.generate(model, PROMPTS[:1], start=[START, *whole.tokens[:3]], new_tokens=5)[0]
    assert rest.tokens == whole.tokens[3:]


def test_changed_weights_are_used() -> None:
    """Steps in C read the weights of the model, and keep none of them between calls."""
    model = build_model("decoder")
    before = foci.generate(model, PROMPTS, new_tokens=6)
    for parameter in model.parameters():
        parameter.data.mul_(-0.5)
    after = foci.generate(model, PROMPTS, new_tokens=6)
    assert summarize(after) == summarize(foci.generate(model, PROMPTS, new_tokens=6, cache=False))
    assert summarize(after) != summarize(before)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.double(), "float32"),
        (lambda model: model.blocks[0].register_forward_hook(lambda *_: None), "hooks"),
        (lambda model: setattr(model, "__class__", type("Other", (foci.nn.Decoder,), {})), "must be a Transformer"),
        (lambda model: nn.utils.parametrizations.weight_norm(model.blocks[0].feed_forward.inner), "float32|nn.Linear"),
    ],
)
def test_other_models_are_refused(change: Any, reason: str) -> None:
    model = build_model("decoder")
    change(model)
    refusal = refusal_of(model)
    assert refusal is not None
    assert re.search(reason, refusal)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bias": "alibi"}, "without a bias"),
        ({"score": "cosine"}, "must be a dot product"),
        ({"head_width": 5}, "head width must be a multiple"),
        ({"hidden": 97}, "multiples of the vector size"),
        ({"head": None}, "a head"),
        ({"layers": 0}, "with blocks"),
    ],
)
def test_other_configs_are_refused(changes: dict[str, Any], reason: str) -> None:
    model = foci.nn.Decoder.from_name("tiny", **SIZE, **changes)
    refusal = refusal_of(model)
    assert refusal is not None
    assert reason in refusal


def test_a_forward_set_by_hand_is_called() -> None:
    model = build_model("decoder")
    own = model.get_submodule("blocks.0.attention")
    own.forward = lambda x, **_: torch.zeros_like(x)  # type: ignore[method-assign]
    refusal = refusal_of(model)
    assert refusal is not None
    assert "forward" in refusal


@pytest.mark.parametrize("name", ["decoder", "decoder.head"])
def test_subclasses_inside_a_model_are_refused(name: str) -> None:
    model = build_model("encoder-decoder")
    part = model.get_submodule(name)
    part.__class__ = type("Other", (type(part),), {})
    refusal = refusal_of(model)
    assert refusal is not None
    assert "must be a Transformer" in refusal


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_default_dtype_does_not_change_the_answers(dtype: torch.dtype) -> None:
    model = build_model("decoder")
    expected = summarize(foci.generate(model, PROMPTS, new_tokens=6))
    torch.set_default_dtype(dtype)
    try:
        assert summarize(foci.generate(model, PROMPTS, new_tokens=6)) == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_strided_weights_and_states() -> None:
    """Layers whose tensors are not contiguous, and an activation whose result is not."""
    model = build_model("linear head")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()
            module.bias.data = torch.stack([module.bias.data, torch.randn_like(module.bias)], 1)[:, 0]
    feed_forward: Any = model.get_submodule("blocks.0.feed_forward")
    feed_forward.activation = lambda x: x.relu().mT.contiguous().mT
    answers = foci.generate(model, PROMPTS, new_tokens=6)
    assert refusal_of(model) is None
    assert summarize(answers) == summarize(foci.generate(model, PROMPTS, new_tokens=6, cache=False))


def test_a_linear_layer_keeps_its_memory() -> None:
    weight, bias, x = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64)), torch.randn(3, 64)
    linear = Linear(weight, bias)
    expected = linear(x)
    weight.data, bias.data = torch.zeros(64, 64), torch.zeros(64)
    # Of the same size, so that they get memory that has been freed.
    others = [torch.full_like(each, torch.nan) for each in (weight, bias) for _ in range(20)]
    assert torch.equal(linear(x), expected)
    assert len(others) == 40


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_threads_do_not_change_the_answers(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those of a step nor those of the caller."""
    model, options = build_model("encoder-decoder"), build_options("encoder-decoder") | {"method": METHODS[method]}
    expected = foci.generate(model, PROMPTS, **options)
    monkeypatch.setattr(native, "count_threads", lambda work, least: 3)
    with ThreadPoolExecutor(2) as pool:
        every = [*pool.map(lambda _: foci.generate(model, PROMPTS, **options), range(4))]
    assert every == [expected] * 4


def test_watched_models_run_their_modules() -> None:
    model = build_model("decoder")
    with torch.no_grad():
        prepared = prepare_prompt(model, PROMPTS, None)
        assert type(choose_steps(model, prepared, 4, True, None, False)) is CpuSteps
        with foci.watch(model):
            assert type(choose_steps(model, prepared, 4, True, None, False)) is CachedSteps
        with torch.autocast("cpu"):
            assert type(choose_steps(model, prepared, 4, True, None, False)) is CachedSteps


@pytest.mark.parametrize("rows", [1, 2, 7, 20])
@pytest.mark.parametrize("outputs", [64, 131])
def test_linear_is_as_exact_as_torch(rows: int, outputs: int) -> None:
    x, weight, added = torch.randn(rows, 96), torch.randn(outputs, 96), torch.randn(rows, outputs)
    bias = torch.randn(outputs)
    exact = nn.functional.linear(x.double(), weight.double(), bias.double()) + added
    allowed = 2 * (nn.functional.linear(x, weight, bias) + added - exact).abs().max() + 2e-6 * exact.abs().max()
    assert (Linear(weight, bias)(x, added=added) - exact).abs().max() <= allowed
    assert torch.allclose(Linear(weight, None)(x), x @ weight.T, atol=1e-4)


@pytest.mark.parametrize("vocabulary", [5, 64, 1023, 1024, 3001])
@pytest.mark.parametrize("count", [1, 5, 64, 65])
def test_ranked_tokens_equal_topk(vocabulary: int, count: int) -> None:
    count = min(count, vocabulary)
    logits = torch.randn(3, vocabulary) * 4
    logits[0, 1] = -torch.inf
    expected, expected_tokens = logits.log_softmax(-1).topk(count, dim=-1)
    logs, tokens = rank_tokens(logits, count)
    assert torch.allclose(logs, expected, atol=1e-5)
    finite = expected > -torch.inf
    assert tokens[finite].tolist() == expected_tokens[finite].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_of_equal_logits_is_ranked_first(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(2, 50, dtype=dtype)
    assert rank_tokens(logits, 3)[1].tolist() == [[0, 1, 2]] * 2
    monkeypatch.setattr(step_c, "is_rankable", lambda *_: False)
    assert rank_tokens(logits, 1)[1].tolist() == [[0]] * 2

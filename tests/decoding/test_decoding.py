"""Generation: cached, uncached, static and padded decoding agree, and beam search and sampling match their definitions.

V vocabulary size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import foci
import foci.nn
from foci.decoding import Answer, Beam, Sampling, generation, static_cache, stream
from foci.decoding.generation import GREEDY
from foci.decoding.sampling import Sampler, filter_logits
from foci.decoding.static_cache import StaticSteps
from foci.decoding.steps import UncachedSteps

V, START, STOP = 40, 1, [2, 3]
PROMPTS = [[5, 3, 8, 9, 1], [7, 4], [6, 2, 2]]
CHANGES: dict[str, dict[str, Any]] = {
    "decoder": {},
    "rotary": {"kv_heads": 2, "positions": None, "rotary": 10000.0},
    "alibi": {"positions": None, "bias": "alibi"},
    "relative": {"positions": None, "bias": "relative"},
}
KINDS = (*CHANGES, "encoder-decoder", "gru", "lstm")
METHODS: dict[str, Sampling | Beam] = {"greedy": GREEDY, "beam": Beam(3, best=2)}
PAIRS = list(itertools.product(KINDS, METHODS))


def build_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    size: dict[str, Any] = {"vocabulary": V, "width": 16}
    if kind in CHANGES:
        model: nn.Module = foci.nn.Decoder.from_name("tiny", **size, heads=4, **CHANGES[kind])
    elif kind == "encoder-decoder":
        config = foci.nn.EncoderDecoder.sizes["tiny"].replace(**size, heads=4)
        # An untrained tied head repeats the last token.
        model = foci.nn.EncoderDecoder(config.replace(decoder=config.decoder.replace(head="linear")))
    else:
        options = {"score": "general", "attend": "before"} if kind == "lstm" else {}
        model = foci.nn.Seq2SeqRNN.from_name("tiny", **size, cell=kind, **options)
    for parameter in model.parameters():
        # Larger weights, so that an untrained model does not repeat one token.
        parameter.data.mul_(3.0 if parameter.dim() > 1 else 1.0)
    return model


def build_options(kind: str) -> dict[str, Any]:
    return {"stop": STOP} if kind in CHANGES else {"stop": STOP, "start": START}


def summarize(answers: list[Answer]) -> list[list[tuple[list[int], bool]]]:
    return [[(each.tokens, each.stopped) for each in (answer, *answer.others)] for answer in answers]


@pytest.fixture
def use_static_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the steps that a GPU captures without a graph; after 8 tokens they attend to twice as many slots."""
    monkeypatch.setattr(static_cache, "MIN_VISIBLE_SLOTS", 8)
    monkeypatch.setattr(
        generation, "choose_steps", lambda model, prepared, count, *_: StaticSteps(model, prepared, count, False, False)
    )
    static_cache.STEP_BUFFERS.clear()
    yield
    static_cache.STEP_BUFFERS.clear()


@pytest.mark.parametrize(("kind", "method"), PAIRS)
def test_cached_equals_uncached_and_padded_equals_unpadded(kind: str, method: str) -> None:
    model, options = build_model(kind), {"new_tokens": 10, "method": METHODS[method], **build_options(kind)}
    answers = foci.generate(model, PROMPTS, **options)
    assert summarize(foci.generate(model, PROMPTS, cache=False, **options)) == summarize(answers)
    assert [summarize(foci.generate(model, prompt, **options))[0] for prompt in PROMPTS] == summarize(answers)
    # Identical answers would prove little.
    assert len({tuple(answer.tokens) for answer in answers}) == len(PROMPTS)


@pytest.mark.usefixtures("use_static_steps")
@pytest.mark.parametrize(("kind", "method"), PAIRS)
def test_static_steps_equal_uncached_steps(kind: str, method: str) -> None:
    model, options = build_model(kind), {"new_tokens": 10, "method": METHODS[method], **build_options(kind)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "choose_steps", lambda model, prepared, *_: UncachedSteps(model, prepared))
        expected = summarize(foci.generate(model, PROMPTS, **options))
    assert summarize(foci.generate(model, PROMPTS, **options)) == expected
    buffers = static_cache.STEP_BUFFERS[model]
    # Another batch of the same shape reuses the buffers.
    assert summarize(foci.generate(model, PROMPTS[::-1], **options)) == expected[::-1]
    assert static_cache.STEP_BUFFERS[model] is buffers
    model.double()
    foci.generate(model, PROMPTS, **options)
    assert static_cache.STEP_BUFFERS[model] is not buffers


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_all_compiled_steps_share_one_graph(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(
        static_cache,
        "compile_step",
        lambda whole: torch.compile(static_cache.run_step, backend=backend, fullgraph=whole, dynamic=False),
    )
    model, options = build_model(kind), {"new_tokens": 6, **build_options(kind)}
    expected = summarize(foci.generate(model, PROMPTS, **options))
    for _ in range(2):
        assert summarize(foci.generate(model, PROMPTS, compiled=True, **options)) == expected
    assert len(graphs) == 1
    static_cache.STEP_BUFFERS.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_a_beam_of_one_is_greedy(kind: str) -> None:
    model, options = build_model(kind), {"new_tokens": 10, **build_options(kind)}
    greedy, beam = (foci.generate(model, PROMPTS, method=method, **options) for method in (GREEDY, Beam(1)))
    assert summarize(beam) == summarize(greedy)
    for one, other in zip(greedy, beam, strict=True):
        assert math.isclose(one.score, other.score, rel_tol=1e-4)


class Chain(nn.Module):
    """A Markov chain as a model: the next token depends on the last token and, with several tables, on its position."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table if table.dim() == 3 else table[None])  # (positions or 1, V, V)

    def forward(self, tokens: Tensor, padding: Tensor | None = None, caches: Any = None) -> foci.nn.Output:
        table = self.table.expand(max(tokens.shape[1], len(self.table)), -1, -1)
        logits = torch.stack([table[place][token] for place, token in enumerate(tokens.unbind(1))], dim=1)
        return foci.nn.Output(logits, logits, {})


def search_by_definition(
    table: Tensor, first: int, stop: int, limit: int, method: Beam
) -> list[tuple[tuple[int, ...], float]]:
    """Beam search in plain Python: the best answers by rank, with their log-probabilities."""
    logs: list[list[list[float]]] = table.log_softmax(-1).tolist()
    growing: list[tuple[tuple[int, ...], float]] = [((first,), 0.0)]
    ended: list[tuple[tuple[int, ...], float]] = []
    for place in range(limit):
        longer = [
            ((*tokens, token), score + log)
            for tokens, score in growing
            for token, log in enumerate(logs[place][tokens[-1]])
        ]
        longer = sorted(longer, key=lambda each: -each[1])[: method.width - len(ended)]
        ended += [each for each in longer if each[0][-1] == stop]
        growing = [each for each in longer if each[0][-1] != stop]
        if method.early and len(ended) >= method.best:
            growing = []
    ranked = sorted(ended + growing, key=lambda each: -each[1] / (len(each[0]) - 1) ** method.length_penalty)
    return [(tokens[1:], score) for tokens, score in ranked[: method.best]]


@pytest.mark.parametrize("penalty", [0.0, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("early", [False, True])
def test_beam_search_equals_its_definition(penalty: float, early: bool) -> None:
    for seed, width in itertools.product(range(6), (1, 2, 4)):
        table = torch.randn(6, 5, 5, generator=torch.Generator().manual_seed(seed)) * 2
        method = Beam(width, penalty, best=min(width, 2), early=early)
        expected = [search_by_definition(table, first, 3, 6, method) for first in (0, 1, 2)]
        answers = foci.generate(Chain(table), [[0], [1], [2]], method=method, stop=3, new_tokens=6, cache=False)
        for answer, wanted in zip(answers, expected, strict=True):
            found = [answer, *answer.others]
            ends = [(*each.tokens, 3) if each.stopped else tuple(each.tokens) for each in found]
            assert ends == [tokens for tokens, _ in wanted]
            assert torch.allclose(torch.tensor([each.score for each in found]), torch.tensor([s for _, s in wanted]))


def test_beam_search_by_hand() -> None:
    """0.6 · 0.4 through the likeliest first token, 0.4 · 0.9 through the other: greedy takes the first."""
    shares = torch.full((4, 4), 1e-9)
    shares[0, 1], shares[0, 2] = 0.6, 0.4
    shares[1, 3], shares[1, 0], shares[1, 1] = 0.4, 0.3, 0.3
    shares[2, 3], shares[2, 0] = 0.9, 0.1
    model = Chain(shares.log())
    options: dict[str, Any] = {"stop": 3, "new_tokens": 2, "cache": False}
    assert foci.generate(model, [0], **options)[0].tokens == [1]
    best = foci.generate(model, [0], method=Beam(2, best=2), **options)[0]
    assert best.tokens == [2]
    assert math.isclose(best.score, math.log(0.4 * 0.9), rel_tol=1e-4)
    assert [(other.tokens, other.stopped) for other in best.others] == [([1], True)]
    assert math.isclose(best.others[0].score, math.log(0.6 * 0.4), rel_tol=1e-4)


def test_length_penalty_and_early_stopping() -> None:
    """An answer of one token with probability 0.5 x 0.6, beside one of three whose every token has 0.9 after 0.5."""
    shares = torch.full((6, 6), 1e-9)
    shares[0, 1], shares[0, 2] = 0.5, 0.5
    shares[1, 5], shares[1, 0] = 0.6, 0.4
    shares[2, 3], shares[3, 4], shares[4, 5] = 0.9, 0.9, 0.9
    model = Chain(shares.log())
    options: dict[str, Any] = {"stop": 5, "new_tokens": 6, "cache": False}

    def tokens(**beam: Any) -> list[int]:
        return foci.generate(model, [0], method=Beam(2, **beam), **options)[0].tokens

    assert tokens(length_penalty=1.0) == [2, 3, 4]
    assert tokens(length_penalty=0.0) == [2, 3, 4]  # 0.5 x 0.729 is more than 0.5 x 0.6
    assert tokens(length_penalty=1.0, early=True) == [1]


@pytest.mark.parametrize("method", [Sampling(0.9, seed=3), Sampling(1.5, 8, 0.8, 0.1, 1.3, seed=5)])
def test_a_seed_gives_the_same_tokens(method: Sampling) -> None:
    model = build_model("decoder")

    def drawn(method: Sampling, **options: Any) -> list[list[tuple[list[int], bool]]]:
        return summarize(foci.generate(model, PROMPTS, method=method, new_tokens=8, **options))

    first = drawn(method)
    torch.rand(3)
    assert drawn(method) == drawn(method, cache=False) == first
    assert drawn(Sampling(0.9, seed=99)) != first
    assert drawn(Sampling(0.9)) != drawn(Sampling(0.9))


def test_sampling_frequencies_match_probabilities() -> None:
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05])
    sampler = Sampler(Sampling(seed=0), torch.zeros(20000, 1, dtype=torch.long), None)
    tokens, scores = sampler(shares.log().expand(20000, -1))
    counts = tokens.bincount(minlength=4) / 20000
    assert float((counts - shares).abs().max()) < 0.02
    assert float((scores - shares.log()[tokens]).abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("method", "kept"),
    [
        (Sampling(top_k=2), [True, True, False, False]),
        (Sampling(top_k=9), [True, True, True, True]),
        (Sampling(top_p=0.5), [True, False, False, False]),
        (Sampling(top_p=0.51), [True, True, False, False]),
        (Sampling(top_p=0.0), [True, False, False, False]),
        (Sampling(min_p=0.3), [True, True, True, False]),
        (Sampling(min_p=0.7), [True, False, False, False]),
        (Sampling(top_k=3, top_p=0.9), [True, True, True, False]),
        (Sampling(top_k=2, min_p=0.7), [True, False, False, False]),
    ],
)
def test_top_k_top_p_and_min_p_keep_the_right_tokens(method: Sampling, kept: list[bool]) -> None:
    order = [2, 0, 3, 1]
    logits = torch.tensor([0.5, 0.3, 0.16, 0.04]).log()[order]
    assert filter_logits(logits[None], method)[0].isfinite().tolist() == [kept[place] for place in order]


def test_repetition_makes_seen_tokens_less_likely() -> None:
    """Positive logits are divided, negative ones multiplied; padding does not count as seen, sampled tokens do."""
    tokens, real = torch.tensor([[0, 1], [2, 1]]), torch.tensor([[False, True], [True, True]])
    sampler = Sampler(Sampling(0.0, repetition=2.0), tokens, real)
    logits = torch.tensor([[1.0, 1.5, -1.0], [1.0, 1.5, 1.75]])
    assert sampler._penalize_repetition(logits).tolist() == [[1.0, 0.75, -1.0], [1.0, 0.75, 0.875]]
    assert sampler(logits)[0].tolist() == [0, 0]
    assert sampler._penalize_repetition(-logits).tolist() == [[-2.0, -3.0, 1.0], [-2.0, -3.0, -3.5]]


def test_temperature_zero_and_top_k_one_are_greedy() -> None:
    model = build_model("rotary")
    expected = summarize(foci.generate(model, PROMPTS, new_tokens=8))
    for method in (Sampling(0.0), Sampling(1.0, top_k=1), Sampling(3.0, top_p=0.0)):
        assert summarize(foci.generate(model, PROMPTS, method=method, new_tokens=8)) == expected


def test_the_score_is_the_log_probability_of_the_answer() -> None:
    model = build_model("decoder").eval()
    answer = foci.generate(model, [5, 3], new_tokens=6)[0]
    tokens = torch.tensor([[5, 3, *answer.tokens]])
    logs = model(tokens[:, :-1]).logits.log_softmax(-1)[0, 1:]
    expected = float(logs.detach().gather(1, tokens[0, 2:, None]).sum())
    assert math.isclose(answer.score, expected, rel_tol=1e-4)


def test_stop_tokens_end_an_answer_and_are_not_part_of_it() -> None:
    model = build_model("decoder")
    whole = foci.generate(model, PROMPTS, new_tokens=10)
    stop = whole[0].tokens[4]
    assert stop not in whole[0].tokens[:4]
    cut = foci.generate(model, PROMPTS, new_tokens=10, stop=stop)
    assert cut[0].tokens == whole[0].tokens[:4]
    assert cut[0].stopped
    for one, other in zip(cut, whole, strict=True):
        assert one.tokens == other.tokens[: len(one.tokens)]
        assert one.stopped == (stop in other.tokens)


def decode_tokens(tokens: list[int]) -> str:
    return " ".join(f"<{token}>" for token in tokens)


@pytest.mark.parametrize("method", [GREEDY, Beam(1)], ids=["greedy", "beam"])
def test_stop_strings_end_an_answer(method: Sampling | Beam) -> None:
    model = build_model("decoder")
    options: dict[str, Any] = {"new_tokens": 10, "method": method, "decode": decode_tokens}
    whole = foci.generate(model, PROMPTS[:1], **options)[0]
    assert whole.text == decode_tokens(whole.tokens)
    # A string across two tokens, beginning within the first.
    word = f"{whole.tokens[3]}> <{whole.tokens[4]}"
    place = decode_tokens(whole.tokens).index(word)
    answer = foci.generate(model, PROMPTS[:1], stop=[word, "nowhere"], **options)[0]
    assert answer.stopped
    assert answer.text == decode_tokens(whole.tokens)[:place]
    assert answer.tokens == whole.tokens[: decode_tokens(whole.tokens)[: place + len(word)].count("<")]
    with pytest.raises(ValueError, match="decode must be a function from tokens to text"):
        foci.generate(model, PROMPTS, stop="x")


def test_stream_yields_the_tokens_of_generate() -> None:
    model = build_model("decoder").train()
    whole = foci.generate(model, PROMPTS, new_tokens=10)
    stop = whole[0].tokens[4]
    expected = foci.generate(model, PROMPTS, new_tokens=10, stop=stop)
    columns = list(stream(model, PROMPTS, new_tokens=10, stop=stop))
    rows = [[token for token in row if token is not None] for row in zip(*columns, strict=True)]
    assert rows == [answer.tokens for answer in expected]
    assert all(None not in row[: len(kept)] for row, kept in zip(zip(*columns, strict=True), rows, strict=True))
    started = stream(model, PROMPTS, new_tokens=10)
    assert next(started) == [answer.tokens[0] for answer in whole]
    started.close()  # type: ignore[attr-defined]
    assert model.training
    assert torch.is_grad_enabled()
    with pytest.raises(TypeError, match="method must be a Sampling"):
        stream(model, PROMPTS, method=Beam())  # type: ignore[arg-type]


def test_dropout_is_off_and_training_mode_is_restored() -> None:
    model = build_model("encoder-decoder").train()
    model.encoder.eval()  # type: ignore[union-attr]
    modes = [module.training for module in model.modules()]
    first = summarize(foci.generate(model, PROMPTS, start=START, new_tokens=8))
    assert summarize(foci.generate(model, PROMPTS, start=START, new_tokens=8)) == first
    assert [module.training for module in model.modules()] == modes


def test_all_prompt_types_are_equivalent() -> None:
    model = build_model("decoder")
    expected = summarize(foci.generate(model, [[5, 3, 8], [7, 4, 1]], new_tokens=3))
    tensor = torch.tensor([[5, 3, 8], [7, 4, 1]])
    for prompt in (tensor, list(tensor), tensor.int(), ((5, 3, 8), (7, 4, 1))):
        assert summarize(foci.generate(model, prompt, new_tokens=3)) == expected
    for prompt in (tensor[0], [5, 3, 8], [[5, 3, 8]], tensor[:1]):
        assert summarize(foci.generate(model, prompt, new_tokens=3)) == expected[:1]


@pytest.mark.parametrize("method", METHODS)
def test_speech_of_unequal_length(method: str) -> None:
    torch.manual_seed(0)
    model = foci.nn.SpeechEncoder.from_name("tiny", vocabulary=V, features=4, width=16)
    for parameter in model.parameters():
        parameter.data.mul_(3.0 if parameter.dim() > 1 else 1.0)
    frames = [torch.randn(length, 4) for length in (30, 11, 21)]
    options: dict[str, Any] = {"start": START, "new_tokens": 8, "method": METHODS[method]}
    answers = summarize(foci.generate(model, frames, **options))
    assert [summarize(foci.generate(model, one, **options))[0] for one in frames] == answers
    assert summarize(foci.generate(model, frames, cache=False, **options)) == answers


def test_a_start_of_several_tokens() -> None:
    model = build_model("encoder-decoder")
    first = foci.generate(model, PROMPTS, start=START, new_tokens=6)
    start = [START, *first[0].tokens[:2]]
    assert foci.generate(model, PROMPTS, start=start, new_tokens=4)[0].tokens == first[0].tokens[2:]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"prompt": []}, "at least one token"),
        ({"prompt": [[1], []]}, "at least one token"),
        ({"prompt": torch.zeros(2, 2, 2, dtype=torch.long)}, r"prompt must be integers \(T,\) or frames"),
        ({"new_tokens": 0}, "new_tokens must be at least 1, got 0"),
        (
            {"new_tokens": 1024},
            "new_tokens must be at most 1023 after a prompt of 2 tokens, .* 1024 positions, got 1024",
        ),
        ({"start": 1}, "start must be None for Decoder, which continues the prompt itself, got 1"),
        ({"capture": True}, "capture must be None or False for a model that is not on CUDA, got True on cpu"),
        ({"cache": False, "compiled": True}, "cache must be True for a captured or compiled step, got False"),
        ({"method": Beam(V + 1)}, f"Beam.width must be at most the vocabulary size {V}, got {V + 1}"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        foci.generate(build_model("decoder"), **{"prompt": [1, 2], **arguments})


def test_wrong_methods_and_models_are_refused() -> None:
    with pytest.raises(TypeError, match=r"model must be a model of foci.nn with logits, got Linear"):
        foci.generate(torch.nn.Linear(2, 2), [1, 2])
    with pytest.raises(TypeError, match="got max_new_tokens: use new_tokens="):
        foci.generate(build_model("decoder"), [1, 2], max_new_tokens=3)
    with pytest.raises(ValueError, match=r"Sampling.temperature must be between 0.0 and inf, got -1"):
        Sampling(-1)
    with pytest.raises(ValueError, match=r"Sampling.top_p must be between 0.0 and 1.0, got 1.5"):
        Sampling(top_p=1.5)
    with pytest.raises(ValueError, match=r"Sampling.repetition must be above 0"):
        Sampling(repetition=0.0)
    with pytest.raises(ValueError, match=r"Beam.best must be from 1 to width=4, got 5"):
        Beam(4, best=5)
    with pytest.raises(TypeError, match="stop must be tokens"):
        foci.generate(build_model("decoder"), [1], stop=[1.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="model must have logits, got a Decoder without a head"):
        foci.generate(foci.nn.Decoder.from_name("tiny", vocabulary=V, head=None), [1])
    with pytest.raises(
        ValueError, match="start must be the token or tokens that the answers of EncoderDecoder begin with"
    ):
        foci.generate(build_model("encoder-decoder"), [1])


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "method"), PAIRS)
def test_captured_equals_uncaptured(kind: str, method: str) -> None:
    model, options = build_model(kind).cuda(), {"new_tokens": 20, "method": METHODS[method], **build_options(kind)}
    expected = summarize(foci.generate(model, PROMPTS, capture=False, **options))
    for prompts, answers in ((PROMPTS, expected), (PROMPTS[::-1], expected[::-1])):
        assert summarize(foci.generate(model, prompts, capture=True, **options)) == answers
    assert static_cache.STEP_BUFFERS[model].graphs


@pytest.mark.gpu
@pytest.mark.slow
def test_compiled_and_captured_equals_uncaptured() -> None:
    model, options = build_model("decoder").cuda(), {"new_tokens": 20, "stop": STOP}
    expected = summarize(foci.generate(model, PROMPTS, capture=False, **options))
    assert summarize(foci.generate(model, PROMPTS, compiled=True, **options)) == expected


def test_nan_logits_are_refused_by_beam_search() -> None:
    model = foci.nn.Decoder.from_name("tiny", vocabulary=20)
    with torch.no_grad():
        model.embedding.tokens.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="the logits of the model must be finite, got NaN"):
        foci.generate(model, [3, 4], method=Beam(2), new_tokens=3)

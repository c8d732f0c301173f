"""The recurrent encoder-decoder: formulas, padding, step-by-step decoding, training, files."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import foci.nn
from foci.nn.recurrent import RecurrentConfig, Seq2SeqRNN
from tests.cases import mark_most_slow
from tests.nn.reversal import LENGTH, VOCABULARY, measure_accuracy, sample_pairs, train
from tests.nn.same import assert_same

KINDS = [
    {"cell": cell, "score": score, "attend": attend}
    for cell, score, attend in itertools.product(("gru", "lstm"), ("additive", "dot", "general"), ("after", "before"))
]


def small(**options: Any) -> Seq2SeqRNN:
    torch.manual_seed(0)
    given: dict[str, Any] = {"vocabulary": 20, "width": 16, "layers": 2} | options
    return Seq2SeqRNN(RecurrentConfig(**given)).eval()


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randint(20, (3, 7)), torch.randint(20, (3, 5)), torch.tensor([7, 4, 5])


def name_options(kind: dict[str, str]) -> str:
    return "-".join(kind.values())


@pytest.mark.parametrize("kind", KINDS, ids=name_options)
def test_padded_equals_unpadded(kind: dict[str, str]) -> None:
    model, (source, target, lengths) = small(**kind), batch()
    out = model(source, target, source_padding=lengths, return_weights=True)
    assert out.logits.shape == (3, 5, 20)
    for row, length in enumerate(lengths.tolist()):
        alone = model(source[row : row + 1, :length], target[row : row + 1], return_weights=True)
        assert_same(out.logits[row], alone.logits[0])
        assert_same(out.weights["cross.L0"][row, 0].dense()[:, :length], alone.weights["cross.L0"][0, 0].dense())
        assert bool((out.weights["cross.L0"][row, 0, :, length:] == 0).all())


@pytest.mark.parametrize("kind", KINDS, ids=name_options)
def test_step_by_step_equals_all_at_once(kind: dict[str, str]) -> None:
    model, (source, target, lengths) = small(**kind), batch()
    with torch.no_grad():
        memory, state = model.encode(source, padding=lengths), model.caches()
        steps = [model.decode(word, memory, caches=state).logits for word in target.split(1, dim=1)]
        assert_same(torch.cat(steps, dim=1), model.decode(target, memory).logits)


@pytest.mark.parametrize("kind", KINDS, ids=name_options)
def test_gradients_reach_every_parameter(kind: dict[str, str]) -> None:
    model, (source, target, lengths) = small(**kind).train(), batch()
    model(source, target, source_padding=lengths).logits.square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not bool(p.grad.any())] == []


def test_attend_before_equals_bahdanaus_formula() -> None:
    """α = softmax(vᵀ tanh(W s + U h)) from the state before, c = Σ α h, s' = GRU([y, c], s)."""
    model, (source, target, _) = small(score="additive", attend="before", layers=1), batch()
    out = model(source, target, return_weights=True)
    memory, cell = model.encode(source), model.writer
    state, look = memory.hidden[0][0], model.alignment
    states = []
    for step, word in enumerate(model.target_words(target).unbind(1)):
        hidden = torch.tanh(look.query(state)[:, None] + look.key(memory.states))
        weights = (hidden @ look.additive.weight[0]).softmax(-1)
        assert_same(out.weights["cross.L0"][:, 0, step], weights)
        context = (weights[:, None] @ memory.states)[:, 0]
        state = cell(torch.cat([word, context], -1)[:, None], state[None])[1][0]
        states.append(torch.tanh(model.readout(torch.cat([state, context], -1))))
    assert_same(out.states, torch.stack(states, dim=1))


def test_attend_after_equals_luongs_formula() -> None:
    """α = softmax(s W h) from the state itself, and the whole target passes through the RNN in one call."""
    model, (source, target, _) = small(score="general", attend="after"), batch()
    calls: list[torch.Size] = []
    model.writer.register_forward_pre_hook(lambda module, given: calls.append(given[0].shape))
    out = model(source, target, return_weights=True)
    assert calls == [(3, 5, 16)]
    memory = model.encode(source)
    states = model.writer(model.target_words(target), memory.hidden[0])[0]
    weights = (states @ model.alignment.matrix @ memory.states.mT).softmax(-1)
    assert_same(out.weights["cross.L0"][:, 0].dense(), weights)
    assert_same(out.states, torch.tanh(model.readout(torch.cat([states, weights @ memory.states], -1))))


@pytest.mark.parametrize(
    "kind",
    [{"score": "additive", "attend": "before"}, {"score": "dot", "cell": "lstm"}, {"score": "general"}],
    ids=name_options,
)
def test_learns_to_reverse_the_source(kind: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Seq2SeqRNN.from_name("tiny", vocabulary=VOCABULARY, width=48, **kind)
    assert measure_accuracy(model) < 0.1
    train(model, steps=80, rate=1e-2)
    assert measure_accuracy(model) > 0.8


def test_the_alignment_of_a_trained_model_is_reversed() -> None:
    torch.manual_seed(0)
    model = Seq2SeqRNN.from_name("tiny", vocabulary=VOCABULARY, width=48, score="dot")
    train(model, steps=80, rate=1e-2)
    source, target = sample_pairs(32, seed=10**6)
    weights = model.eval()(source, target[:, :-1], return_weights=True).weights["cross.L0"]
    expected_position = (weights @ torch.arange(LENGTH, dtype=torch.float32)[:, None]).mean(0).flatten()[:LENGTH]
    assert bool((expected_position.diff() < 0).all()), expected_position


def test_structural_options() -> None:
    source, target, lengths = batch()
    for options in ({"both_directions": False}, {"tied": True}, {"shared": True}, {"source_vocabulary": 30}):
        model = small(**options)
        assert model(source, target, source_padding=lengths).logits.shape == (3, 5, 20)
        assert (model.head is None) == bool(options.get("tied"))
        assert (model.source_words is model.target_words) == bool(options.get("shared"))


def test_dropout_is_active_only_in_training() -> None:
    model, (source, target, _) = small(dropout=0.5), batch()
    assert bool((model(source, target).logits == model(source, target).logits).all())
    model.train()
    assert not bool((model(source, target).logits == model(source, target).logits).all())


def test_bool_padding_equals_lengths() -> None:
    model, (source, target, lengths) = small(), batch()
    real = torch.arange(7) < lengths[:, None]
    expected = model(source, target, source_padding=lengths).logits
    assert_same(model(source, target, source_padding=real).logits, expected)
    with pytest.raises(ValueError, match="on the right"):
        model(source, target, source_padding=real.flip(1))


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3], KINDS[-1]], ids=name_options)
def test_trains_in_bfloat16(kind: dict[str, str]) -> None:
    model, (source, target, lengths) = small(**kind), batch()
    expected = model(source, target, source_padding=lengths).logits.detach()
    half = small(**kind).to(torch.bfloat16)
    logits = half(source, target, source_padding=lengths).logits
    logits.float().square().mean().backward()
    assert logits.dtype == torch.bfloat16
    assert float((logits.detach() - expected).abs().max()) < 0.05 * float(expected.abs().max()) + 0.02
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = model(source, target, source_padding=lengths).logits
    assert float((cast.detach() - expected).abs().max()) < 0.05 * float(expected.abs().max()) + 0.02


# After the graph break at an RNN, the compiler reads .grad of a tensor that is not a leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("attend", mark_most_slow(["after", "before"], 2))
def test_compiles(attend: str) -> None:
    model, (source, target, lengths) = small(attend=attend, layers=1), batch()
    torch._dynamo.reset()
    fast = torch.compile(model, backend="aot_eager")
    expected = model(source, target, source_padding=lengths).logits
    found = fast(source, target, source_padding=lengths).logits
    assert_same(found, expected)
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(expected.square().sum(), parameters)
    for one, other in zip(torch.autograd.grad(found.square().sum(), parameters), wanted, strict=True):
        assert_same(one, other)


def test_a_seed_makes_the_same_model() -> None:
    for one, other in zip(small().parameters(), small().parameters(), strict=True):
        assert bool((one == other).all())


def test_saves_and_loads(tmp_path: Path) -> None:
    model, (source, target, _) = small(cell="lstm", score="general", shared=True, tied=True), batch()
    model.save(tmp_path / "rnn.safetensors")
    again = foci.nn.Model.load(tmp_path / "rnn.safetensors")
    assert isinstance(again, Seq2SeqRNN)
    assert again.config == model.config
    assert bool((again(source, target).logits == model(source, target).logits).all())


def test_wrong_options_and_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="score must be 'additive' or 'dot' or 'general', got 'cosine'"):
        RecurrentConfig(score="cosine")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="source_vocabulary must be None or equal to vocabulary=20 with shared=True, got 5"
    ):
        RecurrentConfig(vocabulary=20, source_vocabulary=5, shared=True)
    with pytest.raises(ValueError, match=r"source must be integers \(B, S\), got torch.float32 \(2, 3\)"):
        small().encode(torch.randn(2, 3))


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    model, (source, target, _) = small(), batch()
    with pytest.raises(ValueError, match="source must be numbers from 0 to 19, as the vocabulary has 20, got"):
        model(source + 20, target)
    with pytest.raises(ValueError, match="target must be numbers from 0 to 19, as the vocabulary has 20, got -1"):
        model(source, target - target.min() - 1)

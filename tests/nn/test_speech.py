"""The speech model: downsampling, CTC, the attention decoder, padding, training, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import foci
import foci.nn
from foci.nn.speech import SpeechConfig, SpeechEncoder, read_ctc
from tests.nn.same import assert_same

FEATURES, VOCABULARY = 6, 7


def small(**options: Any) -> SpeechEncoder:
    torch.manual_seed(0)
    given: dict[str, Any] = {"width": 16, "layers": 2, "heads": 2, "features": FEATURES, "vocabulary": VOCABULARY}
    return SpeechEncoder(SpeechConfig(**given | {"decoder_layers": 1, "max_length": 64} | options)).eval()


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(3, 21, FEATURES), torch.randint(VOCABULARY, (3, 5)), torch.tensor([21, 10, 17])


@pytest.mark.parametrize("local", [0, 2])
@pytest.mark.parametrize(("halvings", "states"), [(0, [21, 10, 17]), (1, [11, 5, 9]), (2, [6, 3, 5]), (3, [3, 2, 3])])
def test_padded_equals_unpadded(halvings: int, states: list[int], local: int) -> None:
    model, (frames, target, lengths) = small(halvings=halvings, local=local, reach=5), batch()
    out = model(frames, target, padding=lengths, return_weights=True)
    assert out.lengths.tolist() == states
    assert out.ctc.shape == (3, states[0], VOCABULARY)
    assert list(out.weights) == ["encoder.L0", "encoder.L1", "decoder.L0", "cross.L0"]
    for row, (length, count) in enumerate(zip(lengths.tolist(), states, strict=True)):
        alone = model(frames[row : row + 1, :length], target[row : row + 1])
        assert alone.lengths is None
        assert alone.states.shape == (1, count, 16)
        assert_same(out.states[row, :count], alone.states[0])
        assert_same(out.ctc[row, :count], alone.ctc[0])
        assert_same(out.logits[row], alone.logits[0])


def test_gradients_reach_every_parameter() -> None:
    model, (frames, target, lengths) = small(local=1).train(), batch()
    out = model(frames, target, padding=lengths)
    (out.ctc.square().mean() + out.logits.square().mean()).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not bool(p.grad.any())] == []


def test_read_ctc() -> None:
    best = torch.tensor([[3, 3, 0, 3, 4, 4], [0, 0, 5, 0, 2, 2]])
    logits = F.one_hot(best, 6).float()
    assert read_ctc(logits) == [[3, 3, 4], [5, 2]]
    assert read_ctc(logits, torch.tensor([2, 4])) == [[3], [5]]
    assert read_ctc(logits, blank=3) == [[0, 4], [0, 5, 0, 2]]


def sample_speech(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three sounds of eight frames each: each token is one loud band of the spectrogram."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.stack([torch.randperm(4, generator=generator)[:3] + 3 for _ in range(count)])
    frames = F.one_hot(tokens - 1, FEATURES).float().repeat_interleave(8, dim=1)
    return 2 * frames + 0.3 * torch.randn(frames.shape, generator=generator), tokens


def test_learns_by_ctc_and_by_attention() -> None:
    model = small(width=32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(140):
        frames, tokens = sample_speech(32, seed=step)
        target = F.pad(F.pad(tokens, (1, 0), value=1), (0, 1), value=2)
        out = model(frames, target[:, :-1])
        logs = out.ctc.log_softmax(-1).transpose(0, 1)
        counts = torch.full((32,), len(logs)), torch.full((32,), 3)
        loss = F.ctc_loss(logs, tokens, *counts) + F.cross_entropy(out.logits.mT, target[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    frames, tokens = sample_speech(64, seed=10**6)
    expected = tokens.tolist()
    heard = read_ctc(model.eval()(frames).ctc)
    written = [answer.tokens for answer in foci.generate(model, frames, start=1, stop=2, new_tokens=6)]
    assert sum(one == other for one, other in zip(heard, expected, strict=True)) > 56
    assert sum(one == other for one, other in zip(written, expected, strict=True)) > 56


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_compiles_into_one_graph() -> None:
    model, (frames, target, lengths) = small(layers=1), batch()
    torch._dynamo.reset()
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    found, expected = fast(frames, target, padding=lengths), model(frames, target, padding=lengths)
    assert_same(found.logits, expected.logits)
    found.logits.sum().backward()


def test_runs_in_bfloat16() -> None:
    frames, target, lengths = batch()
    expected = small()(frames, target, padding=lengths).logits.detach()
    half = small().to(torch.bfloat16)(frames.to(torch.bfloat16), target, padding=lengths).logits
    half.float().sum().backward()
    assert half.dtype == torch.bfloat16
    assert float((half.detach() - expected).abs().max()) < 0.05 * float(expected.abs().max())


def test_saves_and_loads(tmp_path: Path) -> None:
    model, (frames, target, _) = small(), batch()
    model.save(tmp_path / "speech.safetensors")
    again = SpeechEncoder.load(tmp_path / "speech.safetensors")
    assert again.config == model.config
    assert bool((again(frames, target).logits == model(frames, target).logits).all())


def test_a_model_may_have_no_head_and_no_decoder() -> None:
    frames, target, _ = batch()
    assert small(vocabulary=None)(frames).ctc is None
    assert small(ctc=False)(frames).ctc is None
    with pytest.raises(ValueError, match="got decoder_layers=0, vocabulary=7"):
        small(decoder_layers=0)(frames, target)


def test_an_even_reach_is_refused() -> None:
    with pytest.raises(ValueError, match=r"SpeechConfig\.reach must be odd, to be symmetric around each state, got 4"):
        small(local=1, reach=4)


def test_wrong_inputs_are_refused() -> None:
    frames, _, lengths = batch()
    with pytest.raises(ValueError, match=r"frames must have shape \(B, F, 6\), got \(3, 6, 21\)"):
        small()(frames.mT)
    with pytest.raises(ValueError, match=r"padding must be the number of real frames, \(B,\), got torch.bool"):
        small()(frames, padding=lengths[:, None] > torch.arange(21))

"""The steps of a generation form the matrix of one pass over the whole text; changed caches are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import foci
from foci.capture.generation_steps import fingerprint_keys
from foci.capture.recorder import Recorder
from tests.capture.models import CachedAttention, PreallocatedAttention
from tests.tensors import randn

TEXT = randn(2, 9, 16)


def attention() -> CachedAttention:
    torch.manual_seed(0)
    return CachedAttention()


def truth(model: CachedAttention) -> Tensor:
    q, k, _ = model.split(TEXT)
    logits = (q @ k.mT / 2).masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -torch.inf)
    return logits.softmax(-1)


def generated(model: nn.Module, steps: list[int], **options: Any) -> foci.Record:
    with torch.no_grad(), foci.watch(model, **options) as seen:
        start = 0
        for count in steps:
            model(TEXT[:, start : start + count])
            start += count
    return seen


@pytest.mark.parametrize("steps", [[5, 1, 1, 1, 1], [4, 3, 2], [1] * 9, [8, 1]])
def test_rows_of_all_steps_form_one_matrix(steps: list[int]) -> None:
    model = attention()
    seen = generated(model, steps)
    assert list(seen.layers) == ["CachedAttention"]
    assert seen.calls == len(steps)
    assert seen.prompt == steps[0]
    layer = seen["L0"]
    torch.testing.assert_close(layer.dense(), truth(model), atol=1e-6, rtol=1e-5)
    assert layer.positions.tolist() == list(range(9))
    torch.testing.assert_close(layer.norms(), model.split(TEXT)[2].norm(dim=-1))
    x = randn(9, 3)
    torch.testing.assert_close(layer @ x, truth(model) @ x, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(layer.entropy(), torch.special.entr(truth(model)).sum(-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("keep", ["lazy", foci.Keep()])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("steps", [[5, 1, 1, 1, 1], [4, 3, 2], [1] * 9])
def test_a_cache_may_be_written_in_place(steps: list[int], keep: Any, mode: Any) -> None:
    torch.manual_seed(0)
    with mode():
        model = PreallocatedAttention()
        layer = generated(model, steps, keep=keep)["L0"]
    entropy = torch.special.entr(truth(attention())).sum(-1)
    torch.testing.assert_close(layer.entropy(), entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.norms(), model.split(TEXT)[2].norm(dim=-1))


def test_earlier_keys_changed_in_place_are_refused() -> None:
    model = PreallocatedAttention()

    def change(*call: Any) -> None:
        model.cache[0, :, :, 2] += 1

    model.register_forward_pre_hook(change)
    with pytest.raises(ValueError, match="earlier keys differ"):
        generated(model, [5, 1])


@pytest.mark.parametrize("keep", ["lazy", foci.Keep()])
def test_single_tokens_are_recorded_after_a_few_comparisons(keep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    record, recorded = Recorder._record_call, []

    def count(self: Recorder, name: str, *tensors: Any) -> None:
        recorded.append(name)
        record(self, name, *tensors)

    monkeypatch.setattr(Recorder, "_record_call", count)
    assert generated(attention(), [5, 1, 1, 1, 1], keep=keep)["L0"].shape == (2, 4, 9, 9)
    assert len(recorded) == 1


def test_tokens_above_the_limit_are_refused() -> None:
    one = generated(attention(), [9])["L0"].weights
    assert one is not None
    with pytest.raises(ValueError, match="above limit"):
        generated(attention(), [5, 1, 1, 1, 1], limit=one.nbytes)


def test_only_the_last_keys_are_kept() -> None:
    """A generation keeps as much as one pass over its text, plus a mask if its steps have dense masks."""
    model = attention()
    one = generated(model, [9])["L0"].weights
    many = generated(attention(), [1] * 9)["L0"].weights
    assert one is not None
    assert many is not None
    assert repr(many.tensors.call.mask) == "causal"
    assert many.nbytes <= one.nbytes


@pytest.mark.parametrize("steps", [[5, 1, 1, 1, 1], [3, 2, 2, 2]])
@pytest.mark.parametrize("keep", ["lazy", foci.Keep()])
def test_the_keys_of_earlier_steps_are_freed(steps: list[int], keep: Any) -> None:
    model = attention()
    memory, start = [], 0
    with torch.no_grad(), foci.watch(model, keep=keep):
        for count in steps:
            model(TEXT[:, start : start + count])
            assert model.kept is not None
            memory.append(StorageWeakRef(model.kept[0].untyped_storage()))
            start += count
        # The first keys share memory with their queries, which are kept.
        assert [each.expired() for each in memory[1:]] == [True] * (len(steps) - 2) + [False]


@pytest.mark.parametrize("steps", [[5, 1, 1, 1, 1], [4, 3, 2]])
def test_kept_statistics_of_all_steps(steps: list[int]) -> None:
    model = attention()
    layer, dense = (
        generated(model, steps, keep=foci.Keep(top=3, picture=4, largest_logit=True, shares=True))["L0"],
        truth(model),
    )
    assert layer.shape == (2, 4, 9, 9)
    assert "picture" not in layer.available
    torch.testing.assert_close(layer.entropy(), torch.special.entr(dense).sum(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.received(), dense.sum(-2), atol=1e-5, rtol=1e-5)
    found, expected = layer.top(3), dense.topk(3)
    torch.testing.assert_close(found.values, expected.values, atol=1e-6, rtol=1e-5)
    assert torch.equal(found.keys, torch.where(expected.values > 0, expected.indices, -1))
    distance = (dense * (torch.arange(9) - torch.arange(9)[:, None]).abs()).sum(-1)
    torch.testing.assert_close(layer.distance(), distance, atol=1e-5, rtol=1e-5)
    assert layer.kept is not None
    torch.testing.assert_close(layer.kept["first"], dense[..., 0], atol=1e-6, rtol=1e-5)
    whole = generated(attention(), [9])["L0"]
    torch.testing.assert_close(layer.largest_logit(), whole.largest_logit(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.norms(), whole.norms())


def test_the_last_row_of_each_step() -> None:
    model = attention()
    layer = generated(model, [5, 1, 1, 2], queries="last")["L0"]
    assert layer.rows == (4, 5, 6, 8)
    assert layer.positions.tolist() == [4, 5, 6, 8]
    torch.testing.assert_close(layer.dense(), truth(model)[:, :, [4, 5, 6, 8]], atol=1e-6, rtol=1e-5)


def test_a_cache_that_was_filled_before_the_block() -> None:
    model = attention()
    with torch.no_grad():
        model(TEXT[:, :4])
        with foci.watch(model) as seen:
            for place in range(4, 9):
                model(TEXT[:, place : place + 1])
    layer = seen["L0"]
    assert layer.shape == (2, 4, 5, 9)
    assert layer.positions.tolist() == [4, 5, 6, 7, 8]
    torch.testing.assert_close(layer.dense(), truth(model)[:, :, 4:], atol=1e-6, rtol=1e-5)


CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "reordered": (lambda t: t.flip(0), "the cache was reordered"),
    "cropped": (lambda t: t[:, :, :3], "1 queries after 6 keys must have 7 keys, got 4"),
    "evicted": (lambda t: t[:, :, 1:], "must have 7 keys, got 6"),
    "spread": (lambda t: t.repeat(2, 1, 1, 1), "the batch size changed from 2 to 4"),
    "changed": (lambda t: t + 1e-3, "the cache was reordered .* or changed"),
    "one entry changed": (lambda t: t.index_fill(2, torch.tensor([2]), 0.5), "or changed"),
    "larger": (lambda t: torch.cat([t, t], 2), "so the cache was changed outside"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("keep", ["lazy", foci.Keep()])
def test_changed_caches_are_refused(change: str, keep: Any) -> None:
    how, message = CHANGES[change]
    model = attention()
    with pytest.raises(ValueError, match=message), torch.no_grad(), foci.watch(model, keep=keep):
        changed_on_the_way(model, how)


def changed_on_the_way(model: CachedAttention, how: Callable[[Tensor], Tensor]) -> None:
    model(TEXT[:, :5])
    model(TEXT[:, 5:6])
    model.change(how)
    rows = len(model.kept[0]) if model.kept is not None else 0
    model(TEXT[:, 6:7].repeat(rows // 2, 1, 1))


def test_an_unchanged_copy_of_a_cache_continues() -> None:
    model = attention()
    with torch.no_grad(), foci.watch(model) as seen:
        changed_on_the_way(model, lambda t: t.clone())
    assert seen["L0"].shape == (2, 4, 7, 7)


def test_another_text_starts_a_new_layer() -> None:
    model = attention()
    with torch.no_grad(), foci.watch(model) as seen:
        for _ in range(2):
            model.kept = None
            model(TEXT[:, :5])
            model(TEXT[:, 5:6])
    assert list(seen.layers) == ["CachedAttention", "CachedAttention#2"]
    assert [layer.shape for layer in seen.layers.values()] == [(2, 4, 6, 6)] * 2


def test_calls_with_fewer_queries_than_keys_and_no_cache_are_not_joined() -> None:
    """Pooling queries: a second call of the same shape is a new call, not a step."""

    class PoolingAttention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.unsqueeze(1)
            return torch.nn.functional.scaled_dot_product_attention(x[:, :, :2], x, x)

    model = PoolingAttention()
    with foci.watch(model) as seen:
        model(TEXT)
        model(TEXT + 1)
    assert len(seen.layers) == 2


class OwnAttention(nn.Module):
    """`foci.attention` with a cache and options that change from step to step."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options, self.cache = options, foci.Cache()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
        keys, values = self.cache.append(k, v)
        positions = self.cache.positions(q.shape[2])
        return foci.attention(q, keys, values, positions=positions, **self.options, **more)


def walked(
    model: nn.Module,
    q: Tensor,
    steps: list[slice],
    each: Callable[[slice], dict[str, Any]] = lambda rows: {},
    after: Callable[[], Any] = int,
) -> None:
    for rows in steps:
        model(q[:, :, rows], K[:, :, rows], V[:, :, rows], **each(rows))
    after()


Q, K, V = randn(2, 4, 9, 8), randn(2, 2, 9, 8, seed=1), randn(2, 2, 9, 8, seed=2)
SKIPPED = torch.tensor([0, 3])
BIAS = randn(1, 4, 9, 9, seed=4)
HOLES = randn(2, 1, 9, 9, seed=5) > -1.0

# Options of all steps, those of the step with queries `rows`, and those of one pass over the whole text.
Rows = Callable[[slice], dict[str, Any]]
ALIKE: dict[str, tuple[dict[str, Any], Rows, dict[str, Any], str]] = {
    "causal": ({"mask": foci.causal}, lambda rows: {}, {"mask": foci.causal}, "causal"),
    "window": (
        {"mask": foci.causal & foci.window(3)},
        lambda rows: {},
        {"mask": foci.causal & foci.window(3)},
        "causal & window(3)",
    ),
    "padding on the left": (
        {},
        lambda rows: {"mask": foci.causal & foci.padding(rows.stop - SKIPPED, side="left")},
        {"mask": foci.causal & foci.padding(9 - SKIPPED, side="left")},
        "causal & padding([9, 6], side='left')",
    ),
    "no mask where one query sees all": (
        {},
        lambda rows: {} if rows.stop - rows.start == 1 else {"mask": foci.causal},
        {"mask": foci.causal},
        "causal",
    ),
    "dense masks": (
        {},
        lambda rows: {"mask": (HOLES & torch.ones(9, 9, dtype=torch.bool).tril())[:, :, rows, : rows.stop]},
        {"mask": HOLES & torch.ones(9, 9, dtype=torch.bool).tril()},
        "bool tensor (2, 1, 9, 9)",
    ),
    "a prompt that sees all of itself": (
        {},
        lambda rows: {"mask": foci.causal | foci.prefix(5)},
        {"mask": foci.causal | foci.prefix(5)},
        "bool tensor (1, 1, 9, 9)",
    ),
    "dense biases": (
        {"mask": foci.causal},
        lambda rows: {"bias": BIAS[:, :, rows, : rows.stop]},
        {"mask": foci.causal, "bias": BIAS},
        "causal",
    ),
    "a bias by distance, a sink and a softcap": (
        {"mask": foci.causal, "bias": foci.ALiBi(), "sink": torch.ones(4), "score": foci.Dot(softcap=3.0)},
        lambda rows: {},
        {"mask": foci.causal, "bias": foci.ALiBi(), "sink": torch.ones(4), "score": foci.Dot(softcap=3.0)},
        "causal",
    ),
    "additive": (
        {"mask": foci.causal, "score": foci.Additive(torch.ones(8))},
        lambda rows: {},
        {"mask": foci.causal, "score": foci.Additive(torch.ones(8))},
        "causal",
    ),
}


@pytest.mark.parametrize("case", ALIKE)
def test_masks_biases_and_scores_of_all_steps(case: str) -> None:
    options, each, whole, mask = ALIKE[case]
    model = OwnAttention(**options)
    with torch.no_grad(), foci.watch(model) as seen:
        walked(model, Q, [slice(0, 5), slice(5, 6), slice(6, 7), slice(7, 9)], each)
    _, expected = foci.attention(Q, K, V, **whole, return_weights=True)
    found = seen["L0"].weights
    assert found is not None
    assert repr(found.tensors.call.mask) == mask
    torch.testing.assert_close(found.dense(), expected.dense(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.sink_mass(), expected.sink_mass(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.distance(), expected.distance(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found @ torch.ones(9, 1), expected @ torch.ones(9, 1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("mask", [None, foci.window(3, None)])
def test_later_keys_are_masked_in_steps_without_a_causal_mask(mask: foci.Mask | None) -> None:
    model, steps = OwnAttention(mask=mask), [slice(0, 3), slice(3, 6), slice(6, 9)]
    with torch.no_grad(), foci.watch(model) as seen:
        walked(model, Q, steps)
    for rows in steps:
        keys = K[:, :, : rows.stop]
        _, expected = foci.attention(Q[:, :, rows], keys, keys, mask=mask, return_weights=True)
        found = seen["L0"].dense()[:, :, rows]
        torch.testing.assert_close(found[..., : rows.stop], expected.dense(), atol=1e-6, rtol=1e-5)
        assert bool((found[..., rows.stop :] == 0).all())


def test_biases_that_differ_are_refused() -> None:
    model = OwnAttention(mask=foci.causal)
    slopes = {5: torch.ones(4), 6: torch.full((4,), 2.0)}
    with pytest.raises(ValueError, match="their biases differ"), torch.no_grad(), foci.watch(model):
        walked(model, Q, [slice(0, 5), slice(5, 6)], lambda rows: {"bias": foci.ALiBi(slopes[rows.stop])})


def test_a_cache_that_overwrites_old_keys_is_refused() -> None:
    model = OwnAttention(mask=foci.causal & foci.window(3))
    model.cache = foci.Cache(window=4)
    with pytest.raises(ValueError, match="cannot be joined"), torch.no_grad(), foci.watch(model):
        walked(model, Q, [slice(place, place + 1) for place in range(9)])


def test_queries_changed_in_place_are_refused() -> None:
    model, q = OwnAttention(mask=foci.causal), Q.clone()
    with pytest.raises(ValueError, match="changed in place"), torch.no_grad(), foci.watch(model):
        walked(model, q, [slice(0, 5), slice(5, 6)], after=q.zero_)


class TestOwnModels:
    """foci.generate, watched: every matrix is that of one pass over prompt and answer."""

    def test_a_decoder(self) -> None:
        torch.manual_seed(0)
        model = foci.nn.Decoder.from_name("tiny", vocabulary=50).eval()
        expected = foci.generate(model, [[5, 3, 8], [7]], new_tokens=5)
        with foci.watch(model) as seen:
            answers = foci.generate(model, [[5, 3, 8], [7]], new_tokens=5)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
        text = torch.tensor([[5, 3, 8, *answers[0].tokens[:-1]], [0, 0, 7, *answers[1].tokens[:-1]]])
        real = torch.tensor([[True] * 7, [False] * 2 + [True] * 5])
        with torch.no_grad():
            whole = model(text, padding=real, return_weights=True).weights
        for name, weights in whole.items():
            found, dense = seen[name].dense(), weights.dense()
            torch.testing.assert_close(found[0], dense[0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(found[1, :, 2:], dense[1, :, 2:], atol=1e-5, rtol=1e-4)
        assert seen.labels["input"].texts[0] == tuple(str(int(token)) for token in text[0])
        assert (seen.prompt, seen.calls) == (3, 10)

    def test_an_encoder_decoder(self) -> None:
        torch.manual_seed(0)
        model = foci.nn.EncoderDecoder.from_name("tiny", vocabulary=50).eval()
        with foci.watch(model) as seen:
            answer = foci.generate(model, [[5, 3, 8], [7, 2]], start=1, new_tokens=4)
        target = torch.tensor([[1, *each.tokens[:-1]] for each in answer])
        with torch.no_grad():
            lengths = torch.tensor([3, 2])
            out = model(torch.tensor([[5, 3, 8], [7, 2, 0]]), target, source_padding=lengths, return_weights=True)
        assert [seen.name_of(layer) for layer in seen.layers.values()] == list(out.weights)
        for name, weights in out.weights.items():
            found, dense = seen[name].dense(), weights.dense()
            torch.testing.assert_close(found[0], dense[0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(found[1, :, :2], dense[1, :, :2], atol=1e-5, rtol=1e-4)
        assert {name: labels.texts[0] for name, labels in seen.labels.items()} == {
            "source": ("5", "3", "8"),
            "target": tuple(str(int(token)) for token in target[0]),
        }
        assert seen.rollout(-1, stack="decoder").shape == (4,)

    @pytest.mark.parametrize("keep", ["lazy", foci.Keep(picture=0)])
    def test_some_heads_of_an_encoder_decoder(self, keep: Any) -> None:
        torch.manual_seed(0)
        model = foci.nn.EncoderDecoder.from_name("tiny", vocabulary=50).eval()
        with foci.watch(model) as whole:
            foci.generate(model, [[5, 3, 8]], start=1, new_tokens=4)
        with foci.watch(model, heads=["cross.L1H2", "cross.L1H0", "decoder.L0H3"], keep=keep) as seen:
            foci.generate(model, [[5, 3, 8]], start=1, new_tokens=4)
        assert seen.heads == ["decoder.L0H3", "cross.L1H0", "cross.L1H2"]
        for name in seen.heads:
            assert seen[name].shape == whole[name].shape
            torch.testing.assert_close(seen[name].entropy(), whole[name].entropy(), atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(seen[name].norms(), whole[name].norms())

    def test_a_recurrent_network_with_attention(self) -> None:
        torch.manual_seed(0)
        model = foci.nn.Seq2SeqRNN.from_name("tiny", vocabulary=50).eval()
        with foci.watch(model) as seen:
            foci.generate(model, [[5, 3, 8], [7, 2, 4]], start=1, new_tokens=4)
        assert list(seen.layers) == ["alignment"]
        assert seen["cross.L0H0"].shape == (2, 4, 3)
        torch.testing.assert_close(seen["cross.L0"].dense().sum(-1), torch.ones(2, 1, 4))

    def test_a_beam_is_refused(self) -> None:
        model = foci.nn.Decoder.from_name("tiny", vocabulary=50).eval()
        with pytest.raises(ValueError, match="reordered"), foci.watch(model):
            foci.generate(model, [5, 3, 8], new_tokens=5, method=foci.decoding.Beam(3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [5, 8])
def test_key_fingerprints_do_not_depend_on_memory_layout(dtype: torch.dtype, width: int) -> None:
    k = randn(1, 2, 7, width).to(dtype)
    room = torch.zeros(1 + k.numel(), dtype=dtype)
    apart = room[1:].view(k.shape)
    strange = k.as_strided(k.shape, (3, *k.stride()[1:]))
    for other in (apart.copy_(k), k.transpose(1, 2).contiguous().transpose(1, 2), k.mT.contiguous().mT, strange):
        assert torch.equal(fingerprint_keys(other), fingerprint_keys(k))
    assert fingerprint_keys(k).shape == (1, 2, 7)


@pytest.mark.parametrize("width", [5, 8])
def test_key_fingerprints_differ_for_different_keys(width: int) -> None:
    k = randn(1, 2, 7, width)
    changed = k.clone()
    changed[0, 1, 3, width - 1] += 1
    differs = (fingerprint_keys(changed) != fingerprint_keys(k)).nonzero().tolist()
    assert differs == [[0, 1, 3]]

"""Head scores against their one-line definitions on dense matrices, and rollout against products of dense matrices."""

import math

import pytest
import torch
from torch import Tensor

import foci
from foci.record import metrics
from foci.record.kept import KeptStatistics
from foci.record.labels import Labels
from foci.record.layer import Layer
from foci.record.metrics import HEAD_SCORES
from tests.tensors import qkv, randn

TOKENS = [list("abcabcab"), list("aabbaabb")]


def layer(length: int = 8, mask: foci.Mask | None = foci.causal, seed: int = 0, **options: Tensor) -> Layer:
    q, k, v = (randn(2, 4, length, 8, seed=seed + i) for i in range(3))
    _, weights = foci.attention(q, k, v, mask=mask, return_weights=True, **options)
    return Layer("x", weights=weights, value_norms=v.norm(dim=-1))


def defined(dense: Tensor, tokens: list[list[str]]) -> dict[str, float]:
    """The scores of head 1, entry by entry."""
    sums, count = dict.fromkeys(("previous_token", "duplicate_token", "induction", "first_token", "alignment"), 0.0), 0
    for b, row_tokens in enumerate(tokens):
        for i, token in enumerate(row_tokens):
            row = dense[b, 1, i].tolist()
            count += 1
            sums["previous_token"] += row[i - 1] if i else 0.0
            sums["first_token"] += row[0]
            sums["duplicate_token"] += sum(w for j, w in enumerate(row) if j < i and row_tokens[j] == token)
            sums["induction"] += sum(
                w for j, w in enumerate(row) if 0 < j <= i and row_tokens[j - 1] == token and j - 1 < i
            )
    means = {name: total / count for name, total in sums.items()}
    heaviest = dense[:, 1].argmax(-1)
    means["alignment"] = float((heaviest[:, 1:] >= heaviest[:, :-1]).double().mean())
    means["heaviest"] = float(dense[:, 1].amax(-1).double().mean())
    means["entropy"] = float(torch.special.entr(dense[:, 1]).sum(-1).mean())
    return means


@pytest.mark.parametrize("entries", [1 << 22, 40])
@pytest.mark.parametrize("kind", ["weights", "matrix"])
def test_scores_equal_their_definitions(entries: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_STRIP_ENTRIES", entries)
    lazy = layer()
    dense = lazy.dense()
    asked = lazy if kind == "weights" else Layer("x", matrix=dense)
    found = metrics.compute_score_totals(asked, (TOKENS, TOKENS)).means()
    # There is no sink.
    assert HEAD_SCORES.keys() - found.keys() == {"sink_mass"}
    for name, value in defined(dense, TOKENS).items():
        assert math.isclose(found[name][1], value, rel_tol=1e-5), name
    single = metrics.compute_score_totals(asked.head(1), (TOKENS, TOKENS)).means()
    for name, value in single.items():
        torch.testing.assert_close(value, found[name][1:2])


def test_scores_from_kept_statistics() -> None:
    lazy = layer()
    assert lazy.weights is not None
    expected = metrics.compute_score_totals(lazy).means()
    assert not {"duplicate_token", "induction"} & expected.keys()
    for keep, missing in ((foci.Keep(shares=True), set()), (foci.Keep(), {"previous_token", "first_token"})):
        kept = Layer("x", kept=KeptStatistics(keep.compute(lazy.weights), lazy.shape))
        found = metrics.compute_score_totals(kept).means()
        assert expected.keys() - found.keys() == missing
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-6)


def test_fully_masked_queries_do_not_count() -> None:
    hidden = torch.ones(2, 1, 8, 8, dtype=torch.bool)
    hidden[0, :, 2:5] = False
    lazy = layer(mask=foci.causal & hidden)
    found = metrics.compute_score_totals(lazy)
    assert found.sums["entropy"][1].tolist() == [13.0] * 4
    dense = lazy.dense()
    seen = dense.sum(-1) > 0
    expected = [float(torch.special.entr(dense[:, h]).sum(-1)[seen[:, h]].mean()) for h in range(4)]
    assert found.means()["entropy"].tolist() == pytest.approx(expected, rel=1e-5)


def test_a_learned_sink_has_a_score_of_its_own() -> None:
    lazy = layer(sink=torch.tensor([3.0, -1.0, 0.0, 1.0]))
    assert lazy.weights is not None
    kept = Layer("x", kept=KeptStatistics(foci.Keep(shares=True).compute(lazy.weights), lazy.shape))
    for source in (lazy, kept):
        found = metrics.compute_score_totals(source).means()
        for name, expected in (("first_token", lazy.dense()[..., 0]), ("sink_mass", lazy.sink_mass())):
            torch.testing.assert_close(found[name], expected.mean((0, 2)).double(), atol=1e-6, rtol=1e-6)


def test_totals_add_up() -> None:
    first, second = (metrics.compute_score_totals(layer(seed=seed)) for seed in (0, 7))
    both = first.add(second).means()["entropy"]
    torch.testing.assert_close(both, (first.means()["entropy"] + second.means()["entropy"]) / 2)
    with pytest.raises(ValueError, match="other must have layers with the same heads"):
        first.add(metrics.compute_score_totals(layer().head(0)))


def rolled(layers: list[Tensor], batch: int, query: int) -> Tensor:
    """Abnar and Zuidema: row of the product of (W + I), each row scaled to 1."""
    product = torch.eye(layers[0].shape[-1], dtype=torch.float64)
    for matrix in layers:
        mixed = matrix[batch].double().mean(0) + torch.eye(matrix.shape[-1], dtype=torch.float64)
        product = (mixed / mixed.sum(-1, keepdim=True)) @ product
    return product[query]


@pytest.mark.parametrize("kind", ["weights", "matrix"])
@pytest.mark.parametrize("sink", [None, torch.tensor([3.0, -1.0, 0.0, 1.0])])
@pytest.mark.parametrize("rows", [0, 64], ids=["passes", "rows"])
def test_rollout_is_the_product_of_dense_matrices(
    rows: int, kind: str, sink: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MAX_ROLLOUT_ROWS", rows)
    options = {} if sink is None else {"sink": sink}
    lazy = [layer(seed=seed, **options) for seed in (0, 5, 9)]
    asked = lazy if kind == "weights" else [Layer("x", matrix=each.dense()) for each in lazy]
    for batch, query in ((0, -1), (1, 4)):
        found = metrics.compute_rollout(asked, query, batch)
        torch.testing.assert_close(
            found.double(), rolled([each.dense() for each in lazy], batch, query), atol=1e-6, rtol=1e-5
        )
        assert math.isclose(found.sum(), 1.0, rel_tol=1e-5)


def test_rollout_of_a_word_reads_only_its_rows_of_the_last_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = layer(length=80), layer(length=80, seed=3)
    expected = torch.stack([metrics.compute_rollout([first, last], query) for query in (70, 75, 75)]).mean(0)
    passes: list[tuple[int, ...]] = []
    own = foci.Weights.__rmatmul__

    def count(weights: foci.Weights, x: Tensor) -> Tensor:
        passes.append(tuple(weights.shape))
        return own(weights, x)

    monkeypatch.setattr(foci.Weights, "__rmatmul__", count)
    monkeypatch.setattr(foci.Weights, "entropy", None)
    found = metrics.compute_rollout([first, last], [70, 75, 75])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    # One pass, over the first layer.
    assert len(passes) == 1


def test_rollout_of_an_encoder_decoder_is_the_product_of_dense_matrices() -> None:
    generator = torch.Generator().manual_seed(0)

    def weights(*size: int) -> Tensor:
        return torch.rand(1, 2, *size, generator=generator, dtype=torch.float64).softmax(-1)

    def half(matrix: Tensor, both: Tensor) -> Tensor:
        return (both + matrix[0].mean(0)) / 2

    layers, into_source, into_target = [], torch.zeros(4, 3, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    encoded = torch.eye(3, dtype=torch.float64)
    for i in range(2):
        encoder, decoder, cross = weights(3, 3), weights(4, 4), weights(4, 3)
        layers += [
            Layer(f"encoder.{i}", "encoder", i, matrix=encoder, queries="source", keys="source"),
            Layer(f"decoder.{i}", "decoder", i, matrix=decoder, queries="target", keys="target"),
            Layer(f"cross.{i}", "cross", i, matrix=cross, queries="answer", keys="source"),
        ]
        encoded = half(encoder, torch.eye(3, dtype=torch.float64)) @ encoded
        step = half(decoder, torch.eye(4, dtype=torch.float64))
        into_source = (step @ into_source + cross[0].mean(0)) / 2
        into_target = step @ into_target / 2
    record = foci.Record({layer.name: layer for layer in layers})
    for query in range(4):
        expected = into_source[query] @ encoded
        torch.testing.assert_close(record.rollout(query).double(), expected, atol=1e-6, rtol=1e-5)
        source, target = metrics.compute_cross_rollout(record.select_rollout_layers("cross"), query)
        torch.testing.assert_close(target.double(), into_target[query], atol=1e-6, rtol=1e-5)
        assert float(source.sum() + target.sum()) == pytest.approx(1)


@pytest.mark.parametrize("kind", ["weights", "matrix"])
def test_rollout_by_values(kind: str) -> None:
    lazy = [layer(seed=seed) for seed in (0, 5)]
    weighed = []
    for each in lazy:
        by_value = each.dense() * each.norms()[:, :, None]
        weighed.append(by_value / by_value.sum(-1, keepdim=True))
    asked = (
        lazy if kind == "weights" else [Layer("x", matrix=each.dense(), value_norms=each.value_norms) for each in lazy]
    )
    found = metrics.compute_rollout(asked, -1, 1, values=True)
    torch.testing.assert_close(found.double(), rolled(weighed, 1, -1), atol=1e-6, rtol=1e-5)
    plain = metrics.compute_rollout(asked, -1, 1)
    assert (found - plain).abs().max() > 1e-3


@pytest.mark.parametrize("keep", [None, foci.Keep(shares=True)])
def test_cross_attention_has_no_position_scores(keep: foci.Keep | None) -> None:
    weights = foci.attention(*qkv(4, 6), return_weights=True)[1]
    behind = (
        {"weights": weights} if keep is None else {"kept": KeptStatistics(keep.compute(weights), tuple(weights.shape))}
    )
    alone, across = Layer("x", **behind), Layer("x", queries="target", keys="source", **behind)
    assert metrics.compute_score_totals(alone).sums.keys() - metrics.compute_score_totals(across).sums.keys() == {
        "distance",
        "previous_token",
    }
    assert {"entropy", "first_token", "alignment"} <= metrics.compute_score_totals(across).sums.keys()


def test_rollout_of_a_few_queries_after_a_cache() -> None:
    """Positions without a query keep their share."""
    q, k, v = qkv(2, 6)
    lazy = [Layer("x", weights=foci.attention(q, k, v, mask=foci.causal, return_weights=True)[1]) for _ in range(2)]
    square = []
    for each in lazy:
        whole = torch.zeros(2, 4, 6, 6)
        whole[:, :, 4:] = each.dense()
        square.append(whole)
    torch.testing.assert_close(metrics.compute_rollout(lazy, -1).double(), rolled(square, 0, -1), atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match="layers must have one length for a rollout, got 8 keys and 6 in L0"):
        metrics.compute_rollout([*lazy, layer()], 0)


def test_tokens_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must have the shapes \(2, 8\) and \(2, 8\)"):
        metrics.compute_score_totals(layer(), (TOKENS, Labels.positions(2, 7).texts))


def test_left_padding_is_not_a_sink() -> None:
    """The first key is the first visible one: a sequence has the same scores alone and padded."""
    q, k, v = (randn(1, 2, 6, 8, seed=seed) for seed in range(3))
    alone = foci.attention(q, k, v, mask=foci.causal, return_weights=True)[1]
    wide = [torch.cat([randn(1, 2, 3, 8, seed=9), x], 2) for x in (q, k, v)]
    mask = foci.causal & foci.padding(torch.tensor([6]), side="left")
    padded = foci.attention(*wide, mask=mask, return_weights=True)[1]
    expected, found = (metrics.compute_score_totals(Layer("x", weights=weights)).means() for weights in (alone, padded))
    torch.testing.assert_close(found["first_token"], expected["first_token"])
    kept = [foci.Keep(shares=True).compute(weights)["first"] for weights in (alone, padded)]
    torch.testing.assert_close(kept[1][..., 3:], kept[0])

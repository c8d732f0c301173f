"""Record: layers and heads by name, labels where they fit, scores that add up, tensors of other libraries."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import foci
from foci.record.labels import Labels
from foci.record.layer import Layer
from tests.tensors import randn


def matrices(count: int = 2, queries: int = 5, keys: int = 5, seed: int = 0) -> list[Tensor]:
    return [randn(1, 3, queries, keys, seed=seed + i).softmax(-1) for i in range(count)]


def translation() -> foci.Record:
    return foci.Record.from_tensors(
        matrices(2, 4, 4),
        tokens=["<s>", "un", "chat", "dort"],
        encoder=matrices(2, 3, 3, 5),
        cross=matrices(2, 4, 3, 9),
        source=["a", "cat", "sleeps"],
        model="Translator",
    )


def test_layers_and_heads_by_name() -> None:
    given = matrices()
    record = foci.Record.from_tensors(given, tokens=list("abcde"))
    assert torch.equal(record["L1"].dense(), given[1])
    assert torch.equal(record["L1H2"].dense(), given[1][:, 2])
    assert record["layers.1"] is record["L1"]
    assert record.heads == ["L0H0", "L0H1", "L0H2", "L1H0", "L1H1", "L1H2"]
    assert record.name_of(record["L1"], 2) == record.name_of(record["L1H2"]) == "L1H2"
    assert repr(record) == "Record: 2 layers, 6 heads, 2 attention calls"
    for wrong in ("L2", "L0H3", "cross.L0", "nothing", "L0#2"):
        with pytest.raises(KeyError):
            record[wrong]
    with pytest.raises(TypeError, match=r"name must be that of a layer or head, got 0: seen.layers has all layers"):
        record[0]
    with pytest.raises(KeyError, match=r"a layer \(L0, L1\) or a head such as L0H0, got 'L9H1'"):
        record["L9H1"]


def test_the_stacks_of_an_encoder_decoder() -> None:
    record = translation()
    assert list(dict.fromkeys(name.partition(".")[0] for name in record.heads)) == ["encoder", "decoder", "cross"]
    cross = record["cross.L1H0"]
    assert (cross.queries, cross.keys) == ("target", "source")
    queries, keys = record.labels_of(record["cross.L1"])
    assert (queries.text(0), keys.text(0)) == ("<s>unchatdort", "acatsleeps")
    assert record.labels_of(record["encoder.L0"])[0].text(0) == "acatsleeps"
    assert repr(record) == "Record of Translator: 6 layers, 18 heads, 6 attention calls"
    assert record.rollout(-1, stack="encoder").shape == record.rollout(-1).shape == (3,)
    assert torch.equal(record.rollout(-1, stack="cross"), record.rollout(-1))
    with pytest.raises(ValueError, match="stack must be one of 'cross', 'decoder', 'encoder', got 'vision'"):
        record.rollout(-1, stack="vision")


def test_second_calls_are_numbered() -> None:
    one, two = matrices()
    record = foci.Record({"a": Layer("a", matrix=one), "a#2": Layer("a#2", matrix=two)})
    assert record.heads[-1] == "L0H2#2"
    assert torch.equal(record["L0H2#2"].dense(), two[:, 2])
    assert torch.equal(record["L0H2"].dense(), one[:, 2])


def test_rollout_with_a_module_shared_by_all_layers() -> None:
    one, two = matrices()
    apart = foci.Record({"a": Layer("a", matrix=one), "b": Layer("b", index=1, matrix=two)})
    shared = foci.Record({"a": Layer("a", matrix=one), "a#2": Layer("a#2", index=1, matrix=two)})
    assert torch.equal(shared.rollout(-1), apart.rollout(-1))
    # A second pass over the same layer is another text.
    again = foci.Record({"a": Layer("a", matrix=one), "a#2": Layer("a#2", matrix=two)})
    assert torch.equal(again.rollout(-1), foci.Record({"a": Layer("a", matrix=one)}).rollout(-1))


def test_rollout_needs_all_rows_before_the_last_layer() -> None:
    last = [matrix[:, :, -1:] for matrix in matrices()]
    rows = (matrices()[0].shape[2] - 1,)
    layers = {name: Layer(name, index=int(name), matrix=m, rows=rows) for name, m in zip("01", last, strict=True)}
    with pytest.raises(ValueError, match="layers must have all queries for a rollout, got 1 of L0"):
        foci.Record(layers).rollout(-1)
    assert foci.Record({"0": layers["0"]}).rollout(-1).shape == (last[0].shape[3],)


def test_rollout_of_an_empty_record_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^the record must have at least one layer for a rollout, got none"):
        foci.Record().rollout(0)


def test_labels_that_do_not_fit_are_replaced_by_positions() -> None:
    record = foci.Record.from_tensors(matrices(), tokens=list("abcde"))
    layer = Layer("x", matrix=matrices(1, 2, 5)[0], rows=(0, 3))
    assert record.labels_of(layer)[0].texts == (("a", "d"),)
    assert record.labels_of(Layer("x", matrix=matrices(1, 2, 5)[0]))[0].texts == (("d", "e"),)
    longer = Layer("x", matrix=matrices(1, 7, 7)[0])
    assert [labels.kind for labels in record.labels_of(longer)] == ["positions", "positions"]
    record.label([[1, 2, 3, 4, 5]], decode=lambda ids: "".join(chr(96 + i) for i in ids))
    assert record.labels["input"].texts == (tuple("abcde"),)
    with pytest.raises(ValueError, match=r"name must be a sequence of the record \('input'\), got 'other'"):
        record.label(Labels.positions(1, 5), name="other")
    with pytest.raises(TypeError, match="token ids together with decode="):
        record.label([[1, 2]])


def test_labels_set_afterwards_that_fit_no_layer_are_refused() -> None:
    record = foci.Record.from_tensors(matrices(), tokens=list("abcde"))
    for wrong in ([["a"]], [list("abcde")] * 2):
        with pytest.raises(ValueError, match=r"'input' must have 1 sequences of 5 positions, as layers.0 has, got"):
            record.label(wrong)
    assert record.labels["input"].texts == (tuple("abcde"),)
    with pytest.raises(ValueError, match=r"'input' must have 5 positions, as layers.0 has, got 3 x 3 patches after 1"):
        record.label(Labels.patches(3, 3, extra=1))
    record.layers["longer"] = Layer("longer", index=2, matrix=matrices(1, 7, 7)[0])
    assert record.label([list("vwxyz")]).labels["input"].texts == (tuple("vwxyz"),)


def test_tensors_of_other_libraries() -> None:
    given = matrices()
    forms: dict[str, Any] = {
        "tuple": tuple(given),
        "one array": torch.stack(given),
        "numpy": np.stack([matrix.numpy() for matrix in given]),
        "without a batch": [matrix[0] for matrix in given],
    }
    for name, form in forms.items():
        assert torch.equal(foci.Record.from_tensors(form)["L1"].dense(), given[1]), name


def test_the_steps_of_generate_become_one_matrix() -> None:
    whole = [torch.tril(matrix) for matrix in matrices(2, 6, 6)]
    steps = tuple(
        tuple(matrix[:, :, rows, : rows.stop] for matrix in whole) for rows in (slice(0, 4), slice(4, 5), slice(5, 6))
    )
    record = foci.Record.from_tensors(steps, tokens=list("abcdef"))
    assert torch.equal(record["L1"].dense(), whole[1])
    assert (record.prompt, record.calls) == (4, 6)
    cross = tuple((matrix[:, :, :1], matrix[:, :, :1]) for matrix in matrices(3, 4, 4))
    assert foci.Record.from_tensors(steps, cross=cross)["cross.L1"].shape == (1, 3, 3, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "at least one layer, got none"),
        ([None], "a layer must be a tensor, got None"),
        (
            [torch.ones(2, 2, dtype=torch.int64)],
            r"a float tensor \(batch, head, query, key\), got torch.int64 \(2, 2\)",
        ),
        (((torch.rand(1, 1, 2, 2),), (torch.rand(1, 1, 1, 5),)), r"step 1 must have shape \(1, 1, 1, 3\) to continue"),
        (((torch.rand(1, 1, 2, 2),), ()), "every step must have the same number of layers"),
    ],
)
def test_invalid_tensors_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        foci.Record.from_tensors(given)


def test_labels_that_do_not_fit_the_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must have 1 sequences of 5 positions, as layers.0 has, got 1 of 3"):
        foci.Record.from_tensors(matrices(), tokens=list("abc"))


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (randn(1, 2, 5, 5), "a weight of -"),
        (torch.full((1, 2, 5, 5), 0.5), "a row sum of 2.5"),
        (torch.full((1, 2, 5, 5), torch.inf), "a row sum of inf"),
    ],
)
def test_scores_are_refused_as_weights(given: Tensor, got: str) -> None:
    with pytest.raises(
        ValueError, match=r"layers.0 must have attention weights of at least 0 with row sums of at most 1, g"
    ):
        foci.Record.from_tensors([given])
    with pytest.raises(ValueError, match=got):
        foci.Record.from_tensors([given])


def test_row_sums_below_one_and_half_precision_rounding_are_accepted() -> None:
    whole = matrices(1)[0]
    for given in (whole / 2, whole * 0, whole.bfloat16(), whole.half(), torch.full((1, 1, 2, 2), torch.nan)):
        assert foci.Record.from_tensors([given])["L0"].dense() is not None


def test_nan_rows_are_ignored_by_scores() -> None:
    whole = matrices(1)[0]
    broken = whole.clone()
    broken[:, :, 4] = torch.nan
    scores = foci.Record.from_tensors([broken], tokens=list("abcde")).scores()
    kept = foci.Record.from_tensors([whole[:, :, :4]]).scores()
    torch.testing.assert_close(scores["entropy"], kept["entropy"])
    torch.testing.assert_close(scores["heaviest"], kept["heaviest"])
    assert foci.Record.from_tensors([broken * torch.nan]).scores() == {}


def test_scores_have_a_row_per_layer() -> None:
    record = foci.Record.from_tensors([*matrices(1), torch.rand(1, 2, 5, 5).softmax(-1)], tokens=list("abcab"))
    scores = record.scores()
    assert scores["previous_token"].shape == (2, 3)
    assert scores["previous_token"].isnan().tolist() == [[False] * 3, [False, False, True]]
    expected = record["L0"].dense()[0].diagonal(-1, 1, 2).sum(-1) / 5
    assert scores["previous_token"][0].tolist() == pytest.approx(expected.tolist())
    positions = foci.Record.from_tensors(matrices())
    assert "induction" in scores
    assert "induction" not in positions.scores()


def test_the_table_has_a_row_per_head() -> None:
    columns = translation().columns()
    assert columns["name"][:2] == ["encoder.L0H0", "encoder.L0H1"]
    assert {len(column) for column in columns.values()} == {18}
    assert columns["queries"][0] == 3
    assert columns["layer"][-1] == 1
    assert columns["stack"][-1] == "cross"
    assert columns["entropy"][0] == pytest.approx(float(translation()["encoder.L0H0"].entropy().mean()), rel=1e-5)


def test_a_table_is_pandas_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert list(translation().table()["name"]) == translation().columns()["name"]
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda columns: ("frame", list(columns))))
    assert translation().table() == ("frame", list(translation().columns()))


def test_statistics_add_up_over_a_data_set() -> None:
    records = [foci.Record.from_tensors(matrices(seed=seed), tokens=list("abcab")) for seed in (0, 10, 20)]
    whole = torch.cat([record["L1"].dense() for record in records])
    first = records[0]
    first.add(records[1]).add(records[2])
    assert first.columns()["queries"][0] == 15
    assert (first.sequences, first.calls) == (3, 6)
    assert first.scores()["entropy"][1].tolist() == pytest.approx(
        torch.special.entr(whole).sum(-1).mean((0, 2)).tolist()
    )
    assert torch.equal(first["L1"].dense(), whole[:1])
    twice = foci.Record.from_tensors(matrices(), tokens=list("abcab")).add(first)
    assert twice.columns()["queries"][0] == 20
    with pytest.raises(ValueError, match="only one of the two has"):
        first.add(translation())


def test_unknown_suffixes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path must end with one of .foci, .html"):
        translation().save(tmp_path / "x.txt")
    with pytest.raises(TypeError, match=r"options must be empty for a .foci file, got title"):
        translation().save(tmp_path / "x.foci", title="x")


def test_a_notebook_shows_an_empty_record_as_text() -> None:
    assert foci.Record(model="X")._repr_mimebundle_() == {
        "text/plain": "Record of X: 0 layers, 0 heads, 0 attention calls"
    }


def empty_record(kind: str, batch: int, queries: int, keys: int) -> foci.Record:
    """A record of one layer with 2 heads, of which an axis is empty."""
    if kind == "dense":
        return foci.Record.from_tensors([torch.full((batch, 2, queries, keys), 1 / max(keys, 1))])
    q, k = torch.randn(batch, 2, queries, 4), torch.randn(batch, 2, keys, 4)
    return foci.Record({"a": Layer("a", weights=foci.attention(q, k, k, return_weights=True)[1])})


@pytest.mark.parametrize("kind", ["dense", "lazy"])
@pytest.mark.parametrize("sizes", [(1, 0, 0), (1, 0, 5), (1, 5, 0), (0, 5, 5), (0, 0, 0)])
def test_questions_about_empty_sequences(kind: str, sizes: tuple[int, int, int], tmp_path: Path) -> None:
    record = empty_record(kind, *sizes)
    layer = record["L0"]
    assert layer.entropy().shape == (sizes[0], 2, sizes[1])
    assert layer.received().shape == (sizes[0], 2, sizes[2])
    assert layer.dense().shape == (sizes[0], 2, *sizes[1:])
    # No query counts, so every mean is undefined.
    assert all(bool(table.isnan().all()) for table in record.scores().values())
    assert record.columns()["name"] == ["L0H0", "L0H1"]
    assert record.add(empty_record(kind, *sizes)).sequences == 2
    record.save(tmp_path / "record.foci")
    assert foci.Record.load(tmp_path / "record.foci")["L0"].shape == layer.shape
    with pytest.raises(ValueError, match="L0 must have at least one query and one key for a rollout, got"):
        record.rollout(0)
    for view in (record.show, lambda: record.save(tmp_path / "x.html"), lambda: record.save(tmp_path / "x.png")):
        with pytest.raises(ValueError, match=r"L0 must have at least one query and one key, got shape \("):
            view()
    if 0 in sizes[:2]:
        with pytest.raises(IndexError, match=r"must be an index into L0, got 0: it has shape \("):
            layer.row(0, 0, 0)
        with pytest.raises(IndexError, match=r"(batch|query) must be an index into L0H1, got 0"):
            record["L0H1"].row(0, 0)


@pytest.mark.parametrize(("query", "batch", "name"), [(3, 0, "query"), (-4, 0, "query"), (0, 1, "batch")])
def test_a_rollout_of_a_missing_query_is_refused(query: int, batch: int, name: str) -> None:
    record = foci.Record.from_tensors([torch.full((1, 2, 3, 3), 1 / 3)])
    with pytest.raises(IndexError, match=f"{name} must be from -[13] to [02], got"):
        record.rollout(query, batch)

"""Weights, layers and masks are shown, saved by suffix, displayed in notebooks and read by NumPy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt

import foci
from foci.record.labels import Labels
from foci.view import display

HEADERS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF", ".html": b"<!doctype html>"}
TEXTS = ["Jane", " eats", " what", " she", " likes"]


def weights(*lead: int, length: int = 5) -> foci.Weights:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, *lead, length, 8, generator=generator)
    return foci.attention(q, k, v, mask=foci.causal, return_weights=True)[1]


def record() -> foci.Record:
    return foci.Record.from_tensors([weights(1, 3)], TEXTS)


SHOWN: dict[str, Callable[[], Any]] = {
    "weights": lambda: weights(2, 3),
    "weights of five axes": lambda: weights(2, 2, 3),
    "weights of one head": lambda: weights(2, 3)[0, 1],
    "weights averaged over heads": lambda: weights(2, 3).mean("heads"),
    "a layer": lambda: record()["L0"],
    "a head": lambda: record()["L0H2"],
    "a mask": lambda: foci.causal & foci.window(2),
    "a dense mask": lambda: foci.causal & torch.rand(2, 3, 4, 5).gt(0.5),
}


@pytest.mark.parametrize("name", SHOWN)
def test_each_suffix_gives_a_file_of_that_format(name: str, tmp_path: Path) -> None:
    for suffix in HEADERS if name in {"weights", "a mask"} else [".svg"]:
        SHOWN[name]().save(tmp_path / f"x{suffix}")
        assert (tmp_path / f"x{suffix}").read_bytes().startswith(HEADERS[suffix])


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("path", ["x.txt", "x", "x.pn"])
def test_an_unknown_suffix_is_refused(name: str, path: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^path must end with one of \..*\.png, \.svg, \.pdf, .*, got '.*{path}'$"):
        SHOWN[name]().save(tmp_path / path)
    assert not (tmp_path / path).exists()


@pytest.mark.parametrize("name", SHOWN)
def test_show_prints_the_matrix(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    SHOWN[name]().show()
    printed = capsys.readouterr().out
    assert "■" in printed if "mask" in name else "All of L0" in printed


@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_shows_a_picture_and_a_text(name: str) -> None:
    shown = SHOWN[name]()
    bundle = shown._repr_mimebundle_()
    assert bundle["text/plain"] == (str(shown) if "mask" in name else repr(shown))
    assert ("<svg" if "mask" in name else "<iframe srcdoc=") in bundle["text/html"]


def test_weights_keep_their_own_format(tmp_path: Path) -> None:
    weights(2, 3).save(tmp_path / "w.safetensors")
    loaded = foci.load(tmp_path / "w.safetensors")
    assert isinstance(loaded, foci.Weights)
    assert torch.equal(loaded.dense(), weights(2, 3).dense())
    with pytest.raises(TypeError, match=r"^options must be empty for a .safetensors file, got tokens$"):
        weights(2, 3).save(tmp_path / "w.safetensors", tokens=TEXTS)


def test_a_layer_is_saved_as_a_record_of_its_own(tmp_path: Path) -> None:
    record()["L0H2"].save(tmp_path / "head.foci")
    loaded = foci.Record.load(tmp_path / "head.foci")
    assert loaded.heads == ["L0H2"]
    assert loaded.labels["input"].texts == (tuple(TEXTS),)
    assert torch.equal(loaded["L0H2"].dense(), record()["L0H2"].dense())


def test_show_names_the_tokens(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    weights(1, 3).show("likes", tokens=TEXTS)
    assert "Attention of “likes”" in capsys.readouterr().out
    weights(1, 3).show("what", tokens=TEXTS, source=list("ABCDE"), head="cross.L0H1")
    assert "Attention of “what” in cross.L0H1" in capsys.readouterr().out
    record()["L0H1"].show("she")
    assert "Attention of “she” in L0H1" in capsys.readouterr().out
    weights(1, 3).save(tmp_path / "w.svg", tokens=TEXTS)
    assert "likes" in (tmp_path / "w.svg").read_text()


def test_a_layer_follows_new_labels_of_its_record(capsys: pytest.CaptureFixture[str]) -> None:
    labelled = record()
    layer = labelled["L0"]
    labelled.label(Labels.tokens([["v", " w", " x", " y", " z"]]))
    layer.show("w")
    assert "“w”" in capsys.readouterr().out


def test_a_watched_layer_has_the_labels_of_its_record() -> None:
    model = foci.nn.Decoder.from_name("tiny", vocabulary=20).eval()
    with foci.watch(model, tokenizer=lambda ids: " ".join(f"t{n}" for n in ids)) as seen, torch.no_grad():
        model(torch.arange(6)[None])
    assert next(iter(seen.layers.values())).labels is seen.labels


@pytest.mark.parametrize("name", SHOWN)
def test_numpy_reads_the_dense_matrix(name: str) -> None:
    shown = SHOWN[name]()
    if name == "a dense mask":
        with pytest.raises(ValueError, match="one sequence and head for an array, got 2 sequences and 3 heads"):
            np.asarray(shown)
        return
    array = np.asarray(shown)
    assert array.dtype != object
    assert np.array_equal(array, shown.dense().numpy())
    assert np.asarray(shown, dtype="float16").dtype == np.float16
    assert np.array(shown).base is None
    with pytest.raises(ValueError, match="copy must be None or True"):
        np.array(shown, copy=False)


def test_numpy_reads_bfloat16_and_tensors_with_gradients() -> None:
    half = foci.Record.from_tensors([torch.eye(4, dtype=torch.bfloat16).view(1, 1, 4, 4)])
    assert np.asarray(half["L0"]).dtype == np.float32
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    assert np.asarray(foci.attention(q, q, q, return_weights=True)[1]).shape == (1, 2, 5, 5)


def test_a_matrix_above_the_limit_is_refused() -> None:
    q = torch.randn(1, 1, 2**14 + 1, 1)
    large = foci.attention(q, q, q, return_weights=True)[1]
    with pytest.raises(ValueError, match=r"above the limit of 1.00 GiB: use slices or statistics"):
        np.asarray(large)
    with pytest.raises(ValueError, match=r"^queries x keys must be at most limit=1,073,741,824, got 40,000 x 40,000$"):
        foci.causal.dense(40_000)
    assert "too many for a notebook cell" in large._repr_mimebundle_()["text/plain"]
    assert "text/html" not in large._repr_mimebundle_()


def test_an_empty_matrix_is_shown_as_text() -> None:
    empty = foci.attention(torch.randn(1, 2, 0, 4), *torch.randn(2, 1, 2, 3, 4), return_weights=True)[1]
    assert list(empty._repr_mimebundle_()) == ["text/plain"]


def test_matplotlib_draws_weights_heads_and_masks() -> None:
    for shown in (weights(2, 3)[0, 0], record()["L0H1"][0], foci.causal):
        figure, ax = plt.subplots()
        assert ax.imshow(shown).get_array().ndim == 2
        plt.close(figure)


def test_the_mean_of_heads_is_drawn_as_such() -> None:
    averaged = weights(2, 3).mean("heads")
    built = display.build_layer_record(averaged)
    torch.testing.assert_close(built["L0H0"].dense(), averaged.dense())


def test_a_mask_takes_the_sizes_of_a_call(tmp_path: Path) -> None:
    assert torch.equal(foci.causal.dense(3, 5), torch.ones(3, 5).tril(2).bool())
    assert foci.causal.dense(keys=4).shape == (6, 4)
    padded = foci.padding(torch.tensor([3, 2]))
    assert padded.dense(4, batch=1).sum(1).tolist() == [2, 2, 2, 2]
    padded.save(tmp_path / "m.svg", 4, 9, batch=1)
    assert "padding" in (tmp_path / "m.svg").read_text()
    foci.causal.save(tmp_path / "long.png", 2000, dpi=72)
    with pytest.raises(ValueError, match="batch must be below 2"):
        padded.save(tmp_path / "m.svg", batch=2)


def test_a_mask_without_matplotlib_is_drawn_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert foci.causal._repr_mimebundle_() == {"text/plain": str(foci.causal)}


def test_a_mask_names_itself_safely_on_its_page(tmp_path: Path) -> None:
    def predicate(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    predicate.__name__ = "<script>"
    foci.mask_function(predicate).save(tmp_path / "m.html")
    assert "<script" not in (tmp_path / "m.html").read_text()

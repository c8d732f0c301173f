"""Record files: a saved record is loaded unchanged, and damaged or hostile files are refused."""

import json
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import foci
from foci.record.kept import KeptStatistics
from foci.record.labels import Labels
from foci.record.layer import Layer
from foci.runtime.safetensors_file import checksum_tensors
from tests.tensors import qkv


def record() -> foci.Record:
    """A layer of each kind; the lazy ones share one mask tensor."""
    seen = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    lazy = [foci.attention(*qkv(), mask=seen, return_weights=True)[1] for _ in range(2)]
    norms = qkv()[2].norm(dim=-1)
    kept = KeptStatistics(foci.Keep(top=3, picture=4).compute(lazy[0]), lazy[0].shape)
    layers = {
        "a": Layer("a", weights=lazy[0], kv_heads=2, value_norms=norms),
        "b": Layer("b", index=1, weights=lazy[1], kv_heads=2),
        "c": Layer("c", "cross", 0, queries="input", keys="source", kept=kept),
        "d": Layer(
            "d", index=2, heads=(1, 5), matrix=torch.rand(2, 2, 1, 6), rows=(3,), query_positions=torch.tensor([3])
        ),
    }
    texts = [list("abcdef"), ["🙂", "", " x", "\n", "<b>", "z"]]
    labels = {
        "input": Labels.tokens(texts, words=[[0, 0, 1, 2, None, 3]] * 2),
        "source": Labels(
            "patches", (("",) * 6,) * 2, grid=(1, 5), leading=1, images=torch.zeros(2, 4, 4, 3, dtype=torch.uint8)
        ),
    }
    return foci.Record(
        layers, labels, model="M", calls=9, unseen=["x: because"], prompt=4, answer="ja 🙂", notes=["cut"]
    )


def test_a_saved_record_is_loaded(tmp_path: Path) -> None:
    saved = record()
    saved.save(tmp_path / "r.foci")
    loaded = foci.Record.load(tmp_path / "r.foci")
    assert repr(loaded) == repr(saved)
    assert loaded.heads == saved.heads
    for name in ("model", "calls", "unseen", "prompt", "answer", "sequences", "notes"):
        assert getattr(loaded, name) == getattr(saved, name)
    assert loaded.labels["input"] == saved.labels["input"]
    patches = loaded.labels["source"]
    assert (patches.grid, patches.leading, patches.kind) == ((1, 5), 1, "patches")
    assert patches.images is not None
    assert patches.images.shape == (2, 4, 4, 3)
    for name, layer in saved.layers.items():
        again = loaded.layers[name]
        for part in ("name", "stack", "index", "heads", "queries", "keys", "rows", "kv_heads", "shape", "available"):
            assert getattr(again, part) == getattr(layer, part), (name, part)
        assert torch.equal(again.entropy(), layer.entropy())
        assert torch.equal(again.positions, layer.positions)
    assert torch.equal(loaded["L0"].dense(), saved["L0"].dense())
    assert torch.equal(loaded["cross.L0"].top(3).keys, saved["cross.L0"].top(3).keys)
    assert torch.equal(loaded["L0"].norms(), saved["L0"].norms())
    torch.testing.assert_close(loaded.scores(), saved.scores(), equal_nan=True)


def test_added_statistics_are_saved(tmp_path: Path) -> None:
    saved = record().add(record())
    saved.save(tmp_path / "r.foci")
    loaded = foci.Record.load(tmp_path / "r.foci")
    assert loaded.sequences == 2
    torch.testing.assert_close(loaded.scores(), saved.scores(), equal_nan=True)
    assert loaded.columns()["queries"] == saved.columns()["queries"]
    assert loaded.columns()["queries"][0] == 24


def test_tensors_shared_by_layers_are_saved_once(tmp_path: Path) -> None:
    record().save(tmp_path / "r.foci")
    with safe_open(tmp_path / "r.foci", framework="pt") as file:
        masks = [name for name in file.keys() if name.endswith("mask.entries")]  # noqa: SIM118
    assert masks == ["layers.0.weights.mask.entries"]


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    """A record file with something changed in its JSON or its tensors, the checksum made right again."""
    record().save(path)
    with safe_open(path, framework="pt") as file:
        written = json.loads(file.metadata()["foci"])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    change(written["content"]["dict"], tensors)
    written["checksum"] = checksum_tensors(tensors)
    save_file(tensors, path, metadata={"foci": json.dumps(written)})
    return path


def layer(number: int, **parts: Any) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
    return lambda content, _: content["layers"]["tuple"][number]["dict"].update(parts)


def tensor(name: str, new: torch.Tensor) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
    def change(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        assert name in tensors, sorted(tensors)
        tensors[name] = new

    return change


def labels(name: str, **parts: Any) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
    return lambda content, _: content["labels"]["dict"][name]["dict"].update(parts)


def plain(**parts: Any) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
    return lambda content, _: content.update(parts)


def test_a_file_without_notes_opens(tmp_path: Path) -> None:
    path = rewritten(tmp_path / "r.foci", lambda content, _: content.pop("notes"))
    assert foci.Record.load(path).notes == []


WRONG = {
    "no layers": (plain(layers=3), "layers must be a tuple"),
    "calls": (plain(calls=-1), "calls and sequences must be ints"),
    "unseen": (plain(unseen={"tuple": [1]}), "unseen must be strings"),
    "notes": (plain(notes={"tuple": [1]}), "notes must be strings"),
    "prompt": (plain(prompt="x"), "prompt must be an int"),
    "prompt of two lines": (plain(prompt="x\n\x1b[2Jy"), re.escape("got x↵␛[2Jy")),
    "keys without bytes": (
        tensor("layers.0.weights.k", torch.zeros(1, 1, 2**22, 0)),
        "must have at most 1,048,576 positions, heads and sequences in an empty tensor, got 4,194,304",
    ),
    "answer": (plain(answer=1), "answer must be a string"),
    "model": (plain(model=None), "model must be a string"),
    "another part": (plain(more=1), "the parts"),
    "added": (plain(added={"dict": {"L0": {"dict": {"fame": 1}}}}), "added totals must be"),
    "name": (layer(0, name=3), "name must be a string"),
    "same name": (layer(1, name="a"), "the names of layers must be unique"),
    "index": (layer(0, index=1.5), "index and kv_heads must be ints"),
    "heads": (layer(3, heads={"tuple": [1]}), "heads must have 2 numbers"),
    "rows": (layer(3, rows={"tuple": [1, 2]}), "rows must have 1 numbers"),
    "nothing behind": (layer(0, weights=None), "exactly one of weights, kept, matrix and steps"),
    "weights": (layer(0, weights={"dict": {}}), "the parts"),
    "key/value heads": (layer(0, kv_heads=9), "kv_heads must be from 1 to 4"),
    "kept shape": (
        tensor("layers.2.kept.entropy", torch.zeros(2, 4, 7)),
        r"entropy must be \(2, 4, 6\), got \(2, 4, 7\)",
    ),
    "kept size": (
        lambda content, _: content["layers"]["tuple"][2]["dict"].update(
            kept={"dict": {"shape": {"tuple": [1, 1, 2**60, 2**60]}}}
        ),
        "kept statistics must be entropy, received and others",
    ),
    "kept dtype": (tensor("layers.2.kept.top_keys", torch.zeros(2, 4, 6, 3)), "top_keys"),
    "top": (tensor("layers.2.kept.top_keys", torch.full((2, 4, 6, 3), 6)), "top_keys must be from -1 to 5"),
    "norms": (
        tensor("layers.0.value_norms", torch.zeros(2, 3, 6)),
        r"value_norms must be \(2, 2, 6\), got \(2, 3, 6\)",
    ),
    "places": (tensor("layers.3.query_places", torch.zeros(2)), r"query_places must be int64 \(1,\)"),
    "matrix": (tensor("layers.3.matrix", torch.zeros(2, 2, 1, 6, dtype=torch.int64)), "matrix must be a float tensor"),
    "texts": (labels("input", texts={"tuple": [{"tuple": [1]}]}), "texts must be strings by sequence and position"),
    "words": (labels("input", words={"tuple": [{"tuple": ["a"]}]}), "words must be ints or None"),
    "kind": (labels("input", kind="poems"), "kind must be one of"),
    "grid": (labels("source", grid={"tuple": [1]}), "grid must be a pair of ints"),
    "seconds": (labels("input", seconds=float("nan")), "seconds must be a finite number above 0, got nan"),
    "endless seconds": (labels("input", seconds=float("inf")), "seconds must be a finite number above 0, got inf"),
    "negative seconds": (labels("input", seconds=-0.5), "seconds must be a finite number above 0, got -0.5"),
    "no seconds": (labels("input", seconds=True), "seconds must be a finite number above 0, got True"),
    "stack that writes lines": (layer(2, stack="a\n\x1b[31mb"), re.escape(r"'a\n\x1b[31mb'")),
    "stack that turns lines": (layer(2, stack="a\u202eb"), "a stack name must be"),
    "endless stack": (layer(2, stack="a" * 65), "a stack name must be at most 64 printable characters"),
    "stack of another head": (layer(2, stack="L0H1.b"), "without a space, a dot or #"),
    "leading": (labels("source", leading=2), "must have 7 positions, got 6"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_inconsistent_file_is_refused(case: str, tmp_path: Path) -> None:
    change, message = WRONG[case]
    with pytest.raises(ValueError, match=f"r.foci is not a valid foci record: .*{message}"):
        foci.Record.load(rewritten(tmp_path / "r.foci", change))
    # The rewritten file without the change loads: it is the change that is refused.
    foci.Record.load(rewritten(tmp_path / "r.foci", lambda content, tensors: None))


def test_an_invalid_stack_name_is_not_saved(tmp_path: Path) -> None:
    saved = record()
    saved.layers["c"].stack = "a b"
    with pytest.raises(ValueError, match="without a space, a dot or #, got 'a b'"):
        saved.save(tmp_path / "r.foci")
    assert not list(tmp_path.iterdir())


def test_damage_anywhere_is_detected(tmp_path: Path) -> None:
    record().save(tmp_path / "whole.foci")
    content = (tmp_path / "whole.foci").read_bytes()
    (header,) = struct.unpack("<Q", content[:8])
    dice = random.Random(0)
    for _ in range(60):
        damaged = bytearray(content)
        place = dice.randrange(8 + header, len(content))
        damaged[place] ^= 1 << dice.randrange(8)
        (tmp_path / "r.foci").write_bytes(damaged)
        with pytest.raises(ValueError, match="the checksum of the tensors does not match"):
            foci.Record.load(tmp_path / "r.foci")
    for size in range(0, len(content), len(content) // 30):
        (tmp_path / "r.foci").write_bytes(content[:size])
        with pytest.raises(ValueError, match="is not a valid foci record"):
            foci.Record.load(tmp_path / "r.foci")


def test_a_damaged_header_raises_value_error(tmp_path: Path) -> None:
    record().save(tmp_path / "whole.foci")
    content = (tmp_path / "whole.foci").read_bytes()
    (header,) = struct.unpack("<Q", content[:8])
    dice, refused = random.Random(1), 0
    for _ in range(150):
        damaged = bytearray(content)
        damaged[8 + dice.randrange(header)] = dice.choice(b'0123456789"{}[],: truefalsn')
        (tmp_path / "r.foci").write_bytes(damaged)
        loaded = loaded_or_none(tmp_path / "r.foci")
        refused += loaded is None
        assert loaded is None or loaded.columns()
    assert refused > 20


def loaded_or_none(path: Path) -> foci.Record | None:
    try:
        return foci.Record.load(path)
    except ValueError as error:
        if "is not a valid foci record" not in str(error):
            raise
        return None


def test_other_files_are_refused(tmp_path: Path) -> None:
    record()["L0"].weights.save(tmp_path / "w.safetensors")  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"the format must be 'foci.record/1', got 'foci.weights/1'"):
        foci.Record.load(tmp_path / "w.safetensors")
    record().save(tmp_path / "r.foci")
    with pytest.raises(ValueError, match=r"the format must be 'foci.weights/1', got 'foci.record/1'"):
        foci.Weights.load(tmp_path / "r.foci")
    torch.save({"a": 1}, tmp_path / "pickle.foci")
    with pytest.raises(ValueError, match="is not a valid foci record"):
        foci.Record.load(tmp_path / "pickle.foci")
    with pytest.raises(FileNotFoundError):
        foci.Record.load(tmp_path / "none.foci")

"""Weights in a file: loading returns what was saved, and files of another format are refused."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from foci.masks.base import Mask
from foci.runtime import durable_files, safetensors_file
from foci.weights import parts_file
from tests import matrices
from tests.matrices import CASES, DTYPES, lazy

SAVED = [name for name in CASES if name != "mask_function"]


@pytest.mark.parametrize("case", SAVED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_saved_weights_are_loaded(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    weights = lazy(matrices.in_dtype(CASES[case](), dtype))
    weights.save(tmp_path / "w.safetensors")
    loaded = foci.Weights.load(tmp_path / "w.safetensors")
    assert loaded.shape == weights.shape
    assert repr(loaded) == repr(weights)
    assert torch.equal(loaded.dense(), weights.dense())
    assert torch.equal(loaded.lse, weights.lse)
    x = matrices.randn(weights.shape[-1], 2).to(dtype)
    assert torch.equal(loaded @ x, weights @ x)
    for name in ("entropy", "received", "distance", "largest_logit", "sink_mass"):
        assert torch.equal(getattr(loaded, name)(), getattr(weights, name)()), name


@pytest.mark.parametrize(
    "case", ["sink and bias, empty rows", "positions", "grouped heads", "deep", "relative", "cosine"]
)
def test_parts_and_means_are_loaded_too(case: str, tmp_path: Path) -> None:
    weights = lazy(CASES[case]())
    for part in (weights[1], weights[:, 1:4], weights[0, 1], weights.mean("heads"), weights[2:]):
        part.save(str(tmp_path / "part.safetensors"))
        loaded = foci.Weights.load(str(tmp_path / "part.safetensors"))
        assert repr(loaded) == repr(part)
        torch.testing.assert_close(loaded.dense(), part.dense(), atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(loaded.entropy(), part.entropy(), atol=1e-12, rtol=1e-12)
        assert torch.equal(loaded.top(3).keys, part.top(3).keys)


def test_heads_that_share_keys_are_remembered(tmp_path: Path) -> None:
    part = lazy(CASES["grouped heads"]())[:, 1:4]
    part.save(tmp_path / "part.safetensors")
    loaded = foci.Weights.load(tmp_path / "part.safetensors").received(per="kv_head")
    assert loaded.shape == (2, 2, 17)
    torch.testing.assert_close(loaded, part.received(per="kv_head"), atol=1e-12, rtol=1e-12)


def test_a_file_can_be_loaded_again_and_again(tmp_path: Path) -> None:
    first = lazy(CASES["joined, empty rows"]())
    first.save(tmp_path / "a.safetensors")
    foci.Weights.load(tmp_path / "a.safetensors").save(tmp_path / "b.safetensors")
    assert torch.equal(foci.Weights.load(tmp_path / "b.safetensors").dense(), first.dense())


def test_loaded_weights_do_not_depend_on_the_file(tmp_path: Path) -> None:
    weights = lazy(CASES["causal"]())
    weights.save(tmp_path / "w.safetensors")
    loaded = foci.Weights.load(tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").write_bytes(b"")
    assert torch.equal(loaded.dense(), weights.dense())


def test_gradients_are_not_saved(tmp_path: Path) -> None:
    arguments = matrices.qkv()
    arguments["query"].requires_grad_()
    weights = lazy(arguments)
    weights.save(tmp_path / "w.safetensors")
    assert not foci.Weights.load(tmp_path / "w.safetensors").entropy().requires_grad


@pytest.mark.parametrize(
    "mask", [foci.mask_function(matrices.odd), foci.causal & ~foci.mask_function(matrices.odd)], ids=repr
)
def test_code_is_not_saved(mask: Mask, tmp_path: Path) -> None:
    weights = lazy(matrices.qkv() | {"mask": mask})
    with pytest.raises(
        TypeError, match=r"mask_function\(odd\) cannot be saved, because a file holds no code: use foci's own"
    ):
        weights.save(tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_user_defined_mask_is_not_saved(tmp_path: Path) -> None:
    class Causal(type(foci.causal)):  # type: ignore[misc]
        """Has a known name, but is not the known kind."""

    weights = lazy(matrices.qkv() | {"mask": Causal()})
    with pytest.raises(TypeError, match="cannot be saved"):
        weights.save(tmp_path / "w.safetensors")


def test_a_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy(CASES["causal"]()).save(tmp_path / "w.safetensors")
    before = (tmp_path / "w.safetensors").read_bytes()

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        Path(path).write_bytes(b"half of it")
        raise OSError("no space left on device")

    monkeypatch.setattr(safetensors_file.import_safetensors(), "save_file", full)
    with pytest.raises(OSError, match="no space left"):
        lazy(CASES["plain"]()).save(tmp_path / "w.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]
    assert (tmp_path / "w.safetensors").read_bytes() == before


def test_a_file_without_read_permission_raises_permission_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for load in (foci.Weights.load, foci.Record.load, foci.nn.Encoder.load):
        with pytest.raises(OSError, match=r"Too many levels of symbolic links: '.*loop'"):
            load(tmp_path / "loop")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none must be an existing directory to save w"):
        lazy(CASES["causal"]()).save(tmp_path / "none" / "w.safetensors")


def test_encode_and_decode() -> None:
    thing = {"a": (1, 2.5, "x", None, True), "b": {"c": torch.arange(3)}, "d": foci.Dot(softcap=2), "e": -float("inf")}
    tensors: dict[str, Tensor] = {}
    again = parts_file.decode_part(parts_file.encode_part(thing, tensors, "", {}), tensors)
    assert list(tensors) == ["b.c"]
    assert again["a"] == thing["a"]
    assert torch.equal(again["b"]["c"], torch.arange(3))
    assert again["d"] == thing["d"]
    assert again["e"] == -float("inf")


REFUSED: dict[str, tuple[Any, str]] = {
    "an unknown kind": ({"kind": "MaskFunction", "fields": {}}, "kind must be one of Dot, .*, got 'MaskFunction'"),
    "a kind of another module": ({"kind": "os.system", "fields": {}}, "got 'os.system'"),
    "a missing tensor": ({"tensor": "gone"}, "a tensor of the file, .*, got {'tensor': 'gone'}"),
    "a list": ([1, 2], r"a known kind, got \[1, 2\]"),
    "an unknown form": ({"code": "print(1)"}, "a known kind, got {'code'"),
    "a missing field": (
        {"kind": "Window", "fields": {"left": 1}},
        r"Window must have the fields \['left', 'right'\], got \['left'\]",
    ),
    "a foreign field": (
        {"kind": "Prefix", "fields": {"length": 1, "x": 1}},
        r"Prefix must have the fields \['length'\], got",
    ),
    "a word for a number": ({"kind": "Prefix", "fields": {"length": "9"}}, "Prefix.length must be .*int.*, got str"),
    "a number for a tensor": (
        {"kind": "DenseMask", "fields": {"entries": 1}},
        "DenseMask.entries must be .*Tensor.*, got int",
    ),
    "a number out of range": ({"kind": "Prefix", "fields": {"length": -1}}, "length must be an int >= 0"),
    "a bias for a mask": (
        {"kind": "Complement", "fields": {"mask": {"kind": "ALiBi", "fields": {"slopes": None}}}},
        "Complement.mask must be .*Mask.*, got ALiBi",
    ),
    "an infinite scale": ({"kind": "Dot", "fields": {"scale": float("inf"), "softcap": None}}, "finite number or None"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unknown_parts_are_refused(case: str) -> None:
    content, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        parts_file.decode_part(content, {"there": torch.zeros(1)})


ONES, EMPTY = torch.ones(3), torch.zeros(0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": ONES, "z": EMPTY}, {"a": torch.zeros(3), "z": EMPTY}),
        ({"a": EMPTY}, {"b": EMPTY}),
        ({"a": torch.zeros(2, 0)}, {"a": torch.zeros(0, 2)}),
        ({"a": torch.zeros(2, 3)}, {"a": torch.zeros(3, 2)}),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.int32)}),
        ({"ab": ONES}, {"a": ONES}),
    ],
)
def test_every_change_of_the_tensors_changes_the_checksum(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert safetensors_file.checksum_tensors(one) != safetensors_file.checksum_tensors(other)


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    metadata = {name: f"ä \x01 {name}" for name in "badc"}
    for number in range(8):
        safetensors_file.write_tensors(tmp_path / f"{number}", {"ö": ONES, "empty": EMPTY}, metadata)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    with safetensors_file.open_safetensors(tmp_path / "0") as file:
        assert file.metadata() == metadata
        assert torch.equal(file.get_tensor("ö"), ONES)


def test_a_file_is_flushed_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[list[str]] = []

    def note(path: Path) -> None:
        flushed.append([path.name, *sorted(each.name for each in tmp_path.iterdir())])

    monkeypatch.setattr(durable_files, "fsync_path", note)
    safetensors_file.write_tensors(tmp_path / "w.safetensors", {"a": ONES})
    part = flushed[0][0]
    assert part.endswith(".part")
    assert flushed == [[part, part], [tmp_path.name, "w.safetensors"]]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(
        ImportError, match=r"^a weights file needs safetensors, which is not installed: pip install 'foci\[view\]'$"
    ):
        safetensors_file.import_safetensors()

"""Files that are damaged, foreign or hostile are refused when they are loaded, with what was expected and received."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import foci
from foci.runtime.safetensors_file import checksum_tensors
from tests.matrices import CASES, lazy

Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def rewritten(path: Path, case: str, change: Change) -> Path:
    """A file of weights with something changed in its JSON or its tensors."""
    lazy(CASES[case]()).save(path)
    with safe_open(path, framework="pt") as file:
        written = json.loads(file.metadata()["foci"])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    change(written["content"]["dict"], tensors)
    written["checksum"] = checksum_tensors(tensors)
    save_file(tensors, path, metadata={"foci": json.dumps(written)})
    return path


def set_part(name: str, value: Any) -> Change:
    return lambda parts, tensors: parts.__setitem__(name, value)


def set_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda parts, tensors: tensors.__setitem__(name, change(tensors[name]).contiguous())


def set_field(name: str, field: str, value: Any) -> Change:
    return lambda parts, tensors: parts[name]["fields"].__setitem__(field, value)


CAUSAL = {"kind": "Causal", "fields": {"offset": None}}
SINK, PADDED, PLACED, SHAW = "sink and bias, empty rows", "padding, empty rows", "positions", "relative"
WRONG: dict[str, tuple[str, Change, str]] = {
    "nothing changed by the test": ("plain", lambda parts, tensors: None, ""),
    "a part is missing": (
        "plain",
        lambda parts, tensors: parts.pop("score"),
        r"the parts must be \[.*'score'.*\], got",
    ),
    "a part too many": ("plain", set_part("code", "import os"), r"got \[.*'code'"),
    "no queries": ("plain", set_part("q", None), "q and k must be tensors, got NoneType and Tensor"),
    "queries of a word": ("plain", set_part("q", "abc"), "q and k must be tensors, got str and Tensor"),
    "whole queries": ("plain", set_tensor("q", Tensor.long), "one float dtype, got torch.int64 and torch.float64"),
    "two dtypes": ("plain", set_tensor("k", Tensor.float), "one float dtype, got torch.float64 and torch.float32"),
    "three axes": ("plain", set_tensor("q", lambda q: q[0]), r"must be \(B, H, Tq, D\) and .*, got \(4, 11, 6\)"),
    "another batch": ("plain", set_tensor("k", lambda k: k[:1]), r"got \(2, 4, 11, 6\) and \(1, 4, 17, 6\)"),
    "another width": ("plain", set_tensor("k", lambda k: k[..., :5]), "one width for Dot, got 6 and 5"),
    "heads that do not divide": ("plain", set_tensor("k", lambda k: k[:, :3]), "got 4 and 3"),
    "fewer queries": (
        "plain",
        set_tensor("q", lambda q: q[:, :, :9]),
        r"queries and keys must be \(9, 17\), got \(11, 17\)",
    ),
    "sizes of words": ("plain", set_part("sizes", {"tuple": ["a", 1, 2, 3]}), "batch and heads must be integers"),
    "three sizes": ("plain", set_part("sizes", {"tuple": [1, 2, 3]}), r"sizes must be a tuple of 4, got \(1, 2, 3\)"),
    "a float size": ("plain", set_part("sizes", {"tuple": [{"tuple": [2.0]}, 4, 11, 17]}), "must be integers"),
    "more sequences than there are": (
        "plain",
        set_part("sizes", {"tuple": [{"tuple": [3]}, 4, 11, 17]}),
        "the count without batch_ids must be 3, got 2",
    ),
    "no log-sum-exp": ("plain", set_part("lse", None), r"lse must be \(2, 4, 11\), got NoneType"),
    "a short log-sum-exp": (
        "plain",
        set_tensor("lse", lambda lse: lse[..., 1:]),
        r"lse must be \(2, 4, 11\), got \(2, 4, 10\)",
    ),
    "a narrow log-sum-exp": ("plain", set_tensor("lse", Tensor.float), "lse must be torch.float64, got torch.float32"),
    "batch axes of another size": (
        "plain",
        set_part("batch", {"tuple": [3]}),
        r"batch must be axes of 2 sequences, got \(3,\)",
    ),
    "negative batch axes": ("plain", set_part("batch", {"tuple": [-1, -2]}), r"got \(-1, -2\)"),
    "headed by a number": ("plain", set_part("headed", 1), r"must be bools, got \(1, False\)"),
    "no head axis for four heads": (
        "plain",
        set_part("headed", False),
        "the number of heads without a head axis must be 1, got 4",
    ),
    "an average with heads": ("plain", set_part("averaged", True), "averaged weights must be without a head axis"),
    "no group": ("plain", set_part("group", 0), "group must be 1 or more heads, got 0"),
    "a score that is a number": ("plain", set_part("score", 3), "score must be a Score, got 3"),
    "a mask for a score": ("plain", set_part("score", CAUSAL), "score must be a Score, got causal"),
    "an unknown score": (
        "plain",
        set_part("score", {"kind": "Evil", "fields": {}}),
        "kind must be one of .*, got 'Evil'",
    ),
    "a short score": (
        "additive",
        set_tensor("score.weight", lambda w: w[:, :5]),
        r"weight must be .*, got .* \(4, 5\)",
    ),
    "whole numbers in a score": (
        "general",
        set_tensor("score.matrix", Tensor.long),
        "matrix must be a float tensor",
    ),
    "a score for a mask": (
        "plain",
        set_part("mask", {"kind": "Dot", "fields": {"scale": 1.0, "softcap": None}}),
        "a Mask or",
    ),
    "a mask of numbers": (
        "bool row",
        set_tensor("mask.entries", Tensor.float),
        "a dense mask must be bool, got torch.float32",
    ),
    "a mask of another size": ("bool row", set_tensor("mask.entries", lambda m: m[..., :9]), "mask must broadcast to"),
    "lengths beyond the keys": (
        PADDED,
        set_tensor("mask.lengths", lambda n: n + 9),
        "must be from 0 to the 17 keys, got",
    ),
    "fractions of lengths": (
        PADDED,
        set_tensor("mask.lengths", Tensor.double),
        "the tensors of a mask must be integers, got torch.float64",
    ),
    "one length for two": (PADDED, set_tensor("mask.lengths", lambda n: n[:1]), "one entry per sequence"),
    "the middle side": (PADDED, set_field("mask", "side", "middle"), "side must be 'left' or 'right', got 'middle'"),
    "documents of another length": (
        "documents, empty rows",
        set_tensor("mask.query_ids", lambda ids: ids[:, :5]),
        "query_ids must have shape",
    ),
    "a mask for a bias": ("plain", set_part("bias", CAUSAL), "bias must be a Bias or None, got causal"),
    "a bias of another size": (SINK, set_tensor("bias.entries", lambda b: b[:, :3]), "bias must broadcast to"),
    "a bias of whole numbers": (
        SINK,
        set_tensor("bias.entries", Tensor.bool),
        "the tensors of a bias must be floats, got torch.bool",
    ),
    "an even table": (SHAW, set_tensor("bias.keys", lambda t: t[:, 1:]), r"2 clip \+ 1 rows, got .*\(4, 6, 6\)"),
    "slopes of other heads": (
        "one key head",
        set_tensor("bias.slopes", lambda s: s[:3]),
        r"slopes must be .* \(4,\), got",
    ),
    "a sink of other heads": (
        SINK,
        set_tensor("sink", lambda s: s[:3]),
        r"shape \(4,\), one logit per head, got .* \(3,\)",
    ),
    "a sink of words": (SINK, set_part("sink", "sink"), r"one logit per head, got str"),
    "a sink without heads": (
        "no heads",
        set_part("sink", {"tensor": "lse"}),
        "for a sink, which is per head, got",
    ),
    "one position": (PLACED, set_part("positions", {"tuple": [{"tensor": "positions.0"}]}), "positions must be a pair"),
    "fractions of positions": (
        PLACED,
        set_tensor("positions.0", Tensor.double),
        "query positions must be an int tensor",
    ),
    "positions of another length": (
        PLACED,
        set_tensor("positions.1", lambda p: p[:, :9]),
        "key positions must have shape",
    ),
    "ids beyond the batch": (
        "plain",
        lambda parts, tensors: (
            parts.__setitem__("batch_ids", {"tensor": "ids"}),
            tensors.__setitem__("ids", torch.tensor([0, 7])),
        ),
        r"batch_ids must be from 0 to 1, got \[0, 7\]",
    ),
    "heads that are fractions": (
        "plain",
        lambda parts, tensors: (
            parts.__setitem__("head_ids", {"tensor": "ids"}),
            tensors.__setitem__("ids", torch.ones(4)),
        ),
        r"head_ids must be int64 \(4,\), got torch.float32",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_whose_parts_do_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    call, change, message = WRONG[case]
    path = rewritten(tmp_path / "w.safetensors", call, change)
    if not message:
        assert foci.Weights.load(path).shape == (2, 4, 11, 17)
        return
    with pytest.raises(ValueError, match=f"w.safetensors is not a valid weights file: .*{message}"):
        foci.Weights.load(path)


def written(path: Path, content: Any, tensors: dict[str, Tensor] | None = None) -> Path:
    save_file(tensors or {"x": torch.zeros(1)}, path, metadata=content)
    return path


FOREIGN: dict[str, tuple[dict[str, str] | None, str]] = {
    "no metadata": (None, "the metadata must have an entry 'foci', got none"),
    "other metadata": ({"format": "pt"}, "the metadata must have an entry 'foci'"),
    "no JSON": ({"foci": "not json"}, "Expecting value"),
    "JSON of a number": ({"foci": "3"}, "the format must be 'foci.weights/1', got 3"),
    "another format": ({"foci": '{"format": "foci.weights/9"}'}, "'foci.weights/1', got 'foci.weights/9'"),
    "no content": ({"foci": '{"format": "foci.weights/1"}'}, "a dict of parts, got NoneType"),
    "content without end": ({"foci": "[" * 100_000}, "the header must have at most 200 levels of nested JSON"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_file_of_another_format_is_refused(case: str, tmp_path: Path) -> None:
    metadata, message = FOREIGN[case]
    with pytest.raises(ValueError, match=f"w.safetensors is not a valid weights file: .*{message}"):
        foci.Weights.load(written(tmp_path / "w.safetensors", metadata))


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04 a zip", b"\x80\x04K\x01.", struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 2) + b"{}"],
    ids=["empty", "zip", "pickle", "a header without end", "no tensors"],
)
def test_bytes_that_are_not_safetensors_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"w\.safetensors is not a valid weights file"):
        foci.Weights.load(tmp_path / "w.safetensors")


def test_a_cut_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    lazy(CASES[SINK]()).save(tmp_path / "whole.safetensors")
    content = (tmp_path / "whole.safetensors").read_bytes()
    for size in {*range(0, len(content), len(content) // 40), len(content) - 1}:
        (tmp_path / "w.safetensors").write_bytes(content[:size])
        with pytest.raises(ValueError, match="is not a valid weights file"):
            foci.Weights.load(tmp_path / "w.safetensors")


def test_a_damaged_header_is_refused_or_still_valid(tmp_path: Path) -> None:
    """Bytes of the header are changed at random: no other error, no crash, and what is loaded can be asked."""
    weights = lazy(CASES["joined, empty rows"]())
    weights.save(tmp_path / "whole.safetensors")
    content = bytearray((tmp_path / "whole.safetensors").read_bytes())
    (header,) = struct.unpack("<Q", content[:8])
    dice = random.Random(0)
    for _ in range(200):
        damaged = bytearray(content)
        damaged[8 + dice.randrange(header)] = dice.choice(b'0123456789"{}[],: truefalsn')
        (tmp_path / "w.safetensors").write_bytes(damaged)
        loaded = loaded_or_none(tmp_path / "w.safetensors")
        assert loaded is None or loaded.summary().entropy.shape == loaded.shape[:-1]


def loaded_or_none(path: Path) -> foci.Weights | None:
    try:
        return foci.Weights.load(path)
    except ValueError as error:
        if "is not a valid weights file" not in str(error):
            raise
        return None


def test_missing_files_and_directories_raise_os_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none"):
        foci.Weights.load(tmp_path / "none")
    with pytest.raises(OSError, match=r"device|directory"):
        foci.Weights.load(tmp_path)


def test_deeply_nested_masks_are_refused(tmp_path: Path) -> None:
    levels = 100
    path = rewritten(tmp_path / "w.safetensors", "plain", set_part("mask", "HERE"))
    with safe_open(path, framework="pt") as file:
        text = file.metadata()["foci"]
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    nested = '{"kind": "Complement", "fields": {"mask": ' * levels + json.dumps(CAUSAL) + "}}" * levels
    save_file(tensors, path, metadata={"foci": text.replace('"HERE"', nested)})
    with pytest.raises(ValueError, match="the header must have at most 200 levels of nested JSON, got more"):
        foci.Weights.load(path)


def test_sizes_beyond_the_tensors_are_refused(tmp_path: Path) -> None:
    """A small file cannot make its reader allocate a large matrix."""
    path = rewritten(tmp_path / "w.safetensors", "plain", set_part("sizes", {"tuple": [{"tuple": [2**40]}, 4, 11, 17]}))
    with pytest.raises(ValueError, match=r"the count without batch_ids must be .*, got 2"):
        foci.Weights.load(path)
    assert path.stat().st_size < 100_000

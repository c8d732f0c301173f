"""Model files: round trips, and refusal of damaged and foreign files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import foci
from foci.nn import Decoder, Encoder, EncoderDecoder, Model
from foci.runtime.safetensors_file import write_with_header

TOKENS = torch.arange(10).reshape(2, 5)


def small(**changes: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder.from_name("tiny", vocabulary=20, width=16, heads=2, **changes).eval()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def parts(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safetensors.safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["foci"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def rewrite(path: Path, **changes: Any) -> None:
    """Rewrite the file with another header."""
    header, tensors = parts(path)
    safetensors.torch.save_file(tensors, path, metadata={"foci": json.dumps(header | changes)})


@pytest.mark.parametrize("head", ["tied", "linear", None])
@pytest.mark.parametrize("bias", [None, "buckets", "relative"])
def test_a_saved_model_round_trips(path: Path, head: str | None, bias: str | None) -> None:
    model = small(head=head, bias=bias, score="cosine")
    model.save(path)
    again = Decoder.load(path)
    assert again.config == model.config
    assert torch.equal(again(TOKENS).states, model(TOKENS).states)
    assert not again.training
    assert list(path.parent.iterdir()) == [path]


def test_shared_tensors_are_saved_once_and_stay_shared(path: Path) -> None:
    config = EncoderDecoder.sizes["tiny"].replace(vocabulary=20, shared=True, bias="buckets")
    model = EncoderDecoder(config).eval()
    model.save(path)
    _, tensors = parts(path)
    assert len(tensors) == len(list(model.parameters()))
    again = EncoderDecoder.load(path)
    assert again.encoder.embedding.tokens is again.decoder.embedding.tokens
    assert again.encoder.blocks[0].attention.bias is again.encoder.blocks[1].attention.bias
    assert torch.equal(again(TOKENS, TOKENS).logits, model(TOKENS, TOKENS).logits)


def test_the_dtype_is_kept(path: Path) -> None:
    small().bfloat16().save(path)
    assert {parameter.dtype for parameter in Decoder.load(path).parameters()} == {torch.bfloat16}


def test_the_base_class_loads_any_model_and_a_subclass_only_its_own(path: Path) -> None:
    small().save(path)
    assert isinstance(Model.load(path), Decoder)
    with pytest.raises(ValueError, match="must be of class Encoder, got 'Decoder'"):
        Encoder.load(path)


def test_a_loaded_model_does_not_depend_on_its_file(path: Path) -> None:
    model = small()
    model.save(path)
    again = Decoder.load(path)
    path.write_bytes(b"")
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_saving_is_atomic(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small().save(path)
    before = path.read_bytes()

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(safetensors.torch, "save_file", fails)
    with pytest.raises(OSError, match="no space"):
        small(layers=1).save(path)
    assert path.read_bytes() == before
    with pytest.raises(FileNotFoundError, match="must be an existing directory"):
        small().save(path.parent / "missing" / "model.safetensors")


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, 0.99])
def test_a_truncated_file_is_refused(path: Path, kept: float) -> None:
    small().save(path)
    content = path.read_bytes()
    path.write_bytes(content[: kept if isinstance(kept, int) else int(len(content) * kept)])
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        Decoder.load(path)


def test_a_damaged_tensor_is_refused(path: Path) -> None:
    small().save(path)
    content = bytearray(path.read_bytes())
    content[-5] ^= 16
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged: its tensors do not match the saved checksum"):
        Decoder.load(path)


def test_foreign_files_are_refused(path: Path) -> None:
    path.write_text("a text")
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        Model.load(path)
    torch.save({"x": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        Model.load(path)
    safetensors.torch.save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=r"must be a foci model of format 'foci\.model/1', got 'no foci header'"):
        Model.load(path)
    safetensors.torch.save_file({"x": torch.zeros(2)}, path, metadata={"foci": '{"format": "foci.weights/1"}'})
    with pytest.raises(ValueError, match=r"got 'foci\.weights/1'"):
        Model.load(path)
    safetensors.torch.save_file({"x": torch.zeros(2)}, path, metadata={"foci": "{"})
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        Model.load(path)
    with pytest.raises(FileNotFoundError):
        Model.load(path.parent / "missing")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "Module"}, "must be of class Model, got 'Module'"),
        ({"kind": None}, "must be of class Model, got None"),
        ({"config": {"width": 16}}, "tensor names must match the model, got missing"),
        ({"config": {"size": 16}}, "fields of TransformerConfig must be among"),
        ({"config": {"width": "big"}}, "TransformerConfig.width must be an integer, got 'big'"),
        ({"config": 3}, "TransformerConfig must be a table of fields, got 3"),
        ({"kind": "Model"}, "must be of class Model, got 'Model'"),
        ({"kind": ["Decoder"]}, r"must be of class Model, got \['Decoder'\]"),
        ({"config": {"layers": 10**9}}, "TransformerConfig.layers must be between 0 and 1024, got 1000000000"),
        ({"config": {"width": 2**22}}, "TransformerConfig.width must be between 1 and 65536, got 4194304"),
        ({"config": {"eps": float("nan")}}, "TransformerConfig.eps must be between 0 and 1, got nan"),
    ],
)
def test_invalid_headers_are_refused(path: Path, changes: dict[str, Any], message: str) -> None:
    small().save(path)
    rewrite(path, **changes)
    with pytest.raises(ValueError, match=f"cannot be loaded: .*{message}"):
        Model.load(path)


def test_a_header_without_a_config_is_refused(path: Path) -> None:
    small().save(path)
    header, tensors = parts(path)
    del header["config"]
    safetensors.torch.save_file(tensors, path, metadata={"foci": json.dumps(header)})
    with pytest.raises(ValueError, match="cannot be loaded: it has no 'config'"):
        Model.load(path)


def test_a_tensor_of_another_shape_is_refused(path: Path) -> None:
    model = small()
    model.save(path)
    header, _ = parts(path)
    rewrite(path, config=header["config"] | {"vocabulary": 21})
    with pytest.raises(ValueError, match=r"embedding.tokens.weight must have shape \(21, 16\), got \(20, 16\)"):
        Model.load(path)


def save_changed(path: Path, name: str, change: Callable[[Tensor], Tensor], **config: Any) -> None:
    """Save a small model in which one tensor and some fields of the config are replaced, with a valid checksum."""
    small(positions="sinusoidal").save(path)
    header, tensors = parts(path)
    tensors[name] = change(tensors[name]).contiguous()
    write_with_header(path, tensors, header | {"config": header["config"] | config})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: tensor.long(), "tensor embedding.tokens.weight must hold floats, got torch.int64"),
        (lambda tensor: tensor.bool(), "tensor embedding.tokens.weight must hold floats, got torch.bool"),
        (lambda tensor: tensor.to(torch.complex64), "must hold floats, got torch.complex64"),
        (lambda tensor: tensor.to(torch.float8_e5m2), "must hold floats, got torch.float8_e5m2"),
        (lambda tensor: tensor.fill_(torch.nan), "must hold finite numbers, got NaN or infinity"),
        (lambda tensor: tensor.index_fill(1, torch.tensor([3]), -torch.inf), "must hold finite numbers"),
        (lambda tensor: tensor[:, :0], r"must have shape \(20, 16\), got \(20, 0\)"),
    ],
)
def test_tensors_that_are_not_finite_floats_are_refused(path: Path, change: Any, message: str) -> None:
    save_changed(path, "embedding.tokens.weight", change)
    with pytest.raises(ValueError, match=message):
        Decoder.load(path)


def test_a_config_is_compared_with_the_tensors_before_anything_is_built(path: Path) -> None:
    sizes = {"width": 2**16, "hidden": 2**16, "layers": 64, "vocabulary": 2**24, "max_length": 2**24}
    save_changed(path, "embedding.tokens.weight", torch.clone, **sizes)
    # Built on a CPU it would take terabytes.
    with pytest.raises(ValueError, match="tensor names must match the model"):
        Decoder.load(path)
    save_changed(path, "embedding.tokens.weight", torch.clone, max_length=2**24)
    with pytest.raises(
        ValueError, match="the position tables of the config must have at most 268,435,456 bytes, got 1,0"
    ):
        Decoder.load(path)


def test_a_header_with_deep_nesting_is_refused(path: Path) -> None:
    small().save(path)
    _, tensors = parts(path)
    for depth in (300, 100_000):
        safetensors.torch.save_file(tensors, path, metadata={"foci": "[" * depth + "]" * depth})
        for load in (Model.load, foci.load):
            with pytest.raises(ValueError, match="the header must have at most 200 levels of nested JSON, got more"):
                load(path)


def test_loading_does_not_change_the_random_state(path: Path) -> None:
    small().save(path)
    before = torch.get_rng_state()
    Model.load(path)
    assert torch.equal(torch.get_rng_state(), before)


def test_named_sizes() -> None:
    with pytest.raises(ValueError, match=r"name must be a size of Decoder .tiny, small, base., got 'huge'"):
        Decoder.from_name("huge")
    with pytest.raises(ValueError, match="got colour"):
        Encoder.from_name("tiny", colour=3)
    for kind in (Encoder, Decoder, EncoderDecoder):
        assert list(kind.sizes) == ["tiny", "small", "base"]
        assert kind.from_name("tiny").config == kind.sizes["tiny"]


def test_parameter_counts_of_published_models() -> None:
    with torch.device("meta"):
        gpt = Decoder.from_name("base", vocabulary=50257)
        both = EncoderDecoder.from_name("base", vocabulary=37000, shared=True)
    assert sum(parameter.numel() for parameter in gpt.parameters()) == 124_439_808
    assert 62e6 < sum(parameter.numel() for parameter in both.parameters()) < 64e6

"""foci.load opens weights, records and models by what the file is."""

from pathlib import Path

import pytest
import torch

import foci
from foci.models import MODELS_DIRECTORY
from foci.models.pretrained import Pretrained


def attended() -> tuple[torch.Tensor, foci.Weights]:
    q = torch.randn(1, 2, 5, 4)
    out, weights = foci.attention(q, q, q, mask=foci.causal, return_weights=True)
    return out, weights


def test_weights_are_loaded(tmp_path: Path) -> None:
    _, weights = attended()
    weights.save(tmp_path / "weights.safetensors")
    loaded = foci.load(tmp_path / "weights.safetensors")
    assert isinstance(loaded, foci.Weights)
    assert torch.equal(loaded.dense(), weights.dense())


def test_records_are_loaded_whatever_the_name_of_the_file(tmp_path: Path) -> None:
    record = foci.Record.from_tensors([attended()[1].dense()], tokens=list("abcde"))
    record.save(tmp_path / "a.foci")
    (tmp_path / "a.foci").rename(tmp_path / "renamed.bin")
    loaded = foci.load(str(tmp_path / "renamed.bin"))
    assert isinstance(loaded, foci.Record)
    assert list(loaded.layers) == list(record.layers)


def test_a_model_without_a_task_is_loaded_as_a_module(tmp_path: Path) -> None:
    model = foci.nn.Decoder.from_name("tiny", vocabulary=10)
    model.save(tmp_path / "model.safetensors")
    loaded = foci.load(tmp_path / "model.safetensors")
    assert isinstance(loaded, foci.nn.Decoder)
    assert not loaded.training


@pytest.mark.parametrize("name", ["translation", "translation/model-1-of-1.safetensors"])
def test_a_trained_model_is_loaded_with_its_task(name: str) -> None:
    loaded = foci.load(MODELS_DIRECTORY / name)
    assert isinstance(loaded, Pretrained)
    assert loaded.task.name == "translation"


def test_anything_else_is_refused_with_what_is_accepted(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "empty.foci").touch()
    save_file({"x": torch.ones(1)}, tmp_path / "plain.safetensors")
    save_file(
        {"x": torch.ones(1)}, tmp_path / "other.safetensors", metadata={"foci": '{"format": "foci.checkpoint/1"}'}
    )
    for name, reason in (
        ("empty", "a directory without a model"),
        ("text.txt", r"which is none of these \(the file is damaged or of another kind\)"),
        ("empty.foci", r"which is none of these \(the file is empty\)"),
        ("plain.safetensors", "which is none of these"),
        ("other.safetensors", "of format 'foci.checkpoint/1'"),
    ):
        with pytest.raises(ValueError, match=rf"^path must be a file of Weights, a Record .*{name}, {reason}$"):
            foci.load(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"^path must be a file of Weights, .*nothing, which does not exist$"):
        foci.load(tmp_path / "nothing")

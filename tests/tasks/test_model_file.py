import sys
from pathlib import Path

import pytest
import torch

from foci.nn import Model
from foci.tasks import TASKS, find_task
from foci.tasks.model_file import load_trained_model, save_trained_model
from foci.tasks.parallel_text import Pair
from foci.tasks.translation import Translation, TranslationSettings


@pytest.fixture
def task() -> Translation:
    return Translation.from_examples(TranslationSettings(size="tiny", width=32, heads=2), [Pair("a b ä", "c d")])


@pytest.mark.parametrize(("storage", "error"), [("float32", 0.0), ("bfloat16", 2**-8), ("int8", 2**-7)])
def test_a_model_round_trips_with_its_task(task: Translation, storage: str, error: float, tmp_path: Path) -> None:
    model = task.model().eval()
    (path,) = save_trained_model(tmp_path / "model.safetensors", task, model, {"score": 1}, storage=storage)  # type: ignore[arg-type]
    found = load_trained_model(tmp_path)
    assert found.about == {"score": 1}
    assert found.task.settings == task.settings
    assert found.task.tokenizer.encode("a b ä") == task.tokenizer.encode("a b ä")
    for (name, own), (_, other) in zip(model.named_parameters(), found.model.named_parameters(), strict=True):
        assert other.dtype == torch.float32
        assert (own - other).abs().max() <= error * own.abs().max(), name
    assert path.stat().st_size < {"float32": 5.0, "bfloat16": 3.0, "int8": 2.0}[storage] * sum(
        p.numel() for p in model.parameters()
    )


def test_large_models_are_split_into_parts(task: Translation, tmp_path: Path) -> None:
    model = task.model().eval()
    paths = save_trained_model(tmp_path / "model.safetensors", task, model, max_bytes=40_000)
    assert len(paths) > 2
    assert paths[0].name == f"model-1-of-{len(paths)}.safetensors"
    assert all(path.stat().st_size < 50_000 for path in paths)
    for own, other in zip(model.parameters(), load_trained_model(tmp_path).model.parameters(), strict=True):
        assert torch.equal(own, other)
    paths[1].unlink()
    with pytest.raises(ValueError, match="the parts must be 1 to"):
        load_trained_model(tmp_path)


def test_a_whole_file_is_also_a_model_file(task: Translation, tmp_path: Path) -> None:
    model = task.model()
    save_trained_model(tmp_path / "model.safetensors", task, model)
    assert Model.load(tmp_path / "model.safetensors").config == model.config


def test_a_damaged_or_foreign_file_is_refused(task: Translation, tmp_path: Path) -> None:
    (path,) = save_trained_model(tmp_path / "model.safetensors", task, task.model())
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="must be a foci model: its header does not match its tensors"):
        load_trained_model(path)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="must be an intact safetensors file"):
        load_trained_model(path)
    with pytest.raises(ValueError, match=r"must be a model file, or a directory with model\.safetensors, got neither"):
        load_trained_model(tmp_path / "nothing")
    task.model().save(path)
    with pytest.raises(ValueError, match="must be a model trained for a task, got one without a task"):
        load_trained_model(path)


def test_a_vocabulary_that_does_not_match_is_refused(task: Translation, tmp_path: Path) -> None:
    other = Translation.from_examples(task.settings.replace(tokenizer="words"), [Pair("a", "b")])
    (path,) = save_trained_model(tmp_path / "model.safetensors", other, task.model())
    with pytest.raises(ValueError, match=r"the model has a vocabulary of \d+ tokens, but its tokenizer has \d+"):
        load_trained_model(path)


def test_tasks_are_found_by_name() -> None:
    assert find_task("translation") is Translation
    for name in TASKS:
        kind = find_task(name)
        assert kind.name == name
        assert kind.better in {"higher", "lower"}
        kind.settings_type()
    with pytest.raises(ValueError, match=r"task must be one of translation, .*, got 'flying'"):
        find_task("flying")


def test_a_missing_package_is_not_reported_as_a_damaged_file(
    task: Translation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = save_trained_model(tmp_path / "model.safetensors", task, task.model())
    for package in ("tokenizers", "safetensors"):
        monkeypatch.setitem(sys.modules, package, None)
        for read in (load_trained_model, Model.load) if package == "safetensors" else (load_trained_model,):
            with pytest.raises(
                ImportError, match=rf"needs? {package}, which is not installed: pip install 'foci\[tasks\]'$"
            ):
                read(path)

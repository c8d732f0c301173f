import json
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from foci.nn import Model
from foci.runtime.safetensors_file import checksum_tensors, write_tensors
from foci.tasks import TASKS, find_task
from foci.tasks.model_file import load_trained_model, save_trained_model
from foci.tasks.parallel_text import Pair
from foci.tasks.sentiment import Sentiment
from foci.tasks.speech import Speech
from foci.tasks.translation import Translation, TranslationSettings
from foci.tasks.vision import Vision

CLASSES = '{"labels": ["a", "b"], "mean": [0.5, 0.0, 0.0], "std": [1.0, 1.0, 1.0]}'
WORDS = '{"kind": "words", "listed": ["one"]}'


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
    with pytest.raises(ValueError, match=r"the sizes of the model must be .* 6\} for its task, got .* \d+\}"):
        load_trained_model(path)


def change_file(path: Path, header: Any = None, task: Any = None, tensors: Any = None) -> None:
    """Rewrites a model file with parts replaced by functions of them, and a valid checksum."""
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = {name: json.loads(text) for name, text in file.metadata().items()}
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    stored = tensors(stored) if tensors else stored
    new = metadata["foci"] | {"checksum": checksum_tensors(stored)}
    new |= header or {}
    described = task(metadata["task"]) if callable(task) else metadata["task"] | (task or {})
    write_tensors(path, stored, {"foci": json.dumps(new), "task": json.dumps(described)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"header": {"parts": 4294967296}}, "the parts must be 1 to 4294967296, got 1"),
        ({"header": {"parts": 717289528}}, "the parts must be 1 to 717289528, got 1"),
        ({"header": {"parts": -1}}, "the parts must be 1 to -1, got 1"),
        ({"header": {"part": "one"}}, "the parts must be 1 to 1, got 'one'"),
        ({"header": {"kind": "Model"}}, "must be of class Model, got 'Model'"),
        ({"header": {"kind": {}}}, "must be of class Model, got {}"),
        ({"task": {"name": "flying"}}, "task must be one of translation, .*, got 'flying'"),
        ({"task": {"name": ["translation"]}}, "cannot be loaded: "),
        ({"task": {"settings": {"max_length": 10**18}}}, "task.max_length must be between 1 and 1048576, got 1000"),
        ({"task": {"settings": {"beam": 10**18}}}, "task.beam must be between 1 and 1000, got 1000"),
        ({"task": {"settings": {"model": "rnn", "size": "tiny"}}}, "of class Seq2SeqRNN, got EncoderDecoder"),
        ({"task": {"settings": 3}}, "TranslationSettings must be a table of fields, got 3"),
        ({"task": {"files": {}}}, "it has no 'tokenizer.json'"),
        ({"task": {"files": ["tokenizer.json"]}}, "the files of the task must be texts by name, got"),
        ({"task": {"files": {"tokenizer.json": 3}}}, "the files of the task must be texts by name, got"),
        ({"task": {"files": {"tokenizer.json": "{"}}}, "the tokenizer must be valid JSON"),
        ({"task": {"about": "a text"}}, "about must be a table, got 'a text'"),
        ({"task": lambda _: [1, 2]}, r"the header of .* must be a JSON object, got \[1, 2\]"),
        ({"task": {"name": "vision"}}, "fields of VisionSettings must be among"),
    ],
)
def test_a_damaged_description_is_refused(
    task: Translation, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    (path,) = save_trained_model(tmp_path / "model.safetensors", task, task.model())
    change_file(path, **change)
    with pytest.raises(ValueError, match=message) as error:
        load_trained_model(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda scale: scale.double()[:-1],
        lambda scale: scale.long(),
        lambda scale: scale[None],
        lambda scale: scale * torch.nan,
        lambda scale: torch.zeros(()),
    ],
)
def test_a_damaged_scale_is_refused(task: Translation, tmp_path: Path, change: Any) -> None:
    (path,) = save_trained_model(tmp_path / "model.safetensors", task, task.model(), storage="int8")
    name = "encoder.embedding.tokens.weight"
    change_file(path, tensors=lambda stored: stored | {f"{name}.scale": change(stored[f"{name}.scale"]).contiguous()})
    with pytest.raises(
        ValueError, match=f"{name}.scale must have a finite float for each row of the int8 tensor {name}"
    ):
        load_trained_model(path)


def test_nan_weights_are_refused(task: Translation, tmp_path: Path) -> None:
    (path,) = save_trained_model(tmp_path / "model.safetensors", task, task.model())
    change_file(path, tensors=lambda stored: {name: tensor * torch.nan for name, tensor in stored.items()})
    with pytest.raises(ValueError, match="must hold finite numbers, got NaN or infinity"):
        load_trained_model(path)


@pytest.mark.parametrize(
    ("kind", "files", "message"),
    [
        (Vision, {"classes.json": "[1]"}, r"classes.json must be an object with labels, mean, std, got \[1\]"),
        (Vision, {"classes.json": '{"labels": ["a"], "mean": [0.0, 0.0, 0.0]}'}, "must be an object with labels"),
        (Vision, {"classes.json": CLASSES.replace('"a"', "3")}, "the class names must be a list of texts"),
        (Vision, {"classes.json": CLASSES.replace('"a"', '"b"')}, "the class names must be different"),
        (Vision, {"classes.json": CLASSES.replace("1.0", "0.0")}, "std must be a list of finite numbers above 0.0"),
        (Vision, {"classes.json": CLASSES.replace("1.0", "NaN")}, "std must be a list of finite numbers above 0.0"),
        (Vision, {"classes.json": CLASSES.replace("0.5", '"x"')}, "mean must be a list of finite numbers"),
        (Vision, {"classes.json": CLASSES.replace("0.5,", "")}, "mean and std must have 3 numbers, got 2 and 3"),
        (Sentiment, {"tokenizer.json": WORDS, "labels.json": "{}"}, "the class names must be a list of texts"),
        (Sentiment, {"tokenizer.json": WORDS, "labels.json": "[]"}, "the class names must be a list of texts"),
        (
            Speech,
            {"tokenizer.json": WORDS, "frames.json": '{"std": [0]}'},
            "std must be a list of finite numbers above",
        ),
        (Speech, {"tokenizer.json": WORDS, "frames.json": '{"std": 1e400}'}, "std must be a list of finite numbers"),
        (Speech, {"tokenizer.json": WORDS, "frames.json": "[" * 9999}, "frames.json must have at most 200 levels"),
    ],
)
def test_damaged_files_of_a_task_are_refused(kind: Any, files: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind.from_learned_state(kind.settings_type(), files)


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

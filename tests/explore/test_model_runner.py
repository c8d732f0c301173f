"""Model names that are accepted, and errors for those that are not."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import foci
from foci.capture import model_loading
from foci.cli import main
from foci.explore import model_runner
from foci.explore.jobs import Job
from foci.explore.model_runner import ModelRunner, decode_image
from foci.explore.server import serve

transformers = pytest.importorskip("transformers")
huggingface_hub = pytest.importorskip("huggingface_hub")


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained image model."""
    folder = tmp_path_factory.mktemp("vision")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=16, **sizes)).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", f"or a pretrained model ({', '.join(model_loading.list_pretrained_by_input())}), got an empty name"),
        ("~/nowhere", "nowhere: no such path"),
        ("/" + "x" * 300, "x: no such path"),
        ("a b", "Repo id must use alphanumeric chars"),
        ("../../../no/such", "no such path"),
        ("nul\0", "Repo id must use"),
    ],
)
def test_an_invalid_model_name_is_refused(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^model must be the folder ") as refused:
        ModelRunner().record_text(name, "x", Job())
    assert said in str(refused.value)


def test_home_directories_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert model_loading.locate_model("~/model") == str(tmp_path / "model")


def test_an_unknown_name_is_refused_after_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def model_info(_self: object, name: str, timeout: float) -> None:
        asked.append((name, timeout))
        raise ConnectionError("no such host")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    for ask in (
        lambda: ModelRunner().record_text("no/such", "x", Job()),
        lambda: model_runner.load_image_model("no/such", "cpu"),
    ):
        with pytest.raises(ValueError, match=r"got 'no/such': it is not on this machine, and .* \(no such host\)$"):
            ask()
    assert asked == [("no/such", model_loading.HUB_TIMEOUT)] * 2


def test_remote_code_is_not_run(vision: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "strange"
    shutil.copytree(vision, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "code.C", "AutoModel": "code.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for load in (
        lambda: model_loading.load_text_model(str(folder)),
        lambda: model_runner.load_image_model(str(folder), "cpu"),
    ):
        with pytest.raises(ValueError, match="contains custom code"):
            load()
    assert not (tmp_path / "ran").exists()


def test_an_image_model_does_not_take_texts(vision: Path) -> None:
    with pytest.raises(ValueError, match=r"^model must be a model that reads text, got "):
        ModelRunner().record_text(str(vision), "x", Job())


def test_a_damaged_model_gives_a_one_line_error(vision: Path, tmp_path: Path) -> None:
    shutil.copytree(vision, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"^model must be a model that takes images, got [^\n]+$"):
        model_runner.load_image_model(str(tmp_path), "cpu")


def test_a_model_with_another_input_kind_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("PIL").Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    runner, image = ModelRunner(), (tmp_path / "x.png").read_bytes()
    with pytest.raises(
        ValueError,
        match=r"^model must take texts, as translation does, got a model for speech, which takes sounds$",
    ):
        runner.record_text("speech", "Jane is hungry.", Job())
    with pytest.raises(
        ValueError,
        match=r"^model must take images, as vision does, got a model for translation, which takes texts$",
    ):
        runner.record_image("translation", image, Job())
    with pytest.raises(ValueError, match=r"^the file must be a WAV, FLAC or OGG file, got a text file$"):
        runner.record_sound("speech", b"nonsense", Job())
    with pytest.raises(ValueError, match=r"such as speech, got 'untrained vectors'$"):
        runner.record_sound(model_runner.UNTRAINED, b"", Job())


def test_an_invalid_image_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^image must be a file that Pillow can read, got another file$"):
        decode_image(b"nonsense")


def test_pretrained_models_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vision", "generation"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    monkeypatch.setattr("foci.models.MODELS_DIRECTORY", tmp_path)
    assert model_loading.list_pretrained_by_input() == ["generation", "vision"]
    assert model_loading.locate_model(None) == model_loading.locate_model("generation") == str(tmp_path / "generation")
    assert model_loading.locate_model("vision") == str(tmp_path / "vision")


def test_an_unknown_model_is_not_served() -> None:
    with pytest.raises(ValueError, match=r"got \./none: no such path"):
        serve(["./none"], browse=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="gpu: there is one here")
def test_a_missing_gpu_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["look", "x", "--model", "y", "--device", "cuda"]) == 2
    assert main.main(["explore", "--device", "cuda", "--no-browser"]) == 2
    said = "device must be 'cpu' or 'auto' where PyTorch finds no GPU, got 'cuda'"
    assert capsys.readouterr().err == f"foci look: {said}\nfoci explore: {said}\n"


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("x.xyz", "--out must end with .foci, .html, .png, .svg, .pdf, .jpg or .webp, got x.xyz"),
        ("nowhere/x.html", "--out must be in an existing directory, got nowhere/x.html: nowhere does not exist"),
    ],
)
def test_an_unwritable_file_is_refused_before_the_model_runs(
    out: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main(["look", "x", "--model", "./none", "--out", out]) == 2
    assert capsys.readouterr().err == f"foci look: {said}\n"


@pytest.mark.skipif(
    "translation" not in model_loading.list_pretrained_by_input(), reason="the translation model does not ship"
)
def test_a_truncated_text_is_noted() -> None:
    long = "The cat sat on the mat. " * 30
    notes = ModelRunner().record_text("translation", long, Job()).notes
    assert re.fullmatch(r"the text is cut: the model reads the first \d+ of \d+ tokens", notes[0])
    assert foci.look(long, "translation", device="cpu").notes == notes
    assert ModelRunner().record_text("translation", "A man sleeps.", Job()).notes == []

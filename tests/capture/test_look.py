"""`foci look` with Hugging Face models and foci models, from a folder to the terminal."""

import json
import re
import shutil
import sys
import wave
from pathlib import Path
from typing import Any

import pytest
import torch

import foci
from foci import models
from foci.capture.look import look, read_input
from foci.capture.model_loading import (
    auto_class_of,
    check_path_exists,
    find_model_for,
    ignore_message,
    is_foci_model,
    load_huggingface_config,
    load_text_model,
)
from foci.cli import main
from foci.tasks.generation import Generation, GenerationSettings, Passage
from foci.tasks.model_file import save_trained_model

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

TEXT = "Jane is hungry, Jane sleeps"
WORDS = ["<pad>", "<s>", "</s>", "<unk>", "Jane", "is", "hungry", ",", "sleeps"]
NO_MODEL = (
    "model must be given, because no pretrained model that reads text is installed, got None: choose one with --model;"
    ' foci explain "..." shows attention without a model'
)
SMALL = {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tokenizer(longest: int = 32) -> transformers.PreTrainedTokenizerFast:
    """A word-level tokenizer with an end token."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 2)])
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=longest, **special)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three untrained models of two layers: an encoder, a causal model, an encoder-decoder."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    width = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    bert = transformers.BertConfig(**SMALL, **width, max_position_embeddings=32)
    gpt2 = transformers.GPT2Config(**SMALL, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "decoder_start_token_id": 2}
    bart = transformers.BartConfig(**SMALL, **layers, **sizes, max_position_embeddings=32, forced_eos_token_id=None)
    models = {
        "reads": transformers.BertModel(bert),
        "writes": transformers.GPT2LMHeadModel(gpt2),
        "both": transformers.BartForConditionalGeneration(bart),
    }
    # Keeps the model from ending its answer at once.
    models["both"].final_logits_bias[0, 2] = -1e4
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    return folder


def test_look_with_an_encoder(folders: Path) -> None:
    record = look(TEXT, folders / "reads")
    assert record.model == "reads"
    assert record.heads == ["L0H0", "L0H1", "L1H0", "L1H1"]
    assert record.labels["input"].texts == (("Jane", " is", " hungry", ",", " Jane", " sleeps", "</s>"),)
    model = transformers.BertModel.from_pretrained(folders / "reads", attn_implementation="eager")
    with torch.no_grad():
        expected = model(**tokenizer()(TEXT, return_tensors="pt"), output_attentions=True).attentions
    torch.testing.assert_close(record["L1H1"].dense()[0], expected[1][0, 1])


def test_look_with_a_causal_model_lists_next_tokens(folders: Path) -> None:
    record = look(TEXT, folders / "writes")
    model = transformers.GPT2LMHeadModel.from_pretrained(folders / "writes")
    with torch.no_grad():
        logits = model(**tokenizer()(TEXT, return_tensors="pt")).logits[0, -1]
    best = WORDS[int(logits.argmax())]
    assert record.answer is not None
    assert re.fullmatch(rf"“{best}” \d+%(, “[^”]+” \d+%){{4}}", record.answer)


def test_look_with_an_encoder_decoder_writes_an_answer(folders: Path) -> None:
    record = look(TEXT, folders / "both", new_tokens=5)
    cross = record["cross.L1"]
    assert cross.shape[2:] == (5, 7)
    queries, keys = record.labels_of(cross)
    assert len(queries) == 5
    assert keys.texts[0][0] == "Jane"
    model = transformers.BartForConditionalGeneration.from_pretrained(folders / "both")
    written = model.generate(**tokenizer()(TEXT, return_tensors="pt"), max_new_tokens=5, num_beams=1, do_sample=False)
    assert record.answer == tokenizer().decode(written[0], skip_special_tokens=True)


def test_the_command_prints_the_text_and_its_progress(
    folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    model = str(folders / "reads")
    assert main.main(["look", "Jane", "is hungry", "--model", model, "--head", "L1H1", "--word", "hungry"]) == 0
    said = capsys.readouterr()
    assert said.err == f"foci look: loading {model}\n"
    lines = said.out.splitlines()
    assert lines[:5] == [
        "reads",
        "   2 layers of 2 heads, 4 tokens",
        "",
        "Attention of “hungry” in L1H1",
        "   Jane is »hungry« </s>",
    ]


def test_layer_and_head_as_numbers_and_single_tokens(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(folders / "writes")
    assert (
        main.main(["look", TEXT, "--model", model, "--layer", "1", "--head", "0", "--tokens", "--word", "Jane#2"]) == 0
    )
    out = capsys.readouterr().out
    assert "Attention of “Jane” in L1H0" in out
    assert "answer: “" in out


@pytest.mark.parametrize(("ending", "start"), [("html", b"<!doctype html>"), ("svg", b"<?xml"), ("foci", b"")])
def test_the_suffix_chooses_the_file_format(
    ending: str, start: bytes, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / f"x.{ending}"
    assert main.main(["look", TEXT, "--model", str(folders / "reads"), "--layer", "1", "--out", str(out)]) == 0
    assert out.read_bytes().startswith(start)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.endswith(f"foci look: written: {out}\n")
    if ending == "svg":
        assert "L1, mean of heads" in out.read_text()


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an untrained foci model for text generation."""
    folder = tmp_path_factory.mktemp("own") / "generation"
    folder.mkdir()
    settings = GenerationSettings(size="tiny", width=16, heads=2, context=32, new_tokens=4)
    task = Generation.from_examples(settings, [Passage("Jane is hungry.")])
    torch.manual_seed(0)
    save_trained_model(folder / "model.safetensors", task, task.model())
    return folder


def test_a_model_that_foci_trained(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["look", "Jane is", "--model", str(own)]) == 0
    said = capsys.readouterr()
    assert said.err == f"foci look: loading {own}\n"
    assert re.match(r"generation\n   2 layers of 2 heads, \d+ tokens\n   answer: Jane is", said.out)


@pytest.mark.parametrize("named", [[], ["--model", "generation"]])
def test_a_pretrained_model_is_found_by_name(
    named: list[str], own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "MODELS_DIRECTORY", own.parent)
    assert main.main(["look", "Jane is", *named]) == 0
    assert capsys.readouterr().err == "foci look: loading generation\n"


def test_a_long_text_is_truncated_with_a_note(folders: Path) -> None:
    messages: list[str] = []
    record = look("Jane is hungry , " * 50, folders / "reads", report=messages.append)
    assert messages[1:] == ["the text is cut: the model reads the first 32 of 201 tokens"]
    assert len(record.labels["input"]) == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x"], NO_MODEL),
        ([" ", "--model", "x"], "text must have at least one word, got none"),
        (
            ["x", "--model", "./none"],
            "model must be the folder of a Hugging Face model or a foci model, got ./none: no such path",
        ),
    ],
)
def test_missing_models_give_a_one_line_error(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(models, "MODELS_DIRECTORY", tmp_path)
    assert main.main(["look", *arguments]) == 2
    assert capsys.readouterr() == ("", f"foci look: {message}\n")


def test_a_folder_without_a_model_is_refused(tmp_path: Path, folders: Path) -> None:
    with pytest.raises(ValueError, match=r"must be a model file, or a directory with model\.safetensors, got neither"):
        look("x", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ValueError,
        match=r"model must be the folder or name of a Hugging Face model, a foci run, or a pretrained model",
    ):
        load_text_model(str(tmp_path))
    assert not is_foci_model(tmp_path)
    assert not is_foci_model(folders / "reads")
    check_path_exists("gpt2")


def test_an_unknown_word_is_refused(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["look", "Jane sleeps", "--model", str(folders / "reads"), "--word", "pizza"]) == 2
    assert capsys.readouterr().err.endswith("foci look: word must be one of Jane sleeps </s>, got 'pizza'\n")


@pytest.mark.parametrize(
    ("both", "named", "kind"),
    [
        (True, ["T5ForConditionalGeneration"], "AutoModelForSeq2SeqLM"),
        (False, ["LlamaForCausalLM"], "AutoModelForCausalLM"),
        (False, ["BertForMaskedLM"], "AutoModel"),
        (False, None, "AutoModel"),
    ],
)
def test_auto_class_by_architecture(both: bool, named: list[str] | None, kind: str) -> None:
    assert auto_class_of(transformers.PretrainedConfig(is_encoder_decoder=both, architectures=named)) == kind


def test_a_page_opens_at_the_requested_head_and_word(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    look = ["look", TEXT, "--model", str(folders / "reads"), "--out", str(out)]
    assert main.main(look) == 0
    assert "data-state" not in out.read_text().partition("<script")[0]
    word = TEXT.split()[0]
    assert main.main([*look, "--head", "L1H0", "--word", word]) == 0
    assert re.search(r'data-state="h=L1H0&amp;t=\d+"', out.read_text())
    for wrong in (["--word", "zebra"], ["--head", "L99H0"]):
        out.unlink(missing_ok=True)
        assert main.main([*look, *wrong]) == 2
        assert not out.exists()
        assert wrong[1] in capsys.readouterr().err


def test_without_transformers_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main.main(["look", "x", "--model", "gpt2"]) == 1
    said = "Hugging Face models need transformers, which is not installed: pip install 'foci[hf]'"
    assert capsys.readouterr().err == f"foci look: {said}\n"


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ([], 0, r"hungry is not among the queries of alignment\.L0; showing (encoder\.L\dH\d), where it occurs\n$"),
        (
            ["--head", "cross.L1"],
            2,
            r"'hungry' is not among the queries of cross\.L1; it occurs in encoder\.L0 to encoder",
        ),
        (["--head", "encoder.L1H0"], 0, "loading"),
    ],
)
def test_a_word_of_the_text_that_the_answer_does_not_have(
    asked: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["look", "Jane is hungry.", "--word", "hungry", *asked]) == status
    out, err = capsys.readouterr()
    found = re.search(said, err)
    assert found is not None
    name = found[1] if found.groups() else "encoder.L1H0"
    assert (f"Attention of “hungry.” in {name}" in out) is (status == 0)


def write_wav(path: Path) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(8000))


FILES = {"picture.dat": "vision", "sound.wav": "speech", "notes.txt": None}


HOSTILE = "someone/kernel"


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_a_config_cannot_choose_an_attention_implementation(folders: Path, tmp_path: Path, key: str) -> None:
    for name in ("reads", "writes", "both"):
        folder = shutil.copytree(folders / name, tmp_path / name)
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | {key: HOSTILE}))
        loaded = load_text_model(str(folder))
        assert loaded.model.config._attn_implementation in {"sdpa", "eager"}
        assert HOSTILE not in str(loaded.model.config.to_dict())


def test_a_nested_config_cannot_choose_an_attention_implementation(tmp_path: Path) -> None:
    clip = transformers.CLIPConfig().to_dict()
    for part in ("text_config", "vision_config"):
        clip[part]["_attn_implementation"] = HOSTILE
    (tmp_path / "config.json").write_text(json.dumps(clip))
    config = load_huggingface_config(str(tmp_path))
    assert (config.text_config._attn_implementation, config.vision_config._attn_implementation) == (None, None)


def test_a_tokenizer_that_panics_gives_a_one_line_error(folders: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(folders / "reads", tmp_path / "reads")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "missing", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    }
    content["padding"] = {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_id": 0, "pad_type_id": 0}
    content["padding"] |= {"pad_to_multiple_of": None, "pad_token": "<pad>"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="the tokenizer cannot process the text: ") as error:
        look(TEXT, str(folder))
    assert "\n" not in str(error.value)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture, a sound and a text in the working directory; the content decides, not the suffix."""
    monkeypatch.chdir(tmp_path)
    Path("picture.dat").write_bytes(b"P5 28 28 255\n" + bytes(28 * 28))
    Path("notes.txt").write_text("Jane is hungry.\n")
    Path("hungry").write_text("another text")
    write_wav(tmp_path / "sound.wav")


@pytest.mark.usefixtures("files")
def test_the_model_follows_from_the_kind_of_file() -> None:
    said: list[str] = []
    found = {name: read_input(name, said.append) for name in FILES}
    assert {name: find_model_for(kind) for name, (_, kind) in found.items()} == FILES
    assert [text for text, _ in found.values()] == ["picture.dat", "sound.wav", "Jane is hungry.\n"]
    assert said == ["reading notes.txt"]


@pytest.mark.slow
@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("name", FILES)
def test_a_file_is_looked_at_without_naming_a_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["look", name, "--device", "cpu"]) == 0
    assert capsys.readouterr().err.endswith(f"foci look: loading {FILES[name] or 'translation'}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["picture.png", "--model", "translation"],
            "model must take images, as vision does, got a model for translation",
        ),
        (["hungry", "--model", "vision"], "model must take texts, as translation does, got a model for vision"),
        (["shrit.png"], "text must be a text or the path of a file, got shrit.png: no such file"),
        (["paper.pdf"], "text must be a text, or the path of a text, image or sound, got paper.pdf, a PDF file"),
        (["empty.txt"], "text must have at least one word, got none"),
        (["empty.png"], "empty.png must be a PNG, JPEG, WebP, GIF, BMP, TIFF, PGM, PPM, WAV, FLAC or OGG file, got an"),
        (["picture.png", "--model", "reads"], "model must be a model of foci for images, such as vision, got reads"),
    ],
)
def test_inputs_of_another_kind_are_refused(
    arguments: list[str],
    message: str,
    folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("picture.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    Path("paper.pdf").write_bytes(b"%PDF-1.4")
    Path("empty.txt").touch()
    Path("empty.png").touch()
    Path("reads").symlink_to(folders / "reads")
    assert main.main(["look", *arguments]) == 2
    assert f"foci look: {message}" in capsys.readouterr().err


def test_a_damaged_record_is_not_read_as_a_text(tmp_path: Path) -> None:
    path = tmp_path / "damaged.foci"
    path.write_text("some text")
    with pytest.raises(ValueError, match=r"got .*damaged\.foci, the name of a record: foci view .*damaged\.foci$"):
        read_input(str(path), print)


def test_a_model_object_is_refused() -> None:
    model: Any = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"^model must be the name or path of a model, got Linear: .* foci\.watch$"):
        foci.look("hi", model)
    with pytest.raises(TypeError, match=r"^text must be a text, or the path .*, got Linear: give the text first"):
        foci.look(model, "hi")


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("text", ["hungry", "Hello.", "a" * 5000 + ".", "\0."], ids=["word", "dot", "long", "null"])
def test_a_text_is_not_mistaken_for_a_file(text: str) -> None:
    assert read_input(text, ignore_message) == (text, "texts")

import re
import tarfile
from pathlib import Path

import pytest
import torch

from foci import models
from foci.models import MODELS_DIRECTORY, TRAINING_DATA, list_pretrained
from foci.models.pretrained import pretrained
from foci.tasks import TASKS
from foci.tasks.model_file import save_trained_model
from foci.tasks.parallel_text import Pair
from foci.tasks.sentiment import Sentiment, SentimentSettings
from foci.tasks.translation import Translation, TranslationSettings


def test_a_model_in_the_directory_answers_and_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MODELS_DIRECTORY", tmp_path)
    assert list_pretrained() == []
    (tmp_path / "translation").mkdir()
    torch.manual_seed(0)
    settings = TranslationSettings(size="tiny", width=32, heads=2, tokenizer="words", beam=1)
    task = Translation.from_examples(settings, [Pair("a dog sleeps", "ein Hund schläft")])
    save_trained_model(
        tmp_path / "translation" / "model.safetensors",
        task,
        task.model(),
        {"licence": "x"},
        storage="int8",
        max_bytes=9000,
    )
    model = pretrained("translation")
    one, other = model(["a dog", "sleeps"])
    assert (model("a dog"), model("sleeps")) == (one, other)
    assert model.about == {"licence": "x"}
    assert re.fullmatch(r"Pretrained\(translation: EncoderDecoder, [\d,]+ parameters\)", repr(model))
    assert model.show("a dog").answer == one
    assert model(Path("a dog")) == one
    for wrong, kind in ((torch.zeros(2), "torch.Tensor"), ([b"a"], "bytes"), (3, "int")):
        with pytest.raises(TypeError, match=rf"the input must be a text, the path of .*, got a {kind}"):
            model(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"name must be one of the models that ship \(translation\), got 'flying'"):
        pretrained("flying")
    with pytest.raises(ValueError, match=r"^no model for vision ships: train one on a folder "):
        pretrained("vision")


@pytest.mark.parametrize("name", list_pretrained())
def test_every_model_names_its_source_licence_and_score(name: str) -> None:
    about = pretrained(name).about
    assert about["source"]
    assert about["licence"]
    assert about["score"]


def test_models_that_ship() -> None:
    assert list_pretrained() == ["generation", "sentiment", "speech", "translation", "vision"]


def test_model_files_stay_small() -> None:
    sizes = [path.stat().st_size for path in MODELS_DIRECTORY.rglob("*") if path.is_file()]
    assert sum(sizes) <= 36 * 10**6
    assert max(sizes) < 15 * 2**20


def test_translation_translates_and_aligns() -> None:
    model = pretrained("translation")
    assert model(["A man sleeps.", "Where is the train station?"]) == ["Ein Mann schläft.", "Wo ist der Bahnhof?"]
    record = model.show("A man sleeps.")
    source, written = (record.labels[name].texts[0] for name in ("source", "translation"))
    looked = record.layers["cross.L1"].dense()[0].mean(0).argmax(-1).tolist()
    aligned = {word.strip(): source[key].strip() for word, key in zip(written, looked, strict=True)}
    assert (aligned["Ein"], aligned["Mann"]) == ("A", "man")


def test_generation_continues_the_prompt() -> None:
    text = pretrained("generation")("ROMEO:")
    assert text.startswith("ROMEO:\n")
    assert len(set(text.split())) > 10


def test_sentiment_tells_good_from_bad() -> None:
    """Short sentences, eleven of twenty with a negation."""
    model = pretrained("sentiment")
    table = Path(__file__).parents[2] / "benchmarks" / "training" / "sentiment" / "short-test.tsv"
    examples = Sentiment.read([table], SentimentSettings())
    answers = [answer.split()[0] for answer in model([each.text for each in examples])]
    assert answers[:5] == ["positive"] * 5
    assert sum(answer == each.label for answer, each in zip(answers, examples, strict=True)) >= 18
    record = model.show("I loved it")
    assert [text.strip() for text in record.labels["input"].texts[0][1:]] == ["i", "loved", "it"]
    assert record.answer == model("I loved it")


def test_vision_names_clothes(tmp_path: Path) -> None:
    trouser, shirt = torch.zeros(28, 28, dtype=torch.uint8), torch.zeros(28, 28, dtype=torch.uint8)
    trouser[2:8, 8:20] = trouser[8:27, 8:13] = trouser[8:27, 15:20] = 180
    shirt[4:10, 2:26] = shirt[10:26, 7:21] = 160
    shirt[3:6, 11:17] = 0
    for name, picture in (("trouser", trouser), ("t-shirt", shirt)):
        path = tmp_path / f"{name}.pgm"
        path.write_bytes(b"P5 28 28 255\n" + bytes(picture.flatten().tolist()))
        record = pretrained("vision").show(path)
        assert record.answer == pretrained("vision")(path)
        # A drawing may be declined, but the nearest class is right.
        assert re.fullmatch(rf"{name} \(\d+%\)|not one of my classes \(the nearest is {name}\)", record.answer)
        assert record.layers["L0"].shape == (1, 4, 49, 49)


@pytest.mark.data
def test_speech_recognizes_digits(data: Path, tmp_path: Path) -> None:
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    paths = [f"recordings/{digit}_lucas_0.wav" for digit in range(10)]
    with tarfile.open(data / "fsdd" / "fsdd.tar.gz") as archive:
        archive.extractall(tmp_path, [archive.getmember(path) for path in paths], filter="data")
    answers = pretrained("speech")([str(tmp_path / path) for path in paths])
    assert [answer.split()[0] for answer in answers] == words
    assert all(re.fullmatch(r"\w+ \(\d+%\)", answer) for answer in answers)


def test_every_task_ships_or_says_what_to_train_on() -> None:
    assert TRAINING_DATA.keys() == TASKS.keys()

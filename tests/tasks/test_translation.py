"""Translation learns what an untrained model cannot know: the other order of words, and dates."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import foci
from foci.tasks.model_file import TrainedModel, load_trained_model
from foci.tasks.parallel_text import Pair
from foci.tasks.translation import Translation, TranslationSettings
from foci.training import read_config, train
from foci.view.selection import select_default_head
from tests.training.reversal import written

MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August")
QUICK = ("train.device=cpu", "train.decoded=40", "train.evaluate_every=1000", "task.beam=2", "task.smoothing=0")
TINY = ("task.size=tiny", "task.width=64", "task.layers=1", "task.dropout=0", "train.batch_tokens=512")
TRANSFORMER = ("task.heads=4", "task.hidden=128", "train.rate=0.006", "train.warmup=20")


def trained(data: Path, *changes: str) -> tuple[TrainedModel, float]:
    """A model, and its BLEU on pairs that it has not seen."""
    config = read_config("translation", None, [*QUICK, *TINY, *changes], data=[str(data)])
    found = train(config, data.parent / "run", quiet=True)
    return load_trained_model(data.parent / "run"), float(found["bleu"])


def untrained_bleu(like: TrainedModel, data: Path) -> float:
    torch.manual_seed(0)
    pairs = Translation.read([data], like.task.settings)[:40]
    model = like.task.model().eval()
    with torch.no_grad():
        return float(like.task.score(like.task.decode(model, pairs), pairs)["bleu"])


def dates(path: Path) -> Path:
    chance = random.Random(1)
    days = [(chance.randint(1990, 2009), chance.randint(1, 8), chance.randint(1, 28)) for _ in range(1500)]
    rows = [{"source": f"{d} {MONTHS[m - 1]} {y}", "target": f"{y} / {m:02d} / {d:02d}"} for y, m, d in days]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_transformer_learns_to_reverse_words(tmp_path: Path) -> None:
    data = written(tmp_path / "pairs.tsv", 1500)
    found, bleu = trained(data, *TRANSFORMER, "task.vocabulary=272", "train.steps=160")
    assert bleu > 60 > 20 > untrained_bleu(found, data)
    record = found.task.record_attention(found.model, found.task.parse_input("ab cd ef"))
    assert record.answer == found.task.answer(found.model, [found.task.parse_input("ab cd ef")])[0]
    assert set(record.labels) == {"source", "target", "translation"}
    assert record["cross.L0H0"].shape[-1] == len(record.labels["source"])
    assert record.labels["source"].texts[0][-1] == "<stop>"


def test_an_rnn_reverses_words_and_attends_to_the_right_ones(tmp_path: Path) -> None:
    data = written(tmp_path / "pairs.tsv", 1500)
    changes = ("task.model=rnn", "task.tokenizer=words", "train.rate=0.006", "train.warmup=20", "train.steps=110")
    found, bleu = trained(data, *changes)
    assert bleu > 90 > 20 > untrained_bleu(found, data)
    record = found.task.record_attention(found.model, found.task.parse_input("ab cd ef gh"))
    looked = record["cross.L0H0"].dense()[0].argmax(-1)
    assert record.labels["translation"].texts[0] == ("gh", " ef", " cd", " ab", "<stop>")
    assert looked[:4].tolist() == [3, 2, 1, 0]


def test_dates_are_learned_from_jsonl(tmp_path: Path) -> None:
    data = dates(tmp_path / "dates.jsonl")
    found, bleu = trained(data, *TRANSFORMER, "task.tokenizer=words", "train.steps=120")
    assert bleu > 60 > 20 > untrained_bleu(found, data)


def test_three_formats_are_read_alike(tmp_path: Path) -> None:
    pairs = [Pair("A man sleeps.", "Ein Mann schläft."), Pair("A dog.", "Ein Hund.")]
    table, lines, first, second = (tmp_path / name for name in ("a.tsv", "a.jsonl", "a.en.gz", "a.de"))
    table.write_text("source\ttarget\n" + "".join(f"{pair.source}\t{pair.target}\n" for pair in pairs))
    lines.write_text("".join(json.dumps({"target": pair.target, "source": pair.source}) + "\n" for pair in pairs))
    first.write_bytes(gzip.compress("".join(f"{pair.source}\n" for pair in pairs).encode()))
    second.write_text("".join(f"{pair.target}\n" for pair in pairs))
    for paths in ([table], [lines], [first, second]):
        assert Translation.read(paths, TranslationSettings()) == pairs


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.tsv", "one\n", "a.tsv:1: a line must have 2 tab-separated columns (source, target), got 1"),
        ("a.tsv", "x\ty\n \tz\n", "a.tsv:2: source must not be empty"),
        ("a.tsv", "", "a.tsv must hold at least one pair, got none"),
        ("a.jsonl", '{"source": "x"\n', "a.jsonl:1: a line must be valid JSON"),
        ("a.jsonl", '{"source": "x"}\n', "a.jsonl:1: a line must have the keys source, target, got source"),
        ("a.jsonl", '{"source": "x", "target": null}\n', "a.jsonl:1: 'target' must be a string, got null"),
    ],
)
def test_malformed_data_gives_a_one_line_error(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match="must") as error:
        Translation.read([tmp_path / name], TranslationSettings())
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_parallel_files_of_unequal_length_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.en").write_text("x\ny\nz\n")
    (tmp_path / "a.de").write_text("x\ny\n")
    with pytest.raises(ValueError, match=r"a\.en:3: the file must have as many lines as .*a\.de \(2\), got more"):
        Translation.read([tmp_path / "a.en", tmp_path / "a.de"], TranslationSettings())


def test_suspicious_pairs_give_warnings(tmp_path: Path) -> None:
    long = "word " * 30
    rows = ["the same old text\tthe same old text", f"short\t{long}", "a\tb\x07", "a\tb", "a\tb"]
    (tmp_path / "a.tsv").write_text("".join(f"{row}\n" for row in rows))
    found = list(Translation.check([tmp_path / "a.tsv"], TranslationSettings()))
    assert [(problem.location.rpartition(":")[2], problem.severity) for problem in found] == [
        *(("1", "warning"), ("2", "warning"), ("3", "warning"), ("5", "warning"))
    ]


def test_targets_are_inputs_shifted_by_one() -> None:
    task = Translation.from_examples(TranslationSettings(size="tiny", tokenizer="words"), [Pair("a b", "c d")])
    batch = task.batch([Pair("a b", "c d"), Pair("a", "c")], True, torch.Generator())
    a, b, c, d = (task.tokenizer.encode(word)[0] for word in "abcd")
    assert batch["source"][:, :3].tolist() == [[a, b, 2], [a, 2, 0]]
    assert batch["real"].sum(1).tolist() == [3, 2]
    assert batch["inputs"][:, :3].tolist() == [[1, c, d], [1, c, 0]]
    assert batch["targets"][:, :3].tolist() == [[c, d, 2], [c, 2, 0]]
    loss, count = task.loss(task.model().eval(), batch)
    assert count == 5
    assert loss > 0


def test_a_long_sentence_is_truncated_to_its_beginning() -> None:
    settings = TranslationSettings(size="tiny", tokenizer="words", max_length=4)
    task = Translation.from_examples(settings, [Pair("a b", "c d")])
    long, short = task.parse_input("a b a b a b"), task.parse_input("a b a b")
    assert [task.is_truncated(each) for each in (long, short)] == [True, False]
    assert task.describe_read_part(long) == "the first 4 of 6 tokens"
    model = task.model().eval()
    assert task.decode(model, [long, short]) == task.decode(model, [short]) * 2
    assert task.record_attention(model, long).labels["source"].text(0) == "a b a b<stop>"


@pytest.mark.parametrize("plain", [False, True])
def test_typographic_punctuation_of_a_source_is_read_as_plain(plain: bool) -> None:
    settings = TranslationSettings(size="tiny", plain_punctuation=plain)
    pairs = [Pair('"It\'s here," he said...', "„Es ist hier“, sagte er …"), Pair("“It’s here,”\u00a0he said…", "")]
    task = Translation.from_examples(settings, pairs)
    batch = task.batch(pairs, False, torch.Generator())
    assert torch.equal(batch["source"][0], batch["source"][1]) == plain
    assert task.tokenizer.decode(batch["targets"][0].tolist()).startswith("„Es ist hier“")


def test_agreeing_passes_have_the_loss_of_one() -> None:
    """Without dropout both passes are the same, so agreement adds nothing; with dropout it does."""
    pair = [Pair("a b", "c d")]
    losses = {}
    for dropout in (0.0, 0.5):
        for agreement in (0.0, 1e-9, 40.0):
            settings = TranslationSettings(size="tiny", tokenizer="words", dropout=dropout, agreement=agreement)
            task = Translation.from_examples(settings, pair)
            torch.manual_seed(0)
            model = task.model().train()
            losses[dropout, agreement] = float(task.loss(model, task.batch(pair, True, torch.Generator()))[0].detach())
    assert losses[0.0, 40.0] == pytest.approx(losses[0.0, 0.0], rel=1e-5)
    assert losses[0.5, 40.0] > losses[0.5, 1e-9] * 1.001


def test_alignment_is_the_mean_of_the_chosen_layers_and_views_show_it_first(tmp_path: Path) -> None:
    task = Translation.from_examples(TranslationSettings(size="tiny", alignment=(0, 1)), [Pair("a dog", "ein Hund")])
    model = task.model().eval()
    record = task.record_attention(model, Pair("a dog", ""))
    cross = [record[f"cross.L{number}"][0, 1, 0] for number in (0, 1)]
    expected = (cross[0] + cross[1]) / 2
    torch.testing.assert_close(record["alignment.L0"][0, 1, 0], expected)
    assert select_default_head(record).layer.name == "alignment"
    assert record.calls == len(record.layers) - 1
    record.save(tmp_path / "record.foci")
    torch.testing.assert_close(foci.load(tmp_path / "record.foci")["alignment.L0"][0, 1, 0], expected)


@pytest.mark.parametrize("layer", [7, "first", True])
def test_alignment_of_a_missing_layer_is_refused(layer: Any) -> None:
    task = Translation.from_examples(TranslationSettings(size="tiny", alignment=(layer,)), [Pair("a dog", "ein Hund")])
    with pytest.raises(ValueError, match=rf"task.alignment must be layers from 0 to 1, got \({layer!r},\)"):
        task.model()

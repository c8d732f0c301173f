"""Settings that are not set follow from the data; those that are set keep their values."""

import datetime
import random
import tomllib
from pathlib import Path

import pytest

from foci.cli import main
from foci.cli.samples import number_pairs, reviews, spell_number, write_pairs_table
from foci.inputs.tokenizer_choice import choose_tokenizer, choose_vocabulary
from foci.tasks import find_task
from foci.tasks.parallel_text import Pair
from foci.tasks.sentiment import LabelledText, Sentiment, SentimentSettings
from foci.tasks.translation import Translation, TranslationSettings
from foci.training import TrainConfig, read_config, train
from foci.training.advice import find_result_warnings, find_run_warnings
from foci.training.defaults import choose_batch_tokens, choose_epochs, count_steps, fill_shares
from tests.training.reversal import SMALL, written

ROOT = Path(__file__).parents[2]
PUBLISHED = [*(ROOT / "benchmarks" / "training").glob("*.toml"), *(ROOT / "foci" / "models").glob("*/config.toml")]
FROM_DATA = ("train.batch_tokens", "train.warmup", "train.evaluate_every")
UNSET = [change for change in SMALL if not change.startswith(FROM_DATA)]


def dates(count: int) -> list[tuple[str, str]]:
    """Dates as people write them, and as ISO 8601."""
    chance = random.Random(1)
    days = [datetime.date(1950, 1, 1) + datetime.timedelta(days=chance.randrange(36_000)) for _ in range(count)]
    forms = ("%B %-d, %Y", "%-d %b %Y", "%A, %-d %B %Y", "%m/%d/%Y")
    return [(day.strftime(chance.choice(forms)), day.isoformat()) for day in days]


def reversals(count: int) -> list[tuple[str, str]]:
    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(3, 10))) for _ in range(count)]
    return [(word, word[::-1]) for word in words]


def sentences(count: int) -> list[tuple[str, str]]:
    """Sentences of several words, most of which occur once."""
    chance = random.Random(1)
    words = [" ".join("".join(chance.choices("abcdefgh", k=6)) for _ in range(5)) for _ in range(count)]
    return [(text, f"{text}!") for text in words]


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        (number_pairs(500), "words"),
        ([(spell_number(each), str(each)) for each in range(0, 90_000, 200)], "characters"),
        (dates(500), "characters"),
        (reversals(500), "characters"),
        (sentences(500), "bpe"),
    ],
)
def test_the_tokenizer_follows_from_the_counts(rows: list[tuple[str, str]], kind: str) -> None:
    assert choose_tokenizer(*([row[side] for row in rows] for side in (0, 1))) == kind
    pairs = [Pair(*row) for row in rows]
    assert Translation.fill_settings(TranslationSettings(), pairs).tokenizer == kind
    assert Translation.fill_settings(TranslationSettings(tokenizer="bytes"), pairs).tokenizer == "bytes"


def test_the_vocabulary_grows_with_the_text() -> None:
    assert choose_vocabulary(["a few words"]) == 500
    assert choose_vocabulary(["four words of text"] * 15_000) == 3000
    assert choose_vocabulary(["four words of text"] * 200_000) == 8000


def test_few_reviews_take_few_embeddings() -> None:
    few, many = ([LabelledText("nine words that are all in a short review", "good")] * count for count in (500, 50_000))
    assert Sentiment.fill_settings(SentimentSettings(), few).buckets == 2**14
    assert Sentiment.fill_settings(SentimentSettings(), many).buckets == 2**17
    assert Sentiment.fill_settings(SentimentSettings(buckets=7), many).buckets == 7


@pytest.mark.parametrize("examples", [300, 2000, 20_000, 200_000])
def test_there_are_enough_steps_and_the_warmup_is_a_share_of_them(examples: int) -> None:
    sizes = [12] * examples
    steps_per_epoch = -(-examples * 16 // choose_batch_tokens(sizes, 1))
    config = TrainConfig().fill(epochs=choose_epochs(steps_per_epoch))
    total = count_steps(config, steps_per_epoch)
    assert 900 <= total <= 50_000
    filled = fill_shares(config, total)
    assert filled.warmup is not None
    assert filled.evaluate_every is not None
    assert 0 < filled.warmup <= 0.11 * total
    assert total // filled.evaluate_every >= 9


def test_several_micro_batches_share_a_batch() -> None:
    assert 8 * choose_batch_tokens([12] * 2000, 8) == choose_batch_tokens([12] * 2000, 1) == 512


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_published_configs_set_whatever_would_follow_from_the_data(path: Path) -> None:
    table = tomllib.loads(path.read_text())
    assert {"batch_tokens", "warmup", "evaluate_every"} <= table["train"].keys()
    assert {"epochs", "steps"} & table["train"].keys()
    settings = find_task(table["task"].pop("name")).settings_type.from_dict(table["task"])
    # Characters have no maximum vocabulary.
    needed = ("size", "tokenizer", *(("vocabulary",) if getattr(settings, "tokenizer", "") != "characters" else ()))
    assert [name for name in needed if getattr(settings, name, "") is None] == []


def test_a_run_keeps_the_settings_that_it_chose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = written(tmp_path / "pairs.tsv")
    begin = read_config("translation", None, [*UNSET, "train.epochs=1"], data=[str(data)])
    train(begin, tmp_path / "run")
    said = capsys.readouterr().err
    assert "chosen from the data: train.batch_tokens=256, train.warmup=1, train.evaluate_every=1\n" in said
    kept = read_config("translation", tmp_path / "run" / "config.toml")
    assert (kept.train.batch_tokens, kept.train.warmup, kept.train.evaluate_every) == (256, 1, 1)
    assert (kept.train.epochs, kept.settings) == (1, begin.settings)
    more = read_config("translation", tmp_path / "run" / "config.toml", ["train.epochs=2"])
    train(more, tmp_path / "run", resume=True)
    assert "chosen from the data" not in capsys.readouterr().err


def test_set_values_are_not_changed() -> None:
    chosen = TrainConfig(epochs=3, batch_tokens=7, warmup=0, evaluate_every=9)
    assert fill_shares(chosen.fill(epochs=20.0, batch_tokens=512), 1500) == chosen


def test_warnings_name_the_setting_that_helps() -> None:
    late, few, rough = find_run_warnings(TrainConfig(warmup=200), 140, 5)
    assert late == (
        "train.warmup is 200 steps of 140: the learning rate never decays;"
        " use --set train.warmup=14, or train for more steps"
    )
    assert few == "140 steps are few: use a higher train.epochs or a lower train.batch_tokens"
    assert rough == "a dev set of 5 examples gives rough scores: use --dev, or --set train.dev_share=0.2"
    assert [*find_run_warnings(TrainConfig(warmup=150), 1500, 100)] == []


def test_results_name_what_would_help() -> None:
    config = TrainConfig(epochs=20)
    assert [*find_result_warnings(config, [1.0, 0.99], 100, 100)] == []
    (falling,) = find_result_warnings(config, [1.0, 0.5], 100, 100)
    assert falling == "the dev loss was still falling: more steps may help, with --resume --set train.epochs=40"
    (overfit,) = find_result_warnings(config, [1.0, 0.5, 0.7, 0.9], 20, 100)
    assert "the best model is that of step 20 of 100" in overfit
    assert "task.dropout" in overfit


def test_unknown_words_are_reported() -> None:
    task = Translation.from_examples(TranslationSettings(tokenizer="words"), [Pair("a dog", "ein Hund")])
    (warning,) = task.find_warnings([Pair("a cat", "ein Hund")])
    assert warning == "25% of the dev tokens are not in the vocabulary: use --set task.tokenizer=bpe"
    assert task.find_warnings([Pair("a dog", "ein Hund")]) == []


def test_bleu_of_references_below_four_words_counts_characters() -> None:
    pytest.importorskip("sacrebleu")
    task = Translation.from_examples(TranslationSettings(tokenizer="characters"), [Pair("ab", "ba")])
    assert task.score(["fedcba", "ba"], [Pair("abcdef", "fedcba"), Pair("ab", "ba")])["bleu"] == pytest.approx(100)
    assert 0 < float(task.score(["91", "12"], [Pair("a", "91"), Pair("b", "13")])["bleu"]) < 100
    usual = task.score(["the cat sat on a mat"], [Pair("", "the cat sat on the mat")])
    assert "tok:13a" in str(usual["signature"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "columns", "rows", "metric", "least"),
    [
        ("translation", ("source", "target"), number_pairs(2000), "bleu", 97.0),
        ("translation", ("source", "target"), dates(2000), "bleu", 97.0),
        ("translation", ("source", "target"), reversals(2000), "bleu", 95.0),
        ("sentiment", ("text", "label"), reviews(500), "accuracy", 97.0),
    ],
    ids=["numbers", "dates", "reversal", "reviews"],
)
def test_a_training_without_settings_reaches_what_it_can(
    task: str,
    columns: tuple[str, str],
    rows: list[tuple[str, str]],
    metric: str,
    least: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pairs_table(tmp_path / "data.tsv", columns, rows)
    assert main.main(["train", task, "--data", "data.tsv"]) == 0
    out, said = capsys.readouterr()
    scores = dict(line.split(" ", 1) for line in out.splitlines())
    assert float(scores[metric]) >= least
    # About 1,500 small steps take one or two minutes on two cores.
    assert int(said.split("finished at step ")[1].split()[0]) <= 1600

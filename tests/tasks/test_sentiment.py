"""Sentiment: positive and negative words, some after "not"; errors in a table, and the record of the attention."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from foci.tasks.sentiment import LabelledText, Sentiment, SentimentSettings
from foci.view.selection import select_default_head, select_default_query
from tests.tasks.lessons import Lesson, lesson

SMALL = (
    *("task.width=32", "task.layers=1", "task.heads=2", "task.buckets=1000", "task.dropout=0.0"),
    *("train.batch_tokens=512", "train.steps=150", "train.rate=0.003"),
)
PRAISE, BLAME = ("lovely", "brilliant", "moving"), ("dull", "awful", "clumsy")
OTHERS = ("the", "film", "is", "a", "story", "of", "two", "men", "and", "their", "dog")


def sentence(chance: random.Random) -> tuple[str, str]:
    """Half of the verdicts are turned by "not", so single words do not tell."""
    praises, turned = chance.random() < 0.5, chance.random() < 0.5
    words = [chance.choice(OTHERS) for _ in range(chance.randint(3, 8))]
    verdict = [*(["not"] if turned else []), chance.choice(PRAISE if praises else BLAME)]
    place = chance.randint(0, len(words))
    return " ".join(words[:place] + verdict + words[place:]), "good" if praises != turned else "bad"


def written(path: Path, count: int, seed: int) -> Path:
    chance = random.Random(seed)
    rows = [sentence(chance) for _ in range(count)]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))
    else:
        path.write_text("".join(f"{text}\t{label}\n" for text, label in rows))
    return path


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Lesson:
    folder = tmp_path_factory.mktemp("reviews")
    data, dev = written(folder / "train.tsv", 400, 1), written(folder / "dev.jsonl", 200, 2)
    return lesson("sentiment", folder, data, dev, *SMALL)


def test_negated_texts_are_classified(learned: Lesson) -> None:
    """Without "not" a half would be right."""
    assert learned.before < 65.0
    assert learned.after > 90.0


def test_an_answer_has_label_and_probability(learned: Lesson) -> None:
    task, model, _ = learned.trained
    texts = ["The film is BRILLIANT", "the film is not brilliant"]
    said = task.answer(model, [task.parse_input(text) for text in texts])
    assert [each.split(" (")[0] for each in said] == ["good", "bad"]


def test_the_record_has_the_class_token_before_the_words(learned: Lesson) -> None:
    task, model, _ = learned.trained
    record = task.record_attention(model, task.parse_input("a dull story"))
    labels = record.labels["input"]
    assert [text.strip() for text in labels.texts[0]] == ["<class>", "a", "dull", "story"]
    assert record["L0H1"].shape == (1, 4, 4)
    assert (record.answer or "").startswith("bad (")


def test_every_view_follows_the_class_token(learned: Lesson, capsys: pytest.CaptureFixture[str]) -> None:
    task, model, _ = learned.trained
    record = task.record_attention(model, task.parse_input("this is not good"))
    assert select_default_query(record, select_default_head(record)) == 0
    record.show()
    assert "Attention of “<class>”" in capsys.readouterr().out


def test_answers_keep_the_order_of_the_texts(learned: Lesson, monkeypatch: pytest.MonkeyPatch) -> None:
    task, model, _ = learned.trained
    with torch.no_grad():
        together = task.decode(model, learned.dev[:20])
        monkeypatch.setattr("foci.tasks.sentiment.TOKENS_PER_BATCH", 1)
        alone = task.decode(model, learned.dev[:20])
    assert [each.label for each in together] == [each.label for each in alone]


def test_a_long_text_is_cut_in_the_middle() -> None:
    settings = SentimentSettings(max_length=4)
    task = Sentiment.from_examples(settings, [LabelledText("a b c d e f", "x"), LabelledText("a", "y")])
    assert task.tokenizer.decode(task.tokens(LabelledText("a b c d e f"))) == "a b e f"
    batch = task.batch([LabelledText("a b c d e f", "x")], False, torch.Generator())
    assert batch["tokens"].shape == (1, 4)


def test_tokens_are_hidden_only_in_training() -> None:
    settings = SentimentSettings(forget=0.5)
    texts = [LabelledText("a b c d e f g h", "x"), LabelledText("h g f e d c b a", "y")]
    task = Sentiment.from_examples(settings, texts)
    read = task.batch(texts, False, torch.Generator())["tokens"]
    thinned = task.batch(texts, True, torch.Generator().manual_seed(1))["tokens"]
    assert 0 < int((read != thinned).sum()) < read.numel()
    assert bool((thinned[read != thinned] == 3).all())


def test_all_problems_are_reported_line_by_line(tmp_path: Path) -> None:
    table = tmp_path / "table.tsv"
    table.write_text("fine\tgood\nno label\n\tbad\nfine\tbad\n")
    found = [str(each) for each in Sentiment.check([table], SentimentSettings())]
    assert len(found) == 3
    assert "table.tsv:2: error: a line must have 2 tab-separated columns (text, label)" in found[0]
    assert "table.tsv:3: error: text must not be empty" in found[1]
    assert "table.tsv:4: warning: the same text has another label at" in found[2]
    with pytest.raises(ValueError, match=r"table.tsv:2: a line must have 2 tab-separated columns"):
        Sentiment.read([table], SentimentSettings())
    table.write_text("fine\tgood\n")
    assert ["at least 2 classes" in str(each) for each in Sentiment.check([table], SentimentSettings())] == [True]


def test_an_unknown_label_is_refused(learned: Lesson) -> None:
    with pytest.raises(ValueError, match="the label of 'a dog' must be one of bad, good, got 'odd'"):
        learned.trained.task.batch([LabelledText("a dog", "odd")], False, torch.Generator())


def test_an_untrained_model_starts_from_naive_bayes(tmp_path: Path) -> None:
    settings = SentimentSettings(prior=True, grams=1)
    train = [
        LabelledText("good film", "plus"),
        LabelledText("good good story", "plus"),
        LabelledText("bad film", "minus"),
    ]
    task = Sentiment.from_examples(settings, train)
    again = Sentiment.from_learned_state(settings, task.learned_state())
    with torch.no_grad():
        said = again.decode(
            again.model().eval(), [LabelledText("a good story"), LabelledText("bad"), LabelledText("film")]
        )
    assert [each.label for each in said] == ["plus", "minus", "minus"]
    # In plus 2 texts have "good" among 4 different words, in minus none among 2; and each of 8 tokens once more.
    row = torch.tensor(task.prior)[task.tokenizer.encode("good")[0]]
    counts = torch.tensor([1 / (2 + 8), 3 / (4 + 8)]).log()
    assert torch.allclose(row, counts - counts.mean(), atol=1e-3)


def test_disagreeing_passes_have_a_higher_loss() -> None:
    examples = [LabelledText("a b c d", "x"), LabelledText("d c b a", "y")]
    losses = []
    for agreement in (1e-9, 50.0):
        settings = SentimentSettings(dropout=0.5, agreement=agreement, forget=0.0)
        task = Sentiment.from_examples(settings, examples)
        torch.manual_seed(1)
        model = task.model().train()
        torch.nn.init.normal_(model.get_parameter("head.weight"))
        torch.manual_seed(2)
        losses.append(task.loss(model, task.batch(examples, True, torch.Generator()))[0].item())
    assert losses[1] > losses[0] + 0.1
